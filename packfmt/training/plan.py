"""What is known of records before they are read: crops, flips, where they lie, and the memory their pixels go to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from packfmt.errors import CorruptError, DecodeError
from packfmt.images.geometry import Crop, VaryingCrop, choose_flips
from packfmt.images.libjpeg import FLAT
from packfmt.images.sniff import sniff
from packfmt.randomness import Keys
from packfmt.sampling.sampleindex import Draws, join_draws
from packfmt.storage.base import PartPlan, ReadPlan
from packfmt.training.pipeline import Pipeline

__all__ = ["Allocate", "Plan", "PlanGroup", "PlannedBatch", "add_note", "choose", "plan_batch"]

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
Boxes = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Flips = npt.NDArray[np.bool_] | npt.NDArray[np.uint8]
NO_SIZES = np.empty((0, 2), np.int64)
Allocate = Callable[[tuple[int, ...]], Pixels]

BELIEVED = 1 << 22  # pixels that the index may say an image has, if so many bytes can hold them


@dataclass(slots=True)
class Plan:
    """What is known of N records before they are read, and once memory was taken for them, where their images go.

    Attributes:
        indices, keys: (N,) the records and their random keys.
        records: tells where their bytes lie.
        heights, widths: (N,) of the images as the decoder shows them.
        boxes: (N, 4) the crops in source pixels, None without a crop.
        flips: (N,) as a decoder takes them, or None.
        orientations: (N,) EXIF tags where they are applied, else None.
        out: the batch's array (N, H, W, C) where all images come out in one size that so many bytes can hold, else
            None: each image then gets memory of its own when its turn comes.
        images: one entry per sample: what the transform returned; without one, and without ``out``, its pixels.
        targets: what ``transforms`` returned beside the images; None without them.
        sizes: (N, 2) the heights and widths that images come out in; none where the crop gives all one size.
        refused: records that the index says something impossible of, by their positions, and why.
    """

    indices: npt.NDArray[np.int64]
    keys: Keys
    records: ReadPlan
    heights: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    boxes: Boxes | None
    flips: Flips | None
    orientations: Array | None
    out: Pixels | None = None
    images: list[Any] = field(default_factory=list)
    targets: list[Any] | None = None
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: NO_SIZES)
    refused: dict[int, str] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> Plan:
        """That of the records ``start`` to ``stop`` - 1, before memory is taken."""
        return Plan(
            self.indices[start:stop],
            self.keys[start:stop],
            PartPlan(self.records, start),
            self.heights[start:stop],
            self.widths[start:stop],
            None if self.boxes is None else self.boxes[start:stop],
            None if self.flips is None else self.flips[start:stop],
            None if self.orientations is None else self.orientations[start:stop],
        )

    def size(self, position: int) -> tuple[int, int]:
        """The (height, width) that an image comes out in."""
        if self.out is not None:
            return self.out.shape[1], self.out.shape[2]
        height, width = self.sizes[position].tolist()
        return height, width

    def pixels(self, position: int) -> Pixels:
        """A decoded image (H, W, C), before the transform."""
        pixels: Pixels = self.images[position] if self.out is None else self.out[position]
        return pixels


def choose(pipeline: Pipeline, indices: npt.NDArray[np.int64], keys: Keys) -> Plan:
    """Choose crops and flips for records, and look up where they lie.

    Args:
        pipeline: the dataset's.
        indices: (N,) records.
        keys: (N,) their random keys.

    Raises:
        ValueError: an image is too small for the crop, with ``on_error="raise"``; a note names it.
    """
    heights, widths, orientations = _sizes(pipeline, indices)
    boxes = None if pipeline.crop is None else _boxes(pipeline, pipeline.crop, indices, heights, widths, keys)
    flips = choose_flips(pipeline.flips, keys)
    return Plan(indices, keys, pipeline.reader.plan(indices), heights, widths, boxes, flips, orientations)


def plan_batch(pipeline: Pipeline, planned: Callable[[], Plan], allocate: Allocate | None = None) -> Plan:
    """Get the plan of a batch's records, and take memory for them.

    Args:
        pipeline: the dataset's.
        planned: gives the plan.
        allocate: gives the array for decoded images by its shape; None takes new memory.
    """
    plan = planned()
    count = len(plan.indices)
    size = None if pipeline.crop is None else pipeline.crop.size
    if size is None:
        plan.sizes = _output_sizes(pipeline.crop, plan)
        plan.refused, thin = _bound(pipeline, plan, plan.sizes)
        size = None if thin else _common_size(plan.sizes)
    channels = 3 if pipeline.decoder.mode == "RGB" else 1
    plan.out = None if size is None else (allocate or _new_array)((count, *size, channels))
    plan.images = [None] * count
    plan.targets = None if pipeline.transforms is None else [None] * count
    return plan


def _sizes(
    pipeline: Pipeline, indices: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array | None]:
    """Heights and widths as the decoder will show them, and the orientation tags if they are applied."""
    columns = pipeline.reader.columns
    heights = columns["height"][indices].astype(np.int64)
    widths = columns["width"][indices].astype(np.int64)
    unknown = (heights < 1) | (widths < 1)
    if unknown.any():  # a kept bad image: it will fail when decoded, and until then needs a size that any crop takes
        heights[unknown], widths[unknown] = (pipeline.crop and pipeline.crop.size) or (1, 1)
    if pipeline.decoder.orientation == "ignore":
        return heights, widths, None
    orientations = columns["orientation"][indices]
    turned = orientations >= 5
    return np.where(turned, widths, heights), np.where(turned, heights, widths), orientations


def _boxes(
    pipeline: Pipeline,
    crop: Crop,
    indices: npt.NDArray[np.int64],
    heights: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    keys: Keys,
) -> Boxes:
    try:
        return crop.boxes(heights, widths, keys)
    except ValueError as error:
        refused = [place for place in range(len(indices)) if not _takes(crop, place, heights, widths, keys)]
        if not refused or crop.size is None:
            raise
        small = (heights[refused] < crop.size[0]) | (widths[refused] < crop.size[1])
        if pipeline.on_error == "skip" and small.all():
            heights[refused], widths[refused] = crop.size  # its box leaves the picture, which decoding will say
            return crop.boxes(heights, widths, keys)
        index = int(indices[refused[0]])
        add_note(error, f"it is record {index}, key {pipeline.reader.key(index)!r}")
        raise


def _takes(crop: Crop, place: int, heights: npt.NDArray[np.int64], widths: npt.NDArray[np.int64], keys: Keys) -> bool:
    one = slice(place, place + 1)
    try:
        crop.boxes(heights[one], widths[one], keys[one])
    except ValueError:
        return False
    return True


def _output_sizes(crop: Crop | None, plan: Plan) -> npt.NDArray[np.int64]:
    """(N, 2) heights and widths of images that keep their own, or get one that follows from it."""
    if crop is None:
        return np.stack((plan.heights, plan.widths), axis=1)
    return cast(VaryingCrop, crop).sizes(plan.heights, plan.widths)


def _bound(pipeline: Pipeline, plan: Plan, sizes: npt.NDArray[np.int64]) -> tuple[dict[int, str], bool]:
    """Keep what a pack's columns say from deciding how much memory a batch takes.

    A size that is large, or larger than a JPEG of so many bytes can have, is compared with the image's own header,
    which decoders obey too. Where it differs, ``sizes`` gets a small one in its place.

    Returns:
        Position to message of the records that are refused; and whether an image's own header says more than a JPEG of
        so many bytes can hold. It may be a flat PNG, or lie as the columns do: hundreds of MB for each such record of a
        batch are not taken at once.
    """
    most = pipeline.decoder.max_pixels
    heights, widths = plan.heights, plan.widths
    try:
        lengths = pipeline.reader.lengths(plan.indices).astype(np.float64)
    except CorruptError:  # of some; said where they are read
        lengths = np.zeros(len(heights))
    # In floats, since two sides of 2**32 - 1 are beyond int64.
    doubtful = heights.astype(np.float64) * widths > np.minimum(FLAT * np.maximum(lengths, 1), BELIEVED)
    large = sizes.astype(np.float64).prod(axis=1) > most
    refused: dict[int, str] = {}
    taken_back, thin = large.copy(), False
    for position in np.flatnonzero(doubtful).tolist():
        try:
            (record,) = plan.records.views(position, position + 1)
            header = sniff(record, max_pixels=most)
        except CorruptError:  # said where it is read
            taken_back[position] = True
            continue
        except DecodeError as error:
            refused[position] = error.message
            continue
        stated = int(heights[position]), int(widths[position])
        if sorted(stated) != sorted((header.height, header.width)):
            refused[position] = (
                f"the pack's columns say {stated[1]}x{stated[0]} pixels, the image's header {header.width}x"
                f"{header.height}: packfmt convert makes a pack with the right ones"
            )
        thin = thin or header.height * header.width > FLAT * len(record)
    for position in np.flatnonzero(large).tolist():
        height, width = sizes[position].tolist()
        refused.setdefault(
            position,
            f"{widths[position]}x{heights[position]} pixels would come out as {width}x{height}, more than max_pixels = "
            f"{most:,}; choose a crop, or Resize with max_size",
        )
    taken_back[list(refused)] = True
    if taken_back.any():
        sizes[taken_back] = (1, 1) if taken_back.all() else sizes[~taken_back][0]  # as the others: they may have one
    return refused, thin


def _common_size(sizes: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    if len(sizes) and (sizes == sizes[0]).all():
        return int(sizes[0, 0]), int(sizes[0, 1])
    return None


def _new_array(shape: tuple[int, ...]) -> Pixels:
    array: Pixels = torch.empty(shape, dtype=torch.uint8, device="cpu").numpy()
    return array


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note``, also before Python 3.11, where a cause shows it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
        return
    error.__notes__ = [*getattr(error, "__notes__", ()), note]
    error.__cause__ = RuntimeError("\n".join(error.__notes__))


Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One batch of a group: its records' positions, and when called their plan."""

    positions: Positions
    group: PlanGroup
    number: int

    def __call__(self) -> Plan:
        return self.group.plan(self.number)

    @property
    def pipeline(self) -> Pipeline:
        """What they were chosen by, and the batch is to be made by."""
        return self.group.pipeline


