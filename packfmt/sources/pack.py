"""A pack as a source: how one pack is copied into another of whatever kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from packfmt import storage
from packfmt.errors import CorruptError, DecodeError, FormatError
from packfmt.format import MAGIC
from packfmt.lmdb_pages import Tree, decode_head
from packfmt.record import IMAGE_COLUMNS, KEY, Record
from packfmt.sources.base import Source
from packfmt.sources.inputs import Inputs, Probe, free_name, head_of
from packfmt.storage.fileio import open_bytes
from packfmt.storage.lmdb import data_file, is_environment, is_pack_key
from packfmt.storage.patterns import is_pattern, matching_files
from packfmt.storage.shard_set import MANIFEST

__all__ = ["PackSource", "recognise"]

_HEAD = 4096


def recognise(probe: Probe) -> bool:
    """Whether it is a shard, a manifest, a pack in LMDB, or several shards.

    A damaged pack is one too, so that opening it says what is wrong, and so is an LMDB file that is too damaged to tell
    whose it is. Nothing is parsed by a C library.
    """
    if not probe.path:
        return bool(probe.given) and all(_is_part(os.fspath(part)) for part in probe.given)  # type: ignore[union-attr]
    if is_pattern(probe.path):
        matches = matching_files(probe.path)
        return bool(matches) and all(head_of(match).startswith(MAGIC) for match in matches)
    if is_environment(probe.path):
        return _is_pack_in_lmdb(data_file(probe.path))
    return os.path.isfile(probe.path) and _is_part(probe.path, probe.head)


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
        own = {column.name: column for column in IMAGE_COLUMNS}
        described = self._reader.columns.described
        # Other writers may have called a column of theirs as we call one of ours.
        self._names = {
            free_name(name, described) if name in own else name: name
            for name, column in described.items()
            if name != KEY and own.get(name) != column
        }
        self.columns = tuple(replace(described[of], name=name) for name, of in self._names.items())

    def entries(self) -> Iterator[int]:
        return iter(range(len(self._reader)))

    def _load(self, entry: Any) -> Record:
        try:
            (data,) = self._reader.read((entry,))
        except CorruptError as error:
            raise DecodeError(error.message, path=error.path, index=error.index, key=error.key) from error
        values = {name: self._reader.columns[of][entry] for name, of in self._names.items()}
        return Record(data, self._reader.key(entry), values)

    def size(self, entry: Any) -> int:
        return int(self._reader.lengths((entry,))[0])

    def count(self) -> int | None:
        return len(self._reader)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"layout": "LMDB" if self._reader.io == "lmdb" else "shards"}

    def close(self) -> None:
        self._reader.close()


def _is_part(path: str, head: bytes | None = None) -> bool:
    """Whether this can be one of several that are opened as one: a shard, or a manifest."""
    head = head_of(path) if head is None else head
    return head.startswith(MAGIC) or (path.endswith(".json") and f'"{MANIFEST}"'.encode() in head[:_HEAD])


def _is_pack_in_lmdb(path: str) -> bool:
    """Whether the last key of an LMDB file is a pack's, or cannot be reached for damage."""
    try:
        source = open_bytes(path, "mmap")
        data = source.section(0, source.size)
        head = decode_head(data, path)
    except FormatError:
        return False
    try:
        return not head.main.flags and is_pack_key(Tree(data, path, head.page_size, head.main).last_key())
    except CorruptError:
        return True
