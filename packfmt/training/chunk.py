"""The records of a chunk on their way to the decoder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from operator import sub

from packfmt.errors import CorruptError
from packfmt.storage.readplan import ReadPlan

__all__ = ["ChunkRecords"]


class ChunkRecords:
    """Record bytes one by one, read and checked when the decoder asks for them; no bytes for a damaged record.

    Iterate it once.

    Args:
        plan: of the batch.
        start, stop: the chunk's positions in it.
        failures: takes the errors of damaged records by their positions.

    Attributes:
        asked: when each record was asked for, by ``time.perf_counter``.
    """

    def __init__(self, plan: ReadPlan, start: int, stop: int, failures: dict[int, Exception]) -> None:
        self._plan = plan
        self._start = start
        self._stop = stop
        self._failures = failures
        self.asked: list[float] = []
        self._given: list[float] = []
        began = time.perf_counter()
        self._records = plan.views(start, stop)  # reads them all now, where they are not in memory
        self._begun = time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Spent so far on reading and checking."""
        waited: float = sum(map(sub, self._given, self.asked))
        return self._begun + waited

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[memoryview]:
        records, clock, ask, give = self._records, time.perf_counter, self.asked.append, self._given.append
        for position in range(self._start, self._stop):
            ask(clock())
            try:
                record = next(records)
            except CorruptError as error:
                self._failures[position] = error.with_traceback(None)
                record = memoryview(b"")
                records = self._plan.views(position + 1, self._stop)
            give(clock())
            yield record
