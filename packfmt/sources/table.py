"""A table (CSV, TSV or JSON lines) of image paths, labels and further columns, beside a folder of images."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packfmt.bounded_json import RECORD, parse_json
from packfmt.errors import DecodeError, SourceError
from packfmt.record import LABEL, Column, Record, empty_value, text_column
from packfmt.sources.base import BadEntry, Source
from packfmt.sources.inputs import MAX_IMAGE_BYTES, Probe, SeenKeys, free_name, inside_key, is_image_name, read_inside

__all__ = ["Cell", "Row", "Table", "TableSource", "recognise"]

Cell = str | int | float | None
Row = dict[str, Cell]

_MAX_LINE = RECORD.size  # bytes of one JSON line
_MAX_COLUMNS = 10_000
# Written plainly: a leading zero or plus, or an underscore, makes it a text such as a postcode.
_DIGITS = re.compile(r"-?[0-9]+")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?|nan|NaN|-?inf")


class Table:
    """The rows of a table, as often as asked.

    Args:
        path: the file; ``.jsonl`` and ``.ndjson`` are read as JSON lines, ``.tsv`` is cut at tabs, any other at the
            character out of ``, ; | tab`` that its first line holds most of.

    Attributes:
        names: the column names. Where the first line already holds the path of an image: column0, column1 (or, for
            two columns, path and label).

    Raises:
        FileNotFoundError: there is no such file.
        SourceError: it is empty, damaged, not UTF-8, or two columns have one name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.is_json = self.path.lower().endswith((".jsonl", ".ndjson"))
        self._headed = True
        self._delimiter = "\t"
        self.names: tuple[str, ...] = ()
        with open(self.path, "rb") as file:
            head = file.read(1 << 16)
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise self._error(1, "UTF-16 text; save it as UTF-8")
        if self.is_json:
            self.names = self._json_names()
        else:
            self._read_header(head)

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield ``(line number, row)``; an empty cell is None, a blank line no row.

        Raises:
            SourceError: a row that cannot be read, with its line number.
        """
        return self._json_rows() if self.is_json else self._csv_rows()

    def sample(self, count: int) -> list[Row]:
        """The first rows, at most ``count``."""
        return [row for _, row in itertools.islice(self.rows(), count)]

    def number(self, cell: Cell) -> int | float | None:
        """The number that a cell is: an int that fits 64 bits, or a float; None for text. JSON strings are text."""
        if isinstance(cell, int):
            return int(cell) if -(1 << 63) <= cell < 1 << 63 else None
        if isinstance(cell, float) or cell is None or self.is_json:
            return cell if isinstance(cell, float) else None
        if _INTEGER.fullmatch(cell):
            return self.number(int(cell))
        if _DIGITS.fullmatch(cell):
            return None  # a float would keep about 16 of its digits
        if _FLOAT.fullmatch(cell) and not re.match(r"-?0[0-9]", cell):
            value = float(cell)
            return value if "inf" in cell or not math.isinf(value) else None
        return None

    def _read_header(self, head: bytes) -> None:
        first = head.decode("utf-8-sig", "surrogateescape").lstrip("\r\n").splitlines()[:1]
        if not first:
            raise self._error(1, "the table is empty")
        if not self.path.lower().endswith(".tsv"):
            bare = re.sub(r'"[^"]*"', "", first[0])
            self._delimiter = max(",;|\t", key=bare.count)
        line, cells = next(self._lines(), (1, []))
        if any(is_image_name(cell) for cell in cells):
            self._headed = False
            self.names = ("path", "label") if len(cells) == 2 and is_image_name(cells[0]) else ()
            self.names = self.names or tuple(f"column{number}" for number in range(len(cells)))
        else:
            self.names = tuple(cell.strip() or f"column{number}" for number, cell in enumerate(cells))
        if len(set(self.names)) != len(self.names):
            raise self._error(line, f"two columns of one name: {', '.join(self.names)}")

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        with open(self.path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            try:
                for cells in reader:
                    if cells:
                        yield reader.line_num, cells
            except csv.Error as error:
                raise self._error(reader.line_num, str(error)) from error

    def _csv_rows(self) -> Iterator[tuple[int, Row]]:
        for line, cells in itertools.islice(self._lines(), 1 if self._headed else 0, None):
            if len(cells) != len(self.names):
                raise self._error(line, f"{len(cells)} cells where the table has {len(self.names)} columns")
            yield line, {name: cell if cell != "" else None for name, cell in zip(self.names, cells, strict=True)}

    def _json_names(self) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for line, row in self._json_rows():
            names.update(dict.fromkeys(row))
            if len(names) > _MAX_COLUMNS:
                raise self._error(line, f"more than {_MAX_COLUMNS} columns")
        if not names:
            raise self._error(1, "the table is empty")
        return tuple(names)

    def _json_rows(self) -> Iterator[tuple[int, Row]]:
        with open(self.path, "rb") as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE + 1)
                if not line:
                    return
                if len(line) > _MAX_LINE:
                    raise self._error(number, f"a line of more than {_MAX_LINE} bytes")
                if line.strip():
                    yield number, self._json_row(number, line)

    def _json_row(self, number: int, line: bytes) -> Row:
        try:
            row = parse_json(line, RECORD)
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"not JSON ({error})") from error
        if not isinstance(row, dict):
            raise self._error(number, "not a JSON object")
        return {name: _cell(value) for name, value in row.items()}

    def _error(self, line: int, what: str) -> SourceError:
        return SourceError(f"{self.path}, line {line}: {what}")


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        return int(value)
    return json.dumps(value, ensure_ascii=False)


_USUAL_KEYS = ("path", "file_name", "filename", "file", "filepath", "file_path", "image_path", "image", "img")
_KEY_NAMES = (*_USUAL_KEYS, "key", "name")
_LABEL_NAMES = ("label", "class", "class_id", "category", "target", "class_name", "y")
_MAX_CLASSES = 1_000_000
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")


def recognise(probe: Probe) -> bool:
    """Whether a file named .csv, .tsv or .jsonl has a row with the path of an image in it.

    Raises:
        SourceError: a file of that name is damaged: only its name says what it is.
    """
    if not probe.path.lower().endswith(_SUFFIXES) or not os.path.isfile(probe.path):
        return False
    table = Table(probe.path)
    return _key_column(table, table.sample(16)) is not None


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

    def _load(self, entry: Any) -> Record:
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
                self.notes.append(f"column {self._label!r} holds fractions; it is kept as it is and is not a label")
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
                self._columns[name] = LABEL
                continue
            free = free_name(name, taken)
            taken.append(free)
            self._columns[name] = text_column(free) if kind.dtype is None else Column(free, kind.dtype)
        self.columns = tuple(self._columns.values())

    def _value(self, name: str, column: Column, cell: Cell) -> Any:
        """The cell as its column holds it, or None where it is empty and may not be."""
        if column.kind == "text":
            return _string(cell)
        if name == self._label and self.classes:
            return self._class_ids.get(_string(cell)) if cell is not None else None
        if cell is None:
            return empty_value(column)
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
