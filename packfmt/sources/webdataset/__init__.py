"""WebDataset shards and other tar archives of images."""
