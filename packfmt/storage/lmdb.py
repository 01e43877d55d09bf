"""Reading a pack that lies in an LMDB environment.

The environment holds the parts of the shard that the same records would make. A record is under its ordinal, 8 bytes
big-endian, and holds nothing but the image's bytes. Everything else is cut into chunks of ``CHUNK`` bytes, under
``PREFIX`` and the place in the shard where the chunk begins, 8 bytes big-endian: header, index, columns, directory,
trailer. So checksums, content id and errors are those of the shard.

LMDB itself writes the environment and does not read it: ``lmdb_pages`` does, which trusts no page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packfmt import format as layout
from packfmt.errors import CorruptError, FormatError
from packfmt.lmdb_pages import MAGIC, Head, Place, Tree, decode_head
from packfmt.storage.base import Indices, Verify, as_positions
from packfmt.storage.fileio import IO, open_bytes
from packfmt.storage.shard import MappedReader, ShardFile, shard_problems

__all__ = ["CHUNK", "DATA_FILE", "LMDBReader", "chunk_key", "data_file", "is_environment", "is_pack_key", "record_key"]

DATA_FILE = "data.mdb"
PREFIX = b"packfmt"
CHUNK = 16 << 20  # a section of one chunk is not copied when it is read; writing takes memory for a few
SMALL = 4096  # bytes of a section that is copied in any case: it may lie unaligned among other values


def record_key(index: int) -> bytes:
    """The key of a record."""
    return index.to_bytes(8, "big")


def chunk_key(place: int) -> bytes:
    """The key of the bytes that begin at this place of the shard. Sorts behind all records."""
    return PREFIX + place.to_bytes(8, "big")


def is_pack_key(last: bytes) -> bool:
    """Whether this, the last key of an environment, is the one of a pack."""
    return last.startswith(PREFIX) and len(last) == len(chunk_key(0))


def data_file(path: str) -> str:
    """The file that holds the data: ``path`` itself, or ``data.mdb`` where that is a folder."""
    return os.path.join(path, DATA_FILE) if os.path.isdir(path) else path


def is_environment(path: str) -> bool:
    """Whether this is a folder with a ``data.mdb``, or a file that starts as those do."""
    if os.path.isdir(path):
        return os.path.lexists(data_file(path))
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(20)[16:] == MAGIC.to_bytes(4, "little")


class LMDBReader(MappedReader):
    """A pack in an LMDB environment: a folder with ``data.mdb``, or that file alone.

    As ``MappedReader``, save that index and columns of more than ``CHUNK`` bytes are copied into memory of the process
    when they are first used, and that ``offsets`` are those in the shard of the same records. A page of the tree of
    keys is checked whenever it is used, so opening checks a few of them, whatever the number of records.

    Args:
        path: the folder or file.
        io: "auto" or "mmap".
        verify, content_id: as ``MappedReader``.
        check: "quick", or "full" to check now every byte that means something, and the whole tree.

    Raises:
        FormatError: no LMDB environment that packfmt wrote, of an unknown version, truncated or damaged.
        CorruptError: a page of the tree that opening needs is damaged; with ``check="full"``, the first damage found.
        OSError: the file cannot be read.
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
        file = _EnvironmentFile(os.fspath(path))
        self._environment = file.bytes
        self._lay_over(file, verify, check, content_id)

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

    def problems(self) -> Iterator[Exception]:
        """As ``Reader.problems``: first what LMDB would trip over, then what is wrong with the shard that is there."""
        self._environment.check_size()
        yield from self._environment.tree().problems()
        try:
            yield from shard_problems(self._file)
        except CorruptError as error:  # of a page without which nothing further can be checked
            yield error


