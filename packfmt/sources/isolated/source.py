"""What the sources that read through an isolated child share.

Images that lie as they are somewhere in an input file are read here: by offset, several at once, from many threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packfmt.errors import DecodeError, SourceError
from packfmt.images.decode import decode
from packfmt.images.encode import parse_encoding
from packfmt.record import Column, Record
from packfmt.sources.base import BadEntry, SkipEntry, Source
from packfmt.sources.isolated.process import IsolatedReader
from packfmt.sources.values import is_side_text

__all__ = ["GAP", "InputFiles", "IsolatedSource", "Located", "read_together"]

_KEPT_OPEN = 64


class InputFiles:
    """A fixed list of files. Thread-safe, but for ``close``.

    Args:
        paths: the files; they need not exist before they are read. The first ones stay open once they were read.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._sizes: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._open)  # for who forgets to close

    def holds(self, file: object, offset: object, size: object) -> bool:
        """Whether the file has that many bytes there, or had when it was first asked about."""
        if not (isinstance(file, int) and isinstance(offset, int) and isinstance(size, int)):
            return False
        if not 0 <= file < len(self._paths):
            return False
        if file not in self._sizes:
            self._sizes[file] = os.path.getsize(self._paths[file])
        return offset >= 0 and size >= 0 and offset + size <= self._sizes[file]

    def read(self, file: int, offset: int, size: int) -> bytes:
        """The bytes of one part, which ``holds`` was asked about.

        Raises:
            OSError: the file cannot be read.
            SourceError: it has become shorter.
        """
        descriptor = self._descriptor(file)
        try:
            data = os.pread(descriptor, size, offset)
            while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
                data += more
        finally:
            if file >= _KEPT_OPEN:
                os.close(descriptor)
        if len(data) != size:
            raise SourceError(f"{self._paths[file]}: became shorter while it was read; begin again")
        return data

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        with self._lock:
            _close_all(self._open)

    def _descriptor(self, file: int) -> int:
        if file >= _KEPT_OPEN:
            return os.open(self._paths[file], os.O_RDONLY)
        with self._lock:
            if file not in self._open:
                descriptor = os.open(self._paths[file], os.O_RDONLY)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._open[file] = descriptor
            return self._open[file]


def _close_all(opened: dict[int, int]) -> None:
    while opened:
        os.close(opened.popitem()[1])


GAP = 8 << 10  # bytes between two images that are read along: a value in LMDB begins on a page of its own


@dataclass(frozen=True, slots=True)
class Located:
    """A handle of an image file that lies somewhere in an input file.

    Args:
        key: the record's key.
        file: position in the source's files.
        offset, size: bytes.
        columns: as in Record.
    """

    key: str
    file: int
    offset: int
    size: int
    columns: dict[str, Any]


def read_together(files: InputFiles, entries: list[Any]) -> list[Any]:
    """The same entries with records in place of handles, read with one call where they lie close together.

    Those that cannot be read so stay as they are, and so does what is not a ``Located``. Thread-safe.

    Raises:
        SourceError: a file has become shorter.
    """
    fetched = list(entries)
    places = [place for place, entry in enumerate(entries) if isinstance(entry, Located)]
    places.sort(key=lambda place: (entries[place].file, entries[place].offset))
    for run in _runs(entries, places):
        first = entries[run[0]]
        stop = max(entries[place].offset + entries[place].size for place in run)
        try:
            data = memoryview(files.read(first.file, first.offset, stop - first.offset))
        except OSError:
            continue
        for place in run:
            entry = entries[place]
            start = entry.offset - first.offset
            fetched[place] = Record(data[start : start + entry.size], entry.key, entry.columns)
    return fetched


def _runs(entries: list[Any], places: list[int]) -> Iterator[list[int]]:
    """Cut places, which are sorted by file and offset, where a gap is too wide to be read along."""
    run: list[int] = []
    file = stop = 0
    for place in places:
        entry = entries[place]
        if run and (entry.file != file or entry.offset > stop + GAP):
            yield run
            run = []
        if not run:
            file, stop = entry.file, 0
        run.append(place)
        stop = max(stop, entry.offset + entry.size)
    if run:
        yield run


LONGEST = 86400  # seconds: a day. Timers of the system's end at some 24 days


@dataclass(frozen=True, slots=True)
class RawPixels:
    """A handle of an image that is there as pixels; ``load`` encodes it.

    Args:
        key: the record's key.
        data: uint8, C order.
        shape: (height, width, channels).
        columns: as in Record.
    """

    key: str
    data: memoryview
    shape: tuple[int, int, int]
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Unchecked:
    """A handle of an image that was cut out of something else; ``load`` decodes it to see that it is whole."""

    record: Record

    @property
    def key(self) -> str:
        """The record's key."""
        return self.record.key


