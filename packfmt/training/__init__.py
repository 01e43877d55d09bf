"""Datasets, loader, collate and batch transforms. The only layer that imports torch."""
