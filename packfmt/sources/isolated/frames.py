"""Frames: how an isolated child hands records to its parent, as plain bytes with every length stated and checked.

A frame is a fixed header (magic, length of the JSON part, length of the data part), a JSON object, and the data: the
bytes of a batch of records, end to end. Nothing in it is ever unpickled. The JSON object holds one of::

    {"plan": {...}}                        what was recognised; the first frame
    {"records": [[key, size, columns, shape, fault, offset], ...], "file": 0}
    {"end": {"skipped": {...}, "notes": [...]}}
    {"error": "..."}

``columns`` are values in the order of the plan's columns, or null; ``shape`` is (height, width, channels) where the
bytes are raw 8-bit pixels, else null; ``fault`` says what is wrong with a damaged record, else null. Where ``offset``
is not null, the bytes do not travel: they lie at that offset of an input file, the request's ``file``-th, and the
parent reads them there itself.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

__all__ = [
    "DATA_LIMIT",
    "HEADER",
    "META_LIMIT",
    "RECORD_LIMIT",
    "TEXT_LIMIT",
    "Batch",
    "ByteReader",
    "FrameError",
    "Item",
    "read_frame",
    "write_frame",
]

HEADER = struct.Struct("<4sIQ")
MAGIC = b"PKF1"
META_LIMIT = 16 << 20  # bytes of JSON in one frame
DATA_LIMIT = 1 << 30  # bytes of records in one frame
RECORD_LIMIT = DATA_LIMIT - (1 << 20)  # bytes of one record; a batch that is not yet full comes before it
TEXT_LIMIT = 1 << 20  # characters of key and columns of one record; escaped six-fold, a batch fits META_LIMIT
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 256
_AHEAD_BYTES = 16 << 20  # of records that stay in their file; the child must not run far ahead of the parent's reads
_IOV = 512  # buffers per writev; the usual limit is 1024


class FrameError(Exception):
    """The stream is cut, or is none of frames."""


class Item(NamedTuple):
    """One record on its way to the parent; see above. With an offset, only the length of ``data`` counts."""

    key: str
    data: Any = b""  # anything with the buffer protocol, contiguous
    columns: tuple[Any, ...] | None = None
    shape: tuple[int, int, int] | None = None
    fault: str | None = None
    offset: int | None = None


class ByteReader(Protocol):
    """The one method of an unbuffered binary file that reading frames needs."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read at most ``len(buffer)`` bytes into the buffer; 0 at the end."""


def write_frame(descriptor: int, meta: dict[str, Any], views: Sequence[memoryview] = ()) -> None:
    """Write one frame; the views go out as they lie, uncopied.

    Raises:
        OSError: the other side is gone.
    """
    text = json.dumps(meta, separators=(",", ":")).encode("ascii")
    header = HEADER.pack(MAGIC, len(text), sum(view.nbytes for view in views))
    waiting = [memoryview(header + text), *(view for view in views if view.nbytes)]
    start = 0
    while start < len(waiting):
        written = _gather(descriptor, waiting[start : start + _IOV])
        while start < len(waiting) and written >= waiting[start].nbytes:
            written -= waiting[start].nbytes
            start += 1
        if written:
            waiting[start] = waiting[start][written:]


def _write_one(descriptor: int, views: Sequence[memoryview]) -> int:
    return os.write(descriptor, views[0])


_gather = getattr(os, "writev", _write_one)  # not on every system


def read_frame(reader: ByteReader) -> tuple[dict[str, Any], memoryview] | None:
    """The next frame, or None at the end of the stream.

    Raises:
        FrameError: the stream ends inside a frame, or its lengths are beyond the limits.
    """
    header = memoryview(bytearray(HEADER.size))
    first = reader.readinto(header)
    if not first:
        return None
    _fill(reader, header[first:])
    magic, meta_size, data_size = HEADER.unpack(header)
    if magic != MAGIC or meta_size > META_LIMIT or data_size > DATA_LIMIT:
        raise FrameError(f"not a frame: magic {magic!r}, {meta_size} + {data_size} bytes")
    text = memoryview(bytearray(meta_size))
    _fill(reader, text)
    try:
        meta = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's description is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise FrameError(f"a frame's description is a {type(meta).__name__}, not an object")
    data = memoryview(bytearray(data_size))
    _fill(reader, data)
    return meta, data.toreadonly()


def _fill(reader: ByteReader, buffer: memoryview) -> None:
    while len(buffer):
        got = reader.readinto(buffer)
        if not got:
            raise FrameError("the stream ends inside a frame")
        buffer = buffer[got:]


def _elements(values: list[Any]) -> int:
    """How many numbers an array's nested lists hold."""
    return len(values) * _elements(values[0]) if values and isinstance(values[0], list) else len(values)


class Batch:
    """Collects items and writes them as frames of about a pipe buffer's size.

    Not thread-safe. The items' buffers must stay valid until ``flush``.

    Args:
        descriptor: where the frames go.
        pause: makes the context in which a frame is written, for a clock that must not run meanwhile.

    Attributes:
        file: which of the request's files the items lie in; set it after ``flush``.
    """

    def __init__(self, descriptor: int, pause: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._descriptor = descriptor
        self._pause = pause
        self._entries: list[list[Any]] = []
        self._views: list[memoryview] = []
        self._bytes = 0
        self._text = 0
        self._ahead = 0
        self.file = 0

    def add(self, item: Item) -> None:
        """Take one item; writes a frame when enough has come together."""
        view = memoryview(item.data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        numbers = sum(_elements(value) for value in item.columns or () if isinstance(value, list))
        text = len(item.key) + sum(len(value) for value in item.columns or () if isinstance(value, str)) + numbers
        if view.nbytes > RECORD_LIMIT or text > TEXT_LIMIT:
            allowed = f"at most {RECORD_LIMIT} and {TEXT_LIMIT}"
            fault = f"a record of {view.nbytes} bytes and {text} characters of text; {allowed} are read"
            item, view, text = Item(item.key[:500], fault=fault), memoryview(b""), 500
            numbers = 0
        self._entries.append([item.key, view.nbytes, item.columns, item.shape, item.fault, item.offset])
        self._text += text + 3 * numbers  # a number may take as many bytes as four characters, escaped
        if item.offset is not None:
            self._ahead += view.nbytes
        else:
            self._views.append(view)
            self._bytes += view.nbytes
        many = len(self._entries) >= _BATCH_RECORDS or self._text >= TEXT_LIMIT
        if many or self._bytes >= _BATCH_BYTES or self._ahead >= _AHEAD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        if self._entries:
            with self._pause():
                write_frame(self._descriptor, {"records": self._entries, "file": self.file}, self._views)
            self._entries, self._views, self._bytes, self._text, self._ahead = [], [], 0, 0, 0
