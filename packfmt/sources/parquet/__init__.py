"""Parquet files with encoded images in a column, as Hugging Face's ``datasets`` reads and writes them."""
