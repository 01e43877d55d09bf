"""The child's part of reading LMDB: open the environments, recognise their layout, and hand out the records."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.isolated.child import Flush, Job, total
from packfmt.sources.isolated.frames import Item
from packfmt.sources.lmdb.layouts import META_KEYS, ImagesByKey, Layout, Progressive, TextRecognition
from packfmt.sources.lmdb.serialised import (
    CaffeDatum,
    Carved,
    RawSquares,
    Serialised,
    read_datum,
    read_value,
    square_side,
)
from packfmt.sources.lmdb.table import Entry, Table, open_tables
from packfmt.sources.values import ValueFault, image_kind, what_is

__all__ = ["choose", "start"]

_WAY_OUT = "pack the images they came from"
_NAMED = 10  # databases that a message lists
_FIRST = 16  # entries looked at from the start; one more for each byte a key may begin with


class LMDBJob(Job):
    """Reads one or several environments of one layout; the request is ``LMDBSource``'s."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request["environments"], request["options"])
        self._file = 0

    def plan(self) -> dict[str, Any]:
        """Layout, columns, and the count where it is known. All environments must agree."""
        name, columns, counts, first = "", None, [], ""
        small, texts = True, False
        lost: dict[str, None] = {}
        for path, _, layout in self._layouts():
            if columns is not None and (layout.name, layout.columns) != (name, columns):
                raise SourceError(
                    f"{path} is {_describe(layout.name, layout.columns)}, but {first} is {_describe(name, columns)}; "
                    "convert them one at a time"
                )
            name, columns, first = layout.name, layout.columns, first or path
            counts.append(layout.count())
            small = small and layout.verbatim and layout.located()
            texts = texts or layout.side_texts
            lost.update(dict.fromkeys(layout.lost))
        return {
            "layout": name,
            "columns": [column.spec for column in columns or ()],
            "count": total(counts),
            "random_access": small,
            "side_texts": texts,
            "lost": list(lost),
        }

    def items(self) -> Iterator[Item | Flush]:
        """All records, environment by environment."""
        for path, prefix, layout in self._layouts():
            yield Flush(self._file)
            try:
                for item in layout.items():
                    yield item._replace(key=prefix + item.key) if prefix else item
            except (SourceError, OSError) as error:
                raise SourceError(self.of_one(path, error)) from error
            yield Flush(self._file)  # so that the map goes with its views
            self.add_up(path, layout.skipped, layout.notes)

    def _layouts(self) -> Iterator[tuple[str, str, Layout]]:
        for number, (path, prefix) in enumerate(self.files):
            self._file = number
            try:
                tables = open_tables(path, self.options["database"])
            except (SourceError, OSError) as error:
                raise SourceError(self.of_one(path, error)) from error
            for table in tables:
                try:
                    layout = choose(table, self.options)
                except SourceError as error:
                    if len(tables) == 1:
                        raise SourceError(self.of_one(path, error)) from error
                    names = ", ".join(repr(other.name) for other in tables[:_NAMED])
                    said = f"database {table.name!r}: {error}. There are {names}; database=NAME reads one alone"
                    raise SourceError(self.of_one(path, said)) from error
                yield path, f"{prefix}{table.name}/" if len(tables) > 1 else prefix, layout


def start(request: dict[str, Any]) -> LMDBJob:
    """What ``isolated`` calls in the child."""
    return LMDBJob(request)


def _describe(name: str, columns: Any) -> str:
    return f"{name} with {', '.join(column.name for column in columns) or 'no'} columns"


def choose(table: Table, options: dict[str, Any]) -> Layout:
    """The layout of a table, by its keys and the first bytes of its values.

    Raises:
        SourceError: empty, or a layout that holds no images or cannot be read safely; the message names it.
    """
    if table.entries == 0:
        raise SourceError("the database is empty: it has no entries")
    last = table.last()
    if last is not None and last[0].startswith(b"packfmt") and len(last[0]) == 15:
        raise SourceError("a pack in packfmt's own layout: read it with packfmt.open, or copy it as such")
    if _starts(table, b"image-", rb"image-\d+"):
        return TextRecognition(table, b"image-")
    if _starts(table, b"image_", rb"image_[hl]r-\d+"):
        prefix, other = (b"image_lr-", "hr") if options["which"] == "lr" else (b"image_hr-", "lr")
        if not _starts(table, prefix, prefix + rb"\d+"):
            raise SourceError(f"no images {prefix.decode()}* in it; which={other!r} reads image_{other}-*")
        return TextRecognition(table, prefix)
    sample = _sample(table)
    if not sample:
        raise SourceError("the database holds counts only, no images; was its writer stopped early?")
    if Progressive.fits(table, sample):
        return Progressive(table, options["resolution"])
    kinds = Counter(_kind(value) for _, value in sample)
    if kinds["image"]:
        return ImagesByKey(table, [key for key, _ in sample])
    return _serialised(table, sample, kinds, options)


