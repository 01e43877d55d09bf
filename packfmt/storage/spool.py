"""Growing arrays that do not grow in memory: where index and columns gather while records are written.

A table of them has the sections of the file to be."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from packfmt.format import INDEX
from packfmt.record import BOXES, MAX_ROW, Column, fit_array, infer_column, misfit

__all__ = ["DIFFERS", "ColumnSpool", "Spool", "TableSpool"]

LIMIT = 1 << 20  # bytes kept in memory before they go to a temporary file
DIFFERS = -1


class Spool:
    """Bytes appended and read back once; beyond ``LIMIT`` in a nameless temporary file beside the target."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffer = bytearray()
        self._file: IO[bytes] | None = None
        self._flushed = 0

    @property
    def size(self) -> int:
        """Bytes appended."""
        return self._flushed + len(self._buffer)

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""
        buffer = self._buffer
        buffer += data
        if len(buffer) >= LIMIT:
            self._flush()

    def chunks(self) -> Iterator[bytes]:
        """All bytes from the start, in pieces of at most about ``LIMIT``. May be called again."""
        if self._file is not None:
            self._flush()
            self._file.seek(0)
            while chunk := self._file.read(LIMIT):
                yield chunk
        elif self._buffer:
            yield bytes(self._buffer)

    def close(self) -> None:
        """Free memory and disk."""
        self._flushed += len(self._buffer)
        self._buffer = bytearray()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        if self._file is None:
            # Nameless (O_TMPFILE or unlinked at once), so that a killed writer leaves nothing.
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed by close)
        pending = memoryview(self._buffer)
        while pending:
            pending = pending[self._file.write(pending) :]
        pending.release()
        self._flushed += len(self._buffer)
        self._buffer = bytearray()


class ColumnSpool:
    """One column being written whose values are not single numbers.

    ``encode`` turns a value into bytes without storing anything; ``append`` stores them.

    Args:
        column: what it holds. Of a tentative one, the first value that is not an empty list has the last word.
        folder: where nameless temporary files go.
        length: as the attribute, of values that were written elsewhere.

    Attributes:
        length: rows that each value of a ragged array has, ``DIFFERS`` if they are not alike, None before the first.
    """

    def __init__(self, column: Column, folder: Path, length: int | None = None) -> None:
        self.column = column
        self.length = length
        self.values = Spool(folder)
        self.rows = Spool(folder)
        self._row_bytes = column.row_bytes if column.ragged else 0
        self._undecided = column.tentative and column == infer_column(column.name, []) and not length
        self._decided = column
        if column.ragged:
            self.rows.append(bytes(8))

    def append(self, raw: bytes | memoryview) -> None:
        """Add one record's encoded value."""
        if self._undecided:
            self._undecided = not raw and self._decided == self.column
            self.column, self._row_bytes = self._decided, self._decided.row_bytes
        self.values.append(raw)
        if self._row_bytes:
            self.rows.append((self.values.size // self._row_bytes).to_bytes(8, "little"))
            rows = len(raw) // self._row_bytes
            if rows != self.length:
                self.length = rows if self.length is None else DIFFERS

    def settle(self, counted: int | None) -> None:
        """Give a tentative column its final shape, once all values are there.

        Args:
            counted: the ``length`` of the boxes, in whose number its rows are not fixed.
        """
        column, length = self.column, self.length or 0
        if not column.tentative:
            return
        fixed = 0 < length * column.row_bytes < MAX_ROW and length != counted and column.name != BOXES
        self.column = replace(column, shape=(length if fixed else None, *column.row_shape), tentative=False)

    def each(self) -> Iterator[bytes]:
        """The values of a ragged column so far, one by one, as bytes."""
        stops = (int(stop) for chunk in self.rows.chunks() for stop in np.frombuffer(chunk, "<u8"))
        pending, start = bytearray(), next(stops)
        values = self.values.chunks()
        for stop in stops:
            size = (stop - start) * self.column.row_bytes
            while len(pending) < size:
                pending += next(values)
            yield bytes(pending[:size])
            del pending[:size]
            start = stop

    def encode(self, value: Any) -> bytes | memoryview:
        """The bytes of one record's value.

        Raises:
            ValueError: the value does not fit the column's type, range or shape.
        """
        column = self._decide(value) if self._undecided else self.column
        try:
            if column.kind == "text":
                return value.encode("utf-8", "surrogateescape")  # type: ignore[no-any-return]
            if column.kind == "bytes":
                return memoryview(value).cast("B")
        except (TypeError, AttributeError, ValueError) as error:
            raise misfit(column, value, str(error)) from error
        return fit_array(column, value).tobytes()

    def _decide(self, value: Any) -> Column:
        """The column that this value makes of one which has held empty lists only."""
        try:
            shown = infer_column(self.column.name, value)
        except (TypeError, ValueError):  # encoding says it better
            return self.column
        if not shown.tentative:
            return self.column
        self._decided = shown  # once it is stored: another column may refuse the record
        return shown

    def close(self) -> None:
        """Free memory and disk."""
        self.values.close()
        self.rows.close()


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
