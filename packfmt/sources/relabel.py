"""Labels by another set's numbers, and labels from a table beside the images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packfmt.errors import DecodeError, SourceError
from packfmt.record import Record
from packfmt.sources.base import BadEntry, Source

__all__ = ["JoinedSource", "RelabelledSource"]


class _Around(Source):
    """A source around another, which it leaves as it is but for what it says and loads."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self.kind, self.random_access = source.kind, source.random_access
        self.columns, self.classes = source.columns, source.classes
        self.metadata, self.skipped, self.notes = source.metadata, source.skipped, source.notes

    def entries(self) -> Iterator[Any]:
        return self._source.entries()

    def size(self, entry: Any) -> int:
        return self._source.size(entry)

    def count(self) -> int | None:
        return self._source.count()

    def describe(self) -> dict[str, Any]:
        own = {"columns": [column.name for column in self.columns], "classes": list(self.classes)}
        return self._source.describe() | own

    def close(self) -> None:
        self._source.close()


class JoinedSource(_Around):
    """A source whose records take further columns from a table, by their key.

    A row belongs to the record whose key is the row's path: the whole key, its last part, or that without suffix. A
    record without a row is a bad entry. The table's rows are held in memory.

    Args:
        source: where the images are.
        table: where labels and further columns are; no file it names is opened.
        where: the table's name, for messages.
    """

    def __init__(self, source: Source, table: Source, where: str) -> None:
        super().__init__(source)
        self._where = where
        self._rows = {entry.key: entry.columns for entry in table.entries() if not isinstance(entry, BadEntry)}
        names = {column.name for column in table.columns}
        self.columns = (*(column for column in source.columns if column.name not in names), *table.columns)
        self.classes = table.classes or source.classes

    def load(self, entry: Any) -> Record:
        record = self._source.load(entry)
        last = record.key.rpartition("/")[2]
        for name in (record.key, last, last.rpartition(".")[0]):
            if name in self._rows:
                return Record(record.data, record.key, {**record.columns, **self._rows[name]})
        raise DecodeError(f"the table {self._where} has no row for it", key=record.key)


class RelabelledSource(_Around):
    """A source whose ``label`` counts another set's classes, so that a validation set fits its training set.

    Args:
        source: what to relabel.
        classes: the other set's class names, in order.
        where: the other set's name, for messages.

    Raises:
        SourceError: the source has no class names, or one that is not in ``classes``.
    """

    def __init__(self, source: Source, classes: tuple[str, ...], where: str) -> None:
        super().__init__(source)
        unknown = [name for name in source.classes if name not in set(classes)]
        if not source.classes or unknown:
            found = f"classes {unknown} are not among" if unknown else "the source has no class names to match with"
            raise SourceError(f"{found} those of {where}: {', '.join(classes) or 'none'}")
        self.classes = classes
        self._numbers = [classes.index(name) for name in source.classes]

    def load(self, entry: Any) -> Record:
        record = self._source.load(entry)
        return Record(record.data, record.key, self._relabel(dict(record.columns)))

    def _relabel(self, columns: dict[str, Any]) -> dict[str, Any]:
        if "label" in columns:
            columns["label"] = self._number(columns["label"])
        elif "labels" in columns:
            columns["labels"] = [self._number(label) for label in columns["labels"]]
        return columns

    def _number(self, label: Any) -> int:
        return self._numbers[int(label)] if 0 <= int(label) < len(self._numbers) else int(label)
