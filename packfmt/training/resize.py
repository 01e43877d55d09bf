"""Resizing with torch's uint8 kernel, straight into the slot of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["mirrored", "resize"]

Pixels = npt.NDArray[np.uint8]

UNDIVIDED = 32767  # torch's at::internal::GRAIN_SIZE is 32768


def _find_kernel() -> Callable[..., Any]:
    """The kernel behind ``interpolate(mode="bilinear", antialias=True)``, called with a place for its result.

    ``interpolate`` allocates one, and copying it over took a third of the time outside the decoder; it serves where a
    torch names the kernel otherwise.
    """
    pixel = torch.zeros(1, 3, 1, 1, dtype=torch.uint8, device="cpu")
    try:
        # Under this name, since a call through ``torch.ops`` takes twice as long, with the interpreter lock held.
        kernel: Callable[..., Any] = torch._C._nn._upsample_bilinear2d_aa
        kernel(pixel, [1, 1], False, None, None, out=pixel.clone())
    except (AttributeError, TypeError, RuntimeError):
        return _interpolate
    return kernel


def _interpolate(source: torch.Tensor, size: list[int], *_: Any, out: torch.Tensor) -> None:
    resized = torch.nn.functional.interpolate(source, size, mode="bilinear", antialias=True)
    out.copy_(resized)


_kernel = _find_kernel()


def resize(crop: Pixels, out: Pixels, flip: bool) -> None:
    """Fill ``out`` (H, W, C) with ``crop`` (h, w, C): antialiased bilinear if the sizes differ, mirrored if ``flip``.

    Thread-safe. ``crop`` has positive strides and may be ``out`` itself.
    """
    if crop.shape != out.shape:
        if not (crop.flags.c_contiguous and crop.flags.writeable):
            # torch would do it, with a team of threads (see ``_mirror``); of what must not be written to it would warn
            crop = crop.copy()
        _kernel(_planes(crop), list(out.shape[:2]), False, None, None, out=_planes(out))
    elif crop is not out:
        out[...] = crop
    if flip:
        _mirror(out)


def mirrored(pixels: Pixels) -> Pixels:
    """New pixels (H, W, C), swapped left to right."""
    flipped = pixels.copy()
    _mirror(flipped)
    return flipped


def _planes(pixels: Pixels) -> torch.Tensor:
    """(1, C, H, W) over (H, W, C). Turned by numpy: each torch operation lets another thread have the interpreter."""
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])


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
