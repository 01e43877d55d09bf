"""Writing one shard file, in a thread, so that the next records are read while the system takes these."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from io import RawIOBase
from itertools import chain
from pathlib import Path
from typing import Any

from packfmt import format as layout
from packfmt.record import Column
from packfmt.storage.atomic import PendingFile, PendingSet, naming
from packfmt.storage.base import Buffer
from packfmt.storage.fileio import open_bytes
from packfmt.storage.keys import KeyHashes
from packfmt.storage.recording import RecordingWriter
from packfmt.storage.shard import ShardFile, read_frame
from packfmt.storage.spool import TableSpool

__all__ = ["ShardWriter", "WriteBehind"]

PORTION = 1 << 20  # bytes handed over at a time
PIECES = 1024  # or so many pieces: what one system call takes
AHEAD = 4 << 20  # bytes that may wait to be written, one larger piece excepted
PORTIONS = 8  # and the portions that may, which hold less where pieces are small
SMALL = 4 << 10  # mean size of pieces that are joined first
SHARE = 16  # a view that is kept uncopied has at least this part of the bytes it keeps in memory


class WriteBehind:
    """Writes pieces to a file in the order they are given. Used by one thread.

    An error of the system's is raised by a later call; after it nothing more is written.

    Args:
        file: unbuffered, at the place to write to; closed by its owner.
        written: called in the writing thread with the number of bytes that are in the file.
    """

    def __init__(self, file: RawIOBase, written: Callable[[int], None]) -> None:
        self._file = file
        self._written = written
        self._position = 0
        self._pieces: list[bytes | memoryview] = []
        self._size = 0
        self._under_way: deque[tuple[Future[None], int]] = deque()
        self._waiting = 0
        self._failed = False
        self._thread: ThreadPoolExecutor | None = None

    def write(self, data: Buffer) -> int:
        """Take the next bytes, copying what may change: all but ``bytes`` and views of them. Returns their number.

        Raises:
            OSError: writing these or earlier ones failed.
        """
        piece = data if type(data) is bytes else _lasting(data)
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= PORTION or len(self._pieces) >= PIECES:
            self._hand_over()
        return len(piece)

    def flush(self) -> None:
        """Wait until all is with the system.

        Raises:
            OSError: writing failed.
            ValueError: it failed before, or this is closed.
        """
        self._await(0, 0)
        if self._failed:
            raise ValueError("writing failed before, or has ended: what was given since is not in the file")
        pieces, self._pieces, self._size = self._pieces, [], 0
        self._put(pieces)

    def close(self) -> None:
        """End the thread, dropping what it has not begun. Called twice without harm."""
        self._failed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _hand_over(self) -> None:
        self._await(AHEAD, PORTIONS)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="packfmt-write")
        self._under_way.append((self._thread.submit(self._put, self._pieces), self._size))
        self._waiting += self._size
        self._pieces, self._size = [], 0

    def _await(self, most: int, portions: int) -> None:
        """Wait until no more than so many bytes and portions are under way."""
        while self._under_way and (
            self._waiting > most or len(self._under_way) > portions or self._under_way[0][0].done()
        ):
            future, size = self._under_way.popleft()
            self._waiting -= size
            future.result()

    def _put(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._failed:
            return
        total = sum(map(len, pieces))
        try:
            self._put_all(deque([b"".join(pieces)] if total < SMALL * len(pieces) else pieces))
            self._position += total
            self._written(self._position)
        except BaseException:
            self._failed = True
            raise

    def _put_all(self, pieces: deque[bytes | memoryview]) -> None:
        while pieces:
            done = os.writev(self._file.fileno(), pieces) if hasattr(os, "writev") else self._file.write(pieces[0])
            while pieces and done >= len(pieces[0]):
                done -= len(pieces.popleft())
            if done:  # the system took a part
                pieces[0] = memoryview(pieces[0])[done:]


def _lasting(data: Buffer) -> bytes | memoryview:
    """The bytes as they are now, whatever becomes of ``data``."""
    if not isinstance(data, memoryview) or type(data.obj) is not bytes or len(data.obj) > SHARE * data.nbytes:
        return bytes(data)
    if data.format != "B" or data.ndim != 1 or not data.contiguous:
        return bytes(data)
    return data[:]  # another view, which stays valid if the giver releases its own


class ShardWriter(RecordingWriter):
    """Writes records back to back, then index, columns, directory and trailer; publishes on ``close``.

    Attributes:
        file: what is published; by the guard, where there is one.

    Args:
        path: the shard's final name.
        columns: columns whose type is not to be inferred from the records.
        classes: class names that the column ``label`` counts.
        metadata: JSON-able facts to keep.
        force: replace an existing file.
        guard: of a pack of several shards, what names them; see ``PendingFile``.
        keys, lengths: as ``RecordingWriter``.

    Raises:
        FileExistsError: the target exists and ``force`` is off.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        guard: PendingSet | None = None,
        keys: KeyHashes | None = None,
        lengths: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(path, columns=columns, classes=classes, metadata=metadata, keys=keys, lengths=lengths)
        self.file = PendingFile(Path(self.path), force=force, guard=guard)
        try:
            self._out = WriteBehind(self.file.raw, self.file.written)
            self._position = self._out.write(layout.encode_header())
        except BaseException:
            self.file.discard()
            raise

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def change_columns(self, columns: Sequence[Column]) -> None:
        """Write what follows the records of a finished shard anew, since later shards found its columns too narrow.

        Args:
            columns: of the same names, which hold all values of the old ones.

        Raises:
            OSError: the disk refuses. The shard cannot be published then.
        """
        self._require("finished")
        self._state = "broken"
        table = TableSpool(columns, self._folder)
        path = os.fspath(self.file.temporary)
        with naming(self.path), closing(ShardFile(path, open_bytes(path, "auto"))) as file:
            values = {column.name: file.column(column.name) for column in columns}
            for place, entry in enumerate(zip(*(file.index(name) for name in layout.INDEX), strict=True)):
                table.append(table.encode(entry, {name: array[place] for name, array in values.items()}))
        self._table = table
        with naming(self.path):
            self._resume(self._records_end)
            self._finish()
        self._state = "finished"

    def join_set(self, member: layout.Member) -> None:
        """Write into a finished shard which set it belongs to, which is known once all of its shards are finished.

        Raises:
            OSError: the disk refuses. The shard cannot be published then.
        """
        self._require("finished")
        self._state = "broken"
        path = os.fspath(self.file.temporary)
        with naming(self.path):
            with closing(open_bytes(path, "auto")) as source:
                trailer, directory = read_frame(source, path)
            plan = layout.Layout(directory.sections, trailer.directory.offset)
            self._resume(plan.directory_offset)
            self._write_frame(plan, replace(directory, member=member), trailer.content_id)
        self._state = "finished"

    def _resume(self, position: int) -> None:
        """Cut the finished shard off at this place, and write on there."""
        self.file.resume(position)
        self._out = WriteBehind(self.file.raw, self.file.written)
        self._position = position

    def rename(self, path: str) -> None:
        """Choose another final name."""
        self.path, self.file.path = path, Path(path)

    def written_keys(self) -> Iterator[bytes]:
        if len(self) and self.content_id:
            path = os.fspath(self.file.temporary)
            with closing(ShardFile(path, open_bytes(path, "auto"))) as file:
                yield from file.keys()
        else:
            yield from super().written_keys()

    def _publish(self) -> None:
        self.file.publish()

    def _discard(self) -> None:
        self._out.close()
        self.file.discard()

    def _store(self, data: Buffer) -> None:
        self._position += self._out.write(data)

    def _put(self, offset: int, chunks: Iterable[bytes]) -> None:
        for chunk in chain([bytes(offset - self._position)], chunks):
            self._position += self._out.write(chunk)

    def _complete(self) -> None:
        self._out.flush()
        self._out.close()
        self.file.finish()
