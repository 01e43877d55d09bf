"""A file appears under its final name whole or not at all.

Temporary file in the target's folder, write, fsync, rename, fsync the folder. The temporary file is locked while its
writer lives, so that the next writer of the same target can tell a dead writer's leftover from a living one's work.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash

try:
    import fcntl
except ImportError:  # Windows: leftovers of killed writers are not told from living ones there, and stay
    fcntl = None  # type: ignore[assignment]

__all__ = ["PendingFile", "fsync_folder", "refuse_existing"]

BUFFER = 1 << 20  # bytes gathered before a write: one system call for many small records


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if the target is there."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "exists; choose another name or force overwriting (--force)", str(path))


class PendingFile:
    """A file being written that nobody sees under its final name until ``publish``.

    Args:
        path: the final name. Its folder must exist.
        force: replace an existing file when publishing; otherwise it is refused now and again then.

    Raises:
        FileExistsError: the target exists and ``force`` is off.
        OSError: the folder is missing or read-only.
    """

    def __init__(self, path: Path, *, force: bool = False) -> None:
        self.path = path
        self.force = force
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder; name a file to write", str(path))
        if not force:
            refuse_existing(path)
        _remove_leftovers(path)
        self.temporary, descriptor = _create_locked(path)
        self.stream: IO[bytes] = open(descriptor, "wb", buffering=BUFFER)  # noqa: SIM115 (closed by publish or discard)

    def finish(self) -> None:
        """Write everything to the disk. Raises OSError where the disk refuses."""
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def publish(self) -> None:
        """Give the finished file its final name; durable when this returns.

        Raises:
            FileExistsError: the target appeared meanwhile and ``force`` is off.
        """
        self.finish()
        if self.force:
            os.replace(self.temporary, self.path)
        else:
            _link(self.temporary, self.path)
        self.stream.close()
        fsync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file. Allowed at any time, also after ``publish``, then without effect."""
        with suppress(OSError):  # a full disk makes the last flush fail; the file goes away anyway
            self.stream.close()
        with suppress(FileNotFoundError):
            os.unlink(self.temporary)


def _link(temporary: Path, path: Path) -> None:
    """Rename without replacing. A hard link is the one portable call that refuses an existing target atomically."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        refuse_existing(path)
        raise
    except OSError:  # a file system without hard links: a small window is left between check and rename
        refuse_existing(path)
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def fsync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stem(path: Path) -> str:
    return f".packfmt-{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}-"


def _create_locked(path: Path) -> tuple[Path, int]:
    while True:
        temporary = path.parent / f"{_stem(path)}{secrets.token_hex(8)}.tmp"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(temporary, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such folder to write to", str(path.parent)) from None
        except OSError as error:
            raise type(error)(error.errno, f"cannot write here: {error.strerror}", str(path.parent)) from None
        if not _lock(descriptor) or os.path.lexists(temporary):
            return temporary, descriptor
        os.close(descriptor)  # another writer took it for a leftover in the moment before the lock


def _remove_leftovers(path: Path) -> None:
    for temporary in _leftovers(path):
        try:
            descriptor = os.open(temporary, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            continue
        try:
            if _lock(descriptor):
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
        finally:
            os.close(descriptor)


def _leftovers(path: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(_stem(path)) and entry.name.endswith(".tmp"):
                yield Path(entry.path)


def _lock(descriptor: int) -> bool:
    """Take the writer's lock; False where another process holds it or the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
