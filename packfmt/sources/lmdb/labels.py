"""The column for the labels of serialised values, and whether a label fits it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from packfmt.sources.lmdb.layouts import ColumnSpec
from packfmt.sources.values import Array, numbers

__all__ = ["allowed", "fits", "is_storable", "label_column", "plain", "shown", "stand_in"]


def label_column(labels: list[Any]) -> ColumnSpec | None:
    """The column for the most common kind of these labels, or None where there is none at all."""
    if all(len(label) == 1 for label in labels if isinstance(label, list)):
        labels = [plain(label) for label in labels]
    kinds = Counter(_label_kind(label) for label in labels if label is not None)
    kind = kinds.most_common(1)[0][0] if kinds else ""
    if kind == "<i8" and kinds["<f8"]:
        kind = "<f8"
    if kind in ("", "text"):
        return ("label", "|u1", (None,), "text") if kind else None
    if kind == "array":
        return _array_column([label for label in labels if isinstance(label, Array)])
    if kind != "vector":
        return ("label", kind, (), "array")
    rows = [label for label in labels if isinstance(label, list)]
    widths = {len(row) for row in rows}
    dtype = "<i8" if all(isinstance(number, int) for row in rows for number in row) else "<f8"
    return ("label", dtype, (widths.pop(),) if len(widths) == 1 else (None,), "array")


def _array_column(labels: list[Array]) -> ColumnSpec:
    """The column for arrays of several axes: only the first axis may differ in length."""
    inner = Counter((_dtype(label), label.shape[1:]) for label in labels)
    (dtype, shape), _ = inner.most_common(1)[0]
    lengths = {label.shape[0] for label in labels if (_dtype(label), label.shape[1:]) == (dtype, shape)}
    return ("label", dtype, (lengths.pop() if len(lengths) == 1 else None, *shape), "array")


def _dtype(label: Array) -> str:
    dtype: str = numbers(label).dtype.newbyteorder("<").str
    return dtype


def plain(label: Any) -> Any:
    """The one number of a row of one: DataLoaders and numpy make such rows of numbers. Any other label as it is."""
    return label[0] if isinstance(label, list) and len(label) == 1 else label


def _label_kind(label: Any) -> str:
    names = {int: "<i8", float: "<f8", str: "text", list: "vector", Array: "array"}
    return names.get(type(label), "")


def fits(label: Any, column: ColumnSpec) -> bool:
    """Whether the column holds the label as it is."""
    _, dtype, shape, kind = column
    if kind == "text":
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


def stand_in(column: ColumnSpec) -> Any:
    """What the column holds for an image whose label it cannot hold: -1, 0 of unsigned numbers, or nothing."""
    _, dtype, shape, kind = column
    if kind == "text":
        return ""
    value: Any = 0 if dtype[1] in "bu" else -1
    if shape[:1] == (None,):
        return []
    for size in reversed(shape):
        value = [value] * (size or 0)
    return value


def allowed(column: ColumnSpec) -> str:
    """What fits the column, for a message."""
    _, dtype, shape, kind = column
    if kind == "text":
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
