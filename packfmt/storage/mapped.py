"""Reading one shard file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packfmt import format as layout
from packfmt.errors import CorruptError, FormatError
from packfmt.storage.base import Indices, Reader, Verify, as_positions
from packfmt.storage.checks import shard_problems
from packfmt.storage.columns import Columns
from packfmt.storage.filebytes import IO, choose_io, open_bytes
from packfmt.storage.readplan import LaterPlan, ReadPlan
from packfmt.storage.shardfile import ShardFile

__all__ = ["MappedReader"]

PLAIN = (int, np.int64)  # what a single index usually is; others take the longer way, which knows them all


class MappedReader(Reader):
    """One shard. Opening checks header, trailer and directory, whatever the number of records.

    Args:
        path: the shard file.
        io: "mmap", "pread" (network file systems), or "auto".
        verify: check each record's checksum when it is read (True), when it is first read ("once"), or never (False).
        check: "quick", or "full" to check every byte now.
        content_id: refuse a file with another content id (used when a pickled reader is opened again).

    Raises:
        FormatError: not a shard, of an unknown version, truncated, or damaged outside of records and columns.
        CorruptError: with ``check="full"``, the first damage found.
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
        name = os.fspath(path)
        self.io = choose_io(name, io)
        self.refuse_unknown(verify)
        self._lay_over(ShardFile(name, open_bytes(name, self.io)), verify, check, content_id)

    def _lay_over(
        self, file: ShardFile, verify: Verify, check: Literal["quick", "full"], content_id: str | None
    ) -> None:
        """Become the reader of an open shard."""
        self.path = file.path
        self._absolute = os.path.abspath(self.path)  # now: the process may change its folder before it pickles
        self._verify: Verify = verify
        self._file = file
        self.content_id = self._file.trailer.content_id.hex()
        if content_id not in (None, self.content_id):
            raise FormatError(f"{self.path}: holds {self.content_id}, expected {content_id}: the file was replaced")
        self.classes = self._file.directory.classes
        self.metadata = self._file.directory.metadata
        # Not a method of our own: a circle would keep a dropped reader's file open until the collector runs.
        self.columns = Columns(self._file.described, self._file.column, self._file.described)
        self.refuse_damaged(check)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self._absolute, self.io, self._verify, self.content_id))

    def __len__(self) -> int:
        return self._file.trailer.count

    @property
    def record_bytes(self) -> float:
        return (self._file.trailer.records_end - layout.HEADER.size) / max(len(self), 1)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def key(self, index: int) -> str:
        self._file.bytes.check_size()
        return super().key(index)

    def locate(self, index: int) -> tuple[str, int]:
        return self.path, int(as_positions((index,), len(self), self.path)[0])

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._file.ranges(as_positions(indices, len(self), self.path))[1]

    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        return self._file.ranges(as_positions(indices, len(self), self.path))[0]

    def read(self, indices: Indices) -> list[memoryview]:
        if len(indices) == 1 and type(indices[0]) in PLAIN and 0 <= indices[0] < len(self):
            return [self._file.read_one(int(indices[0]), verify=self._verify)]
        return self._file.read(as_positions(indices, len(self), self.path), verify=self._verify)

    def plan(self, indices: Indices) -> ReadPlan:
        positions = as_positions(indices, len(self), self.path)
        try:
            plan = self._file.plan(positions, verify=self._verify)
        except CorruptError:  # of one among them: the others are read
            plan = None
        return plan or LaterPlan(self.read, positions)

    def will_need(self, indices: Indices) -> None:
        if not self._file.ahead.everything_cached():
            self._ask(indices)

    def will_need_blocks(self, indices: Indices) -> None:
        if not self._file.ahead.blocks_cached():
            self._ask(indices)

    def _ask(self, indices: Indices) -> None:
        offsets, lengths = self._file.ranges(as_positions(indices, len(self), self.path))
        order = np.argsort(offsets, kind="stable")
        self._file.ahead.ask(offsets[order].tolist(), lengths[order].tolist())

    def close(self) -> None:
        self._file.close()
        self.columns.forget()

    def problems(self) -> Iterator[Exception]:
        return shard_problems(self._file)


def _reopen(path: str, io: IO, verify: Verify, content_id: str) -> MappedReader:
    return MappedReader(path, io=io, verify=verify, content_id=content_id)
