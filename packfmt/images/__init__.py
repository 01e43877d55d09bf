"""Encoded images: header sniffing, decoders, crop geometry, encoding. Knows nothing of datasets, threads or files."""
