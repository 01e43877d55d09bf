"""The reader and writer contracts that every backend keeps, and plans: records that were looked up for a batch."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packfmt.buffers import as_bytes_like
from packfmt.errors import CorruptError
from packfmt.record import KEY, Record
from packfmt.storage.columns import Columns
from packfmt.storage.fileio import FileBytes

__all__ = [
    "Buffer",
    "Indices",
    "JoinedPlan",
    "LaterPlan",
    "MappedPlan",
    "PartPlan",
    "ReadPlan",
    "Reader",
    "RecordReader",
    "RowColumns",
    "StoredRecord",
    "Verify",
    "Writer",
    "as_positions",
]

Positions = npt.NDArray[np.int64]


class ReadPlan(ABC):
    """The records of a batch, for threads that read a part of it each. Thread-safe."""

    @abstractmethod
    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of the plan's records ``start`` to ``stop`` - 1, in the asked order.

        Raises:
            CorruptError: as ``Reader.read``, when the damaged record's turn comes. The iterator ends there; those that
                follow can be asked for anew.
            ValueError: the reader is closed, and had not read them yet.
        """


class LaterPlan(ReadPlan):
    """Reads a part when it is asked for, all of it at once.

    Args:
        read: ``Reader.read``.
        positions: (N,) records.
    """

    def __init__(self, read: Callable[[Positions], list[memoryview]], positions: Positions) -> None:
        self._read = read
        self._positions = positions

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        positions = self._positions[start:stop]
        try:
            return iter(self._read(positions))
        except CorruptError:
            return (self._read(positions[place : place + 1])[0] for place in range(len(positions)))


class MappedPlan(ReadPlan):
    """Records that are in memory.

    Args:
        source: where they are.
        positions, offsets, lengths, checksums: (N,) theirs; offsets and lengths lie inside.
        passes: called with positions, views and checksums of several: whether all views are whole.
        check: called with one of each where they are not all; raises CorruptError.
    """

    def __init__(
        self,
        source: FileBytes,
        positions: Positions,
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
        passes: Callable[[list[int], list[memoryview], list[int]], bool],
        check: Callable[[int, memoryview, int], None],
    ) -> None:
        self._source = source
        self._columns = (positions, offsets, lengths, checksums)
        self._passes = passes
        self._check = check

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        self._source.check_size()  # touching a mapped page that is no more kills the process
        # Made for a part only, not for a batch: what is small stays in the processor's cache.
        positions, offsets, lengths, checksums = (column[start:stop].tolist() for column in self._columns)
        views = self._source.slices(offsets, lengths)
        if self._passes(positions, views, checksums):
            return iter(views)
        return self._one_by_one(positions, views, checksums)

    def _one_by_one(self, positions: list[int], views: list[memoryview], checksums: list[int]) -> Iterator[memoryview]:
        for index, view, stated in zip(positions, views, checksums, strict=True):
            self._check(index, view, stated)
            yield view


class JoinedPlan(ReadPlan):
    """Records of several plans.

    Args:
        count: records in all.
        parts: for each plan the places of its records among all, ascending.
    """

    def __init__(self, count: int, parts: Sequence[tuple[npt.NDArray[np.intp], ReadPlan]]) -> None:
        turns = np.empty(count, np.intp)
        for number, (places, _) in enumerate(parts):
            turns[places] = number
        self._turns = turns.tolist()
        self._parts = parts

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        sources = [
            plan.views(*np.searchsorted(places, (start, min(stop, len(self._turns)))).tolist())
            for places, plan in self._parts
        ]
        return (next(sources[turn]) for turn in self._turns[start:stop])


class PartPlan(ReadPlan):
    """The records of another plan from one of them on.

    Args:
        plan: of more records.
        first: the number there of the first record here.
    """

    def __init__(self, plan: ReadPlan, first: int) -> None:
        self._plan = plan
        self._first = first

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        return self._plan.views(self._first + start, self._first + stop)


Buffer = bytes | bytearray | memoryview
Indices = Sequence[int] | npt.NDArray[Any]
Verify = bool | Literal["once"]  # when a record's checksum is checked: at each reading, never, or at the first

ITERATION_CHUNK = 64  # records read at once when iterating
ITERATION_BYTES = 4 << 20  # or fewer, where records are large


def as_positions(indices: Indices, count: int, path: str) -> npt.NDArray[np.int64]:
    """Indices as int64, each in 0 to ``count`` - 1.

    Raises:
        IndexError: one is not.
        TypeError: they are no flat sequence of integers.
    """
    given = np.asarray(indices)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(f"{path}: indices must be a flat sequence of integers, got {indices!r:.80}")
    positions = given.astype(np.int64)  # a uint64 beyond int64 turns negative and is refused
    if positions.size and not (positions.min() >= 0 and positions.max() < count):
        raise IndexError(f"{path} has {count} records, asked for {given.min()} to {given.max()}")
    return positions


