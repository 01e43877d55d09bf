"""Samples from records that come one after the other: a queue, a socket, an archive, anything that can be iterated.

A thread draws records and has them decoded ahead of the consumer; those of a batch are the reader it is made from.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from packfmt.buffers import as_bytes_like
from packfmt.errors import DecodeError
from packfmt.images.geometry import Crop, Flip
from packfmt.images.sniff import sniff
from packfmt.randomness import sample_keys, uniform
from packfmt.record import Record
from packfmt.sampling.ranks import Ranks, whole_number
from packfmt.storage.base import Indices, LaterPlan, ReadPlan, RecordReader
from packfmt.storage.columns import Columns
from packfmt.training.batch import BatchJob
from packfmt.training.collate import Collate
from packfmt.training.epochs import EpochCounter
from packfmt.training.pipeline import Form, Output, Pipeline, make_pipeline
from packfmt.training.plan import choose, plan_batch
from packfmt.training.pool import DecodePool
from packfmt.training.prefetch import under_its_old_name
from packfmt.training.samples import Samples, as_batch, make_batch
from packfmt.training.targets import NO_LABEL, BoxFrame, TargetForm, TargetOptions, Targets

__all__ = ["ImageStream", "RecordQueue", "StreamRecord", "StreamRecords", "hold"]

BYTES = (bytes, bytearray, memoryview)
PATIENCE = 1.0  # seconds to wait for the thread's end; it may stand in an iterable that gives nothing


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One record of a stream, with what its header says: 0 by 0 pixels where that cannot be read."""

    position: int
    data: bytes | memoryview
    key: str
    values: tuple[Any, ...]
    height: int
    width: int
    orientation: int


def hold(item: Any, position: int, names: Sequence[str] | None) -> StreamRecord:
    """Look at one item of a stream.

    Args:
        item: a ``Record``, a pair of bytes and a target, or bytes.
        position: its place in the stream, counted from 0.
        names: the record's columns that are asked for; None asks for ``label``, or the pair's target.

    Raises:
        TypeError: it is something else.
        ValueError: it has no such column.
    """
    data, key, values = _parts(item, position, names)
    try:
        found = sniff(data)
    except DecodeError:  # decoding will say so, in the batch's order
        return StreamRecord(position, data, key, values, 0, 0, 0)
    return StreamRecord(position, data, key, values, found.height, found.width, found.orientation)


def _parts(item: Any, position: int, names: Sequence[str] | None) -> tuple[bytes | memoryview, str, tuple[Any, ...]]:
    if isinstance(item, Record):
        if names is None:
            return as_bytes_like(item.data), item.key, (item.columns.get("label", NO_LABEL),)
        missing = [name for name in names if name not in item.columns]
        if missing:
            known = ", ".join(item.columns) or "none"
            raise ValueError(f"record {position} of the stream, key {item.key!r}: no columns {missing}; it has {known}")
        return as_bytes_like(item.data), item.key, tuple(_as_in_a_pack(item.columns[name]) for name in names)
    bare = isinstance(item, BYTES)
    if not bare and not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], BYTES)):
        raise TypeError(
            f"record {position} of the stream is of type {type(item).__name__}; allowed are a Record, a pair (bytes, "
            "target), and bytes"
        )
    if names is not None:
        raise ValueError(f"record {position} of the stream has no columns for fields={list(names)}; give Records")
    data, target = (item, NO_LABEL) if bare else item
    return as_bytes_like(data), str(position), (target,)


def _as_in_a_pack(value: Any) -> Any:
    """A list of numbers as the array that a pack would give: batches are to be the same."""
    if isinstance(value, list) and all(isinstance(entry, (int, float, np.number)) for entry in value):
        return np.array(value, None if value else np.int64)
    return value


