"""From the values that foreign databases hold to the bytes of an image and its label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from packfmt.images.sniff import FORMATS, magic

__all__ = [
    "Array",
    "Field",
    "Label",
    "Opaque",
    "Sample",
    "ValueFault",
    "image_kind",
    "is_side_text",
    "label_of",
    "numbers",
    "opaque_names",
    "sample_of",
    "what_is",
]


class Array:
    """A numpy array as it stands in the bytes: nothing is checked against ``data`` yet.

    Args:
        dtype: numpy's name of the element type, as "<i8".
        shape: the sizes, C order.
        data: the elements' bytes.
    """

    __slots__ = ("data", "dtype", "shape")

    # By hand, as below: each dataclass takes half a millisecond to make, of the 30 in which a child is loaded.
    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data


class Opaque:
    """A value that only running code could make.

    Args:
        name: what would be imported: "module name".
        arguments: what it would be called with, or None where it is not called.
        state: what would be set on it, or None.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any = None, state: Any = None) -> None:
        self.name = name
        self.arguments = arguments
        self.state = state


_DTYPE = re.compile(r"[<>|=]?[biuf][1248]")
Label = int | float | str | list[Any] | Array | None
_LABELS = ("label", "target", "labels", "targets", "class")
_PIXELS = ("b1", "u1", "i1")


class ValueFault(ValueError):
    """A value that cannot be read as its layout asks; the text says why."""


class Field(NamedTuple):
    """A part of a value, with the name a dict gives it, or ""."""

    name: str
    part: Any


class Sample(NamedTuple):
    """What one value of a serialised layout holds.

    Args:
        image: the encoded image.
        label: an int, a float, a text, a list of numbers, an array of several axes that ``numbers`` reads, or None.
        names: further short texts beside the image, as a file name.
        lost: the fields' names of what is none of these, "" for what has no name.
        opaque: names of what only running code could have made.
    """

    image: bytes
    label: Label = None
    names: Sequence[Field] = ()
    lost: Sequence[str] = ()
    opaque: Sequence[str] = ()


def image_kind(data: bytes | memoryview) -> str | None:
    """The image format that the first bytes show, or None."""
    code = magic(data)
    return FORMATS[code] if code else None


def what_is(data: bytes | memoryview) -> str:
    """What bytes that are not an image look like, for a message."""
    head = bytes(data[:512])
    if not head:
        return "empty"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file (fetch it with `git lfs pull`)"
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, re.IGNORECASE):
        return "an HTML or XML page, probably a failed download"
    if head.startswith(b"\x1f\x8b"):
        return "gzip-compressed (decompress it with `gunzip`)"
    if head.startswith(b"\x04\x22\x4d\x18"):
        return "lz4-compressed"
    if head.startswith(b"PK\x03\x04"):
        return "a zip or npz archive"
    if head.startswith(b"\x93NUMPY"):
        return "a .npy array"
    if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5":
        return "a pickle"
    text = head[:40].decode("ascii", "replace")
    return f"text ({text[:30]!r})" if text.isprintable() and "\ufffd" not in text else f"bytes {head[:8].hex(' ')}"


def is_side_text(data: bytes | memoryview) -> bool:
    """Whether bytes are a text that belongs beside images, as JSON, and no page saved in an image's place."""
    head = bytes(data[:256])
    if magic(head) or not head.strip() or any(byte < 32 and byte not in b"\t\r\n" for byte in head):
        return False
    try:
        head[:250].decode("utf-8", "strict" if len(head) < 250 else "ignore")
    except UnicodeDecodeError:
        return False
    return not what_is(data).startswith(("an HTML", "a Git LFS"))


def numbers(array: Array) -> Any:
    """The numpy array, of plain numbers only.

    Raises:
        ValueFault: another element type, or sizes that do not add up.
    """
    import numpy as np  # here: reading a layout without arrays starts without it

    if not _DTYPE.fullmatch(array.dtype):
        raise ValueFault(f"an array of type {array.dtype!r}; plain numbers are read")
    try:
        dtype = np.dtype(array.dtype)
    except TypeError as error:
        raise ValueFault(f"an array of unknown type {array.dtype!r}") from error
    elements = 1
    for size in array.shape:
        elements *= size
    if elements * dtype.itemsize != len(array.data):
        raise ValueFault(f"an array of shape {array.shape}, type {array.dtype} and {len(array.data)} bytes")
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def label_of(value: Any) -> Label:
    """The label a value stands for, or None where it is none. A row of one number stays a row."""
    if isinstance(value, bool | int | float | str):
        return value if not isinstance(value, bool) else int(value)
    if isinstance(value, Array):
        try:
            array = numbers(value)
        except ValueFault:
            return None
        if array.shape == ():
            number: int | float = array.item()
            return number if not isinstance(number, bool) else int(number)
        if not 1 <= array.size <= 4096:
            return None
        return value if array.ndim > 1 and array.size > 1 else array.ravel().tolist()
    if isinstance(value, list | tuple):
        return _row(value) or (label_of(value[0]) if len(value) == 1 else None)
    return None


