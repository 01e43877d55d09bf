"""The loader: batches in the sampler's order, made ahead of the training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import torch

from packfmt.sampling import BatchSampler, BlockBatchSampler
from packfmt.training.collate import Collate
from packfmt.training.dataset import ImageDataset
from packfmt.training.engine import Engine, Made, Mix, Request, ThreadEngine
from packfmt.training.stats import LoaderStats, StatsRecorder
from packfmt.training.transfer import DeviceMover, map_tensors, pinned_array
from packfmt.training.worker import ProcessEngine

__all__ = ["Loader"]


class Loader:
    """Iterates ``(images, targets)`` over a dataset; each ``iter`` is the next epoch.

    Images are a channels-last (N, C, H, W) uint8 tensor, unless the dataset's transform or ``collate`` make something
    else of them. At most ``prefetch`` batches are under way beyond the one in the loop's hands, in the sampler's order.
    The batch that is handed out is the caller's own.

    Args:
        dataset: an ``ImageDataset``.
        batch_size: samples per batch and rank. Not with ``sampler``.
        sampler: a packfmt batch sampler; None makes a ``BlockBatchSampler`` from the options after it.
        shuffle, seed, block_size, window, rank, world_size, partial: as ``BlockBatchSampler``.
        collate: "stack"; "list", for images of differing sizes; "pad", one tensor as large as the largest of them.
        batch_transform: called with each batch's images and targets, and a ``numpy.random.Generator`` keyed by (seed,
            epoch, batch) if it takes three arguments: ``MixUp``, ``CutMix``, or torchvision's.
        workers: 0 decodes in threads of this process. 1 or more put the threads into that many child processes, for a
            loop that holds the interpreter lock.
        start_method: of child processes: "fork", "spawn", "forkserver", or None for Python's default.
        prefetch: batches made ahead, at least 1 (with workers: for each).
        pin_memory: give tensors in page-locked memory. Without CUDA it does nothing.
        device: copy batches there, one ahead of the loop.

    Raises:
        ValueError: an option is not one of those allowed, or two of them exclude each other.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int | None = None,
        *,
        sampler: BatchSampler | None = None,
        shuffle: bool = True,
        seed: int = 0,
        block_size: int | None = None,
        window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        partial: Literal["drop", "pad", "keep"] = "keep",
        collate: Collate = "stack",
        batch_transform: Mix | None = None,
        workers: int = 0,
        start_method: str | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if (batch_size is None) == (sampler is None):
            raise ValueError("give the loader a batch_size or a sampler, and not both")
        if collate not in ("stack", "list", "pad"):
            raise ValueError(f"collate={collate!r}, allowed are 'stack', 'list' and 'pad'")
        if workers < 0 or prefetch < 1:
            raise ValueError(f"workers={workers} must be at least 0 and prefetch={prefetch} at least 1")
        self.dataset = dataset
        if sampler is None:
            sampler = BlockBatchSampler(
                dataset,
                batch_size or 0,
                shuffle=shuffle,
                seed=seed,
                block_size=block_size,
                window=window,
                rank=rank,
                world_size=world_size,
                partial=partial,
            )
        self.sampler = sampler
        self._collate: Collate = collate
        self._batch_transform = batch_transform
        self._workers, self._start_method = workers, start_method
        self._prefetch = prefetch * max(workers, 1)
        self._device = torch.device(device) if device is not None else None
        cuda = torch.cuda.is_available()
        self._pin = cuda and (pin_memory or (self._device is not None and self._device.type == "cuda"))
        self._engine: Engine | None = None
        self._stats = StatsRecorder()
        self._epoch, self._position = sampler.place
        self._begun = False

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration goes through. The epoch that a loaded state is in keeps its position."""
        if self._begun or epoch != self._epoch:
            self._epoch, self._position, self._begun = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: what it has consumed, not what was made ahead. A few numbers that fit into JSON."""
        return self.sampler.state_dict(epoch=self._epoch, position=self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken: the next iteration is the rest of its epoch.

        Raises:
            ValueError: the state is of another order.
        """
        self.sampler.load_state_dict(state)
        self._epoch, self._position = self.sampler.place
        self._begun = False

    def stats(self) -> LoaderStats:
        """Where the time went, since the loader was made or ``reset_stats`` was called."""
        return self._stats.snapshot()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._stats = StatsRecorder()

    def close(self) -> None:
        """End worker processes, if any. Iterating again starts new ones."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if self._begun:
            self._epoch, self._position = self._epoch + 1, 0
        self._begun = True
        epoch = self._epoch
        self.dataset.set_epoch(epoch)
        batches = self._moved(self._made(epoch, self._position))
        stats = self._stats
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            stats.add("wait", time.perf_counter() - asked)
            if batch is None:
                break
            self._position += 1  # from here on it is the loop's, also in a state taken before the next is asked for
            stats.leave()
            yield batch
            stats.come_back()
        if (self._epoch, self._begun) == (epoch, True):
            self._epoch, self._position, self._begun = epoch + 1, 0, False

    def _made(self, epoch: int, start: int) -> Iterator[Made]:
        """The epoch's batches, each asked for ``prefetch`` ahead."""
        engine = self._start_engine()
        tickets: deque[Any] = deque()
        try:
            for number, indices in enumerate(self.sampler.batches(epoch, start), start):
                unique = number * self.sampler.world_size + self.sampler.rank
                tickets.append(engine.request(Request(epoch, unique, indices)))
                if len(tickets) > self._prefetch:
                    yield self._collect(engine, tickets)
            while tickets:
                yield self._collect(engine, tickets)
        finally:
            for ticket in tickets:
                engine.cancel(ticket)

    def _collect(self, engine: Engine, tickets: deque[Any]) -> Made:
        depth = sum(map(engine.ready, tickets))
        made = engine.collect(tickets.popleft())
        self._stats.threads = engine.threads
        self._stats.add_batch(made.samples, made.timing, made.keys, made.skipped, depth)
        return made

    def _moved(self, batches: Iterator[Made]) -> Iterator[tuple[Any, Any]]:
        """Batches where the loop wants them; with a device, the copy of the next one has begun before this is used."""
        if self._device is None:
            for made in batches:
                yield self._pinned(made)
            return
        mover = DeviceMover(self._device)
        ahead: deque[Any] = deque()
        for made in batches:
            began = time.perf_counter()
            ahead.append(mover.send(self._pinned(made)))
            self._stats.add("transfer", time.perf_counter() - began)
            if len(ahead) > 1:
                yield mover.receive(*ahead.popleft())
        while ahead:
            yield mover.receive(*ahead.popleft())

    def _pinned(self, made: Made) -> tuple[Any, Any]:
        batch = (made.images, made.targets)
        return map_tensors(batch, torch.Tensor.pin_memory) if self._pin else batch

    def _start_engine(self) -> Engine:
        if self._engine is None:
            if self._workers:
                self._engine = ProcessEngine(
                    self.dataset, self._collate, self._batch_transform, self._workers, self._start_method
                )
            else:
                allocate = pinned_array if self._pin else None
                self._engine = ThreadEngine(self.dataset, self._collate, self._batch_transform, allocate)
        return self._engine
