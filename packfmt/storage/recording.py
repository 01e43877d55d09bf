"""What every writer of one pack does: check records, gather index and columns, describe them at the end."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from packfmt import format as layout
from packfmt.bounded_json import PACK
from packfmt.errors import DecodeError
from packfmt.format import Directory, Layout, Section, Trailer, record_checksum
from packfmt.images.sniff import sniff
from packfmt.record import IMAGE_COLUMNS, KEY, Column, infer_column
from packfmt.storage.atomic import naming
from packfmt.storage.base import Buffer, Writer
from packfmt.storage.keys import KeyHashes, refuse_same_keys
from packfmt.storage.spool import TableSpool

__all__ = ["RecordingWriter", "checked_facts", "image_values", "merge_columns"]

IMAGE_NAMES = tuple(column.name for column in IMAGE_COLUMNS)
_OF_IMAGES = frozenset(IMAGE_NAMES)
SHOWN = 20  # classes named in an error
MAX_DEPTH = PACK.depth  # of metadata; the directory is one level, and what its members hold is counted as another
REFUSALS = {  # what a writer that cannot go on says, by its state
    "open": "is not finished",
    "broken": "a write failed before, so the pack cannot be finished; start again",
    "finished": "is finished; records cannot be added",
    "closed": "is closed; records cannot be added",
    "discarded": "was thrown away; start again",
}


def image_values(data: Buffer) -> dict[str, int]:
    """The values of the image columns for encoded bytes; all 0 where no image is recognised."""
    try:
        info = sniff(data)
    except DecodeError:
        return dict.fromkeys(IMAGE_NAMES, 0)
    return {name: getattr(info, name) for name in IMAGE_NAMES}


class RecordingWriter(Writer):
    """Lays records out as a shard does; a backend stores them, and the parts that follow them.

    Memory does not grow with the number of records: what becomes the index is spooled to nameless files.

    Args:
        path: the pack's final name.
        columns: columns whose type is not to be inferred from the records.
        classes: class names that the column ``label`` counts.
        metadata: JSON-able facts to keep.
        keys: where the keys are noted, if another looks for duplicates: the writer of several shards.
        lengths: of the records in earlier shards, as the attribute there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[Column],
        classes: Sequence[str],
        metadata: Mapping[str, Any] | None,
        keys: KeyHashes | None = None,
        lengths: Mapping[str, int | None] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._classes, self._metadata = checked_facts(classes, metadata or {})
        self._numbers = {name: number for number, name in reversed(list(enumerate(self._classes)))}
        self._lengths = lengths
        self._declared = merge_columns(columns)
        self._folder = Path(self.path).parent
        self._records_end = layout.HEADER.size
        self._count = 0
        self._own_keys = KeyHashes(self._folder)
        self._keys = self._own_keys if keys is None else keys
        self._state = "open"
        self._table: TableSpool | None = None
        self.content_id = ""
        self.file_size = 0

    # What a backend gives

    @abstractmethod
    def _store(self, data: Buffer) -> None:
        """Store the next record."""

    @abstractmethod
    def _put(self, offset: int, chunks: Iterable[bytes]) -> None:
        """Store a part that stands at ``offset`` of the shard. Called with rising offsets, after all records."""

    @abstractmethod
    def _complete(self) -> None:
        """Bring all to the disk, still under the temporary name."""

    @abstractmethod
    def _publish(self) -> None:
        """Give the finished pack its final name."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove what is on the disk."""

    # What all share

    def __len__(self) -> int:
        return self._count

    @property
    def data_size(self) -> int:
        """Bytes of records written so far."""
        return self._records_end - layout.HEADER.size

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, inferred ones included once a record has been written; tentative ones until all have been."""
        return self._declared if self._table is None else self._table.columns

    @property
    def facts(self) -> tuple[tuple[str, ...], Mapping[str, Any]]:
        """Classes and metadata, as a reader will give them."""
        return self._classes, self._metadata

    @property
    def lengths(self) -> Mapping[str, int | None]:
        """``TableSpool.lengths``, of these records and those in earlier shards."""
        return {} if self._table is None else self._table.lengths

    def _append(self, data: bytes | memoryview, key: str, columns: dict[str, Any]) -> None:
        self._require("open")
        if self._numbers:
            self._number_labels(columns, key)
        if _OF_IMAGES.isdisjoint(columns):
            columns |= image_values(data)
        columns[KEY] = key
        table = self._table or self._spools(columns)
        if columns.keys() != table.names:
            self._refuse_columns(columns, table.names)
        size = len(data)
        encoded = table.encode((self._records_end, size, record_checksum(data, self._count)), columns)
        # All that can be refused has been: from here on, an error leaves the files in no known state.
        self._state = "broken"
        self._table = table
        with naming(self.path):
            self._store(data)
            table.append(encoded)
        self._keys.append(key.encode("utf-8", "surrogateescape"))
        self._records_end += size
        self._count += 1
        self._state = "open"

    def finish(self) -> None:
        """Write index, columns, directory and trailer, and bring all to the disk, still under the temporary name.

        Raises:
            ValueError: two records have the same key.
            OSError: the disk refuses.
        """
        if self._state == "finished":
            return
        self._require("open")
        self._state = "broken"
        with naming(self.path):
            self._finish()
        self._state = "finished"

    def _finish(self) -> None:
        if self._keys is self._own_keys:
            refuse_same_keys(self.path, self._keys.repeated(), self.written_keys())
        self._table = table = self._table or self._spools({})
        table.settle()
        plan = Layout.plan(self._records_end, layout.section_sizes(self._count, table.columns, table.values_sizes()))
        sections = {name: self._write_section(table, name, section) for name, section in plan.sections.items()}
        directory = Directory(sections, table.columns, self._classes, self._metadata)
        identity = _identify(table)
        self._write_frame(plan, directory, identity)
        self._close_spools()
        self.content_id = identity.hex()

    def _write_frame(self, plan: Layout, directory: Directory, identity: bytes) -> None:
        """Write directory and trailer behind the sections, and bring all to the disk."""
        raw = directory.encode()
        self._put(plan.directory_offset, [raw])
        self.file_size = plan.file_size(len(raw))
        place = Section(plan.directory_offset, len(raw), xxhash.xxh3_64_intdigest(raw))
        trailer = Trailer(self._count, self._records_end, place, self.file_size, identity)
        self._put(self.file_size - layout.TRAILER.size, [trailer.encode()])
        self._complete()

    def publish(self) -> None:
        """Give the finished pack its final name."""
        self._require("finished")
        self._publish()
        self._state = "closed"

    def close(self) -> None:
        if self._state == "closed":
            return
        try:
            self.finish()
            self.publish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        if self._state != "closed":
            self._state = "discarded"
            self._discard()
            self._close_spools()

    def written_keys(self) -> Iterator[bytes]:
        """The keys of the records so far, in order, as they are stored."""
        if self._table is not None:
            yield from self._table.each(KEY)

    def _require(self, state: str) -> None:
        if self._state != state:
            raise ValueError(f"{self.path}: {REFUSALS[self._state]}")

    def _spools(self, first: Mapping[str, Any]) -> TableSpool:
        """Spools for the declared columns, and for others of the types that the first record shows."""
        declared = {column.name: column for column in self._declared}
        inferred = [infer_column(name, value) for name, value in first.items() if name not in declared]
        return TableSpool([*declared.values(), *inferred], self._folder, self._lengths)

    def _number_labels(self, columns: dict[str, Any], key: str) -> None:
        """Put numbers in the place of class names, unless the column is declared to be of text."""
        for name in ("label", "labels"):
            given = columns.get(name)
            names = list(given) if isinstance(given, (list, tuple, np.ndarray)) and len(given) else [given]
            text = any(column.name == name and column.kind == "text" for column in self._declared)
            if text or not all(isinstance(each, str) for each in names):
                continue
            unknown = [each for each in names if each not in self._numbers]
            if unknown:
                known = ", ".join(map(repr, self._classes[:SHOWN])) + ", ..." * (len(self._classes) > SHOWN)
                where = f"{self.path}: record {self._count} ({key!r})"
                raise ValueError(f"{where}: {name} {unknown[0]!r} is none of the classes {known}")
            numbers = [self._numbers[str(each)] for each in names]
            columns[name] = numbers[0] if isinstance(given, str) else numbers

    def _refuse_columns(self, given: Mapping[str, Any], known: frozenset[str]) -> None:
        missing, unknown = sorted(known - given.keys()), sorted(given.keys() - known)
        if not _OF_IMAGES.isdisjoint(missing):
            raise ValueError(
                f"{self.path}: record {self._count} ({given[KEY]!r}) has columns {sorted(_OF_IMAGES & given.keys())}: "
                f"these names are for what packfmt reads from the image; rename yours, or give all of {IMAGE_NAMES}"
            )
        raise ValueError(
            f"{self.path}: record {self._count} ({given[KEY]!r}) lacks columns {missing} and has unknown columns "
            f"{unknown}; every record has the same columns: {sorted(known)}"
        )

    def _write_section(self, table: TableSpool, name: str, section: Section) -> Section:
        digest = xxhash.xxh3_64()
        self._put(section.offset, _digesting(table.chunks(name), digest))
        return Section(section.offset, section.size, digest.intdigest())

    def _close_spools(self) -> None:
        self._own_keys.close()
        if self._table is not None:
            self._table.close()


def _identify(table: TableSpool) -> bytes:
    digest = xxhash.xxh3_128()
    for part in layout.content_parts(table.columns):
        for chunk in table.chunks(part) if isinstance(part, str) else [part]:
            digest.update(chunk)
    return digest.digest()


def _digesting(chunks: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def merge_columns(declared: Sequence[Column]) -> tuple[Column, ...]:
    """The declared columns with those every pack has: the key, and what the image headers tell.

    Raises:
        ValueError: a name is declared twice, or one of packfmt's own with another type.
    """
    own = {column.name: column for column in (Column(KEY, "|u1", (None,), "text"), *IMAGE_COLUMNS)}
    names = [column.name for column in declared]
    for column in declared:
        if names.count(column.name) > 1 or own.get(column.name, column) != column:
            raise ValueError(f"column {column.name!r} is declared twice, or is packfmt's own with another type")
    return tuple({**own, **{column.name: column for column in declared}}.values())


def checked_facts(classes: Sequence[str], metadata: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Classes and metadata as a reader will give them, refused now rather than after hours of work.

    Raises:
        ValueError: they cannot be stored, or would not come back as they are: JSON knows no keys but str.
    """
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"classes must be a list of str, got {classes!r:.100}")
    _check_names(metadata, MAX_DEPTH)
    raw = Directory({}, (), tuple(classes), dict(metadata)).encode()
    return tuple(classes), json.loads(raw)["metadata"]  # a copy, which nobody changes while records are written


def _check_names(value: Any, depth: int) -> None:
    if not depth:
        raise ValueError(f"metadata is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for name, member in value.items():
            if not isinstance(name, str):
                raise ValueError(f"metadata must have str names, got {name!r:.100}")
            _check_names(member, depth - 1)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _check_names(member, depth - 1)
