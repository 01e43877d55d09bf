"""What the sources that read through an isolated child share."""

from __future__ import annotations

import threading
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
from packfmt.sources.located import InputFiles, Located, read_together
from packfmt.sources.values import is_side_text

__all__ = ["IsolatedSource", "RawPixels"]

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
            self.columns = tuple(_column(spec) for spec in self._plan.get("columns") or ())
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
        """As ``Source.load``; encodes an image that is there as pixels."""
        if isinstance(entry, RawPixels):
            try:
                data = self._encode(np.frombuffer(entry.data, np.uint8).reshape(entry.shape))
            except (ValueError, OSError) as error:
                raise DecodeError(str(error), key=entry.key) from error
            return Record(data, entry.key, entry.columns)
        if isinstance(entry, Located):
            entry = Record(self._files.read(entry.file, entry.offset, entry.size), entry.key, entry.columns)
        record = super().load(entry)
        if self._side_texts and is_side_text(record.data):
            raise SkipEntry("text beside the images")
        if self._check:
            try:
                decode(record.data)
            except DecodeError as error:
                raise DecodeError(error.message, key=record.key) from error
        return record

    def handy(self, entry: Any) -> bool:
        """As ``Source.handy``: not what must be encoded or decoded."""
        return not self._check and not isinstance(entry, RawPixels)

    def size(self, entry: Any) -> int:
        """As ``Source.size``; of pixels their own size."""
        if isinstance(entry, Located):
            return entry.size
        return entry.data.nbytes if isinstance(entry, RawPixels) else super().size(entry)

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
                whole = bool(size) and len(columns) == len(self._names)  # else there is nothing that could be kept
                yield BadEntry(key, fault, bytes(view) if whole else None, columns if whole else None)
            elif shape is not None:
                yield RawPixels(key, view, tuple(shape), columns)
            else:
                yield Record(view, key, columns)

    def _finish(self, end: dict[str, Any]) -> None:
        self.skipped.update({str(reason): int(count) for reason, count in (end.get("skipped") or {}).items()})
        self.notes.extend(str(note) for note in end.get("notes") or ())


def _column(spec: list[Any]) -> Column:
    name, dtype, shape, kind = spec
    return Column(name, dtype, tuple(shape), kind)
