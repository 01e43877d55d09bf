"""The framing of TFRecord files: length, its masked CRC-32C, data, the data's masked CRC-32C.

By hand, because the reader of this format is part of TensorFlow, which is far too large for it. Source: the section
"TFRecords format details" of tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol, cast

from packfmt.errors import DecodeError, SourceError
from packfmt.sources.inputs import MAX_IMAGE_BYTES, head_of

__all__ = ["Frame", "frames", "is_tfrecord", "masked_crc32c", "read_frame"]

_HEADER = struct.Struct("<QI")  # length, masked CRC-32C of the eight bytes before
_CRC = struct.Struct("<I")
_PIECE = 1 << 20
MAX_RECORD = 2 * MAX_IMAGE_BYTES


def load_crc32c() -> Any:
    """The module google_crc32c.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import google_crc32c
    except ImportError as error:
        raise SourceError("reading TFRecord needs google-crc32c: pip install 'packfmt[convert]'") from error
    return google_crc32c


def masked_crc32c(data: bytes) -> int:
    """CRC-32C as TFRecord stores it: turned right by 15 bits, plus a constant (tensorflow/core/lib/hash/crc32c.h)."""
    crc: int = load_crc32c().value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF


class _Reader(Protocol):
    def read(self, count: int, /) -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Frame:
    """Where one record lies.

    Args:
        path: the file.
        number: the record's place in it, from 0.
        offset: where its data starts, in bytes; -1 in a compressed file.
        length: bytes of data.
        stored: data and checksum, for a compressed file, which cannot be read in the middle.
    """

    path: Path
    number: int
    offset: int
    length: int
    stored: bytes | None = None


def is_tfrecord(path: Path, head: bytes) -> bool:
    """Whether the file, which begins with these bytes, is TFRecord, plain or compressed, by its first checksum.

    Never raises.
    """
    try:
        return _kind(path, head) is not None
    except (OSError, EOFError, zlib.error):
        return False


def frames(path: Path) -> Iterator[Frame]:
    """Yield the frames of one file, in order; an empty file has none.

    Raises:
        SourceError: a length is damaged, impossible, or larger than what is left, so that the next record is lost.
        OSError: the file cannot be read.
    """
    if os.path.getsize(path) == 0:
        return
    kind = _kind(path, head_of(path))
    if kind is None:
        raise SourceError(f"{path} is not a TFRecord file: the checksum of its first length does not match")
    yield from _plain_frames(path) if kind == "plain" else _packed_frames(path, kind)


def read_frame(frame: Frame) -> bytes:
    """The data of a frame, checked. Thread-safe.

    Raises:
        DecodeError: the checksum does not match.
        OSError: the file cannot be read.
    """
    stored = frame.stored
    if stored is None:
        with open(frame.path, "rb") as file:
            file.seek(frame.offset)
            stored = file.read(frame.length + _CRC.size)
    if len(stored) != frame.length + _CRC.size:
        raise DecodeError("the file was cut while it was read", path=str(frame.path), index=frame.number)
    data = stored[: frame.length]
    if masked_crc32c(data) != _CRC.unpack_from(stored, frame.length)[0]:
        raise DecodeError("damaged: its CRC-32C does not match", path=str(frame.path), index=frame.number)
    return data


def _kind(path: Path, head: bytes) -> str | None:
    """ "plain", "gzip" or "zlib". A plain file may start with any byte, so the checksum has the first word."""
    if _is_header(head[: _HEADER.size]):
        return "plain"
    if head[:2] == b"\x1f\x8b":
        kind = "gzip"
    elif len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0:
        kind = "zlib"
    else:
        return None
    reader = _open_packed(path, kind)
    try:
        return kind if _is_header(reader.read(_HEADER.size)) else None
    finally:
        reader.close()


def _is_header(head: bytes) -> bool:
    if len(head) != _HEADER.size:
        return False
    length, stored = _HEADER.unpack(head)
    if find_spec("google_crc32c") is None:
        return bool(0 < length <= MAX_RECORD)  # a guess, so that reading it says what is missing
    return bool(masked_crc32c(head[:8]) == stored)


def _length(head: bytes, path: Path, number: int) -> int:
    if len(head) < _HEADER.size:
        raise SourceError(f"{path}, record {number}: the file is cut in a record's header")
    if not _is_header(head):
        raise SourceError(
            f"{path}, record {number}: the checksum of its length does not match; this record and those behind it "
            "cannot "
            "be found. Fetch the file anew"
        )
    length: int = _HEADER.unpack(head)[0]
    if length > MAX_RECORD:
        raise SourceError(f"{path}, record {number}: {length} bytes; at most {MAX_RECORD} are read")
    return length


def _plain_frames(path: Path) -> Iterator[Frame]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        offset, number = 0, 0
        while offset < size:
            file.seek(offset)
            length = _length(file.read(_HEADER.size), path, number)
            start = offset + _HEADER.size
            if length + _CRC.size > size - start:
                raise SourceError(
                    f"{path}, record {number}: declares {length} bytes where {size - start} are left; the file is "
                    "cut short"
                )
            yield Frame(path, number, start, length)
            offset, number = start + length + _CRC.size, number + 1


def _packed_frames(path: Path, kind: str) -> Iterator[Frame]:
    reader = _open_packed(path, kind)
    try:
        number = 0
        while head := _take(reader, _HEADER.size, path):
            length = _length(head, path, number)
            stored = _take(reader, length + _CRC.size, path)
            if len(stored) != length + _CRC.size:
                raise SourceError(f"{path}, record {number}: the file ends inside it; it is cut short")
            yield Frame(path, number, -1, length, stored)
            number += 1
    finally:
        reader.close()


def _take(reader: _Reader, count: int, path: Path) -> bytes:
    pieces = []
    try:
        while count and (piece := reader.read(min(count, _PIECE))):
            pieces.append(piece)
            count -= len(piece)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path} cannot be unpacked on ({error}); it is damaged or cut short") from error
    return b"".join(pieces)


def _open_packed(path: Path, kind: str) -> _Reader:
    if kind == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return _ZlibReader(path)


class _ZlibReader:
    """A bounded reader of one zlib stream, which the standard library has only for gzip's wrapping."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115  closed by close()
        self._unpacker = zlib.decompressobj()

    def read(self, count: int, /) -> bytes:
        while not self._unpacker.eof:
            packed = self._unpacker.unconsumed_tail or self._file.read(1 << 16)
            data = self._unpacker.decompress(packed, count)
            if data:
                return data
            if not packed and not self._unpacker.eof:
                raise EOFError("the zlib stream has no end")
        return b""

    def close(self) -> None:
        self._file.close()
