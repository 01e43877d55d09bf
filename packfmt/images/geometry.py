"""Crops and flips, chosen before anything is decoded, from image sizes and sample keys, for a whole batch at once.

Every crop has ``size``, the (height, width) of its output, and ``boxes``, which names the source pixels shown
there. The decoder reads no more than the box and resizes it to ``size`` (antialiased bilinear). All functions are
pure and elementwise: a sample's box does not depend on its batch. All classes are immutable and thread-safe.

Boxes are (x0, y0, x1, y1) in source pixels: columns x0 to x1 - 1, rows y0 to y1 - 1, never empty, always inside the
image. Parameters and distributions are torchvision's, after its published algorithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from packfmt.randomness import Keys, integers, uniform

__all__ = ["CenterCrop", "Crop", "HorizontalFlip", "RandomCrop", "RandomResizedCrop", "Resize"]

Ints: TypeAlias = npt.NDArray[np.int64]
Size: TypeAlias = "int | tuple[int, int]"
Range: TypeAlias = tuple[float, float]

# Which draw of a sample is used for what. Changing one changes every user's training run.
_FLIP, _TOP, _LEFT = 0, 1, 2
_AREA, _ASPECT = 16, 17  # of the first attempt; each further attempt is 2 higher
_ATTEMPTS = 10
_FIRST = (_AREA, _ASPECT)
_FURTHER = (*range(_AREA + 2, _AREA + 2 * _ATTEMPTS, 2), *range(_ASPECT + 2, _ASPECT + 2 * _ATTEMPTS, 2))


@runtime_checkable
class Crop(Protocol):
    """What a dataset asks of a crop."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the output, pixels."""

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys) -> Ints:
        """The source pixels to show.

        Args:
            heights, widths: (N,) integers each, pixels, at least 1.
            keys: (N,) uint64, from ``packfmt.randomness.sample_keys``.

        Returns:
            (N, 4) int64, each row (x0, y0, x1, y1).

        Raises:
            TypeError: heights or widths are no integers.
            ValueError: the lengths disagree, a side is below 1, or an image is too small for this crop.
        """


@dataclass(frozen=True, slots=True, init=False)
class _Sized:
    """Holds ``size``, given as (height, width), or as an int for a square."""

    size: tuple[int, int]

    def __init__(self, size: Size) -> None:
        sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
        if len(sides) != 2:
            raise ValueError(f"{type(self).__name__}: size must be an int or (height, width), got {size!r}")
        object.__setattr__(self, "size", tuple(_checked_length(self, "size", side) for side in sides))


