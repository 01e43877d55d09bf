"""The segments of a JPEG up to its first scan, read without decoding anything (ITU-T T.81, annex B)."""

from __future__ import annotations

import re
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from packfmt.errors import DecodeError
from packfmt.images import info
from packfmt.images.exif import read_orientation

__all__ = ["JpegHeader", "ends_in_order", "is_plain", "read_jpeg", "rewritten"]

_MAX_SEGMENTS = 10_000  # a header of 640 MB at most; bounds the work on one made of tiny segments
_HEAD = 4 << 10
_SEGMENT = Struct(">BBH").unpack_from  # 0xFF, marker, length including itself
_FRAME = Struct(">BHHB").unpack_from  # precision, height, width, components
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff]")
_END = re.compile(rb"\xff\xd9")
_IN_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # neither a stuffed byte nor a restart marker

_SOS, _EOI, _APP0, _APP1, _APP14 = 0xDA, 0xD9, 0xE0, 0xE1, 0xEE
_DESCRIPTIONS = frozenset((*range(0xE0, 0xF0), 0xFE))  # application segments and comments
_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_COMMON_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended and progressive Huffman
_PROGRESSIVE_FRAMES = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, RST0 to RST7 and SOI have no length
# Markers of segments that say nothing here, such as tables and comments, and are stepped over.
_PASSED = frozenset(range(0xC0, 0xFF)) - _FRAMES - _BARE - {_SOS, _EOI, _APP1}
_BEFORE_SCAN = _PASSED | {_APP1}
_PLAIN_FRAMES = frozenset((0xC0, 0xC1))
_KNOWN_COMPONENTS = frozenset((1, 3, 4))


class JpegHeader(NamedTuple):
    """A JPEG's frame and first scan.

    Args:
        width, height: in pixels.
        components: 1 gray, 3 colour, 4 CMYK or YCCK.
        precision: bits per sample.
        frame: the marker code of the frame, 0xC0 to 0xCF.
        orientation: the EXIF tag, 0 where there is none.
        junk: whether bytes lie between the segments that belong to none.
        scan: where the first scan's data begins; 0 where the file ends before.
        one_scan: whether the first scan holds all components of a frame that is not progressive.
    """

    width: int
    height: int
    components: int
    precision: int
    frame: int
    orientation: int
    junk: bool
    scan: int
    one_scan: bool

    @property
    def smallest(self) -> int:
        """The fewest bytes that can hold the whole picture: one bit for each block of 64 samples in Huffman codes."""
        return self.width * self.height // 512 if self.frame in _COMMON_FRAMES else 0

    def flags(self, data: bytes | memoryview) -> int:
        """The flags of ``packfmt.images.info`` for the file ``data`` that this header is of."""
        flags = info.PROGRESSIVE if self.frame in _PROGRESSIVE_FRAMES else 0
        if self.components == 4:
            flags |= info.CMYK
        if self.precision > 8:
            flags |= info.DEEP | info.UNUSUAL
        if self.frame not in _COMMON_FRAMES:
            flags |= info.UNUSUAL
        if data[-2:] != b"\xff\xd9":
            # Scan data never holds this pair, so the first one after the header is the end.
            end = _END.search(data, self.scan) if self.scan else None
            flags |= info.EXTRA if end else info.NO_END
        return flags


def is_plain(data: bytes | memoryview) -> bool:
    """Whether a JPEG has one or three components, is in Huffman codes, not progressive, and its first pass holds all.

    In a fifth of the time that ``read_jpeg`` takes, with the same bounds. False also where anything but whole segments
    lies before the first scan. Says nothing of what else the file is.
    """
    position, components = 2, 0
    try:
        for _ in range(_MAX_SEGMENTS):
            prefix, marker, length = _SEGMENT(data, position)
            if prefix != 0xFF:
                return False
            if marker in _PLAIN_FRAMES and not components:
                components = data[position + 9]
            elif marker == _SOS:
                return components in (1, 3) and data[position + 4] == components
            elif marker not in _BEFORE_SCAN:
                return False
            position += 2 + length
    except (StructError, IndexError):  # the file ends here
        pass
    return False


def ends_in_order(data: bytes | memoryview, scan: int) -> bool:
    """Whether the first marker in the scan data from ``scan`` on, but for restart markers, is the end marker."""
    found = _IN_SCAN.search(data, scan)
    return found is not None and found[0] == b"\xff\xd9"


