"""A folder of files appears under its final name whole or not at all, as ``publish`` does it for one file."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from packfmt.storage.publish import SUFFIX, fsync_folder, lock, refuse_existing, temporary_name

__all__ = ["PendingFolder"]

ASIDE = ".old"  # before the suffix: what is being replaced, where two names cannot be exchanged
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class PendingFolder:
    """A folder being written that nobody sees under its final name until ``publish``.

    Where the system can exchange two names (Linux), an existing pack is replaced in one step. Elsewhere a crash between
    two renames leaves nothing under the name.

    Args:
        path: the final name. Its folder must exist.
        force: replace an existing file, or a folder that holds no files but ``names``.
        names: the files that are going to be in the folder.

    Raises:
        FileExistsError: the target exists and ``force`` is off, or it holds other files.
        OSError: the parent folder is missing or read-only.
    """

    def __init__(self, path: Path, *, force: bool = False, names: Collection[str]) -> None:
        self.path = path
        self.force = force
        self._names = names
        self._refuse()
        _remove_leftovers(path)
        self.temporary, self._descriptor = _create_locked(path)

    def finish(self) -> None:
        """Write everything to the disk. Raises OSError where the disk refuses."""
        for name in sorted(os.listdir(self.temporary)):
            with open(self.temporary / name, "rb+") as file:
                os.fsync(file.fileno())
        fsync_folder(self.temporary)

    def publish(self) -> None:
        """Give the finished folder its final name; durable when this returns.

        Raises:
            FileExistsError: the target appeared meanwhile and ``force`` is off, or other files appeared in it.
            OSError: the disk refuses.
        """
        self._refuse()
        if not os.path.lexists(self.path):
            # If something appears in this moment, the rename fails: a folder replaces nothing but an empty folder.
            os.rename(self.temporary, self.path)
        elif not _exchange(self.temporary, self.path):
            _step_aside(self.temporary, self.path)
        fsync_folder(self.path.parent)
        self.discard()

    def discard(self) -> None:
        """Remove what is under the temporary name: the folder, or once published what it replaced."""
        _remove(self.temporary)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _refuse(self) -> None:
        if not self.force:
            refuse_existing(self.path)
        elif self.path.is_dir():
            for name in sorted(set(os.listdir(self.path)) - set(self._names)):
                raise FileExistsError(errno.EEXIST, f"is no pack to overwrite: it holds {name!r}", str(self.path))


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step. False where that cannot be done here."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if swap is None:
        return False
    if swap(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _step_aside(temporary: Path, path: Path) -> None:
    """Swap two names one after the other. What was there gets its name back if the new one cannot have it."""
    aside = temporary.with_name(temporary.name.removesuffix(SUFFIX) + ASIDE + SUFFIX)
    os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        os.rename(aside, path)
        raise
    os.rename(aside, temporary)


def _create_locked(path: Path) -> tuple[Path, int | None]:
    while True:
        temporary = path.parent / f"{temporary_name(path, secrets.token_hex(8))}{SUFFIX}"
        try:
            os.mkdir(temporary)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such folder to write to", str(path.parent)) from None
        except OSError as error:
            raise type(error)(error.errno, f"cannot write here: {error.strerror}", str(path.parent)) from None
        descriptor = _open_folder(temporary)
        locked = None if descriptor is None else lock(descriptor)
        if locked is not False and os.path.lexists(temporary):
            return temporary, descriptor
        if descriptor is not None:  # another writer took it for a leftover in the moment before the lock
            os.close(descriptor)
        _remove(temporary)


def _remove_leftovers(path: Path) -> None:
    """Remove the folders that killed writers of this target left behind."""
    with suppress(OSError):  # creating the folder says it better
        for name in os.listdir(path.parent):
            if name.startswith(temporary_name(path, "")) and name.endswith(SUFFIX):
                _remove_if_dead(path.parent / name)


def _remove_if_dead(leftover: Path) -> None:
    descriptor = _open_folder(leftover)
    if descriptor is None:
        return
    try:
        if lock(descriptor):
            _remove(leftover)
    finally:
        os.close(descriptor)


def _open_folder(path: Path) -> int | None:
    """A descriptor of a folder; None where it is none, or the system has no such descriptors."""
    if not hasattr(os, "O_DIRECTORY"):
        return None
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