class StreamRecords(RecordReader):
    """Records in memory, addressed by their positions in the stream. Nothing changes in it, so it is thread-safe.

    A record without a key goes by its position.

    Args:
        records: those of one batch.
        names: of the columns that their ``values`` belong to.
    """

    path = "image stream"

    def __init__(self, records: Sequence[StreamRecord], names: Sequence[str]) -> None:
        self._records = {record.position: record for record in records}
        self._names = tuple(names)
        self.columns = Columns([*self._names, "height", "width", "orientation"], self._column)

    def _column(self, name: str) -> Any:
        records = self._records.values()
        if name in self._names:
            place = self._names.index(name)
            return _Values({record.position: record.values[place] for record in records})
        return _Values({record.position: getattr(record, name) for record in records})

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Indices) -> list[memoryview]:
        """The bytes of several records."""
        return [memoryview(self._records[int(index)].data) for index in indices]

    def plan(self, indices: Indices) -> ReadPlan:
        """All of them."""
        return LaterPlan(self.read, np.asarray(indices, np.int64))

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        """Their sizes in bytes."""
        return np.array([len(data) for data in self.read(indices)], np.uint64)

    def close(self) -> None:
        """Nothing to do: they go with this object."""

    def locate(self, index: int) -> tuple[str, int]:
        """Where a record came from: its position in the stream."""
        return self.path, int(index)

    def key(self, index: int) -> str:
        """The key of one record."""
        return self._records[int(index)].key


class _Values:
    """A column, by the records' positions: numbers come as an array, anything else as a list."""

    def __init__(self, values: dict[int, Any]) -> None:
        self._values = values

    def __getitem__(self, positions: npt.NDArray[np.int64]) -> Any:
        chosen = [self._values[position] for position in positions.tolist()]
        numbers = all(isinstance(value, (int, float, np.number)) and not isinstance(value, bool) for value in chosen)
        return np.array(chosen) if numbers and chosen else chosen


class RecordQueue(Iterator[BatchJob]):
    """Jobs over the records of an iterable, in its order, with at most ``room`` records under way.

    The iterable is drawn from in a thread of its own, so that one that waits keeps nothing back that was read before.
    Errors of the iterable come after the jobs before them. Used by one consumer.

    Args:
        records: the iterable; closed in the thread when that ends.
        begin: starts the decoding of some records.
        chunk: records per job.
        room: records that may be under way, at least ``chunk``.
        eager: begin a smaller job rather than let the consumer wait for a full one.
    """

    def __init__(
        self,
        records: Generator[StreamRecord, None, None],
        begin: Callable[[list[StreamRecord]], BatchJob],
        *,
        chunk: int,
        room: int,
        eager: bool,
    ) -> None:
        self._records = records
        self._begin_job = begin
        self._chunk, self._room, self._eager = chunk, room, eager
        self._changed = threading.Condition()
        self._pending: list[StreamRecord] = []
        self._jobs: deque[BatchJob] = deque()
        self._under_way = 0
        self._error: BaseException | None = None
        self._ended = self._stopped = False
        self._thread = threading.Thread(target=self._read, name="packfmt-stream", daemon=True)
        self._thread.start()

    def __next__(self) -> BatchJob:
        with self._changed:
            while not self._jobs:
                if self._pending and (self._eager or self._ended):
                    self._begin()
                elif self._ended:
                    error, self._error = self._error, None
                    raise error if error is not None else StopIteration
                else:
                    self._changed.wait()
            job = self._jobs.popleft()
            self._under_way -= len(job.indices)
            self._changed.notify()
            return job

    def stop(self) -> None:
        """Drop what is under way and end the thread, which goes on by itself only while its iterable gives nothing."""
        with self._changed:
            self._stopped = True
            for job in self._jobs:
                job.cancel()
            self._jobs.clear()
            self._pending.clear()
            self._changed.notify()
        if self._thread is not threading.current_thread():  # a garbage collection may run anywhere
            self._thread.join(PATIENCE)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            with closing(self._records):
                for record in self._records:
                    if not self._put(record):
                        break
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify()

    def _put(self, record: StreamRecord) -> bool:
        """Take a record as soon as there is room; False when nobody wants it any more."""
        with self._changed:
            while self._under_way >= self._room and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return False
            self._pending.append(record)
            self._under_way += 1
            if len(self._pending) >= self._chunk:
                self._begin()
            self._changed.notify()
            return True

    def _begin(self) -> None:
        records, self._pending = self._pending, []
        self._jobs.append(self._begin_job(records))


