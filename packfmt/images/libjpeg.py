"""JPEG through libjpeg-turbo, by way of simplejpeg: the fast path, and a second look at what it refuses.

libjpeg goes on after most damage and leaves gray or garbage behind. So everything is first decoded strictly, where the
first complaint is an error; only then is it found out whether the complaint was about the picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from packfmt.errors import DecodeError
from packfmt.images.info import NO_END, check_size
from packfmt.images.jpeg import JpegHeader, ends_in_order, is_plain, read_jpeg, rewritten

__all__ = [
    "FLAT",
    "MAX_SCANS",
    "SPACES",
    "Room",
    "decode_at_once",
    "decode_jpeg",
    "encode_jpeg",
    "few_scans",
    "read_unusual",
    "usual_size",
]

Room = Callable[[int, int, int], "NDArray[np.uint8]"]
_Attempt = Callable[["bytes | memoryview", "int | None"], "NDArray[np.uint8]"]  # file, what its memory is full of

MAX_SCANS = 500
_SHORT = MAX_SCANS * 10  # bytes of so many scans' headers
FLAT = 512  # pixels that a byte can hold: one bit for each block of 64 samples

# Colour spaces that libjpeg turns into RGB just as Pillow does; CMYK and YCCK need Pillow's own conversion.
PLAIN_SPACES = frozenset(("YCbCr", "RGB", "Gray"))
SPACES = {"RGB": "RGB", "L": "GRAY"}

# libjpeg-turbo's warnings (jerror.h). Harmless, since the picture is whole; ``rewritten`` takes their cause out:
#   JFIF_MAJOR, ADOBE_XFORM  a number that no standard has: libjpeg assumes what Pillow, which is libjpeg too, assumes
#   NOT_SEQUENTIAL           spectral bounds in a scan that has none
#   BOGUS_ICC                the colour profile, which is ignored
#   EXTRANEOUS_DATA          bytes that belong to nothing, but where a restart marker follows: it shows that they were
#                            left over of the picture
# Damage, as is every error and whatever a later version warns of:
#   HIT_MARKER, JPEG_EOF     a marker or the file's end inside of scan data
#   HUFF_BAD_CODE, ARITH_BAD_CODE
#   MUST_RESYNC              a restart marker out of turn
#   BOGUS_PROGRESSION        passes that contradict each other
#   TOO_MUCH_DATA            (of writing: never seen here)
_HARMLESS = re.compile(
    r"unknown Adobe color transform|unknown JFIF revision|invalid SOS parameters|bad ICC marker|"
    r"(?P<count>\d+) extraneous bytes before marker 0x(?P<marker>[0-9a-f]{2})",
    re.IGNORECASE,
)
# The simple interface's own, of files that the library behind it can decode: Pillow's turn.
_UNSUPPORTED = re.compile(r"could not determine subsampling|unsupported color conversion", re.IGNORECASE)
_RESTARTS = range(0xD0, 0xD8)
_MOST_PLACES = 16  # where bytes that belong to nothing may have been
_SCAN = b"\xff\xda"
_ZEROS = bytes(16)  # at the end of a file that was allocated and not written to its end

# The two calls of the fast path, under the names that the decoder uses.
decode_jpeg: Callable[..., NDArray[np.uint8]] = simplejpeg.decode_jpeg
read_size: Callable[..., tuple[int, int, str, str]] = simplejpeg.decode_jpeg_header


def usual_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width of a JPEG that the fast path takes, judged by its header. None for what needs a second look.

    So large a picture can be in so short a file, and its passes are few: checked before memory is taken. Most files
    have one pass and their header tells; counting passes would let go of the interpreter lock twice.
    """
    try:
        if len(data) <= _SHORT:
            height, width, space, _ = read_size(data)
            usual = space in PLAIN_SPACES
        else:
            header = read_jpeg(data)
            height, width = header.height, header.width
            usual = header.components != 4 and (header.one_scan or few_scans(data))
    except (ValueError, KeyError, DecodeError):  # KeyError: a subsampling that simplejpeg has no name for
        return None
    return (height, width) if usual and 0 < height * width <= FLAT * len(data) else None


def decode_at_once(
    data: bytes | memoryview, mode: str, memory: NDArray[np.uint8], *, fast: bool, max_pixels: int
) -> NDArray[np.uint8] | None:
    """Decode a usual JPEG into memory that lies ready, with a glance at its header.

    ``usual_size`` is a longer look, with the interpreter lock held: 2 per cent of decoding photos. What comes out is
    what it would have led to: files of one pass, whose work is bounded by their length, and pictures that fit into
    ``memory``.

    Args:
        data: the file.
        mode: "RGB" or "L".
        memory: contiguous; overwritten, also where nothing comes of it.
        fast: trade accuracy for speed.
        max_pixels: give no more.

    Returns:
        Pixels (H, W, C), in ``memory``. None for what does not fit, and for what needs a look.
    """
    if not is_plain(data):
        return None
    try:
        pixels = decode_jpeg(data, SPACES[mode], fast, fast, buffer=memory)
    except (ValueError, KeyError):  # KeyError: a subsampling that simplejpeg has no name for
        return None
    return pixels if len(pixels) * pixels.shape[1] <= min(max_pixels, FLAT * len(data)) else None


def few_scans(data: bytes | bytearray | memoryview) -> bool:
    """Whether a JPEG has at most ``MAX_SCANS`` passes over its pixels.

    A file of ten thousand tiny passes costs seconds to decode. Cheap for the usual file: a short one cannot hold so
    many, and otherwise counting one byte value gives an upper bound.
    """
    if len(data) <= _SHORT:
        return True
    if np.count_nonzero(np.frombuffer(data, np.uint8) == 0xDA) <= MAX_SCANS:
        return True
    return bytes(data).count(_SCAN) <= MAX_SCANS


