"""The way back: what other tools read, written through the same Writer interface as a pack."""
