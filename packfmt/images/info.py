"""What is known of an image from its header alone, and the codes it is stored under."""

from __future__ import annotations

from typing import NamedTuple

from packfmt.errors import DecodeError

__all__ = [
    "ALPHA",
    "ANIMATED",
    "BMP",
    "CMYK",
    "DEEP",
    "EXTRA",
    "FORMATS",
    "GIF",
    "JPEG",
    "MAX_PIXELS",
    "NO_END",
    "PNG",
    "PROGRESSIVE",
    "TIFF",
    "UNKNOWN",
    "UNUSUAL",
    "WEBP",
    "ImageInfo",
    "check_size",
]

# Stored in the column ``format``: append, never reorder.
FORMATS: tuple[str, ...] = ("unknown", "jpeg", "png", "webp", "gif", "bmp", "tiff")
UNKNOWN, JPEG, PNG, WEBP, GIF, BMP, TIFF = range(7)

# Bits of the column ``flags``.
PROGRESSIVE = 1  # JPEG coded in several passes
CMYK = 2  # JPEG of four components, CMYK or YCCK
NO_END = 4  # the end marker is missing: the file is probably cut
DEEP = 8  # more than 8 bits per sample
ANIMATED = 16  # more than one frame; the first is the one that is decoded
ALPHA = 32  # has transparency
EXTRA = 64  # bytes follow the end marker
UNUSUAL = 128  # arithmetic, lossless, hierarchical or 12-bit JPEG

MAX_PIXELS = 178_956_970  # where Pillow stops with an error by default


class ImageInfo(NamedTuple):
    """What an image's header says: the values of ``packfmt.record.IMAGE_COLUMNS``, in their order.

    Args:
        width: in stored pixels, before any EXIF rotation.
        height: likewise.
        channels: as stored: 1 gray, 2 gray and alpha, 3 colour or palette, 4 colour and alpha, or CMYK.
        format: position in ``FORMATS``.
        orientation: the EXIF tag, 1 to 8; 0 where there is none or it makes no sense.
        flags: the sum of the bits named in this module.
    """

    width: int
    height: int
    channels: int
    format: int
    orientation: int = 0
    flags: int = 0


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image without pixels, or with more than allowed.

    Raises:
        DecodeError: says which.
    """
    if width <= 0 or height <= 0:
        raise DecodeError(f"the header says {width}x{height} pixels: an image needs at least 1x1")
    if width * height > max_pixels:
        raise DecodeError(
            f"the header says {width}x{height} = {width * height:,} pixels, more than max_pixels = {max_pixels:,}; "
            "raise max_pixels if the image is meant to be that large"
        )
