"""Clips of consecutive records in time order, from a random start."""

from __future__ import annotations

from collections.abc import Sized
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from packfmt.sampling.dataset import check_indices, digest, length_of
from packfmt.sampling.order import BatchSampler, Partial
from packfmt.sampling.ranks import Indices, warn_user, whole_number
from packfmt.sampling.sampleindex import Draws, Repeats, draw_numbers, repeats
from packfmt.sampling.shuffle import CLIPS, PHASES, below, permutation

__all__ = ["SequenceSampler"]


class _Cut(NamedTuple):
    """One epoch: the first records of its clips, in its order, and which of them come again."""

    epoch: int
    starts: Indices
    again: Repeats | None


class SequenceSampler(BatchSampler):
    """Batches of clips: ``length`` records in time order, every ``step``-th, never across the border of a recording.

    Every epoch cuts each recording into clips from a random start, its phase, and visits all clips in random order::

        one recording of 10 records, length=3, phase 2:    clips 2 3 4 | 5 6 7, and one from a random start, say 4 5 6

    Clips begin ``length * step`` records after each other. A recording gives as many in every epoch as fit into it (of
    s records ``s // length`` with a step of 1), so that epochs have equal numbers of batches; where the phase leaves
    room for one fewer, that one starts anywhere. So an epoch does not see every record, and epochs together see all of
    them. One shorter than a clip gives none. With ``shuffle=False`` clips start at the first record and come in time
    order; what lies between the records of clips, or is left at the end of each recording, is not seen.

    All records of a clip have one random key, that of its first: they get the same crop (of the same place, where they
    are of one size), the same flip, and the same numbers from ``sample_rng``.

    A batch is flat, clip after clip: ``batch_size * length`` indices, so that a stacked batch (B * T, C, H, W)
    becomes ``images.view(B, T, C, H, W)``. ``batch_size``, ``partial``, ``repeated`` and the split over ranks count
    clips. Memory is 8 bytes per clip.

    Args:
        dataset_or_length: a dataset, a reader, anything with a length, or the number of records, in time order.
        batch_size: clips per batch and rank.
        length: records per clip.
        groups: (n,) the recording of every record, such as a video's number; a new one begins where the value
            changes. By default all records are one recording.
        step: records from one of a clip to the next.
        indices: (k,) the records that clips may be of, in any order, none twice. A new recording begins where they
            leave out a record.
        shuffle: False for time order from the first record on.
        seed: 0 <= seed < 2**64.
        rank: this process's rank; from torch.distributed where neither it nor ``world_size`` is given.
        world_size: number of ranks.
        partial: what becomes of the last batch: "keep", "drop" or "pad".

    Raises:
        IndexError: one of ``indices`` is outside the data.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, or an index is given twice.

    Warns:
        UserWarning: recordings are shorter than a clip and are never seen, or there are no batches.
    """

    _LATER: ClassVar[dict[str, int]] = {"step": 1, "indices": -1}

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
        step: int = 1,
        indices: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(dataset_or_length, batch_size, seed=seed, rank=rank, world_size=world_size, partial=partial)
        self.length = whole_number("length", length, 1)
        self.shuffle = bool(shuffle)
        self.step = whole_number("step", step, 1)
        self._records = length_of(dataset_or_length)
        self._indices: Indices | None = None
        if indices is not None:
            self._indices = np.sort(check_indices(indices, self._records))
            twice = np.flatnonzero(np.diff(self._indices) == 0)
            if len(twice):
                raise ValueError(f"indices hold {self._indices[twice[0]]} twice; a clip has each record once")
        self._firsts, self._sizes = self._recordings(groups)
        self._period = self.length * self.step
        self._span = self._period - self.step + 1
        self._counts = (self._sizes + self.step - 1) // self._period
        lost = int(np.count_nonzero(self._counts == 0))
        if lost:
            clip = f"length={self.length}" if self.step == 1 else f"a clip of {self._span} (length, step)"
            warn_user(f"{lost} of {len(self._counts)} recordings are shorter than {clip} and are never seen")
        self._clips = int(self._counts.sum())
        self._known: _Cut | None = None  # replaced as a whole: threads see an old one or a new one
        self._arrange()

    def _arrange(self) -> None:
        self._count_batches([self._clips])

    def global_batch(self, epoch: int, position: int) -> Indices:
        """The clips of all ranks at one position of an epoch: (n, length) int64, n <= global_batch_size."""
        places, _ = self._places(position)
        starts = self._known_cut(epoch).starts[places]
        return starts[:, None] + np.arange(0, self._period, self.step, dtype=np.int64)

    def global_draws(self, epoch: int, position: int) -> Draws:
        places, filled = self._places(position)
        cut = self._known_cut(epoch)
        numbers = draw_numbers(places, cut.again, filled)
        shape = (len(places), self.length)
        return Draws(
            None if numbers is None else np.broadcast_to(numbers[:, None], shape),
            np.broadcast_to(cut.starts[places, None], shape),
        )

    def _places(self, position: int) -> tuple[Indices, int]:
        """The places of the order that a global batch takes, and how many at its end repeat the first ones."""
        size = self.global_batch_size
        places = np.arange(position * size, min((position + 1) * size, self._clips))
        lacking = size - len(places)
        if self.partial != "pad" or not lacking:
            return places, 0
        return np.concatenate([places, np.resize(np.arange(min(lacking, self._clips)), lacking)]), lacking

    def _recordings(self, groups: npt.ArrayLike | None) -> tuple[Indices, Indices]:
        """The first record of each recording, and the number of its records."""
        records = np.arange(self._records) if self._indices is None else self._indices
        begins = np.ones(len(records), dtype=bool)
        begins[1:] = np.diff(records) != 1
        if groups is not None:
            array = np.asarray(groups)
            if array.shape != (self._records,):
                raise ValueError(f"groups must have shape ({self._records},), got {array.shape}")
            of_records = array[records]
            begins[1:] |= of_records[1:] != of_records[:-1]
        places = np.flatnonzero(begins)
        return records[places].astype(np.int64), np.diff(np.append(places, len(records))).astype(np.int64)

    def _known_cut(self, epoch: int) -> _Cut:
        known = self._known
        if known is None or known.epoch != epoch:
            starts = self._cut(epoch)
            known = _Cut(epoch, starts, repeats(starts))
            self._known = known
        return known

    def _cut(self, epoch: int) -> Indices:
        """The first record of every clip, in the epoch's order."""
        recording = np.repeat(np.arange(len(self._counts)), self._counts)
        number = np.arange(self._clips) - np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        offsets = number * self._period
        if not self.shuffle:
            in_time: Indices = self._firsts[recording] + offsets
            return in_time
        phases = below(np.full(len(self._counts), self._period), self.seed, epoch, PHASES)
        anywhere = below(np.maximum(self._sizes - self._span + 1, 1), self.seed, epoch, PHASES, 1)
        fitting = (self._sizes - phases + self.step - 1) // self._period
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
            "step": self.step,
            "indices": -1 if self._indices is None else digest(self._indices),
        }

    def _population(self) -> Indices | int:
        return self._records if self._indices is None else self._indices
