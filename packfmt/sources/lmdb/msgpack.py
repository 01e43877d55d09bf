"""MessagePack, read with no hook: plain values only, every length checked against the bytes that are there.

Source: the MessagePack specification. msgpack-numpy's arrays are maps with the keys ``nd``, ``type``, ``shape`` and
``data``; they become ``Array``. Its object arrays hold a pickle, which stays an ``Opaque``.
"""

from __future__ import annotations

import struct
from typing import Any

from packfmt.sources.values import Array, Opaque

__all__ = ["MsgpackError", "read_msgpack"]

_MAX_DEPTH = 16
_MAX_VALUES = 100_000  # in one message; an image with its label takes about ten

# First byte -> struct code of the length or the number that follows.
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BINARIES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class MsgpackError(ValueError):
    """The bytes are not one MessagePack message."""


def read_msgpack(data: bytes | memoryview) -> Any:
    """The value of one message.

    Text that is no UTF-8 is given as bytes: before 2013 the format had one type for both. Thread-safe.

    Raises:
        MsgpackError: the message is cut, has bytes after its end, nests too deep, or holds too many values.
    """
    reader = _Reader(memoryview(data).cast("B"))
    value = reader.value(_MAX_DEPTH)
    if reader.position != len(reader.data):
        raise MsgpackError(f"{len(reader.data) - reader.position} bytes after the message's end")
    return value


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0
        self.left = _MAX_VALUES

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.position:
            raise MsgpackError("a message that is cut short")
        self.position += size
        return self.data[self.position - size : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def value(self, depth: int) -> Any:
        self.left -= 1
        if depth == 0 or self.left < 0:
            raise MsgpackError(f"a message of more than {_MAX_VALUES} values or {_MAX_DEPTH} levels")
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 256
        if first < 0x90:
            return self.map(first & 15, depth)
        if first < 0xA0:
            return self.list(first & 15, depth)
        if first < 0xC0:
            return self.text(first & 31)
        return self.wide(first, depth)

    def wide(self, first: int, depth: int) -> Any:
        """A value whose first byte is its type alone."""
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        if first in _BINARIES:
            return bytes(self.take(self.number(_BINARIES[first])))
        if first in _TEXTS:
            return self.text(self.number(_TEXTS[first]))
        if first in _LISTS:
            return self.list(self.number(_LISTS[first]), depth)
        if first in _MAPS:
            return self.map(self.number(_MAPS[first]), depth)
        if 0xD4 <= first <= 0xD8:
            return self.extension(1 << (first - 0xD4))
        if first in _EXTENSIONS:
            return self.extension(self.number(_EXTENSIONS[first]))
        raise MsgpackError(f"byte 0x{first:02x} starts no MessagePack value")

    def text(self, size: int) -> str | bytes:
        raw = bytes(self.take(size))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw

    def list(self, count: int, depth: int) -> Any:
        return [self.value(depth - 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> Any:
        values: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth - 1)
            value = self.value(depth - 1)
            if isinstance(key, str | bytes | int):
                values[key.decode("latin-1") if isinstance(key, bytes) else key] = value
        return _array(values) or values

    def extension(self, size: int) -> Opaque:
        kind = self.number(">b")
        self.take(size)
        return Opaque(f"msgpack extension {kind}")


def _array(values: dict[Any, Any]) -> Array | Opaque | None:
    """The numpy array or scalar that the map stands for, or None."""
    if "nd" not in values or "data" not in values:
        return None
    dtype, shape, data = values.get("type"), values.get("shape", []), values["data"]
    if values.get("kind") in ("O", b"O") or dtype in ("O", "|O", b"O", b"|O"):
        return Opaque("pickle in a msgpack-numpy object array")
    if isinstance(dtype, bytes):
        dtype = dtype.decode("latin-1")
    if isinstance(data, str):
        data = data.encode("utf-8")
    whole = isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)
    if not (isinstance(dtype, str) and whole and isinstance(data, bytes)):
        return Opaque("msgpack-numpy array of a structured type")
    return Array(dtype, tuple(shape), data)