def _row(values: list[Any] | tuple[Any, ...]) -> list[Any] | None:
    plain = 1 <= len(values) <= 4096 and all(type(value) in (int, float) for value in values)
    return list(values) if plain else None


def sample_of(value: Any, text_encoding: str = "latin-1") -> Sample:
    """The image, its label and names in a value made of tuples, lists and dicts.

    Args:
        value: as its reader gave it.
        text_encoding: what turns text back into the bytes it was read from: an image may have been taken for text.

    Raises:
        ValueFault: no encoded image, or more than one.
    """
    label, fields = _named_label(value)
    images = [
        (place, image) for place, field in enumerate(fields) if (image := _image(field.part, text_encoding)) is not None
    ]
    if not images:
        raise ValueFault(_no_image([field.part for field in fields]))
    if len(images) > 1:
        raise ValueFault(f"{len(images)} images in one value; one is expected")
    place, image = images[0]
    texts, others, lost = [], [], []
    for name, part in fields[place + 1 :] + fields[:place]:
        one = label_of(part)
        if isinstance(one, str):
            texts.append(Field(name, one))
        elif one is not None:
            others.append(Field(name, one))
        elif part is not None and not isinstance(part, Opaque):
            lost.append(name)
    empty = isinstance(value, dict) and any(name in value and value[name] is None for name in _LABELS)
    if label is None and not empty and (others or texts):  # no other field stands in for a label that is None
        label = (others or texts).pop(0).part
    return Sample(image, label, texts, [*(name for name, _ in others), *lost], opaque_names(value))


def _named_label(value: Any) -> tuple[Label, list[Field]]:
    """The label that a dict names as such, and the parts of all that is left."""
    if isinstance(value, dict):
        for name in _LABELS:
            if (label := label_of(value.get(name))) is not None:
                return label, _flat({key: part for key, part in value.items() if key != name})
    return None, _flat(value)


def _flat(value: Any, depth: int = 4, name: str = "") -> list[Field]:
    """The parts at the top, a lone image in its own list or dict taken out of it."""
    inner: list[tuple[str, Any]] | None = None
    if isinstance(value, dict):
        inner = [(key if isinstance(key, str) else str(key)[:60], part) for key, part in value.items()]
    elif isinstance(value, list | tuple) and not _row(value):
        inner = [(name, part) for part in value]
    if inner is None or depth == 0 or len(inner) > 64:
        return [Field(name, value)]
    return [field for key, part in inner for field in _flat(part, depth - 1, key)]


def _image(part: Any, text_encoding: str) -> bytes | None:
    """The encoded image that a part is: bytes, a row of bytes, or text that older writers kept bytes as."""
    data: Any = part
    if isinstance(part, Array) and part.dtype[-2:] in _PIXELS and len(part.shape) == 1:
        data = part.data
    elif isinstance(part, str) and part[:1] in ("\xff", "\x89", "R", "G", "B"):
        try:
            data = part.encode(text_encoding)
        except UnicodeEncodeError:
            return None
    if not isinstance(data, bytes | bytearray) or image_kind(bytes(data)) is None:
        return None
    return bytes(data)


def _no_image(parts: list[Any]) -> str:
    for part in parts:
        if isinstance(part, Array):
            return f"an array of shape {part.shape} and type {part.dtype}, not an encoded image"
        if isinstance(part, bytes) and part:
            return f"not an image: {what_is(part)}"
    return "no encoded image"


def opaque_names(value: Any, depth: int = 6) -> list[str]:
    """Names of everything in the value that only running code could have made."""
    if isinstance(value, Opaque):
        inner = opaque_names(value.arguments, depth - 1) if depth else []
        return [value.name, *inner]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [name for part in list(parts)[:1000] for name in opaque_names(part, depth - 1)] if depth else []
