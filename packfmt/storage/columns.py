"""Columns as readers hand them out: arrays that lie over the file, checked once when first used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from packfmt.errors import CorruptError
from packfmt.record import Column

__all__ = ["Columns", "JoinedColumn", "RaggedColumn"]


class RaggedColumn(Sequence[Any]):
    """A column whose values differ in length: row offsets and one array of rows.

    ``column[i]`` is a str, bytes, or an array of shape (rows, *row_shape) that lies over the file. ``column[indices]``,
    with a slice or an integer array, is a list of those. Thread-safe: nothing changes after construction.

    Args:
        column: what it holds.
        rows: uint64 (count + 1,), where each record's rows begin.
        values: (total rows, *row_shape), of the column's dtype.
        path: named in errors.
    """

    def __init__(self, column: Column, rows: npt.NDArray[np.uint64], values: npt.NDArray[Any], path: str) -> None:
        self.column = column
        self.rows = rows
        self.values = values
        self._path = path
        self._count = len(rows) - 1

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._value(i) for i in range(*index.indices(self._count))]
        if isinstance(index, (np.ndarray, list)):
            return [self._value(int(i)) for i in index]
        return self._value(index)

    def _value(self, index: int) -> Any:
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"column {self.column.name!r} has {self._count} values, asked for {index}")
        start, stop = int(self.rows[position]), int(self.rows[position + 1])
        if not start <= stop <= len(self.values):
            raise CorruptError(
                f"column {self.column.name!r} has rows {start} to {stop} of {len(self.values)}; restore the file",
                path=self._path,
                index=position,
            )
        values = self.values[start:stop]
        if self.column.kind == "array":
            return values
        raw = values.tobytes()
        return raw.decode("utf-8", "surrogateescape") if self.column.kind == "text" else raw


class JoinedColumn(Sequence[Any]):
    """A column of differing lengths over several shards. Holds no shard open. Thread-safe as the shards' columns are.

    Args:
        part: shard number to that shard's ``RaggedColumn``.
        starts: int64 (shards + 1,), the first record of each shard.
    """

    def __init__(self, part: Callable[[int], RaggedColumn], starts: npt.NDArray[np.int64]) -> None:
        self._part = part
        self._starts = starts

    @property
    def column(self) -> Column:
        """What it holds."""
        return self._part(0).column

    def __len__(self) -> int:
        return int(self._starts[-1])

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

    def _value(self, index: int) -> Any:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"column {self.column.name!r} has {len(self)} values, asked for {index}")
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._part(shard)[position - int(self._starts[shard])]


class Columns(Mapping[str, Any]):
    """Column name to array. The first use of a column checks it; listing names does not.

    Args:
        names: the columns there are.
        load: gives the checked array of a name. Called once per name; calling it twice in a race is harmless.
    """

    def __init__(self, names: Sequence[str], load: Callable[[str], Any]) -> None:
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
