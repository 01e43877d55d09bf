"""Names with wildcards. A folder that is there stands for itself, whatever its name holds: ``[1]``, ``{a,b}``."""

from __future__ import annotations

import glob
import os

__all__ = ["is_pattern", "matching_files", "split_pattern"]


def split_pattern(path: str) -> tuple[str, str]:
    """The longest leading part of a path that is a folder on the disk, and the rest, which may be a pattern."""
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder):
        above = os.path.dirname(folder)
        if above == folder:
            break
        folder = above
    return folder, path[len(folder) :]


def is_pattern(path: str) -> bool:
    """Whether a path stands for the files that match it: it has wildcards, and nothing has that very name."""
    return glob.has_magic(path) and not os.path.lexists(path) and glob.has_magic(split_pattern(path)[1])


def matching_files(pattern: str) -> list[str]:
    """The files that match a pattern, sorted."""
    folder, rest = split_pattern(pattern)
    return sorted(glob.glob(glob.escape(folder) + rest))
