"""Records of a stream that are in memory, as the reader that batches are made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.buffers import as_bytes_like
from packfmt.errors import DecodeError
from packfmt.images.sniff import sniff
from packfmt.record import Record
from packfmt.storage import Reader
from packfmt.storage.base import Indices
from packfmt.storage.columns import Columns
from packfmt.storage.readplan import LaterPlan, ReadPlan
from packfmt.training.targets import NO_LABEL

__all__ = ["HeldRecord", "HeldRecords", "hold"]

BYTES = (bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """One record of a stream, with what its header says: 0 by 0 pixels where that cannot be read."""

    position: int
    data: bytes | memoryview
    key: str
    values: tuple[Any, ...]
    height: int
    width: int
    orientation: int


def hold(item: Any, position: int, names: Sequence[str] | None) -> HeldRecord:
    """Look at one item of a stream.

    Args:
        item: a ``Record``, a pair of bytes and a target, or bytes.
        position: its place in the stream, counted from 0.
        names: the record's columns that are asked for; None asks for ``label``, or the pair's target.

    Raises:
        TypeError: it is something else.
        ValueError: it has no such column.
    """
    data, key, values = _parts(item, position, names)
    try:
        found = sniff(data)
    except DecodeError:  # decoding will say so, in the batch's order
        return HeldRecord(position, data, key, values, 0, 0, 0)
    return HeldRecord(position, data, key, values, found.height, found.width, found.orientation)


def _parts(item: Any, position: int, names: Sequence[str] | None) -> tuple[bytes | memoryview, str, tuple[Any, ...]]:
    if isinstance(item, Record):
        if names is None:
            return as_bytes_like(item.data), item.key, (item.columns.get("label", NO_LABEL),)
        missing = [name for name in names if name not in item.columns]
        if missing:
            known = ", ".join(item.columns) or "none"
            raise ValueError(f"record {position} of the stream, key {item.key!r}: no columns {missing}; it has {known}")
        return as_bytes_like(item.data), item.key, tuple(_as_in_a_pack(item.columns[name]) for name in names)
    bare = isinstance(item, BYTES)
    if not bare and not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], BYTES)):
        raise TypeError(
            f"record {position} of the stream is of type {type(item).__name__}; allowed are a Record, a pair (bytes, "
            "target), and bytes"
        )
    if names is not None:
        raise ValueError(f"record {position} of the stream has no columns for fields={list(names)}; give Records")
    data, target = (item, NO_LABEL) if bare else item
    return as_bytes_like(data), str(position), (target,)


def _as_in_a_pack(value: Any) -> Any:
    """A list of numbers as the array that a pack would give: batches are to be the same."""
    if isinstance(value, list) and all(isinstance(entry, (int, float, np.number)) for entry in value):
        return np.array(value, None if value else np.int64)
    return value


class HeldRecords(Reader):
    """Records in memory, addressed by their positions in the stream. Nothing changes in it, so it is thread-safe.

    A record without a key goes by its position.

    Args:
        records: those of one batch.
        names: of the columns that their ``values`` belong to.
    """

    path = "image stream"
    classes = ()
    content_id = ""
    io = "memory"

    def __init__(self, records: Sequence[HeldRecord], names: Sequence[str]) -> None:
        self.metadata = {}
        self._records = {record.position: record for record in records}
        self._names = tuple(names)
        self.columns = Columns([*self._names, "height", "width", "orientation"], self._column)

    def _column(self, name: str) -> Any:
        records = self._records.values()
        if name in self._names:
            place = self._names.index(name)
            return _Values({record.position: record.values[place] for record in records})
        return _Values({record.position: getattr(record, name) for record in records})

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Indices) -> list[memoryview]:
        """The bytes of several records."""
        return [memoryview(self._records[int(index)].data) for index in indices]

    def plan(self, indices: Indices) -> ReadPlan:
        """All of them."""
        return LaterPlan(self.read, np.asarray(indices, np.int64))

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        """Their sizes in bytes."""
        return np.array([len(data) for data in self.read(indices)], np.uint64)

    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        """Their positions: they lie in no file."""
        return np.asarray(indices, np.uint64)

    def will_need(self, indices: Indices) -> None:
        """Nothing to do: they are here."""

    def close(self) -> None:
        """Nothing to do: they go with this object."""

    @property
    def record_bytes(self) -> float:
        """The mean size of a record in bytes."""
        return sum(len(record.data) for record in self._records.values()) / max(len(self._records), 1)

    @property
    def files(self) -> tuple[str, ...]:
        """There are none."""
        return ()

    def problems(self) -> Iterator[Exception]:
        """There is nothing to check bytes against."""
        return iter(())

    def locate(self, index: int) -> tuple[str, int]:
        """Where a record came from: its position in the stream."""
        return self.path, int(index)

    def key(self, index: int) -> str:
        """The key of one record."""
        return self._records[int(index)].key


class _Values:
    """A column, by the records' positions: numbers come as an array, anything else as a list."""

    def __init__(self, values: dict[int, Any]) -> None:
        self._values = values

    def __getitem__(self, positions: npt.NDArray[np.int64]) -> Any:
        chosen = [self._values[position] for position in positions.tolist()]
        numbers = all(isinstance(value, (int, float, np.number)) and not isinstance(value, bool) for value in chosen)
        return np.array(chosen) if numbers and chosen else chosen
