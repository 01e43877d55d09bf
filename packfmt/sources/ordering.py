"""The order in which people number things."""

from __future__ import annotations

import re

__all__ = ["natural"]


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which ``demo_2`` comes before ``demo_10``."""
    parts = re.split(r"(\d{1,18})", text)
    return [(0, int(part), part) if part.isascii() and part.isdigit() else (1, 0, part) for part in parts]
