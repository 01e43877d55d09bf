"""The orientation tag of an EXIF block, and how to turn pixels by it."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # headers are read where nothing else needs numpy
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MIRRORED", "TRANSPOSED", "UPSIDE_DOWN", "oriented", "read_orientation"]

# Orientations by what is to be done to see the image upright, in this order.
TRANSPOSED = (5, 6, 7, 8)
MIRRORED = (2, 3, 6, 7)
UPSIDE_DOWN = (3, 4, 7, 8)

_ORIENTATION = 0x0112
_MAX_ENTRIES = 512  # real directories hold a few dozen; the count is the file's word

# (offset of the first directory), (number of entries), (tag, type) for the two byte orders.
_LAYOUTS = {
    b"II*\0": (Struct("<I"), Struct("<H"), Struct("<HHI")),
    b"MM\0*": (Struct(">I"), Struct(">H"), Struct(">HHI")),
}


def read_orientation(data: bytes | memoryview, start: int, end: int) -> int:
    """The orientation in the TIFF block that lies at ``data[start:end]``.

    Only the first directory is read. Anything broken counts as no tag: a picture is not worse for a bad EXIF block.

    Returns:
        1 to 8, or 0 where the tag is missing or broken.
    """
    end = min(end, len(data))
    layout = _LAYOUTS.get(bytes(data[start : start + 4]))
    if layout is None or start + 8 > end:
        return 0
    u32, u16, head = layout
    directory = start + u32.unpack_from(data, start + 4)[0]
    if directory + 2 > end:
        return 0
    count = min(u16.unpack_from(data, directory)[0], _MAX_ENTRIES, (end - directory - 2) // 12)
    unpack = head.unpack_from
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, _ = unpack(data, entry)
        if tag == _ORIENTATION:
            if kind in (3, 8):  # 16 bits, unsigned or signed
                value: int = u16.unpack_from(data, entry + 8)[0]
            elif kind in (4, 9):
                value = u32.unpack_from(data, entry + 8)[0]
            else:
                return 0
            return value if 1 <= value <= 8 else 0
    return 0


def oriented(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """A view of ``pixels`` (H, W, C), turned as the EXIF tag asks; 5 to 8 swap height and width.

    Args:
        pixels: as stored.
        orientation: 0 to 8; 0 and 1 return ``pixels`` itself.
    """
    if orientation in TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in MIRRORED:
        pixels = pixels[:, ::-1]
    if orientation in UPSIDE_DOWN:
        pixels = pixels[::-1]
    return pixels
