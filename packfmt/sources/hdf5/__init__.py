"""HDF5 files of images: stacks of pixels, rows of encoded images, or one dataset per image."""
