"""Where records live: mapped shards, LMDB, and a set of shards opened as one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from packfmt.errors import FormatError
from packfmt.record import Column
from packfmt.storage.base import Reader, Verify, Writer
from packfmt.storage.fileio import IO
from packfmt.storage.lmdb import LMDBReader, is_environment
from packfmt.storage.lmdb_writer import LMDBWriter
from packfmt.storage.patterns import is_pattern
from packfmt.storage.set_writer import ShardedWriter
from packfmt.storage.shard import MappedReader
from packfmt.storage.shard_set import ShardedReader
from packfmt.storage.shard_writer import ShardWriter

__all__ = ["Reader", "Writer", "create", "open"]

PathLike = str | os.PathLike[str]


def open(
    path: PathLike | Sequence[PathLike],
    *,
    io: IO = "auto",
    verify: Verify = True,
    check: Literal["quick", "full"] = "quick",
) -> Reader:
    """Open a pack for reading.

    Args:
        path: a shard, a manifest (``out.json``), a glob pattern, a list of shards and manifests, or an LMDB environment
            (a folder with ``data.mdb``, or such a file). Shards of a set are opened as one if all of them are named,
            and no other set's; the manifests of several sets can be listed.
        io: "mmap"; "pread", for network file systems; "auto" chooses by the file system.
        verify: check each record's checksum when it is read (True); "once", when it is first read while the pack is
            open, which spares the time afterwards but not a bit that turns in between; False, never.
        check: "quick" checks header, directory and trailer, in constant time; "full" checks every byte.

    Raises:
        FormatError: not a pack, of an unknown version, truncated, damaged, or a part of a set of shards.
        CorruptError: with ``check="full"``, the first damaged record or column.
        FileNotFoundError: the file, a shard of the manifest, or any match of the pattern is missing.
    """
    if not isinstance(path, (str, os.PathLike)):
        return ShardedReader([os.fspath(p) for p in path], io=io, verify=verify, check=check)
    name = os.fspath(path)
    if is_environment(name):
        return LMDBReader(name, io=io, verify=verify, check=check)
    if os.path.isdir(name):
        raise FormatError(f"{name}: a folder, not a pack. To pack it: packfmt pack {name} {name.rstrip('/')}.bin")
    if name.endswith(".json") or is_pattern(name):
        return ShardedReader(name, io=io, verify=verify, check=check)
    return MappedReader(name, io=io, verify=verify, check=check)


def create(
    path: PathLike,
    *,
    columns: Sequence[Column] = (),
    classes: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    shard_size: int | None = None,
    force: bool = False,
    backend: Literal["shard", "lmdb"] | None = None,
) -> Writer:
    """Start a new pack.

    Args:
        path: the file to write; with ``shard_size`` the manifest's name.
        columns: columns whose type is not to be inferred from the records, see ``Writer.write``.
        classes: class names that the column ``label`` counts; labels may then be given by name.
        metadata: JSON-able facts to keep.
        shard_size: bytes of records per shard; None writes one file.
        force: replace what is there.
        backend: "shard" or "lmdb"; None goes by the name: ``.lmdb`` is LMDB.

    Raises:
        FileExistsError: the target exists and ``force`` is off.
        OSError: the folder cannot be written to.
        ValueError: a single file named as a manifest, or an option that cannot be stored.
    """
    if backend not in (None, "shard", "lmdb"):
        raise ValueError(f"backend={backend!r}, allowed are 'shard', 'lmdb' and None")
    options: dict[str, Any] = {"columns": columns, "classes": classes, "metadata": metadata, "force": force}
    if backend == "lmdb" or (backend is None and os.fspath(path).rstrip("/").endswith(".lmdb")):
        if shard_size is not None:
            raise ValueError(f"{os.fspath(path)}: LMDB has no shards; leave out shard_size, or choose backend='shard'")
        return LMDBWriter(path, **options)
    if shard_size is not None:
        return ShardedWriter(path, shard_size=shard_size, **options)
    if os.fspath(path).endswith(".json"):
        raise ValueError(f"{os.fspath(path)}: is the name of a manifest; give shard_size, or a name like out.bin")
    return ShardWriter(path, **options)
