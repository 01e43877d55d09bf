"""Pillow: every format but the usual JPEG, the default resize, and PNG encoding.

Files are opened through the plugin that their first bytes call for, so that no other plugin ever sees them, and so that
Pillow's process-wide pixel limit and its warning are not in play: the caller checks the size before.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from packfmt.errors import DecodeError
from packfmt.images import info
from packfmt.images.geometry import Interpolation
from packfmt.images.info import DEEP, FORMATS, ImageInfo

__all__ = ["encode_png", "from_cmyk", "read", "resize", "resizer", "to_pil"]

_PLUGINS: dict[int, type[ImageFile.ImageFile]] = {
    info.JPEG: JpegImageFile,
    info.PNG: PngImageFile,
    info.WEBP: WebPImageFile,
    info.GIF: GifImageFile,
    info.BMP: BmpImageFile,
    info.TIFF: TiffImageFile,
}

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_SUPPORT = 2  # pixels of the larger scale that the wider of the filters reaches to either side

# Pillow clips the other modes (I, F, I;16) to white when it converts them.
_MODES = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB"))


def read(data: bytes | memoryview, found: ImageInfo, mode: str, *, partial: bool) -> NDArray[np.uint8]:
    """Decode the first frame of an image. Transparency is dropped, not blended.

    Args:
        data: the whole file.
        found: its header, whose size the caller has accepted.
        mode: "RGB" or "L".
        partial: give what can be decoded of a cut JPEG. Other formats are never decoded in part.

    Returns:
        (H, W, 3) or (H, W, 1) uint8, not always writable.

    Raises:
        DecodeError: more than 8 bits per sample, or whatever Pillow says.
    """
    name = FORMATS[found.format].upper()
    if found.flags & DEEP:
        raise DecodeError(
            f"{name} of more than 8 bits per sample: conversion to 8 bits would clip or guess its range, "
            "so convert the file first"
        )
    content = bytes(data)
    if found.format == info.JPEG:
        content = content.replace(b"Exif\0\0", b"Skip\0\0")  # Pillow parses it for the resolution and warns if broken
        if partial:
            content += b"\xff\xd9"  # libjpeg then fills the rest with gray, which no option of Pillow's offers per call
    try:
        with _PLUGINS[found.format](io.BytesIO(content)) as image:
            if sorted(image.size) != sorted((found.width, found.height)):
                raise DecodeError(
                    f"{name} header says {found.width}x{found.height}, Pillow {image.size[0]}x{image.size[1]}"
                )
            if image.mode not in _MODES:
                raise DecodeError(f"{name} of Pillow's mode {image.mode!r}: its range does not fit into 8 bits")
            image.load()
            # A transparent colour is dropped too; while it is there, Pillow warns that its meaning gets lost.
            image.info.pop("transparency", None)
            pixels = np.asarray(image.convert(mode))
    except DecodeError:
        raise
    except Exception as error:  # hostile files make Pillow raise nearly anything
        raise DecodeError(f"{name} that Pillow cannot decode: {type(error).__name__}: {error}") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def from_cmyk(pixels: NDArray[np.uint8], mode: str) -> NDArray[np.uint8]:
    """CMYK (H, W, 4), 255 being full ink, to "RGB" (H, W, 3) or "L" (H, W, 1) with Pillow's arithmetic."""
    height, width, _ = pixels.shape
    converted = np.asarray(_image(pixels, "CMYK").convert("RGB").convert(mode))
    return converted.reshape(height, width, -1)


def resizer(interpolation: Interpolation) -> Callable[..., None]:
    """``resize`` with this interpolation. Pickles.

    Raises:
        ValueError: there is none of this name.
    """
    if interpolation not in _FILTERS:
        raise ValueError(f"interpolation {interpolation!r} is not {' or '.join(map(repr, _FILTERS))}")
    return partial(resize, interpolation=interpolation)


def resize(
    crop: NDArray[np.uint8],
    out: NDArray[np.uint8],
    flip: int,
    box: Sequence[float] | None = None,
    *,
    interpolation: Interpolation = "bilinear",
) -> None:
    """Fill ``out`` with ``crop``, resized where the sizes differ and mirrored where asked.

    Antialiased, as torchvision's resize of a PIL image. Releases the interpreter lock while it resizes.

    Args:
        crop: (h, w, C) uint8 with C 1 or 3; any strides; may be ``out`` itself.
        out: (H, W, C) uint8, C-contiguous.
        flip: of the result: 1 (True) swaps left and right, 2 top and bottom, 3 both.
        box: (x0, y0, x1, y1), what of ``crop`` to show; fractions of pixels are allowed, and what is beyond an edge has
            its share in the pixels along it, as if all were resized and then cut. None for all.
        interpolation: "bilinear" or "bicubic".
    """
    if crop.shape != out.shape or box is not None:
        height, width, channels = out.shape
        if box is not None:
            crop, box = _around(crop, box, (height, width))
        image = _image(np.ascontiguousarray(crop), "RGB" if channels == 3 else "L")
        resized = image.resize((width, height), _FILTERS[interpolation], box)  # type: ignore[arg-type]
        out.reshape(-1)[:] = np.frombuffer(resized.tobytes(), np.uint8)
    elif crop is not out:
        out[...] = crop
    if flip & 1:
        # One channel at a time: numpy is slow at moving pieces of three bytes.
        for channel in range(out.shape[2]):
            out[..., channel] = out[:, ::-1, channel].copy()
    if flip & 2:
        out[...] = out[::-1].copy()


def _around(
    pixels: NDArray[np.uint8], box: Sequence[float], size: tuple[int, int]
) -> tuple[NDArray[np.uint8], tuple[float, ...]]:
    """What of ``pixels`` has a share in the box resized to ``size``, and the box there: Pillow copies what it gets."""
    moved, parts = [0.0] * 4, []
    for axis in (0, 1):
        start, stop = box[1 - axis], box[3 - axis]
        margin = _SUPPORT * max(1.0, (stop - start) / size[axis]) + 1
        first = max(0, math.floor(start - margin))
        parts.append(slice(first, math.ceil(stop + margin)))
        moved[1 - axis], moved[3 - axis] = start - first, stop - first
    return pixels[parts[0], parts[1]], tuple(moved)


def encode_png(pixels: NDArray[Any]) -> bytes:
    """PNG bytes of (H, W) or (H, W, 1|3|4) uint8, or of (H, W) uint16. The same pixels always give the same bytes."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def to_pil(pixels: NDArray[np.uint8]) -> Image.Image:
    """A PIL image of (H, W, 3) or (H, W, 1) pixels; a copy."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def _image(pixels: NDArray[np.uint8], mode: str) -> Image.Image:
    size = (pixels.shape[1], pixels.shape[0])
    return Image.frombuffer(mode, size, pixels.reshape(-1), "raw", mode, 0, 1)
