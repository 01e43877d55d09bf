"""One open shard file: its frame checked, its index and columns laid over the file when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from packfmt import format as layout
from packfmt.errors import CorruptError, FormatError, PackfmtError
from packfmt.format import Directory, Section, Trailer, record_checksum
from packfmt.record import KEY, Column
from packfmt.storage.base import Verify
from packfmt.storage.columns import RaggedColumn
from packfmt.storage.filebytes import FileBytes
from packfmt.storage.readahead import ReadAhead
from packfmt.storage.readplan import MappedPlan, ReadPlan

__all__ = ["ShardFile", "read_frame"]

WINDOW = 8 << 20  # bytes of a column checked at a time, so that checking does not fill resident memory
PAGE = 4096  # records that may lie on more than one page are asked for before they are touched


class ShardFile:
    """A shard's bytes by record number and column name. Knows no reader, so that a reader's columns may hold it.

    Thread-safe. Array positions must lie inside the file: the reader checks them.

    Args:
        path: the shard, for errors.
        source: its bytes; closed with it.
        ask: starts reading records, where ``source.will_need`` does not.

    Raises:
        FormatError: not a shard, of an unknown version, truncated, or damaged outside of records and columns.
        OSError: the file cannot be read.
    """

    def __init__(
        self, path: str, source: FileBytes, ask: Callable[[Sequence[int], Sequence[int]], None] | None = None
    ) -> None:
        self.path = path
        self.bytes = source
        self.ahead = ReadAhead(ask or source.will_need)
        self.trailer, self.directory = read_frame(self.bytes, path)
        self.described = {column.name: column for column in self.directory.columns}
        self._index: dict[str, npt.NDArray[np.uint64]] = {}
        self._checked: dict[str, npt.NDArray[Any] | RaggedColumn] = {}
        self._passed: npt.NDArray[np.bool_] | None = None  # which records have been checked, once one was

    def close(self) -> None:
        """Release the file; arrays handed out stay valid."""
        self.bytes.close()
        self._index.clear()
        self._checked.clear()

    def index(self, name: str) -> npt.NDArray[np.uint64]:
        """One of ``layout.INDEX``, (count,) uint64, as it lies in the file."""
        array = self._index.get(name)
        if array is None:
            section = self.directory.sections[f"index.{name}"]
            array = np.frombuffer(self.bytes.section(section.offset, section.size), "<u8")
            self._index[name] = array
        return array

    def ranges(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Offsets and lengths of records, checked to lie in the records' part of the file.

        Raises:
            CorruptError: one does not, or the file has changed its size.
        """
        self.bytes.check_size()  # first: touching a mapped page that is no more kills the process
        offsets, lengths = self.index("offset")[positions], self.index("length")[positions]
        end = np.uint64(self.trailer.records_end)
        outside = (offsets < layout.HEADER.size) | (offsets > end) | (lengths > end - np.minimum(offsets, end))
        if outside.any():
            bad = int(positions[outside][0])
            offset, length = int(offsets[outside][0]), int(lengths[outside][0])
            raise self.corrupt(bad, f"{length} bytes at {offset} lie outside the records, which end at {end}")
        return offsets, lengths

    def read_one(self, index: int, *, verify: Verify) -> memoryview:
        """The bytes of one record: as ``read``, without what only pays for many."""
        self.bytes.check_size()
        offset, length = int(self.index("offset")[index]), int(self.index("length")[index])
        if not layout.HEADER.size <= offset <= offset + length <= self.trailer.records_end:
            self.ranges(np.array([index]))  # says what is wrong
        if length > PAGE:
            self.ahead.before((offset,), (length,))
        (view,) = self.bytes.slices((offset,), (length,))
        if verify == "once" or (verify and record_checksum(view, index) != self.index("checksum")[index]):
            self._check(np.array([index]), [view], verify)
        return view

    def read(self, positions: npt.NDArray[np.int64], *, verify: Verify) -> list[memoryview]:
        """The bytes of records, in the asked order, read in the order they lie in the file.

        Where all is in memory it is read in the asked order, which is quicker then.
        """
        offsets, lengths = self.ranges(positions)
        if self.bytes.any_order and self.ahead.everything_cached():
            views = self.bytes.slices(offsets.tolist(), lengths.tolist())
            if verify:
                self._check(positions, views, verify)
            return views
        order = np.argsort(offsets, kind="stable")
        starts, sizes = offsets[order].tolist(), lengths[order].tolist()
        if len(sizes) > 1 or (sizes and sizes[0] > PAGE):
            self.ahead.before(starts, sizes)
        views = self.bytes.slices(starts, sizes)
        if verify:
            self._check(positions[order], views, verify)
        out: list[memoryview] = [views[0]] * len(views) if views else []
        for place, view in zip(order.tolist(), views, strict=True):
            out[place] = view
        return out

    def plan(self, positions: npt.NDArray[np.int64], *, verify: Verify) -> ReadPlan | None:
        """The records one by one, each checked when its turn comes. None where they are to be read in the file's order.

        Raises:
            CorruptError: a range is damaged, or the file has changed its size.
        """
        if not (self.bytes.any_order and self.ahead.everything_cached()):
            return None
        offsets, lengths = self.ranges(positions)
        passes = self._pass_once if verify == "once" else _pass if verify else _unchecked
        check = self._check_new if verify == "once" else self._check_one
        return MappedPlan(self.bytes, positions, offsets, lengths, self.index("checksum")[positions], passes, check)

    def column(self, name: str) -> npt.NDArray[Any] | RaggedColumn:
        """A column, checked against its checksum the first time.

        Raises:
            CorruptError: it does not match.
        """
        column = self._checked.get(name)
        if column is None:
            for problem in self.column_problems(name):
                raise problem
            column = self._checked[name] = self.unchecked_column(name)
        return column

    def unchecked_column(self, name: str) -> npt.NDArray[Any] | RaggedColumn:
        """A column as it lies in the file."""
        column = self.described[name]
        section = self.directory.sections[f"column.{name}"]
        flat = np.frombuffer(self.bytes.section(section.offset, section.size), column.dtype)
        values = flat.reshape(self._rows(column, section), *column.row_shape)
        if not column.ragged:
            return values
        section = self.directory.sections[f"rows.{name}"]
        rows = np.frombuffer(self.bytes.section(section.offset, section.size), "<u8")
        return RaggedColumn(column, rows, values, self.path)

    def keys(self) -> Iterator[bytes]:
        """All keys in order, as they are stored."""
        keys: Any = self.column(KEY)  # ragged, as ``read_frame`` has seen
        yield from keys.raw()

    def column_problems(self, name: str) -> Iterator[PackfmtError]:
        """What does not match its checksum."""
        if self.described[name].ragged:
            yield from self.section_problems(f"rows.{name}")
        yield from self.section_problems(f"column.{name}")

    def section_problems(self, name: str) -> Iterator[PackfmtError]:
        """A CorruptError if a section does not match its checksum."""
        section = self.directory.sections[name]
        digest = xxhash.xxh3_64()
        self.hash_section(section, digest)
        if digest.intdigest() != section.checksum:
            kind, _, column = name.partition(".")
            what = f"index array {column!r}" if kind == "index" else f"column {column!r}"
            yield CorruptError(f"{what} does not match its checksum; restore the file from a copy", path=self.path)

    def hash_section(self, section: Section, digest: Any) -> None:
        """Feed a section to a hash, a window at a time."""
        self.bytes.check_size()
        for start in range(section.offset, section.offset + section.size, WINDOW):
            size = min(WINDOW, section.offset + section.size - start)
            self.bytes.will_need([start], [size])
            digest.update(self.bytes.section(start, size))
            self.bytes.forget(start, size)

    def corrupt(self, index: int, message: str) -> CorruptError:
        """The error for one record, with its key where the keys can still be read."""
        try:
            key = str(self.column(KEY)[index])
        except CorruptError:
            key = None
        return CorruptError(message, path=self.path, index=index, key=key)

    def _check(self, positions: npt.NDArray[np.int64], views: list[memoryview], verify: Verify) -> None:
        if verify == "once":
            due = np.flatnonzero(~self._passing()[positions])
            positions, views = positions[due], [views[place] for place in due.tolist()]
        numbers, sums = positions.tolist(), self.index("checksum")[positions].tolist()
        if not _pass(numbers, views, sums):
            for index, view, stated in zip(numbers, views, sums, strict=True):
                self._check_one(index, view, stated)
        if self._passed is not None:
            self._passed[positions] = True

    def _pass_once(self, positions: list[int], views: list[memoryview], stated: list[int]) -> bool:
        """Whether all are whole, or were when they were first read."""
        passed = self._passing()
        if passed[positions].all():
            return True
        whole = _pass(positions, views, stated)
        if whole:
            passed[positions] = True
        return whole

    def _check_one(self, index: int, view: memoryview, stated: int) -> None:
        if record_checksum(view, index) != stated:
            raise self._unlike(index, view)

    def _unlike(self, index: int, view: memoryview) -> CorruptError:
        return self.corrupt(index, f"its {len(view)} bytes do not match their checksum; restore the file")

    def _check_new(self, index: int, view: memoryview, stated: int) -> None:
        """Check one that never passed. A race between threads checks it twice."""
        passed = self._passing()
        if not passed[index]:
            self._check_one(index, view, stated)
            passed[index] = True

    def _passing(self) -> npt.NDArray[np.bool_]:
        """Which records have passed; made when it is first needed."""
        if self._passed is None:
            self._passed = np.zeros(self.trailer.count, np.bool_)  # takes memory where it is written, a page at a time
        return self._passed

    def _rows(self, column: Column, section: Section) -> int:
        return section.size // column.row_bytes if column.ragged else self.trailer.count


def _pass(positions: list[int], views: list[memoryview], stated: list[int]) -> bool:
    """Whether all are whole. A loop in Python would take longer than what it does."""
    return list(map(record_checksum, views, positions)) == stated


def _unchecked(positions: list[int], views: list[memoryview], stated: list[int]) -> bool:
    return True


def read_frame(source: FileBytes, path: str) -> tuple[Trailer, Directory]:
    """Read and check header, trailer and directory of a shard.

    Raises:
        FormatError: see ``ShardFile``.
        OSError: the file cannot be read.
    """
    size = source.size
    layout.check_header(bytes(source.section(0, min(layout.HEADER.size, size))), path)
    tail = min(layout.TRAILER.size, size)
    trailer = layout.decode_trailer(bytes(source.section(size - tail, tail)), size, path)
    place = trailer.directory
    directory = layout.decode_directory(bytes(source.section(place.offset, place.size)), trailer, path)
    if KEY not in {column.name for column in directory.columns if column.kind == "text"}:
        raise FormatError(f"{path}: has no text column {KEY!r}")
    return trailer, directory
