"""Parquet files with encoded images in a column, as Hugging Face's ``datasets`` writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packfmt.bounded_json import parse_json
from packfmt.errors import SourceError
from packfmt.images.sniff import magic
from packfmt.record import Column, Record, empty_value, exact_array, infer_column
from packfmt.sources.base import BadEntry, Source
from packfmt.sources.columns import SCHEMA_KEY, PackSchema
from packfmt.sources.inputs import (
    MAX_IMAGE_BYTES,
    Inputs,
    Probe,
    SeenKeys,
    expand_inputs,
    free_name,
    has_images,
    head_of,
    short_names,
)

__all__ = ["ParquetSource", "load_arrow", "recognise"]

NUMBERS = {"int8": "|i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "uint8": "|u1", "uint16": "<u2"}
NUMBERS |= {"uint32": "<u4", "uint64": "<u8", "halffloat": "<f2", "float": "<f4", "double": "<f8", "bool": "|b1"}


def column_of(name: str, kind: str) -> Column | None:
    """The column for values of a kind ("text", "bytes", a number's name, "list of <number>"); None for any other."""
    if kind in ("text", "bytes"):
        return infer_column(name, "" if kind == "text" else b"")
    if kind.startswith("list of "):
        return Column(name, NUMBERS[kind.removeprefix("list of ")], (None,), tentative=True)
    return Column(name, NUMBERS[kind]) if kind in NUMBERS else None


def noted(schema: Any) -> bytes | None:
    """What packfmt noted in the schema, or None."""
    found: bytes | None = (schema.metadata or {}).get(SCHEMA_KEY)
    return found


def described_features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """What Hugging Face notes of the columns; empty where it is absent or damaged."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def class_names(feature: Any) -> tuple[str, ...]:
    """The names of a ``ClassLabel``, or of a list of them; empty where the feature is neither."""
    if isinstance(feature, dict) and "feature" in feature:
        feature = feature["feature"]
    elif isinstance(feature, list) and len(feature) == 1:  # how older versions note a list
        feature = feature[0]
    names = feature.get("names") if isinstance(feature, dict) else None
    if isinstance(names, dict):
        names = [names.get(str(number)) for number in range(len(names))]
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def kind_of(types: Any, arrow_type: Any) -> str:
    """ "image", "bytes", "text", a number's name, "list of <number>", or "other"; ``types`` is ``pyarrow.types``."""
    if types.is_dictionary(arrow_type):  # how pandas writes categories; reading gives the values
        return kind_of(types, arrow_type.value_type)
    if types.is_struct(arrow_type):
        names = {arrow_type.field(at).name: arrow_type.field(at).type for at in range(arrow_type.num_fields)}
        return "image" if "bytes" in names and kind_of(types, names["bytes"]) == "bytes" else "other"
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type) or str(arrow_type) == "binary_view":
        return "bytes"
    if types.is_string(arrow_type) or types.is_large_string(arrow_type) or str(arrow_type) == "string_view":
        return "text"
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type):
        inner = kind_of(types, arrow_type.value_type)
        return f"list of {inner}" if inner in NUMBERS else "other"
    name = str(arrow_type)
    return name if name in NUMBERS else "other"


_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "image_bytes", "bytes")
_LABEL_NAMES = ("label", "labels", "class", "class_id", "fine_label", "target")
_KEY_NAMES = ("key", "path", "file_name", "filename")
_MAGIC = b"PAR1"
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 1024
_PEEKED_ROWS = 64


def recognise(probe: Probe) -> bool:
    """Whether the (first) file begins and ends as Parquet does; a folder is judged by its first such file."""
    first, head = Path(probe.first), probe.head
    if probe.is_folder:
        found = sorted(Path(probe.path).rglob("*.parquet"))
        if not found or has_images(found[0].parent):  # what lies beside images tells of them
            return False
        first, head = found[0], head_of(found[0])
    if not head.startswith(_MAGIC):
        return False
    with open(first, "rb") as file:
        file.seek(-len(_MAGIC), os.SEEK_END)
        return file.read() == _MAGIC


