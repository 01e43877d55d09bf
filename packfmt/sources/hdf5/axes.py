"""Which axis of an array of images is which, and its values as 8-bit pixels. Nothing is guessed."""

from __future__ import annotations

from typing import Any

import numpy as np

from packfmt.sources.values import ValueFault

__all__ = ["CHANNELS", "check_layout", "infer_axes", "infer_image_axes", "parse_range", "to_pixels"]

CHANNELS = (1, 3, 4)
_LEAST_SIDE = 5  # an axis of fewer elements may be channels as well as pixels


def check_layout(text: str) -> str:
    """A user's layout: each of H and W once, N and C at most once.

    Raises:
        ValueError: another letter, or one missing or twice.
    """
    letters = text.upper()
    if len(set(letters)) != len(letters) or not {"H", "W"} <= set(letters) <= set("NHWC"):
        raise ValueError(f"layout {text!r} is none of the letters N, H, W and C, each once, as 'NHWC', 'NCHW' or 'NHW'")
    return letters


def parse_range(text: str) -> tuple[float, float]:
    """A user's value range, as "0,1" or "0,255".

    Raises:
        ValueError: not two numbers, the first the smaller.
    """
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"value_range {text!r} is not two numbers, as '0,1' or '0,255'") from None
    if not -1e30 < low < high < 1e30:
        raise ValueError(f"value_range {text!r} needs a lower number first")
    return low, high


def infer_axes(shape: tuple[int, ...]) -> str | None:
    """The layout of an array of rank 4 that can be nothing else, or None."""
    if len(shape) != 4:
        return None
    last = shape[3] in CHANNELS and min(shape[1:3]) >= _LEAST_SIDE
    second = shape[1] in CHANNELS and min(shape[2:4]) >= _LEAST_SIDE
    return "NHWC" if last else "NCHW" if second else None


def infer_image_axes(shape: tuple[int, ...]) -> str | None:
    """The same for one image of rank 3."""
    axes = infer_axes((0, *shape))
    return axes[1:] if axes else None


def to_pixels(
    image: np.ndarray[Any, Any], axes: str, value_range: tuple[float, float] | None, bgr: bool
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One image as (H, W, C) uint8, C order, RGB.

    Args:
        image: any numbers; its axes are those of ``axes`` without N.
        axes: the letters H, W and perhaps C, in the array's order.
        value_range: what 0 and 255 stand for; None where the values are 8-bit pixels already.
        bgr: whether the first channel is blue.

    Raises:
        ValueFault: a value outside the range, or a number of channels that no image has.
    """
    pixels = image.transpose([axes.index(letter) for letter in ("HWC" if "C" in axes else "HW")])
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    if pixels.shape[2] not in CHANNELS:
        raise ValueFault(f"{pixels.shape[2]} channels; 1, 3 and 4 are read")
    if value_range is not None:
        low, high = value_range
        scaled = pixels.astype(np.float64)
        if not (scaled.size and scaled.min() >= low and scaled.max() <= high):  # false for NaN too
            found = f"{scaled.min()} to {scaled.max()}" if scaled.size else "none"
            raise ValueFault(f"values {found} are outside value_range {low:g},{high:g}")
        pixels = np.rint((scaled - low) * (255.0 / (high - low))).astype(np.uint8)
    if bgr and pixels.shape[2] >= 3:
        pixels = pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]
    return np.ascontiguousarray(pixels)
