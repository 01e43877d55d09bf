"""Whether to ask the system to read ahead before reading.

Asking costs a system call per record, about 2 µs, whether the record is in memory or not: nothing beside a read from
disk, and as much as all else that reading a record from memory takes. So it is left out while everything is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from packfmt.storage.fileio import runs

try:
    import resource
except ImportError:  # Windows has no page faults to count, and no madvise to save
    resource = None  # type: ignore[assignment]

__all__ = ["ReadAhead"]

PROBE = 8  # blocks of which one is asked for all the same
QUIET_AFTER = 4096  # records in a row that were found in memory, before asking stops
# Seconds within which the system answers that it has nothing to do, on two busy cores too: for each piece that lies
# apart, and each byte, since it looks for every page. For 2 MiB it takes 25 µs then, and 300 µs if they must be read.
QUICK, QUICK_BYTE = 25e-6, 25e-12


class ReadAhead:
    """Calls ``ask`` before each read, until reads have long found everything in memory.

    That the process has read from a disk since, by a page fault or otherwise, starts it again: the system counts both.
    Network file systems it does not count; there a slow answer says the same. So a set that is partly in memory costs
    one unannounced read in ``QUIET_AFTER`` records at the most.

    Thread-safe: a race costs an answer too many or too few.

    Args:
        ask: starts reading ranges, given their offsets and sizes in ascending order. What lies together is one range.
    """

    def __init__(self, ask: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        self._begin = ask
        self._calm = 0
        self._turn = 0
        self._disk_reads = (-1, -1)

    def everything_cached(self) -> bool:
        """Whether reads have long found everything in memory, and still do."""
        found = _disk_reads()
        if found != self._disk_reads:
            self._disk_reads, self._calm = found, 0
        return self._calm >= QUIET_AFTER

    def blocks_cached(self) -> bool:
        """The same for blocks. Another process may be the one to read them, so one in ``PROBE`` is asked for anyway."""
        self._turn = (self._turn + 1) % PROBE
        return self.everything_cached() and self._turn > 0

    def before(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Prepare to read these ranges."""
        if not self.everything_cached():
            self.ask(offsets, sizes)

    def ask(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Ask for these ranges, and see how long the answer takes."""
        pieces = runs(offsets, sizes)  # before the clock is looked at: for a block of small records it takes longer
        starts = [offsets[first] for first, _ in pieces]
        spans = [offsets[last - 1] + sizes[last - 1] - offsets[first] for first, last in pieces]
        began = time.perf_counter()
        self._begin(starts, spans)
        quick = time.perf_counter() - began < QUICK * len(pieces) + QUICK_BYTE * sum(spans)
        self._calm = self._calm + len(offsets) if quick else 0


def _disk_reads() -> tuple[int, int]:
    """Page faults that waited for a disk, and blocks read, both by this process so far."""
    if resource is None:
        return 0, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_inblock
