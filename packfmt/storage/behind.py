"""Writing to a file in a thread, so that the next records are read while the system takes these."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase

from packfmt.storage.base import Buffer

__all__ = ["WriteBehind"]

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
