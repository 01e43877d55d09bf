"""Streams the rows of a CSV, TSV or JSON lines file."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.inputs import is_image_name

__all__ = ["Cell", "Row", "Table"]

Cell = str | int | float | None
Row = dict[str, Cell]

_MAX_LINE = 16 << 20  # bytes of one JSON line
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
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"no JSON ({error})") from error
        if not isinstance(row, dict):
            raise self._error(number, "no JSON object")
        return {name: _cell(value) for name, value in row.items()}

    def _error(self, line: int, what: str) -> SourceError:
        return SourceError(f"{self.path}, line {line}: {what}")


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        return int(value)
    return json.dumps(value, ensure_ascii=False)