class ParquetSource(Source):
    """Images in Parquet files.

    The image column is a struct with ``bytes`` (and ``path``), or a binary column with images in it. A row that has
    only a path is a bad entry: no path is ever opened. ``ClassLabel`` names come from the metadata that Hugging Face
    stores; a list of them becomes ``labels``. Numbers, strings and lists of numbers (ragged) become columns; what is
    left is in ``lost``. Where packfmt wrote the file, its own notes in the schema (``PackSchema``) say what the
    columns are.

    Keys are the paths, where every row has one and all differ, else the file's name and the row's number.

    Memory: one batch of about 16 MiB, one page of the file (a writer cuts pages after about 1,024 rows, whatever
    their size), and up to 64 bytes a row to compare paths.

    Args:
        paths: a file, a folder of ``.parquet`` files, a brace or glob pattern, or a list of them.
        image: the image column, or None to find it.
        label: the column of class ids, or of lists of them; None finds it.

    Raises:
        SourceError: pyarrow is not installed; the message has the line that installs it.
        FileNotFoundError: a file is missing.
        SourceError: a file is not a Parquet file, has another schema than the first, or has no image column.
    """

    kind = "parquet"

    def __init__(self, paths: Inputs, *, image: str | None = None, label: str | None = None) -> None:
        super().__init__()
        self._paths = _files(paths)
        self._names = short_names(self._paths)
        self._rows = 0
        schema = self._check_files()
        self._image = self._find_image(schema, image)
        self._struct = _kind(schema.field(self._image).type) == "image"
        self._fields: dict[str, Column] = {}
        self._key_path = self._find_keys(schema)
        noted_schema = self._find_schema(schema) if image is None and label is None else None
        if noted_schema is not None:
            self._fields = {column.name: column for column in noted_schema.columns}
            self.columns, self.classes, self.metadata = (
                noted_schema.columns,
                noted_schema.classes,
                dict(noted_schema.metadata),
            )
        else:
            self._declare(schema, described_features(schema.metadata), label)

    def count(self) -> int | None:
        return self._rows

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"shards": len(self._paths)}

    def entries(self) -> Iterator[Record | BadEntry]:
        wanted = [self._image, *self._fields]
        if self._key_path is not None and "." not in self._key_path and self._key_path not in wanted:
            wanted.append(self._key_path)
        for path, name in zip(self._paths, self._names, strict=True):
            number = 0
            for batch in self._batches(path, wanted):
                for row in range(batch.num_rows):
                    yield self._entry({at: batch.column(at)[row].as_py() for at in wanted}, f"{name}/{number:08d}")
                    number += 1

    def _entry(self, row: dict[str, Any], fallback: str) -> Record | BadEntry:
        image = row[self._image]
        data = image.get("bytes") if self._struct and image is not None else image
        key = fallback
        if self._key_path is not None:
            key = image["path"] if self._key_path not in row else row[self._key_path]
        columns: dict[str, Any] = {}
        reason = None
        for name, column in self._fields.items():
            value = row[name]
            value = empty_value(column) if value is None else value
            if value is None or (column.ragged and column.kind == "array" and None in value):
                reason = f"column {name!r} is null"
                continue
            columns[column.name] = exact_array(column, value) if column.dtype == "<u8" and column.shape else value
        if data is None:
            path = image.get("path") if isinstance(image, dict) else None
            reason = f"has only a path ({path!r}), which is not opened" if path else "has no image"
        elif len(data) > MAX_IMAGE_BYTES:
            reason, data = f"{len(data)} bytes; at most {MAX_IMAGE_BYTES} are read", None
        if reason is None:
            return Record(data, key, columns)
        return self.bad_entry(key, reason, data, columns)

    def _check_files(self) -> Any:
        first = None
        for path in self._paths:
            with _open(path) as file:
                schema = file.schema_arrow
                if len(set(schema.names)) != len(schema.names):
                    raise SourceError(f"{path} has two columns of one name: {schema.names}")
                if first is not None and not (schema.equals(first) and noted(schema) == noted(first)):
                    raise SourceError(
                        f"{path} has another schema than {self._paths[0]}: {schema.names} and {first.names}, or "
                        "other types or classes; convert them one by one"
                    )
                first = schema if first is None else first
                self._rows += file.metadata.num_rows
        return first

    def _batches(self, path: Path, columns: list[str]) -> Iterator[Any]:
        arrow = load_arrow()
        with _open(path) as file:
            footer = file.metadata
            largest = 1
            for group in range(footer.num_row_groups):
                rows = footer.row_group(group)
                largest = max(largest, rows.total_byte_size // max(rows.num_rows, 1))
            size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // largest))
            try:
                yield from file.iter_batches(batch_size=size, columns=columns, use_threads=False)
            except (arrow.ArrowException, OSError) as error:
                raise SourceError(f"{path} cannot be read on: {error}") from error

    def _find_image(self, schema: Any, asked: str | None) -> str:
        kinds = {field.name: _kind(field.type) for field in schema}
        if asked is not None:
            candidates = [asked] if kinds.get(asked) in ("image", "bytes") else []
        else:
            order = [*_IMAGE_NAMES, *sorted(kinds)]
            candidates = [name for name in order if kinds.get(name) == "image"]
            candidates += [name for name in order if kinds.get(name) == "bytes" and self._has_images(name)]
        if not candidates:
            raise SourceError(
                f"{self._paths[0]}: no column holds encoded images; columns are "
                f"{', '.join(f'{field.name} ({field.type})' for field in schema)}. Name it with image="
            )
        return candidates[0]

    def _has_images(self, name: str) -> bool:
        for batch in self._batches(self._paths[0], [name]):
            values = [batch.column(name)[row].as_py() for row in range(min(batch.num_rows, _PEEKED_ROWS))]
            return any(value is not None and magic(value[:64]) for value in values)
        return False

    def _declare(self, schema: Any, features: dict[str, Any], label: str | None) -> None:
        label_name = label if label is not None else _label_name(schema, features)
        kind = "" if label_name not in schema.names else _kind(schema.field(label_name).type)
        if label is not None and kind.removeprefix("list of ") not in NUMBERS:
            raise SourceError(f"{self._paths[0]}: column {label!r} holds no class ids; columns are {schema.names}")
        if label_name is not None:
            name, shape = ("labels", (None,)) if kind.startswith("list") else ("label", ())
            self._fields[label_name] = Column(name, "<i8", shape, tentative=bool(shape))
            self.classes = class_names(features.get(label_name))
        taken = [column.name for column in self._fields.values()]
        for field in schema:
            if field.name in (self._image, label_name, self._key_path):
                continue
            column = column_of(free_name(field.name or "unnamed", taken), _kind(field.type))
            if column is None:
                self.lost.append(field.name)
            else:
                self._fields[field.name] = column
                taken.append(column.name)
                if class_names(features.get(field.name)):  # a pack has names for one column
                    self.lost.append(f"class names of {field.name}")
        self.columns = tuple(self._fields.values())

    def _find_schema(self, schema: Any) -> PackSchema | None:
        """What packfmt noted, unless another program has changed the columns since."""
        own = noted(schema)
        if own is None:
            return None
        noted_schema = PackSchema.decode(own, f"{self._paths[0]}, schema")
        if {self._image, *(column.name for column in noted_schema.columns)} == set(schema.names):
            return noted_schema
        self.notes.append("columns were changed since packfmt wrote the file; it is read as of any other program")
        return None

    def _find_keys(self, schema: Any) -> str | None:
        """The column of paths to use as keys, looked through beforehand: a Parquet column can be read alone."""
        image = schema.field(self._image).type
        candidates = [name for name in _KEY_NAMES if name in schema.names and _kind(schema.field(name).type) == "text"]
        if self._struct and "path" in [image.field(at).name for at in range(image.num_fields)]:
            candidates.insert(candidates[:1] == ["key"], f"{self._image}.path")
        return next((name for name in candidates if self._all_differ(name)), None)

    def _all_differ(self, name: str) -> bool:
        seen = SeenKeys()
        for path in self._paths:
            for batch in self._batches(path, [name]):
                column = batch.column(0)
                texts = column.field("path") if name not in batch.schema.names else column
                for text in texts.to_pylist():
                    if not text:
                        return False
                    if seen.add(text, 0) is not None:
                        self.notes.append(f"{name} names several rows alike; keys are row numbers instead")
                        return False
        return True


def _files(paths: Inputs) -> list[Path]:
    if isinstance(paths, (str, os.PathLike)) and os.path.isdir(paths):
        found = sorted(Path(paths).rglob("*.parquet"))
        if not found:
            raise SourceError(f"{os.fspath(paths)} holds no .parquet file")
        return found
    return expand_inputs(paths)


def load_arrow() -> Any:
    """The module pyarrow, with its part for Parquet.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SourceError("reading Parquet needs pyarrow: pip install 'packfmt[parquet]'") from error
    return pyarrow


def _open(path: Path) -> Any:
    arrow = load_arrow()
    try:
        # A buffer makes Arrow read column chunks piece by piece, where it would read each whole.
        return arrow.parquet.ParquetFile(
            path, buffer_size=1 << 20, pre_buffer=False, memory_map=False, page_checksum_verification=True
        )
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise SourceError(f"{path} is not a whole Parquet file ({error})") from error


def _kind(arrow_type: Any) -> str:
    return kind_of(load_arrow().types, arrow_type)


def _label_name(schema: Any, features: dict[str, Any]) -> str | None:
    integers: list[str] = [field.name for field in schema if _kind(field.type).startswith(("int", "uint"))]
    named = [name for name in integers if class_names(features.get(name))]
    usual = [name for name in _LABEL_NAMES if name in integers]
    several = [f.name for f in schema if _kind(f.type).startswith("list of int") and class_names(features.get(f.name))]
    return next(iter([name for name in usual if name in named] + named + usual + several), None)