class _EnvironmentFile(ShardFile):
    """The shard whose parts an environment holds. ``ranges`` are those in the data file."""

    bytes: _EnvironmentBytes

    def __init__(self, path: str) -> None:
        source = _EnvironmentBytes(path)
        super().__init__(path, source, source.read_ahead)
        self._refuse_other_entries()

    def ranges(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        self.bytes.check_size()  # first: touching a mapped page that is no more kills the process
        tree = self.bytes.tree()
        places = [self._place(tree, index) for index in positions.tolist()]
        offsets, sizes = np.array(places, np.uint64).reshape(-1, 2).T
        return offsets, sizes

    def read_one(self, index: int, *, verify: Verify) -> memoryview:
        return self.read(np.array([index]), verify=verify)[0]

    def _place(self, tree: Tree, index: int) -> Place:
        try:
            place = tree.find(record_key(index))
        except CorruptError as error:
            raise self.corrupt(index, error.message) from error
        if place is None:
            raise self.corrupt(index, "is missing from the environment; restore it from a copy")
        return place

    def _refuse_other_entries(self) -> None:
        """Compare the numbers of entries, and sizes with the file's, before anything of such a size is made."""
        parts = [*self.directory.sections.values(), self.trailer.directory]
        chunks = 2 + sum(-(-part.size // CHUNK) for part in parts)
        entries = self.bytes.head.main.entries
        if self.trailer.count + chunks != entries or sum(part.size for part in parts) > self.bytes.file_size:
            raise FormatError(
                f"{self.path}: holds {entries} entries, must hold {self.trailer.count} records and {chunks} "
                "chunks of index and columns; restore it from a copy"
            )


class _EnvironmentBytes:
    """An environment's bytes: a section by its place in the shard, ranges of records by theirs in the data file."""

    any_order = True

    def __init__(self, path: str) -> None:
        self._path = path
        file = data_file(path)
        self._file = open_bytes(file, "mmap")
        self.file_size = self._file.size
        data = self._file.section(0, self.file_size)
        self.head = _check_head(data, file)
        self._tree: Tree | None = Tree(data, path, self.head.page_size, self.head.main)
        last = b"" if self.head.main.flags else self._tree.last_key()
        if not is_pack_key(last):
            raise FormatError(
                f"{path}: an LMDB environment that packfmt did not write; to make a pack of it: packfmt convert"
            )
        self.size = int.from_bytes(last[len(PREFIX) :], "big") + layout.TRAILER.size

    def tree(self) -> Tree:
        """The tree of keys."""
        tree = self._tree
        if tree is None:
            raise ValueError(f"{self._path}: the reader is closed; open it again with packfmt.open")
        return tree

    def section(self, offset: int, size: int) -> memoryview:
        """A range of the shard; zero where nothing is stored. A copy if it is not within one chunk."""
        self.check_size()
        out = bytearray()
        for key, place, length, _ in self.tree().entries_around(chunk_key(offset)) if size else ():
            if not key.startswith(PREFIX):
                continue
            start = int.from_bytes(key[len(PREFIX) :], "big") - offset
            if start >= size:
                break
            begin, end = max(start, 0), min(start + length, size)
            if begin >= end:
                continue
            self._file.will_need([place + begin - start], [end - begin])
            part = self._file.section(place + begin - start, end - begin)
            if len(part) == size and size >= SMALL:
                return part
            out = out or bytearray(size)
            out[begin:end] = part
        return memoryview(out or bytes(size)).toreadonly()

    def slices(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        return self._file.slices(offsets, sizes)

    def read_ahead(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Start reading these ranges of the data file."""
        self._file.will_need(offsets, sizes)

    def will_need(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """``section`` says so itself, knowing the place in the data file."""

    def forget(self, offset: int, size: int) -> None:
        """Near enough: what follows in the shard follows in the data file, a little further on."""
        self._file.forget(offset, size)

    def check_size(self) -> None:
        self._file.check_size()

    def close(self) -> None:
        self._file.close()
        self._tree = None


def _check_head(data: memoryview, path: str) -> Head:
    """The head of a data file of packfmt's, which ends with its last page."""
    head = decode_head(data, path)
    if len(data) != head.pages * head.page_size:
        raise FormatError(
            f"{path}: {len(data)} bytes long, its head counts {head.pages} pages of {head.page_size}: truncated, "
            "appended to, or changed by another program; restore it from a copy"
        )
    return head


def _reopen(path: str, verify: Verify, content_id: str) -> LMDBReader:
    return LMDBReader(path, verify=verify, content_id=content_id)
