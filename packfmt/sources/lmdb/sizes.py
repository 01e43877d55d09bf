"""The sizes of a database's images: as their headers say, and as BasicSR's ``meta_info.txt`` states."""

from __future__ import annotations

import os
import re

from packfmt.errors import DecodeError
from packfmt.images.sniff import sniff
from packfmt.sources.lmdb.table import key_text

__all__ = ["differs", "shape_of", "stated_sizes"]

_MAX_META_INFO = 1_000_000  # lines of a meta_info.txt that are checked


def differs(stated: tuple[int, int, int] | None, seen: tuple[int, int, int] | None) -> bool:
    return stated is not None and seen is not None and stated != seen


def shape_of(value: memoryview) -> tuple[int, int, int] | None:
    """(height, width, channels) as an image's header says, or None where it is damaged."""
    try:
        info = sniff(value)
    except DecodeError:
        return None
    return info.height, info.width, info.channels


def stated_sizes(path: str, notes: list[str]) -> dict[str, tuple[int, int, int]]:
    """The sizes that a meta_info.txt states, by key: lines as ``name.png (720,1280,3) 1``."""
    sizes: dict[str, tuple[int, int, int]] = {}
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(4096), b""):
            match = re.fullmatch(rb"(.+)\s\((\d{1,9}),\s?(\d{1,9})(?:,\s?(\d))?\)\s\S+\s*", line)
            if match is None:
                continue
            if len(sizes) >= _MAX_META_INFO:
                notes.append(f"only the first {_MAX_META_INFO} lines of meta_info.txt were compared")
                break
            name = key_text(os.path.splitext(match[1])[0])
            sizes[name] = (int(match[2]), int(match[3]), int(match[4] or 1))
    return sizes
