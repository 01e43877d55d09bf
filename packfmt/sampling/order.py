"""What all samplers share: batches as a pure function of (epoch, position), and the stream a DataLoader draws from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from packfmt.prefetch import prefetched
from packfmt.sampling.dataset import labels_of, readahead_of, record_bytes_of, tell_epoch
from packfmt.sampling.quality import OrderQuality, measure
from packfmt.sampling.ranks import Indices, Ranks, share, split_by, warn_user, whole_number
from packfmt.sampling.sampleindex import ONCE, Draws, SampleIndex, Upcoming

__all__ = ["NONE", "BatchSampler", "Partial"]

Partial = Literal["drop", "pad", "keep"]
NONE = np.empty(0, dtype=np.int64)  # no records to read ahead

STATE_VERSION = 1
_SPAN = 32  # batches that are looked at together for their locality where there are no windows
_SPANS = 4


class BatchSampler(ABC):
    """Batches of record indices, for ``DataLoader(dataset, batch_sampler=sampler)`` and for ``packfmt.Loader``.

    Global batches of ``batch_size * world_size`` samples are made first and then split over the ranks, each taking a
    contiguous part. So the n-th global batch holds the same samples for every world size, all ranks have the same
    number of batches, and a run may go on with another number of ranks if it keeps the product.

    The last global batch of an epoch (for samplers by group: of a group) may be short. ``partial`` says what becomes
    of it:

    - "keep", the default as in DataLoader: nothing is lost, nothing repeated. It is split as evenly as possible. Only
      where it has fewer samples than there are ranks, some of them are given to a second rank, since a rank without a
      batch would hang DistributedDataParallel; ``repeated`` tells how many. Evaluate with one rank, or where
      ``repeated`` is 0, for exact metrics.
    - "drop": it is left out, all batches are full.
    - "pad": it is filled up with samples from the start of the epoch (of the group), all batches are full.

    As an iterator it is a stream of epochs: each ``iter`` goes through the next epoch, unless ``set_epoch`` says
    which one. It yields lists of ``SampleIndex``. Where the dataset (or a Subset's) has ``set_epoch`` it is told that,
    and where it has ``announce(upcoming)`` and a ``prefetch`` above 0, each batch is announced to it once, in order,
    as ``(epoch, indices)`` with an int64 array, ``prefetch`` batches before it is yielded. The announcements go to
    the dataset in this process: one that is read in workers only should not act on them. The dataset's reader is asked
    for the blocks of ``read_ahead`` here, for whichever process will read them.

    Ranks that are not given are those of torch.distributed whenever batches, their number or a state are asked for, so
    that a sampler may be made, and its length asked for, before the process group is. Where Accelerate's ``prepare`` or
    a ``DistributedSampler`` around this one deals batches out over the ranks, this one leaves that to it.

    ``batch``, ``batches`` and ``global_batch`` are pure functions of their arguments and the ranks, and thread-safe.
    Iterating, ``set_epoch`` and the state belong to one thread.

    Attributes:
        batch_size, seed, partial: as given.
        moves: times that it was told where to go on.
    """

    _LATER: ClassVar[dict[str, int]] = {}
    """What states of earlier versions lack: an entry of ``_identity`` and its value in them."""

    def __init__(
        self, dataset: object, batch_size: int, *, seed: int, rank: int | None, world_size: int | None, partial: Partial
    ) -> None:
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed = whole_number("seed", seed, 0, 2**64 - 1)
        self._ranks = Ranks(rank, world_size)
        self._rank, self._world_size = self._ranks.now()
        if partial not in get_args(Partial):
            raise ValueError(f"partial must be 'drop', 'pad' or 'keep', got {partial!r}")
        self.partial: Partial = partial
        self._repeated = 0
        self._dataset = dataset
        self._length = 0
        self._epoch = 0
        self._position = 0
        self._claimed = False
        self._run: object = None
        self.moves = 0

    @property
    def rank(self) -> int:
        """This process's rank."""
        self._settle()
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks that global batches are split over."""
        self._settle()
        return self._world_size

    @property
    def global_batch_size(self) -> int:
        """Samples per batch over all ranks."""
        self._settle()
        return self._global_size

    @property
    def repeated(self) -> int:
        """Samples given out twice per epoch, over all ranks."""
        self._settle()
        return self._repeated

    @property
    def drop_last(self) -> bool:
        """Whether short batches are left out, for Accelerate, which completes them otherwise.

        Nobody else finds it: Lightning would take what has it for a sampler that it can build anew, and fail.

        Raises:
            AttributeError: somebody else asks.
        """
        if split_by() is None:
            raise AttributeError(f"{type(self).__name__} has no drop_last; partial is {self.partial!r}")
        self._ranks.heed_splitters("sampler")
        return self.partial == "drop"

    @property
    def _global_size(self) -> int:
        return self.batch_size * self._world_size

    def _settle(self) -> None:
        """Be what the ranks of this moment ask for."""
        ranks = self._ranks.now("sampler")
        if ranks != (self._rank, self._world_size):
            split = ranks[1] != self._world_size
            self._rank, self._world_size = ranks
            if split:
                self._arrange()
                self._position = 0  # of other batches

    @abstractmethod
    def _arrange(self) -> None:
        """Find out all that depends on the number of ranks, of which ``_count_batches`` is a part."""

    def _count_batches(self, sizes: npt.ArrayLike) -> None:
        """Fix the number of batches, given the number of samples of each group that is cut into batches on its own."""
        full, tails = np.divmod(np.asarray(sizes, dtype=np.int64), self._global_size)
        tails = tails[tails > 0]
        self._length = int(full.sum()) + (0 if self.partial == "drop" else len(tails))
        if self.partial == "pad":
            self._repeated = int((self._global_size - tails).sum())
        elif self.partial == "keep":
            self._repeated = int(np.maximum(self._world_size - tails, 0).sum())
        if not self._length and len(tails):
            warn_user(
                f"no global batch of {self._global_size} samples ({self.batch_size} for each of {self._world_size} "
                f"ranks) can be filled and partial='drop' leaves out all others, so there are no batches; use "
                "partial='keep', or a smaller batch_size"
            )

    @abstractmethod
    def global_batch(self, epoch: int, position: int) -> Indices:
        """The samples of all ranks at one position of an epoch, before they are split.

        Args:
            epoch: 0 <= epoch < 2**63.
            position: 0 <= position < len(self).

        Returns: (n,) int64 indices, n <= global_batch_size; (n, length) where samples are sequences.
        """

    def global_draws(self, epoch: int, position: int) -> Draws:
        """Which draw of its record each sample of a global batch is, and whose key it uses, in the same shape.

        Args:
            epoch: 0 <= epoch < 2**63.
            position: 0 <= position < len(self).
        """
        return ONCE

    @abstractmethod
    def _identity(self) -> dict[str, int | str]:
        """What the order depends on: a state resumes only where all of it is equal."""

    @abstractmethod
    def _population(self) -> Indices | int:
        """The records that are sampled, or their number where it is all of them."""

    def __len__(self) -> int:
        """The number of batches per epoch, the same for every rank and epoch."""
        self._ranks.heed_splitters("sampler")
        self._settle()
        return self._length

    def batch(self, epoch: int, position: int) -> Indices:
        """This rank's part of one global batch.

        Args:
            epoch: 0 <= epoch < 2**63.
            position: 0 <= position < len(self).

        Returns:
            (n,) int64 indices, 1 <= n <= batch_size.

        Raises:
            IndexError: the epoch has no such batch.
        """
        self._settle()
        if not 0 <= position < self._length:
            raise IndexError(f"an epoch has {self._length} batches, asked for {position}")
        return self._mine(self.global_batch(epoch, position))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """This rank's batches of an epoch, from position ``start`` on; it changes no state.

        Starting late costs no more than starting at 0.

        Args:
            epoch: 0 <= epoch < 2**63.
            start: 0 <= start <= len(self).

        Raises:
            ValueError: epoch or start is out of range.
        """
        self._settle()
        epoch = whole_number("epoch", epoch, 0)
        start = whole_number("start", start, 0, self._length)
        return (self.batch(epoch, position) for position in range(start, self._length))

    def read_ahead(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """For each of ``batches(epoch, start)``, records of later batches whose reading should begin with it.

        ``reader.will_need_blocks`` takes them. Samplers that do not read by blocks have none.

        Returns:
            (n,) int64 indices for each batch; often n is 0.
        """
        self._settle()
        return repeat(NONE, self._length - start)

    def with_read_ahead(self, epoch: int, start: int = 0) -> Iterator[tuple[Indices, Indices]]:
        """Pairs of ``batches(epoch, start)`` and ``read_ahead(epoch, start)``."""
        return zip(self.batches(epoch, start), chain(self.read_ahead(epoch, start), repeat(NONE)), strict=False)

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draws]:
        """For each of ``batches(epoch, start)``, which draw of its record each sample is, and whose key it uses."""
        self._settle()
        for position in range(start, self._length):
            draws = self.global_draws(epoch, position)
            yield ONCE if draws is ONCE else Draws(*(None if part is None else self._mine(part) for part in draws))

    def _mine(self, rows: Indices) -> Indices:
        return share(rows, self._rank, self._world_size).ravel()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration goes through, from its start.

        Naming the epoch at which a loaded state stopped keeps the position: a loop may call it in every round.
        """
        epoch = whole_number("epoch", epoch, 0)
        self.moves += 1
        if self._claimed or epoch != self._epoch:
            self._move(epoch, 0)

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the position in it where the next iteration starts."""
        return (self._epoch + 1, 0) if self._claimed else (self._epoch, self._position)

    def state_dict(self, *, epoch: int | None = None, position: int | None = None) -> dict[str, int | str]:
        """Where the stream stands, as a few numbers that fit into JSON.

        The count is of global batches, so that another world size with the same global batch can go on from it. It
        counts what was yielded: a DataLoader with workers runs ahead of the training loop, so there pass the epoch
        and the number of batches the loop has finished. At the end of an epoch the state is the start of the next
        one.

        Args:
            epoch: the epoch instead of the current one; goes together with ``position``.
            position: batches of it that are done, 0 <= position <= len(self).

        Raises:
            ValueError: only one of the two is given, or one is out of range.
        """
        if (epoch is None) != (position is None):
            raise ValueError(f"epoch and position go together, got epoch={epoch!r} and position={position!r}")
        self._settle()
        if epoch is None or position is None:
            epoch, position = self._epoch, self._position
        epoch, position = self._next(
            whole_number("epoch", epoch, 0), whole_number("position", position, 0, self._length)
        )
        return {"version": STATE_VERSION, "epoch": epoch, "position": position, **self._full_identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken: the next iteration is the rest of its epoch, the one after that a whole epoch.

        Raises:
            ValueError: the state is none, or of a sampler that makes other batches; this sampler is unchanged.
        """
        self._settle()
        expected: dict[str, int | str] = {"version": STATE_VERSION, **self._full_identity()}
        if "version" in state:
            state = {**self._LATER, **state}
        for name, mine in expected.items():
            if name not in state:
                raise ValueError(f"the state has no {name!r}; it is none of {type(self).__name__}.state_dict()")
            if state[name] != mine:
                raise ValueError(
                    f"the state was taken with {name} {state[name]!r}, this sampler has {mine!r}; build the sampler "
                    "as it was (batch_size * world_size must be the same), or start without the state"
                )
        epoch = whole_number("the state's epoch", state.get("epoch"), 0)
        position = whole_number("the state's position", state.get("position"), 0, self._length)
        self.moves += 1
        self._move(*self._next(epoch, position))

    def quality(self, labels: npt.ArrayLike | None = None, *, epoch: int = 0) -> OrderQuality:
        """Measure how well the order mixes and how contiguous its reads are, on a sample of an epoch.

        Args:
            labels: (n,) label of every record of the data; the dataset's own where none are given.
            epoch: the epoch to look at.

        Raises:
            ValueError: ``labels`` is not one-dimensional.
        """
        self._settle()
        known = labels_of(self._dataset) if labels is None else np.asarray(labels)
        if known is not None and known.ndim != 1:
            raise ValueError(f"labels must have shape (n,), got {known.shape}")
        starts = np.unique(np.linspace(0, max(0, self._length - _SPAN), _SPANS).astype(np.int64)).tolist()
        spans = [
            [self.global_batch(epoch, place).ravel() for place in range(start, min(start + _SPAN, self._length))]
            for start in (starts if self._length else [])
        ]
        in_use = self._in_use(epoch) or [np.concatenate(span) for span in spans]
        return measure(spans, in_use, self._population(), known, record_bytes_of(self._dataset))

    def _in_use(self, epoch: int) -> list[Indices]:
        """The records of a few windows; empty where there are no windows and the batches of a span stand for one."""
        return []

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        # The first `next` claims the epoch: a DataLoader with workers makes iterators that it never uses.
        self._ranks.heed_splitters("sampler")
        self._settle()
        epoch, start = self.place
        self._move(epoch, start)
        self._claimed = True
        run = self._run
        tell_epoch(self._dataset, epoch)
        for done, (batch, draws) in enumerate(self._announced(epoch, start), start + 1):
            if self._run is run:
                self._position = done
            yield _sample_indices(epoch, batch, draws)

    def _announced(self, epoch: int, start: int) -> Iterator[tuple[Indices, Draws]]:
        """The rest of an epoch, each batch announced to the dataset ahead of time."""
        announce = getattr(self._dataset, "announce", None)
        prefetch = int(getattr(self._dataset, "prefetch", 0)) if announce is not None else 0
        read_ahead = readahead_of(self._dataset)

        def begun() -> Iterator[tuple[Indices, Draws]]:
            for (batch, near), draws in zip(self.with_read_ahead(epoch, start), self.draws(epoch, start), strict=False):
                read_ahead(near)
                if announce is not None and prefetch > 0:
                    announce(Upcoming(epoch, batch, draws))
                yield batch, draws

        for batch, _ in prefetched(begun(), prefetch):
            yield batch

    def _next(self, epoch: int, position: int) -> tuple[int, int]:
        """The same place, with the end of an epoch written as the start of the next."""
        return (epoch + 1, 0) if position and position == self._length else (epoch, position)

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._claimed = epoch, position, False
        self._run = object()  # an iterator still under way no longer counts

    def _full_identity(self) -> dict[str, int | str]:
        return {
            "sampler": type(self).__name__,
            "seed": self.seed,
            "global_batch": self._global_size,
            "partial": self.partial,
            **self._identity(),
        }


def _sample_indices(epoch: int, batch: Indices, draws: Draws) -> list[SampleIndex]:
    if draws is ONCE:
        return [SampleIndex(index, epoch) for index in batch.tolist()]
    numbers = repeat(0) if draws.numbers is None else draws.numbers.tolist()
    sources = repeat(None) if draws.sources is None else draws.sources.tolist()
    return [
        SampleIndex(index, epoch, number, source)
        for index, number, source in zip(batch.tolist(), numbers, sources, strict=False)
    ]
