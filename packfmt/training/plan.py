"""What is known of a batch before it is read: crops, flips, and the memory its pixels go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from packfmt.images.decode import Decoder
from packfmt.images.geometry import Crop, HorizontalFlip
from packfmt.randomness import Keys
from packfmt.storage import Reader
from packfmt.storage.readplan import ReadPlan

__all__ = ["Allocate", "BatchPlan", "Recipe", "add_note", "plan_batch"]

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
Allocate = Callable[[tuple[int, ...]], Pixels]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How samples are made: what stays the same for all batches of a dataset. Thread-safe."""

    reader: Reader
    decoder: Decoder
    crop: Crop | None
    flip: HorizontalFlip | None
    transform: Callable[[Any], Any] | None
    present: Callable[[Pixels], Any]  # pixels (H, W, C) to what the transform and the user see
    on_error: Literal["raise", "skip"]


@dataclass(slots=True)
class BatchPlan:
    """Everything about a batch that is known before it is read. ``records`` tells where its bytes lie.

    ``out`` is the batch's array (N, H, W, C) where all images come out in one size, else None. ``boxes`` (N, 4) are the
    crops in source pixels, None without a crop. ``images`` takes one entry per sample: its pixels, or what the
    transform returned.
    """

    indices: npt.NDArray[np.int64]
    records: ReadPlan
    keys: Keys
    heights: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    boxes: npt.NDArray[np.int64] | None
    flips: npt.NDArray[np.bool_] | None
    orientations: Array | None
    out: Pixels | None
    images: list[Any]


def plan_batch(
    recipe: Recipe, indices: npt.NDArray[np.int64], keys: Keys, allocate: Allocate | None = None
) -> BatchPlan:
    """Choose crops and flips for these records, and take memory for the batch.

    Args:
        recipe: the dataset's.
        indices: (N,) records.
        keys: (N,) their random keys.
        allocate: gives the array for decoded images by its shape; None takes new memory.

    Raises:
        ValueError: an image is too small for the crop; a note names it.
    """
    heights, widths, orientations = _sizes(recipe, indices)
    boxes = None if recipe.crop is None else _boxes(recipe, recipe.crop, indices, heights, widths, keys)
    flips = None if recipe.flip is None else recipe.flip.flips(keys)
    size = recipe.crop.size if recipe.crop is not None else _common_size(heights, widths)
    channels = 3 if recipe.decoder.mode == "RGB" else 1
    out = None if size is None else (allocate or _new_array)((len(indices), *size, channels))
    records = recipe.reader.plan(indices)
    images = [None] * len(indices)
    return BatchPlan(indices, records, keys, heights, widths, boxes, flips, orientations, out, images)


def _sizes(
    recipe: Recipe, indices: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array | None]:
    """Heights and widths as the decoder will show them, and the orientation tags if they are applied."""
    columns = recipe.reader.columns
    heights = columns["height"][indices].astype(np.int64)
    widths = columns["width"][indices].astype(np.int64)
    unknown = (heights < 1) | (widths < 1)
    if unknown.any():  # a kept bad image: it will fail when decoded, and until then needs a size that any crop takes
        heights[unknown], widths[unknown] = recipe.crop.size if recipe.crop is not None else (1, 1)
    if recipe.decoder.orientation == "ignore":
        return heights, widths, None
    orientations = columns["orientation"][indices]
    turned = orientations >= 5
    return np.where(turned, widths, heights), np.where(turned, heights, widths), orientations


def _boxes(
    recipe: Recipe,
    crop: Crop,
    indices: npt.NDArray[np.int64],
    heights: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    keys: Keys,
) -> npt.NDArray[np.int64]:
    try:
        return crop.boxes(heights, widths, keys)
    except ValueError as error:
        for place, index in enumerate(indices.tolist()):
            try:
                crop.boxes(heights[place : place + 1], widths[place : place + 1], keys[place : place + 1])
            except ValueError:
                add_note(error, f"it is record {index}, key {recipe.reader.key(index)!r}")
                break
        raise


def _common_size(heights: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    if len(heights) and (heights == heights[0]).all() and (widths == widths[0]).all():
        return int(heights[0]), int(widths[0])
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
