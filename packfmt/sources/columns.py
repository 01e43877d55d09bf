"""What packfmt leaves in other formats, so that reading them back gives the same columns, classes and metadata.

One JSON object: in a tar a member of its own, in Parquet an entry of the schema's metadata. It is untrusted as anything
else in a file: what it says is checked, and allocates nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packfmt.bounded_json import MAX_BYTES, check_json, parse_json
from packfmt.errors import SourceError
from packfmt.record import DTYPES, OWN_COLUMNS, Column

__all__ = ["MAX_FACTS", "SCHEMA_KEY", "TAR_MEMBER", "Facts", "exact_array", "from_json", "to_json"]

# WebDataset passes over members at the top whose names begin and end with two underscores.
TAR_MEMBER = "__packfmt__"
SCHEMA_KEY = b"packfmt"
MAX_FACTS = MAX_BYTES
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """The columns that records have beside those of every pack, the class names, and what is known of the whole set."""

    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The facts as JSON.

        Raises:
            ValueError: they are more than ``decode`` takes.
        """
        columns = [[column.name, column.dtype, list(column.shape), column.kind] for column in self.columns]
        body = {"version": _VERSION, "columns": columns, "classes": list(self.classes), "metadata": dict(self.metadata)}
        raw = json.dumps(body, sort_keys=True).encode("ascii")
        check_json(raw)
        return raw

    @classmethod
    def decode(cls, data: bytes, where: str) -> Facts:
        """Read facts back.

        Args:
            data: JSON.
            where: what they were found in, for messages.

        Raises:
            SourceError: damaged, or of another version.
        """
        try:
            body = parse_json(data)
            if body["version"] != _VERSION:
                raise ValueError(f"version {body['version']!r:.40}, known is {_VERSION}")
            columns = tuple(_column(*spec) for spec in body["columns"])
            names = [column.name for column in columns]
            classes, metadata = body["classes"], body["metadata"]
            if len(set(names)) != len(names) or OWN_COLUMNS & set(names):
                raise ValueError(f"columns named {names!r:.200}")
            if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
                raise ValueError("classes that are no list of names")
            if not isinstance(metadata, dict):
                raise ValueError("metadata that are no object")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SourceError(
                f"{where}: what packfmt noted there about columns and classes is damaged "
                f"({type(error).__name__}: {error!s:.200}); remove it to have the rest read as of any other program"
            ) from error
        return cls(columns, tuple(classes), metadata)


def _column(name: str, dtype: str, shape: list[int | None], kind: Any) -> Column:
    if dtype not in DTYPES or not isinstance(shape, list):
        raise ValueError(f"column {name!r:.80} of dtype {dtype!r:.40} and shape {shape!r:.80}")
    return Column(name, dtype, tuple(shape), kind)


def to_json(column: Column, value: Any) -> Any:
    """A column's value as JSON holds it: numbers and lists, text, and bytes as base64."""
    if column.kind == "bytes":
        return base64.b64encode(bytes(value)).decode("ascii")
    return value if column.kind == "text" else np.asarray(value).tolist()


def exact_array(column: Column, value: Any) -> np.ndarray[Any, Any]:
    """Lists of numbers as an array that changes none of them: numpy makes floats of ints beyond 63 bits among others.

    Args:
        column: what the value belongs to.
        value: a number, or nested lists.

    Raises:
        ValueError: the lists are ragged within.
    """
    array = np.asarray(value)
    if column.dtype == "<u8" and array.dtype.kind == "f":
        objects = np.asarray(value, object)
        if all(type(number) is int and 0 <= number < 1 << 64 for number in objects.ravel().tolist()):
            return objects.astype(np.uint64)
    return array


def from_json(column: Column, value: Any) -> Any:
    """What ``to_json`` was given.

    Raises:
        ValueError: the value does not fit the column.
    """
    try:
        if column.kind == "text":
            if not isinstance(value, str):
                raise ValueError("no text")
            return value
        if column.kind == "bytes":
            return base64.b64decode(value, validate=True)
        array = exact_array(column, value)
        if array.size == 0 and column.ragged:
            return np.empty((0, *column.row_shape), column.dtype)
        if array.dtype.kind not in ("biuf" if column.dtype[1] == "f" else "biu"):
            raise ValueError(f"no numbers of type {column.dtype}")
        if array.ndim != len(column.shape) or array.shape[int(column.ragged) :] != column.row_shape:
            raise ValueError(f"of shape {array.shape}, not {column.shape}")
        return array if column.shape else array.item()
    except (ValueError, TypeError) as error:
        raise ValueError(f"column {column.name!r}: {value!r:.80}: {error}") from error
