"""A folder of files appears under its final name whole or not at all, as ``publish`` does it for one file."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packfmt.errors import ConvertError
from packfmt.storage.atomic import fsync_folder, refuse_existing
from packfmt.storage.base import Buffer
from packfmt.storage.leftovers import create_folder, remove, remove_leftovers, temporary_path

__all__ = ["PendingFolder", "PendingTree", "is_safe_key", "refuse_taken", "temporary_folder"]

HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
# Names that Windows gives to devices, with any suffix.
DEVICES = {"con", "prn", "aux", "nul", *(f"{name}{digit}" for name in ("com", "lpt") for digit in "123456789")}
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
        remove_leftovers(path)
        self._refuse()
        self.temporary, self._descriptor = create_folder(path)

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
        own, replaced = os.stat(self.temporary), os.path.lexists(self.path)
        try:
            if not replaced:
                # If something appears in this moment, the rename fails: a folder replaces nothing but an empty folder.
                os.rename(self.temporary, self.path)
            else:
                _swap(self.temporary, self.path)
            fsync_folder(self.path.parent)
        except BaseException:
            if os.path.lexists(self.path) and os.path.samestat(os.lstat(self.path), own):
                if replaced:
                    _swap(self.temporary, self.path)
                else:
                    os.rename(self.path, self.temporary)
            raise
        self.discard()

    def discard(self) -> None:
        """Remove what is under the temporary name: the folder, or once published what it replaced."""
        remove(self.temporary)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _refuse(self) -> None:
        if not self.force:
            refuse_existing(self.path)
        elif self.path.is_dir():
            for name in sorted(set(os.listdir(self.path)) - set(self._names)):
                raise FileExistsError(errno.EEXIST, f"is no pack to overwrite: it holds {name!r}", str(self.path))


def _swap(temporary: Path, path: Path) -> None:
    if not _exchange(temporary, path):
        _step_aside(temporary, path)


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
    aside = temporary_path(path)
    try:
        os.rename(path, aside)
        os.rename(temporary, path)
        os.rename(aside, temporary)
    except BaseException:
        if os.path.lexists(aside):
            if not os.path.lexists(temporary):
                os.rename(path, temporary)
            os.rename(aside, path)
        raise


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A folder beside this target for what its writer needs meanwhile; the target's next writer removes a dead one's.

    Raises:
        OSError: the parent folder is missing or read-only.
    """
    folder, descriptor = create_folder(path)
    try:
        yield folder
    finally:
        remove(folder)
        if descriptor is not None:
            os.close(descriptor)


class PendingTree:
    """A folder of files named by keys, which gets its name when all are there.

    Args:
        path: a folder that does not exist, or is empty.

    Raises:
        FileExistsError: the folder holds something.
        OSError: the folder above it is missing or read-only, or this one cannot be replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        refuse_taken(path)
        self._path = os.fspath(path)
        self._folder = PendingFolder(Path(os.path.abspath(path)), force=True, names=())

    def write(self, key: str, data: Buffer) -> None:
        """Write a file. The key must be safe, see ``is_safe_key``.

        Raises:
            ConvertError: another record's file or folder has this place.
            OSError: the disk refuses.
        """
        path = self._place(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise ConvertError(
                f"{self._path}: another record takes the place of {key!r} (same name, or one that differs in case only "
                "where the file system does not tell those apart); rename one"
            ) from error
        except OSError as error:
            raise self._renamed(error, path) from error

    def publish(self, classes: Iterable[str] = ()) -> None:
        """Give the folder its name. Every class has a folder in it, so that one without images comes back too."""
        for name in classes:
            if is_safe_key(name) and "/" not in name and not self._place(name).is_dir():
                try:
                    self._place(name).mkdir()
                except FileExistsError as error:
                    raise ConvertError(
                        f"{self._path}: a record takes the place of the class folder {name!r}; rename one"
                    ) from error
                except OSError as error:
                    raise self._renamed(error, self._place(name)) from error
        refuse_taken(self._path)
        self._folder.publish()

    def discard(self) -> None:
        """Remove what was written."""
        self._folder.discard()

    def _place(self, key: str) -> Path:
        """A key's path: the bytes that the key stands for, whatever the locale's encoding."""
        return self._folder.temporary / os.fsdecode(key.encode("utf-8", "surrogateescape"))

    def _renamed(self, error: OSError, path: Path) -> OSError:
        """The error with the file's final name: the temporary one is gone when it is read."""
        name = os.path.join(self._path, path.relative_to(self._folder.temporary))
        return OSError(error.errno, error.strerror, name)


def refuse_taken(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a tree can get this name: that of nothing, or of an empty folder."""
    target = Path(os.path.abspath(path))
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir() or any(target.iterdir()):
        raise FileExistsError(errno.EEXIST, "exists and is not an empty folder; name a new one", os.fspath(path))
    # The finished tree replaces the folder, and these cannot be: a shell would be left in a folder that is gone.
    for found, what in (
        (os.path.samefile(target, "."), "the working directory"),
        (os.path.ismount(target), "a mount point"),
    ):
        if found:
            raise OSError(errno.EBUSY, f"is {what}, which is not replaced; name a new folder in it", str(target))


def is_safe_key(key: str) -> bool:
    """Whether a key names a file inside a folder, on every system: relative, no "..", no drive, no device, no NUL."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        return False
    if os.name == "nt":
        return not any(
            set(part) & set('\\:*?"<>|') or part[-1] in ". " or part.split(".")[0].lower() in DEVICES for part in parts
        )
    return True
