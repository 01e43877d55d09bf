"""Where a loader's batches are made: in threads of this process, or in child processes with threads of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from packfmt.randomness import batch_rng
from packfmt.sampling.dataset import readahead_of
from packfmt.sampling.sampleindex import ONCE, Draws
from packfmt.training.batch import SLOW_SAMPLES, BatchJob, Timing
from packfmt.training.collate import Collate
from packfmt.training.dataset import ImageDataset
from packfmt.training.plan import Allocate
from packfmt.training.samples import as_batch, make_batch

__all__ = ["Batch", "Batching", "Engine", "Finish", "Request", "ThreadEngine", "batch_of"]

BatchTransform = Callable[..., Any]

GROUP = 512  # samples whose crops are chosen together: numpy's calls then cost little beside its work
MOST_BATCHES = 16  # taken from a sampler for it


@dataclass(frozen=True, slots=True)
class Request:
    """A batch to make: which records, in which epoch, and the number that keys its batch transform.

    ``near`` are records that are to be read soon as well, (n,), as ``BatchSampler.read_ahead`` gives them.
    """

    epoch: int
    number: int
    indices: npt.NDArray[np.int64]
    near: npt.NDArray[np.int64]
    draws: Draws = ONCE


@dataclass(slots=True)
class Batch:
    """A batch that was made, and what there is to say about it."""

    batch: Any  # (images, targets), or a dict of them
    samples: int
    timing: Timing
    failures: list[Exception]  # of the samples left out


class Engine(Protocol):
    """Makes batches ahead of the consumer. Used by one thread."""

    threads: int

    @property
    def usable(self) -> bool:
        """Whether it can go on; a new one is needed after a fork, or when a process has died."""

    def handles(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Begin a batch each time that the iterator is asked, which gives a handle for ``collect``.

        Requests may be taken from theirs some batches before they are begun.
        """

    def ready(self, handle: Any) -> bool:
        """Whether ``collect`` would return at once."""

    def collect(self, handle: Any) -> Batch:
        """Wait for a batch. Handles are collected in the order they were given."""

    def cancel(self, handle: Any) -> None:
        """Give up a batch."""

    def close(self) -> None:
        """Leave no thread, process or shared memory behind."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How a loader makes batches of samples. Picklable if the transform is.

    Args:
        collate: how images become a batch.
        transform: called with (images, targets, generator) if it asks for a third argument, else with two.
        memory_format: of the images where they are one tensor (N, C, H, W); None leaves it as it comes.
    """

    collate: Collate
    transform: BatchTransform | None
    memory_format: torch.memory_format | None


@dataclass(frozen=True, slots=True)
class Finish:
    """Turns decoded samples into a batch, in the thread that finishes last.

    Args:
        dataset: whose samples.
        how: it is done.
        request: the batch's.
    """

    dataset: ImageDataset
    how: Batching
    request: Request

    def __call__(self, job: BatchJob) -> Any:
        samples = self.dataset.samples_of(job)
        if not len(samples):
            return None  # all failed: nobody will see it
        images, targets = make_batch(samples, self.how.collate)
        transform, memory_format = self.how.transform, self.how.memory_format
        if transform is not None and takes_rng(transform):
            rng = batch_rng(self.dataset.seed, self.request.epoch, self.request.number)
            images, targets = transform(images, targets, rng)
        elif transform is not None:
            images, targets = transform(images, targets)
        if memory_format is not None and isinstance(images, torch.Tensor) and images.ndim == 4:
            images = images.contiguous(memory_format=memory_format)
        return as_batch(images, targets, job.pipeline.sample)


def takes_rng(transform: BatchTransform) -> bool:
    """Whether a batch transform asks for a generator: by a third argument without a default, or one named ``rng``.

    torchvision's take any number and want two.
    """
    call = transform.forward if isinstance(transform, torch.nn.Module) else transform
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 3 and (positional[2].default is inspect.Parameter.empty or positional[2].name == "rng")


def batch_of(dataset: ImageDataset, job: BatchJob) -> Batch:
    """Wait for a job and describe it.

    Raises:
        DecodeError, CorruptError, Exception: as ``ImageDataset.finish``.
    """
    failures = job.wait()
    dataset.skipped += len(failures)
    job.timing.slowest = sorted(job.timing.slowest, reverse=True)[:SLOW_SAMPLES]
    errors = [failures[position] for position in sorted(failures)]
    return Batch(job.product, len(job.indices) - len(errors), job.timing, errors)


class ThreadEngine:
    """The dataset's own threads, in this process."""

    usable = True

    def __init__(self, dataset: ImageDataset, how: Batching, allocate: Allocate | None) -> None:
        self.threads = dataset.threads
        self._dataset = dataset
        self._how = how
        self._allocate = allocate

    def handles(self, requests: Iterator[Request]) -> Iterator[BatchJob]:
        dataset = self._dataset
        pipeline = dataset.pipeline  # what is assigned to the dataset from now on is for the next iteration
        ask = readahead_of(dataset)
        for group in _groups(requests):
            parts = dataset.plan_ahead(
                [request.indices for request in group], group[0].epoch, [request.draws for request in group], pipeline
            )
            for request, planned in zip(group, parts, strict=True):
                finish = Finish(dataset, self._how, request)
                job = dataset.start(
                    request.indices, request.epoch, allocate=self._allocate, then=finish, planned=planned
                )
                ask(request.near)  # now that the threads have something to do
                yield job

    def ready(self, handle: BatchJob) -> bool:
        return handle.done

    def collect(self, handle: BatchJob) -> Batch:
        return batch_of(self._dataset, handle)

    def cancel(self, handle: BatchJob) -> None:
        handle.cancel()

    def close(self) -> None:
        """The threads are the dataset's, and end with it."""


def _groups(requests: Iterator[Request]) -> Iterator[list[Request]]:
    """Some at a time, of one epoch."""
    group: list[Request] = []
    samples = 0
    for request in requests:
        group.append(request)
        samples += len(request.indices)
        if samples >= GROUP or len(group) >= MOST_BATCHES:
            yield group
            group, samples = [], 0
    if group:
        yield group
