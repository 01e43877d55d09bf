"""The loader: batches in the sampler's order, prefetched for the training loop."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Literal, TypeAlias

import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from packfmt.errors import CorruptError
from packfmt.prefetch import prefetched
from packfmt.sampling import BatchSampler, BlockBatchSampler
from packfmt.training.collate import Collate
from packfmt.training.dataset import ImageDataset
from packfmt.training.device import DeviceMover, map_tensors, pinned_array
from packfmt.training.engine import Batch, Batching, BatchTransform, Engine, Request, ThreadEngine
from packfmt.training.process import ProcessEngine
from packfmt.training.stats import LoaderStats, StatsRecorder

__all__ = ["Loader"]

Numbered: TypeAlias = tuple[int, Any]  # the batches of the epoch that are done with this one, and this one

FORMATS = (None, torch.channels_last, torch.contiguous_format)


class Loader:
    """Iterates ``(images, targets)`` over a dataset; each ``iter`` is the next epoch.

    Images are a channels-last (N, C, H, W) uint8 tensor, unless the dataset's transform or ``collate`` make something
    else of them. Batches are dicts where the dataset has ``sample="dict"``. At most ``prefetch`` batches are under way
    beyond the one in the loop's hands, in the sampler's order. The batch that is handed out is the caller's own.

    An error ends the iteration: a record that cannot be decoded, whatever a transform raised, a worker process that
    died. The next ``iter`` is the next epoch all the same, with new processes where old ones died;
    ``load_state_dict(state_dict())`` before it goes on behind the last batch that was handed out. With
    ``on_error="skip"`` a batch without a single good record is passed over, but raises its first error where there are
    several ranks: the others would wait for this one for ever. So does an epoch without a single good record.

    Iterate it in one thread. ``close`` ends its processes; the dataset's threads end with the dataset.

    Args:
        dataset: an ``ImageDataset``, a view of one, or a ``torch.utils.data.Subset`` of it, which becomes a view.
        batch_size: samples per batch and rank. Not with ``sampler``.
        sampler: a packfmt batch sampler, asked for some batches more than ``prefetch``; None makes a
            ``BlockBatchSampler`` from the options after it.
        shuffle, block_size, window, rank, world_size, partial, indices: as ``BlockBatchSampler``.
        seed: of the order; None takes the dataset's. Crops, flips and batch transforms have the dataset's in any case.
        collate: "stack"; "list", for images of differing sizes; "pad", one tensor as large as the largest of them.
        batch_transform: called with each batch's images and targets, and a ``numpy.random.Generator`` keyed by (seed,
            epoch, batch) if it has a third parameter without a default or named ``rng``: ``MixUp``, ``CutMix``, or
            torchvision's. The threads that decode call it, in any order.
        workers: 0 decodes in threads of this process. 1 or more put the threads into that many child processes, for a
            loop that holds the interpreter lock.
        start_method: of child processes: "fork", "spawn", "forkserver", or None for Python's default.
        prefetch: batches begun before the loop asks, at least 1; with workers: for each of them.
        pin_memory: give tensors in page-locked memory. Without CUDA it does nothing.
        device: copy batches there, one ahead of the loop.
        memory_format: ``torch.contiguous_format`` or ``torch.channels_last``, of images that are one tensor. None
            leaves them as they come: channels-last, which is what they are decoded to, unless a transform made others.

    Attributes:
        sampler: gives the batches.
        batch_sampler, batch_size, drop_last, num_workers, pin_memory: as a DataLoader has them, for frameworks.

    Raises:
        TypeError: the dataset is of another kind, or has a ``__getitem__`` of its own, which would not be called; a
            sampler of another kind.
        ValueError: an option is not one of those allowed, or two of them exclude each other.
    """

    def __init__(
        self,
        dataset: ImageDataset | Subset[Any],
        batch_size: int | None = None,
        *,
        sampler: BatchSampler | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        block_size: int | None = None,
        window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        partial: Literal["drop", "pad", "keep"] = "keep",
        indices: npt.ArrayLike | None = None,
        collate: Collate = "stack",
        batch_transform: BatchTransform | None = None,
        workers: int = 0,
        start_method: str | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> None:
        self.dataset = _as_images(dataset)
        if (batch_size is None) == (sampler is None):
            raise ValueError("give the loader a batch_size or a sampler, and not both")
        if sampler is not None and not isinstance(sampler, BatchSampler):
            raise TypeError(f"sampler is a {type(sampler).__name__}, no packfmt batch sampler: use torch's DataLoader")
        if collate not in ("stack", "list", "pad"):
            raise ValueError(f"collate={collate!r}, allowed are 'stack', 'list' and 'pad'")
        if workers < 0 or prefetch < 1:
            raise ValueError(f"workers={workers} must be at least 0 and prefetch={prefetch} at least 1")
        if memory_format not in FORMATS:
            raise ValueError(f"memory_format={memory_format!r}, allowed are {', '.join(map(str, FORMATS))}")
        if sampler is None:
            sampler = BlockBatchSampler(
                self.dataset,
                batch_size or 0,
                shuffle=shuffle,
                seed=self.dataset.seed if seed is None else seed,
                block_size=block_size,
                window=window,
                rank=rank,
                world_size=world_size,
                partial=partial,
                indices=indices,
            )
        elif (
            not shuffle
            or partial != "keep"
            or any(option is not None for option in (seed, block_size, window, rank, world_size, indices))
        ):
            raise ValueError(
                "shuffle, seed, block_size, window, rank, world_size, partial and indices belong to the sampler: give "
                "them to it, or give the loader a batch_size instead of a sampler"
            )
        self.sampler = sampler
        self.pin_memory = pin_memory
        self._how = Batching(collate, batch_transform, memory_format)
        self._workers, self._start_method = workers, start_method
        self._prefetch = prefetch * max(workers, 1)
        self._device = torch.device(device) if device is not None else None
        cuda = torch.cuda.is_available()
        self._pin = cuda and (pin_memory or (self._device is not None and self._device.type == "cuda"))
        self._engine: Engine | None = None
        self._engine_knows = 0  # changes of the dataset
        self._stats = StatsRecorder()
        self._epoch, self._position = sampler.place
        self._heard = sampler.moves
        self._begun = False
        self._run: object = None

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.sampler)

    @property
    def batch_sampler(self) -> BatchSampler:
        """The sampler, which gives batches."""
        return self.sampler

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self.sampler.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self.sampler.partial == "drop"

    @property
    def num_workers(self) -> int:
        """Child processes."""
        return self._workers

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration goes through. The epoch that a loaded state is in keeps its position."""
        if self._begun or epoch != self._epoch:
            self._move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: what it has consumed, not what was prefetched. A few numbers that fit into JSON."""
        self._hear()
        return self.sampler.state_dict(epoch=self._epoch, position=self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken: the next iteration is the rest of its epoch.

        Raises:
            ValueError: the state is of another order.
        """
        self.sampler.load_state_dict(state)
        self._hear()

    def stats(self) -> LoaderStats:
        """Where the time went, since the loader was made or ``reset_stats`` was called."""
        return self._stats.snapshot(self._key)

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

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts processes of its own."""
        return self.__dict__ | {"_engine": None, "_run": None}

    def __iter__(self) -> Iterator[Any]:
        self._hear()
        if self._begun:
            self._move(self._epoch + 1, 0)
        self._begun = True
        run = self._run = object()
        epoch, pid = self._epoch, os.getpid()
        self.dataset.set_epoch(epoch)
        usable = self._usable(self._made(epoch, self._position), whole_epoch=not self._position)
        with closing(usable if self._device is None else self._moved(usable, self._device)) as batches:
            while True:
                numbered = self._awaited(batches)
                if numbered is None:
                    break
                done, batch = numbered
                if self._run is run:
                    self._position = done  # from here on it is the loop's, also before the next one is asked for
                self._stats.leave()
                yield batch
                self._stats.come_back()
                if pid != os.getpid():
                    raise RuntimeError("this iteration began in another process, before a fork; begin one of its own")
        if self._run is run:
            self._move(epoch + 1, 0)

    def _key(self, index: int) -> str:
        try:
            return self.dataset.reader.key(index)
        except (CorruptError, ValueError):  # damaged, or closed meanwhile: statistics go without it
            return f"record {index}"

    def _awaited(self, batches: Iterator[Numbered]) -> Numbered | None:
        """The next batch, counting the time until it is here as waited, but for its transfer."""
        moved, asked = self._stats.times["transfer"], time.perf_counter()
        numbered = next(batches, None)
        moved = self._stats.times["transfer"] - moved
        self._stats.add("wait", time.perf_counter() - asked - moved)
        return numbered

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._begun = epoch, position, False
        self._run = None  # an iteration still under way no longer counts

    def _hear(self) -> None:
        """Follow a sampler that was itself told where to go, as some training frameworks do."""
        if self.sampler.moves != self._heard:
            self._heard = self.sampler.moves
            self._move(*self.sampler.place)

    def _made(self, epoch: int, start: int) -> Generator[tuple[int, Batch], None, None]:
        """The epoch's batches, each begun ``prefetch`` batches before it is given out."""
        engine = self._start_engine()
        begun = engine.handles(self._requests(epoch, start))
        with closing(prefetched(begun, self._prefetch, cancel=engine.cancel)) as handles:
            for done, (handle, waiting) in enumerate(handles, start + 1):
                yield done, self._collect(engine, handle, waiting)

    def _requests(self, epoch: int, start: int) -> Iterator[Request]:
        rank, ranks = self.sampler.rank, self.sampler.world_size
        batches = zip(self.sampler.with_read_ahead(epoch, start), self.sampler.draws(epoch, start), strict=False)
        for number, ((indices, near), draws) in enumerate(batches, start):
            yield Request(epoch, number * ranks + rank, indices, near, draws)

    def _collect(self, engine: Engine, handle: Any, waiting: deque[Any]) -> Batch:
        depth = sum(map(engine.ready, (handle, *waiting)))
        made = engine.collect(handle)
        self._stats.threads, self._stats.workers = engine.threads, self._workers
        self._stats.add_batch(made.samples, made.timing, made.failures, depth)
        if not made.samples and self.sampler.world_size > 1:
            raise made.failures[0]
        return made

    def _usable(self, batches: Iterator[tuple[int, Batch]], whole_epoch: bool) -> Generator[Numbered, None, None]:
        """Those that have samples, pinned if that is wanted."""
        error = None
        for done, made in batches:
            if not made.samples:
                error = error or made.failures[0]
                continue
            whole_epoch = False
            began = time.perf_counter()
            batch = map_tensors(made.batch, torch.Tensor.pin_memory) if self._pin else made.batch
            self._stats.add("transfer", time.perf_counter() - began)
            yield done, batch
        if whole_epoch and error is not None:
            raise error  # not one good record: no few to be skipped, and a loop over nothing would go unnoticed

    def _moved(self, batches: Iterator[Numbered], device: torch.device) -> Generator[Numbered, None, None]:
        """Batches on the device; the copy of the next one has begun before one is used."""
        mover = DeviceMover(device)
        ahead: deque[Any] = deque()
        try:
            for done, batch in batches:
                began = time.perf_counter()
                ahead.append((done, *mover.send(batch)))
                self._stats.add("transfer", time.perf_counter() - began)
                if len(ahead) > 1:
                    done, *sent = ahead.popleft()
                    yield done, mover.receive(*sent)
        except Exception:
            for done, *sent in ahead:  # it comes after those before it
                yield done, mover.receive(*sent)
            raise
        for done, *sent in ahead:
            yield done, mover.receive(*sent)

    def _start_engine(self) -> Engine:
        changed = self._workers and self._engine_knows != self.dataset.changes
        if self._engine is not None and (changed or not self._engine.usable):
            self.close()
        if self._engine is None:
            self._engine_knows = self.dataset.changes
            if self._workers:
                self._engine = ProcessEngine(self.dataset, self._how, self._workers, self._start_method)
            else:
                self._engine = ThreadEngine(self.dataset, self._how, pinned_array if self._pin else None)
        return self._engine


def _as_images(dataset: object) -> ImageDataset:
    """What a loader can read.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(dataset, Subset):
        return _as_images(dataset.dataset).select(dataset.indices)
    kind = type(dataset).__name__
    if not isinstance(dataset, ImageDataset):
        hint = "torch's DataLoader takes any dataset"
        if isinstance(dataset, ConcatDataset):
            hint = "packs are opened as one with packfmt.ImageDataset([path, path])"
        elif isinstance(dataset, IterableDataset):
            hint = "packfmt.ImageStream has batches(batch_size), and torch's DataLoader takes any dataset"
        elif not isinstance(dataset, Dataset):
            hint = "packfmt.ImageDataset(path, crop=packfmt.RandomResizedCrop(224)) makes one of a pack"
        raise TypeError(f"a Loader needs an ImageDataset or a Subset of one, not {dataset!r:.80} ({kind}); {hint}")
    if type(dataset).__getitem__ is not ImageDataset.__getitem__:
        raise TypeError(
            f"{kind} overrides __getitem__, which a Loader does not call; use transform and target_transform, or "
            "torch's DataLoader"
        )
    return dataset
