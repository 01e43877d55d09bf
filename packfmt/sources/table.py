"""A table (CSV, TSV or JSON lines) of image paths, labels and further columns, beside a folder of images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packfmt.errors import DecodeError, SourceError
from packfmt.record import Column, Record
from packfmt.sources.base import BadEntry, Source
from packfmt.sources.inputs import MAX_IMAGE_BYTES, SeenKeys, free_name, is_image_name
from packfmt.sources.paths import inside_key, read_inside
from packfmt.sources.rows import Cell, Row, Table

__all__ = ["TableSource", "recognise"]

_USUAL_KEYS = ("path", "file_name", "filename", "file", "filepath", "file_path", "image_path", "image", "img")
_KEY_NAMES = (*_USUAL_KEYS, "key", "name")
_LABEL_NAMES = ("label", "class", "class_id", "category", "target", "class_name", "y")
_MAX_CLASSES = 1_000_000
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")


def recognise(path: str | os.PathLike[str]) -> str | None:
    """ "table" where a file named .csv, .tsv or .jsonl has a row with the path of an image in it; else None.

    Raises:
        SourceError: a file of that name is no whole table: only its name says what it is.
    """
    try:
        if not os.fspath(path).lower().endswith(_SUFFIXES) or not os.path.isfile(path):
            return None
        table = Table(path)
        return "table" if _key_column(table, table.sample(16)) is not None else None
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    path: str
    columns: dict[str, Any]


class _Type:
    """What the cells of one column have in common, found while they pass by."""

    def __init__(self) -> None:
        self.integer = self.number = self.exact = True
        self.empty = False
        self.used = False

    def add(self, cell: Cell, number: int | float | None) -> None:
        if cell is None:
            self.empty = True
            return
        self.used = True
        self.integer = self.integer and isinstance(number, int)
        self.number = self.number and number is not None
        if isinstance(number, int):
            self.exact = self.exact and int(float(number)) == number

    @property
    def dtype(self) -> str | None:
        """ "<i8", "<f8" (an int column with gaps too: a gap is NaN), or None for text, as where a float would round."""
        if not self.used or not self.number:
            return None
        if self.integer and not self.empty:
            return "<i8"
        return "<f8" if self.exact else None


class TableSource(Source):
    """Images named by a table. The table is read twice: once for types, classes and duplicates, once for the rows.

    The first line names the columns, unless it holds the path of an image itself. A column is int64 where every cell
    is an integer written plainly (``007`` is text, as are more than 64 bits), float64 where every cell is a number that
    it holds exactly or empty (an empty one is NaN), else text. Integer labels stay as they are; other labels are
    classes, sorted, and ``label`` counts them.

    Paths are relative to ``root`` and never lead out of it, by "..", absolute or by a symbolic link: such a row is a
    bad entry, as is one whose file is missing. ``load`` is thread-safe. Memory: one row, the class names, and up to
    64 bytes a row to find duplicates.

    Args:
        table: a CSV, TSV or JSON lines file, UTF-8 with or without a byte order mark.
        root: the folder that the paths are relative to; None for the table's own.
        key_column: the column of paths, or None to find it.
        label_column: the column of labels, or None to find it; "" for no labels.

    Raises:
        FileNotFoundError: there is no such table.
        SourceError: the table is damaged, has no column of paths, or names a file twice (with both line numbers).
    """

    kind = "table"
    random_access = True

    def __init__(
        self,
        table: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        *,
        key_column: str | None = None,
        label_column: str | None = None,
    ) -> None:
        super().__init__()
        self._table = Table(table)
        self._root = os.fspath(root) if root is not None else os.path.dirname(os.path.abspath(table))
        if not os.path.isdir(self._root):
            raise FileNotFoundError(2, "no such folder of images", self._root)
        self._key = self._pick(key_column, "paths", _key_column(self._table, self._table.sample(16)))
        if self._key is None:
            raise SourceError(
                f"{self._table.path}: no column of image paths among {', '.join(self._table.names) or 'none'}; "
                "name it with key_column="
            )
        self._label = None
        self._taken = ["label"] if label_column == "" else []  # a column of that name would pass for labels
        if label_column != "":
            self._label = self._pick(label_column, "labels", _label_column(self._table, self._key))
        self._rows = 0
        self._columns: dict[str, Column] = {}
        self._class_ids: dict[str, int] = {}
        self._read_types()

    def count(self) -> int | None:
        return self._rows

    def entries(self) -> Iterator[_Row | BadEntry]:
        for line, row in self._table.rows():
            path = _string(row.get(self._key or ""))
            try:
                key = inside_key(self._root, path)
            except SourceError as error:
                yield BadEntry(path, f"line {line}: {error}")
                continue
            columns: dict[str, Any] = {}
            missing = None
            for name, column in self._columns.items():
                value = self._value(name, column, row.get(name))
                if value is None:
                    missing = f"line {line}: column {name!r} is empty"
                else:
                    columns[column.name] = value
            yield BadEntry(key, missing) if missing is not None else _Row(key, path, columns)

    def load(self, entry: Any) -> Record:
        if isinstance(entry, BadEntry):
            return super().load(entry)
        row: _Row = entry
        try:
            data = read_inside(self._root, row.path, MAX_IMAGE_BYTES)
        except FileNotFoundError as error:
            raise DecodeError("the file is missing", path=self._root, key=row.key) from error
        except SourceError as error:
            raise DecodeError(str(error), key=row.key) from error
        return Record(data, row.key, row.columns)

    def _pick(self, asked: str | None, what: str, found: str | None) -> str | None:
        if asked is None:
            return found
        if asked not in self._table.names:
            raise SourceError(
                f"{self._table.path}: no column {asked!r} for the {what}; columns are {', '.join(self._table.names)}"
            )
        return asked

    def _read_types(self) -> None:
        types = {name: _Type() for name in self._table.names if name != self._key}
        seen = SeenKeys()
        classes: set[str] = set()
        for line, row in self._table.rows():
            self._rows += 1
            for name, kind in types.items():
                kind.add(row.get(name), self._table.number(row.get(name)))
            self._check_twin(seen, _string(row.get(self._key or "")), line)
            cell = row.get(self._label) if self._label is not None else None
            if cell is not None and len(classes) <= _MAX_CLASSES:
                classes.add(_string(cell))
        self._declare(types, classes)

    def _check_twin(self, seen: SeenKeys, path: str, line: int) -> None:
        try:
            key = inside_key(self._root, path)
        except SourceError:
            return  # a bad entry when its turn comes
        earlier = seen.add(key, line)
        if earlier is not None:
            raise SourceError(
                f"{self._table.path}: lines {earlier} and {line} both name {key!r}; keys must differ. Remove one of "
                "them"
            )

    def _declare(self, types: dict[str, _Type], classes: set[str]) -> None:
        if self._label is not None:
            kind = types[self._label]
            if kind.used and kind.number and not kind.integer:
                self.notes.append(f"column {self._label!r} holds fractions; it is kept as it is and is no label")
                self._label = None
            elif not (kind.used and kind.integer):
                if len(classes) > _MAX_CLASSES:
                    raise SourceError(
                        f"{self._table.path}: column {self._label!r} holds more than {_MAX_CLASSES} different "
                        "labels; "
                        "name another with label_column="
                    )
                self.classes = tuple(sorted(classes))
                self._class_ids = {name: number for number, name in enumerate(self.classes)}
        taken = ["label"] if self._label is not None else self._taken
        for name, kind in types.items():
            if name == self._label:
                self._columns[name] = Column("label", "<i8")
                continue
            free = free_name(name, taken)
            taken.append(free)
            text = kind.dtype is None
            self._columns[name] = Column(free, "|u1", (None,), "text") if text else Column(free, kind.dtype or "<f8")
        self.columns = tuple(self._columns.values())

    def _value(self, name: str, column: Column, cell: Cell) -> Any:
        """The cell as its column holds it, or None where it is empty and may not be."""
        if column.kind == "text":
            return _string(cell)
        if name == self._label and self.classes:
            return self._class_ids.get(_string(cell)) if cell is not None else None
        if cell is None:
            return float("nan") if column.dtype == "<f8" else None
        number = self._table.number(cell)
        if number is None:
            raise SourceError(f"{self._table.path} changed while it was read: column {name!r} held numbers only")
        return number


def _string(cell: Cell) -> str:
    return "" if cell is None else str(cell)


def _key_column(table: Table, rows: list[Row]) -> str | None:
    """The column of paths: of the usual names, or else any, the first with the path of an image in the first rows."""
    usual = [name for name in _KEY_NAMES if name in table.names]
    for name in [*usual, *table.names]:
        if any(is_image_name(_string(row.get(name))) for row in rows):
            return name
    return usual[0] if usual and not rows else None


def _label_column(table: Table, key: str | None) -> str | None:
    return next((name for name in _LABEL_NAMES if name in table.names and name != key), None)
