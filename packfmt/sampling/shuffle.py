"""Permutations keyed by (seed, epoch, number), and the block order built from them.

Everything is a pure function of its key: any window of any epoch can be computed alone. The bits come from Philox
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose stream numpy guarantees; numpy's own
``shuffle`` is not used, since its algorithm may change between numpy versions and with it the order of a run that is
resumed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.random import Philox  # now, not at the first draw: a fork in that moment would hang

from packfmt.sampling.ranks import Indices

__all__ = ["BLOCKS", "CLIPS", "PHASES", "SURVEY", "WEIGHTED", "WINDOW", "BlockOrder", "below", "permutation", "uniform"]

# What the bits are for: each purpose has streams of its own.
BLOCKS, WINDOW, CLIPS, PHASES, SURVEY, WEIGHTED = range(6)


def _bits(count: int, seed: int, epoch: int, purpose: int, number: int) -> npt.NDArray[np.uint64]:
    # Philox counts its blocks up in the low words of the counter, so streams that differ in the high words never meet.
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, 0, number, epoch], dtype=np.uint64)
    return Philox(key=key, counter=counter).random_raw(count)


def permutation(count: int, seed: int, epoch: int, purpose: int, number: int = 0) -> Indices:
    """A uniform permutation of ``range(count)``.

    Sorts random numbers that carry their position in their low bits: the position makes them distinct, so that every
    sort gives the same result. Of two positions the smaller comes first with probability 1/2 up to ``count / 2**64``.

    Args:
        count: number of elements, below 2**40.
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**63.
        purpose: one of the constants of this module.
        number: tells permutations of one purpose and epoch apart.

    Returns:
        (count,) int64.
    """
    if count == 0:
        return np.empty(0, dtype=np.int64)
    keys = _bits(count, seed, epoch, purpose, number)
    low = np.uint64((1 << (count - 1).bit_length()) - 1)
    keys &= ~low
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def below(limits: npt.ArrayLike, seed: int, epoch: int, purpose: int, number: int = 0) -> Indices:
    """For each limit a whole number from 0 to limit - 1, uniform: (n,) limits in 1..2**53 to (n,) int64."""
    bounds = np.asarray(limits, dtype=np.int64)
    return (uniform(len(bounds), seed, epoch, purpose, number) * bounds).astype(np.int64)


def uniform(count: int, seed: int, epoch: int, purpose: int, number: int = 0) -> npt.NDArray[np.float64]:
    """(count,) float64, uniform in [0, 1), multiples of 2**-53."""
    return (_bits(count, seed, epoch, purpose, number) >> np.uint64(11)) * np.float64(2.0**-53)


class BlockOrder:
    """The order of records in which blocks are visited at random and mixed window by window.

    The blocks of ``block_size`` consecutive records are permuted, the permuted blocks are dealt into windows, and the
    records of each window are permuted. Windows hold at most ``window`` blocks and differ by one block at most, so
    that none is so small that it is mixed badly. Where a place of the order lies follows by arithmetic: only the last
    block of the data can be short, and only the window that holds it has fewer records for it.

    Memory is 8 bytes per block plus one window of records. Thread-safe; a pure function of the arguments.

    Args:
        count: number of records.
        block_size: records per block.
        window: blocks mixed together at most.
        seed: 0 <= seed < 2**64.
        shuffle: False makes it ``range(count)``.
    """

    def __init__(self, count: int, block_size: int, window: int, seed: int, shuffle: bool) -> None:
        self.count = count
        self.block_size = block_size
        self.seed = seed
        self.shuffle = shuffle
        self.blocks = -(-count // block_size)
        self.windows = -(-self.blocks // window)
        # The first `larger` windows have one block more than the rest.
        self._each, self._larger = divmod(self.blocks, self.windows) if count else (0, 0)
        self._missing = self.blocks * block_size - count
        # Replaced as a whole, never changed: a thread sees an old pair or a new one.
        self._visits: tuple[int, Indices, int] | None = None
        self._mixed: tuple[int, int, Indices] | None = None

    def take(self, epoch: int, start: int, stop: int) -> Indices:
        """The records at places ``start`` to ``stop`` of an epoch's order.

        Args:
            epoch: 0 <= epoch < 2**63.
            start: 0 <= start.
            stop: start <= stop <= count.

        Returns:
            (stop - start,) int64, each in 0 <= record < count.
        """
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        parts = []
        while start < stop:
            window = self.window_at(epoch, start)
            first, end = self.window_range(epoch, window)
            upto = min(stop, end)
            parts.append(self._mix(epoch, window)[start - first : upto - first])
            start = upto
        if len(parts) == 1:
            return parts[0].copy()  # the caller may write to it
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def window_at(self, epoch: int, place: int) -> int:
        """The window that holds a place of the order, 0 <= place < count."""
        _, short = self._visit(epoch)
        # Behind the short block everything lies `missing` places nearer to the start.
        whole = place if place < (short + 1) * self.block_size - self._missing else place + self._missing
        visit = whole // self.block_size
        border = self._larger * (self._each + 1)
        if visit < border:
            return visit // (self._each + 1)
        return self._larger + (visit - border) // self._each

    def window_range(self, epoch: int, window: int) -> tuple[int, int]:
        """The places of the order that a window covers: first, and one behind the last."""
        _, short = self._visit(epoch)
        first, end = (
            visit * self.block_size - (self._missing if visit > short else 0)
            for visit in (self._first_visit(window), self._first_visit(window + 1))
        )
        return first, end

    def blocks_of(self, epoch: int, window: int) -> list[int]:
        """The blocks of a window, in the order of the data."""
        visits, _ = self._visit(epoch)
        blocks: list[int] = np.sort(visits[self._first_visit(window) : self._first_visit(window + 1)]).tolist()
        return blocks

    def survey(self, epoch: int, window: int, count: int) -> Indices:
        """``count`` records of a window, drawn with replacement, without mixing the window. (count,) int64."""
        visits, _ = self._visit(epoch)
        blocks = visits[self._first_visit(window) : self._first_visit(window + 1)]
        drawn = below(np.full(count, len(blocks)), self.seed, epoch, SURVEY, 2 * window)
        sizes = np.minimum(self.block_size, self.count - blocks[drawn] * self.block_size)
        return blocks[drawn] * self.block_size + below(sizes, self.seed, epoch, SURVEY, 2 * window + 1)

    def records_of(self, blocks: Indices) -> Indices:
        """The records of (n,) blocks, (m,) int64."""
        records = (blocks[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        return records[records < self.count]

    def _first_visit(self, window: int) -> int:
        return window * self._each + min(window, self._larger)

    def _visit(self, epoch: int) -> tuple[Indices, int]:
        """The blocks in the order of the visit, and when the last block of the data is visited."""
        known = self._visits
        if known is None or known[0] != epoch:
            visits = permutation(self.blocks, self.seed, epoch, BLOCKS)
            known = (epoch, visits, int(np.argmax(visits == self.blocks - 1)))
            self._visits = known
        return known[1], known[2]

    def _mix(self, epoch: int, window: int) -> Indices:
        """The records of a window, mixed."""
        known = self._mixed
        if known is None or known[:2] != (epoch, window):
            visits, _ = self._visit(epoch)
            records = self.records_of(visits[self._first_visit(window) : self._first_visit(window + 1)])
            known = (epoch, window, records[permutation(len(records), self.seed, epoch, WINDOW, window)])
            self._mixed = known
        return known[2]