Item: TypeAlias = "Record | tuple[bytes, Any] | bytes"
Items: TypeAlias = "Iterable[Item] | Callable[[], Iterable[Item]]"

CHUNK = 8  # samples decoded together where they are asked for one by one
DRAWS = 256  # random numbers of the shuffle buffer made at a time
SHUFFLE = 512  # their stream, apart from those of crop and flip


class ImageStream(IterableDataset[Any]):
    """The samples of an iterable of records, also of one without an end: ``(image, target)`` one by one, or batches.

    For records that are in no pack. Their sizes are read from their headers as they come; a random number depends on
    (seed, epoch, position in the stream) only, so a sample has the same pixels for any number of threads, workers and
    ranks. Memory is bounded by ``prefetch`` decoded samples (or batches) and ``shuffle_buffer`` records.
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
        prefetch: samples decoded ahead of the loop where they are asked for one by one.
        ahead: the old name of ``prefetch``, with a DeprecationWarning.

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
        prefetch: int = 64,
        fast: bool = False,
        ahead: int | None = None,
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
        self._plain_pipeline = make_pipeline(
            StreamRecords((), self._wanted.names or ("label",)),
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
        self._prefetch = whole_number("prefetch", under_its_old_name("ahead", ahead, prefetch), 1)
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
        chunk = min(CHUNK, max(1, self._prefetch // 4))
        with closing(self._samples(chunk, self._prefetch, eager=True)) as parts:
            for samples in parts:
                yield from samples

    def batches(self, batch_size: int, *, prefetch: int = 2, collate: Collate = "stack") -> Iterator[Any]:
        """An epoch as batches ``(images, targets)``, or dicts where ``sample`` says so.

        Each is decoded into one array in the threads, as by ``Loader``.

        Args:
            batch_size: samples per batch; the last may be smaller, and with ``on_error="skip"`` any. None is empty.
            prefetch: batches decoded ahead, at least 1.
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
            return None if collate is None else as_batch(*make_batch(Samples(job), collate), job.pipeline.sample)

        def begin(records: list[StreamRecord]) -> BatchJob:
            pipeline = self._pipeline(records)
            positions = np.array([record.position for record in records], np.int64)
            chosen = functools.partial(choose, pipeline, positions, sample_keys(self.seed, epoch, positions))
            return BatchJob(pipeline, positions, functools.partial(plan_batch, pipeline, chosen), pool, finish)

        # Where all must get equally many, a record waits until the last process has got its own of the same round.
        even = self._partial == "drop" or (self._partial is None and self._split == "positions" and world_size > 1)
        records = self._held(epoch, place, places, even)
        feed = RecordQueue(records, begin, chunk=chunk, room=max(room, chunk), eager=eager)
        try:
            for job in feed:
                self.skipped += len(job.wait())
                samples = Samples(job)
                if len(samples):
                    yield samples
        finally:
            feed.stop()
            pool.close()

    def _pipeline(self, records: list[StreamRecord]) -> Pipeline:
        reader = StreamRecords(records, self._wanted.names or ("label",))
        return replace(self._plain_pipeline, reader=reader, targets=Targets(reader, self._wanted))

    def _held(self, epoch: int, place: int, places: int, even: bool) -> Generator[StreamRecord, None, None]:
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

    def _own(self, items: Iterator[Any], place: int, places: int, even: bool) -> Generator[StreamRecord, None, None]:
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


def _shuffled(records: Iterator[StreamRecord], size: int, seed: int, epoch: int) -> Generator[StreamRecord, None, None]:
    """Each record takes the place of a random one of ``size`` that are held back; those left at the end come last."""
    draws = _draws(seed, epoch)
    held: list[StreamRecord] = []
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
