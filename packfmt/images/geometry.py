"""Crops and flips, chosen before anything is decoded, from image sizes and sample keys, for a whole batch at once.

Every crop has ``size``, the (height, width) of its output, and ``boxes``, which names the source pixels shown
there. The decoder resizes the box to ``size`` (antialiased). All functions are pure and elementwise: a sample's box
does not depend on its batch. All classes are immutable and thread-safe.

Boxes are (x0, y0, x1, y1) in source pixels, never empty, always inside the image. Whole numbers mean that the image is
cut first and then resized: columns x0 to x1 - 1 and rows y0 to y1 - 1 are all that the result depends on. Floats mean
that the whole image is resized and then cut: edges may lie inside of pixels, and what is beyond an edge has its share
in the pixels along it. Parameters and distributions are torchvision's, after its published algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from packfmt.randomness import Keys, integers, uniform

__all__ = [
    "CenterCrop",
    "Crop",
    "Flip",
    "HorizontalFlip",
    "Interpolation",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "VaryingCrop",
    "VerticalFlip",
    "choose_flips",
]

Interpolation = Literal["bilinear", "bicubic"]
Ints: TypeAlias = npt.NDArray[np.int64]
Boxes: TypeAlias = "npt.NDArray[np.int64] | npt.NDArray[np.float64]"
Side: TypeAlias = "Ints | npt.NDArray[np.float64]"  # whole pixels, whatever the dtype
Flips: TypeAlias = "npt.NDArray[np.bool_] | npt.NDArray[np.uint8]"
Size: TypeAlias = "int | tuple[int, int]"
Range: TypeAlias = tuple[float, float]

# Which draw of a sample is used for what. Changing one changes every user's training run.
_FLIP, _TOP, _LEFT, _FLIP_VERTICALLY = 0, 1, 2, 3
_AREA, _ASPECT = 16, 17  # of the first attempt; each further attempt is 2 higher
_ATTEMPTS = 10
_FIRST = (_AREA, _ASPECT)
_FURTHER = (*range(_AREA + 2, _AREA + 2 * _ATTEMPTS, 2), *range(_ASPECT + 2, _ASPECT + 2 * _ATTEMPTS, 2))


@runtime_checkable
class Crop(Protocol):
    """What a dataset asks of a crop. It may also say how to resize, in ``interpolation``: bilinear if it does not."""

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the output, pixels. None for a ``VaryingCrop``."""

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys) -> Boxes:
        """The source pixels to show.

        Args:
            heights, widths: (N,) integers each, pixels, at least 1.
            keys: (N,) uint64, from ``packfmt.randomness.sample_keys``.

        Returns:
            (N, 4), each row (x0, y0, x1, y1): int64 to cut and then resize, float64 to resize and then cut.

        Raises:
            TypeError: heights or widths are no integers.
            ValueError: the lengths disagree, a side is below 1, or an image is too small for this crop.
        """


class VaryingCrop(Crop, Protocol):
    """A crop whose ``size`` is None, since it depends on the image."""

    def sizes(self, heights: npt.ArrayLike, widths: npt.ArrayLike) -> Ints:
        """(N, 2), the (height, width) that images of these (N,) heights and widths come out in."""