class RecordReader(ABC):
    """What training needs of records, wherever they are: in a pack, in memory. Thread-safe.

    Attributes:
        path: where they come from, for messages.
        columns: column name to array over all records; numbers as numpy arrays that lie over the file (not copied),
            text, bytes and ragged arrays as sequences.
    """

    path: str
    columns: Columns

    @abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abstractmethod
    def read(self, indices: Indices) -> list[memoryview]:
        """The bytes of several records, in the asked order; read in the order they lie in the file.

        Raises:
            IndexError: an index is outside 0 to len - 1.
            CorruptError: a record does not match its checksum or lies outside the file.
            ValueError: the reader is closed.
        """

    @abstractmethod
    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        """Sizes in bytes of these records, as the index states them."""

    def plan(self, indices: Indices) -> ReadPlan:
        """Look up where several records lie, for threads that will read a part each.

        Raises:
            IndexError, TypeError: as ``read``.
        """
        return LaterPlan(self.read, as_positions(indices, len(self), self.path))

    def key(self, index: int) -> str:
        """The key of one record."""
        key: str = self.columns[KEY][index]
        return key

    @abstractmethod
    def locate(self, index: int) -> tuple[str, int]:
        """The file that holds a record, and the record's index in it.

        Raises:
            IndexError: the index is outside 0 to len - 1.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file. Reading afterwards raises ValueError; closing twice is allowed."""


class Reader(RecordReader):
    """Read access to a pack: its records, and what only a stored set of them has.

    Pickles as path and options only, and works after fork, spawn and forkserver. Views stay valid as long
    as they are referenced, also after ``close``, unless a backend says otherwise.

    Attributes:
        classes: class names that the column ``label`` counts, in order.
        metadata: the user's JSON-able facts.
        content_id: hexadecimal XXH3-128 over record checksums and columns: equal ids mean equal content.
        io: how bytes are read: "mmap", "pread" or "lmdb".
    """

    classes: tuple[str, ...]
    metadata: dict[str, Any]
    content_id: str
    io: str

    @abstractmethod
    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        """Where these records begin in the pack, in bytes; only their order and distance mean something."""

    @abstractmethod
    def will_need(self, indices: Indices) -> None:
        """Tell the system that these records will be read soon. A hint: returns at once and changes no result.

        It may be passed over where reads have long found everything in memory.
        """

    def will_need_blocks(self, indices: Indices) -> None:
        """The same for whole blocks of neighbours, from which later batches will take single records.

        Passed over where the storage does not keep records back to back.
        """

    @property
    @abstractmethod
    def record_bytes(self) -> float:
        """The mean size of a record in bytes; 0.0 where there are none."""

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The files the pack consists of."""

    @abstractmethod
    def problems(self) -> Iterator[Exception]:
        """Check every byte: yield each fault found (CorruptError, FormatError). Nothing yielded means whole."""

    @staticmethod
    def refuse_unknown(verify: Verify) -> None:
        """Raise ValueError if ``verify`` is none of True, False and "once"."""
        if verify not in (True, False, "once"):
            raise ValueError(f"verify={verify!r}, allowed are True, False and 'once'")

    def refuse_damaged(self, check: str) -> None:
        """What a constructor does about ``check``: "quick" nothing more, "full" close and raise the first fault."""
        if check not in ("quick", "full"):
            raise ValueError(f"check={check!r}, allowed are 'quick' and 'full'")
        if check == "full":
            for problem in self.problems():
                self.close()
                raise problem

    def find(self, key: str) -> int:
        """The index of the record with this key.

        The first call looks through the keys; the second makes a table of them, of 16 bytes per key, in about half a
        microsecond each, from which it and all others are answered in a few microseconds.

        Raises:
            KeyError: there is none.
            TypeError: the key is not a str.
        """
        index = self._place(key)
        if index is None:
            raise KeyError(f"{self.path}: no record has the key {key!r}")
        return index

    def _place(self, key: str) -> int | None:
        if not isinstance(key, str):
            raise TypeError(f"{self.path}: a key is a str, got {key!r:.80} of type {type(key).__name__}")
        found: int | None = self.columns[KEY].find(key)
        return found

    def __contains__(self, item: object) -> bool:
        """Whether a record has this key; of a ``Record``, whether an equal one is there under its key.

        Costs what ``find`` does.

        Raises:
            TypeError: anything else, an index too: those from 0 to len - 1 are there.
        """
        if isinstance(item, Record):
            index = self._place(item.key)
            return index is not None and self[index] == item
        if not isinstance(item, str):
            raise TypeError(
                f"{self.path}: `in` looks for a key (str) or a Record, got {item!r:.80} of type {type(item).__name__}; "
                "an index is there if it is at least 0 and less than len(reader)"
            )
        return self._place(item) is not None

    def __getitem__(self, index: int | str) -> Record:
        """The record at an index (below 0 from the end), or with a key, which costs what ``find`` does.

        Raises:
            IndexError: there is no such index.
            KeyError: there is no such key.
            TypeError: it is neither an integer nor a str.
        """
        position = self.find(index) if isinstance(index, str) else operator.index(index)
        position += len(self) if position < 0 else 0
        if not 0 <= position < len(self):
            raise IndexError(f"{self.path} has {len(self)} records, asked for {index}")
        return StoredRecord(self.read((position,))[0], self, position)

    def __iter__(self) -> Iterator[Record]:
        step = max(1, min(ITERATION_CHUNK, int(ITERATION_BYTES / max(self.record_bytes, 1))))
        for start in range(0, len(self), step):
            chunk = range(start, min(start + step, len(self)))
            for index, data in zip(chunk, self.read(chunk), strict=True):
                yield StoredRecord(data, self, index)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RowColumns(Mapping[str, Any]):
    """One record's column values, looked up when asked for, so that reading bytes never reads columns."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: Mapping[str, Any], index: int) -> None:
        self._columns = columns
        self._index = index

    def __getitem__(self, name: str) -> Any:
        if name == KEY:
            raise KeyError("the key is Record.key")
        return self._columns[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._columns if name != KEY)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class StoredRecord(Record):
    """A record of a reader: bytes in hand, key and columns looked up on use."""

    __slots__ = ("_index", "_reader")

    def __init__(self, data: memoryview, reader: Reader, index: int) -> None:
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "columns", RowColumns(reader.columns, index))
        object.__setattr__(self, "_reader", reader)
        object.__setattr__(self, "_index", index)

    @property
    def key(self) -> str:
        """The record's key."""
        reader: Reader = object.__getattribute__(self, "_reader")
        return reader.key(object.__getattribute__(self, "_index"))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Record, (bytes(self.data), self.key, dict(self.columns)))