@dataclass(frozen=True, slots=True, init=False)
class RandomResizedCrop(_Sized):
    """A box of random area and aspect ratio at a random place, resized to ``size``.

    Up to ten times an area and (log-uniformly) an aspect ratio are drawn; the first box that fits is placed
    uniformly. Where none fits, the largest central box with an aspect ratio in ``ratio`` is taken. Source:
    torchvision's RandomResizedCrop, after Szegedy et al., "Going deeper with convolutions", 2014.

    Args:
        size: output (height, width), or an int for a square.
        scale: least and greatest share of the image's area, 0 <= low <= high <= 1.
        ratio: least and greatest width / height of the box.
    """

    scale: Range
    ratio: Range

    def __init__(self, size: Size, scale: Range = (0.08, 1.0), ratio: Range = (3 / 4, 4 / 3)) -> None:
        _Sized.__init__(self, size)  # a slotted dataclass breaks super() before Python 3.14
        object.__setattr__(self, "scale", _checked_range(self, "scale", scale))
        object.__setattr__(self, "ratio", _checked_range(self, "ratio", ratio))
        if self.scale[1] > 1 or self.ratio[0] == 0:
            raise ValueError(f"RandomResizedCrop: scale must lie in 0..1 and ratio above 0, got {scale} and {ratio}")

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys) -> Ints:
        """See ``Crop.boxes``."""
        height, width = _checked_images(self, (1, 1), heights, widths, keys)
        box_height, box_width, unfit = self._shapes(height, width, keys)
        spare = np.stack((height - box_height, width - box_width))
        top, left = places = integers(keys, (_TOP, _LEFT), 0, spare + 1)
        places[:, unfit] = spare[:, unfit] // 2
        return _box_array(top, left, box_height, box_width)

    def _shapes(self, height: Ints, width: Ints, keys: Keys) -> tuple[Ints, Ints, Ints]:
        """Box heights, box widths, and the positions where no attempt fitted."""
        shapes, fits = self._attempts(height, width, keys, _FIRST)
        box_height, box_width = shapes[:, 0].astype(np.int64)
        waiting: Ints = np.flatnonzero(~fits[0])
        if not len(waiting):
            return box_height, box_width, waiting
        height, width = height[waiting], width[waiting]
        shapes, fits = self._attempts(height, width, keys[waiting], _FURTHER)  # all nine at once: few images wait
        picked = shapes[:, fits.argmax(axis=0), np.arange(len(waiting))].astype(np.int64)
        fitted = fits.any(axis=0)
        picked = np.where(fitted, picked, self._central_shapes(height, width))
        box_height[waiting], box_width[waiting] = picked
        return box_height, box_width, waiting[~fitted]

    def _attempts(
        self, height: Ints, width: Ints, keys: Keys, draws: tuple[int, ...]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Box heights and widths (2, A, N), rounded, and whether each fits (A, N).

        ``draws`` are the A attempts' streams for areas, then those for aspect ratios.
        """
        drawn, attempts = uniform(keys, draws), len(draws) // 2
        log_low, log_high = map(math.log, self.ratio)
        low, span = self.scale[0], self.scale[1] - self.scale[0]
        target = (height.astype(np.float64) * width) * (low + span * drawn[:attempts])
        aspect = np.exp(log_low + (log_high - log_low) * drawn[attempts:])
        shapes = np.empty((2, *target.shape))
        np.divide(target, aspect, out=shapes[0])
        np.multiply(target, aspect, out=shapes[1])
        np.rint(np.sqrt(shapes, out=shapes), out=shapes)
        fits: npt.NDArray[np.bool_] = (shapes[0] <= height) & (shapes[1] <= width) & (shapes > 0).all(axis=0)
        return shapes, fits

    def _central_shapes(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        """The largest box with an aspect ratio in ``ratio``, but no side is rounded to 0."""
        tall = np.maximum(np.rint(np.minimum(height, width / self.ratio[0])), 1)
        wide = np.maximum(np.rint(np.minimum(width, height * self.ratio[1])), 1)
        return tall.astype(np.int64), wide.astype(np.int64)


class RandomCrop(_Sized):
    """A box of exactly ``size`` pixels ((height, width), or an int for a square) at a random place, not resized.

    As torchvision's RandomCrop without padding: an image smaller than ``size`` is an error, since a box cannot hold
    pixels that are not there.
    """

    __slots__ = ()

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys) -> Ints:
        """See ``Crop.boxes``. Raises ValueError, with its position, for an image smaller than ``size``."""
        height, width = _checked_images(self, self.size, heights, widths, keys)
        top = integers(keys, _TOP, 0, height - self.size[0] + 1)
        left = integers(keys, _LEFT, 0, width - self.size[1] + 1)
        return _box_array(top, left, *self.size)


@dataclass(frozen=True, slots=True, init=False)
class CenterCrop(_Sized):
    """The centre of the image, as in evaluation.

    With ``resize`` the box shows what torchvision's ``Resize(resize)`` followed by ``CenterCrop(size)`` shows, in
    source pixels, each edge rounded to the nearest: ``CenterCrop(224, resize=256)`` is the usual ImageNet recipe.
    Without it the box is the central ``size`` pixels, not resized; an image smaller than that is an error
    (torchvision pads it with black).

    Args:
        size: output (height, width), or an int for a square.
        resize: what the image's shorter side would be resized to, pixels, at least the larger of ``size``.
    """

    resize: int | None

    def __init__(self, size: Size, resize: int | None = None) -> None:
        _Sized.__init__(self, size)  # a slotted dataclass breaks super() before Python 3.14
        object.__setattr__(self, "resize", None if resize is None else _checked_length(self, "resize", resize))
        if self.resize is not None and self.resize < max(self.size):
            raise ValueError(f"CenterCrop: resize must be at least {max(self.size)}, as the crop, got {resize}")

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys | None = None) -> Ints:
        """See ``Crop.boxes``; the keys are not used."""
        least = self.size if self.resize is None else (1, 1)
        height, width = _checked_images(self, least, heights, widths, keys)
        if self.resize is None:
            top = np.rint((height - self.size[0]) / 2).astype(np.int64)
            left = np.rint((width - self.size[1]) / 2).astype(np.int64)
            return _box_array(top, left, *self.size)
        short = np.minimum(height, width)
        top, bottom = _central_span(height, self.resize * height // short, self.size[0])
        left, right = _central_span(width, self.resize * width // short, self.size[1])
        return np.stack((left, top, right, bottom), axis=1)


class Resize(_Sized):
    """The whole image, resized to ``size`` ((height, width), or an int for a square) whatever its shape.

    ``Resize(224)`` gives a square of 224 x 224 pixels, because a batch needs one shape. torchvision's ``Resize(224)``
    keeps the aspect ratio and makes the shorter side 224 pixels; with (height, width) the two agree.
    """

    __slots__ = ()

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys | None = None) -> Ints:
        """See ``Crop.boxes``; the keys are not used."""
        height, width = _checked_images(self, (1, 1), heights, widths, keys)
        return _box_array(np.zeros_like(height), np.zeros_like(width), height, width)


@dataclass(frozen=True, slots=True)
class HorizontalFlip:
    """Swaps left and right with probability ``p``, 0 <= p <= 1."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"HorizontalFlip: p must lie in 0..1, got {self.p}")

    def flips(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which samples are flipped: (N,) bool for (N,) uint64 keys. Independent of the same keys' crops."""
        return uniform(keys, _FLIP) < self.p


def _central_span(length: Ints, resized: Ints, shown: int) -> tuple[Ints, Ints]:
    """First and one past the last source pixel, on one axis, under the central ``shown`` of ``resized`` pixels."""
    first = np.rint((resized - shown) / 2)
    start = np.minimum(np.rint(first * length / resized), length - 1).astype(np.int64)
    stop = np.rint((first + shown) * length / resized).astype(np.int64)
    return start, np.maximum(stop, start + 1)


def _box_array(top: Ints, left: Ints, height: Ints | int, width: Ints | int) -> Ints:
    boxes = np.empty((len(top), 4), dtype=np.int64)
    boxes[:, 0], boxes[:, 1], boxes[:, 2], boxes[:, 3] = left, top, left + width, top + height
    return boxes


def _checked_images(
    crop: _Sized, least: tuple[int, int], heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys | None
) -> tuple[Ints, Ints]:
    """Heights and widths as int64 arrays, each image at least ``least`` (height, width)."""
    height, width = np.asarray(heights), np.asarray(widths)
    shapes = [height.shape, width.shape] + ([] if keys is None else [keys.shape])
    if height.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"heights, widths and keys must share one shape (N,), got {shapes}")
    if height.size and (height.dtype.kind not in "iu" or width.dtype.kind not in "iu"):
        raise TypeError(f"heights and widths must be integers, got dtypes {height.dtype} and {width.dtype}")
    small = (height < least[0]) | (width < least[1])
    if small.any():
        at = int(np.argmax(small))
        raise ValueError(
            f"{type(crop).__name__} needs images of {least[0]} x {least[1]} pixels (height x width) or more; sample "
            f"{at} in the batch has {height[at]} x {width[at]}. RandomResizedCrop, Resize, CenterCrop(resize=) enlarge"
        )
    return height.astype(np.int64), width.astype(np.int64)


def _checked_length(owner: object, name: str, value: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(owner).__name__}: {name} must be whole pixels, at least 1, got {value!r}")
    return int(value)


def _checked_range(owner: object, name: str, value: Range) -> Range:
    if len(value) != 2 or not 0 <= value[0] <= value[1] < math.inf or value[1] == 0:
        raise ValueError(f"{type(owner).__name__}: {name} must be (low, high), 0 <= low <= high > 0, got {value!r}")
    return float(value[0]), float(value[1])
