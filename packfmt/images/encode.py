"""Pixels to encoded bytes, for sources that hold arrays instead of files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packfmt.images import libjpeg, pillow

__all__ = ["encode_jpeg", "encode_png", "parse_encoding"]

_JPEG_QUALITY = 95  # for "jpeg" without a number


def encode_png(array: NDArray[Any]) -> bytes:
    """Encode pixels as PNG, without loss. The same pixels always give the same bytes.

    Args:
        array: (H, W) or (H, W, 1) uint8 gray, (H, W, 3) uint8 RGB, (H, W, 4) uint8 RGBA, or (H, W) uint16 gray.

    Raises:
        ValueError: another shape or dtype; nothing is cast or rescaled silently.
    """
    if array.dtype == np.uint16 and array.ndim == 2 and array.size:
        return pillow.encode_png(array)
    return pillow.encode_png(_checked(array, (1, 3, 4), "PNG"))


def encode_jpeg(array: NDArray[Any], quality: int = _JPEG_QUALITY, subsampling: str = "420") -> bytes:
    """Encode pixels as baseline JPEG, which loses detail. The same pixels give the same bytes on one machine.

    Args:
        array: (H, W) or (H, W, 1) uint8 gray, or (H, W, 3) uint8 RGB.
        quality: 1 to 100.
        subsampling: of colour: "444" for none, "422" or "420".

    Raises:
        ValueError: another shape or dtype, more than 65,500 pixels a side, or an unknown quality or subsampling.
    """
    pixels = _checked(array, (1, 3), "JPEG")
    _check_quality(quality)
    if subsampling not in ("444", "422", "420"):
        raise ValueError(f"subsampling {subsampling!r} is not '444', '422' or '420'")
    if max(pixels.shape[:2]) > 65_500:
        raise ValueError(f"JPEG holds at most 65,500 pixels a side, not {pixels.shape[1]}x{pixels.shape[0]}")
    return libjpeg.encode_jpeg(pixels, quality, subsampling)


def parse_encoding(text: str) -> Callable[[NDArray[Any]], bytes]:
    """The encoder that a user names: "png", "jpeg" (quality 95) or "jpeg:QUALITY".

    Raises:
        ValueError: none of these.
    """
    name, colon, number = text.partition(":")
    if name == "png" and not colon:
        return encode_png
    if name == "jpeg" and not colon:
        return encode_jpeg
    if name == "jpeg" and number.isascii() and number.isdigit():
        quality = int(number)
        _check_quality(quality)
        return partial(encode_jpeg, quality=quality)
    raise ValueError(f"encoding {text!r} is not 'png', 'jpeg' or 'jpeg:QUALITY' with a quality from 1 to 100")


def _check_quality(quality: int) -> None:
    if not 1 <= quality <= 100:
        raise ValueError(f"JPEG quality {quality} is not between 1 and 100")


def _checked(array: NDArray[Any], channels: tuple[int, ...], name: str) -> NDArray[np.uint8]:
    """``array`` as C-contiguous (H, W, C)."""
    pixels = array[..., np.newaxis] if array.ndim == 2 else array
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in channels or not pixels.size:
        raise ValueError(
            f"an array of {array.dtype} {array.shape} is no image that {name} can hold; "
            f"needed is uint8 (H, W) or (H, W, C) with C one of {', '.join(map(str, channels))}"
        )
    return np.ascontiguousarray(pixels)
