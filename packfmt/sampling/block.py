"""The sampler that keeps reads contiguous: random blocks, mixed in windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from itertools import chain, islice, repeat
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from packfmt.sampling.dataset import check_indices, digest, labels_of, length_of, places_of, record_bytes_of
from packfmt.sampling.order import NONE, BatchSampler, Partial
from packfmt.sampling.quality import warn_if_one_sided
from packfmt.sampling.ranks import Indices, on_one_machine, whole_number
from packfmt.sampling.sampleindex import ONCE, Draws, Repeats, draw_numbers, repeats
from packfmt.sampling.shuffle import BlockOrder
from packfmt.sampling.weighted import WeightedDraws
from packfmt.system import memory_bytes

__all__ = ["BlockBatchSampler", "block_readahead", "default_block_size", "default_window"]

CATCH_UP = 4.0  # times the speed of the batches, at which a window is caught up on that was not read before its turn


def block_readahead(order: BlockOrder, epoch: int, start: int, size: int) -> Iterator[Indices]:
    """For each batch from place ``start`` on, the blocks whose reading should begin before it; often none.

    While a window is in use the next one is read, in the order of the file and in step with the batches, so that no
    batch waits for it. A disk gives whole blocks many times faster than the single records of a batch where the number
    of its operations is limited, as that of spinning and of rented disks is. A window that nobody could read before its
    turn, the first one, is caught up on at ``CATCH_UP`` times the speed of the batches.

    Args:
        order: whose windows.
        epoch: 0 <= epoch < 2**63.
        start: 0 <= start <= order.count.
        size: places that a batch takes.

    Returns:
        (n,) int64 numbers of blocks for each batch, each block once.
    """
    waiting: deque[tuple[int, int]] = deque()  # (window, block)
    late = 0  # of them, in the window in use
    known = order.window_at(epoch, start) if start < order.count else 0  # the first window that is not among them
    stop = start  # of the window in use
    pace = CATCH_UP * size / order.block_size
    credit = 0.0
    while start < order.count:
        if start >= stop:
            window = order.window_at(epoch, start)
            stop = order.window_range(epoch, window)[1]
            for number in range(max(known, window), min(window + 2, order.windows)):
                waiting.extend((number, block) for block in order.blocks_of(epoch, number))
                known = number + 1
            while waiting and waiting[0][0] < window:
                waiting.popleft()
            late = sum(number == window for number, _ in waiting)
        due = 0
        if waiting:
            batches = max(1.0, (stop - start) / size)
            credit += pace if late > 0 else min(pace, len(waiting) / batches)
            due = min(int(credit), len(waiting))
            credit -= due
            late -= due
        yield np.array([waiting.popleft()[1] for _ in range(due)], dtype=np.int64) if due else NONE
        start += size


ASSUMED_RECORD_BYTES = 65536.0  # a small JPEG, where nobody tells
# A disk that takes 10 ms to find a place and reads 200 MB/s reads half of its time; an SSD or network disk nearly all.
BLOCK_BYTES = 2 * 2**20
# The records of a window are read over its whole time, so they should stay in the page cache of a training machine.
MOST_WINDOW_BYTES = 4 * 2**30
MOST_WINDOW_RECORDS = 2**22  # mixing them takes a third of a second and 100 MB
LEAST_WINDOW_BYTES = 256 * 2**20
WINDOW_BATCHES = 32
# Measured on data sorted by class (docs/benchmarks.md): 1 costs 7 points of accuracy, 4 cost 2, 8 none.
WINDOW_BLOCKS_PER_SAMPLE = 8
LEAST_BLOCKS = 16
MOST_SPREAD = 2.0  # records that lie where one is wanted: more are not worth reading with it


def default_block_size(record_bytes: float) -> int:
    """Records per block: about 2 MiB, from where on even a spinning disk reads longer than it seeks."""
    return max(1, round(BLOCK_BYTES / record_bytes))


def default_window(block_size: int, global_batch_size: int, record_bytes: float) -> int:
    """Blocks per window: 32 global batches of records, 8 blocks per sample of a global batch, at least 256 MiB.

    The second rule is for data sorted by class, where a block counts as one draw of a class. With a block per sample,
    batches are as mixed as a full shuffle's by themselves, but those of a window all lean to the same classes, and
    training follows. By the third, small data is shuffled fully. All yield to 4 GiB and 4 million records per window,
    but not below 16 blocks.
    """
    block_bytes = block_size * record_bytes
    wanted = max(
        WINDOW_BLOCKS_PER_SAMPLE * global_batch_size,
        -(-WINDOW_BATCHES * global_batch_size // block_size),
        int(LEAST_WINDOW_BYTES / block_bytes),
    )
    most = min(int(MOST_WINDOW_BYTES / block_bytes), MOST_WINDOW_RECORDS // block_size)
    return max(LEAST_BLOCKS, min(wanted, most))


class BlockBatchSampler(BatchSampler):
    """Batches from a random order whose reads stay contiguous.

    Blocks of ``block_size`` consecutive records are visited in random order, ``window`` blocks at a time are mixed,
    and batches are cut from the mix, across the borders of windows::

        16 records, block_size=2, window=4, batch_size=3, world_size=2, seed=0, epoch 0:

        blocks           0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15
        visited          0 1   4 5   2 3   10 11  |  8 9   6 7   12 13   14 15
        mixed            3 5 11 4 2 1 0 10        |  12 7 8 9 13 14 6 15
        global batches   3 5 11 4 2 1  |  0 10 12 7 8 9  |  13 14 6 15
        rank 0           3 5 11        |  0 10 12        |  13 14
        rank 1                  4 2 1  |          7 8 9  |        6 15

    This is the two-level shuffle of CorgiPile (Xu et al., "In-Database Machine Learning with CorgiPile: Stochastic
    Gradient Descent without Full Data Shuffle", SIGMOD 2022): they show that SGD over blocks in random order, with
    the tuples of several buffered blocks shuffled, converges about as fast as after a full shuffle when the buffer
    holds a few per cent of the data, where shuffling only blocks or only a sliding buffer does not on data sorted by
    class. How far an order falls short of a full shuffle depends on how alike the records of one block are and on how
    many blocks are mixed; ``quality`` measures both. A pack written with ``pack --shuffle`` has unlike records in
    every block, and any window will do.

    Order and defaults are a pure function of (number of records or indices, weights, mean record size, batch_size *
    world_size, block_size, window, seed, epoch). Memory is 8 bytes per block and one window of records; an epoch over
    a hundred million records starts within a second, at any batch. See ``BatchSampler`` for ``partial``, iterating
    and state.

    Args:
        dataset_or_length: a dataset, a reader, anything with a length, or the number of records. A ``record_bytes``
            (mean size in bytes) on it or its ``reader`` feeds the defaults; its labels are looked at once, for the
            warning.
        batch_size: samples per batch and rank.
        block_size: records per block; by default about 2 MiB.
        window: blocks mixed together at most; windows differ by one block at most. By default 32 global batches of
            records, 8 blocks for each sample of a global batch, and 256 MiB, up to 4 GiB or 4 million records.
        shuffle: False keeps the records (or ``indices``) in their order.
        seed: 0 <= seed < 2**64.
        rank: this process's rank; from torch.distributed where neither it nor ``world_size`` is given.
        world_size: number of ranks.
        partial: what becomes of the last batch: "keep", "drop" or "pad".
        indices: (k,) a subset; an index given twice is drawn twice. Sorted when shuffling, so that blocks are
            contiguous whatever its order, and so are the records of a view or of torch's ``Subset``. Takes 8 bytes
            each.
        weights: (n,) a number for each record, not below 0: records are drawn with replacement, each draw taking one
            with a probability proportional to its weight. Each epoch draws anew, and visits what it drew in blocks
            and windows like a subset. Takes 16 bytes per record and 24 per draw, and a sort as an epoch begins.
        num_samples: draws per epoch with ``weights``; by default as many as there are records, or ``indices``.

    A record that comes several times in an epoch has other random numbers each time, for its crop and flip.

    Raises:
        IndexError: one of ``indices`` is outside the data.
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range.

    Warns:
        UserWarning: the data is sorted by class and the window too small to mend it, or there are no batches.
    """

    _LATER: ClassVar[dict[str, int]] = {"weights": -1}

    def __init__(
        self,
        dataset_or_length: Sized | int,
        batch_size: int,
        *,
        block_size: int | None = None,
        window: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        partial: Partial = "keep",
        indices: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(dataset_or_length, batch_size, seed=seed, rank=rank, world_size=world_size, partial=partial)
        self._records = length_of(dataset_or_length)
        chosen = None if indices is None else check_indices(indices, self._records)
        self._view = places_of(dataset_or_length)
        self._indices = _by_place(chosen, self._view) if shuffle else chosen
        if num_samples is not None and weights is None:
            raise ValueError("num_samples goes with weights; without them an epoch has every record or index once")
        self._weighted = (
            None if weights is None else WeightedDraws(weights, self._records, self._indices, num_samples, self.seed)
        )
        self._known: tuple[int, Indices | None, Repeats | None] | None = None  # replaced as a whole, for threads
        self._record_bytes = record_bytes_of(dataset_or_length) or ASSUMED_RECORD_BYTES
        if block_size is None:
            block_size = default_block_size(self._record_bytes)
        self.block_size = whole_number("block_size", block_size, 1)
        self._given_window = None if window is None else whole_number("window", window, 1)
        self.shuffle = bool(shuffle)
        self._arrange()

    def _arrange(self) -> None:
        self._window = self._given_window or default_window(self.block_size, self._global_size, self._record_bytes)
        if self._weighted is not None:
            count = self._weighted.samples
        else:
            count = self._records if self._indices is None else len(self._indices)
        self._order = BlockOrder(count, self.block_size, self._window, self.seed, self.shuffle)
        self._count_batches([count])
        if self.shuffle and self._order.windows > 1:
            labels = labels_of(self._dataset)
            if labels is not None:
                warn_if_one_sided(self._order, self._drawn(0)[0], labels)

    @property
    def window(self) -> int:
        """Blocks mixed together at most."""
        self._settle()
        return self._window

    def global_batch(self, epoch: int, position: int) -> Indices:
        """The samples of all ranks at one position of an epoch: (n,) int64, n <= global_batch_size."""
        places, _ = self._places(epoch, position)
        chosen, _ = self._drawn(epoch)
        return places if chosen is None else chosen[places]

    def global_draws(self, epoch: int, position: int) -> Draws:
        places, filled = self._places(epoch, position)
        numbers = draw_numbers(places, self._drawn(epoch)[1], filled)
        return ONCE if numbers is None else Draws(numbers)

    def _drawn(self, epoch: int) -> tuple[Indices | None, Repeats | None]:
        """The records in the places of the order, None where they are their numbers, and which of them come again."""
        if self._indices is None and self._weighted is None:
            return None, None
        known = self._known
        if known is None or (known[0] != epoch and self._weighted is not None):
            chosen = self._indices
            if self._weighted is not None:
                chosen = self._weighted.draw(epoch)
                chosen = _by_place(chosen, self._view) if self.shuffle else chosen
            known = (epoch, chosen, None if chosen is None else repeats(chosen))
            self._known = known
        return known[1:]

    def _places(self, epoch: int, position: int) -> tuple[Indices, int]:
        """The places of the order that a global batch takes, and how many at its end repeat the epoch's first."""
        size, count = self.global_batch_size, self._order.count
        start = position * size
        places = self._order.take(epoch, start, min(start + size, count))
        lacking = size - len(places)
        if self.partial != "pad" or not lacking:
            return places, 0
        return np.concatenate([places, np.resize(self._order.take(epoch, 0, min(lacking, count)), lacking)]), lacking

    def read_ahead(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """The next window, in whole blocks, in step with the batches: see ``BatchSampler.read_ahead``.

        Nothing where two windows would take more than half of the memory; where not all ranks are known to be on one
        machine, since each of several reads only its part of a block; and where ``indices``, ``weights`` or a view
        leave out more than half.
        """
        size = self.global_batch_size
        chosen, _ = self._drawn(epoch)
        near = on_one_machine(self._ranks.of_process[1])
        if not (near and self.shuffle and self._order.count and self._pays(chosen)):
            return super().read_ahead(epoch, start)
        wanted = (
            self._own_records(chosen, blocks) for blocks in block_readahead(self._order, epoch, start * size, size)
        )
        return islice(chain(wanted, repeat(NONE)), self._length - start)

    def _pays(self, chosen: Indices | None) -> bool:
        spread, places = 1.0, self._in_pack(chosen)
        if places is not None:
            spread = (int(places[-1]) - int(places[0]) + 1) / (1 + np.count_nonzero(np.diff(places)))
        window = min(self._window, self._order.blocks) * self.block_size * self._record_bytes * max(1.0, spread)
        memory = memory_bytes()
        return spread <= MOST_SPREAD and (memory is None or 4 * window <= memory)

    def _own_records(self, chosen: Indices | None, blocks: Indices) -> Indices:
        """The records of blocks, of which each rank asks for its own."""
        rank, ranks = self._ranks.of_process
        mine = blocks[blocks % ranks == rank]
        if not len(mine):
            return NONE
        places = self._order.records_of(mine)
        return places if chosen is None else np.unique(chosen[places])

    def _in_pack(self, chosen: Indices | None) -> Indices | None:
        """Where records lie in the pack; None for all of it."""
        view = self._view
        return chosen if view is None else view if chosen is None else view[chosen]

    def _identity(self) -> dict[str, int | str]:
        places = self._in_pack(self._indices)
        return {
            "records": self._records,
            "block_size": self.block_size,
            "window": self._window,
            "shuffle": int(self.shuffle),
            "indices": -1 if places is None else digest(places),
            "weights": -1 if self._weighted is None else self._weighted.digest,
        }

    def _population(self) -> Indices | int:
        chosen, _ = self._drawn(0)
        return self._records if chosen is None else chosen

    def _in_use(self, epoch: int) -> list[Indices]:
        if not (self.shuffle and self._order.count):
            return []
        windows = np.unique(np.linspace(0, self._order.windows - 1, 4).astype(np.int64)).tolist()
        records = [self._order.take(epoch, *self._order.window_range(epoch, window)) for window in windows]
        chosen, _ = self._drawn(epoch)
        return records if chosen is None else [chosen[places] for places in records]


def _by_place(chosen: Indices | None, view: Indices | None) -> Indices | None:
    """Chosen records, None for all, in the order that they lie in the pack; None where that is the order of all."""
    if view is None:
        return None if chosen is None else np.sort(chosen)
    if chosen is None:
        return None if (view[1:] >= view[:-1]).all() else np.argsort(view, kind="stable")
    return chosen[np.argsort(view[chosen], kind="stable")]
