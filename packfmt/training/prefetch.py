"""Batches that a sampler announced, begun before a DataLoader asks for them."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.sampling.sampleindex import ONCE, Draws
from packfmt.training.batch import BatchJob
from packfmt.training.pool import reset_after_fork

__all__ = ["PrefetchQueue", "under_its_old_name"]

Indices = npt.NDArray[np.int64]
Name = tuple[int, bytes, bytes]  # of a batch: its epoch, its indices and their draws
Begin = Callable[[Indices, int, Draws], BatchJob]


def under_its_old_name(name: str, value: int | None, prefetch: int) -> int:
    """``prefetch``, or the value that was given under the name it had before.

    Warns:
        DeprecationWarning: there is one.
    """
    if value is None:
        return prefetch
    warnings.warn(f"{name} is called prefetch now, and will lose its old name", DeprecationWarning, stacklevel=3)
    return value


class PrefetchQueue:
    """The announced batches of one dataset, and the jobs of those that were begun.

    Nothing is begun before this process is asked for a batch: with DataLoader workers, the announcements are made in
    the main process and the batches asked for elsewhere. Thread-safe. Pickles as nothing, and is empty in a new
    process.
    """

    def __init__(self) -> None:
        self.start_process()
        reset_after_fork(self)

    def start_process(self) -> None:
        """Be empty, as at first: the jobs of another process never end in this one."""
        self._lock = threading.Lock()
        self._announced: deque[tuple[Name, Indices, Draws]] = deque()
        self._begun: deque[tuple[Name, BatchJob]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return (PrefetchQueue, ())

    def announce(self, epoch: int, indices: Indices, depth: int, draws: Draws = ONCE) -> None:
        """Hear which batch will be asked for, at most ``depth`` batches from now."""
        with self._lock:
            self._announced.append((_name(epoch, indices, draws), indices, draws))
            while len(self._announced) > depth + 1:
                self._announced.popleft()

    def take(self, epoch: int, indices: Indices, begin: Begin, depth: int, draws: Draws = ONCE) -> BatchJob:
        """The job of a batch, which may have been begun already; the ``depth`` announced after it are begun now."""
        wanted = _name(epoch, indices, draws)
        with self._lock:
            if not any(name == wanted for name, _ in self._begun):
                self._cancel()
                while self._announced and self._announced[0][0] != wanted:
                    self._announced.popleft()
                if self._announced:
                    self._announced.popleft()
                self._begun.append((wanted, begin(indices, epoch, draws)))
            while self._begun[0][0] != wanted:  # the loop left batches out
                self._begun.popleft()[1].cancel()
            job = self._begun.popleft()[1]
            while self._announced and len(self._begun) < depth:
                name, upcoming, its = self._announced.popleft()
                self._begun.append((name, begin(upcoming, name[0], its)))
        return job

    def clear(self) -> None:
        """Forget everything announced, and what no thread works on yet."""
        with self._lock:
            self._cancel()
            self._announced.clear()

    def _cancel(self) -> None:
        while self._begun:
            self._begun.popleft()[1].cancel()


def _name(epoch: int, indices: Indices, draws: Draws) -> Name:
    return (epoch, indices.tobytes(), draws.name())
