"""The records of a chunk on their way to the decoder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from packfmt.errors import CorruptError
from packfmt.storage.readplan import ReadPlan

__all__ = ["ChunkRecords"]


class ChunkRecords:
    """Record bytes one by one; no bytes for a damaged record.

    All are read and checked at first. Between two images it took longer, by a hundredth of decoding photos: an image
    drives from the processor's cache what the next reading needs.

    Args:
        plan: of the batch.
        start, stop: the chunk's positions in it.
        failures: takes the errors of damaged records by their positions.

    Attributes:
        seconds: spent on reading and checking.
        slowest: the longest time between two askings, in seconds, and the place of the record that was in work then.
    """

    def __init__(self, plan: ReadPlan, start: int, stop: int, failures: dict[int, Exception]) -> None:
        began = time.perf_counter()
        self._records = _read(plan, start, stop, failures)
        self.seconds = time.perf_counter() - began
        self.slowest = (0.0, 0)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[memoryview]:
        clock = time.perf_counter
        slowest, which = self.slowest
        asked = clock()
        for place, record in enumerate(self._records):
            yield record
            before, asked = asked, clock()
            if asked - before > slowest:  # at once: a list of times to look through later costs twice as much
                slowest, which = asked - before, place
        self.slowest = slowest, which


def _read(plan: ReadPlan, start: int, stop: int, failures: dict[int, Exception]) -> list[memoryview]:
    with suppress(CorruptError):
        return list(plan.views(start, stop))
    records: list[memoryview] = []
    for position in range(start, stop):  # to find each that is damaged
        try:
            records.extend(plan.views(position, position + 1))
        except CorruptError as error:
            failures[position] = error.with_traceback(None)
            records.append(memoryview(b""))
    return records
