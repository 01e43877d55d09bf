"""The tree back: one file per record, byte for byte, and never a file outside the target folder."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packfmt import storage
from packfmt.errors import ConvertError
from packfmt.storage import Reader
from packfmt.storage.publish import fsync_folder

__all__ = ["UnpackReport", "unpack", "write_tree"]

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
        folder: a folder that does not exist yet, or is empty.
        progress: called with files written, their bytes, and files in all.

    Raises:
        FileExistsError: the folder holds something.
        ConvertError: a key would lead out of the folder, or is no file name.
        CorruptError: a record is damaged.
        OSError: the disk refuses.
    """
    with storage.open(path) as reader:
        return write_tree(reader, Path(folder), progress)


def write_tree(
    reader: Reader, target: Path, progress: Callable[[int, int, int | None], None] | None = None
) -> UnpackReport:
    """As ``unpack``, from an open reader."""
    if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "exists and is not an empty folder; name a new one", str(target))
    _refuse_keys(reader)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder to write to", str(target.parent))
    temporary = Path(tempfile.mkdtemp(prefix=".packfmt-", suffix=".tmp", dir=target.parent))
    size = 0
    try:
        for name in reader.classes:
            if is_safe_key(name) and "/" not in name:
                _local(temporary, name).mkdir(exist_ok=True)  # a class without images comes back as an empty folder
        for index, record in enumerate(reader):
            _write_file(temporary, record.key, record.data)
            size += len(record.data)
            if progress is not None:
                progress(index + 1, size, len(reader))
        temporary.chmod(0o777 & ~_umask())
        os.rename(temporary, target)
        fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return UnpackReport(str(target), len(reader), size)


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


def _write_file(root: Path, key: str, data: bytes | memoryview) -> None:
    path = _local(root, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(data)


def _local(root: Path, key: str) -> Path:
    """A key's path: the bytes that the key stands for, whatever the locale's encoding."""
    return root / os.fsdecode(key.encode("utf-8", "surrogateescape"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
