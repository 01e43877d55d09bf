"""What a pack holds, told from its index."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.images.info import CMYK, FORMATS
from packfmt.record import IMAGE_COLUMNS, Column
from packfmt.storage import Reader
from packfmt.storage.columns import Columns, VaryingColumn

__all__ = ["ClassColumn", "describe"]

CHUNK = 1 << 20  # values counted at a time
LISTED = 1000  # different texts that are counted; captions are as many as images


def describe(reader: Reader) -> dict[str, Any]:
    """JSON-able facts about an open pack, from its index alone: no record is read.

    Any pack that the format allows is described, also one that another writer made: of the columns that packfmt fills
    itself, those count that are there with the type that they have by the format.

    Returns:
        ``path``, ``records``, ``shards``, ``bytes``, ``mean_record`` (bytes in a record), ``columns`` (name to type);
        ``classes`` (name to number of labels), ``other_labels`` (labels that name no class), ``labels`` (text labels to
        number of records, where they are few); ``boxes``; ``formats``, ``width``, ``height``, ``exif_rotated``,
        ``cmyk``; ``metadata``, ``content_id``, ``read_through``. What does not apply is left out.

    Raises:
        CorruptError: a column is damaged.
    """
    columns = reader.columns
    facts: dict[str, Any] = {
        "path": reader.path,
        "records": len(reader),
        "shards": len(reader.files),
        "bytes": sum(os.path.getsize(file) for file in reader.files),
        "mean_record": reader.record_bytes,
        "columns": {name: _type_of(column) for name, column in columns.described.items()},
    }
    facts |= _labels(columns, reader.classes)
    if "boxes" in columns:
        facts |= _boxes(columns)
    if len(reader):
        facts |= _images(columns)
    return facts | {"metadata": reader.metadata, "content_id": reader.content_id, "read_through": reader.io}


class ClassColumn:
    """The column whose numbers name classes: ``label``, or where that is none such ``labels``, which boxes have.

    Labels are numbers, one or several for each record; or there is one value for each class (one-hot, multi-hot, parts
    of one), and those name their class that are not 0.

    Args:
        columns: all columns of a pack.
        classes: the names.

    Attributes:
        name: of the column; None where no column names classes.
    """

    def __init__(self, columns: Sequence[Column], classes: Sequence[str]) -> None:
        known = {column.name: column for column in columns if column.kind == "array"}
        found = [known[name] for name in ("label", "labels") if name in known and _names_classes(known[name], classes)]
        self.name = found[0].name if found else None
        self._per_class = bool(found) and _is_per_class(found[0], classes)

    def numbers(self, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The classes that values name, (n,); those that are no whole number are -1.

        Args:
            values: of a record, or of several along a further first axis; or all of a ragged column.
        """
        array = np.asarray(values)
        if self._per_class:
            return np.nonzero(array)[-1].astype(np.int64)
        flat = array.ravel()
        if flat.dtype.kind == "f":
            return np.where((flat == np.floor(flat)) & (np.abs(flat) < 2**62), flat, -1).astype(np.int64)
        return flat.astype(np.int64)  # a uint64 beyond int64 turns negative: no class either


def _names_classes(column: Column, classes: Sequence[str]) -> bool:
    return column.dtype[1] != "f" or not column.shape or _is_per_class(column, classes)


def _is_per_class(column: Column, classes: Sequence[str]) -> bool:
    return not column.ragged and column.shape[-1:] == (len(classes),)


def _labels(columns: Columns, classes: Sequence[str]) -> dict[str, Any]:
    if "label" in columns and columns.described["label"].kind == "text":
        return _texts(columns["label"])
    chosen = ClassColumn(list(columns.described.values()), classes)
    if chosen.name is None or not classes:
        return {}
    counts, others = np.zeros(len(classes), np.int64), 0
    for values in _chunks(columns[chosen.name]):
        numbers = chosen.numbers(values)
        inside = numbers[(numbers >= 0) & (numbers < len(classes))]
        counts += np.bincount(inside, minlength=len(classes))
        others += len(numbers) - len(inside)
    named: Counter[str] = Counter()
    for name, count in zip(classes, counts.tolist(), strict=True):
        named[name] += count  # nothing keeps two classes from having one name
    return {"classes": dict(named)} | ({"other_labels": others} if others else {})


def _texts(column: VaryingColumn) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for index in range(len(column)):
        counts[column[index]] += 1
        if len(counts) > LISTED:
            return {}
    return {"labels": dict(counts.most_common())}


def _chunks(column: Any) -> Iterator[npt.NDArray[Any]]:
    """The values of a column of numbers: of records, or the rows of a ragged one."""
    for values in (part.values for part in column.parts()) if isinstance(column, VaryingColumn) else (column,):
        for start in range(0, len(values), CHUNK):
            yield values[start : start + CHUNK]


def _boxes(columns: Columns) -> dict[str, Any]:
    """How many boxes there are in all and per image, where the column holds boxes: rows of four numbers."""
    described, column = columns.described["boxes"], columns["boxes"]
    if described.kind != "array" or described.shape[1:] != (4,) or not len(column):
        return {}
    if isinstance(column, VaryingColumn):
        counts = np.concatenate([np.diff(part.rows.astype(np.int64)) for part in column.parts()])
    else:
        counts = np.full(len(column), described.shape[0])
    return {
        "boxes": int(counts.sum()),
        "boxes_per_image": f"{counts.min()} to {counts.max()}, median {int(np.median(counts))}",
        "images_without_boxes": int(np.count_nonzero(counts == 0)),
    }


def _images(columns: Columns) -> dict[str, Any]:
    stated = columns.described
    known = {column.name: columns[column.name] for column in IMAGE_COLUMNS if stated.get(column.name) == column}
    facts: dict[str, Any] = {}
    if "format" in known:
        codes, counts = np.unique(known["format"], return_counts=True)
        facts["formats"] = {_format_name(code): n for code, n in zip(codes.tolist(), counts.tolist(), strict=True)}
    for name in ("width", "height"):
        if name in known:
            values = known[name]
            facts[name] = f"{values.min()} to {values.max()}, median {int(np.median(values))}"
    if "orientation" in known:
        facts["exif_rotated"] = int(np.count_nonzero(known["orientation"] > 1))
    if "flags" in known:
        facts["cmyk"] = int(np.count_nonzero(known["flags"] & CMYK))
    return facts


def _format_name(code: int) -> str:
    return FORMATS[code] if code < len(FORMATS) else f"unknown (code {code})"


def _type_of(column: Column) -> str:
    if column.kind != "array" or column.ragged:
        return f"{column.dtype} {column.shape}" if column.kind == "array" else column.kind
    return f"{np.dtype(column.dtype)} {column.shape}" if column.shape else str(np.dtype(column.dtype))
