"""A pack as a source: how one pack is copied into another of whatever kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from packfmt import storage
from packfmt.errors import CorruptError, DecodeError
from packfmt.record import OWN_COLUMNS, Column, Record
from packfmt.sources.base import Source
from packfmt.sources.inputs import Inputs

__all__ = ["PackSource", "recognise"]


def recognise(path: Inputs) -> str | None:
    """"pack" for a shard, a manifest, an LMDB pack, or several shards; None for anything else."""
    try:
        with storage.open(path):
            return "pack"
    except (OSError, ValueError):
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

    def close(self) -> None:
        self._reader.close()


def _described(name: str, column: Any) -> Column:
    if isinstance(column, np.ndarray):
        return Column(name, column.dtype.str, column.shape[1:])
    described: Column = column.column
    return described
