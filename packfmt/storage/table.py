"""What gathers of all records while a pack is written, section by section of the file to be."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packfmt.format import INDEX
from packfmt.record import BOXES, Column, misfit
from packfmt.storage.spool import ColumnSpool, Spool

__all__ = ["TableSpool"]

CODES = {
    "|b1": "?", "|u1": "B", "|i1": "b", "<u2": "H", "<i2": "h", "<f2": "e",
    "<u4": "I", "<i4": "i", "<f4": "f", "<u8": "Q", "<i8": "q", "<f8": "d",
}  # fmt: skip


class TableSpool:
    """The index entries and column values of records, in order. Used by one thread.

    ``encode`` turns a record's values into bytes without storing anything; ``append`` stores them. All single numbers
    go into one row, index entry included, because that is one call per record instead of one for each; every other
    column is spooled by itself.

    Args:
        columns: what each record has.
        folder: where nameless temporary files go.
        lengths: as the attribute, of records that were written elsewhere.

    Attributes:
        names: the columns' names.
    """

    def __init__(
        self, columns: Sequence[Column], folder: Path, lengths: Mapping[str, int | None] | None = None
    ) -> None:
        self._sorted = tuple(sorted(columns, key=lambda c: c.name))
        self.names = frozenset(column.name for column in columns)
        self._rows = _RowSpool([column for column in self._sorted if column.shape == ()], folder)
        self._others = {
            column.name: ColumnSpool(column, folder, (lengths or {}).get(column.name))
            for column in self._sorted
            if column.shape != ()
        }
        self._spools: tuple[_RowSpool | ColumnSpool, ...] = (self._rows, *self._others.values())

    @property
    def columns(self) -> tuple[Column, ...]:
        """What each record has, sorted by name."""
        return tuple(self._others[c.name].column if c.name in self._others else c for c in self._sorted)

    @property
    def lengths(self) -> dict[str, int | None]:
        """Ragged column to the rows that each of its values has: ``DIFFERS`` if not all have as many."""
        return {name: spool.length for name, spool in self._others.items()}

    def settle(self) -> None:
        """Give tentative columns their final shape, once all records are there."""
        boxes = self._others.get(BOXES)
        for spool in self._others.values():
            spool.settle(None if boxes is None else boxes.length)

    def encode(self, entry: tuple[int, int, int], values: Mapping[str, Any]) -> list[bytes | memoryview]:
        """The bytes of one record's index entry (see ``format.INDEX``) and values, for ``append``.

        Raises:
            ValueError: a value does not fit its column's type, range or shape.
        """
        row = self._rows.encode(entry, values)
        return [row, *[spool.encode(values[name]) for name, spool in self._others.items()]]

    def append(self, encoded: Sequence[bytes | memoryview]) -> None:
        """Store one record's."""
        for spool, raw in zip(self._spools, encoded, strict=True):
            spool.append(raw)

    def values_sizes(self) -> dict[str, int]:
        """Column name to the bytes of its values, of those columns that ``format.section_sizes`` asks for."""
        return {name: spool.values.size for name, spool in self._others.items()}

    def chunks(self, section: str) -> Iterator[bytes]:
        """The bytes of a section of the file, in pieces. May be called again."""
        kind, _, name = section.partition(".")
        if name in self._others and kind != "index":
            spool = self._others[name]
            return (spool.rows if kind == "rows" else spool.values).chunks()
        return self._rows.chunks(section)

    def each(self, name: str) -> Iterator[bytes]:
        """The values of a ragged column so far, one by one."""
        return self._others[name].each()

    def close(self) -> None:
        """Free memory and disk."""
        for spool in self._spools:
            spool.close()


class _RowSpool:
    """Index entries, and columns of single numbers: one row of fixed width for each record."""

    def __init__(self, columns: Sequence[Column], folder: Path) -> None:
        self._columns = columns
        self._names = [column.name for column in columns]
        self._flags = [column.name for column in columns if column.dtype == "|b1"]
        self._pack = struct.Struct("<" + "Q" * len(INDEX) + "".join(CODES[column.dtype] for column in columns)).pack
        sections = [(f"index.{name}", "<u8") for name in INDEX] + [(f"column.{c.name}", c.dtype) for c in columns]
        self._dtype = np.dtype(sections)
        self._spool = Spool(folder)
        self.append = self._spool.append
        self.close = self._spool.close

    def encode(self, entry: tuple[int, int, int], values: Mapping[str, Any]) -> bytes:
        try:
            if self._flags and not all(values[name] in (0, 1) for name in self._flags):  # struct would take anything
                raise TypeError("must be True or False")
            return self._pack(*entry, *[values[name] for name in self._names])
        except (struct.error, OverflowError, TypeError, ValueError) as error:
            raise self._refusal(values) or error from error

    def chunks(self, section: str) -> Iterator[bytes]:
        rest = b""
        for chunk in self._spool.chunks():
            chunk = rest + chunk
            rows = len(chunk) // self._dtype.itemsize
            rest = chunk[rows * self._dtype.itemsize :]
            yield np.frombuffer(chunk, self._dtype, rows)[section].tobytes()

    def _refusal(self, values: Mapping[str, Any]) -> ValueError | None:
        """The error for the first value that its column cannot hold."""
        for column in self._columns:
            try:
                if column.name in self._flags and values[column.name] not in (0, 1):
                    raise TypeError("must be True or False")
                struct.pack("<" + CODES[column.dtype], values[column.name])
            except (struct.error, OverflowError, TypeError, ValueError) as error:
                return misfit(column, values[column.name], str(error))
        return None
