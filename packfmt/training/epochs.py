"""Which epoch comes next, known in all processes that a DataLoader spreads a stream over."""

from __future__ import annotations

import ctypes
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

__all__ = ["EpochCounter"]

WORKERS = 1024  # that one DataLoader may have


class EpochCounter:
    """Counts the epochs that each worker has begun, in memory without a name that all copies of a stream share.

    DataLoader makes new copies of a dataset for every epoch, or keeps them for all; so a number in the object would
    either never move on, or never hear of ``set``. Each worker writes to a place of its own. Pickled for another
    purpose than starting a process, it is a number.

    Args:
        epoch: the next.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._shared: Any = RawArray(ctypes.c_int64, 1 + WORKERS)
        self._shared[0] = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return EpochCounter, (self.next(0),)
        return _attach, (self._shared,)

    def set(self, epoch: int) -> None:
        """Say which epoch every worker begins next."""
        self._shared[:] = [epoch] + [0] * WORKERS

    def next(self, worker: int) -> int:
        """The epoch that a worker begins next."""
        return int(self._shared[0] + self._shared[1 + worker])

    def begin(self, worker: int) -> int:
        """Begin an epoch, and say which."""
        epoch = self.next(worker)
        self._shared[1 + worker] += 1
        return epoch


def _attach(shared: Any) -> EpochCounter:
    counter = EpochCounter.__new__(EpochCounter)
    counter._shared = shared
    return counter
