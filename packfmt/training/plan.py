"""What is known of records before they are read: crops, flips, where they lie, and the memory their pixels go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from packfmt.errors import CorruptError, DecodeError
from packfmt.images.geometry import Crop, VaryingCrop, choose_flips
from packfmt.images.libjpeg import FLAT
from packfmt.images.sniff import sniff
from packfmt.randomness import Keys
from packfmt.storage.readplan import PartPlan, ReadPlan
from packfmt.training.pipeline import Pipeline

__all__ = ["Allocate", "BatchPlan", "Plan", "add_note", "choose", "plan_batch"]

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
Boxes = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Flips = npt.NDArray[np.bool_] | npt.NDArray[np.uint8]
NO_SIZES = np.empty((0, 2), np.int64)
Allocate = Callable[[tuple[int, ...]], Pixels]

BELIEVED = 1 << 22  # pixels that the index may say an image has, if so many bytes can hold them


@dataclass(slots=True)
class Plan:
    """What is known of N records before they are read. ``records`` tells where their bytes lie.

    ``boxes`` (N, 4) are the crops in source pixels, None without a crop; ``flips`` (N,) as a decoder takes them.
    """

    indices: npt.NDArray[np.int64]
    keys: Keys
    records: ReadPlan
    heights: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    boxes: Boxes | None
    flips: Flips | None
    orientations: Array | None

    def part(self, start: int, stop: int) -> Plan:
        """Those of the records ``start`` to ``stop`` - 1."""
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


@dataclass(slots=True)
class BatchPlan:
    """A batch's choices, and the memory it goes to.

    ``out`` is the batch's array (N, H, W, C) where all images come out in one size that so many bytes can hold, else
    None: each image then gets memory of its own when its turn comes. ``images`` takes one entry per sample: what the
    transform returned; without one, and without ``out``, its pixels. ``targets`` takes what ``transforms`` returned
    beside it, and is None without them. ``sizes`` (N, 2) are the heights and widths that images come out in; there are
    none where the crop gives all one size. ``refused`` are the records that the index says something impossible of, by
    their positions, and why.
    """

    choices: Plan
    out: Pixels | None
    images: list[Any]
    targets: list[Any] | None
    sizes: npt.NDArray[np.int64]
    refused: dict[int, str]

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


def plan_batch(pipeline: Pipeline, chosen: Callable[[], Plan], allocate: Allocate | None = None) -> BatchPlan:
    """Get the choices for a batch's records, and take memory for them.

    Args:
        pipeline: the dataset's.
        chosen: gives the choices.
        allocate: gives the array for decoded images by its shape; None takes new memory.
    """
    choices = chosen()
    count = len(choices.indices)
    size, sizes = None if pipeline.crop is None else pipeline.crop.size, NO_SIZES
    refused: dict[int, str] = {}
    if size is None:
        sizes = _output_sizes(pipeline.crop, choices)
        refused, thin = _bound(pipeline, choices, sizes)
        size = None if thin else _common_size(sizes)
    channels = 3 if pipeline.decoder.mode == "RGB" else 1
    out = None if size is None else (allocate or _new_array)((count, *size, channels))
    targets = None if pipeline.transforms is None else [None] * count
    return BatchPlan(choices, out, [None] * count, targets, sizes, refused)


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


def _output_sizes(crop: Crop | None, choices: Plan) -> npt.NDArray[np.int64]:
    """(N, 2) heights and widths of images that keep their own, or get one that follows from it."""
    if crop is None:
        return np.stack((choices.heights, choices.widths), axis=1)
    return cast(VaryingCrop, crop).sizes(choices.heights, choices.widths)


def _bound(pipeline: Pipeline, choices: Plan, sizes: npt.NDArray[np.int64]) -> tuple[dict[int, str], bool]:
    """Keep what a pack's columns say from deciding how much memory a batch takes.

    A size that is large, or larger than a JPEG of so many bytes can have, is compared with the image's own header,
    which decoders obey too. Where it differs, ``sizes`` gets a small one in its place.

    Returns:
        Position to message of the records that are refused; and whether an image's own header says more than a JPEG of
        so many bytes can hold. It may be a flat PNG, or lie as the columns do: hundreds of MB for each such record of a
        batch are not taken at once.
    """
    most = pipeline.decoder.max_pixels
    heights, widths = choices.heights, choices.widths
    try:
        lengths = pipeline.reader.lengths(choices.indices).astype(np.float64)
    except CorruptError:  # of some; said where they are read
        lengths = np.zeros(len(heights))
    # In floats, since two sides of 2**32 - 1 are beyond int64.
    doubtful = heights.astype(np.float64) * widths > np.minimum(FLAT * np.maximum(lengths, 1), BELIEVED)
    large = sizes.astype(np.float64).prod(axis=1) > most
    refused: dict[int, str] = {}
    taken_back, thin = large.copy(), False
    for position in np.flatnonzero(doubtful).tolist():
        try:
            (record,) = choices.records.views(position, position + 1)
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
