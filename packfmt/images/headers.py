"""What the headers of PNG, WebP, GIF, BMP and TIFF say, read by hand from their fixed layouts.

Each reader takes the whole file, touches only headers, and does an amount of work that a hostile file cannot raise.
Pillow is not asked, since it is not so bounded (a GIF of a million empty blocks takes it 60 times as long, one of
comments twice the file's size in memory) and takes 4 to 12 times as long for usual headers: packing looks at every
file's.
Sources: PNG (W3C, third edition), WebP container (RFC 9649), GIF89a, Windows BITMAPINFOHEADER, TIFF 6.0.
"""

from __future__ import annotations

import re
from struct import Struct
from struct import error as struct_error

from packfmt.errors import DecodeError
from packfmt.images import info
from packfmt.images.exif import read_orientation
from packfmt.images.info import ImageInfo

__all__ = ["read_bmp", "read_gif", "read_png", "read_tiff", "read_webp"]

_MAX_CHUNKS = 1_000  # of a PNG or WebP looked at; what lies behind is not seen
_MAX_BLOCKS = 20_000  # of a GIF, 255 bytes each: 5 MB of first frame
_MAX_TAGS = 1_000  # of a TIFF directory

_PNG_CHUNK = Struct(">I4s").unpack_from
_PNG_HEADER = Struct(">IIBB").unpack_from
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_PNG_FIND_END = re.compile(re.escape(_PNG_END))

_RIFF_CHUNK = Struct("<4sI").unpack_from
_U16 = Struct("<H").unpack_from
_U32 = Struct("<I").unpack_from
_TWO_U16 = Struct("<HH").unpack_from
_TWO_I32 = Struct("<ii").unpack_from
_FOUR_U16 = Struct("<HHHH").unpack_from


def read_png(data: bytes | memoryview) -> ImageInfo:
    """Header of a PNG: IHDR, then the chunks before the pixels for transparency, animation and EXIF.

    Raises:
        DecodeError: the file does not begin with a whole IHDR.
    """
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise DecodeError("PNG has no whole IHDR chunk at its start: the file is cut or damaged")
    width, height, depth, colour = _PNG_HEADER(data, 16)
    if colour not in _PNG_CHANNELS:
        raise DecodeError(f"PNG has colour type {colour}; 0, 2, 3, 4 and 6 are possible")
    flags = info.DEEP if depth > 8 else 0
    if colour in (4, 6):
        flags |= info.ALPHA
    orientation = 0
    position = 33
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(data):
            break
        length, name = _PNG_CHUNK(data, position)
        if name in (b"IDAT", b"IEND"):
            break
        if name == b"tRNS":
            flags |= info.ALPHA
        elif name == b"acTL" and length >= 8 and position + 12 <= len(data):
            flags |= info.ANIMATED if bytes(data[position + 8 : position + 12]) > b"\0\0\0\1" else 0
        elif name == b"eXIf":
            orientation = read_orientation(data, position + 8, position + 8 + length)
        position += 12 + length
    if data[-12:] != _PNG_END:
        flags |= info.EXTRA if _PNG_FIND_END.search(data, 33) else info.NO_END
    return ImageInfo(width, height, _PNG_CHANNELS[colour], info.PNG, orientation, flags)


def read_webp(data: bytes | memoryview) -> ImageInfo:
    """Header of a WebP: lossy (VP8), lossless (VP8L) or extended (VP8X).

    Raises:
        DecodeError: the first chunk is cut or of none of these kinds.
    """
    if len(data) < 30:
        raise DecodeError("WebP is cut within its header")
    kind = bytes(data[12:16])
    flags = orientation = 0
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise DecodeError("WebP has no key frame at its start: the file is damaged")
        width, height = (side & 0x3FFF for side in _TWO_U16(data, 26))
    elif kind == b"VP8L":
        if data[20] != 0x2F:
            raise DecodeError("WebP lossless header has the wrong signature: the file is damaged")
        bits = _U32(data, 21)[0]
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        flags = info.ALPHA if bits >> 28 & 1 else 0
    elif kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        features = data[20]
        flags = (info.ALPHA if features & 0x10 else 0) | (info.ANIMATED if features & 0x02 else 0)
        orientation = _webp_orientation(data) if features & 0x08 else 0
    else:
        raise DecodeError(f"WebP begins with the chunk {kind!r}; VP8, VP8L and VP8X are known")
    end = 8 + _U32(data, 4)[0]
    if end > len(data):
        flags |= info.NO_END
    elif end + (end & 1) < len(data):
        flags |= info.EXTRA
    return ImageInfo(width, height, 4 if flags & info.ALPHA else 3, info.WEBP, orientation, flags)


def _webp_orientation(data: bytes | memoryview) -> int:
    position = 12
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(data):
            break
        name, length = _RIFF_CHUNK(data, position)
        start = position + 8
        if name == b"EXIF":
            prefix = 6 if data[start : start + 6] == b"Exif\0\0" else 0
            return read_orientation(data, start + prefix, start + length)
        position = start + length + (length & 1)
    return 0


