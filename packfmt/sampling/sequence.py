"""Clips of consecutive records in time order, from a random start."""

from __future__ import annotations

import warnings
from collections.abc import Sized

import numpy as np
import numpy.typing as npt

from packfmt.sampling.facts import digest, length_of
from packfmt.sampling.order import BatchSampler, Partial
from packfmt.sampling.ranks import Indices, whole_number
from packfmt.sampling.shuffle import CLIPS, PHASES, below, permutation

__all__ = ["SequenceSampler"]


class SequenceSampler(BatchSampler):
    """Batches of clips: ``length`` consecutive records in time order, never across the border of a recording.

    Every epoch cuts each recording into clips from a random start, its phase, and visits all clips in random order::

        one recording of 10 records, length=3, phase 2:    clips 2 3 4 | 5 6 7, and one from a random start, say 4 5 6

    A recording of s records gives ``s // length`` clips in every epoch, so that epochs have equal numbers of batches;
    where the phase leaves room for one fewer, that one starts anywhere. So an epoch does not see every record, and
    epochs together see all of them. One shorter than ``length`` gives none. With ``shuffle=False`` clips start at the
    first record and come in time order; what is left at the end of each recording is not seen.

    A batch is flat, clip after clip: ``batch_size * length`` indices, so that a stacked batch (B * T, C, H, W)
    becomes ``images.view(B, T, C, H, W)``. ``batch_size``, ``partial``, ``repeated`` and the split over ranks count
    clips. Memory is 8 bytes per clip.

    Args:
        dataset_or_length: a dataset, a reader, anything with a length, or the number of records, in time order.
        batch_size: clips per batch and rank.
        length: records per clip.
        groups: (n,) the recording of every record, such as a video's number; a new one begins where the value
            changes. By default all records are one recording.
        shuffle: False for time order from the first record on.
        seed: 0 <= seed < 2**64.
        rank: this process's rank; from torch.distributed where neither it nor ``world_size`` is given.
        world_size: number of ranks.
        partial: what becomes of the last batch: "keep", "drop" or "pad".

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range.

    Warns:
        UserWarning: recordings are shorter than a clip and are never seen, or there are no batches.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        batch_size: int,
        *,
        length: int,
        groups: npt.ArrayLike | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        partial: Partial = "keep",
    ) -> None:
        super().__init__(dataset_or_length, batch_size, seed=seed, rank=rank, world_size=world_size, partial=partial)
        self.length = whole_number("length", length, 1)
        self.shuffle = bool(shuffle)
        self._records = length_of(dataset_or_length)
        self._firsts = self._recordings(groups)
        self._sizes = np.diff(np.append(self._firsts, self._records))
        self._counts = self._sizes // self.length
        lost = int(np.count_nonzero(self._counts == 0))
        if lost:
            warnings.warn(
                f"{lost} of {len(self._counts)} recordings are shorter than length={self.length} and are never seen",
                UserWarning,
                stacklevel=2,
            )
        self._clips = int(self._counts.sum())
        self._count_batches([self._clips])
        self._known: tuple[int, Indices] | None = None  # replaced as a whole: threads see an old one or a new one

    def global_batch(self, epoch: int, position: int) -> Indices:
        """The clips of all ranks at one position of an epoch: (n, length) int64, n <= global_batch_size."""
        starts = self._starts(epoch)
        chosen = starts[position * self.global_batch_size : (position + 1) * self.global_batch_size]
        lacking = self.global_batch_size - len(chosen)
        if self.partial == "pad" and lacking:
            chosen = np.concatenate([chosen, np.resize(starts[:lacking], lacking)])
        return chosen[:, None] + np.arange(self.length, dtype=np.int64)

    def _recordings(self, groups: npt.ArrayLike | None) -> Indices:
        """The first record of each recording."""
        if groups is None:
            return np.zeros(min(1, self._records), dtype=np.int64)
        array = np.asarray(groups)
        if array.shape != (self._records,):
            raise ValueError(f"groups must have shape ({self._records},), got {array.shape}")
        changes = np.flatnonzero(array[1:] != array[:-1]) + 1
        return np.append(np.zeros(min(1, self._records), dtype=np.int64), changes).astype(np.int64)

    def _starts(self, epoch: int) -> Indices:
        """The first record of every clip, in the epoch's order."""
        known = self._known
        if known is None or known[0] != epoch:
            known = (epoch, self._cut(epoch))
            self._known = known
        return known[1]

    def _cut(self, epoch: int) -> Indices:
        recording = np.repeat(np.arange(len(self._counts)), self._counts)
        number = np.arange(self._clips) - np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        offsets = number * self.length
        if not self.shuffle:
            in_time: Indices = self._firsts[recording] + offsets
            return in_time
        phases = below(np.full(len(self._counts), self.length), self.seed, epoch, PHASES)
        anywhere = below(np.maximum(self._sizes - self.length + 1, 1), self.seed, epoch, PHASES, 1)
        fitting = (self._sizes - phases) // self.length
        inside = np.where(number < fitting[recording], phases[recording] + offsets, anywhere[recording])
        starts = self._firsts[recording] + inside
        mixed: Indices = starts[permutation(self._clips, self.seed, epoch, CLIPS)]
        return mixed

    def _identity(self) -> dict[str, int | str]:
        return {
            "records": self._records,
            "length": self.length,
            "shuffle": int(self.shuffle),
            "groups": digest(self._firsts),
        }

    def _population(self) -> Indices | int:
        return self._records
