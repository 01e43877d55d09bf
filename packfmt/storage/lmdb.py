"""Reading a pack that lies in an LMDB environment.

The environment holds the parts of the shard that the same records would make. A record is under its ordinal, 8 bytes
big-endian, and holds nothing but the image's bytes. Everything else is cut into chunks of ``CHUNK`` bytes, under
``PREFIX`` and the place in the shard where the chunk begins, 8 bytes big-endian: header, index, columns, directory,
trailer. So checksums, content id and errors are those of the shard.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import lmdb
import numpy as np
import numpy.typing as npt

from packfmt import format as layout
from packfmt.errors import CorruptError, FormatError
from packfmt.storage.base import Indices, as_positions
from packfmt.storage.columns import Columns
from packfmt.storage.filebytes import IO
from packfmt.storage.lmdb_environment import Environment, data_file, explain, open_environment
from packfmt.storage.mapped import MappedReader
from packfmt.storage.shardfile import ShardFile, read_frame

__all__ = ["CHUNK", "LMDBReader", "chunk_key", "record_key"]

PREFIX = b"packfmt"
CHUNK = 1 << 20


def record_key(index: int) -> bytes:
    """The key of a record."""
    return index.to_bytes(8, "big")


def chunk_key(place: int) -> bytes:
    """The key of the bytes that begin at this place of the shard. Sorts behind all records."""
    return PREFIX + place.to_bytes(8, "big")


class LMDBReader(MappedReader):
    """A pack in an LMDB environment: a folder with ``data.mdb``, or that file alone.

    As ``MappedReader``, save that records, index and columns are copies: LMDB's views would dangle once the
    environment is closed. A column, and the index once records are read, take memory of this process. Only
    ``will_need`` is of no effect, since LMDB does not say where a value lies; ``offsets`` are those in the shard.

    Args:
        path: the folder or file.
        io: "auto" or "mmap", which LMDB always does.
        verify, check, content_id: as ``MappedReader``.

    Raises:
        FormatError: no LMDB environment that packfmt wrote, of an unknown version, truncated or damaged.
        CorruptError: with ``check="full"``, the first damage found.
        OSError: the file cannot be read, or code other than packfmt has it open in this process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        io: IO = "auto",
        verify: bool = True,
        check: Literal["quick", "full"] = "quick",
        content_id: str | None = None,
    ) -> None:
        if io not in ("auto", "mmap"):
            raise ValueError(f"io={io!r}, allowed are 'auto' and 'mmap' for an LMDB environment")
        self.path = os.fspath(path)
        self._absolute = os.path.abspath(self.path)
        self._verify = verify
        self.io = "lmdb"
        self._file = _EnvironmentFile(self.path)
        self.content_id = self._file.trailer.content_id.hex()
        if content_id not in (None, self.content_id):
            raise FormatError(f"{self.path}: holds {self.content_id}, expected {content_id}: the file was replaced")
        self.classes = self._file.directory.classes
        self.metadata = self._file.directory.metadata
        self.columns = Columns(tuple(self._file.described), self._file.column)
        self.refuse_damaged(check)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self._absolute, self._verify, self.content_id))

    @property
    def files(self) -> tuple[str, ...]:
        return (data_file(self.path),)

    def will_need(self, indices: Indices) -> None:
        as_positions(indices, len(self), self.path)
        self._file.bytes.check_size()


class _EnvironmentFile(ShardFile):
    """The shard whose parts an environment holds."""

    bytes: _EnvironmentBytes

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes = _EnvironmentBytes(path)
        self.trailer, self.directory = read_frame(self.bytes, path)
        self.described = {column.name: column for column in self.directory.columns}
        self._index = {}
        self._checked = {}
        self._refuse_other_entries()

    def read(self, positions: npt.NDArray[np.int64], *, verify: bool) -> list[memoryview]:
        self.bytes.check_size()
        order = np.argsort(positions, kind="stable")
        in_order = positions[order]
        values = self.bytes.records(in_order.tolist())
        views: list[memoryview] = []
        for index, value in zip(in_order.tolist(), values, strict=True):
            if value is None:
                raise self.corrupt(index, "is missing from the environment; restore it from a copy")
            views.append(memoryview(value))
        if verify:
            self._check(in_order, views)
        out: list[memoryview] = [views[0]] * len(views) if views else []
        for place, view in zip(order.tolist(), views, strict=True):
            out[place] = view
        return out

    def _refuse_other_entries(self) -> None:
        """Compare the numbers of entries, and sizes with the file's, before anything of such a size is made."""
        parts = [*self.directory.sections.values(), self.trailer.directory]
        chunks = 2 + sum(-(-part.size // CHUNK) for part in parts)
        meta = self.bytes.meta
        if self.trailer.count + chunks != meta.entries or sum(part.size for part in parts) > meta.file_size:
            raise FormatError(
                f"{self.path}: holds {meta.entries} entries, must hold {self.trailer.count} records and {chunks} "
                "chunks of index and columns; restore it from a copy"
            )


class _EnvironmentBytes:
    """An environment's chunks as ``FileBytes``: as if they stood in the shard, with nothing where the records were."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._environment: Environment | None = open_environment(path)
        self.meta = self._environment.meta
        try:
            last = self._environment.last_key()
        except lmdb.Error as error:
            raise explain(error, path, "LMDB cannot read it") from error
        if self.meta.flags or not last.startswith(PREFIX) or len(last) != len(chunk_key(0)):
            raise FormatError(
                f"{path}: an LMDB environment that packfmt did not write; to make a pack of it: packfmt convert"
            )
        self.size = int.from_bytes(last[len(PREFIX) :], "big") + layout.TRAILER.size

    def records(self, indices: Sequence[int]) -> list[bytes | None]:
        """The values of records, None for those that are missing."""
        try:
            return self._open().get(map(record_key, indices))
        except lmdb.Error as error:
            raise explain(error, self._path, f"LMDB cannot read records {indices[:4]}") from error

    def slices(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        return [self.section(offset, size) for offset, size in zip(offsets, sizes, strict=True)]

    def section(self, offset: int, size: int) -> memoryview:
        """A copy of one range, zero where nothing is stored."""
        environment = self._open()
        out = bytearray(size)
        try:
            for key, value in environment.entries_from(chunk_key(offset)) if size else ():
                if key.startswith(PREFIX):
                    start = int.from_bytes(key[len(PREFIX) :], "big") - offset
                    if start >= size:
                        break
                    part = value[max(-start, 0) : size - start]
                    out[max(start, 0) : max(start, 0) + len(part)] = part
        except lmdb.Error as error:
            raise explain(error, self._path, "LMDB cannot read index or columns") from error
        return memoryview(out).toreadonly()

    def will_need(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """LMDB has no such hint."""

    def forget(self, offset: int, size: int) -> None:
        """Nothing here stays resident."""

    def check_size(self) -> None:
        if (found := self._open().size()) != self.meta.file_size:
            raise CorruptError(
                f"the file is now {found} bytes long, was {self.meta.file_size} when opened: somebody changed it in "
                "place; restore it and open it again",
                path=self._path,
            )

    def close(self) -> None:
        self._environment = None

    def _open(self) -> Environment:
        environment = self._environment
        if environment is None:
            raise ValueError(f"{self._path}: the reader is closed; open it again with packfmt.open")
        return environment


def _reopen(path: str, verify: bool, content_id: str) -> LMDBReader:
    return LMDBReader(path, verify=verify, content_id=content_id)
