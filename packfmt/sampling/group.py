"""Batches whose samples belong together: one video, one shape of image."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from packfmt.sampling.block import ASSUMED_RECORD_BYTES, default_block_size, default_window
from packfmt.sampling.dataset import check_indices, column_of, digest, length_of, record_bytes_of
from packfmt.sampling.order import BatchSampler, Partial
from packfmt.sampling.ranks import Indices, whole_number
from packfmt.sampling.sampleindex import ONCE, Draws, draw_numbers, repeats
from packfmt.sampling.shuffle import BlockOrder

__all__ = ["RATIOS", "BucketBatchSampler", "GroupBatchSampler"]

# Width over height of what cameras and crops produce, upright and lying.
RATIOS = (1 / 2, 9 / 16, 2 / 3, 3 / 4, 1.0, 4 / 3, 3 / 2, 16 / 9, 2.0)


class _Plan(NamedTuple):
    """One epoch: the records sorted by group, and the batches as pieces of them in the order they are given out."""

    epoch: int
    records: Indices
    starts: Indices
    group_starts: Indices
    group_stops: Indices


class GroupBatchSampler(BatchSampler):
    """Batches all of whose samples are of one group, such as the frames of a video.

    The records are visited in the order of ``BlockBatchSampler`` and collected by group; whenever a group has
    gathered a global batch, the batch is given out. So reads stay contiguous, and groups are mixed as far as the
    windows reach::

        groups a a a a a b b b b, batch_size=2, shuffle=False:    aa aa a bb bb

    The whole global batch is of one group, so that all ranks work on alike data in a step. What is left of each group
    is a short batch, treated as ``partial`` says; "pad" fills it from its own group. Memory is about 32 bytes per
    record, and starting an epoch takes a sort of the records.

    Args:
        groups: (n,) the group of every record: integers or strings.
        batch_size: samples per batch and rank.
        dataset: the dataset, for record sizes, labels and announcements; may be left out.
        block_size: as for ``BlockBatchSampler``.
        window: as for ``BlockBatchSampler``.
        shuffle: False gives batches in the order of their last records, and records in theirs.
        seed: 0 <= seed < 2**64.
        rank: this process's rank; from torch.distributed where neither it nor ``world_size`` is given.
        world_size: number of ranks.
        partial: what becomes of each group's last batch: "keep", "drop" or "pad".
        indices: (k,) a subset of the records; sorted when shuffling.

    Raises:
        IndexError: one of ``indices`` is outside the data.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, or ``groups`` and ``dataset`` differ in length.
    """

    def __init__(
        self,
        groups: npt.ArrayLike,
        batch_size: int,
        *,
        dataset: Sized | None = None,
        block_size: int | None = None,
        window: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        partial: Partial = "keep",
        indices: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(dataset, batch_size, seed=seed, rank=rank, world_size=world_size, partial=partial)
        array = np.asarray(groups)
        if array.ndim != 1:
            raise ValueError(f"groups must have shape (n,), got {array.shape}")
        if dataset is not None and len(dataset) != len(array):
            raise ValueError(f"there are {len(array)} groups for a dataset of {len(dataset)} records")
        if indices is None:
            chosen = np.arange(len(array), dtype=np.int64)
        else:
            chosen = check_indices(indices, len(array))
        self._indices = np.sort(chosen) if shuffle else chosen
        self._codes = np.unique(array[self._indices], return_inverse=True)[1].astype(np.int64)
        sizes = np.bincount(self._codes).astype(np.int64)
        self._bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._again = repeats(self._indices)
        self._record_bytes = record_bytes_of(dataset) or ASSUMED_RECORD_BYTES
        if block_size is None:
            block_size = default_block_size(self._record_bytes)
        self.block_size = whole_number("block_size", block_size, 1)
        self._given_window = None if window is None else whole_number("window", window, 1)
        self.shuffle = bool(shuffle)
        self._arrange()

    def _arrange(self) -> None:
        self._window = self._given_window or default_window(self.block_size, self._global_size, self._record_bytes)
        self._order = BlockOrder(len(self._codes), self.block_size, self._window, self.seed, self.shuffle)
        self._count_batches(np.diff(self._bounds))
        self._known: _Plan | None = None  # replaced as a whole: threads see an old plan or a new one

    @property
    def window(self) -> int:
        """Blocks mixed together at most."""
        self._settle()
        return self._window

    def global_batch(self, epoch: int, position: int) -> Indices:
        """The samples of all ranks at one position: (n,) int64, n <= global_batch_size, all of one group."""
        places, _ = self._places(epoch, position)
        return self._indices[places]

    def global_draws(self, epoch: int, position: int) -> Draws:
        if self.partial != "pad" and self._again is None:
            return ONCE
        places, filled = self._places(epoch, position)
        numbers = draw_numbers(places, self._again, filled)
        return ONCE if numbers is None else Draws(numbers)

    def _places(self, epoch: int, position: int) -> tuple[Indices, int]:
        """The places in ``_indices`` of a global batch, and how many at its end repeat the group's first."""
        size = self.global_batch_size
        plan = self._plan(epoch)
        start, stop = int(plan.starts[position]), int(plan.group_stops[position])
        places = plan.records[start : min(start + size, stop)]
        lacking = size - len(places)
        if self.partial != "pad" or not lacking:
            return places, 0
        group = plan.records[int(plan.group_starts[position]) : stop]
        return np.concatenate([places, np.resize(group[:lacking], lacking)]), lacking

    def _plan(self, epoch: int) -> _Plan:
        plan = self._known
        if plan is None or plan.epoch != epoch:
            plan = self._make_plan(epoch)
            self._known = plan
        return plan

    def _make_plan(self, epoch: int) -> _Plan:
        size = self._global_size
        order = self._order.take(epoch, 0, self._order.count)
        when = np.argsort(self._codes[order], kind="stable")  # the places of the order, by group and then by time
        lengths = np.diff(self._bounds)
        counts = lengths // size if self.partial == "drop" else -(-lengths // size)
        group = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = self._bounds[group] + number * size
        stops = self._bounds[group + 1]
        # A batch is given out when its last record comes up.
        turn = np.argsort(when[np.minimum(starts + size, stops) - 1], kind="stable")
        return _Plan(epoch, order[when], starts[turn], self._bounds[group[turn]], stops[turn])

    def _identity(self) -> dict[str, int | str]:
        return {
            "block_size": self.block_size,
            "window": self._window,
            "shuffle": int(self.shuffle),
            "indices": digest(self._indices),
            "groups": digest(self._codes),
        }

    def _population(self) -> Indices | int:
        return self._indices


