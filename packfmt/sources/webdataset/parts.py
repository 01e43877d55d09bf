"""The parts that stand beside an image in a WebDataset sample: which column each becomes, and its checked value."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packfmt.bounded_json import RECORD, parse_json
from packfmt.record import Column
from packfmt.sources.facts import Facts, from_json

__all__ = [
    "MAX_PART_BYTES",
    "Image",
    "Part",
    "PartError",
    "facts_parts",
    "facts_values",
    "npy_array",
    "part_column",
    "part_limit",
    "part_value",
    "plain_extension",
    "split_name",
]

MAX_PART_BYTES = 16 << 20  # of a text or JSON part
_MAX_NUMBER = 64  # bytes of a .cls part
_MAX_NPY = 64 << 20
_LIMITS = {"cls": _MAX_NUMBER, "json": MAX_PART_BYTES, "txt": MAX_PART_BYTES, "npy": _MAX_NPY}
_INTEGER = re.compile(r"[+-]?\d{1,18}")


class PartError(ValueError):
    """A part that is not what its column declares."""


def split_name(name: str) -> tuple[str, str, str]:
    """Cut a member's path as WebDataset does and as file systems do.

    Returns:
        the path up to the first dot of its last part (the sample), the path up to the last dot (the stem), and the
        extension after the sample's dot, in lower case: ``a.b/x.left.JPG`` gives ``a.b/x``, ``a.b/x.left``,
        ``left.jpg``.
    """
    folder, slash, base = name.rpartition("/")
    # A leading dot does not start an extension.
    shift = len(base) - len(base.lstrip(".")) if base[:1] == "." else 0
    first, last = base.find(".", shift), base.rfind(".")
    if first < 0:
        return name, name, ""
    front = folder + slash
    return front + base[:first], front + base[:last], base[first + 1 :].lower()


def part_limit(extension: str) -> int | None:
    """The most bytes a part of this extension may have; None for one that becomes no column."""
    return _LIMITS.get(extension.rpartition(".")[2])


def part_column(extension: str, data: bytes) -> Column | None:
    """The column for parts like this one, or None where its content fits none.

    ``.cls`` becomes ``label`` (int64) where it is an integer, else text; ``.json`` and ``.txt`` text; ``.npy`` an
    array whose first axis may differ from sample to sample.
    """
    kind = extension.rpartition(".")[2]
    if kind == "cls" and _integer(data) is not None:
        return Column("label" if extension == "cls" else extension, "<i8")
    if kind != "npy":
        return Column(extension, "|u1", (None,), "text")
    try:
        array = npy_array(data)
        if not array.ndim:
            return Column(extension, array.dtype.str)
        return Column(extension, array.dtype.str, (None, *array.shape[1:]), tentative=True)
    except ValueError:
        return None


def part_value(column: Column, data: bytes) -> Any:
    """The value of a part in ``column``.

    Raises:
        PartError: the content does not fit the column.
    """
    if column.kind == "text":
        return data.decode("utf-8", "surrogateescape")
    if not column.shape and (number := _integer(data)) is not None:
        return number
    if not data.startswith(b"\x93NUMPY"):
        raise PartError(f"{data[:40]!r} is no integer" if not column.shape else "no .npy file")
    array = npy_array(data)
    inner = array.shape[1:] if array.ndim else ()
    expected = column.shape[1:]
    if array.dtype.str != column.dtype or array.ndim != len(column.shape) or inner != expected:
        raise PartError(f"an array {array.dtype.str} {array.shape}; the first sample has {column.dtype} {column.shape}")
    return array


def npy_array(data: bytes) -> np.ndarray[Any, Any]:
    """The array in a .npy file, little-endian. Its size is checked against the bytes there are; objects are refused.

    Raises:
        PartError: the header is damaged, the content has another size than it declares, or the type holds no plain
            numbers (an object array is a pickle: it is not loaded).
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise PartError(f".npy version {version}; 1.0 and 2.0 are read")
    except PartError:
        raise
    except Exception as error:  # numpy's header parser raises many kinds on hostile text
        raise PartError(f"a damaged .npy header ({error})") from error
    if dtype.hasobject or dtype.kind not in "biuf":
        raise PartError(f"a .npy array of type {dtype}, which holds no plain numbers; it is not loaded")
    count = 1
    for size in shape:
        if not isinstance(size, int) or size < 0:
            raise PartError(f"a .npy array of shape {shape}")
        count *= size
    content = memoryview(data)[stream.tell() :]
    if count * dtype.itemsize != len(content):
        raise PartError(f"a .npy array {dtype} {shape} needs {count * dtype.itemsize} bytes and has {len(content)}")
    flat = np.frombuffer(content, dtype).astype(dtype.newbyteorder("<"))
    return flat.reshape(shape, order="F" if fortran else "C")


def _integer(data: bytes) -> int | None:
    text = data.decode("ascii", "replace").strip()
    return int(text) if _INTEGER.fullmatch(text) else None


def facts_parts(facts: Facts) -> dict[str, Column]:
    """The parts in which packfmt keeps these columns: an integer ``label`` as ``.cls``, all else in one ``.json``."""
    parts = {}
    for column in filter(_is_cls, facts.columns):
        parts["cls"] = column
    if len(parts) < len(facts.columns):
        parts["json"] = Column("json", "|u1", (None,), "text")
    return parts


def facts_values(facts: Facts, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that packfmt kept in these parts.

    Args:
        facts: what the columns are.
        parts: column of ``facts_parts`` to value; one that was not read is missing.

    Raises:
        ValueError: a part is missing or does not fit.
    """
    try:
        body = parse_json(parts.get("json", "{}").encode(), RECORD)
    except (ValueError, RecursionError) as error:
        raise PartError(f"no JSON ({error})") from error
    values = {"label": parts["label"]} if "label" in parts else {}
    for column in facts.columns:
        if not _is_cls(column):
            if not isinstance(body, dict) or column.name not in body:
                raise PartError(f"column {column.name!r} is missing")
            values[column.name] = from_json(column, body[column.name])
    return values


def _is_cls(column: Column) -> bool:
    return column.name == "label" and column.shape == () and column.dtype[1] in "iu"


@dataclass(slots=True)
class Image:
    """An image, and the parts that are its own.

    Args:
        key: the member's name.
        sample: the name up to the first dot of its last part.
        stem: the name up to its last dot.
        data: the bytes.
        reason: why it cannot be read, or None.
        parts: extension to content; a str says why the part was not read.
    """

    key: str
    sample: str
    stem: str
    data: bytes | memoryview
    reason: str | None
    parts: dict[str, bytes | str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, data: bytes | memoryview, reason: str | None) -> Image:
        """The image that is the member of this name."""
        sample, stem, _ = split_name(name)
        return cls(name, sample, stem, data, reason)

    @property
    def size(self) -> int:
        """Bytes held."""
        return len(self.data)


@dataclass(slots=True)
class Part:
    """What stands beside an image.

    Args:
        stem, sample: as of an image.
        extension: after the sample's first dot.
        content: the bytes, or why they were not read.
    """

    stem: str
    sample: str
    extension: str
    content: bytes | str

    @property
    def own_name(self) -> str:
        """The part's name where it belongs to the image of its stem alone."""
        return self.extension.rpartition(".")[2]

    @property
    def size(self) -> int:
        """Bytes held."""
        return len(self.content)


def plain_extension(extension: str) -> str:
    """The last piece of an extension, or "other": so that odd names make no endless list of notes."""
    last = extension.rpartition(".")[2]
    return last if last.isalnum() and not last.isdigit() and len(last) <= 8 else "other"
