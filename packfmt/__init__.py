"""packfmt: pack small images into memory-mapped shards and feed PyTorch training from them."""

__version__ = "0.1.0"
