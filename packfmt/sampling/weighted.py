"""Draws with replacement, record by record, as a pure function of (seed, epoch)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packfmt.sampling.dataset import digest
from packfmt.sampling.ranks import Indices, whole_number
from packfmt.sampling.shuffle import WEIGHTED, uniform

__all__ = ["WeightedDraws"]


class WeightedDraws:
    """Which records are drawn in an epoch, each draw taking a record with a probability proportional to its weight.

    Memory is 16 bytes per record with a weight above 0, and 8 per draw while they are made. Thread-safe.

    Args:
        weights: (n,) numbers, one for each record, finite and none below 0, of which some are above.
        records: n, the number of records.
        indices: (k,) the records that may be drawn, None for all; one that is listed twice counts twice.
        samples: draws per epoch; None for as many as there are records that may be drawn.
        seed: 0 <= seed < 2**64.

    Raises:
        TypeError: weights are no numbers, or ``samples`` is no integer.
        ValueError: one of them is not as above.
    """

    def __init__(
        self, weights: npt.ArrayLike, records: int, indices: Indices | None, samples: int | None, seed: int
    ) -> None:
        array = np.asarray(weights)
        if array.shape != (records,):
            raise ValueError(f"weights must have shape ({records},), one for each record, got {array.shape}")
        if array.dtype.kind not in "biuf":
            raise TypeError(f"weights must be numbers, got dtype {array.dtype}")
        given = array.astype(np.float64)
        wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
        if len(wrong):
            raise ValueError(f"weights[{wrong[0]}] is {given[wrong[0]]}; weights must be finite and not below 0")
        eligible = np.arange(records) if indices is None else np.sort(indices)
        self.samples = len(eligible) if samples is None else whole_number("num_samples", samples, 0)
        self.records = eligible[given[eligible] > 0]
        with np.errstate(over="ignore"):  # said below
            self._ends = np.cumsum(given[self.records])
        if self.samples and not (len(self._ends) and np.isfinite(self._ends[-1])):
            total = self._ends[-1] if len(self._ends) else 0.0
            of = "weights" if indices is None else "weights of the indices"
            raise ValueError(f"the {of} add up to {total}; their sum must be finite and above 0")
        self.digest = digest(np.concatenate([given, [self.samples]]))
        self._seed = seed

    def draw(self, epoch: int) -> Indices:
        """The records of an epoch, ascending, as often as they are drawn: (samples,) int64."""
        if not self.samples:
            return np.empty(0, dtype=np.int64)
        points = np.sort(uniform(self.samples, self._seed, epoch, WEIGHTED)) * self._ends[-1]
        # Rounding may lift the last point onto the end of the last record.
        places = np.minimum(np.searchsorted(self._ends, points, side="right"), len(self._ends) - 1)
        drawn: Indices = self.records[places]
        return drawn
