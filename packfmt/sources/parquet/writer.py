"""Parquet with an image column, as Hugging Face `datasets` reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from packfmt.errors import ConvertError
from packfmt.record import Column
from packfmt.sources.base import Target
from packfmt.sources.columns import SCHEMA_KEY, PackSchema
from packfmt.sources.parquet.source import load_arrow
from packfmt.storage.atomic import PendingFile, naming

__all__ = ["ParquetWriter"]

GROUP_BYTES = 32 << 20  # of images per row group: what a reader must hold to get at one row
GROUP_ROWS = 1000
IMAGE = "image"


class ParquetWriter(Target):
    """Writes ``image`` (struct of bytes and path) and the columns; the path is the record's key.

    The schema's metadata say it twice: as ``datasets`` reads it (an ``Image``, a ``ClassLabel`` with its names), and as
    packfmt does, so that nothing is lost between packs.

    Args:
        path: the file to write.
        columns: of the records.
        classes: kept as the ``ClassLabel`` names of ``label``, or of the list ``labels``.
        metadata: kept for packfmt.
        force: replace an existing file.

    Raises:
        FileExistsError: the file exists and ``force`` is off.
        SourceError: pyarrow is not installed.
        ConvertError: a column is called ``image``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        super().__init__(os.fspath(path), columns)
        self._arrow = load_arrow()
        if IMAGE in self._names:
            raise ConvertError(f"{self.path}: a column {IMAGE!r} would hide the images; rename it")
        schema = self._schema = self._make_schema(PackSchema(self.columns, tuple(classes), metadata or {}))
        self._rows: dict[str, list[Any]] = {name: [] for name in schema.names}
        self._held = 0
        self._file = PendingFile(Path(self.path), force=force)
        try:
            # Images are compressed already.
            self._writer = self._arrow.parquet.ParquetWriter(self._file.stream, schema, compression="none")
        except BaseException:
            self._file.discard()
            raise

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def _append(self, data: bytes | memoryview, key: str, columns: dict[str, Any]) -> None:
        values = self._own(key, columns)
        row: dict[str, Any] = {IMAGE: {"bytes": bytes(data), "path": self._text("key", key, key)}}
        for column in self.columns:
            value = values[column.name]
            if column.kind == "text":
                value = self._text(column.name, value, key)
            row[column.name] = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
        for name, value in row.items():
            self._rows[name].append(value)
        self._held += len(data)
        self._count += 1
        if self._held >= GROUP_BYTES or len(self._rows[IMAGE]) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        try:
            self._flush()
            with naming(self.path):
                self._writer.close()
            self._file.publish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        with suppress(OSError, ValueError):  # it writes a footer, into a file that goes away, if that is still open
            self._writer.close()
        self._file.discard()

    def _text(self, name: str, value: str, key: str) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ConvertError(
                f"{self.path}: {name} of {key!r} is not valid UTF-8, which Parquet demands; rename the file, or keep "
                "it in a pack or a tar"
            ) from None
        return value

    def _flush(self) -> None:
        if self._rows[IMAGE]:
            table = self._arrow.table(self._rows, schema=self._schema)
            with naming(self.path):
                self._writer.write_table(table)
        self._rows = {name: [] for name in self._schema.names}
        self._held = 0

    def _make_schema(self, facts: PackSchema) -> Any:
        arrow = self._arrow
        features: dict[str, Any] = {IMAGE: {"_type": "Image"}}
        fields = [arrow.field(IMAGE, arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))]
        labels = "label" if "label" in self._names else "labels"
        for column in facts.columns:
            fields.append(arrow.field(column.name, self._type(column)))
            features[column.name] = _feature(column, facts.classes if column.name == labels else ())
        described = json.dumps({"info": {"features": features}}).encode("ascii")
        return arrow.schema(fields, metadata={b"huggingface": described, SCHEMA_KEY: facts.encode()})

    def _type(self, column: Column) -> Any:
        if column.kind != "array":
            return self._arrow.string() if column.kind == "text" else self._arrow.binary()
        kind = self._arrow.from_numpy_dtype(np.dtype(column.dtype))
        for size in reversed(column.shape):
            kind = self._arrow.list_(kind) if size is None else self._arrow.list_(kind, size)
        return kind


def _feature(column: Column, classes: Sequence[str]) -> dict[str, Any]:
    """How `datasets` describes a column."""
    name = {"text": "string", "bytes": "binary"}.get(column.kind) or np.dtype(column.dtype).name
    feature: dict[str, Any] = {"dtype": name, "_type": "Value"}
    if column.kind == "array":
        if classes and column.dtype == "<i8":
            feature = {"names": list(classes), "_type": "ClassLabel"}
        for size in reversed(column.shape):
            feature = {"feature": feature, "_type": "Sequence"} | ({} if size is None else {"length": size})
    return feature
