"""Records about to be read: where they lie has been looked up for all, their bytes are touched one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from packfmt.errors import CorruptError
from packfmt.storage.filebytes import FileBytes

__all__ = ["JoinedPlan", "LaterPlan", "MappedPlan", "PartPlan", "ReadPlan"]

Positions = npt.NDArray[np.int64]


class ReadPlan(ABC):
    """The records of a batch, for threads that read a part of it each. Thread-safe."""

    @abstractmethod
    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of the plan's records ``start`` to ``stop`` - 1, in the asked order.

        Raises:
            CorruptError: as ``Reader.read``, when the damaged record's turn comes. The iterator ends there; those that
                follow can be asked for anew.
            ValueError: the reader is closed, and had not read them yet.
        """


class LaterPlan(ReadPlan):
    """Reads a part when it is asked for, all of it at once.

    Args:
        read: ``Reader.read``.
        positions: (N,) records.
    """

    def __init__(self, read: Callable[[Positions], list[memoryview]], positions: Positions) -> None:
        self._read = read
        self._positions = positions

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        positions = self._positions[start:stop]
        try:
            return iter(self._read(positions))
        except CorruptError:
            return (self._read(positions[place : place + 1])[0] for place in range(len(positions)))


class MappedPlan(ReadPlan):
    """Records that are in memory.

    Args:
        source: where they are.
        positions, offsets, lengths, checksums: (N,) theirs; offsets and lengths lie inside.
        passes: called with positions, views and checksums of several: whether all views are whole.
        check: called with one of each where they are not all; raises CorruptError.
    """

    def __init__(
        self,
        source: FileBytes,
        positions: Positions,
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        checksums: npt.NDArray[np.uint64],
        passes: Callable[[list[int], list[memoryview], list[int]], bool],
        check: Callable[[int, memoryview, int], None],
    ) -> None:
        self._source = source
        self._columns = (positions, offsets, lengths, checksums)
        self._passes = passes
        self._check = check

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        self._source.check_size()  # touching a mapped page that is no more kills the process
        # Made for a part only, not for a batch: what is small stays in the processor's cache.
        positions, offsets, lengths, checksums = (column[start:stop].tolist() for column in self._columns)
        views = self._source.slices(offsets, lengths)
        if self._passes(positions, views, checksums):
            return iter(views)
        return self._one_by_one(positions, views, checksums)

    def _one_by_one(self, positions: list[int], views: list[memoryview], checksums: list[int]) -> Iterator[memoryview]:
        for index, view, stated in zip(positions, views, checksums, strict=True):
            self._check(index, view, stated)
            yield view


class JoinedPlan(ReadPlan):
    """Records of several plans.

    Args:
        count: records in all.
        parts: for each plan the places of its records among all, ascending.
    """

    def __init__(self, count: int, parts: Sequence[tuple[npt.NDArray[np.intp], ReadPlan]]) -> None:
        turns = np.empty(count, np.intp)
        for number, (places, _) in enumerate(parts):
            turns[places] = number
        self._turns = turns.tolist()
        self._parts = parts

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        sources = [
            plan.views(*np.searchsorted(places, (start, min(stop, len(self._turns)))).tolist())
            for places, plan in self._parts
        ]
        return (next(sources[turn]) for turn in self._turns[start:stop])


class PartPlan(ReadPlan):
    """The records of another plan from one of them on.

    Args:
        plan: of more records.
        first: the number there of the first record here.
    """

    def __init__(self, plan: ReadPlan, first: int) -> None:
        self._plan = plan
        self._first = first

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        return self._plan.views(self._first + start, self._first + stop)
