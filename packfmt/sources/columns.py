"""Columns of foreign values: what packfmt notes of its own in other formats, and which column others' values need.

The note is one JSON object, so that reading a set back gives the same columns, classes and metadata: in a tar a member
of its own, in Parquet an entry of the schema's metadata. It is untrusted as anything else in a file: what it says is
checked, and allocates nothing.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packfmt.errors import SourceError
from packfmt.record import OWN_COLUMNS, Column, empty_value, exact_array, fit_array, misfit, text_column
from packfmt.sources.values import Array, numbers

__all__ = [
    "SCHEMA_KEY",
    "TAR_MEMBER",
    "PackSchema",
    "allowed",
    "fits",
    "from_json",
    "is_storable",
    "label_column",
    "plain",
    "shown",
    "stand_in",
    "to_json",
]

# WebDataset passes over members at the top whose names begin and end with two underscores.
TAR_MEMBER = "__packfmt__"
SCHEMA_KEY = b"packfmt"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class PackSchema:
    """The columns that records have beside those of every pack, the class names, and what is known of the whole set."""

    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The schema as JSON.

        Raises:
            ValueError: it is more than ``decode`` takes.
        """
        from packfmt.bounded_json import check_json  # here, as below: it takes numpy, and a child goes without

        columns = [column.spec for column in self.columns]
        body = {"version": _VERSION, "columns": columns, "classes": list(self.classes), "metadata": dict(self.metadata)}
        raw = json.dumps(body, sort_keys=True).encode("ascii")
        check_json(raw)
        return raw

    @classmethod
    def decode(cls, data: bytes, where: str) -> PackSchema:
        """Read a schema back.

        Args:
            data: JSON.
            where: what they were found in, for messages.

        Raises:
            SourceError: damaged, or of another version.
        """
        from packfmt.bounded_json import parse_json

        try:
            body = parse_json(data)
            if body["version"] != _VERSION:
                raise ValueError(f"version {body['version']!r:.40}, known is {_VERSION}")
            columns = tuple(Column.of_spec(*spec) for spec in body["columns"])
            names = [column.name for column in columns]
            classes, metadata = body["classes"], body["metadata"]
            if len(set(names)) != len(names) or OWN_COLUMNS & set(names):
                raise ValueError(f"columns named {names!r:.200}")
            if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
                raise ValueError("classes that are not a list of names")
            if not isinstance(metadata, dict):
                raise ValueError("metadata that are not an object")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SourceError(
                f"{where}: what packfmt noted there about columns and classes is damaged "
                f"({type(error).__name__}: {error!s:.200}); remove it to have the rest read as of any other program"
            ) from error
        return cls(columns, tuple(classes), metadata)


def to_json(column: Column, value: Any) -> Any:
    """A column's value as JSON holds it: numbers and lists, text, and bytes as base64."""
    if column.kind == "bytes":
        return base64.b64encode(bytes(value)).decode("ascii")
    return value if column.kind == "text" else exact_array(column, value).tolist()


def from_json(column: Column, value: Any) -> Any:
    """What ``to_json`` was given, as the column holds it.

    Raises:
        ValueError: the value does not fit the column.
    """
    if column.kind == "text":
        if not isinstance(value, str):
            raise misfit(column, value, "not a text")
        return value
    if column.kind == "bytes":
        try:
            return base64.b64decode(value, validate=True)
        except (ValueError, TypeError) as error:
            raise misfit(column, value, str(error)) from error
    array = fit_array(column, value)
    return array if column.shape else array.item()


def label_column(labels: list[Any]) -> Column | None:
    """The column ``label`` for the most common kind of these values, or None where there is none at all."""
    if all(len(label) == 1 for label in labels if isinstance(label, list)):
        labels = [plain(label) for label in labels]
    kinds = Counter(_label_kind(label) for label in labels if label is not None)
    kind = kinds.most_common(1)[0][0] if kinds else ""
    if kind == "<i8" and kinds["<f8"]:
        kind = "<f8"
    if kind in ("", "text"):
        return text_column("label") if kind else None
    if kind == "array":
        return _array_column([label for label in labels if isinstance(label, Array)])
    if kind != "vector":
        return Column("label", kind)
    rows = [label for label in labels if isinstance(label, list)]
    widths = {len(row) for row in rows}
    dtype = "<i8" if all(isinstance(number, int) for row in rows for number in row) else "<f8"
    return Column("label", dtype, (widths.pop() if len(widths) == 1 else None,))


def _array_column(labels: list[Array]) -> Column:
    """The column for arrays of several axes: only the first axis may differ in length."""
    inner = Counter((_dtype(label), label.shape[1:]) for label in labels)
    (dtype, shape), _ = inner.most_common(1)[0]
    lengths = {label.shape[0] for label in labels if (_dtype(label), label.shape[1:]) == (dtype, shape)}
    return Column("label", dtype, (lengths.pop() if len(lengths) == 1 else None, *shape))


def _dtype(label: Array) -> str:
    dtype: str = numbers(label).dtype.newbyteorder("<").str
    return dtype


def plain(label: Any) -> Any:
    """The one number of a row of one: DataLoaders and numpy make such rows of numbers. Any other label as it is."""
    return label[0] if isinstance(label, list) and len(label) == 1 else label


def _label_kind(label: Any) -> str:
    names = {int: "<i8", float: "<f8", str: "text", list: "vector", Array: "array"}
    return names.get(type(label), "")


def fits(label: Any, column: Column) -> bool:
    """Whether the column holds the label as it is."""
    dtype, shape = column.dtype, column.shape
    if column.kind == "text":
        return isinstance(label, str) and is_storable(label)
    if shape == ():
        return _is_held(label, dtype)
    if isinstance(label, Array):
        return (_dtype(label), label.shape[1:]) == (dtype, shape[1:]) and shape[0] in (None, label.shape[0])
    whole = isinstance(label, list) and len(shape) == 1 and shape[0] in (None, len(label))
    return whole and all(_is_held(one, dtype) for one in label)


def _is_held(number: Any, dtype: str) -> bool:
    if isinstance(number, int):
        return -(2**63) <= number < 2**63 and (dtype == "<i8" or float(number) == number)
    return isinstance(number, float) and dtype == "<f8"


def is_storable(text: str) -> bool:
    """Whether a text can be written; a pickle may hold halves of surrogate pairs, which cannot."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def stand_in(column: Column) -> Any:
    """What the column holds for an image whose label it cannot hold: -1, 0 of unsigned numbers, or nothing."""
    if column.ragged:
        return empty_value(column)
    value: Any = 0 if column.dtype[1] in "bu" else -1
    for size in reversed(column.row_shape):
        value = [value] * size
    return value


def allowed(column: Column) -> str:
    """What fits the column, for a message."""
    dtype, shape = column.dtype, column.shape
    if column.kind == "text":
        return "a text that can be written as UTF-8"
    number = "a 64-bit integer" if dtype == "<i8" else "a number that a float64 holds exactly"
    if shape == ():
        return number
    if len(shape) > 1:
        return f"an array of type {dtype} and shape {shape}"
    return f"a row of {'any length' if shape[0] is None else shape[0]}, each {number}"


def shown(label: Any) -> str:
    """The start of a label, for a message."""
    if isinstance(label, Array):
        return f"of type {label.dtype} and shape {label.shape}"
    try:
        return repr(label[:60] if isinstance(label, str | list) else label)[:60]
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "of thousands of digits"