class IsolatedSource(Source):
    """A source whose file is parsed in a child process.

    What the child says about places in the input files is checked against their sizes, and the bytes are read here:
    they need not pass through the child.

    Args:
        reader: the child's reader, a key of ``isolated_child.READERS``.
        request: JSON-able, for that reader.
        path: what is read, for messages.
        memory: limit on the child's address space, bytes.
        timeout: seconds the child may take to its next records, at most a day.
        encode: "png" or "jpeg:QUALITY", for images that are there as pixels only.
        files: the input files, whose parts the child may name by offset.
        check: decode each image before it is handed on.

    Raises:
        SourceError: the file was refused, crashed its reader, or took too long.
        ValueError: ``encode`` is unknown, or ``timeout`` out of range.
    """

    inline = (Record, BadEntry, Located)

    def __init__(
        self,
        reader: str,
        request: dict[str, Any],
        *,
        path: str,
        memory: int,
        timeout: float,
        encode: str,
        files: Sequence[str] = (),
        check: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < timeout <= LONGEST:  # nan is refused too
            raise ValueError(f"{path}: timeout {timeout} must be above 0 and at most {LONGEST} seconds; choose another")
        self.path = path
        self._order = (reader, request)
        self._limits = {"memory": memory, "timeout": timeout}
        self._encode = parse_encoding(encode)
        self._encoding = encode
        self._check = check
        self._files = InputFiles(files)
        self._lock = threading.Lock()
        self._running: set[IsolatedReader] = set()
        # The first child gives the plan and waits; the first iteration goes on with it.
        self._waiting: IsolatedReader | None = self._launch()
        try:
            self._plan = self._waiting.plan()
            self.columns = tuple(Column.of_spec(*spec) for spec in self._plan.get("columns") or ())
        except BaseException:
            self.close()
            raise
        self._names = [column.name for column in self.columns]
        self.classes = tuple(self._plan.get("classes") or ())
        self.lost = [str(name) for name in self._plan.get("lost") or ()]
        self.metadata = dict(self._plan.get("metadata") or {})
        self.random_access = bool(self._plan.get("random_access"))
        self._side_texts = bool(self._plan.get("side_texts"))
        self.layout: str = str(self._plan.get("layout"))

    def entries(self) -> Iterator[Any]:
        """Records as the child sends them; raises SourceError where it fails."""
        reader = self._take()
        self.skipped, self.notes[:] = Counter(), []
        try:
            for meta, data in reader.frames():
                if "end" in meta:
                    self._finish(meta["end"])
                    return
                yield from self._handles(meta, data)
        finally:
            self._drop(reader)

    def fetch(self, entries: list[Any]) -> list[Any]:
        """As ``Source.fetch``: reads what lies close together in a file in one go."""
        return read_together(self._files, entries)

    def load(self, entry: Any) -> Record:
        """As ``Source.load``; checks what the layout asks to be checked."""
        record = super().load(entry)
        if self._side_texts and is_side_text(record.data):
            raise SkipEntry("text beside the images")
        return record

    def _load(self, entry: Any) -> Record:
        """Read what lies in a file, encode what is there as pixels, decode what may not be a whole image."""
        if isinstance(entry, Located):
            return Record(self._files.read(entry.file, entry.offset, entry.size), entry.key, entry.columns)
        if isinstance(entry, RawPixels):
            try:
                data = self._encode(np.frombuffer(entry.data, np.uint8).reshape(entry.shape))
            except (ValueError, OSError) as error:
                raise DecodeError(str(error), key=entry.key) from error
            return Record(data, entry.key, entry.columns)
        unchecked: _Unchecked = entry
        try:
            decode(unchecked.record.data)
        except DecodeError as error:
            raise DecodeError(error.message, key=unchecked.key) from error
        return unchecked.record

    def size(self, entry: Any) -> int:
        """As ``Source.size``; of pixels their own size."""
        if isinstance(entry, Located):
            return entry.size
        if isinstance(entry, RawPixels):
            return entry.data.nbytes
        return super().size(entry.record if isinstance(entry, _Unchecked) else entry)

    def count(self) -> int | None:
        """The number of records, where the file tells it."""
        count = self._plan.get("count")
        return count if isinstance(count, int) else None

    def describe(self) -> dict[str, Any]:
        """As ``Source.describe``, with the layout that was recognised."""
        return {**super().describe(), "layout": self.layout, "encode": self._encoding}

    def close(self) -> None:
        """End every child that still runs."""
        with self._lock:
            readers, self._running, self._waiting = list(self._running), set(), None
        for reader in readers:
            reader.close()
        self._files.close()

    def _launch(self) -> IsolatedReader:
        reader = IsolatedReader(self._order[0], self._order[1], path=self.path, **self._limits)  # type: ignore[arg-type]
        with self._lock:
            self._running.add(reader)
        return reader

    def _take(self) -> IsolatedReader:
        with self._lock:
            reader, self._waiting = self._waiting, None
        if reader is not None:
            return reader
        reader = self._launch()
        if reader.plan() != self._plan:
            self._drop(reader)
            raise SourceError(f"{self.path}: changed since it was first read; begin again")
        return reader

    def _drop(self, reader: IsolatedReader) -> None:
        with self._lock:
            self._running.discard(reader)
        reader.close()

    def _handles(self, meta: dict[str, Any], data: memoryview) -> Iterator[Any]:
        start, file = 0, meta["file"]
        for key, size, values, shape, fault, offset in meta["records"]:
            if offset is not None and fault is None and self._files.holds(file, offset, size):
                yield Located(key, file, offset, size, dict(zip(self._names, values or (), strict=False)))
                continue
            if offset is not None or not (isinstance(size, int) and 0 <= size <= len(data) - start):
                raise SourceError(f"{self.path}: its reader sent records that do not add up")
            view = data[start : start + size]
            start += size
            columns = dict(zip(self._names, values or (), strict=False))
            if fault is not None:
                yield self.bad_entry(key, fault, view, columns)
            elif shape is not None:
                yield RawPixels(key, view, tuple(shape), columns)
            else:
                record = Record(view, key, columns)
                yield _Unchecked(record) if self._check else record

    def _finish(self, end: dict[str, Any]) -> None:
        self.skipped.update({str(reason): int(count) for reason, count in (end.get("skipped") or {}).items()})
        self.notes.extend(str(note) for note in end.get("notes") or ())
