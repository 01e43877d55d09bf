"""A pack as a source: how one pack is copied into another of whatever kind."""

from __future__ import annotations

import glob
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from packfmt import storage
from packfmt.errors import CorruptError, DecodeError
from packfmt.format import MAGIC
from packfmt.record import OWN_COLUMNS, Column, Record
from packfmt.sources.base import Source
from packfmt.sources.inputs import Inputs
from packfmt.storage.lmdb import PREFIX
from packfmt.storage.lmdb_environment import META, data_file, is_environment
from packfmt.storage.manifest import MANIFEST

__all__ = ["PackSource", "recognise"]

_HEAD = 4096
_PAGE = struct.Struct("<8x2xHHH")  # of LMDB: flags, end of the pointers, start of the nodes
_NODE = struct.Struct("<HHHH")  # two halves of a size or page number, flags or the rest of that number, key size
_BRANCH, _LEAF = 1, 2
_DEPTH = 32


def recognise(path: Inputs) -> str | None:
    """"pack" for a shard, a manifest, a pack in LMDB, or several shards; None for anything else.

    A damaged pack is one too, so that opening it says what is wrong. Nothing is parsed by a C library.
    """
    try:
        if not isinstance(path, (str, os.PathLike)):
            return "pack" if path and all(_is_shard(os.fspath(part)) for part in path) else None
        name = os.fspath(path)
        if not os.path.lexists(name) and glob.has_magic(name):
            matches = sorted(glob.glob(name))
            return "pack" if matches and all(map(_is_shard, matches)) else None
        if is_environment(name):
            return "pack" if _last_key(data_file(name)).startswith(PREFIX) else None
        return "pack" if _is_shard(name) or (name.endswith(".json") and _is_manifest(name)) else None
    except OSError:
        return None


class PackSource(Source):
    """The records of a pack, with their columns.

    Args:
        path: as ``packfmt.open`` takes it.

    Raises:
        FormatError, OSError: as ``packfmt.open``.
    """

    kind = "pack"
    random_access = True

    def __init__(self, path: Inputs) -> None:
        super().__init__()
        self._reader = storage.open(path)
        self.classes = self._reader.classes
        self.metadata = dict(self._reader.metadata)
        self.columns = tuple(
            _described(name, self._reader.columns[name]) for name in self._reader.columns if name not in OWN_COLUMNS
        )

    def entries(self) -> Iterator[int]:
        return iter(range(len(self._reader)))

    def load(self, entry: Any) -> Record:
        try:
            (data,) = self._reader.read((entry,))
        except CorruptError as error:
            raise DecodeError(error.message, path=error.path, index=error.index, key=error.key) from error
        values = {column.name: self._reader.columns[column.name][entry] for column in self.columns}
        return Record(data, self._reader.key(entry), values)

    def size(self, entry: Any) -> int:
        return int(self._reader.lengths((entry,))[0])

    def count(self) -> int | None:
        return len(self._reader)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"layout": "LMDB" if self._reader.io == "lmdb" else "shards"}

    def close(self) -> None:
        self._reader.close()


def _described(name: str, column: Any) -> Column:
    if isinstance(column, np.ndarray):
        return Column(name, column.dtype.str, column.shape[1:])
    described: Column = column.column
    return described


def _is_shard(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _is_manifest(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return f'"{MANIFEST}"'.encode() in file.read(_HEAD)


def _last_key(path: str) -> bytes:
    """The last key of an LMDB file's main table, or b"" where the file cannot be followed that far.

    Walked by hand: whoever is asked what a file is must not have LMDB believe it first. Pages are as lmdb.h of LMDB 0.9
    lays them out.
    """
    with open(path, "rb") as file:
        heads = [META.unpack(file.read(META.size).ljust(META.size, b"\0"))]
        size = heads[0][2]
        if not 512 <= size <= 1 << 16:
            return b""
        file.seek(size)
        heads.append(META.unpack(file.read(META.size).ljust(META.size, b"\0")))
        number = max(heads, key=lambda head: head[-1])[10]
        for _ in range(_DEPTH):
            if number * size >= os.fstat(file.fileno()).st_size:
                return b""
            file.seek(number * size)
            page = file.read(size)
            node = _last_node(page)
            if node is None:
                return b""
            flags, place = node
            low, high, top, key_size = _NODE.unpack_from(page, place)
            if flags & _LEAF:
                return page[place + _NODE.size : place + _NODE.size + key_size]
            number = low | high << 16 | top << 32
    return b""


def _last_node(page: bytes) -> tuple[int, int] | None:
    """A page's flags and where its last node begins; None where it holds none."""
    if len(page) < 16 + _NODE.size:
        return None
    flags, lower, _ = _PAGE.unpack_from(page)
    if not flags & (_BRANCH | _LEAF) or not 18 <= lower <= len(page):
        return None
    place = int.from_bytes(page[lower - 2 : lower], "little")
    return (flags, place) if place + _NODE.size <= len(page) else None
