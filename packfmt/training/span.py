"""Batches whose crops are chosen together: numpy's calls cost nearly the same for eight batches as for one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from packfmt.randomness import Keys
from packfmt.sampling.sampleindex import Draws, join_draws
from packfmt.training.pipeline import Pipeline
from packfmt.training.plan import Plan, choose

__all__ = ["PlanGroup", "PlannedBatch"]

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One batch of a span: its records' positions, and when called their choices."""

    positions: Positions
    span: PlanGroup
    number: int

    def __call__(self) -> Plan:
        return self.span.choices(self.number)

    @property
    def pipeline(self) -> Pipeline:
        """What they were chosen by, and the batch is to be made by."""
        return self.span.pipeline


class PlanGroup:
    """The choices for the records of several batches, made for all in the thread that first asks. Thread-safe.

    Args:
        pipeline: the dataset's.
        batches: (N,) records each.
        draws: of each batch.
        keys: gives records' random keys.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[Positions],
        draws: Sequence[Draws],
        keys: Callable[[Positions, Draws], Keys],
    ) -> None:
        self.pipeline = pipeline
        self._batches = batches
        self._draws = draws
        self._keys = keys
        self._ends = list(accumulate(map(len, batches)))
        self._lock = threading.Lock()
        self._whole: Plan | None = None
        self._apart = len(batches) == 1

    def choices(self, number: int) -> Plan:
        """Those for one of the batches.

        Raises:
            ValueError: an image of this batch is too small for the crop, with ``on_error="raise"``; a note names it.
        """
        with self._lock:  # who comes second waits, since it can do nothing without
            if self._whole is None and not self._apart:
                try:
                    self._whole = self._choose(np.concatenate(self._batches), join_draws(self._batches, self._draws))
                except Exception:  # one batch's error is not to come in another's place
                    self._apart = True
        batch = self._batches[number]
        if self._whole is None:
            return self._choose(batch, self._draws[number])
        return self._whole.part(self._ends[number] - len(batch), self._ends[number])

    def _choose(self, positions: Positions, draws: Draws) -> Plan:
        return choose(self.pipeline, positions, self._keys(positions, draws))
