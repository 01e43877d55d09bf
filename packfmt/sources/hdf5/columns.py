"""Labels and other columns that lie beside a stack of images."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from packfmt.errors import SourceError
from packfmt.record import IMAGE_COLUMNS
from packfmt.sources.hdf5.file import Data, Group
from packfmt.sources.hdf5.layouts import Stack

__all__ = ["SideColumn", "column_values", "find_columns", "sizes_of"]

ColumnSpec = tuple[str, str, tuple[int | None, ...], str]
_LABEL_NAMES = ("label", "labels", "y", "ans", "target", "targets", "class", "classes", "class_id", "class_ids")
_IMAGE_PARTS = ("x", "images", "image", "imgs", "img", "data")
_LABEL_PARTS = ("y", "labels", "label", "targets", "target", "ans", "classes", "class")
_LENGTHS = re.compile(r"(.*_)?(lengths?|lens?|nbytes|sizes?)")
_RESERVED = frozenset(["key", *(column.name for column in IMAGE_COLUMNS)])
_MAX_ROW = 4096  # numbers of one record's column


@dataclass(frozen=True, slots=True)
class SideColumn:
    """A dataset with one row per image.

    Args:
        data: the dataset.
        spec: its column: name, dtype, shape, kind.
    """

    data: Data
    spec: ColumnSpec


def find_columns(
    stack: Stack, root: Group, labels: str | None, paired: Group | None, notes: list[str]
) -> list[SideColumn]:
    """The columns that belong to a stack: its label, and whatever else in its group has one row per image.

    Args:
        stack: the images.
        root: of the file.
        labels: the path of the labels' dataset; "" for none at all; None to find them by name.
        paired: the root of a second file that holds the labels, or None.
        notes: gets a line for each thing a person should know.

    Raises:
        SourceError: the labels are not as many as the images, or are of a kind no column holds.
    """
    columns: list[SideColumn] = []
    label = None
    if labels != "":
        label = _named_label(root, labels) if labels else _label(stack, paired)
    if label is not None:
        columns.append(SideColumn(label, _label_spec(label, stack, notes)))
    taken = {label.path if label is not None else "", stack.data.path}
    for data in _members(stack.group):
        spec = _spec(data, data.path.rpartition("/")[2], stack.length)
        if data.path in taken or spec is None or (not stack.axes and _LENGTHS.fullmatch(spec[0])):
            continue
        columns.append(SideColumn(data, spec))
    return columns


def sizes_of(stack: Stack) -> tuple[Data | None, Data | None, Data | None]:
    """(lengths of padded rows, heights, widths of padded pixels): datasets of one number per image, or None each."""
    numbers = {data.path.rpartition("/")[2]: data for data in _members(stack.group) if _one_number(data, stack.length)}
    own = stack.data.path.rpartition("/")[2]
    lengths = [name for name in numbers if _LENGTHS.fullmatch(name)]
    exact = [name for name in lengths if name.startswith((own + "_", own.rstrip("s") + "_"))] or lengths
    if stack.axes:
        return None, numbers.get("image_heights"), numbers.get("image_widths")
    return (numbers[exact[0]] if len(exact) == 1 else None), None, None


def column_values(column: SideColumn, start: int, stop: int) -> list[Any]:
    """JSON-able values of some rows."""
    rows = column.data.read((slice(start, stop), *(slice(None) for _ in column.data.shape[1:])))
    if column.spec[3] == "text":
        return [_text(value) for value in rows.reshape(-1)]
    flat = rows.reshape(stop - start, -1)
    values: list[Any] = flat.tolist()
    return values if column.spec[2] else [row[0] for row in values]


def _text(value: Any) -> str:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
    return raw.decode("utf-8", "surrogateescape")


def _members(group: Group) -> list[Data]:
    found = []
    for member in group.members():
        if isinstance(member, Data) and not member.empty:
            found.append(member)
        if len(found) >= 1000:
            break
    return found


def _one_number(data: Data, length: int) -> bool:
    return data.dtype.kind in "iu" and data.shape[:1] == (length,) and math.prod(data.shape) == length


def _named_label(root: Group, path: str) -> Data:
    found = root.find(path)
    if not isinstance(found, Data):
        raise SourceError(f"no dataset at /{path.strip('/')}, which h5_labels= names")
    return found


def _label(stack: Stack, paired: Group | None) -> Data | None:
    """The labels by their names: the images' own name with the part for images exchanged, then the usual ones."""
    members = {data.path.rpartition("/")[2]: data for data in _members(paired if paired is not None else stack.group)}
    own = stack.data.path.rpartition("/")[2]
    parts = re.split(r"([_\-.])", own)
    for position, part in enumerate(parts):
        if part.lower() in _IMAGE_PARTS and len(parts) > 1:
            for other in _LABEL_PARTS:
                name = "".join([*parts[:position], other, *parts[position + 1 :]])
                if name in members:
                    return members[name]
    lowered = {name.lower(): data for name, data in members.items() if name != own}
    for name in _LABEL_NAMES:
        if name in lowered:
            return lowered[name]
    if paired is not None:
        raise SourceError(f"{paired.file}: no dataset of labels in it; it holds {', '.join(members) or 'nothing'}")
    return None


def _label_spec(data: Data, stack: Stack, notes: list[str]) -> ColumnSpec:
    rows = data.shape[0] if data.shape else 0
    if rows != stack.length:
        raise SourceError(
            f"/{data.path} has {rows} labels, /{stack.data.path} has {stack.length} images; name the right labels with "
            "h5_labels=, or pass h5_labels='' for none"
        )
    spec = _spec(data, "label", stack.length)
    if spec is None:
        raise SourceError(f"/{data.path} (shape {data.shape}, {data.dtype}) is of a kind that no column holds")
    if data.dtype.kind == "f":
        notes.append(f"/{data.path} is {data.dtype}, no class ids: kept as a column of floats")
    elif spec[2] and spec[3] == "array":
        notes.append(f"/{data.path} has {spec[2][0]} numbers per image: kept as a vector")
    return spec


def _spec(data: Data, name: str, length: int) -> ColumnSpec | None:
    """The column for a dataset with one row per image, or None where no column holds it."""
    if not data.shape or data.shape[0] != length or data.variable == "bytes":
        return None
    name = f"{name}_" if name in _RESERVED else name
    if data.variable == "text" or (data.dtype.kind == "S" and len(data.shape) == 1):
        return (name, "|u1", (None,), "text") if len(data.shape) == 1 else None
    width = math.prod(data.shape[1:])
    if data.dtype.kind not in "buif" or data.dtype.itemsize > 8 or not 0 < width <= _MAX_ROW:
        return None
    dtype = np.dtype(data.dtype.str).newbyteorder("<").str
    return (name, dtype, () if width == 1 else (width,), "array")