class BucketBatchSampler(GroupBatchSampler):
    """Batches of images of about the same aspect ratio, so that they can be resized to one shape with little loss.

    The sizes come from the index, no image is opened. Each image goes to the bucket whose ratio is nearest on a
    logarithmic scale, so that 2:1 and 1:2 are equally far from a square. Else like ``GroupBatchSampler``.

    Args:
        dataset_or_sizes: a dataset or reader with the columns ``width`` and ``height``, or a pair (widths, heights)
            of (n,) integers.
        batch_size: samples per batch and rank.
        ratios: width / height of each bucket, ascending.
        block_size: as for ``BlockBatchSampler``.
        window: as for ``BlockBatchSampler``.
        shuffle: as for ``GroupBatchSampler``.
        seed: 0 <= seed < 2**64.
        rank: this process's rank; from torch.distributed where neither it nor ``world_size`` is given.
        world_size: number of ranks.
        partial: what becomes of each bucket's last batch: "keep", "drop" or "pad".
        indices: (k,) a subset of the records.

    Attributes:
        ratios: as given.
        buckets: (n,) the bucket of every record, a position in ``ratios``.

    Raises:
        IndexError: one of ``indices`` is outside the data.
        TypeError: an argument is of the wrong type.
        ValueError: no sizes are known, a size is not positive, or an argument is out of range.
    """

    def __init__(
        self,
        dataset_or_sizes: Sized | tuple[npt.ArrayLike, npt.ArrayLike],
        batch_size: int,
        *,
        ratios: Sequence[float] = RATIOS,
        block_size: int | None = None,
        window: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        partial: Partial = "keep",
        indices: npt.ArrayLike | None = None,
    ) -> None:
        self.ratios = tuple(float(ratio) for ratio in ratios)
        steps = np.diff(np.array([0.0, *self.ratios]))
        if not self.ratios or not np.isfinite(self.ratios).all() or (steps <= 0).any():
            raise ValueError(f"ratios must be positive and ascending, got {self.ratios}")
        self.buckets = self._nearest(*_sizes(dataset_or_sizes))
        super().__init__(
            self.buckets,
            batch_size,
            dataset=None if isinstance(dataset_or_sizes, tuple) else dataset_or_sizes,
            block_size=block_size,
            window=window,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            partial=partial,
            indices=indices,
        )

    def _nearest(self, widths: npt.NDArray[np.float64], heights: npt.NDArray[np.float64]) -> Indices:
        borders = [(low * high) ** 0.5 for low, high in zip(self.ratios, self.ratios[1:], strict=False)]
        return np.searchsorted(borders, widths / heights).astype(np.int64)


def _sizes(
    source: Sized | tuple[npt.ArrayLike, npt.ArrayLike],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Widths and heights of all records, checked."""
    if isinstance(source, tuple):
        if len(source) != 2:
            raise ValueError(f"sizes must be a pair (widths, heights), got {len(source)} arrays")
        found = source
        count = len(np.atleast_1d(np.asarray(source[0])))
    else:
        found = (column_of(source, "width"), column_of(source, "height"))
        count = length_of(source)
        if found[0] is not None and found[1] is not None:  # a bad image that was kept has no size: any bucket will do
            unknown = (np.asarray(found[0]) == 0) | (np.asarray(found[1]) == 0)
            found = (np.where(unknown, 1, found[0]), np.where(unknown, 1, found[1]))
        else:
            raise ValueError(
                f"{type(source).__name__} has no columns 'width' and 'height'; pass a pair (widths, heights) of arrays"
            )
    arrays = [np.asarray(side, dtype=np.float64) for side in cast("tuple[npt.ArrayLike, ...]", found)]
    for name, array in zip(("widths", "heights"), arrays, strict=True):
        if array.shape != (count,):
            raise ValueError(f"{name} must have shape ({count},), got {array.shape}")
        bad = np.flatnonzero(~(array > 0))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]:g}; sizes must be positive")
    return arrays[0], arrays[1]
