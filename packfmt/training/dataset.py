"""Map-style datasets over a pack, with the threads that decode inside."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from packfmt import storage
from packfmt.errors import FormatError
from packfmt.images.decode import Decoder
from packfmt.images.geometry import Crop, HorizontalFlip
from packfmt.randomness import sample_keys
from packfmt.storage import Reader
from packfmt.storage.filebytes import IO
from packfmt.training.batch import Allocate, BatchJob, Recipe, plan_batch
from packfmt.training.pool import CallerPool, DecodePool
from packfmt.training.resize import resize
from packfmt.training.samples import Samples, make_batch, present
from packfmt.training.targets import Targets

__all__ = ["ImageDataset", "LMDBImageDataset", "MMapImageDataset"]

PathLike = str | os.PathLike[str]


class ImageDataset(Dataset[Any]):
    """The samples of a pack: ``ds[i]`` is ``(image, label)``, ``ds[[i, j, k]]`` a whole batch.

    Augmentation depends on (seed, epoch, index) only, so a sample has the same pixels for any number of threads and
    workers, and from any backend. Thread-safe. Pickles as paths and options (a few hundred bytes); in a new process,
    however it was started, threads and files are opened again when first used.

    Args:
        pack: a path as ``packfmt.open`` takes it, or a reader.
        crop: chosen before decoding, from the index: ``RandomResizedCrop`` and the like. None keeps the image's size.
        flip: ``HorizontalFlip``, or None.
        transform: called with each image (in ``output`` form) after crop and flip, in the decoding threads.
            ``packfmt.sample_rng()`` is its source of randomness.
        target_transform: called with each target.
        fields: the column the target is, or several for a dict of them; None takes ``label``, or -1 without one.
            Boxes in a column ``boxes`` follow crop and flip; boxes that are left with no area go, and with them
            their entries in ragged columns of equal length.
        output: "tensor": (C, H, W) uint8; "numpy": (H, W, C) uint8; "pil".
        mode: "RGB" or "L".
        orientation: "ignore" the EXIF tag as torchvision does, or "apply" it.
        threads: that decode; None takes the cores this process may use.
        on_error: "raise" at a record that cannot be read or decoded, or "skip" it: batches get smaller, and
            ``skipped`` counts.
        verify: check each record's checksum when it is read.
        io: "mmap", "pread" or "auto", as ``packfmt.open``.
        seed: of crop, flip and ``sample_rng``.
        lookahead: batches decoded ahead where a packfmt sampler announces them to a DataLoader without workers.
        fast: decode JPEG a tenth faster and a few levels off (Pillow's pixels otherwise).

    Raises:
        ValueError: an option is not one of those allowed.
        FormatError, OSError: as ``packfmt.open``.
    """

    def __init__(
        self,
        pack: PathLike | Sequence[PathLike] | Reader,
        *,
        crop: Crop | None = None,
        flip: HorizontalFlip | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        fields: str | Sequence[str] | None = None,
        output: Literal["tensor", "numpy", "pil"] = "tensor",
        mode: Literal["RGB", "L"] = "RGB",
        orientation: Literal["ignore", "apply"] = "ignore",
        threads: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        verify: bool = True,
        io: IO = "auto",
        seed: int = 0,
        lookahead: int = 2,
        fast: bool = False,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}, allowed are 'raise' and 'skip'")
        if lookahead < 0:
            raise ValueError(f"lookahead={lookahead} must not be negative")
        self.reader = pack if isinstance(pack, Reader) else storage.open(pack, io=io, verify=verify)
        decoder = Decoder(mode=mode, orientation=orientation, fast=fast, resize=resize)
        self._recipe = Recipe(self.reader, decoder, crop, flip, transform, present(output), on_error)
        self._output = output
        self._targets = Targets(self.reader, fields, target_transform)
        self._pool = DecodePool(threads)
        self.seed = seed
        self.epoch = 0
        self.lookahead = lookahead
        self.skipped = 0
        self._start_process()

    def _start_process(self) -> None:
        self._lock = threading.Lock()
        self._announced: deque[tuple[int, bytes, npt.NDArray[np.int64]]] = deque()
        self._ahead: deque[tuple[int, bytes, BatchJob]] = deque()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_lock", "_announced", "_ahead"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_process()

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names that the labels count."""
        return self.reader.classes

    @property
    def labels(self) -> Any:
        """The column ``label`` as an array, or None."""
        return self.reader.columns.get("label")

    @property
    def threads(self) -> int:
        """The number of threads that decode."""
        return self._pool.threads

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose crops, flips and random numbers ``ds[...]`` gives. Indices of packfmt's samplers carry
        their own."""
        self.epoch = epoch

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        if isinstance(index, slice):
            return self._batch(list(range(*index.indices(len(self)))))
        if isinstance(index, (int, np.integer)):
            return self._sample(index)
        return self._batch(index)

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """The samples of a batch, for DataLoader. Collating them with torch's default copies nothing."""
        epoch = self._epoch_of(indices)
        return self.finish(self._take(epoch, np.asarray(indices, dtype=np.int64)))

    def start(
        self,
        indices: npt.ArrayLike,
        epoch: int,
        *,
        allocate: Allocate | None = None,
        then: Callable[[BatchJob], Any] | None = None,
    ) -> BatchJob:
        """Begin a batch in the threads; ``finish`` gives its samples.

        Args:
            indices: (N,) record indices.
            epoch: that keys the random numbers.
            allocate: gives the array for decoded images by its shape (N, H, W, C); None takes new memory.
            then: called with the job in the thread that finishes last; ``job.product`` is what it returned.
        """
        positions = np.asarray(indices, dtype=np.int64)
        plan = plan_batch(self._recipe, positions, sample_keys(self.seed, epoch, positions), allocate)
        return BatchJob(self._recipe, plan, self._pool, then)

    def finish(self, job: BatchJob) -> Samples:
        """Wait for a batch that ``start`` began.

        Raises:
            DecodeError, CorruptError: a record failed, with ``on_error="raise"``; it names shard, index and key.
            Exception: whatever ``transform`` raised.
        """
        self.skipped += len(job.wait())
        return self.samples_of(job)

    def samples_of(self, job: BatchJob) -> Samples:
        """The samples of a job that is done, without waiting: what ``then`` of ``start`` works with."""
        return Samples(job, job.failures, self._targets, self._output)

    def announce(self, upcoming: tuple[int, npt.NDArray[np.int64]]) -> None:
        """Hear from a sampler which batch will be asked for later. Nothing is decoded until this process is asked for a
        batch: with DataLoader workers, the samples are asked for elsewhere."""
        epoch, indices = upcoming
        with self._lock:
            self._announced.append((epoch, indices.tobytes(), indices))
            while len(self._announced) > self.lookahead + 1:
                self._announced.popleft()

    def with_threads(self, threads: int) -> ImageDataset:
        """The same dataset with another number of threads, not started yet."""
        other = copy.copy(self)
        other._pool = DecodePool(threads)
        return other

    def close(self) -> None:
        """Stop the threads and release the files. A closed dataset cannot be read."""
        self._drop_ahead()
        self._pool.close()
        self.reader.close()

    def _sample(self, index: int | np.integer[Any]) -> Any:
        position = int(index) + len(self) if index < 0 else int(index)
        if not 0 <= position < len(self):
            raise IndexError(f"{self.reader.path} has {len(self)} records, asked for {index}")
        positions = np.array([position])
        plan = plan_batch(self._recipe, positions, sample_keys(self.seed, self._epoch_of([index]), positions))
        samples = self.finish(BatchJob(self._recipe, plan, CallerPool()))
        if not len(samples):
            raise IndexError(f"record {position} cannot be decoded and on_error='skip'; read whole batches to skip it")
        return samples[0]

    def _batch(self, indices: Sequence[int]) -> Any:
        positions = np.asarray(indices, dtype=np.int64)
        positions = np.where(positions < 0, positions + len(self), positions)
        return make_batch(self.finish(self.start(positions, self._epoch_of(indices))), "stack")

    def _epoch_of(self, indices: Sequence[Any]) -> int:
        return getattr(indices[0], "epoch", self.epoch) if len(indices) else self.epoch

    def _take(self, epoch: int, indices: npt.NDArray[np.int64]) -> BatchJob:
        """The job of a batch, begun ahead if it was announced; begins those announced after it."""
        wanted = (epoch, indices.tobytes())
        with self._lock:
            if not any(job[:2] == wanted for job in self._ahead):
                self._cancel_ahead()
                while self._announced and self._announced[0][:2] != wanted:
                    self._announced.popleft()
                if self._announced:
                    self._announced.popleft()
                self._ahead.append((*wanted, self.start(indices, epoch)))
            while self._ahead[0][:2] != wanted:  # the loop left batches out
                self._ahead.popleft()[2].cancel()
            job = self._ahead.popleft()[2]
            while self._announced and len(self._ahead) < self.lookahead:
                next_epoch, key, next_indices = self._announced.popleft()
                self._ahead.append((next_epoch, key, self.start(next_indices, next_epoch)))
        return job

    def _drop_ahead(self) -> None:
        with self._lock:
            self._cancel_ahead()
            self._announced.clear()

    def _cancel_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft()[2].cancel()


class MMapImageDataset(ImageDataset):
    """``ImageDataset`` over shard files."""

    def __init__(self, pack: PathLike | Sequence[PathLike] | Reader, **options: Any) -> None:
        super().__init__(pack, **options)
        _expect(self.reader, lmdb=False)


class LMDBImageDataset(ImageDataset):
    """``ImageDataset`` over a pack in an LMDB environment."""

    def __init__(self, pack: PathLike | Sequence[PathLike] | Reader, **options: Any) -> None:
        super().__init__(pack, **options)
        _expect(self.reader, lmdb=True)


def _expect(reader: Reader, *, lmdb: bool) -> None:
    if (reader.io == "lmdb") != lmdb:
        found, fitting = ("an LMDB pack", "LMDB") if reader.io == "lmdb" else ("a shard", "MMap")
        raise FormatError(f"{reader.path}: {found}; use {fitting}ImageDataset, or ImageDataset for either")
