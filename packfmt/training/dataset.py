"""Map-style datasets over a pack, with the threads that decode inside."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from packfmt import storage
from packfmt.errors import CorruptError, FormatError
from packfmt.images.decode import Decoder
from packfmt.images.geometry import CenterCrop, Crop, Flip, Resize
from packfmt.randomness import Keys, sample_keys
from packfmt.record import IMAGE_COLUMNS
from packfmt.sampling.sampleindex import ONCE, Draws, Upcoming, draws_of
from packfmt.storage import Reader
from packfmt.storage.base import Verify
from packfmt.storage.filebytes import IO
from packfmt.training.ahead import Ahead
from packfmt.training.batch import BatchJob
from packfmt.training.epochs import DrawCounter, EpochCounter
from packfmt.training.plan import Allocate, Recipe, as_flips, interpolation_of, plan_batch
from packfmt.training.pool import CallerPool, DecodePool
from packfmt.training.recycle import Recycler
from packfmt.training.resize import resizer
from packfmt.training.samples import Samples, make_batch, present
from packfmt.training.span import Chosen, Span
from packfmt.training.targets import BoxFrame, TargetForm, TargetOptions, Targets

__all__ = ["ImageDataset", "LMDBImageDataset", "MMapImageDataset"]

PathLike = str | os.PathLike[str]


class ImageDataset(Dataset[Any]):
    """The samples of a pack: ``ds[i]`` is ``(image, label)``, ``ds[[i, j, k]]`` a whole batch.

    Augmentation depends on (seed, epoch, index, draw) only, so a sample has the same pixels for any number of threads
    and workers, and from any backend. ``draw`` counts how often the record was drawn before. Indices of packfmt's
    samplers carry it, and the epoch. Draws by plain indices are counted here, in DataLoader's workers too, since
    ``set_epoch`` was last called: so every epoch of any sampler has new crops, as ``ds[i]`` has when it is asked for
    again. Two draws of one record that two workers work on at once may swap, and what workers made ahead of a loop
    that stopped early counts as drawn; all else is repeatable.

    Thread-safe. Pickles as paths and options (about a kilobyte); in a new process,
    however it was started, threads and files are opened again when first used.

    A subclass that overrides ``__getitem__`` is asked one index at a time by DataLoader, and refused by ``Loader``.

    Args:
        pack: a path as ``packfmt.open`` takes it, or a reader.
        crop: chosen before decoding, from the index: ``RandomResizedCrop`` and the like. None keeps the image's size.
        flip: ``HorizontalFlip``, ``VerticalFlip``, a list of both, or None.
        transform: called with each image (in ``output`` form) after crop and flip, in the decoding threads.
            ``packfmt.sample_rng()`` is its source of randomness.
        target_transform: called with each target.
        fields: the column the target is, or several for a dict of them; None takes ``label``, or -1 without one.
            Boxes in a column ``boxes`` follow crop and flip; boxes that are left with no area go, and with them
            their entries in ragged columns of equal length.
        targets: "columns" as ``fields`` says; "torchvision": what its detection models take, for a batch a list of them
            (with ``collate="list"`` the images are one too): a dict of tensors ``boxes`` (n, 4) float32, ``labels``
            (n,) int64 and ``image_id`` () int64, the record's index, with further ``fields`` beside them. Boxes are cut
            at the image's edges, and those without area go, since the models refuse them.
        label_offset: added to the ``labels`` of "torchvision": 1 for models that count the background as class 0.
        boxes: the image that boxes were drawn on: "stored", or "upright", as its EXIF tag says; they are turned where
            the other is shown. "shown": what this dataset shows, by ``orientation``. Nothing is turned then, which is
            the default since no tag tells what an annotator saw.
        output: "tensor": (C, H, W) uint8; "numpy": (H, W, C) uint8; "pil".
        mode: "RGB" or "L".
        orientation: "ignore" the EXIF tag as torchvision does, or "apply" it.
        threads: that decode; None takes the cores this process may use, shared out among DataLoader's workers.
        on_error: "raise" at a record that cannot be read or decoded or is smaller than the crop, or "skip" it: batches
            get smaller, and ``skipped`` counts, in this process. Where nothing is left to give (``ds[i]``, a whole
            batch), the first error is raised all the same; ``Loader`` goes on with the next batch.
        verify: check each record's checksum when it is read, or only the first time ("once"), as ``packfmt.open``.
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
        flip: Flip | Sequence[Flip] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        fields: str | Sequence[str] | None = None,
        targets: TargetForm = "columns",
        label_offset: int = 0,
        boxes: BoxFrame = "shown",
        output: Literal["tensor", "numpy", "pil"] = "tensor",
        mode: Literal["RGB", "L"] = "RGB",
        orientation: Literal["ignore", "apply"] = "ignore",
        threads: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        verify: Verify = True,
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
        _refuse_without_sizes(self.reader)
        decoder = Decoder(mode=mode, orientation=orientation, fast=fast, resize=resizer(interpolation_of(crop)))
        self._recipe = Recipe(self.reader, decoder, crop, as_flips(flip), transform, present(output), on_error)
        self._output = output
        self._targets = Targets(
            self.reader, TargetOptions(fields, target_transform, targets, label_offset, boxes, orientation)
        )
        self._pool = DecodePool(threads)
        self._recycler = Recycler()
        self.seed = seed
        self._epochs = EpochCounter()
        random = flip or transform or not isinstance(crop, (CenterCrop, Resize, type(None)))
        self._draws = DrawCounter(len(self.reader)) if random else None
        self.lookahead = lookahead
        self.skipped = 0
        self._ahead = Ahead()

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
        """Choose the epoch whose crops, flips and random numbers ``ds[...]`` gives, and count draws from the first on.

        Indices of packfmt's samplers carry their own. With samplers of another origin each epoch has new ones all the
        same; call it to say which. It reaches DataLoader's workers too, persistent ones included.
        """
        self._epochs.set(epoch)
        if self._draws is not None:
            self._draws.reset()

    @property
    def epoch(self) -> int:
        """The epoch that was chosen, at first 0."""
        return self._epochs.next(0)

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        if isinstance(index, slice):
            return self._batch(range(*index.indices(len(self))))
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._sample(index)
        return self._batch(index)  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The samples of a batch, for DataLoader. Collating them with torch's default copies nothing.

        Raises:
            DecodeError, CorruptError: a record failed, or all of them did with ``on_error="skip"``.
        """
        if type(self).__getitem__ is not ImageDataset.__getitem__:
            return [self[index] for index in indices]  # a subclass's own, which a batch must not go round
        positions = self._positions(indices)
        epoch, draws = self._drawn(indices, positions)
        return self._some(self._ahead.take(epoch, positions, self._begin, self.lookahead, draws))

    def start(
        self,
        indices: npt.ArrayLike,
        epoch: int,
        *,
        draws: Draws = ONCE,
        allocate: Allocate | None = None,
        then: Callable[[BatchJob], Any] | None = None,
        chosen: Chosen | None = None,
    ) -> BatchJob:
        """Begin a batch in the threads; ``finish`` gives its samples.

        Args:
            indices: (N,) record indices.
            epoch: that keys the random numbers.
            draws: that key them too.
            allocate: gives the array for decoded images by its shape (N, H, W, C); None takes the dataset's own.
            then: called with the job in the thread that finishes last; ``job.product`` is what it returned.
            chosen: from ``choose_ahead``, for these indices; None chooses for this batch alone.
        """
        if chosen is None:
            (chosen,) = self.choose_ahead((indices,), epoch, (draws,))
        positions = chosen.positions
        with suppress(CorruptError):  # said where the record is read
            self.reader.will_need(positions)  # the whole batch at once, and before the threads come to it
        plan = partial(plan_batch, self._recipe, chosen, allocate or self._recycler.allocate)
        return BatchJob(self._recipe, positions, plan, self._pool, then)

    def choose_ahead(
        self, batches: Sequence[npt.ArrayLike], epoch: int, draws: Sequence[Draws] | None = None
    ) -> list[Chosen]:
        """What ``start`` takes as ``chosen`` for each of some batches, which costs less than for one after another.

        Args:
            batches: (N,) record indices each.
            epoch: that keys the random numbers.
            draws: of each batch, which key them too; None where all records are drawn once.
        """
        positions = [self._positions(batch) for batch in batches]
        span = Span(self._recipe, positions, draws or [ONCE] * len(positions), partial(_keys, self.seed, epoch))
        return [Chosen(batch, span, number) for number, batch in enumerate(positions)]

    def finish(self, job: BatchJob) -> Samples:
        """Wait for a batch that ``start`` began.

        Raises:
            DecodeError, CorruptError: a record failed, with ``on_error="raise"``; it names shard, index and key.
            Exception: whatever ``transform`` raised, with a note that names record and key.
        """
        self.skipped += len(job.wait())
        return self.samples_of(job)

    def _some(self, job: BatchJob) -> Samples:
        """``finish``, where an empty batch is of no use."""
        samples = self.finish(job)
        if samples.failures and not len(samples):
            raise samples.failures[min(samples.failures)]
        return samples

    def samples_of(self, job: BatchJob) -> Samples:
        """The samples of a job that is done, without waiting: what ``then`` of ``start`` works with."""
        return Samples(job, job.failures, self._targets, self._output)

    def announce(self, upcoming: tuple[int, npt.NDArray[np.int64]]) -> None:
        """Hear from a sampler which batch will be asked for later. Nothing is decoded until this process is asked for a
        batch: with DataLoader workers, the samples are asked for elsewhere."""
        epoch, indices = upcoming
        draws = upcoming.draws if isinstance(upcoming, Upcoming) else ONCE
        self._ahead.announce(epoch, self._positions(indices), self.lookahead, draws)

    def with_threads(self, threads: int) -> ImageDataset:
        """The same dataset with another number of threads, not started yet."""
        other = copy.copy(self)
        other._pool, other._ahead = DecodePool(threads), Ahead()
        return other

    def __enter__(self) -> ImageDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and release the files. A closed dataset cannot be read; closing twice is allowed."""
        self._ahead.clear()
        self._pool.close()
        self.reader.close()

    def _sample(self, index: Any) -> Any:
        positions = self._positions((index,))
        epoch, draws = self._drawn((index,), positions)
        (chosen,) = self.choose_ahead((positions,), epoch, (draws,))
        plan = partial(plan_batch, self._recipe, chosen)
        return self._some(BatchJob(self._recipe, chosen.positions, plan, CallerPool()))[0]

    def _batch(self, indices: Sequence[int]) -> Any:
        positions = self._positions(indices)
        epoch, draws = self._drawn(indices, positions)
        return make_batch(self._some(self.start(positions, epoch, draws=draws)), "stack")

    def _begin(self, positions: npt.NDArray[np.int64], epoch: int, draws: Draws) -> BatchJob:
        return self.start(positions, epoch, draws=draws)

    def _positions(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Indices as int64, those below 0 counted from the end.

        Raises:
            IndexError: there is no such record.
            TypeError: they are no flat sequence of integers.
        """
        given, count = np.asarray(indices), len(self)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TypeError(
                f"{self.reader.path}: an index is an int, a slice or a flat sequence of ints, got {indices!r:.80}"
            )
        positions = given.astype(np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < count):
            positions = np.where(positions < 0, positions + count, positions)
            if not (positions.min() >= 0 and positions.max() < count):
                raise IndexError(f"{self.reader.path} has {count} records, asked for {given.min()} to {given.max()}")
        return positions

    def _drawn(self, indices: Sequence[Any], positions: npt.NDArray[np.int64]) -> tuple[int, Draws]:
        """The epoch and the draws that indices carry, or else those that are counted here."""
        epoch = getattr(indices[0], "epoch", None) if len(indices) else None
        if epoch is not None:
            return int(epoch), draws_of(indices)
        return self.epoch, ONCE if self._draws is None else self._draws.draw(positions)


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


def _keys(seed: int, epoch: int, positions: npt.NDArray[np.int64], draws: Draws) -> Keys:
    return sample_keys(seed, epoch, positions if draws.sources is None else draws.sources, draws.numbers)


def _refuse_without_sizes(reader: Reader) -> None:
    """Every pack of packfmt's has them; the format leaves them to the writer."""
    needed = [column for column in IMAGE_COLUMNS if column.name in ("width", "height", "orientation")]
    for column in needed:
        if column.name not in reader.columns or reader.columns.described.get(column.name, column) != column:
            raise FormatError(
                f"{reader.path}: has no column {column.name!r} of what image headers tell, from which crops are made: "
                f"another writer made it. To make a pack that has them: packfmt convert {reader.path} new.bin"
            )


def _expect(reader: Reader, *, lmdb: bool) -> None:
    if (reader.io == "lmdb") != lmdb:
        found, fitting = ("an LMDB pack", "LMDB") if reader.io == "lmdb" else ("a shard", "MMap")
        raise FormatError(f"{reader.path}: {found}; use {fitting}ImageDataset, or ImageDataset for either")
