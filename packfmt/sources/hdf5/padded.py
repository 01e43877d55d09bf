"""Encoded images in rows of fixed width: where the image ends and the padding begins."""

from __future__ import annotations

from packfmt.sources.values import ValueFault, image_kind

__all__ = ["cut_padding", "cut_string", "restore_nuls"]

_MAX_RESTORED = 16 << 20  # bytes of NULs that are put back
_ENDS = {"jpeg": b"\xff\xd9", "png": b"IEND\xae\x42\x60\x82", "gif": b"\x3b"}


def cut_padding(row: memoryview, length: int | None = None) -> memoryview:
    """The image at the start of a padded row.

    Args:
        row: the whole row.
        length: the image's length as another dataset states it, or None.

    Raises:
        ValueFault: the length is beyond the row, or no end of an image precedes the padding.
    """
    if length is not None:
        if not 0 < length <= len(row):
            raise ValueFault(f"a length of {length} bytes in a row of {len(row)}")
        return row[:length]
    kind = image_kind(row)
    stated = _stated_length(row, kind)
    if stated is not None:
        if stated > len(row):
            raise ValueFault(f"its header says {stated} bytes, the row has {len(row)}")
        return row[:stated]
    data = bytes(row)
    end = _ENDS.get(kind or "")
    used = len(data.rstrip(b"\0"))
    if end is None:
        return row[:used] if kind is None else row
    if data.endswith(end, 0, used):
        return row[:used]
    place = data.rfind(end)
    if place < 0:
        raise ValueFault("has no end marker before the padding: cut short")
    return row[:used]  # bytes follow the marker: they are not padding, and kept


def cut_string(row: memoryview) -> memoryview | bytes:
    """The image in a fixed string, as ``cut_padding``; its last NULs may be missing, which numpy takes for padding.

    Raises:
        ValueFault: as ``cut_padding`` and ``restore_nuls``.
    """
    stated = _stated_length(row, image_kind(row))
    return restore_nuls(bytes(row)) if stated is not None and stated > len(row) else cut_padding(row)


def restore_nuls(data: bytes) -> bytes:
    """The image with the trailing NULs that numpy's fixed strings drop, where its header states a greater length.

    Raises:
        ValueFault: far too much is missing for that.
    """
    stated = _stated_length(memoryview(data), image_kind(data))
    if stated is None or stated <= len(data):
        return data
    if stated - len(data) > _MAX_RESTORED:
        raise ValueFault(f"cut short: its header says {stated} bytes, there are {len(data)}")
    return data + bytes(stated - len(data))


def _stated_length(data: memoryview, kind: str | None) -> int | None:
    """The whole length that a WebP's or a BMP's header states, or None for other formats."""
    if kind == "webp":
        return int.from_bytes(data[4:8], "little") + 8
    if kind == "bmp":
        return int.from_bytes(data[2:6], "little") or None
    return None
