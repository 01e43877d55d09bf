"""What every writer of one pack does: check records, gather index and columns, describe them at the end."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from packfmt import format as layout
from packfmt.errors import DecodeError
from packfmt.format import Directory, Layout, Section, Trailer, record_checksum
from packfmt.images.sniff import sniff
from packfmt.record import IMAGE_COLUMNS, KEY, Column, infer_column
from packfmt.storage.base import Buffer, Writer
from packfmt.storage.spool import ColumnSpool, Spool

__all__ = ["RecordingWriter", "image_values", "merge_columns"]

IMAGE_NAMES = tuple(column.name for column in IMAGE_COLUMNS)
DUPLICATE_PASS = 1 << 23  # key hashes sorted at a time: 64 MiB


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
        columns: columns whose type is not to be inferred from the first record.
        classes: class names that the column ``label`` counts.
        metadata: JSON-able facts to keep.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[Column],
        classes: Sequence[str],
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self.path = os.fspath(path)
        self._classes = tuple(classes)
        self._metadata = dict(metadata or {})
        Directory({}, (), self._classes, self._metadata).encode()  # refuse what cannot be stored before hours of work
        self._declared = merge_columns(columns)
        self._folder = Path(self.path).parent
        self._records_end = layout.HEADER.size
        self._count = 0
        self._index = {name: Spool(self._folder) for name in layout.INDEX}
        self._key_hashes = Spool(self._folder)
        self._columns: dict[str, ColumnSpool] | None = None
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
    def publish(self) -> None:
        """Give the finished pack its final name."""

    # What all share

    def __len__(self) -> int:
        return self._count

    @property
    def data_size(self) -> int:
        """Bytes of records written so far."""
        return self._records_end - layout.HEADER.size

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, inferred ones included once a record has been written."""
        return tuple(spool.column for spool in (self._columns or {}).values()) or self._declared

    def write(self, data: Buffer, key: str, **columns: Any) -> None:
        if not isinstance(key, str) or not key:
            raise ValueError(f"{self.path}: key {key!r} of record {self._count} must be a non-empty str")
        if "width" not in columns:
            columns |= image_values(data)
        columns[KEY] = key
        spools = self._spools(columns)
        if columns.keys() != spools.keys():
            self._refuse_columns(columns, spools)
        size = memoryview(data).nbytes
        # Values are encoded before anything is written, so that a refused record leaves no trace.
        encoded = [(spool, spool.encode(columns[name])) for name, spool in spools.items()]
        self._store(data)
        entry = (self._records_end, size, record_checksum(data, self._count))
        for name, value in zip(layout.INDEX, entry, strict=True):
            self._index[name].append(value.to_bytes(8, "little"))
        for spool, raw in encoded:
            spool.append(raw)
        self._key_hashes.append(xxhash.xxh3_64_intdigest(os.fsencode(key)).to_bytes(8, "little"))
        self._records_end += size
        self._count += 1

    def finish(self) -> None:
        """Write index, columns, directory and trailer, and bring all to the disk, still under the temporary name.

        Raises:
            ValueError: two records have the same key.
            OSError: the disk refuses.
        """
        if self.content_id:
            return
        self._refuse_duplicate_keys()
        spools = self._spools({})
        columns = tuple(spool.column for spool in spools.values())
        sizes = layout.section_sizes(self._count, columns, {name: s.values.size for name, s in spools.items()})
        plan = Layout.plan(self._records_end, sizes)
        sections = {name: self._write_section(name, section) for name, section in plan.sections.items()}
        raw = Directory(sections, columns, self._classes, self._metadata).encode()
        self._put(plan.directory_offset, [raw])
        self.file_size = plan.file_size(len(raw))
        directory = Section(plan.directory_offset, len(raw), xxhash.xxh3_64_intdigest(raw))
        identity = self._identify(columns)
        trailer = Trailer(self._count, self._records_end, directory, self.file_size, identity)
        self._put(self.file_size - layout.TRAILER.size, [trailer.encode()])
        self._complete()
        self.content_id = identity.hex()

    def close(self) -> None:
        try:
            self.finish()
            self.publish()
        except BaseException:
            self.discard()
            raise

    def _spools(self, first: Mapping[str, Any]) -> dict[str, ColumnSpool]:
        """The columns' spools; made when the first record shows the types that were not declared."""
        if self._columns is None:
            declared = {column.name: column for column in self._declared}
            inferred = [infer_column(name, value) for name, value in first.items() if name not in declared]
            columns = [*declared.values(), *inferred]
            self._columns = {c.name: ColumnSpool(c, self._folder) for c in sorted(columns, key=lambda c: c.name)}
        return self._columns

    def _refuse_columns(self, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        missing, unknown = sorted(known.keys() - given.keys()), sorted(given.keys() - known.keys())
        raise ValueError(
            f"{self.path}: record {self._count} ({given[KEY]!r}) lacks columns {missing} and has unknown columns "
            f"{unknown}; every record has the same columns: {sorted(known)}"
        )

    def _refuse_duplicate_keys(self) -> None:
        """Compare hashes, a slice of the hash space at a time; then the keys themselves where two hashes agree."""
        passes = self._count // DUPLICATE_PASS + 1
        for turn in range(passes):
            hashes = np.sort(self._hashes(turn, passes))
            twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
            if twice:
                self._name_duplicates(twice)

    def _hashes(self, turn: int, passes: int) -> npt.NDArray[np.uint64]:
        chunks = [np.frombuffer(chunk, "<u8") for chunk in self._key_hashes.chunks()]
        return np.concatenate([chunk[chunk % passes == turn] for chunk in chunks] or [np.empty(0, np.uint64)])

    def _name_duplicates(self, hashes: set[int]) -> None:
        seen: dict[bytes, int] = {}
        for index, key in enumerate(self._written_keys()):
            if xxhash.xxh3_64_intdigest(key) in hashes and (first := seen.setdefault(key, index)) != index:
                raise ValueError(
                    f"{self.path}: records {first} and {index} have the same key {os.fsdecode(key)!r}; keys must "
                    "differ, since unpack turns them into files"
                )

    def _written_keys(self) -> Iterator[bytes]:
        spool = self._spools({})[KEY]
        stops = (int(stop) for chunk in spool.rows.chunks() for stop in np.frombuffer(chunk, "<u8"))
        pending, start = bytearray(), next(stops)
        values = spool.values.chunks()
        for stop in stops:
            while len(pending) < stop - start:
                pending += next(values)
            yield bytes(pending[: stop - start])
            del pending[: stop - start]
            start = stop

    def _section_spool(self, name: str) -> Spool:
        kind, _, rest = name.partition(".")
        if kind == "index":
            return self._index[rest]
        column = self._spools({})[rest]
        return column.rows if kind == "rows" else column.values

    def _write_section(self, name: str, section: Section) -> Section:
        digest = xxhash.xxh3_64()
        self._put(section.offset, _digesting(self._section_spool(name).chunks(), digest))
        return Section(section.offset, section.size, digest.intdigest())

    def _identify(self, columns: Sequence[Column]) -> bytes:
        digest = xxhash.xxh3_128()
        for part in layout.content_parts(columns):
            for chunk in self._section_spool(part).chunks() if isinstance(part, str) else [part]:
                digest.update(chunk)
        return digest.digest()

    def _close_spools(self) -> None:
        for spool in (*self._index.values(), self._key_hashes):
            spool.close()
        for column in (self._columns or {}).values():
            column.close()


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
