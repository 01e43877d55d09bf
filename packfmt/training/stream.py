"""Samples from records that come one after the other: a queue, a socket, an archive, anything that can be iterated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from packfmt.images.geometry import Crop, Flip
from packfmt.randomness import sample_keys, uniform
from packfmt.record import Record
from packfmt.sampling.ranks import Ranks, whole_number
from packfmt.training.batch import BatchJob
from packfmt.training.collate import Collate
from packfmt.training.epochs import EpochCounter
from packfmt.training.feed import Feed
from packfmt.training.held import HeldRecord, HeldRecords, hold
from packfmt.training.plan import choose, plan_batch
from packfmt.training.pool import DecodePool
from packfmt.training.recipe import Form, Output, Recipe, make_recipe
from packfmt.training.samples import Samples, as_batch, make_batch
from packfmt.training.targets import BoxFrame, TargetForm, TargetOptions, Targets

__all__ = ["ImageStream"]

Item: TypeAlias = "Record | tuple[bytes, Any] | bytes"
Items: TypeAlias = "Iterable[Item] | Callable[[], Iterable[Item]]"

CHUNK = 8  # samples decoded together where they are asked for one by one
DRAWS = 256  # random numbers of the shuffle buffer made at a time
SHUFFLE = 512  # their stream, apart from those of crop and flip


class ImageStream(IterableDataset[Any]):
    """The samples of an iterable of records, also of one without an end: ``(image, target)`` one by one, or batches.

    For records that are in no pack. Their sizes are read from their headers as they come; a random number depends on
    (seed, epoch, position in the stream) only, so a sample has the same pixels for any number of threads, workers and
    ranks. Memory is bounded by ``ahead`` decoded samples (or the batches made ahead) and ``shuffle_buffer`` records.
    The iterable is drawn from in a thread of its own: while it gives nothing, what was read before is still delivered.
    All threads end with the iteration, whether at the end, at an error, or because the loop stopped early; only one
    that waits inside the iterable ends when that gives the next record. Records that were read ahead are then lost.

    With ranks and DataLoader workers, each of these processes goes through the whole stream and takes the records
    whose position, modulo the number of processes, is ``worker * world_size + rank``: none comes twice, and which rank
    gets a record does not depend on the number of workers. Give a function rather than a generator for several epochs,
    or for workers that are not forked, which need to pickle it.

    Each iteration is the next epoch, unless ``set_epoch`` says which; both hold in workers too, if one DataLoader at a
    time goes through the stream.

    Args:
        records: ``Record``\\ s, pairs (bytes, target), or bytes, in an iterable or a function that gives one. Bytes
            must not change afterwards.
        crop, flip, transform, target_transform, transforms, targets, label_offset, boxes, output, sample, mode,
            orientation, fast: as ``ImageDataset``; ``image_id`` is the position in the stream.
        fields: as ``ImageDataset``, of ``Record``\\ s; None takes the pair's target or the column ``label``, else -1.
        threads: that decode; None takes the cores this process may use, shared out among DataLoader workers.
        on_error: "raise" at a record that cannot be decoded or is smaller than the crop, or "skip" it. ``skipped``
            counts, in this process.
        seed: of crop, flip, ``sample_rng`` and the shuffle buffer.
        shuffle_buffer: records held back to be given out in random order; nothing comes before it is full. 0 keeps
            the order.
        rank, world_size: from torch.distributed where neither is given, when an iteration begins; 0 of 1 where
            Accelerate has the stream, which splits by itself.
        partial: "drop" the last few records of the stream, so that all processes get equally many; or "keep" every
            record, so that one rank may get a sample more than another, which hangs DistributedDataParallel at the end
            of a stream. None drops where there are several ranks and the stream splits by positions, else keeps.
        partial_images: as ``partial`` of ``ImageDataset``: decode what is there of a truncated or damaged JPEG.
        split: "positions" as above; "elsewhere" where each process is fed records of its own, by a message broker or
            the like, and takes all it is given.
        ahead: samples decoded ahead of the loop where they are asked for one by one.

    Raises:
        ValueError: an option is not one of those allowed.
    """

    def __init__(
        self,
        records: Items,
        *,
        crop: Crop | None = None,
        flip: Flip | Sequence[Flip] | float | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        fields: str | Sequence[str] | None = None,
        targets: TargetForm = "columns",
        label_offset: int = 0,
        boxes: BoxFrame = "shown",
        output: Output = "tensor",
        sample: Form = "tuple",
        mode: Literal["RGB", "L"] = "RGB",
        orientation: Literal["ignore", "apply"] = "ignore",
        threads: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        seed: int = 0,
        shuffle_buffer: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        partial: Literal["keep", "drop"] | None = None,
        partial_images: bool = False,
        split: Literal["positions", "elsewhere"] = "positions",
        ahead: int = 64,
        fast: bool = False,
    ) -> None:
        if not (isinstance(records, Iterable) or callable(records)):
            raise TypeError(f"records is of type {type(records).__name__}; needed is an iterable or a function")
        if isinstance(partial, bool):
            raise ValueError(
                "partial says what becomes of a stream's last records; truncated images are decoded with "
                "partial_images=True"
            )
        _one_of("partial", partial, ("keep", "drop", None))
        _one_of("split", split, ("positions", "elsewhere"))
        if split == "elsewhere" and partial == "drop":
            raise ValueError("partial='drop' counts positions, which split='elsewhere' does not know")
        self._records = records
        self._wanted = TargetOptions(fields, target_transform, targets, label_offset, boxes, orientation)
        self._plain_recipe = make_recipe(
            HeldRecords((), self._wanted.names or ("label",)),
            crop=crop,
            flip=flip,
            transform=transform,
            transforms=transforms,
            targets=self._wanted,
            output=output,
            sample=sample,
            mode=mode,
            orientation=orientation,
            partial=partial_images,
            fast=fast,
            on_error=on_error,
        )
        self._threads = None if threads is None else whole_number("threads", threads, 1)
        self._shuffle_buffer = whole_number("shuffle_buffer", shuffle_buffer, 0)
        self._ahead = whole_number("ahead", ahead, 1)
        self.seed = whole_number("seed", seed, 0, 2**64 - 1)
        self._ranks = Ranks(rank, world_size)
        self._partial, self._split = partial, split
        self.skipped = 0
        self._epochs = EpochCounter()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._ranks.now("stream")[0]

    @property
    def world_size(self) -> int:
        """The number of ranks that the stream is split over."""
        return self._ranks.now("stream")[1]

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration in this process is."""
        return self._epochs.next(_worker()[0])

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, in this process and in a DataLoader's workers."""
        self._epochs.set(whole_number("epoch", epoch, 0))

    def __iter__(self) -> Iterator[Any]:
        chunk = min(CHUNK, max(1, self._ahead // 4))
        with closing(self._samples(chunk, self._ahead, eager=True)) as parts:
            for samples in parts:
                yield from samples

    def batches(self, batch_size: int, *, prefetch: int = 2, collate: Collate = "stack") -> Iterator[Any]:
        """An epoch as batches ``(images, targets)``, or dicts where ``sample`` says so.

        Each is decoded into one array in the threads, as by ``Loader``.

        Args:
            batch_size: samples per batch; the last may be smaller, and with ``on_error="skip"`` any. None is empty.
            prefetch: batches made ahead, at least 1.
            collate: "stack", "list" or "pad", as ``Loader``.

        Raises:
            DecodeError: a record cannot be decoded, with ``on_error="raise"``; it names position and key.
            Exception: whatever the iterable or ``transform`` raised.
        """
        size = whole_number("batch_size", batch_size, 1)
        _one_of("collate", collate, ("stack", "list", "pad"))
        room = size * whole_number("prefetch", prefetch, 1)
        return self._batches(size, room, collate)

    def _batches(self, size: int, room: int, collate: Collate) -> Iterator[Any]:
        with closing(self._samples(size, room, eager=False, collate=collate)) as parts:
            for samples in parts:
                yield samples.job.product

    def _samples(
        self, chunk: int, room: int, *, eager: bool, collate: Collate | None = None
    ) -> Generator[Samples, None, None]:
        """One epoch, some samples at a time; with ``collate``, as a batch in ``job.product``."""
        worker, workers = _worker()
        epoch = self._epochs.begin(worker)
        pool = DecodePool(self._threads)
        if self._split == "positions":
            self._ranks.heed_splitters("stream")
        rank, world_size = self._ranks.now("stream")
        place, places = worker * world_size + rank, world_size * workers

        def finish(job: BatchJob) -> Any:
            return None if collate is None else as_batch(*make_batch(Samples(job), collate), job.recipe.sample)

        def begin(records: list[HeldRecord]) -> BatchJob:
            recipe = self._recipe(records)
            positions = np.array([record.position for record in records], np.int64)
            chosen = functools.partial(choose, recipe, positions, sample_keys(self.seed, epoch, positions))
            return BatchJob(recipe, positions, functools.partial(plan_batch, recipe, chosen), pool, finish)

        # Where all must get equally many, a record waits until the last process has got its own of the same round.
        even = self._partial == "drop" or (self._partial is None and self._split == "positions" and world_size > 1)
        feed = Feed(self._held(epoch, place, places, even), begin, chunk=chunk, room=max(room, chunk), eager=eager)
        try:
            for job in feed:
                self.skipped += len(job.wait())
                samples = Samples(job)
                if len(samples):
                    yield samples
        finally:
            feed.stop()
            pool.close()

    def _recipe(self, records: list[HeldRecord]) -> Recipe:
        reader = HeldRecords(records, self._wanted.names or ("label",))
        return replace(self._plain_recipe, reader=reader, targets=Targets(reader, self._wanted))

    def _held(self, epoch: int, place: int, places: int, even: bool) -> Generator[HeldRecord, None, None]:
        """This process's records of one epoch, in the order they are given out."""
        items = iter(self._records if isinstance(self._records, Iterable) else self._records())
        try:
            own = self._own(items, place, places, even)
            if self._shuffle_buffer > 1:
                own = _shuffled(own, self._shuffle_buffer, self.seed, epoch)
            yield from own
        finally:
            close = getattr(items, "close", None)
            if close is not None and items is not self._records:  # an iterator of the user's may be gone on with
                close()

    def _own(self, items: Iterator[Any], place: int, places: int, even: bool) -> Generator[HeldRecord, None, None]:
        names = self._wanted.names
        if self._split == "elsewhere":
            # Positions that no other process counts, so that no two share random numbers.
            yield from (hold(item, number * places + place, names) for number, item in enumerate(items))
            return
        turn = places - 1 if even else place
        for position, item in enumerate(items):
            if position % places == place:
                mine = item
            if position % places == turn:
                yield hold(mine, position - turn + place, names)


def _shuffled(records: Iterator[HeldRecord], size: int, seed: int, epoch: int) -> Generator[HeldRecord, None, None]:
    """Each record takes the place of a random one of ``size`` that are held back; those left at the end come last."""
    draws = _draws(seed, epoch)
    held: list[HeldRecord] = []
    for record in records:
        if len(held) < size:
            held.append(record)
            continue
        chosen = int(next(draws) * size)
        held[chosen], record = record, held[chosen]
        yield record
    while held:
        chosen = int(next(draws) * len(held))
        held[chosen], held[-1] = held[-1], held[chosen]
        yield held.pop()


def _draws(seed: int, epoch: int) -> Iterator[float]:
    """Numbers in [0, 1) that depend on seed and epoch."""
    start = 0
    while True:
        keys = sample_keys(seed, epoch, np.arange(start, start + DRAWS))
        yield from (uniform(keys, SHUFFLE)).tolist()
        start += DRAWS


def _worker() -> tuple[int, int]:
    """This DataLoader worker's number and their count."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}, allowed are {', '.join(map(repr, allowed))}")