@dataclass(frozen=True, slots=True, init=False)
class _Sized:
    """Holds ``size``, given as (height, width), or as an int for a square."""

    size: tuple[int, int]

    def __init__(self, size: Size, *further: NoReturn) -> None:
        _refuse_further(self, size, further)
        object.__setattr__(self, "size", _checked_size(self, size))


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
        interpolation: "bilinear" or "bicubic", antialiased.
    """

    scale: Range
    ratio: Range
    interpolation: Interpolation

    def __init__(
        self,
        size: Size,
        scale: Range = (0.08, 1.0),
        ratio: Range = (3 / 4, 4 / 3),
        *,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        if not isinstance(scale, (tuple, list)):
            _refuse_further(self, size, (scale,), "scale is (low, high); ")
        _Sized.__init__(self, size)  # a slotted dataclass breaks super() before Python 3.14
        object.__setattr__(self, "interpolation", _checked_interpolation(self, interpolation))
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

    With ``resize`` it shows what torchvision's ``Resize(resize)`` followed by ``CenterCrop(size)`` shows, to the pixel:
    ``CenterCrop(224, resize=256)`` is the usual ImageNet recipe. Without it the box is the central ``size`` pixels, not
    resized; an image smaller than that is an error (torchvision pads it with black).

    Args:
        size: output (height, width), or an int for a square.
        resize: what the image's shorter side would be resized to, pixels, at least the larger of ``size``.
        interpolation: "bilinear" or "bicubic", antialiased.
    """

    resize: int | None
    interpolation: Interpolation

    def __init__(
        self,
        size: Size,
        *further: NoReturn,
        resize: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        _refuse_further(self, size, further, "resize is given by name; ")
        _Sized.__init__(self, size)  # a slotted dataclass breaks super() before Python 3.14
        object.__setattr__(self, "resize", None if resize is None else _checked_length(self, "resize", resize))
        object.__setattr__(self, "interpolation", _checked_interpolation(self, interpolation))
        if self.resize is not None and self.resize < max(self.size):
            raise ValueError(f"CenterCrop: resize must be at least {max(self.size)}, as the crop, got {resize}")

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys | None = None) -> Boxes:
        """See ``Crop.boxes``; the keys are not used."""
        least = self.size if self.resize is None else (1, 1)
        height, width = _checked_images(self, least, heights, widths, keys)
        resized = (height, width) if self.resize is None else _shorter_side_to(self.resize, height, width)
        top, left = (np.rint((side - shown) / 2) for side, shown in zip(resized, self.size, strict=True))
        if self.resize is None:
            return _box_array(top, left, *self.size)
        return np.stack(
            (
                left * width / resized[1],
                top * height / resized[0],
                (left + self.size[1]) * width / resized[1],
                (top + self.size[0]) * height / resized[0],
            ),
            axis=1,
        )


