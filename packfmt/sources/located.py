"""Reading images that lie as they are somewhere in an input file: by offset, several at once, from many threads."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packfmt.errors import SourceError
from packfmt.record import Record

__all__ = ["GAP", "InputFiles", "Located", "read_together"]

_KEPT_OPEN = 64


class InputFiles:
    """A fixed list of files. Thread-safe, but for ``close``.

    Args:
        paths: the files; they need not exist before they are read. The first ones stay open once they were read.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._sizes: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._open)  # for who forgets to close

    def holds(self, file: object, offset: object, size: object) -> bool:
        """Whether the file has that many bytes there, or had when it was first asked about."""
        if not (isinstance(file, int) and isinstance(offset, int) and isinstance(size, int)):
            return False
        if not 0 <= file < len(self._paths):
            return False
        if file not in self._sizes:
            self._sizes[file] = os.path.getsize(self._paths[file])
        return offset >= 0 and size >= 0 and offset + size <= self._sizes[file]

    def read(self, file: int, offset: int, size: int) -> bytes:
        """The bytes of one part, which ``holds`` was asked about.

        Raises:
            OSError: the file cannot be read.
            SourceError: it has become shorter.
        """
        descriptor = self._descriptor(file)
        try:
            data = os.pread(descriptor, size, offset)
            while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
                data += more
        finally:
            if file >= _KEPT_OPEN:
                os.close(descriptor)
        if len(data) != size:
            raise SourceError(f"{self._paths[file]}: became shorter while it was read; begin again")
        return data

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        with self._lock:
            _close_all(self._open)

    def _descriptor(self, file: int) -> int:
        if file >= _KEPT_OPEN:
            return os.open(self._paths[file], os.O_RDONLY)
        with self._lock:
            if file not in self._open:
                descriptor = os.open(self._paths[file], os.O_RDONLY)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._open[file] = descriptor
            return self._open[file]


def _close_all(opened: dict[int, int]) -> None:
    while opened:
        os.close(opened.popitem()[1])


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