def _starts(table: Table, prefix: bytes, pattern: bytes) -> bool:
    entry = table.first(prefix)
    return entry is not None and re.fullmatch(pattern, entry[0]) is not None


def _sample(table: Table) -> list[Entry]:
    """Entries from all over the table: the first ones, and the first for each byte that a key may begin with."""
    entries: dict[bytes, memoryview] = {}
    for key, value in table.scan():
        entries[key] = value
        if len(entries) >= _FIRST:
            break
    for byte in range(256):
        if (entry := table.first(bytes([byte]))) is not None:
            entries[entry[0]] = entry[1]
    if (entry := table.last()) is not None:
        entries[entry[0]] = entry[1]
    return [(key, value) for key, value in entries.items() if key not in META_KEYS]


def _kind(value: memoryview) -> str:
    if image_kind(value) is not None:
        return "image"
    what = what_is(value)
    if what.startswith(("lz4", "a zip", "a .npy")):
        return "features"
    if what.startswith(("an HTML", "a Git LFS")):
        return "raw"
    if what == "a pickle" or (len(value) and value[-1] == 0x2E and _reads("pickle", value)):
        return "pickle"
    if _is_datum(value):
        return "datum"
    if _is_arrow(value):
        return "arrow"
    if len(value) and (value[0] & 0xE0 == 0x80 or value[0] in range(0xDC, 0xE0)) and _reads("msgpack", value):
        return "msgpack"
    return "text" if _is_text(value) else "raw"


def _reads(kind: str, value: memoryview) -> bool:
    try:
        return isinstance(read_value(kind, value), list | tuple | dict)
    except ValueFault:
        return False


def _is_datum(value: memoryview) -> bool:
    try:
        datum = read_datum(value)
    except ValueFault:
        return False
    return datum.encoded or datum.floats or datum.channels > 0


def _is_arrow(value: memoryview) -> bool:
    """Four small counts, then an Arrow stream: how ``pyarrow.serialize`` begins."""
    if len(value) < 32:
        return False
    small = all(0 <= count < 4096 for count in struct.unpack("<4i", value[:16]))
    return small and (b"\xff\xff\xff\xff" in bytes(value[8:64]) or b"\xff\xd8\xff" in bytes(value[:4096]))


def _is_text(value: memoryview) -> bool:
    try:
        return all(character.isprintable() or character.isspace() for character in bytes(value[:200]).decode("utf-8"))
    except UnicodeDecodeError:
        return False


def _serialised(table: Table, sample: list[Entry], kinds: Counter[str], options: dict[str, Any]) -> Layout:
    kind = kinds.most_common(1)[0][0]
    chosen = [entry for entry in sample if _kind(entry[1]) == kind]
    if kind in ("pickle", "msgpack"):
        return Serialised(table, kind, chosen)
    if kind == "datum":
        if all(read_datum(value).floats for _, value in chosen):
            raise SourceError(f"Caffe Datum with float_data: features, or pixels less a mean; {_WAY_OUT}")
        return CaffeDatum(table)
    if kind == "arrow":
        if options["carve"]:
            return Carved(table)
        raise SourceError(
            "the values were written by pyarrow.serialize, which pyarrow 12 and later cannot read. Rewrite the "
            "database with pyarrow<12, or pass carve=True to cut the JPEGs out (labels are lost)"
        )
    if kind == "features":
        raise SourceError(f"the values are features ({what_is(chosen[0][1])}), not images; {_WAY_OUT}")
    if kind == "text":
        raise SourceError("the database holds labels only (as mmocr's label.lmdb): pack the images, with a label table")
    return _raw(table, chosen, options)


def _raw(table: Table, chosen: list[Entry], options: dict[str, Any]) -> Layout:
    squares = all(square_side(len(value)) for _, value in chosen)
    if options["raw_rgb"]:
        return RawSquares(table)
    key, value = chosen[0]
    if squares:
        side = square_side(len(value))
        raise SourceError(
            f"the values may be raw RGB pixels ({side}x{side}x3, as NVAE writes), but nothing says so: "
            "pass raw_rgb=True to read them as such"
        )
    raise SourceError(
        f"no layout of images that packfmt knows: key {key[:60]!r} holds {len(value)} bytes, {what_is(value)}"
    )
