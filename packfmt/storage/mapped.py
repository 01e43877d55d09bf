"""Reading one shard file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from packfmt import format as layout
from packfmt.errors import CorruptError, FormatError, PackfmtError
from packfmt.format import Directory, Section, Trailer, record_checksum
from packfmt.record import KEY, Column
from packfmt.storage.base import Indices, Reader
from packfmt.storage.columns import Columns, RaggedColumn
from packfmt.storage.filebytes import IO, FileBytes, choose_io, open_bytes

__all__ = ["MappedReader"]

WINDOW = 8 << 20  # bytes of a column checked at a time, so that checking does not fill resident memory


class MappedReader(Reader):
    """One shard. Opening checks header, trailer and directory, whatever the number of records.

    Args:
        path: the shard file.
        io: "mmap", "pread" (network file systems), or "auto".
        verify: check each record's checksum when it is read.
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
        verify: bool = True,
        check: Literal["quick", "full"] = "quick",
        content_id: str | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._verify = verify
        self.io = choose_io(self.path, io)
        self._trailer, self._directory = read_frame(self.path)
        self.content_id = self._trailer.content_id.hex()
        if content_id not in (None, self.content_id):
            raise FormatError(f"{self.path}: holds {self.content_id}, expected {content_id}: the file was replaced")
        self.classes = self._directory.classes
        self.metadata = self._directory.metadata
        self._columns = {column.name: column for column in self._directory.columns}
        self.columns = Columns(tuple(self._columns), self._load_column)
        self._bytes: FileBytes = open_bytes(self.path, self.io)
        self._index: dict[str, npt.NDArray[np.uint64]] = {}
        if check == "full":
            for problem in self.problems():
                self.close()
                raise problem

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (os.path.abspath(self.path), self.io, self._verify, self.content_id))

    def __len__(self) -> int:
        return self._trailer.count

    @property
    def record_bytes(self) -> float:
        return (self._trailer.records_end - layout.HEADER.size) / max(len(self), 1)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def locate(self, index: int) -> tuple[str, int]:
        return self.path, index

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._array("length")[self._positions(indices)]

    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._array("offset")[self._positions(indices)]

    def read(self, indices: Indices) -> list[memoryview]:
        positions = self._positions(indices)
        offsets, lengths = self._ranges(positions)
        order = np.argsort(offsets, kind="stable")
        in_order = positions[order]
        starts, sizes = offsets[order].tolist(), lengths[order].tolist()
        self._bytes.check_size()
        if len(positions) > 1:
            self._bytes.will_need(starts, sizes)
        views = self._bytes.slices(starts, sizes)
        if self._verify:
            self._check(in_order, views)
        out: list[memoryview] = [views[0]] * len(views) if views else []
        for place, view in zip(order.tolist(), views, strict=True):
            out[place] = view
        return out

    def will_need(self, indices: Indices) -> None:
        offsets, lengths = self._ranges(np.sort(self._positions(indices)))
        self._bytes.will_need(offsets.tolist(), lengths.tolist())

    def close(self) -> None:
        self._bytes.close()
        self._index.clear()

    def problems(self) -> Iterator[Exception]:
        from_start = layout.HEADER.size
        offsets, lengths = self._array("offset"), self._array("length")
        for name in layout.INDEX:
            yield from self._section_problems(f"index.{name}")
        expected = from_start
        for start in range(0, len(self), 1024):
            for index in range(start, min(start + 1024, len(self))):
                offset, length = int(offsets[index]), int(lengths[index])
                if offset != expected:
                    yield self._corrupt(index, f"starts at {offset}, must start at {expected}: overlap or hole")
                expected = offset + length
                try:
                    view = self.read((index,))[0]
                    if not self._verify:
                        self._check(np.array([index]), [view])
                except CorruptError as error:
                    yield error
            self._bytes.forget(min(int(offsets[start]), self._trailer.records_end), WINDOW)
        if expected != self._trailer.records_end:
            yield FormatError(f"{self.path}: records end at {expected}, the trailer says {self._trailer.records_end}")
        for name in self.columns:
            broken = [*self._column_problems(name), *self._rows_problems(name)]
            yield from broken or (self._key_problems() if name == KEY else ())
        yield from self._padding_problems()
        if self._compute_content_id() != self._trailer.content_id:
            yield CorruptError("the content id does not match records and columns", path=self.path)

    # Index and columns

    def _positions(self, indices: Indices) -> npt.NDArray[np.int64]:
        positions = np.asarray(indices, dtype=np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"{self.path} has {len(self)} records, asked for {positions.min()} to {positions.max()}")
        return positions

    def _array(self, name: str) -> npt.NDArray[np.uint64]:
        if name not in self._index:
            section = self._directory.sections[f"index.{name}"]
            self._index[name] = np.frombuffer(self._bytes.section(section.offset, section.size), "<u8")
        return self._index[name]

    def _ranges(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Offsets and lengths of records, checked to lie in the records' part of the file."""
        offsets, lengths = self._array("offset")[positions], self._array("length")[positions]
        end = np.uint64(self._trailer.records_end)
        outside = (offsets < layout.HEADER.size) | (offsets > end) | (lengths > end - np.minimum(offsets, end))
        if outside.any():
            bad = int(positions[outside][0])
            offset, length = int(offsets[outside][0]), int(lengths[outside][0])
            raise self._corrupt(bad, f"{length} bytes at {offset} lie outside the records, which end at {end}")
        return offsets, lengths

    def _check(self, positions: npt.NDArray[np.int64], views: list[memoryview]) -> None:
        sums = self._array("checksum")[positions].tolist()
        for index, view, stated in zip(positions.tolist(), views, sums, strict=True):
            if record_checksum(view, index) != stated:
                raise self._corrupt(index, f"its {len(view)} bytes do not match their checksum; restore the file")

    def _corrupt(self, index: int, message: str) -> CorruptError:
        try:
            key = self.key(index)
        except PackfmtError:
            key = None
        return CorruptError(message, path=self.path, index=index, key=key)

    def _load_column(self, name: str) -> npt.NDArray[Any] | RaggedColumn:
        for problem in self._column_problems(name):
            raise problem
        column = self._columns[name]
        values = self._values(column)
        if not column.ragged:
            return values
        rows = self._directory.sections[f"rows.{name}"]
        starts = np.frombuffer(self._bytes.section(rows.offset, rows.size), "<u8")
        return RaggedColumn(column, starts, values, self.path)

    def _values(self, column: Column) -> npt.NDArray[Any]:
        section = self._directory.sections[f"column.{column.name}"]
        flat = np.frombuffer(self._bytes.section(section.offset, section.size), column.dtype)
        return flat.reshape(-1 if column.ragged else len(self), *column.row_shape)

    # Checks

    def _column_problems(self, name: str) -> Iterator[Exception]:
        if self._columns[name].ragged:
            yield from self._section_problems(f"rows.{name}")
        yield from self._section_problems(f"column.{name}")

    def _rows_problems(self, name: str) -> Iterator[Exception]:
        """Row offsets of a ragged column that do not cover its values in order."""
        if not self._columns[name].ragged:
            return
        section = self._directory.sections[f"rows.{name}"]
        rows = np.frombuffer(self._bytes.section(section.offset, section.size), "<u8")
        total = len(self._values(self._columns[name]))
        if rows[0] != 0 or rows[-1] != total or (rows[1:] < rows[:-1]).any():
            message = f"the row offsets of column {name!r} must rise from 0 to {total}; pack the source again"
            yield CorruptError(message, path=self.path)

    def _key_problems(self) -> Iterator[Exception]:
        """Keys that are empty or there twice; compares 64-bit hashes, then the keys whose hashes agree."""
        keys = self.columns[KEY]
        raw = (keys[i].encode("utf-8", "surrogateescape") for i in range(len(self)))
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, raw), np.uint64, len(self))
        order = np.argsort(hashes, kind="stable")
        for place in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]).tolist():
            first, second = int(order[place]), int(order[place + 1])
            if keys[first] == keys[second]:
                yield self._corrupt(second, f"has the same key as record {first}; pack the source again")
        for index in np.flatnonzero(hashes == xxhash.xxh3_64_intdigest(b"")).tolist():
            if not keys[index]:
                yield self._corrupt(index, "has an empty key; pack the source again")

    def _section_problems(self, name: str) -> Iterator[Exception]:
        section = self._directory.sections[name]
        digest = xxhash.xxh3_64()
        self._hash_section(section, digest)
        if digest.intdigest() != section.checksum:
            kind, _, column = name.partition(".")
            what = f"index array {column!r}" if kind == "index" else f"column {column!r}"
            yield CorruptError(f"{what} does not match its checksum; restore the file from a copy", path=self.path)

    def _hash_section(self, section: Section, digest: Any) -> None:
        for start in range(section.offset, section.offset + section.size, WINDOW):
            size = min(WINDOW, section.offset + section.size - start)
            digest.update(self._bytes.section(start, size))
            self._bytes.forget(start, size)

    def _padding_problems(self) -> Iterator[Exception]:
        end = self._trailer.records_end
        ranges = [*self._directory.sections.values(), self._trailer.directory]
        for start, stop in [(r.offset, r.offset + r.size) for r in sorted(ranges, key=lambda r: (r.offset, r.size))]:
            if any(self._bytes.section(end, start - end)):
                yield CorruptError(f"the padding at {end} is not zero", path=self.path)
            end = stop
        if any(self._bytes.section(end, self._trailer.file_size - layout.TRAILER.size - end)):
            yield CorruptError(f"the padding at {end} is not zero", path=self.path)

    def _compute_content_id(self) -> bytes:
        digest = xxhash.xxh3_128()
        for part in layout.content_parts(self._directory.columns):
            if isinstance(part, str):
                self._hash_section(self._directory.sections[part], digest)
            else:
                digest.update(part)
        result: bytes = digest.digest()
        return result


def read_frame(path: str) -> tuple[Trailer, Directory]:
    """Read and check header, trailer and directory of a shard.

    Raises:
        FormatError: see ``MappedReader``.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        layout.check_header(file.read(layout.HEADER.size), path)
        file.seek(max(size - layout.TRAILER.size, 0))
        trailer = layout.decode_trailer(file.read(layout.TRAILER.size), size, path)
        file.seek(trailer.directory.offset)
        directory = layout.decode_directory(file.read(trailer.directory.size), trailer, path)
    if KEY not in {column.name for column in directory.columns if column.kind == "text"}:
        raise FormatError(f"{path}: has no text column {KEY!r}")
    return trailer, directory


def _reopen(path: str, io: IO, verify: bool, content_id: str) -> MappedReader:
    return MappedReader(path, io=io, verify=verify, content_id=content_id)