class PlanGroup:
    """The plans of several batches, made for all in the thread that first asks. Thread-safe.

    Args:
        pipeline: the dataset's.
        batches: (N,) records each.
        draws: of each batch.
        keys: gives records' random keys.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[Positions],
        draws: Sequence[Draws],
        keys: Callable[[Positions, Draws], Keys],
    ) -> None:
        self.pipeline = pipeline
        self._batches = batches
        self._draws = draws
        self._keys = keys
        self._ends = list(accumulate(map(len, batches)))
        self._lock = threading.Lock()
        self._whole: Plan | None = None
        self._apart = len(batches) == 1

    def plan(self, number: int) -> Plan:
        """Those for one of the batches.

        Raises:
            ValueError: an image of this batch is too small for the crop, with ``on_error="raise"``; a note names it.
        """
        with self._lock:  # who comes second waits, since it can do nothing without
            if self._whole is None and not self._apart:
                try:
                    self._whole = self._choose(np.concatenate(self._batches), join_draws(self._batches, self._draws))
                except Exception:  # one batch's error is not to come in another's place
                    self._apart = True
        batch = self._batches[number]
        if self._whole is None:
            return self._choose(batch, self._draws[number])
        return self._whole.part(self._ends[number] - len(batch), self._ends[number])

    def _choose(self, positions: Positions, draws: Draws) -> Plan:
        return choose(self.pipeline, positions, self._keys(positions, draws))