def read_gif(data: bytes | memoryview) -> ImageInfo:
    """Header of a GIF. The blocks are walked up to the second frame, to know whether there is one.

    The size is the screen's, or the first frame's where that is larger, as Pillow takes it.

    Raises:
        DecodeError: the file ends within the header.
    """
    if len(data) < 13:
        raise DecodeError("GIF is cut within its header")
    width, height = _TWO_U16(data, 6)
    flags = frames = 0
    position = 13 + _palette_bytes(data[10])
    blocks = 0
    while frames < 2 and blocks < _MAX_BLOCKS:
        blocks += 1
        kind = data[position] if position < len(data) else None
        if kind == 0x21 and position + 2 <= len(data):  # extension
            if data[position + 1] == 0xF9 and not frames and position + 4 <= len(data) and data[position + 3] & 1:
                flags |= info.ALPHA
            position += 2
        elif kind == 0x2C and position + 10 <= len(data):  # frame
            frames += 1
            if frames == 1:
                left, top, columns, rows = _FOUR_U16(data, position + 1)
                width, height = max(width, left + columns), max(height, top + rows)
            position += 11 + _palette_bytes(data[position + 9])
        elif kind == 0x3B:
            break
        else:
            flags |= info.NO_END
            break
        while position < len(data) and data[position] and blocks < _MAX_BLOCKS:
            position += 1 + data[position]
            blocks += 1
        position += 1
    if frames > 1:
        flags |= info.ANIMATED
    return ImageInfo(width, height, 3, info.GIF, 0, flags)


def _palette_bytes(packed: int) -> int:
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def read_bmp(data: bytes | memoryview) -> ImageInfo:
    """Header of a BMP; a negative height, which means top to bottom, counts as its absolute value.

    Raises:
        DecodeError: the file ends within the header.
    """
    if len(data) < 30:
        raise DecodeError("BMP is cut within its header")
    header = _U32(data, 14)[0]
    if header == 12:
        width, height = _TWO_U16(data, 18)
        depth, compression = _U16(data, 24)[0], 0
    else:
        if len(data) < 14 + header:
            raise DecodeError("BMP is cut within its header")
        width, height = _TWO_I32(data, 18)
        depth, compression = _U16(data, 28)[0], _U32(data, 30)[0]
    alpha = depth == 32 and compression in (3, 6) and header >= 56 and _U32(data, 66)[0] != 0
    flags = info.ALPHA if alpha else 0
    return ImageInfo(width, abs(height), 4 if alpha else 3, info.BMP, 0, flags)


# Tag numbers of TIFF that matter here.
_WIDTH, _LENGTH, _BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _EXTRA_SAMPLES = 256, 257, 258, 262, 274, 277, 338


def read_tiff(data: bytes | memoryview) -> ImageInfo:
    """First directory of a TIFF or BigTIFF.

    The size is that of the upright picture and the orientation 0, since TIFF decoders turn the pixels themselves.

    Raises:
        DecodeError: the directory lies outside the file or lacks width or length.
    """
    try:
        tags, more = _read_directory(data)
    except (struct_error, OverflowError):
        raise DecodeError("TIFF directory lies outside the file: it is cut or damaged") from None
    if _WIDTH not in tags or _LENGTH not in tags:
        raise DecodeError("TIFF directory has no width or length")
    width, height = tags[_WIDTH], tags[_LENGTH]
    if 5 <= tags.get(_ORIENTATION, 1) <= 8:
        width, height = height, width
    samples = tags.get(_SAMPLES, 1)
    palette = tags.get(_PHOTOMETRIC) == 3
    flags = info.DEEP if tags.get(_BITS, 1) > 8 else 0
    if _EXTRA_SAMPLES in tags:
        flags |= info.ALPHA
    if more:
        flags |= info.ANIMATED
    return ImageInfo(width, height, 3 if palette else min(samples, 255), info.TIFF, 0, flags)


def _read_directory(data: bytes | memoryview) -> tuple[dict[int, int], bool]:
    """Tag to first value (of whole-number tags), and whether another directory follows."""
    order = "<" if data[:2] == b"II" else ">"
    u16, u32 = Struct(order + "H").unpack_from, Struct(order + "I").unpack_from
    u64 = Struct(order + "Q").unpack_from
    big = u16(data, 2)[0] == 43
    if big:
        directory = u64(data, 8)[0]
        count, start, step, field = u64(data, directory)[0], directory + 8, 20, 8
    else:
        directory = u32(data, 4)[0]
        count, start, step, field = u16(data, directory)[0], directory + 2, 12, 4
    readers = {1: Struct("B").unpack_from, 3: u16, 4: u32, 16: u64}
    sizes = {1: 1, 3: 2, 4: 4, 16: 8}
    tags: dict[int, int] = {}
    for entry in range(start, start + step * min(count, _MAX_TAGS), step):
        tag, kind = u16(data, entry)[0], u16(data, entry + 2)[0]
        if kind in readers:
            items = (u64 if big else u32)(data, entry + 4)[0]
            place = entry + 4 + field
            if items * sizes[kind] > field:
                place = (u64 if big else u32)(data, place)[0]
            tags[tag] = readers[kind](data, place)[0]
    end = start + step * count
    follows = end + field <= len(data) and bool((u64 if big else u32)(data, end)[0])
    return tags, follows
