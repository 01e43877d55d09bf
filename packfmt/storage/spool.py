"""Growing arrays that do not grow in memory: where index and columns gather while records are written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from packfmt.record import BOXES, MAX_ROW, Column, fit_array, infer_column, misfit

__all__ = ["DIFFERS", "ColumnSpool", "Spool"]

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
