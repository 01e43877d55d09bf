"""Indices that know what their random numbers depend on: the epoch, the draw, and whose key they use."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from packfmt.sampling.ranks import Indices

__all__ = ["ONCE", "Draws", "Repeats", "SampleIndex", "Upcoming", "draw_numbers", "draws_of", "join_draws", "repeats"]


class SampleIndex(int):
    """An index that knows the epoch it was drawn for, which draw of the record in that epoch it is, and its key.

    A dataset in a worker process is a copy that the training loop does not reach, so these travel with the indices. It
    is an int in every other respect. Adding or subtracting an integer keeps them, so that they survive ConcatDataset
    and other wrappers that shift indices; all other arithmetic gives plain ints. All indices of a batch carry them, not
    only the first, so that a dataset that is wrapped and asked one index at a time sees them too: for 256 indices that
    costs 70 µs, and 200 µs more to pickle and unpickle, against hundreds of milliseconds to decode them.

    Attributes:
        epoch: that it was drawn for.
        draw: how often the record was drawn before in this epoch.
        source: the index whose key the sample uses, None for its own. The frames of a clip share one. It is a number of
            the sampler's, which shifting the index leaves alone: so a clip has one key wherever its frames lie.
    """

    # int allows no __slots__ with entries, so they lie in the instance's dict, or in the class's where they are rare.
    epoch: int
    draw: int = 0
    source: int | None = None

    def __new__(cls, value: int, epoch: int, draw: int = 0, source: int | None = None) -> SampleIndex:
        self = int.__new__(cls, value)
        self.epoch = epoch
        if draw:
            self.draw = draw
        if source is not None:
            self.source = source
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.draw or self.source is not None:
            return (SampleIndex, (int(self), self.epoch, self.draw, self.source))
        return (SampleIndex, (int(self), self.epoch))

    def __add__(self, other: Any) -> Any:
        return self._shifted(int.__add__, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._shifted(int.__sub__, other)

    def _shifted(self, shift: Any, other: Any) -> Any:
        try:
            offset = operator.index(other)
        except TypeError:
            return NotImplemented
        return SampleIndex(shift(int(self), offset), self.epoch, self.draw, self.source)


class Draws(NamedTuple):
    """What ``SampleIndex`` carries beside the epoch, for a batch of n indices.

    Args:
        numbers: (n,) int64, how often each record was drawn before in the epoch; None where each is drawn once.
        sources: (n,) int64, the indices whose keys are used; None where all use their own.
    """

    numbers: Indices | None = None
    sources: Indices | None = None

    def name(self) -> bytes:
        """Bytes that tell them from others for the same indices."""
        return b"|".join(b"" if each is None else each.tobytes() for each in self)


ONCE = Draws()


class Upcoming(tuple[int, Indices]):
    """A batch that is announced: the pair (epoch, indices), with ``draws`` for datasets that look for them."""

    draws: Draws

    def __new__(cls, epoch: int, indices: Indices, draws: Draws = ONCE) -> Upcoming:
        self = tuple.__new__(cls, (epoch, indices))
        self.draws = draws
        return self


def draws_of(indices: Sequence[Any]) -> Draws:
    """Those that the indices of a batch carry."""
    numbers = [getattr(index, "draw", 0) for index in indices]
    sources = [getattr(index, "source", None) for index in indices]
    if sources.count(None) == len(sources):
        return Draws(np.array(numbers, dtype=np.int64)) if any(numbers) else ONCE
    own = [index if source is None else source for index, source in zip(indices, sources, strict=True)]
    return Draws(np.array(numbers, dtype=np.int64), np.array(own, dtype=np.int64))


def join_draws(batches: Sequence[Indices], draws: Sequence[Draws]) -> Draws:
    """Those of some batches as of one."""
    if all(each is ONCE for each in draws):
        return ONCE
    pairs = list(zip(batches, draws, strict=True))
    numbers = [np.zeros(len(batch), np.int64) if each.numbers is None else each.numbers for batch, each in pairs]
    sources = [batch if each.sources is None else each.sources for batch, each in pairs]
    return Draws(np.concatenate(numbers), np.concatenate(sources))


Repeats = tuple[Indices, Indices]  # of (n,) indices: how often each comes before, and how often it comes at all


def repeats(indices: Indices) -> Repeats | None:
    """How often each index comes before, and how often it comes at all; None where none comes twice.

    Args:
        indices: (n,) int64, in any order.

    Returns:
        Two of (n,) int64, or None.
    """
    order = np.argsort(indices, kind="stable")
    ascending = indices[order]
    starts = np.flatnonzero(np.append(True, ascending[1:] != ascending[:-1])) if len(indices) else order
    if len(starts) == len(indices):
        return None
    sizes = np.diff(np.append(starts, len(indices)))
    before, total = np.empty((2, len(indices)), dtype=np.int64)
    before[order] = np.arange(len(indices)) - np.repeat(starts, sizes)
    total[order] = np.repeat(sizes, sizes)
    return before, total


def draw_numbers(places: Indices, again: Repeats | None, filled: int = 0) -> Indices | None:
    """Which draw of its record each place of a batch is; None where all are the first.

    Args:
        places: (n,) int64 places of an epoch's order. The last ``filled`` repeat the epoch's first ones, to fill up the
            batch; where even those are too few, several times over.
        again: of the records in the places of the order, where any comes twice.
        filled: 0 <= filled <= n.

    Returns:
        (n,) int64, or None.
    """
    if again is None and not filled:
        return None
    numbers = np.zeros(len(places), dtype=np.int64) if again is None else again[0][places]
    if filled:
        fill = places[len(places) - filled :]
        rounds = repeats(fill)
        times = 1 + (rounds[0] if rounds is not None else np.zeros(filled, dtype=np.int64))
        numbers[len(places) - filled :] += times * (1 if again is None else again[1][fill])
    return numbers