def read_unusual(
    data: bytes | memoryview, mode: str, room: Room, *, fast: bool, partial: bool, max_pixels: int
) -> tuple[NDArray[np.uint8], str] | None:
    """Decode a JPEG that the fast path did not take, or say why it cannot be.

    Args:
        data: the whole file.
        mode: "RGB" or "L".
        room: called with height, width and channels for the array to decode into.
        fast: trade accuracy for speed.
        partial: give what can be decoded of a damaged file.
        max_pixels: refuse more.

    Returns:
        Pixels (H, W, C) and what they are: "RGB", "L", or "CMYK" in Pillow's polarity. None if libjpeg-turbo's simple
        interface cannot decode such a JPEG, damaged or not, so that Pillow must try.

    Raises:
        DecodeError: damaged, cut, too large, or of more than 8 bits.
    """
    header = read_jpeg(data)
    check_size(header.width, header.height, max_pixels)
    if header.precision != 8:
        raise DecodeError(f"JPEG of {header.precision} bits per sample: only 8 are supported, convert the file first")
    if len(data) < header.smallest and not partial:
        raise DecodeError(
            f"truncated JPEG: {len(data):,} bytes cannot hold {header.width}x{header.height} pixels; "
            "the header lies or most of the file is missing"
        )
    if not few_scans(data):
        raise DecodeError(f"JPEG has more than {MAX_SCANS} scans: no camera or program writes such a file")
    space = "CMYK" if header.components == 4 else SPACES[mode]
    channels = {"CMYK": 4, "RGB": 3, "GRAY": 1}[space]

    def attempt(content: bytes | memoryview, before: int | None) -> NDArray[np.uint8]:
        memory = room(header.height, header.width, channels)
        if before is not None:
            memory[...] = before
        return decode_jpeg(content, space, fast, fast, buffer=memory, strict=before is None)

    pixels = _judge(data, header, attempt, partial)
    if pixels is None:
        return None
    if pixels.shape != (header.height, header.width, channels):
        raise DecodeError(f"JPEG decodes to the shape {pixels.shape}, unlike its header: the file is damaged")
    if space == "CMYK":
        np.subtract(255, pixels, out=pixels)  # Adobe stores inverted inks, and Pillow takes every file to be Adobe's
        return pixels, "CMYK"
    return pixels, mode


def _judge(data: bytes | memoryview, header: JpegHeader, attempt: _Attempt, partial: bool) -> NDArray[np.uint8] | None:
    """Pixels if they are all there (or ``partial``), None if the kind is not supported, DecodeError if damaged."""
    try:
        return attempt(data, None)
    except ValueError as error:
        complaint = str(error)
    if partial:
        return _lenient(data, attempt)
    if header.flags(data) & NO_END:
        unwritten = data[-len(_ZEROS) :] == _ZEROS
        if header.one_scan and not unwritten:
            # With an end marker put on, a complaint is left if the scan itself is cut.
            try:
                return attempt(bytes(data) + b"\xff\xd9", None)
            except ValueError:
                pass
        if not unwritten and _UNSUPPORTED.search(complaint):
            return None
        raise DecodeError("truncated JPEG: the file ends before its picture does; partial=True decodes what is there")
    if _UNSUPPORTED.search(complaint):
        if header.one_scan and not ends_in_order(data, header.scan):
            raise DecodeError("damaged JPEG (a marker inside of its scan data); partial=True decodes what is there")
        return None
    if _HARMLESS.search(complaint):
        pixels = _without_the_harmless(data, header, attempt)
        if pixels is not None:
            return pixels
    raise DecodeError(f"damaged JPEG ({complaint}); partial=True decodes what is there")


def _without_the_harmless(data: bytes | memoryview, header: JpegHeader, attempt: _Attempt) -> NDArray[np.uint8] | None:
    """Pixels, if nothing is left to complain of once what is harmless is taken out; None otherwise.

    libjpeg stops at its first complaint or goes on whatever comes: that nothing worse follows must be seen this way.
    """
    plain = rewritten(data, header.components)
    try:
        return attempt(plain, None)
    except ValueError as error:
        found = _HARMLESS.search(str(error))
    if found is None or found["count"] is None:
        return None
    count, code = int(found["count"]), int(found["marker"], 16)
    if code in _RESTARTS:
        return None
    marker, place = bytes((0xFF, code)), plain.find(_SCAN)
    # Each try takes as long as decoding does: all together make no more passes than the longest file may have.
    for _ in range(min(_MOST_PLACES, MAX_SCANS // max(1, plain.count(_SCAN)))):
        place = plain.find(marker, place + 1)
        if place < count:
            break
        try:
            return attempt(plain[: place - count] + plain[place:], None)
        except ValueError:
            continue
    return None


def _lenient(data: bytes | memoryview, attempt: _Attempt) -> NDArray[np.uint8] | None:
    """Pixels, whatever libjpeg complains of. None if it gives up before the first of them. simplejpeg does not tell
    which are missing, and hands out what lay in the memory before: they are black here."""
    try:
        over_black = attempt(data, 0).copy()
        pixels = attempt(data, 255)
    except ValueError:
        return None
    return None if (pixels != over_black).all() else over_black


def encode_jpeg(pixels: NDArray[np.uint8], quality: int, subsampling: str) -> bytes:
    """JPEG bytes of ``pixels`` (H, W, 1 or 3), C-contiguous uint8."""
    space = "GRAY" if pixels.shape[2] == 1 else "RGB"
    encoded: bytes = simplejpeg.encode_jpeg(
        pixels, quality=quality, colorspace=space, colorsubsampling="Gray" if space == "GRAY" else subsampling
    )
    return encoded
