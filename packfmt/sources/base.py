"""What a source of records is, and a target that is not a pack: the contracts of the one copy loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packfmt.errors import ConvertError, DecodeError
from packfmt.record import OWN_COLUMNS, Column, Record
from packfmt.storage.base import Writer

__all__ = ["BadEntry", "SkipEntry", "Source", "Target"]


class SkipEntry(Exception):
    """Raised by ``Source.load`` for an entry that is not an image and was never meant to be one.

    Args:
        reason: a few words, counted and shown in the report: "not an image", "hidden file".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BadEntry:
    """An entry that should have been an image and is not.

    Args:
        key: where it stands in the source.
        reason: what is wrong with it, in a few words.
        data: the bytes that are there, for ``--bad keep``; None where there are none to keep.
        columns: its column values, as of a whole record.
    """

    key: str
    reason: str
    data: bytes | None = None
    columns: dict[str, Any] | None = None


class Source(ABC):
    """A stream of records with a fixed order.

    Streaming: what a source holds in memory does not grow with the number of records. Iterating twice gives the same
    records in the same order. ``load`` is thread-safe and ``entries`` is called from one thread, so that the copy loop
    can read ahead in threads and still keep the order. Nothing a source reads is executed, and no path found in it is
    opened.

    Attributes:
        random_access: whether handles are small and may be loaded in any order, at any time; ``--shuffle`` asks.
        inline: types of entries that take less time to load, in order, than to be handed to a thread.
        kind: the short name of the layout, as ``--from`` takes it.
        columns: the columns every record has, besides its key and what the image header tells.
        classes: names of the classes that the column ``label`` counts, in order; empty where there are none.
        metadata: JSON-able facts about the whole set, kept in the pack.
        skipped: reason to number of entries passed over on purpose; complete once iteration has ended.
        lost: names of what it holds and no column takes (fields, features, datasets); known from the start.
        notes: things a person should know (counts that disagree, a missing index); complete once iteration has ended.
    """

    kind: str = "source"
    random_access: bool = False
    inline: tuple[type, ...] = (Record, BadEntry)
    columns: tuple[Column, ...] = ()
    classes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.skipped: Counter[str] = Counter()
        self.notes: list[str] = []
        self.lost: list[str] = []

    @abstractmethod
    def entries(self) -> Iterator[Any]:
        """Yield one cheap handle per record, in order. A handle may be the record itself."""

    def fetch(self, entries: list[Any]) -> list[Any]:
        """Handles of the same records whose bytes are at hand, where reading several at once is quicker. Thread-safe.

        One that cannot be read so comes back as it is: ``load`` says why.
        """
        return entries

    def load(self, entry: Any) -> Record:
        """Turn a handle into its record. Thread-safe.

        Raises:
            DecodeError: the entry is damaged (``--bad`` decides what follows).
            OSError: the entry cannot be read (likewise).
            SkipEntry: the entry is not an image and is passed over.
        """
        if isinstance(entry, BadEntry):
            raise DecodeError(entry.reason, key=entry.key)
        return entry if isinstance(entry, Record) else self._load(entry)

    def _load(self, entry: Any) -> Record:
        """The record of a handle that is neither a record nor a bad entry; errors as of ``load``."""
        raise TypeError(f"a {self.kind} source has no entries of type {type(entry).__name__}")

    def bad_entry(
        self, key: str, reason: str, data: bytes | memoryview | None, columns: dict[str, Any] | None
    ) -> BadEntry:
        """A bad entry whose bytes can be kept where it has every column: no pack holds them without."""
        if not {column.name for column in self.columns} <= (columns or {}).keys():
            return BadEntry(key, reason)
        return BadEntry(key, reason, bytes(data) if data is not None and len(data) else None, columns)

    def size(self, entry: Any) -> int:
        """Bytes an entry takes once loaded, 0 where that is not known: what bounds the copy loop's queue."""
        return memoryview(entry.data).nbytes if isinstance(entry, Record) else 0

    def count(self) -> int | None:
        """The number of records where it is known without reading them, else None."""
        return None

    def describe(self) -> dict[str, Any]:
        """JSON-able facts for a person who asks what was recognised: kind, count, labels, what would be lost."""
        return {
            "kind": self.kind,
            "records": self.count(),
            "columns": [column.name for column in self.columns],
            "classes": list(self.classes),
            "lost": list(self.lost),
        }

    def __iter__(self) -> Iterator[Record]:
        """Yield every record that loads; skipped entries are counted in ``skipped``.

        Raises:
            DecodeError: at the first damaged entry.
            OSError: at the first unreadable one.
        """
        for entry in self.entries():
            try:
                yield self.load(entry)
            except SkipEntry as skip:
                self.skipped[skip.reason] += 1

    def close(self) -> None:  # noqa: B027 (most sources hold nothing open)
        """Release what the source holds open. Calling it twice is allowed."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Target(Writer):
    """A writer of a format that is not a pack. Columns must be declared, and there is no content id.

    Args:
        path: what is written.
        columns: of the records; those that every pack has come from the images and are left out.
    """

    def __init__(self, path: str, columns: Sequence[Column]) -> None:
        self.path = path
        self.content_id = ""
        self.columns = tuple(column for column in columns if column.name not in OWN_COLUMNS)
        self._names = frozenset(column.name for column in self.columns)
        self._count = 0
        self._odd: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    @property
    def notes(self) -> list[str]:
        """What a person should know of the records written so far."""
        return [f"{count} {what}" for what, count in self._odd.items()]

    def _own(self, key: str, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns that are declared, all of them.

        Raises:
            ConvertError: one is missing or was not declared.
        """
        given = {name: value for name, value in columns.items() if name not in OWN_COLUMNS}
        if given.keys() != self._names:
            raise ConvertError(f"{self.path}: {key!r} has columns {sorted(given)}, declared are {sorted(self._names)}")
        return given
