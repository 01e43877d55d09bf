"""Reading a pack that lies in an LMDB environment.

The environment holds the parts of the shard that the same records would make. A record is under its ordinal, 8 bytes
big-endian, and holds nothing but the image's bytes. Everything else is cut into chunks of ``CHUNK`` bytes, under
``PREFIX`` and the place in the shard where the chunk begins, 8 bytes big-endian: header, index, columns, directory,
trailer. So checksums, content id and errors are those of the shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packfmt import format as layout
from packfmt.errors import FormatError
from packfmt.storage.base import Indices, Verify, as_positions
from packfmt.storage.filebytes import IO
from packfmt.storage.lmdb_environment import Environment, data_file, open_environment
from packfmt.storage.mapped import MappedReader
from packfmt.storage.shardfile import ShardFile

__all__ = ["CHUNK", "LMDBReader", "chunk_key", "record_key"]

PREFIX = b"packfmt"
CHUNK = 16 << 20  # a section of one chunk is not copied when it is read; writing takes memory for a few
SMALL = 4096  # bytes of a section that is copied in any case: it may lie unaligned among other values


def record_key(index: int) -> bytes:
    """The key of a record."""
    return index.to_bytes(8, "big")


def chunk_key(place: int) -> bytes:
    """The key of the bytes that begin at this place of the shard. Sorts behind all records."""
    return PREFIX + place.to_bytes(8, "big")


class LMDBReader(MappedReader):
    """A pack in an LMDB environment: a folder with ``data.mdb``, or that file alone.

    As ``MappedReader``, save that index and columns of more than ``CHUNK`` bytes are copied into memory of the process
    when they are first used, and that ``offsets`` are those in the shard of the same records.

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
        verify: Verify = True,
        check: Literal["quick", "full"] = "quick",
        content_id: str | None = None,
    ) -> None:
        if io not in ("auto", "mmap"):
            raise ValueError(f"io={io!r}, allowed are 'auto' and 'mmap' for an LMDB environment")
        self.io = "lmdb"
        self.refuse_unknown(verify)
        self._lay_over(_EnvironmentFile(os.fspath(path)), verify, check, content_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self._absolute, self._verify, self.content_id))

    @property
    def files(self) -> tuple[str, ...]:
        return (data_file(self.path),)

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._file.index("length")[as_positions(indices, len(self), self.path)]

    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._file.index("offset")[as_positions(indices, len(self), self.path)]

    def will_need_blocks(self, indices: Indices) -> None:
        """Nothing: looking up where a block's values lie takes longer than reading those that a batch wants."""


class _EnvironmentFile(ShardFile):
    """The shard whose parts an environment holds. ``ranges`` are those in the data file."""

    bytes: _EnvironmentBytes

    def __init__(self, path: str) -> None:
        source = _EnvironmentBytes(path)
        super().__init__(path, source, source.read_ahead)
        self._refuse_other_entries()

    def ranges(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        indices = positions.tolist()
        places = self.bytes.places(map(record_key, indices))
        if None in places:
            raise self.corrupt(indices[places.index(None)], "is missing from the environment; restore it from a copy")
        offsets, sizes = np.array(places, np.uint64).reshape(-1, 2).T
        return offsets, sizes

    def read_one(self, index: int, *, verify: Verify) -> memoryview:
        return self.read(np.array([index]), verify=verify)[0]

    def _refuse_other_entries(self) -> None:
        """Compare the numbers of entries, and sizes with the file's, before anything of such a size is made."""
        parts = [*self.directory.sections.values(), self.trailer.directory]
        chunks = 2 + sum(-(-part.size // CHUNK) for part in parts)
        meta = self.bytes.meta
        if self.trailer.count + chunks != meta.entries or sum(part.size for part in parts) > self.bytes.file_size:
            raise FormatError(
                f"{self.path}: holds {meta.entries} entries, must hold {self.trailer.count} records and {chunks} "
                "chunks of index and columns; restore it from a copy"
            )


class _EnvironmentBytes:
    """An environment's bytes: a section by its place in the shard, ranges of records by theirs in the data file."""

    any_order = True

    def __init__(self, path: str) -> None:
        self._path = path
        environment = open_environment(path)
        self._environment: Environment | None = environment
        self.meta, self.file_size = environment.meta, environment.bytes.size
        last = environment.last_key()
        if self.meta.flags or not last.startswith(PREFIX) or len(last) != len(chunk_key(0)):
            raise FormatError(
                f"{path}: an LMDB environment that packfmt did not write; to make a pack of it: packfmt convert"
            )
        self.size = int.from_bytes(last[len(PREFIX) :], "big") + layout.TRAILER.size

    def places(self, keys: Iterable[bytes]) -> list[tuple[int, int] | None]:
        """As ``Environment.places``."""
        self.check_size()  # LMDB looks at pages that it would die of if they were cut off
        return self._open().places(keys)

    def section(self, offset: int, size: int) -> memoryview:
        """A range of the shard; zero where nothing is stored. A copy if it is not within one chunk."""
        self.check_size()
        environment = self._open()
        out = bytearray()
        for key, (place, length) in environment.entries_from(chunk_key(offset)) if size else ():
            if not key.startswith(PREFIX):
                continue
            start = int.from_bytes(key[len(PREFIX) :], "big") - offset
            if start >= size:
                break
            begin, end = max(start, 0), min(start + length, size)
            if begin >= end:
                continue
            environment.bytes.will_need([place + begin - start], [end - begin])
            part = environment.bytes.section(place + begin - start, end - begin)
            if len(part) == size and size >= SMALL:
                return part
            out = out or bytearray(size)
            out[begin:end] = part
        return memoryview(out or bytes(size)).toreadonly()

    def slices(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        return self._open().bytes.slices(offsets, sizes)

    def read_ahead(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Start reading these ranges of the data file."""
        self._open().bytes.will_need(offsets, sizes)

    def will_need(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """``section`` says so itself, knowing the place in the data file."""

    def forget(self, offset: int, size: int) -> None:
        """Near enough: what follows in the shard follows in the data file, a little further on."""
        self._open().bytes.forget(offset, size)

    def check_size(self) -> None:
        self._open().bytes.check_size()

    def close(self) -> None:
        self._environment = None  # others may share it; it closes when the last of them lets go

    def _open(self) -> Environment:
        environment = self._environment
        if environment is None:
            raise ValueError(f"{self._path}: the reader is closed; open it again with packfmt.open")
        return environment


def _reopen(path: str, verify: Verify, content_id: str) -> LMDBReader:
    return LMDBReader(path, verify=verify, content_id=content_id)
