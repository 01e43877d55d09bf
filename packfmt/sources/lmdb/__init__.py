"""LMDB databases of images as other projects write them. Read in an isolated child process."""
