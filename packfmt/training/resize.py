"""Resizing with torch's uint8 kernel, straight into the slot of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from packfmt.images import pillow
from packfmt.images.decode import Resize
from packfmt.images.geometry import Interpolation

__all__ = ["flipped", "resize", "resizer"]

Pixels = npt.NDArray[np.uint8]

MOST_RESIZED = 4  # times the pixels shown: of a longer image, resizing all takes longer than Pillow for the part
NEARLY = 1e-9  # of an image's length: far above the rounding of floats, far below a step that could be seen

UNDIVIDED = 32767  # torch's at::internal::GRAIN_SIZE is 32768


def _find_kernel(interpolation: Interpolation) -> Callable[..., Any]:
    """The kernel behind ``interpolate(mode=interpolation, antialias=True)``, called with a place for its result.

    ``interpolate`` allocates one, and copying it over took a third of the time outside the decoder; it serves where a
    torch names the kernel otherwise.
    """
    pixel = torch.zeros(1, 3, 1, 1, dtype=torch.uint8, device="cpu")
    try:
        # Under this name, since a call through ``torch.ops`` takes twice as long, with the interpreter lock held.
        kernel: Callable[..., Any] = getattr(torch._C._nn, f"_upsample_{interpolation}2d_aa")
        kernel(pixel, [1, 1], False, None, None, out=pixel.clone())
    except (AttributeError, TypeError, RuntimeError):
        return partial(_interpolate, interpolation)
    return kernel


def _interpolate(
    interpolation: Interpolation, source: torch.Tensor, size: list[int], *_: Any, out: torch.Tensor
) -> None:
    resized = torch.nn.functional.interpolate(source, size, mode=interpolation, antialias=True)
    out.copy_(resized)


_kernels = {interpolation: _find_kernel(interpolation) for interpolation in get_args(Interpolation)}


def resizer(interpolation: Interpolation) -> Resize:
    """``resize`` with this interpolation. Pickles.

    Raises:
        ValueError: there is none of this name.
    """
    if interpolation not in _kernels:
        raise ValueError(f"interpolation {interpolation!r} is not {' or '.join(map(repr, _kernels))}")
    return resize if interpolation == "bilinear" else partial(resize, interpolation=interpolation)


def resize(
    crop: Pixels,
    out: Pixels,
    flip: int,
    box: Sequence[float] | None = None,
    *,
    interpolation: Interpolation = "bilinear",
) -> None:
    """Fill ``out`` (H, W, C) with ``crop`` (h, w, C): resized with antialiasing if the sizes differ, then flipped.

    Args:
        crop: with positive strides; may be ``out`` itself.
        out: the slot.
        flip: 1 (True) swaps left and right, 2 top and bottom, 3 both.
        box: (x0, y0, x1, y1), what of ``crop`` to show, as if all were resized and then cut. None for all.
        interpolation: "bilinear" or "bicubic", which has Pillow's coefficients (a = -0.5).

    Thread-safe.
    """
    if box is not None:
        _resize_and_cut(crop, out, box, interpolation)
    elif crop.shape != out.shape:
        if not (crop.flags.c_contiguous and crop.flags.writeable):
            # torch would do it, with a team of threads (see ``_mirror``); of what must not be written to it would warn
            crop = crop.copy()
        _kernels[interpolation](_planes(crop), list(out.shape[:2]), False, None, None, out=_planes(out))
    elif crop is not out:
        out[...] = crop
    if flip:
        _flip(out, flip)


def _resize_and_cut(pixels: Pixels, out: Pixels, box: Sequence[float], interpolation: Interpolation) -> None:
    """The kernel takes no part of an image, but all of it, a few times the part, costs a quarter of what Pillow takes.

    Pillow serves where that is too much, and for boxes whose edges are none of the resized image's.
    """
    (top, whole_height), (left, whole_width) = (
        _on_grid(box[1 - axis], box[3 - axis], pixels.shape[axis], out.shape[axis]) for axis in (0, 1)
    )
    if not 0 < whole_height * whole_width <= MOST_RESIZED * out.shape[0] * out.shape[1]:
        pillow.resize(pixels, out, 0, box, interpolation=interpolation)
        return
    whole = np.empty((whole_height, whole_width, out.shape[2]), np.uint8)
    resize(pixels, whole, 0, interpolation=interpolation)
    out[...] = whole[top : top + out.shape[0], left : left + out.shape[1]]


def _on_grid(start: float, stop: float, length: int, shown: int) -> tuple[int, int]:
    """On one axis: where the box begins in the resized image, and how long that is; zeros if they are not whole."""
    scale = (stop - start) / shown
    first, whole = round(start / scale), round(length / scale)
    exact = abs(first * scale - start) <= NEARLY * length and abs(whole * scale - length) <= NEARLY * length
    return (first, whole) if exact else (0, 0)


def flipped(pixels: Pixels, flip: int) -> Pixels:
    """New pixels (H, W, C), flipped as by ``resize``."""
    new = pixels.copy()
    _flip(new, flip)
    return new


def _planes(pixels: Pixels) -> torch.Tensor:
    """(1, C, H, W) over (H, W, C). Turned by numpy: each torch operation lets another thread have the interpreter."""
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])


def _flip(pixels: Pixels, flip: int) -> None:
    if flip & 1:
        _mirror(pixels)
    if flip & 2:
        pixels[...] = pixels[::-1].copy()  # rows: the copy takes a hundredth of the time of decoding them


def _mirror(pixels: Pixels) -> None:
    """Swap (H, W, C) left to right in place, 10 times as fast as numpy, which moves pixels one at a time.

    Outside of threads that are to use one core, a few rows at a time: more than ``UNDIVIDED`` numbers torch shares out
    to a team of threads, which for so little work costs more than it saves, and a hundred times as much where other
    programs run.
    """
    height, width, channels = pixels.shape
    rows = height if torch.get_num_threads() == 1 else max(1, UNDIVIDED // (width * channels))
    for start in range(0, height, rows):
        part = torch.from_numpy(pixels[start : start + rows])
        part.copy_(torch.flip(part, (1,)))  # the method lets go of the interpreter lock twice as often
