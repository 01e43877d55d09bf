"""MessagePack values of databases: plain values only, bounded in number and depth.

Source: the MessagePack specification. msgpack-numpy's arrays are maps with the keys ``nd``, ``type``, ``shape`` and
``data``; they become ``Array``. Its object arrays hold a pickle, which stays an ``Opaque``.
"""

from __future__ import annotations

from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.values import Array, Opaque

__all__ = ["MsgpackError", "read_msgpack"]

_MAX_DEPTH = 16
_MAX_VALUES = 100_000  # in one message; an image with its label takes about ten


class MsgpackError(ValueError):
    """The bytes are not one MessagePack message."""


def read_msgpack(data: bytes | memoryview) -> Any:
    """The value of one message.

    Text that is not UTF-8 is given as bytes: before 2013 the format had one type for both. Thread-safe.

    Raises:
        MsgpackError: the message is cut, has bytes after its end, nests too deep, or holds too many values.
        SourceError: msgpack is not installed.
    """
    msgpack = load_msgpack()
    left = _MAX_VALUES
    longest = min(_MAX_VALUES, len(data))  # lists are allocated by the length that is written

    def count(entries: Any) -> Any:
        nonlocal left
        left -= len(entries)
        if left < 0:
            raise MsgpackError(f"a message of more than {_MAX_VALUES} values")
        return entries

    try:
        value = msgpack.unpackb(
            data,
            unicode_errors="surrogateescape",
            strict_map_key=False,
            list_hook=count,
            object_pairs_hook=lambda pairs: _Map(count(pairs)),
            ext_hook=lambda kind, _: Opaque(f"msgpack extension {kind}"),
            max_array_len=longest,
            max_map_len=longest,
        )
    except msgpack.StackError as error:
        raise MsgpackError(f"a message of more than {_MAX_DEPTH} levels") from error
    except (ValueError, msgpack.OutOfData) as error:  # all the others that it raises are ValueErrors
        raise MsgpackError(str(error) or "a message that is cut short or is not MessagePack") from error
    return _plain(value, _MAX_DEPTH)


def load_msgpack() -> Any:
    """The module msgpack.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import msgpack
    except ImportError as error:
        raise SourceError("reading MessagePack values needs msgpack: pip install 'packfmt[convert]'") from error
    return msgpack


class _Map(list[tuple[Any, Any]]):
    """The pairs of a map, whose keys need not be hashable."""


def _plain(value: Any, depth: int) -> Any:
    """The value with its texts, maps and arrays in their final form."""
    if isinstance(value, str):
        return value if value.isascii() or _is_text(value) else value.encode("utf-8", "surrogateescape")
    if isinstance(value, (bool, int, float, bytes, Opaque)) or value is None:
        return value
    if not isinstance(value, list):
        return Opaque("msgpack timestamp")
    if depth == 0:
        raise MsgpackError(f"a message of more than {_MAX_DEPTH} levels")
    if not isinstance(value, _Map):
        return [_plain(entry, depth - 1) for entry in value]
    values: dict[Any, Any] = {}
    for key, entry in value:
        name = _plain(key, depth - 1)
        if isinstance(name, str | bytes | int):
            values[name.decode("latin-1") if isinstance(name, bytes) else name] = _plain(entry, depth - 1)
    return _array(values) or values


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


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
