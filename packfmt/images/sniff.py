"""What kind of image a file is and how large, from its header and never from its name."""

from __future__ import annotations

from typing import TypeAlias

from packfmt.buffers import as_bytes_like
from packfmt.errors import DecodeError
from packfmt.images import headers, info
from packfmt.images.info import (
    ALPHA,
    ANIMATED,
    CMYK,
    DEEP,
    EXTRA,
    FORMATS,
    MAX_PIXELS,
    NO_END,
    PROGRESSIVE,
    UNUSUAL,
    ImageInfo,
    check_size,
)
from packfmt.images.jpeg import read_jpeg

__all__ = [
    "ALPHA",
    "ANIMATED",
    "CMYK",
    "DEEP",
    "EXTRA",
    "FORMATS",
    "MAX_PIXELS",
    "NO_END",
    "PROGRESSIVE",
    "UNUSUAL",
    "Buffer",
    "ImageInfo",
    "magic",
    "sniff",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"  # whatever else offers a flat buffer works too

_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BMP_HEADERS = frozenset((12, 40, 52, 56, 64, 108, 124))

_READERS = {
    info.PNG: headers.read_png,
    info.WEBP: headers.read_webp,
    info.GIF: headers.read_gif,
    info.BMP: headers.read_bmp,
    info.TIFF: headers.read_tiff,
}

# What else turns up under the names of images: the first bytes, in lower case, and what to call it.
_STRANGERS = (
    (b"<!doctype html", "an HTML page, probably an error page saved under the image's name"),
    (b"<html", "an HTML page, probably an error page saved under the image's name"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "an XML document"),
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run: git lfs pull"),
    (b"%pdf", "a PDF document"),
    (b"pk\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"8bps", "a Photoshop document"),
    (b"\0\0\1\0", "an icon (ICO)"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cjxl ", "a JPEG XL image"),
    (b"\0\0\0\x0cjp  ", "a JPEG 2000 image"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 codestream"),
    *((b"p%d" % digit + end, "a netpbm image") for digit in range(1, 8) for end in (b"\n", b" ", b"\r")),
)
_BRANDS = {b"avif": "an AVIF image", b"avis": "an AVIF image", b"heic": "a HEIC image", b"mif1": "a HEIF image"}
_ALLOWED = "JPEG, PNG, WebP, GIF, BMP and TIFF are accepted"


def magic(data: Buffer) -> int:
    """The format's position in ``FORMATS``, by the first bytes alone; 0 if it is none of them."""
    head = bytes(as_bytes_like(data)[:18])
    if head[:3] == b"\xff\xd8\xff":
        return info.JPEG
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return info.PNG
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return info.WEBP
    if head[:6] in (b"GIF89a", b"GIF87a"):
        return info.GIF
    # Two letters prove little: the size of the header that follows must be one of the known ones too.
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return info.BMP
    if head[:4] in _TIFF_STARTS:
        return info.TIFF
    return info.UNKNOWN


def sniff(data: Buffer, *, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Read an image's header. No pixel is decoded and no payload copied.

    Thread-safe. The time is bounded whatever the bytes are; a usual JPEG takes a few microseconds.

    Args:
        data: the whole file.
        max_pixels: width times height that is accepted; by default the limit at which Pillow stops.

    Raises:
        DecodeError: no bytes, no image (says what was found), a header that is cut or impossible, or too many pixels.
    """
    data = as_bytes_like(data)
    if data[:3] == b"\xff\xd8\xff":
        header = read_jpeg(data)
        check_size(header.width, header.height, max_pixels)
        return ImageInfo(
            header.width,
            header.height,
            header.components,
            info.JPEG,
            header.orientation,
            header.flags(data),
        )
    code = magic(data)
    if code == info.UNKNOWN:
        raise DecodeError(_describe_stranger(data))
    found = _READERS[code](data)
    check_size(found.width, found.height, max_pixels)
    return found


def _describe_stranger(data: bytes | memoryview) -> str:
    if not len(data):
        return "zero bytes"
    head = bytes(data[:512])
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for prefix, name in _STRANGERS:
        if start.startswith(prefix) or head.lower().startswith(prefix):
            return f"not an image but {name}; {_ALLOWED}"
    if head[4:8] == b"ftyp":
        return f"not an accepted image but {_BRANDS.get(head[8:12], 'a video or HEIF file')}; {_ALLOWED}"
    if not head.strip(b"\0"):
        return f"not an image: it begins with {len(head)} zero bytes, as a file does that was never written; {_ALLOWED}"
    if all(byte >= 32 or byte in b"\t\n\r\f" for byte in head) and head.isascii():
        return f"not an image but text beginning with {head[:24].decode('ascii')!r}; {_ALLOWED}"
    return f"not an image: it begins with the bytes {head[:8].hex(' ')}; {_ALLOWED}"