class Writer(ABC):
    """Write access to a new pack. Not thread-safe. Nothing is under the final name unless ``close`` succeeded.

    As a context manager: closes on success, discards on an exception.

    Attributes:
        path: what to open once it is published.
        content_id: as ``Reader.content_id``, once closed.
    """

    path: str
    content_id: str

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The files it writes, under their final names."""

    @abstractmethod
    def __len__(self) -> int:
        """Records written so far."""

    def write(self, data: Buffer, /, key: str, **columns: Any) -> None:
        """Append a record.

        A refused record leaves no trace. After an OSError the pack cannot be finished: discard it.

        Args:
            data: the encoded image, stored verbatim: bytes, or a flat view or array of uint8. Pixels are encoded first,
                with ``packfmt.encode_png`` or ``packfmt.encode_jpeg``.
            key: non-empty, unique in the pack.
            columns: a value for every column. The first record's decide which there are and of what type, unless they
                were declared; an array column has a fixed shape if all records agree on it, else the first axis is
                ragged; empty lists decide nothing. ``label`` and ``labels`` may be names out of ``classes``.

        Raises:
            ValueError: a value does not fit its column, a column is missing or unknown, a label is no class, or the
                writer is closed.
            TypeError: ``data`` is pixels, a file's name or whatever else is not bytes; or no column holds values of
                this type.
            OSError: the disk refuses.
        """
        if not isinstance(key, str) or not key:
            raise ValueError(f"{self.path}: key {key!r} of record {len(self)} must be a non-empty str")
        try:
            flat = as_bytes_like(data)
        except TypeError as error:
            raise TypeError(f"{self.path}: record {len(self)}, key {key!r}: {error}") from None
        self._append(flat, key, columns)

    @abstractmethod
    def _append(self, data: bytes | memoryview, key: str, columns: dict[str, Any]) -> None:
        """As ``write``, of flat bytes and a key that is a non-empty str; ``columns`` may be changed."""

    @abstractmethod
    def close(self) -> None:
        """Finish and publish. Closing twice is allowed.

        Raises:
            ValueError: two records have the same key.
            OSError: the disk refuses, or the target exists.
        """

    @abstractmethod
    def discard(self) -> None:
        """Throw everything written away. Without effect after ``close``."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
