"""Paths that come out of a table or an annotation file: untrusted text that may only name files inside one folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from packfmt.errors import SourceError

__all__ = ["inside_key", "read_inside", "resolve_inside"]


def resolve_inside(root: str | os.PathLike[str], relative: str) -> Path:
    """The real path of ``relative`` under ``root``, symbolic links followed.

    An absolute path is accepted where it lies inside ``root``. The file need not exist. Thread-safe.

    Raises:
        SourceError: the path is empty, no file name can hold it, or it leaves ``root`` (by "..", by an absolute
            path, or by a symbolic link).
    """
    _check_text(relative)
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, relative))
    if not _is_inside(real, real_root):
        raise SourceError(
            f"{relative!r} leads outside {os.fspath(root)}; only files inside it are read. Copy the file there, or "
            "give a "
            "root folder that holds all of them"
        )
    return Path(real)


def inside_key(root: str | os.PathLike[str], relative: str) -> str:
    """The key of ``relative``: its path below ``root`` with "/" between parts, "." and ".." folded away.

    The path is taken as written: a symbolic link keeps its own name. Looks at no file.

    Raises:
        SourceError: the path is empty, no file name can hold it, or it is written as lying outside ``root``.
    """
    _check_text(relative)
    base = os.path.abspath(root)
    full = os.path.normpath(os.path.join(base, relative))
    if not _is_inside(full, base):
        base = os.path.realpath(root)
        full = os.path.normpath(os.path.join(base, relative))
    if full == base or not _is_inside(full, base):
        raise SourceError(f"{relative!r} is not inside {os.fspath(root)}; only files inside it are read")
    return os.path.relpath(full, base).replace(os.sep, "/")


def read_inside(root: str | os.PathLike[str], relative: str, limit: int) -> bytes:
    """The bytes of the regular file ``relative`` inside ``root``, at most ``limit`` of them. Thread-safe.

    Raises:
        SourceError: the path leaves ``root``, is no regular file (a pipe would block for ever), or is larger than
        ``limit``. OSError: the file is missing or unreadable.
    """
    path = resolve_inside(root, relative)
    # O_NONBLOCK: opening a pipe that took the file's place must not wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise SourceError(f"{path} is no regular file; only regular files are read")
        if facts.st_size > limit:
            raise SourceError(f"{path} has {facts.st_size} bytes; at most {limit} are read")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SourceError(f"{path} grew beyond {limit} bytes while it was read")
    return data


def _check_text(relative: str) -> None:
    if not relative:
        raise SourceError("an empty path names no file")
    try:
        encoded = os.fsencode(relative)
    except UnicodeEncodeError:
        raise SourceError(f"{relative!r} holds characters that no file name can hold") from None
    if b"\0" in encoded:
        raise SourceError(f"{relative!r} holds a NUL, which no file name can hold")


def _is_inside(path: str, root: str) -> bool:
    try:
        return os.path.commonpath([path, root]) == root
    except ValueError:  # different drives
        return False
