"""Reading one shard file: its frame checked, its index and columns laid over the file when they are asked for.

Records are checked when they are read, all bytes when somebody asks for that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from packfmt import format as layout
from packfmt.errors import CorruptError, FormatError, PackfmtError
from packfmt.format import Directory, Section, Trailer, record_checksum
from packfmt.record import KEY, Column
from packfmt.storage.base import Indices, LaterPlan, MappedPlan, Reader, ReadPlan, Verify, as_positions
from packfmt.storage.columns import Columns, RaggedColumn
from packfmt.storage.fileio import IO, FileBytes, choose_io, open_bytes
from packfmt.storage.keys import hash_key, repeated, same_keys
from packfmt.storage.readahead import ReadAhead

__all__ = ["MappedReader", "ShardFile", "read_frame", "shard_problems"]

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


CHUNK = 256  # records read at a time
CHUNK_BYTES = 32 << 20  # unless they take more than this
ROWS = 1 << 20  # row offsets compared at a time


def shard_problems(file: ShardFile) -> Iterator[PackfmtError]:
    """Yield each fault found (CorruptError, FormatError); nothing yielded means the shard is whole.

    Memory: 16 bytes per record while the keys are compared, else constant.
    """
    for name in layout.INDEX:
        yield from file.section_problems(f"index.{name}")
    yield from _record_problems(file)
    for name in file.described:
        broken = [*file.column_problems(name), *_row_problems(file, name)]
        yield from broken or (_key_problems(file) if name == KEY else ())
    yield from _padding_problems(file)
    if _content_id(file) != file.trailer.content_id:
        yield CorruptError("the content id does not match records and columns", path=file.path)


def _record_problems(file: ShardFile) -> Iterator[PackfmtError]:
    count, last = file.trailer.count, file.trailer.records_end
    end = layout.HEADER.size
    for start in range(0, count, CHUNK):
        chunk = np.arange(start, min(start + CHUNK, count))
        begin = end
        offsets, lengths = file.index("offset")[chunk].tolist(), file.index("length")[chunk].tolist()
        for index, offset, length in zip(chunk.tolist(), offsets, lengths, strict=True):
            if offset != end:
                yield file.corrupt(index, f"starts at {offset}, must start at {end}: overlap or hole")
            end = offset + length
        yield from _read_problems(file, chunk, sum(lengths))
        begin, stop = min(begin, last), min(end, last)
        file.bytes.forget(begin, max(stop - begin, 0))
    if end != last:
        yield FormatError(f"{file.path}: records end at {end}, the trailer says {last}")


def _read_problems(file: ShardFile, chunk: np.ndarray, size: int) -> Iterator[PackfmtError]:
    if size <= CHUNK_BYTES:
        try:
            file.read(chunk, verify=True)
            return
        except CorruptError:
            pass  # one by one, then, to find each of them
    for index in chunk:
        try:
            file.read(index[None], verify=True)
        except CorruptError as error:
            yield error


def _row_problems(file: ShardFile, name: str) -> Iterator[PackfmtError]:
    """Row offsets of a ragged column that do not cover its values in order."""
    column = file.unchecked_column(name)
    if not isinstance(column, RaggedColumn):
        return
    rows, total = column.rows, len(column.values)
    parts = (rows[start : start + ROWS + 1] for start in range(0, len(rows), ROWS))
    if rows[0] != 0 or rows[-1] != total or any((part[1:] < part[:-1]).any() for part in parts):
        message = f"the row offsets of column {name!r} must rise from 0 to {total}; pack the source again"
        yield CorruptError(message, path=file.path)


def _key_problems(file: ShardFile) -> Iterator[PackfmtError]:
    """Keys that are empty or there twice."""
    hashes = np.fromiter(map(hash_key, file.keys()), np.uint64, file.trailer.count)
    for first, index, key in same_keys(repeated([hashes]), file.keys()):
        if key:
            yield file.corrupt(index, f"has the same key as record {first}; pack the source again")
    for index in np.flatnonzero(hashes == hash_key(b"")).tolist():
        yield file.corrupt(index, "has an empty key; pack the source again")


def _padding_problems(file: ShardFile) -> Iterator[PackfmtError]:
    end = file.trailer.records_end
    sections = [*file.directory.sections.values(), file.trailer.directory]
    places = sorted((section.offset, section.size) for section in sections)
    for start, size in [*places, (file.trailer.file_size - layout.TRAILER.size, 0)]:
        if any(file.bytes.section(end, start - end)):
            yield CorruptError(f"the padding at {end} is not zero", path=file.path)
        end = start + size


def _content_id(file: ShardFile) -> bytes:
    digest = xxhash.xxh3_128()
    for part in layout.content_parts(file.directory.columns):
        if isinstance(part, str):
            file.hash_section(file.directory.sections[part], digest)
        else:
            digest.update(part)
    result: bytes = digest.digest()
    return result


PLAIN = (int, np.int64)  # what a single index usually is; others take the longer way, which knows them all


class MappedReader(Reader):
    """One shard. Opening checks header, trailer and directory, whatever the number of records.

    Args:
        path: the shard file.
        io: "mmap", "pread" (network file systems), or "auto".
        verify: check each record's checksum when it is read (True), when it is first read ("once"), or never (False).
        check: "quick", or "full" to check every byte now.
        content_id: refuse a file with another content id (used when a pickled reader is opened again).

    Raises:
        FormatError: not a shard, of an unknown version, truncated, or damaged outside of records and columns.
        CorruptError: with ``check="full"``, the first damage found.
        OSError: the file cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        io: IO = "auto",
        verify: Verify = True,
        check: Literal["quick", "full"] = "quick",
        content_id: str | None = None,
    ) -> None:
        name = os.fspath(path)
        self.io = choose_io(name, io)
        self.refuse_unknown(verify)
        self._lay_over(ShardFile(name, open_bytes(name, self.io)), verify, check, content_id)

    def _lay_over(
        self, file: ShardFile, verify: Verify, check: Literal["quick", "full"], content_id: str | None
    ) -> None:
        """Become the reader of an open shard."""
        self.path = file.path
        self._absolute = os.path.abspath(self.path)  # now: the process may change its folder before it pickles
        self._verify: Verify = verify
        self._file = file
        self.content_id = self._file.trailer.content_id.hex()
        if content_id not in (None, self.content_id):
            raise FormatError(f"{self.path}: holds {self.content_id}, expected {content_id}: the file was replaced")
        self.classes = self._file.directory.classes
        self.metadata = self._file.directory.metadata
        # Not a method of our own: a circle would keep a dropped reader's file open until the collector runs.
        self.columns = Columns(self._file.described, self._file.column, self._file.described)
        self.refuse_damaged(check)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self._absolute, self.io, self._verify, self.content_id))

    def __len__(self) -> int:
        return self._file.trailer.count

    @property
    def record_bytes(self) -> float:
        return (self._file.trailer.records_end - layout.HEADER.size) / max(len(self), 1)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def key(self, index: int) -> str:
        self._file.bytes.check_size()
        return super().key(index)

    def locate(self, index: int) -> tuple[str, int]:
        return self.path, int(as_positions((index,), len(self), self.path)[0])

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._file.ranges(as_positions(indices, len(self), self.path))[1]

    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._file.ranges(as_positions(indices, len(self), self.path))[0]

    def read(self, indices: Indices) -> list[memoryview]:
        if len(indices) == 1 and type(indices[0]) in PLAIN and 0 <= indices[0] < len(self):
            return [self._file.read_one(int(indices[0]), verify=self._verify)]
        return self._file.read(as_positions(indices, len(self), self.path), verify=self._verify)

    def plan(self, indices: Indices) -> ReadPlan:
        positions = as_positions(indices, len(self), self.path)
        try:
            plan = self._file.plan(positions, verify=self._verify)
        except CorruptError:  # of one among them: the others are read
            plan = None
        return plan or LaterPlan(self.read, positions)

    def will_need(self, indices: Indices) -> None:
        if not self._file.ahead.everything_cached():
            self._ask(indices)

    def will_need_blocks(self, indices: Indices) -> None:
        if not self._file.ahead.blocks_cached():
            self._ask(indices)

    def _ask(self, indices: Indices) -> None:
        offsets, lengths = self._file.ranges(as_positions(indices, len(self), self.path))
        order = np.argsort(offsets, kind="stable")
        self._file.ahead.ask(offsets[order].tolist(), lengths[order].tolist())

    def close(self) -> None:
        self._file.close()
        self.columns.forget()

    def problems(self) -> Iterator[Exception]:
        return shard_problems(self._file)


def _reopen(path: str, io: IO, verify: Verify, content_id: str) -> MappedReader:
    return MappedReader(path, io=io, verify=verify, content_id=content_id)