def rewritten(data: bytes | memoryview, components: int) -> bytes:
    """The file with nothing before its first scan that decoders only warn of; its picture is the same.

    Bytes between segments, comments and application segments go, but for JFIF's and Adobe's, which tell the colours:
    with a version that is known, and the transform that libjpeg assumes where it does not know the one that is written.
    The scan of a sequential frame says that it has all coefficients. A file whose header cannot be walked is given back
    as it is.

    Args:
        data: the file.
        components: of its frame.
    """
    out: list[bytes | bytearray | memoryview] = [data[:2]]
    position, sequential = 2, False
    for _ in range(_MAX_SEGMENTS):
        found = _NEXT_MARKER.search(data, position)
        if found is None or found.end() + 2 > len(data):
            break
        marker, start = found[0][1], found.end() - 2
        if marker in _BARE:
            position = start + 2
            continue
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        segment = bytearray(data[start:end])
        if marker in _FRAMES:
            sequential = marker in _PLAIN_FRAMES
        if marker == _APP0 and segment[4:9] == b"JFIF\0" and len(segment) > 9:
            segment[9] = 1
            out.append(segment)
        elif marker == _APP14 and segment[4:9] == b"Adobe" and len(segment) > 15:
            if segment[15] > 2:
                segment[15] = 2 if components == 4 else 1
            out.append(segment)
        elif marker == _SOS:
            if sequential and len(segment) > 8:
                segment[-3:] = b"\x00\x3f\x00"
            return b"".join((*out, segment, data[end:]))
        elif marker not in _DESCRIPTIONS:
            out.append(segment)
        position = max(end, start + 2)
    return bytes(data)


def read_jpeg(data: bytes | memoryview) -> JpegHeader:
    """Walk from the start marker to the first scan. Payloads are stepped over, not copied.

    Junk between segments is passed over, as libjpeg and Pillow do. Time is bounded by the file's length and
    10,000 segments.

    Raises:
        DecodeError: the frame is missing, cut, or says something impossible.
    """
    # Bytes are taken apart more quickly than views of them, and few headers are longer than this.
    head: bytes | memoryview = data if isinstance(data, bytes) else bytes(data[:_HEAD])
    size = len(head)
    position = 2
    orientation = 0
    junk = False
    frame: tuple[int, int, int, int, int] | None = None
    for _ in range(_MAX_SEGMENTS):
        if position + 4 > size:
            head, size = data, len(data)
            if position + 4 > size:
                break
        prefix, marker, length = _SEGMENT(head, position)
        if marker in _PASSED and prefix == 0xFF and length >= 2:
            position += 2 + length
            continue
        if prefix != 0xFF or marker in (0x00, 0xFF):
            found = _NEXT_MARKER.search(data, position)
            if found is None:
                break
            junk = junk or prefix != 0xFF or marker == 0
            position = found.start()
            continue
        if marker in _BARE:
            position += 2
            continue
        if marker == _EOI:
            break
        if length < 2:
            raise DecodeError(f"JPEG segment 0x{marker:02x} at byte {position} has the impossible length {length}")
        if marker == _APP1:
            if not orientation and data[position + 4 : position + 10] == b"Exif\0\0":
                orientation = read_orientation(data, position + 10, position + 2 + length)
        elif marker == _SOS:
            components = data[position + 4 : position + 5]
            return _header(frame, orientation, junk, position + 2 + length, components)
        elif marker in _FRAMES:
            if frame is not None:
                raise DecodeError(f"JPEG has a second frame header at byte {position}: the file is damaged")
            if position + 10 > len(data):
                break
            frame = (marker, *_FRAME(data, position + 4))
        position += 2 + length
    return _header(frame, orientation, junk, 0, b"")


def _header(
    frame: tuple[int, int, int, int, int] | None,
    orientation: int,
    junk: bool,
    scan: int,
    in_scan: bytes | memoryview,
) -> JpegHeader:
    if frame is None:
        raise DecodeError("JPEG header has no frame (SOF): the file is cut or damaged before its size is known")
    marker, precision, height, width, components = frame
    if components not in _KNOWN_COMPONENTS:
        raise DecodeError(f"JPEG header says {components} components; 1, 3 or 4 are possible")
    one_scan = bool(in_scan) and in_scan[0] == components and marker not in _PROGRESSIVE_FRAMES
    return JpegHeader(width, height, components, precision, marker, orientation, junk, scan, one_scan)
