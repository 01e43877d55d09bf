"""The tree back: one file per record, byte for byte, and never a file outside the target folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packfmt import storage
from packfmt.errors import ConvertError
from packfmt.storage import Reader
from packfmt.storage.folders import PendingTree, is_safe_key, refuse_taken

__all__ = ["UnpackReport", "unpack", "write_tree"]

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


def _refuse_keys(reader: Reader) -> None:
    bad = [key for key in (reader.key(i) for i in range(len(reader))) if not is_safe_key(key)]
    if bad:
        more = f" and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
        raise ConvertError(
            f"{reader.path}: these keys are no file names inside a folder: {bad[:LISTED]}{more}. Nothing was written; "
            "packfmt cat writes single records"
        )
