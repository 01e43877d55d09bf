"""Parquet with an image column, as Hugging Face `datasets` reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packfmt.errors import ConvertError
from packfmt.record import OWN_COLUMNS, Column
from packfmt.sources.parquet import _arrow
from packfmt.storage.base import Buffer, Writer
from packfmt.storage.publish import PendingFile

__all__ = ["ParquetWriter"]

GROUP_BYTES = 32 << 20  # of images per row group: what a reader must hold to get at one row
GROUP_ROWS = 1000


class ParquetWriter(Writer):
    """Writes ``image`` (struct of bytes and path) and the columns; the path is the record's key.

    Args:
        path: the file to write.
        columns: of the records.
        classes: stored as ``ClassLabel`` names of ``label``.
        metadata: ignored.
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
        metadata: Any = None,
        force: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self.content_id = ""
        self._arrow = _arrow()
        self._columns = [column for column in columns if column.name not in OWN_COLUMNS]
        if any(column.name == "image" for column in self._columns):
            raise ConvertError(f"{self.path}: a column 'image' would hide the images; rename it")
        self._schema = self._make_schema(classes)
        self._rows: dict[str, list[Any]] = {name: [] for name in self._schema.names}
        self._held = 0
        self._count = 0
        self._file = PendingFile(Path(self.path), force=force)
        # Images are compressed already.
        self._writer = self._arrow.parquet.ParquetWriter(self._file.stream, self._schema, compression="none")

    def __len__(self) -> int:
        return self._count

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def write(self, data: Buffer, /, key: str, **columns: Any) -> None:
        self._rows["image"].append({"bytes": bytes(data), "path": self._text("key", key, key)})
        for column in self._columns:
            value = columns[column.name]
            if column.kind == "text":
                value = self._text(column.name, value, key)
            self._rows[column.name].append(value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value)
        self._held += memoryview(data).nbytes
        self._count += 1
        if self._held >= GROUP_BYTES or len(self._rows["image"]) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        try:
            self._flush()
            self._writer.close()
            self._file.publish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        self._file.discard()

    def _text(self, name: str, value: str, key: str) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ConvertError(
                f"{self.path}: {name} of {key!r} is no valid UTF-8, which Parquet demands; rename the file"
            ) from None
        return value

    def _flush(self) -> None:
        if self._rows["image"]:
            self._writer.write_table(self._arrow.table(self._rows, schema=self._schema))
        self._rows = {name: [] for name in self._schema.names}
        self._held = 0

    def _make_schema(self, classes: Sequence[str]) -> Any:
        arrow = self._arrow
        features: dict[str, Any] = {"image": {"_type": "Image"}}
        fields = [arrow.field("image", arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))]
        for column in self._columns:
            fields.append(arrow.field(column.name, self._type(column)))
            features[column.name] = _feature(column, classes)
        described = {"info": {"features": features}}
        return arrow.schema(fields, metadata={b"huggingface": json.dumps(described).encode()})

    def _type(self, column: Column) -> Any:
        if column.kind != "array":
            return self._arrow.string() if column.kind == "text" else self._arrow.binary()
        kind = self._arrow.from_numpy_dtype(np.dtype(column.dtype))
        for size in reversed(column.shape):
            kind = self._arrow.list_(kind) if size is None else self._arrow.list_(kind, size)
        return kind


def _feature(column: Column, classes: Sequence[str]) -> dict[str, Any]:
    """How `datasets` describes a column."""
    if column.name == "label" and classes and column.shape == ():
        return {"names": list(classes), "_type": "ClassLabel"}
    name = {"text": "string", "bytes": "binary"}.get(column.kind) or np.dtype(column.dtype).name
    feature: dict[str, Any] = {"dtype": name, "_type": "Value"}
    if column.kind == "array":
        for size in reversed(column.shape):
            feature = {"feature": feature, "_type": "Sequence"} | ({} if size is None else {"length": size})
    return feature
