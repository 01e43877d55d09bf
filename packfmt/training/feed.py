"""A thread that draws records from an iterable and has them decoded ahead of the consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from packfmt.training.batch import BatchJob
from packfmt.training.held import HeldRecord

__all__ = ["Feed"]

PATIENCE = 1.0  # seconds to wait for the thread's end; it may stand in an iterable that gives nothing


class Feed(Iterator[BatchJob]):
    """Jobs over the records of an iterable, in its order, with at most ``room`` records under way.

    The iterable is drawn from in a thread of its own, so that one that waits keeps nothing back that was read before.
    Errors of the iterable come after the jobs before them. Used by one consumer.

    Args:
        records: the iterable; closed in the thread when that ends.
        begin: starts the decoding of some records.
        chunk: records per job.
        room: records that may be under way, at least ``chunk``.
        eager: begin a smaller job rather than let the consumer wait for a full one.
    """

    def __init__(
        self,
        records: Generator[HeldRecord, None, None],
        begin: Callable[[list[HeldRecord]], BatchJob],
        *,
        chunk: int,
        room: int,
        eager: bool,
    ) -> None:
        self._records = records
        self._begin_job = begin
        self._chunk, self._room, self._eager = chunk, room, eager
        self._changed = threading.Condition()
        self._pending: list[HeldRecord] = []
        self._jobs: deque[BatchJob] = deque()
        self._under_way = 0
        self._error: BaseException | None = None
        self._ended = self._stopped = False
        self._thread = threading.Thread(target=self._read, name="packfmt-stream", daemon=True)
        self._thread.start()

    def __next__(self) -> BatchJob:
        with self._changed:
            while not self._jobs:
                if self._pending and (self._eager or self._ended):
                    self._begin()
                elif self._ended:
                    error, self._error = self._error, None
                    raise error if error is not None else StopIteration
                else:
                    self._changed.wait()
            job = self._jobs.popleft()
            self._under_way -= len(job.indices)
            self._changed.notify()
            return job

    def stop(self) -> None:
        """Drop what is under way and end the thread, which goes on by itself only while its iterable gives nothing."""
        with self._changed:
            self._stopped = True
            for job in self._jobs:
                job.cancel()
            self._jobs.clear()
            self._pending.clear()
            self._changed.notify()
        if self._thread is not threading.current_thread():  # a garbage collection may run anywhere
            self._thread.join(PATIENCE)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            with closing(self._records):
                for record in self._records:
                    if not self._put(record):
                        break
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify()

    def _put(self, record: HeldRecord) -> bool:
        """Take a record as soon as there is room; False when nobody wants it any more."""
        with self._changed:
            while self._under_way >= self._room and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return False
            self._pending.append(record)
            self._under_way += 1
            if len(self._pending) >= self._chunk:
                self._begin()
            self._changed.notify()
            return True

    def _begin(self) -> None:
        records, self._pending = self._pending, []
        self._jobs.append(self._begin_job(records))
