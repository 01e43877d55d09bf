"""Which epoch comes next, and how often a record was drawn: known in all workers that a DataLoader spreads over."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from packfmt.sampling.sampleindex import ONCE, Draws, repeats
from packfmt.training.arena import nameless_file
from packfmt.training.pool import reset_after_fork

__all__ = ["DrawCounter", "EpochCounter"]

WORKERS = 1024  # that one DataLoader may have
HEAD = 8  # bytes before the counts of draws: whether any was changed


class _Shared:
    """Memory without a name that a process shares with the DataLoader workers it starts, and with no other process.

    It is there before they start, whichever of them writes first, so that it is one for all. Pages that nobody wrote to
    take no memory. A process that is no worker and got it from another, as a rank that was forked, has a copy.

    Args:
        size: bytes, at first 0 each.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._attach(mmap.mmap(-1, size))

    def start_process(self) -> None:
        """Have a lock that no thread of another process holds."""
        self._lock = threading.RLock()

    def _attach(self, memory: mmap.mmap, owner: int | None = None) -> None:
        self._owner = os.getpid() if owner is None else owner
        self._file: int | None = None
        self.start_process()
        self._view(memory)
        reset_after_fork(self)
        _sharing.add(self)

    def _view(self, memory: mmap.mmap) -> None:
        """Look at other memory from now on."""
        raise NotImplementedError

    def _copy_to(self, memory: mmap.mmap) -> None:
        """Go over to other memory, with what is known."""
        raise NotImplementedError

    def _own(self) -> None:
        """Have memory of this process's own, unless it is a worker; called before every use."""
        if self._owner != os.getpid() and get_worker_info() is None:
            with self._lock:
                self._copy_to(mmap.mmap(-1, self._size))
                self._owner, self._file = os.getpid(), None

    def _for_new_process(self) -> tuple[Any, ...]:
        """How to pickle it for a process that is about to start."""
        self._own()
        with self._lock:
            if self._file is None:  # not before it is needed: descriptors are few
                self._file = nameless_file()
                weakref.finalize(self, os.close, self._file)
                os.ftruncate(self._file, self._size)
                self._copy_to(mmap.mmap(self._file, self._size))
            return _revive, (type(self), self._size, self._owner, reduction.DupFd(self._file))


_sharing: weakref.WeakSet[_Shared] = weakref.WeakSet()


def _own_all() -> None:
    for shared in list(_sharing):
        shared._own()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_own_all)  # for the child may be a worker, which has no memory but its parent's


def _revive(kind: type[_Shared], size: int, owner: int, descriptor: Any) -> _Shared:
    shared = kind.__new__(kind)
    shared._size = size
    file = descriptor.detach()
    try:
        shared._attach(mmap.mmap(file, size), owner)
    finally:
        os.close(file)
    return shared


class EpochCounter(_Shared):
    """Counts the epochs that each worker has begun, in memory that all copies of a dataset or stream share.

    DataLoader makes new copies of a dataset for every epoch, or keeps them for all; so a number in the object would
    either never move on, or never hear of ``set``. Each worker writes to a place of its own. Pickled for another
    purpose than starting a process, it is a number.

    Args:
        epoch: the next.
    """

    def __init__(self, epoch: int = 0) -> None:
        super().__init__(8 * (1 + WORKERS))
        self._counts[0] = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return (EpochCounter, (self.next(0),)) if get_spawning_popen() is None else self._for_new_process()

    def set(self, epoch: int) -> None:
        """Say which epoch every worker begins next."""
        self._own()
        self._counts[0] = epoch
        self._counts[1:] = 0

    def next(self, worker: int) -> int:
        """The epoch that a worker begins next."""
        self._own()
        return int(self._counts[0]) + int(self._counts[1 + worker])

    def begin(self, worker: int) -> int:
        """Begin an epoch, and say which."""
        epoch = self.next(worker)
        self._counts[1 + worker] += 1
        return epoch

    def _view(self, memory: mmap.mmap) -> None:
        self._counts = np.frombuffer(memory, np.int64)

    def _copy_to(self, memory: mmap.mmap) -> None:
        counts = self._counts
        self._view(memory)
        self._counts[:] = counts


class DrawCounter(_Shared):
    """Counts how often each record was drawn by an index that carries no epoch, since an epoch was last set.

    It takes 2 bytes per record once they are drawn, and none before. After 65536 draws of a record its numbers begin
    anew. Pickled for another purpose than starting a process, it counts from 0.

    Thread-safe. Between processes there is no lock, since one that is killed would leave it closed: two that draw the
    same record at the same moment may get the same number.

    Args:
        records: that there are.
    """

    def __init__(self, records: int) -> None:
        super().__init__(HEAD + 2 * records)

    def __reduce__(self) -> tuple[Any, ...]:
        return (DrawCounter, (len(self._counts),)) if get_spawning_popen() is None else self._for_new_process()

    def draw(self, positions: npt.NDArray[np.int64]) -> Draws:
        """Count a draw of each of (n,) records, and say which it is."""
        self._own()
        again = repeats(positions) if len(positions) > 1 else None
        with self._lock:
            numbers = self._counts[positions].astype(np.int64)
            if again is not None:
                numbers += again[0]
            self._counts[positions] = numbers + 1  # of a record that comes twice the last is written
            self._changed[0] = 1
        return Draws(numbers) if numbers.any() else ONCE

    def reset(self) -> None:
        """Begin anew."""
        self._own()
        with self._lock:
            if self._changed[0]:  # or its pages would be touched in vain
                self._counts[:] = 0
                self._changed[0] = 0

    def _view(self, memory: mmap.mmap) -> None:
        self._changed = np.frombuffer(memory, np.uint8, 1)
        self._counts = np.frombuffer(memory, np.uint16, offset=HEAD)

    def _copy_to(self, memory: mmap.mmap) -> None:
        changed, counts = self._changed, self._counts
        self._view(memory)
        if changed[0]:
            self._changed[0], self._counts[:] = 1, counts
