"""Where a loader's batches are made: in threads of this process, or in child processes with threads of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from packfmt.randomness import batch_rng
from packfmt.training.batch import Allocate, BatchJob, Timing
from packfmt.training.collate import Collate
from packfmt.training.dataset import ImageDataset
from packfmt.training.samples import make_batch

__all__ = ["Engine", "Finish", "Made", "Request", "ThreadEngine", "made_of"]

Mix = Callable[..., Any]
SLOW_SAMPLES = 3  # per batch that are worth a name


@dataclass(frozen=True, slots=True)
class Request:
    """A batch to make: which records, in which epoch, and the number that keys its batch transform."""

    epoch: int
    number: int
    indices: npt.NDArray[np.int64]


@dataclass(slots=True)
class Made:
    """A batch that was made, and what there is to say about it."""

    images: Any
    targets: Any
    samples: int
    timing: Timing
    keys: dict[int, str]  # of the slowest samples
    skipped: list[str]


class Engine(Protocol):
    """Makes batches ahead of the consumer. Used by one thread."""

    threads: int

    def request(self, request: Request) -> Any:
        """Begin a batch; returns a ticket for ``collect``."""

    def ready(self, ticket: Any) -> bool:
        """Whether ``collect`` would return at once."""

    def collect(self, ticket: Any) -> Made:
        """Wait for a batch. Tickets are collected in the order they were given."""

    def cancel(self, ticket: Any) -> None:
        """Give up a batch."""

    def close(self) -> None:
        """Leave no thread, process or shared memory behind."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Turns decoded samples into a batch, in the thread that finishes last. Picklable if the transform is.

    Args:
        dataset: whose samples.
        collate: how images become a batch.
        batch_transform: called with (images, targets, generator), or (images, targets) if it takes only two.
        request: the batch's.
    """

    dataset: ImageDataset
    collate: Collate
    batch_transform: Mix | None
    request: Request

    def __call__(self, job: BatchJob) -> tuple[Any, Any]:
        images, targets = make_batch(self.dataset.samples_of(job), self.collate)
        if self.batch_transform is None:
            return images, targets
        if takes_rng(self.batch_transform):
            rng = batch_rng(self.dataset.seed, self.request.epoch, self.request.number)
            result: tuple[Any, Any] = self.batch_transform(images, targets, rng)
        else:
            result = self.batch_transform(images, targets)
        return result


def takes_rng(transform: Mix) -> bool:
    """Whether a batch transform wants a generator as its third argument. torchvision's take any number and want two."""
    call = transform.forward if isinstance(transform, torch.nn.Module) else transform
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) >= 3


def made_of(dataset: ImageDataset, job: BatchJob) -> Made:
    """Wait for a job and describe it.

    Raises:
        DecodeError, CorruptError, Exception: as ``ImageDataset.finish``.
    """
    failures = job.wait()
    dataset.skipped += len(failures)
    images, targets = job.product
    slowest = sorted(job.timing.slowest, reverse=True)[:SLOW_SAMPLES]
    job.timing.slowest = slowest
    key = dataset.reader.key
    skipped = [key(int(job.plan.indices[position])) for position in sorted(failures)]
    count = len(job.plan.indices) - len(failures)
    return Made(images, targets, count, job.timing, {index: key(index) for _, index in slowest}, skipped)


class ThreadEngine:
    """The dataset's own threads, in this process."""

    def __init__(
        self, dataset: ImageDataset, collate: Collate, batch_transform: Mix | None, allocate: Allocate | None
    ) -> None:
        self.threads = dataset.threads
        self._dataset = dataset
        self._collate: Collate = collate
        self._batch_transform = batch_transform
        self._allocate = allocate

    def request(self, request: Request) -> BatchJob:
        finish = Finish(self._dataset, self._collate, self._batch_transform, request)
        return self._dataset.start(request.indices, request.epoch, allocate=self._allocate, then=finish)

    def ready(self, ticket: BatchJob) -> bool:
        return ticket.done

    def collect(self, ticket: BatchJob) -> Made:
        return made_of(self._dataset, ticket)

    def cancel(self, ticket: BatchJob) -> None:
        ticket.cancel()

    def close(self) -> None:
        """The threads are the dataset's, and end with it."""
