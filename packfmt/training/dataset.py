"""Map-style datasets over a pack, with the threads that decode inside."""

from __future__ import annotations

import copy
import fnmatch
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from packfmt import storage
from packfmt.errors import CorruptError, FormatError
from packfmt.images.geometry import Crop, Flip
from packfmt.randomness import Keys, sample_keys, uniform
from packfmt.record import IMAGE_COLUMNS
from packfmt.sampling.sampleindex import ONCE, Draws, Upcoming, draws_of
from packfmt.storage import Reader
from packfmt.storage.base import Verify
from packfmt.storage.columns import Columns, select_column
from packfmt.storage.fileio import IO
from packfmt.training.arena import Arena
from packfmt.training.batch import BatchJob
from packfmt.training.epochs import DrawCounter, EpochCounter
from packfmt.training.pipeline import Form, Output, Pipeline, make_pipeline
from packfmt.training.plan import Allocate, PlanGroup, PlannedBatch, plan_batch
from packfmt.training.pool import CallerPool, DecodePool
from packfmt.training.prefetch import PrefetchQueue, under_its_old_name
from packfmt.training.samples import SampleList, Samples, as_batch, make_batch
from packfmt.training.targets import BoxFrame, TargetForm, TargetOptions

__all__ = ["ImageDataset", "LMDBImageDataset", "MMapImageDataset"]

PathLike = str | os.PathLike[str]
Indices = npt.NDArray[np.int64]

