"""Images that lie as they are somewhere in an input file, and reading several of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packfmt.record import Record
from packfmt.sources.inputfiles import InputFiles

__all__ = ["GAP", "Located", "read_together"]

GAP = 8 << 10  # bytes between two images that are read along: a value in LMDB begins on a page of its own


@dataclass(frozen=True, slots=True)
class Located:
    """A handle of an image file that lies somewhere in an input file.

    Args:
        key: the record's key.
        file: position in the source's files.
        offset, size: bytes.
        columns: as in Record.
    """

    key: str
    file: int
    offset: int
    size: int
    columns: dict[str, Any]


def read_together(files: InputFiles, entries: list[Any]) -> list[Any]:
    """The same entries with records in place of handles, read with one call where they lie close together.

    Those that cannot be read so stay as they are, and so does what is no ``Located``. Thread-safe.

    Raises:
        SourceError: a file has become shorter.
    """
    fetched = list(entries)
    places = [place for place, entry in enumerate(entries) if isinstance(entry, Located)]
    places.sort(key=lambda place: (entries[place].file, entries[place].offset))
    for run in _runs(entries, places):
        first = entries[run[0]]
        stop = max(entries[place].offset + entries[place].size for place in run)
        try:
            data = memoryview(files.read(first.file, first.offset, stop - first.offset))
        except OSError:
            continue
        for place in run:
            entry = entries[place]
            start = entry.offset - first.offset
            fetched[place] = Record(data[start : start + entry.size], entry.key, entry.columns)
    return fetched


def _runs(entries: list[Any], places: list[int]) -> Iterator[list[int]]:
    """Cut places, which are sorted by file and offset, where a gap is too wide to be read along."""
    run: list[int] = []
    file = stop = 0
    for place in places:
        entry = entries[place]
        if run and (entry.file != file or entry.offset > stop + GAP):
            yield run
            run = []
        if not run:
            file, stop = entry.file, 0
        run.append(place)
        stop = max(stop, entry.offset + entry.size)
    if run:
        yield run
