"""One batch on its way from record bytes to samples, worked on in the pool's threads, a chunk at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.errors import CorruptError, DecodeError
from packfmt.randomness import sampling
from packfmt.storage.base import ReadPlan
from packfmt.training.pipeline import Pipeline
from packfmt.training.plan import Plan, add_note
from packfmt.training.pool import Pool
from packfmt.training.resize import flipped

__all__ = ["BatchJob", "ChunkRecords", "Timing"]


class ChunkRecords:
    """Record bytes one by one; no bytes for a damaged record.

    All are read and checked at first. Between two images it took longer, by a hundredth of decoding photos: an image
    drives from the processor's cache what the next reading needs.

    Args:
        plan: of the batch.
        start, stop: the chunk's positions in it.
        failures: takes the errors of damaged records by their positions.

    Attributes:
        seconds: spent on reading and checking.
        slowest: the longest time between two askings, in seconds, and the place of the record that was in work then.
    """

    def __init__(self, plan: ReadPlan, start: int, stop: int, failures: dict[int, Exception]) -> None:
        began = time.perf_counter()
        self._records = _read(plan, start, stop, failures)
        self.seconds = time.perf_counter() - began
        self.slowest = (0.0, 0)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[memoryview]:
        clock = time.perf_counter
        slowest, which = self.slowest
        asked = clock()
        for place, record in enumerate(self._records):
            yield record
            before, asked = asked, clock()
            if asked - before > slowest:  # at once: a list of times to look through later costs twice as much
                slowest, which = asked - before, place
        self.slowest = slowest, which


def _read(plan: ReadPlan, start: int, stop: int, failures: dict[int, Exception]) -> list[memoryview]:
    with suppress(CorruptError):
        return list(plan.views(start, stop))
    records: list[memoryview] = []
    for position in range(start, stop):  # to find each that is damaged
        try:
            records.extend(plan.views(position, position + 1))
        except CorruptError as error:
            failures[position] = error.with_traceback(None)
            records.append(memoryview(b""))
    return records


Pixels = npt.NDArray[np.uint8]

MAX_CHUNK = 32  # images that a thread takes at a time: enough that taking them costs nothing
PIECES = 4  # for each thread, of a batch that no other waits behind
SLOW_SAMPLES = 3  # of a batch that are remembered


@dataclass(slots=True)
class Timing:
    """Seconds that a batch took, summed over threads, and the slowest samples (seconds, index)."""

    read: float = 0.0
    decode: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    slowest: list[tuple[float, int]] = field(default_factory=list)


class BatchJob:
    """A batch under way. ``wait`` waits for it.

    Args:
        pipeline: how samples are made.
        indices: (N,) records.
        plan: chooses crops and takes memory. Called in the thread that comes to the batch first: a third thread that
            plans while all cores decode makes the others wait for the interpreter lock.
        pool: runs the parts.
        then: called with the job in the thread that finishes last; ``product`` is what it returned.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        indices: npt.NDArray[np.int64],
        plan: Callable[[], Plan],
        pool: Pool,
        then: Callable[[BatchJob], Any] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.indices = indices
        self.product: Any = None
        self.failures: dict[int, Exception] = {}
        self.timing = Timing()
        self._then = then
        self._make_plan = plan
        self._plan: Plan | None = None
        self._lock = threading.Lock()
        self._pool = pool
        self._next = 0  # the first position that no thread has taken
        self._turn = threading.Lock()  # whose holder may take
        self._ended = False  # nothing more is to be taken; set without a lock, wherever a collection of garbage cancels
        self._raised: list[tuple[int, BaseException]] = []
        self._unfinished = threading.Lock()  # held until all is done: one wait, whatever the number of threads
        self._unfinished.acquire()
        self._left = max(1, min(pool.threads, len(indices)))  # an empty batch is finished in a thread too
        for _ in range(self._left):
            pool.submit(self._run, self._drop)

    @property
    def plan(self) -> Plan:
        """What was planned, once a thread has come to the batch."""
        plan = self._plan
        if plan is None:
            with self._lock:  # who comes second waits, since it can do nothing without
                plan = self._plan = self._plan or self._make_plan()
        return plan

    def wait(self) -> dict[int, Exception]:
        """Wait until all samples are done: position in the batch to error of those that failed. Called once.

        Raises:
            DecodeError, CorruptError: the first failed sample, with ``on_error="raise"``.
            ValueError: an image is too small for the crop, with ``on_error="raise"``.
            Exception: whatever the user's transform raised, with the sample named in a note.
            CancelledError: it was cancelled, or the pool closed.
        """
        with self._unfinished:
            pass
        if self._raised:  # chunks are taken in order, so that the first to fail is among them, whatever the threads do
            raised, self._raised = self._raised, []  # given away: what it knows of its frames holds this job
            raise min(raised, key=itemgetter(0))[1]
        if self.failures and self.pipeline.on_error == "raise":
            raise self.failures[min(self.failures)]
        return self.failures

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return not self._unfinished.locked()

    def cancel(self) -> None:
        """Drop the parts that no thread has begun. What is left is no batch: ``then`` is not called any more."""
        self._raised.append((len(self.indices), CancelledError()))
        self._ended = True

    def _drop(self) -> None:
        """In place of ``_run``, where the pool will not come to it."""
        self.cancel()
        self._run()

    def _run(self) -> None:
        """Work on chunks until none is left. Raises nothing: what happened is for ``wait``."""
        start, stop = self._take()
        try:
            while start < stop:
                self._work(self.plan, start, stop)
                start, stop = self._take()
        except BaseException as error:
            self._raised.append((start, error))
            self._ended = True
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._finish()

    def _take(self) -> tuple[int, int]:
        """The next chunk. Each costs something, so it is a thread's share of the batch while other tasks wait, and a
        part of that where none do: one large image is not to leave the other threads idle at the end."""
        shares = self._pool.threads * (1 if self._pool.waiting else PIECES)
        size = max(1, min(MAX_CHUNK, -(-len(self.indices) // shares)))
        with self._turn:
            start = self._next
            stop = start if self._ended else min(start + size, len(self.indices))
            self._next = stop
        return start, stop

    def _finish(self) -> None:
        try:
            failed = self._raised or (self.failures and self.pipeline.on_error == "raise")
            if self._then is not None and not failed:
                began = time.perf_counter()
                self.product = self._then(self)
                self.timing.collate = time.perf_counter() - began
        except BaseException as error:
            self._raised.append((0, error))
        del self._pool  # nothing is taken any more, and a batch in somebody's hands is not to keep the threads
        self._unfinished.release()

    def _work(self, plan: Plan, start: int, stop: int) -> None:
        began = time.perf_counter()
        records = ChunkRecords(plan.records, start, stop, self.failures)
        for position in plan.refused:
            if start <= position < stop:
                self._fail(position, plan.refused[position])
        self._decode(records, start)
        decoded = time.perf_counter()
        seconds, place = records.slowest
        self.timing.slowest.append((seconds, int(self.indices[start + place])))
        if self.pipeline.transforming:
            for position in range(start, stop):
                if position not in self.failures:
                    self._transform(plan, position)
        done = time.perf_counter()
        read = records.seconds
        self.timing.read += read  # a race between threads may lose one of thousands: these are statistics
        self.timing.decode += decoded - began - read
        self.timing.transform += done - decoded

    def _decode(self, records: ChunkRecords, start: int) -> None:
        plan = self.plan
        stop = start + len(records)
        if plan.out is None:
            for position, record in enumerate(records, start):
                self._decode_alone(position, record)
            return
        failures = self.pipeline.decoder.decode_into(
            records,
            plan.out[start:stop],
            boxes=None if plan.boxes is None else plan.boxes[start:stop],
            flips=None if plan.flips is None else plan.flips[start:stop],
            orientations=None if plan.orientations is None else plan.orientations[start:stop],
        )
        for place, message in failures:
            self._fail(start + place, message)

    def _decode_alone(self, position: int, record: memoryview) -> None:
        plan = self.plan
        box, size = None, None
        if plan.boxes is not None:
            box, size = plan.boxes[position].tolist(), plan.size(position)
        try:
            pixels = self.pipeline.decoder.decode(record, box=box, size=size)
            if box is None:
                _expect_size(pixels, *plan.size(position))
        except DecodeError as error:
            self._fail(position, error.message)
            return
        flip = 0 if plan.flips is None else int(plan.flips[position])
        plan.images[position] = flipped(pixels, flip) if flip else pixels

    def _fail(self, position: int, message: str) -> None:
        if position in self.failures:  # its bytes were damaged already
            return
        reader, index = self.pipeline.reader, int(self.indices[position])
        path, local = reader.locate(index)
        self.failures[position] = DecodeError(message, path=path, index=local, key=reader.key(index))

    def _transform(self, plan: Plan, position: int) -> None:
        pipeline = self.pipeline
        with sampling(plan.keys[position]):
            try:
                image = pipeline.present(plan.pixels(position))
                if pipeline.transform is not None:
                    image = pipeline.transform(image)
                if pipeline.transforms is not None and plan.targets is not None:
                    (target,) = pipeline.targets.from_columns(plan, [position])[0]
                    image, plan.targets[position] = pipeline.transforms(image, target)
                plan.images[position] = image
            except Exception as error:
                index = int(self.indices[position])
                add_note(error, f"in the transform of record {index}, key {pipeline.reader.key(index)!r}")
                raise


def _expect_size(pixels: Pixels, height: int, width: int) -> None:
    """Refuse an image that the pack's columns told otherwise, from which its boxes were made, as in a batch's array.

    Raises:
        DecodeError: the sizes differ.
    """
    found = pixels.shape[:2]
    if found != (height, width):
        raise DecodeError(
            f"the pack's columns say {width}x{height} pixels, the image has {found[1]}x{found[0]}: packfmt convert "
            "makes a pack with the right ones"
        )
