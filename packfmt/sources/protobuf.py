"""Reads the wire format of protocol buffers (protobuf.dev/programming-guides/encoding), with every length checked.

By hand, because Google's package wants a compiled schema for each message and copies every bytes field, images among
them; here they stay views, and a child that reads LMDB starts without it. No schema and no recursion: ``fields`` gives
the numbered pieces of one message, and the caller descends where it knows that a piece is a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["BYTES", "FIXED32", "FIXED64", "VARINT", "WireError", "fields", "floats", "integers", "signed"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MAX_FIELD = (1 << 29) - 1


class WireError(ValueError):
    """Bytes that are not a protocol buffer message."""


def fields(message: bytes | memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield ``(field number, wire type, value)`` of a message, in order.

    The value is an unsigned int for VARINT, and a view of ``message`` for BYTES, FIXED32 and FIXED64. Nothing is
    copied.

    Raises:
        WireError: a number or a length runs past the end, or a wire type is unknown (the groups of proto1 among
        them).
    """
    view = memoryview(message)
    at, end = 0, len(view)
    while at < end:
        tag, at = _varint(view, at)
        number, wire = tag >> 3, tag & 7
        if not 0 < number <= _MAX_FIELD:
            raise WireError(f"field number {number} at byte {at}")
        if wire == VARINT:
            value, at = _varint(view, at)
            yield number, wire, value
            continue
        if wire == BYTES:
            length, at = _varint(view, at)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise WireError(f"wire type {wire} at byte {at}")
        if length > end - at:
            raise WireError(f"a field of {length} bytes at byte {at}, where {end - at} are left")
        yield number, wire, view[at : at + length]
        at += length


def integers(packed: bytes | memoryview) -> list[int]:
    """The int64 values of a packed field.

    Raises:
        WireError: the last number is cut.
    """
    view = memoryview(packed)
    values, at = [], 0
    while at < len(view):
        value, at = _varint(view, at)
        values.append(signed(value))
    return values


def floats(packed: bytes | memoryview) -> npt.NDArray[np.float32]:
    """The float values of a packed field, as a view of it.

    Raises:
        WireError: the length is not a multiple of four.
    """
    if len(packed) % 4:
        raise WireError(f"packed floats of {len(packed)} bytes")
    import numpy as np  # here: who reads no floats starts without it

    return np.frombuffer(packed, "<f4")


def signed(value: int) -> int:
    """An unsigned 64-bit value as the int64 it stands for."""
    return value - (1 << 64) if value >> 63 else value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    if at < len(view) and view[at] < 128:
        return view[at], at + 1  # most numbers are this short
    value = 0
    for position in range(10):
        if at + position >= len(view):
            raise WireError(f"a number is cut at byte {at + position}")
        byte = view[at + position]
        value |= (byte & 127) << (7 * position)
        if byte < 128:
            if value >> 64:
                break
            return value, at + position + 1
    raise WireError(f"a number of more than 64 bits at byte {at}")