SPLIT = 513  # the stream of random numbers that splits, apart from those of crops, flips and shuffle buffers


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

    ``crop``, ``flip``, ``transform``, ``target_transform`` and ``transforms`` may be assigned later. What is asked for
    from then on has them: batches that were decoded ahead for a DataLoader are made anew, an iteration of a ``Loader``
    that is under way goes on as it began, and worker processes of a DataLoader hear of it when they start anew.

    A subclass that overrides ``__getitem__`` is asked one index at a time by DataLoader, and refused by ``Loader``.

    Args:
        pack: a path as ``packfmt.open`` takes it, or a reader.
        crop: chosen before decoding, from the index: ``RandomResizedCrop`` and the like. None keeps the image's size.
        flip: ``HorizontalFlip``, ``VerticalFlip``, a list of both, or None. A number is the probability of a
            ``HorizontalFlip``; True is ``HorizontalFlip()``.
        transform: called with each image (in ``output`` form) after crop and flip, in the decoding threads.
            ``packfmt.sample_rng()`` is its source of randomness.
        target_transform: called with each target.
        transforms: called with each image and its target, after the two above, in the decoding threads; returns both.
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
        sample: "tuple": (image, target); "dict": {"pixel_values": image, "labels": target}, as Hugging Face's Trainer
            hands to its models. A target that is a dict lies beside the image then, under its own names. Batches have
            the same form.
        mode: "RGB" or "L".
        orientation: "ignore" the EXIF tag as torchvision does, or "apply" it.
        threads: that decode; None takes the cores this process may use, shared out among DataLoader's workers.
        partial: decode what is there of a truncated or damaged JPEG. What is missing is gray or black.
        on_error: "raise" at a record that cannot be read or decoded or is smaller than the crop, or "skip" it: batches
            get smaller, and ``skipped`` counts, in this process. Where nothing is left to give (``ds[i]``, a whole
            batch), the first error is raised all the same; ``Loader`` goes on with the next batch.
        verify: check each record's checksum when it is read, or only the first time ("once"), as ``packfmt.open``.
        io: "mmap", "pread" or "auto", as ``packfmt.open``.
        seed: of crop, flip and ``sample_rng``, and of the order of a ``Loader`` that is given none.
        prefetch: batches decoded ahead where a packfmt sampler announces them to a DataLoader without workers.
        fast: decode JPEG a tenth faster and a few levels off (Pillow's pixels otherwise).
        lookahead: the old name of ``prefetch``, with a DeprecationWarning.

    Attributes:
        reader: the pack. It numbers its records itself, also where the dataset is a view of some of them.
        changes: times that an option was assigned.

    Raises:
        TypeError: a crop, flip or transform is none.
        ValueError: an option is not one of those allowed.
        FormatError, OSError: as ``packfmt.open``.
    """

    def __init__(
        self,
        pack: PathLike | Sequence[PathLike] | Reader,
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
        partial: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        verify: Verify = True,
        io: IO = "auto",
        seed: int = 0,
        prefetch: int = 2,
        fast: bool = False,
        lookahead: int | None = None,
    ) -> None:
        prefetch = under_its_old_name("lookahead", lookahead, prefetch)
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} must not be negative")
        if isinstance(pack, Dataset):
            raise TypeError("the pack is a dataset already: its select() and split() give others over the same pack")
        self.reader = pack if isinstance(pack, Reader) else storage.open(pack, io=io, verify=verify)
        _refuse_without_sizes(self.reader)
        self._pipeline = make_pipeline(
            self.reader,
            crop=crop,
            flip=flip,
            transform=transform,
            transforms=transforms,
            targets=TargetOptions(fields, target_transform, targets, label_offset, boxes, orientation),
            output=output,
            sample=sample,
            mode=mode,
            orientation=orientation,
            partial=partial,
            fast=fast,
            on_error=on_error,
        )
        self._pool = DecodePool(threads)
        self._arena = Arena()
        self.seed = seed
        self.prefetch = prefetch
        self.changes = 0
        self._show(None, epoch=0)

    def _show(self, indices: Indices | None, epoch: int) -> None:
        """Be a dataset of these records of the pack, None for all; with nothing begun or counted yet."""
        self._indices = indices
        self._columns: Columns | None = None
        self._epochs = EpochCounter(epoch)
        self._draws: DrawCounter | None = None
        self._count_draws()
        self.skipped = 0
        self._ahead = PrefetchQueue()

    def _count_draws(self) -> None:
        if self._draws is None and self._pipeline.random:
            self._draws = DrawCounter(len(self))

    def __len__(self) -> int:
        return len(self.reader) if self._indices is None else len(self._indices)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names that the labels count."""
        return self.reader.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name to label."""
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def indices(self) -> Indices | None:
        """The numbers (n,) that the records of a view have in the pack; None for the whole pack."""
        return self._indices

    @property
    def columns(self) -> Mapping[str, Any]:
        """Column name to an array, or another sequence, of one value per sample. Numbers of a view are copies."""
        if self._indices is None:
            return self.reader.columns
        if self._columns is None:
            whole, mine = self.reader.columns, self._indices
            self._columns = Columns(list(whole), lambda name: select_column(whole[name], mine))
        return self._columns

    @property
    def labels(self) -> Any:
        """The column ``label`` as an array, or None."""
        return self.columns.get("label")

    targets = labels  # as torchvision's datasets name them

    @property
    def pipeline(self) -> Pipeline:
        """How samples are made now. It does not change: assigning an option makes a new one."""
        return self._pipeline

    @property
    def crop(self) -> Crop | None:
        """The crop; may be assigned, as the other options below."""
        return self._pipeline.crop

    @crop.setter
    def crop(self, crop: Crop | None) -> None:
        self._change(crop=crop)

    @property
    def flip(self) -> tuple[Flip, ...]:
        """The flips, none or several."""
        return self._pipeline.flips

    @flip.setter
    def flip(self, flip: Flip | Sequence[Flip] | float | None) -> None:
        self._change(flip=flip)

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What is called with each image."""
        return self._pipeline.transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        self._change(transform=transform)

    @property
    def target_transform(self) -> Callable[[Any], Any] | None:
        """What is called with each target."""
        return self._pipeline.targets.transform

    @target_transform.setter
    def target_transform(self, transform: Callable[[Any], Any] | None) -> None:
        self._change(target_transform=transform)

    @property
    def transforms(self) -> Callable[[Any, Any], Any] | None:
        """What is called with each image and its target."""
        return self._pipeline.transforms

    @transforms.setter
    def transforms(self, transforms: Callable[[Any, Any], Any] | None) -> None:
        self._change(transforms=transforms)

    @property
    def lookahead(self) -> int:
        """The old name of ``prefetch``."""
        return under_its_old_name("lookahead", self.prefetch, self.prefetch)

    @lookahead.setter
    def lookahead(self, value: int) -> None:
        self.prefetch = under_its_old_name("lookahead", value, value)

    def _change(self, **options: Any) -> None:
        self._pipeline = self._pipeline.changed(**options)
        self.changes += 1
        self._count_draws()
        self._ahead.clear()

    def select(self, which: str | slice | npt.ArrayLike) -> ImageDataset:
        """A view: a dataset of some of these records, over the same open pack and with the same threads.

        It has all options of this one. Those that may be assigned are its own from then on, as are epoch and
        statistics. A record keeps its random numbers, which its number in the pack decides; samplers read a view in the
        pack's order where they shuffle. It pickles as this dataset and 8 bytes per record.

        Args:
            which: (k,) indices, in any order, also more than once; (n,) booleans, as ``columns["width"] > 64`` gives
                them; a slice; or a pattern of keys in which ``*``, ``?`` and ``[...]`` stand for characters, "/" too.

        Raises:
            IndexError: there is no such record, or not as many as booleans.
            TypeError: it is none of these.
            ValueError: no key is like the pattern.
        """
        if isinstance(which, str):
            which = self._like(which)
        given = np.arange(len(self))[which] if isinstance(which, slice) else np.asarray(which)
        if given.dtype == bool:
            if given.shape != (len(self),):
                raise IndexError(f"{self._name} has {len(self)} records, the mask has the shape {given.shape}")
            given = np.flatnonzero(given)
        view = copy.copy(self)
        view._show(self._in_pack(self._positions(given)), epoch=self.epoch)
        return view

    def split(
        self, share: float, *, seed: int = 0, stratify: str | npt.ArrayLike | None = None
    ) -> tuple[ImageDataset, ImageDataset]:
        """Two views without a record in common: a random ``share`` of the records, and all others.

        Args:
            share: of the first one, between 0 and 1.
            seed: another one gives another split. The same gives the same split everywhere.
            stratify: a column, or an array (n,), of which both are to have equal proportions, such as "label": of
                each value the first view has its share, rounded up or down.

        Raises:
            TypeError: ``share`` is no number.
            ValueError: ``share`` is not between 0 and 1 or leaves no record for one of the two; there is no such
                column, or not one value per record; this is a view that has a record twice.
        """
        if self._indices is not None and len(np.unique(self._indices)) < len(self):
            raise ValueError(f"{self._name} has records more than once, which would be in both parts; split first")
        if isinstance(share, bool) or not isinstance(share, (int, float, np.number)):
            raise TypeError(f"share={share!r} is not a number between 0 and 1")
        first = round(float(share) * len(self)) if 0 < share < 1 else 0
        if not 0 < first < len(self):
            raise ValueError(f"a share of {share} of the {len(self)} records of {self._name} leaves one part empty")
        kinds = self._kinds(stratify)
        chance = uniform(sample_keys(seed, 0, self._in_pack(np.arange(len(self)))), SPLIT)
        order = np.lexsort((chance, kinds))
        # Taken at equal steps, so that each kind gives its share, and all together exactly as many as asked for.
        steps = np.arange(len(self) + 1) * first // len(self)
        taken = np.empty(len(self), np.bool_)
        taken[order] = np.diff(steps) > 0
        return self.select(taken), self.select(~taken)

    def _kinds(self, stratify: str | npt.ArrayLike | None) -> Any:
        if stratify is None:
            return np.zeros(len(self), np.int8)
        if isinstance(stratify, str):
            if stratify not in self.columns:
                raise ValueError(f"{self._name}: no column {stratify!r}; there are {', '.join(self.columns)}")
            stratify = self.columns[stratify][:]
        values = np.asarray(stratify)
        if values.shape != (len(self),):
            raise ValueError(f"stratify has values of shape {values.shape}; needed is one for each record, {len(self)}")
        return np.unique(values, return_inverse=True)[1]

    def _like(self, pattern: str) -> npt.NDArray[np.bool_]:
        fits = re.compile(fnmatch.translate(pattern)).match
        chosen = np.fromiter((fits(key) is not None for key in self.columns["key"]), np.bool_, len(self))
        if not chosen.any():
            example = f", such as {self.columns['key'][0]!r}" if len(self) else ""
            raise ValueError(f"{self._name}: no key is like {pattern!r}{example}")
        return chosen

    @property
    def _name(self) -> str:
        return self.reader.path if self._indices is None else f"the view of {self.reader.path}"

    def _in_pack(self, positions: Indices) -> Indices:
        """The numbers that these samples' records have in the pack."""
        return positions if self._indices is None else self._indices[positions]

    def _draws_in_pack(self, draws: Draws) -> Draws:
        sources, own = draws.sources, self._indices
        if sources is None or own is None or not len(own):
            return draws
        known = sources < len(own)  # a dataset around this one may number more
        return draws._replace(sources=np.where(known, own[np.where(known, sources, 0)], sources))

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
        return SampleList(self._some(self._ahead.take(epoch, positions, self._begin, self.prefetch, draws)))

    def start(
        self,
        indices: npt.ArrayLike,
        epoch: int,
        *,
        draws: Draws = ONCE,
        allocate: Allocate | None = None,
        then: Callable[[BatchJob], Any] | None = None,
        planned: PlannedBatch | None = None,
    ) -> BatchJob:
        """Begin a batch in the threads; ``finish`` gives its samples.

        Args:
            indices: (N,) record indices.
            epoch: that keys the random numbers.
            draws: that key them too.
            allocate: gives the array for decoded images by its shape (N, H, W, C); None takes the dataset's own.
            then: called with the job in the thread that finishes last; ``job.product`` is what it returned.
            planned: from ``plan_ahead``, for these indices; None plans this batch alone.
        """
        if planned is None:
            (planned,) = self.plan_ahead((indices,), epoch, (draws,))
        positions = planned.positions
        with suppress(CorruptError):  # said where the record is read
            self.reader.will_need(positions)  # the whole batch at once, and before the threads come to it
        plan = functools.partial(plan_batch, planned.pipeline, planned, allocate or self._arena.allocate)
        return BatchJob(planned.pipeline, positions, plan, self._pool, then)

    def plan_ahead(
        self,
        batches: Sequence[npt.ArrayLike],
        epoch: int,
        draws: Sequence[Draws] | None = None,
        pipeline: Pipeline | None = None,
    ) -> list[PlannedBatch]:
        """What ``start`` takes as ``planned`` for each of some batches, which costs less than for one after another.

        Args:
            batches: (N,) record indices each.
            epoch: that keys the random numbers.
            draws: of each batch, which key them too; None where all records are drawn once.
            pipeline: of the batches; None takes the present one.
        """
        positions = [self._in_pack(self._positions(batch)) for batch in batches]
        draws = [ONCE] * len(positions) if draws is None else [self._draws_in_pack(each) for each in draws]
        group = PlanGroup(pipeline or self._pipeline, positions, draws, functools.partial(_keys, self.seed, epoch))
        return [PlannedBatch(batch, group, number) for number, batch in enumerate(positions)]

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
        return Samples(job)

    def announce(self, upcoming: tuple[int, npt.NDArray[np.int64]]) -> None:
        """Hear from a sampler which batch will be asked for later. Nothing is decoded until this process is asked for a
        batch: with DataLoader workers, the samples are asked for elsewhere."""
        epoch, indices = upcoming
        draws = upcoming.draws if isinstance(upcoming, Upcoming) else ONCE
        self._ahead.announce(epoch, self._positions(indices), self.prefetch, draws)

    def will_need_blocks(self, indices: Indices) -> None:
        """``Reader.will_need_blocks`` for samples."""
        self.reader.will_need_blocks(self._in_pack(self._positions(indices)))

    def __getstate__(self) -> dict[str, Any]:
        """Without the columns of a view, which are copied when they are used."""
        return self.__dict__ | {"_columns": None}

    def with_threads(self, threads: int) -> ImageDataset:
        """The same dataset with another number of threads, not started yet."""
        other = copy.copy(self)
        other._pool, other._ahead = DecodePool(threads), PrefetchQueue()
        return other

    def __enter__(self) -> ImageDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and release the files. A closed dataset cannot be read; closing twice is allowed.

        Threads and files of a view are those of the dataset that it shows, and end with it.
        """
        self._ahead.clear()
        if self._indices is None:
            self._pool.close()
            self.reader.close()

    def _sample(self, index: Any) -> Any:
        positions = self._positions((index,))
        epoch, draws = self._drawn((index,), positions)
        (planned,) = self.plan_ahead((positions,), epoch, (draws,))
        plan = functools.partial(plan_batch, planned.pipeline, planned)
        return self._some(BatchJob(planned.pipeline, planned.positions, plan, CallerPool()))[0]

    def _batch(self, indices: Sequence[int]) -> Any:
        positions = self._positions(indices)
        epoch, draws = self._drawn(indices, positions)
        images, targets = make_batch(self._some(self.start(positions, epoch, draws=draws)), "stack")
        return as_batch(images, targets, self._pipeline.sample)

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
                f"{self._name}: an index is an int, a slice or a flat sequence of ints, got {indices!r:.80}"
            )
        positions = given.astype(np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < count):
            positions = np.where(positions < 0, positions + count, positions)
            if not (positions.min() >= 0 and positions.max() < count):
                raise IndexError(f"{self._name} has {count} records, asked for {given.min()} to {given.max()}")
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
