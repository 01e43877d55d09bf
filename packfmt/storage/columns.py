"""Columns as readers hand them out: arrays that lie over the file, checked once when first used."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from packfmt.errors import CorruptError
from packfmt.record import Column
from packfmt.storage.keys import KeyTable

__all__ = ["Columns", "JoinedColumn", "RaggedColumn", "VaryingColumn", "select_column"]

CHUNK = 4096  # values looked through at a time


class VaryingColumn(Sequence[Any]):
    """A column whose values differ in length. ``column[i]`` is a str, bytes, or an array of shape (rows, *row_shape).

    ``column[indices]``, with a slice or an integer array, is a list of those. Thread-safe.
    """

    _asked = False  # whether a text has been looked for
    _table: KeyTable | None = None

    @property
    @abstractmethod
    def column(self) -> Column:
        """What it holds."""

    @abstractmethod
    def parts(self) -> Iterator[RaggedColumn]:
        """The columns of single shards that this one consists of, in order."""

    @abstractmethod
    def _value(self, index: int) -> Any:
        """One value; ``index`` may count from the end."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._value(i) for i in range(*index.indices(len(self)))]
        if isinstance(index, (np.ndarray, list)):
            return [self._value(int(i)) for i in index]
        return self._value(index)

    def raw(self) -> Iterator[bytes]:
        """The bytes of each value, in order."""
        for part in self.parts():
            yield from part.raw()

    def find(self, text: str) -> int | None:
        """Where a text first is; None where it is not. What it costs: see ``Reader.find``."""
        try:
            wanted = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return None
        if not self._asked:  # it may be all that is ever looked for
            self._asked = True
            places: Iterable[int] = (place for place, raw in enumerate(self.raw()) if raw == wanted)
        else:
            table = self._table
            if table is None:
                table = self._table = KeyTable(self.raw(), len(self))
            places = table.places(wanted)
        # Compared as text: two halves of one character, escaped each, have the bytes of the whole.
        return next((place for place in places if self[place] == text), None)


class RaggedColumn(VaryingColumn):
    """Row offsets and one array of rows. Arrays that it gives lie over the file.

    Args:
        column: what it holds.
        rows: uint64 (count + 1,), where each record's rows begin.
        values: (total rows, *row_shape), of the column's dtype.
        path: named in errors.
    """

    def __init__(self, column: Column, rows: npt.NDArray[np.uint64], values: npt.NDArray[Any], path: str) -> None:
        self._column = column
        self.rows = rows
        self.values = values
        self._path = path
        self._count = len(rows) - 1

    @property
    def column(self) -> Column:
        return self._column

    def __len__(self) -> int:
        return self._count

    def parts(self) -> Iterator[RaggedColumn]:
        yield self

    def raw(self) -> Iterator[bytes]:
        for first in range(0, self._count, CHUNK):
            rows = self.rows[first : first + CHUNK + 1]
            if (rows[1:] < rows[:-1]).any() or rows[-1] > len(self.values):
                places = range(first, first + len(rows) - 1)
                yield from (self.values[slice(*self._range(place))].tobytes() for place in places)
                continue
            start, ends = int(rows[0]), rows.tolist()
            held = self.values[start : ends[-1]].tobytes()
            size = self._column.row_bytes
            for begin, end in pairwise(ends):
                yield held[(begin - start) * size : (end - start) * size]

    def _value(self, index: int) -> Any:
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"column {self._column.name!r} has {self._count} values, asked for {index}")
        start, stop = self._range(position)
        values = self.values[start:stop]
        if self._column.kind == "array":
            return values
        raw = values.tobytes()
        return raw.decode("utf-8", "surrogateescape") if self._column.kind == "text" else raw

    def _range(self, position: int) -> tuple[int, int]:
        """The rows of one record.

        Raises:
            CorruptError: they go back, or lie outside.
        """
        start, stop = int(self.rows[position]), int(self.rows[position + 1])
        if not start <= stop <= len(self.values):
            raise CorruptError(
                f"column {self._column.name!r} has rows {start} to {stop} of {len(self.values)}; restore the file",
                path=self._path,
                index=position,
            )
        return start, stop


class JoinedColumn(VaryingColumn):
    """A column of differing lengths over several shards. Holds no shard open.

    Args:
        part: shard number to that shard's ``RaggedColumn``.
        starts: int64 (shards + 1,), the first record of each shard.
    """

    def __init__(self, part: Callable[[int], RaggedColumn], starts: npt.NDArray[np.int64]) -> None:
        self._part = part
        self._starts = starts

    @property
    def column(self) -> Column:
        return self._part(0).column

    def __len__(self) -> int:
        return int(self._starts[-1])

    def parts(self) -> Iterator[RaggedColumn]:
        return map(self._part, range(len(self._starts) - 1))

    def _value(self, index: int) -> Any:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"column {self.column.name!r} has {len(self)} values, asked for {index}")
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._part(shard)[position - int(self._starts[shard])]


class SelectedColumn(Sequence[Any]):
    """Some values of a column of differing lengths. Thread-safe as that is.

    Args:
        column: all values.
        records: (n,) whose values these are.
    """

    def __init__(self, column: Any, records: npt.NDArray[np.int64]) -> None:
        self._column = column
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        chosen = self._records[index]
        return self._column[chosen if isinstance(chosen, np.ndarray) else int(chosen)]


def select_column(column: Any, records: npt.NDArray[np.int64]) -> Any:
    """The values that some records (n,) have in a column: a copy of numbers, a view of all else."""
    return column[records] if isinstance(column, np.ndarray) else SelectedColumn(column, records)


class Columns(Mapping[str, Any]):
    """Column name to array. The first use of a column checks it; listing names does not.

    Args:
        names: the columns there are.
        load: gives the checked array of a name. Called once per name; calling it twice in a race is harmless.
        described: what they hold, where that is stated somewhere.

    Attributes:
        described: as given; looking there loads nothing.
    """

    def __init__(
        self, names: Iterable[str], load: Callable[[str], Any], described: Mapping[str, Column] | None = None
    ) -> None:
        self.described = described or {}
        self._names = dict.fromkeys(names)
        self._load = load
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        column = self._loaded.get(name)
        if column is None:
            if name not in self._names:
                raise KeyError(f"no column {name!r}; there are {', '.join(self._names) or 'none'}")
            column = self._loaded[name] = self._load(name)
        return column

    def forget(self) -> None:
        """Let go of the arrays; those in other hands stay valid."""
        self._loaded.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
