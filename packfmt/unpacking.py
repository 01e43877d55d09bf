"""The tree back: one file per record, byte for byte, and never a file outside the target folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packfmt import storage
from packfmt.errors import ConvertError
from packfmt.storage import Reader
from packfmt.storage.base import Buffer
from packfmt.storage.folders import PendingFolder

__all__ = ["PendingTree", "UnpackReport", "is_safe_key", "refuse_taken", "unpack", "write_tree"]

# Names that Windows gives to devices, with any suffix.
DEVICES = {"con", "prn", "aux", "nul", *(f"{name}{digit}" for name in ("com", "lpt") for digit in "123456789")}
LISTED = 20


@dataclass(frozen=True, slots=True)
class UnpackReport:
    """What ``unpack`` wrote: the folder, how many files, and their bytes."""

    path: str
    records: int
    bytes: int


def unpack(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    progress: Callable[[int, int, int | None], None] | None = None,
) -> UnpackReport:
    """Write every record of a pack to a file named by its key.

    The tree is made in a temporary folder beside the target and renamed when whole, so that the target is complete or
    absent, and no link that waits there is followed.

    Args:
        path: as ``packfmt.open`` takes it.
        folder: a folder that does not exist yet, or is empty; not the working directory, nor a mount point.
        progress: called with files written, their bytes, and files in all.

    Raises:
        FileExistsError: the folder holds something.
        ConvertError: a key would lead out of the folder, is no file name, or takes another's place.
        CorruptError: a record is damaged.
        OSError: the disk refuses.
    """
    with storage.open(path) as reader:
        return write_tree(reader, Path(folder), progress)


def write_tree(
    reader: Reader, target: Path, progress: Callable[[int, int, int | None], None] | None = None
) -> UnpackReport:
    """As ``unpack``, from an open reader."""
    refuse_taken(target)
    _refuse_keys(reader)
    tree = PendingTree(target)
    size = 0
    try:
        for index, record in enumerate(reader):
            tree.write(record.key, record.data)
            size += len(record.data)
            if progress is not None:
                progress(index + 1, size, len(reader))
        tree.publish(reader.classes)
    except BaseException:
        tree.discard()
        raise
    return UnpackReport(str(target), len(reader), size)


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


def _refuse_keys(reader: Reader) -> None:
    bad = [key for key in (reader.key(i) for i in range(len(reader))) if not is_safe_key(key)]
    if bad:
        more = f" and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
        raise ConvertError(
            f"{reader.path}: these keys are no file names inside a folder: {bad[:LISTED]}{more}. Nothing was written; "
            "packfmt cat writes single records"
        )
