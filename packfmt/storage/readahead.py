"""Whether to ask the system to read ahead before reading.

Asking costs a system call per record, about 2 µs, whether the record is in memory or not: nothing beside a read from
disk, and as much as all else that reading a record from memory takes. So it is left out while everything is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

try:
    import resource
except ImportError:  # Windows has no page faults to count, and no madvise to save
    resource = None  # type: ignore[assignment]

__all__ = ["ReadAhead"]

CALM = 256  # reads in a row that found all in memory, before asking stops
QUICK = 4e-6  # seconds per range within which the system answers that it has a range already


class ReadAhead:
    """Calls ``ask`` before each read, until reads have long found everything in memory; any major page fault of the
    process starts it again. So a set that is partly in memory costs one unannounced read in ``CALM`` at the most.

    Thread-safe: a race costs an answer too many or too few.

    Args:
        ask: starts reading ranges, given their offsets and sizes in ascending order.
    """

    def __init__(self, ask: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        self._ask = ask
        self._calm = 0
        self._faults = -1

    @property
    def resting(self) -> bool:
        """Whether reads have long found everything in memory."""
        return self._calm >= CALM

    def before(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Prepare to read these ranges."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt if resource is not None else 0
        if faults != self._faults:
            self._faults, self._calm = faults, 0
        if self._calm >= CALM:
            return
        began = time.perf_counter()
        self._ask(offsets, sizes)
        quick = time.perf_counter() - began < QUICK * len(offsets)
        self._calm = self._calm + 1 if quick else 0
