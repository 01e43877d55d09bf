"""Labels by another set's numbers, and labels from a table beside the images."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from packfmt.errors import DecodeError, SourceError
from packfmt.record import Record
from packfmt.sources.base import BadEntry, Source

__all__ = ["JoinedSource", "RelabelledSource"]


class _Around(Source):
    """A source around another, which it leaves as it is but for what it says and loads."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self.kind, self.random_access, self.inline = source.kind, source.random_access, source.inline
        self.columns, self.classes = source.columns, source.classes
        self.metadata, self.skipped, self.notes = source.metadata, source.skipped, source.notes
        self.lost = source.lost

    def entries(self) -> Iterator[Any]:
        for entry in self._source.entries():
            yield self._bad(entry) if isinstance(entry, BadEntry) else entry

    def size(self, entry: Any) -> int:
        return self._source.size(entry)

    def count(self) -> int | None:
        return self._source.count()

    def describe(self) -> dict[str, Any]:
        own = {"columns": [column.name for column in self.columns], "classes": list(self.classes)}
        return self._source.describe() | own

    def close(self) -> None:
        self._source.close()

    def fetch(self, entries: list[Any]) -> list[Any]:
        return self._source.fetch(entries)

    def load(self, entry: Any) -> Record:
        record = self._source.load(entry)
        return Record(record.data, record.key, self._change(record.key, dict(record.columns)))

    def _bad(self, entry: BadEntry) -> BadEntry:
        """The same entry with columns as a whole record would have them, or without bytes to keep."""
        if entry.data is None:
            return entry
        try:
            return replace(entry, columns=self._change(entry.key, dict(entry.columns or {})))
        except DecodeError:
            return replace(entry, data=None, columns=None)

    @abstractmethod
    def _change(self, key: str, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns of one record as they are to be. Raises DecodeError where they are not known."""


class JoinedSource(_Around):
    """A source whose records take further columns from a table, by their key.

    A row belongs to the record whose key is the row's path: the whole key or its last part, with or without suffix. A
    record without a row is a bad entry. The table's rows are held in memory.

    Args:
        source: where the images are.
        table: where labels and further columns are; no file it names is opened.
        where: the table's name, for messages.

    Raises:
        SourceError: a column of the table but ``label`` is the source's own, or its ``label`` has other class names
            than the source's boxes.
    """

    def __init__(self, source: Source, table: Source, where: str) -> None:
        super().__init__(source)
        self._where = where
        self._check_columns(table)
        self._rows = {entry.key: entry for entry in table.entries()}
        self._used: set[str] = set()
        self._shared = 0
        self._lock = threading.Lock()
        names = {column.name for column in table.columns}
        self.columns = (*(column for column in source.columns if column.name not in names), *table.columns)
        if "label" in names:
            self.classes = table.classes

    @property
    def notes(self) -> list[str]:
        """Those of the source, and what did not fit; complete once all records are loaded."""
        unused = len(self._rows) - len(self._used)
        notes = [f"{unused} rows of {self._where} belong to no image"] if unused and self._used else []
        if self._shared:
            notes.append(f"{self._shared} images share a row of {self._where} with another, by their file's name")
        return [*self._source.notes, *notes]

    @notes.setter
    def notes(self, value: list[str]) -> None:
        """Set by the base class; the source's own are the ones that count."""

    def entries(self) -> Iterator[Any]:
        with self._lock:
            self._used.clear()
            self._shared = 0
        return super().entries()

    def _check_columns(self, table: Source) -> None:
        own, brought = ({column.name for column in columns} for columns in (self.columns, table.columns))
        twice = sorted((own & brought) - {"label"})
        if twice:
            raise SourceError(
                f"{self._where}: the images have columns {', '.join(twice)} of their own; only label may be replaced. "
                "Rename these in the table"
            )
        # A pack has one list of class names, and both columns would count it.
        if "label" in brought - own and "labels" in own and self.classes and self.classes != table.classes:
            raise SourceError(
                f"{self._where}: its label counts the classes {_some(table.classes)}, the labels of the boxes "
                f"{_some(self.classes)}; a pack has one list of names. Keep the label as a plain column with "
                "label_column=\"\" (--label-column '')"
            )

    def _change(self, key: str, columns: dict[str, Any]) -> dict[str, Any]:
        name = self._row_of(key)
        row = self._rows[name]
        if isinstance(row, BadEntry):
            raise DecodeError(f"its row in {self._where}: {row.reason}", key=key)
        with self._lock:
            self._shared += name in self._used
            self._used.add(name)
        return {**columns, **row.columns}

    def _row_of(self, key: str) -> str:
        last = key.rpartition("/")[2]
        for name in (key, _stem(key), last, _stem(last)):
            if name in self._rows:
                return name
        raise DecodeError(f"the table {self._where} has no row for it", key=key)


class RelabelledSource(_Around):
    """A source whose ``label`` counts another set's classes, so that a validation set fits its training set.

    Args:
        source: what to relabel: its ``label``, or the list ``labels`` of each record.
        classes: the other set's class names, in order.
        where: the other set's name, for messages.

    Raises:
        SourceError: the source has no class names, or one that is not in ``classes``.
    """

    def __init__(self, source: Source, classes: tuple[str, ...], where: str) -> None:
        super().__init__(source)
        numbers = {name: number for number, name in enumerate(classes)}
        unknown = [name for name in source.classes if name not in numbers]
        if not source.classes or unknown:
            found = f"classes {unknown} are not among" if unknown else "the source has no class names to match with"
            raise SourceError(f"{found} those of {where}: {', '.join(classes) or 'none'}")
        self.classes = classes
        self._numbers = np.array([numbers[name] for name in source.classes], np.int64)
        self._column = "label" if any(column.name == "label" for column in source.columns) else "labels"
        # Whatever width the source's numbers have, the other set's may need more.
        self.columns = tuple(replace(c, dtype="<i8") if c.name == self._column else c for c in source.columns)

    def _change(self, key: str, columns: dict[str, Any]) -> dict[str, Any]:
        if self._column in columns:
            labels = np.asarray(columns[self._column], np.int64)
            if labels.size and not (labels.min() >= 0 and labels.max() < len(self._numbers)):
                raise DecodeError(f"label {columns[self._column]!s:.80} has no class name to renumber it by", key=key)
            columns[self._column] = self._numbers[labels]
        return columns


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more or "(no names)"


def _stem(key: str) -> str:
    return key.rpartition(".")[0] if "." in key.rpartition("/")[2] else key