@dataclass(frozen=True, slots=True, init=False)
class Resize:
    """The whole image, resized.

    ``Resize(224)`` gives a square of 224 x 224 pixels whatever the image's shape, because a batch needs one shape.
    ``Resize(shorter=224)`` is torchvision's ``Resize(224)``, which keeps the aspect ratio: images then differ in size,
    and a batch of them is a list or padded, with ``collate="list"`` or ``"pad"``.

    Args:
        size: output (height, width), or an int for a square.
        shorter: instead of ``size``, what the shorter side becomes, pixels; the longer side follows, rounded down.
        max_size: with ``shorter``, the most pixels that the longer side may have; the shorter side gets less then.
        interpolation: "bilinear" or "bicubic", antialiased.
    """

    size: tuple[int, int] | None
    shorter: int | None
    max_size: int | None
    interpolation: Interpolation

    def __init__(
        self,
        size: Size | None = None,
        *further: NoReturn,
        shorter: int | None = None,
        max_size: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        _refuse_further(self, size, further)
        if size is not None and shorter is not None:
            raise ValueError(f"Resize: give either size or shorter, got {size!r} and {shorter!r}")
        object.__setattr__(self, "size", None if shorter is not None else _checked_size(self, size))
        object.__setattr__(self, "shorter", None if shorter is None else _checked_length(self, "shorter", shorter))
        object.__setattr__(self, "max_size", None if max_size is None else _checked_length(self, "max_size", max_size))
        object.__setattr__(self, "interpolation", _checked_interpolation(self, interpolation))
        if self.max_size is not None and (self.shorter is None or self.max_size < self.shorter):
            raise ValueError(f"Resize: max_size goes with shorter and is at least as much, got {max_size}, {shorter}")

    def boxes(self, heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys | None = None) -> Ints:
        """See ``Crop.boxes``; the keys are not used."""
        height, width = _checked_images(self, (1, 1), heights, widths, keys)
        return _box_array(np.zeros_like(height), np.zeros_like(width), height, width)

    def sizes(self, heights: npt.ArrayLike, widths: npt.ArrayLike) -> Ints:
        """(N, 2) int64, the (height, width) that images of these (N,) heights and widths come out in."""
        height, width = _checked_images(self, (1, 1), heights, widths, None)
        if self.shorter is None:
            return np.tile(np.array(self.size, np.int64), (len(height), 1))
        sizes = np.stack(_shorter_side_to(self.shorter, height, width), axis=1)
        if self.max_size is not None:
            long = sizes.max(axis=1, keepdims=True)
            fitted = np.where(sizes == long, self.max_size, np.maximum(self.max_size * self.shorter // long, 1))
            sizes = np.where(long > self.max_size, fitted, sizes)
        return sizes


class Flip(Protocol):
    """Mirrors images, each by a draw of its own.

    Attributes:
        code: what ``flips`` of a decoder adds up: 1 swaps left and right, 2 top and bottom.
    """

    code: ClassVar[int]

    def flips(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which samples are flipped: (N,) bool for (N,) uint64 keys."""


@dataclass(frozen=True, slots=True)
class _RandomFlip:
    """Flips with probability ``p``."""

    code: ClassVar[int]
    _stream: ClassVar[int]

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"{type(self).__name__}: p must lie in 0..1, got {self.p}")

    def flips(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which samples are flipped: (N,) bool for (N,) uint64 keys. Independent of their crops and other flips."""
        return uniform(keys, self._stream) < self.p


class HorizontalFlip(_RandomFlip):
    """Swaps left and right with probability ``p``, 0 <= p <= 1."""

    __slots__ = ()
    code = 1
    _stream = _FLIP


class VerticalFlip(_RandomFlip):
    """Swaps top and bottom with probability ``p``, 0 <= p <= 1."""

    __slots__ = ()
    code = 2
    _stream = _FLIP_VERTICALLY


def choose_flips(flips: Sequence[Flip], keys: Keys) -> Flips | None:
    """What each of (N,) keys' samples is flipped by: (N,) bool for left and right alone, else uint8, the sum of codes.

    None without any flip.
    """
    if not flips:
        return None
    if len(flips) == 1 and flips[0].code == HorizontalFlip.code:
        return flips[0].flips(keys)
    codes = np.zeros(len(keys), np.uint8)
    for flip in flips:
        codes ^= flip.flips(keys) * np.uint8(flip.code)
    return codes


def _shorter_side_to(shorter: int, height: Ints, width: Ints) -> tuple[Ints, Ints]:
    """Heights and widths of images resized so that the shorter side is ``shorter``, as torchvision rounds them."""
    short = np.minimum(height, width)
    return shorter * height // short, shorter * width // short


def _box_array(top: Side, left: Side, height: Side | int, width: Side | int) -> Ints:
    boxes = np.empty((len(top), 4), dtype=np.int64)
    boxes[:, 0], boxes[:, 1], boxes[:, 2], boxes[:, 3] = left, top, left + width, top + height
    return boxes


def _checked_images(
    crop: Crop, least: tuple[int, int], heights: npt.ArrayLike, widths: npt.ArrayLike, keys: Keys | None
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


def _refuse_further(owner: object, size: object, further: tuple[object, ...], why: str = "") -> None:
    """Tell who gives a height and a width one after the other how it is done."""
    if further:
        name, given = type(owner).__name__, ", ".join(map(repr, (size, *further)))
        pair = f"({size!r}, {further[0]!r})"
        raise TypeError(f"{name}({given}): {why}a height and a width are one argument: {name}({pair})")


def _checked_interpolation(owner: object, value: Interpolation) -> Interpolation:
    if value not in get_args(Interpolation):
        allowed = " or ".join(map(repr, get_args(Interpolation)))
        raise ValueError(f"{type(owner).__name__}: interpolation must be {allowed}, got {value!r}")
    return value


def _checked_size(owner: object, size: Size | None) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2:
        raise ValueError(f"{type(owner).__name__}: size must be an int or (height, width), got {size!r}")
    return _checked_length(owner, "size", sides[0]), _checked_length(owner, "size", sides[1])


def _checked_length(owner: object, name: str, value: int | None) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(owner).__name__}: {name} must be whole pixels, at least 1, got {value!r}")
    return int(value)


def _checked_range(owner: object, name: str, value: Range) -> Range:
    if len(value) != 2 or not 0 <= value[0] <= value[1] < math.inf or value[1] == 0:
        raise ValueError(f"{type(owner).__name__}: {name} must be (low, high), 0 <= low <= high > 0, got {value!r}")
    return float(value[0]), float(value[1])
