"""What counts as the bytes of a record. No numpy here: the processes that read foreign databases start without it."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["as_bytes_like"]

BYTE_FORMATS = ("B", "b", "c")  # of buffers whose items are single bytes


def as_bytes_like(data: Any) -> bytes | memoryview:
    """``data`` itself if it is bytes, else a flat view of its bytes, without a copy.

    Pixels have a buffer too, and would be stored as if they were a file: only one dimension of single bytes is taken.

    Raises:
        TypeError: ``data`` is something else; says what to give instead.
    """
    if isinstance(data, bytes):
        return data
    try:
        view = data if isinstance(data, memoryview) else memoryview(data)
    except (BufferError, TypeError, ValueError):  # no buffer, or none of this dtype
        raise TypeError(_instead_of(data)) from None
    if view.ndim != 1 or view.format not in BYTE_FORMATS or not view.contiguous:
        raise TypeError(_instead_of(data))
    return view if view.format == "B" else view.cast("B")


def _instead_of(data: Any) -> str:
    """What a person who gave this probably wants to give."""
    wanted = "the bytes of an encoded image"
    if isinstance(data, (str, os.PathLike)):
        name = os.fspath(data)
        return f"expected {wanted}, got a file's name; give what it holds: pathlib.Path({name!r}).read_bytes()"
    name = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
    if hasattr(data, "getbands"):
        return (
            f"expected {wanted}, got an opened one ({name}); give the file's own bytes, or encode its pixels: "
            "packfmt.encode_png(numpy.asarray(image.convert('RGB')))"
        )
    shape = tuple(getattr(data, "shape", ()))
    if len(shape) > 1:
        pixels = "pixels" if hasattr(data, "__array_interface__") else "numpy.asarray(pixels)"
        if hasattr(data, "permute"):  # a tensor, with its channels first
            pixels = f"pixels{'.permute(1, 2, 0)' * (len(shape) == 3)}.cpu().numpy()"
        return (
            f"expected {wanted}, got {name} of shape {shape}; encode pixels first: packfmt.encode_png({pixels}), or "
            "packfmt.encode_jpeg, which loses detail"
        )
    if hasattr(data, "getvalue"):
        return f"expected {wanted}, got {name}; give data.getvalue()"
    if hasattr(data, "read"):
        return f"expected {wanted}, got {name}; give data.read() of a file opened in mode 'rb'"
    if hasattr(data, "permute"):
        return f"expected {wanted}, got {name}; give data.cpu().numpy(), if it is flat and of uint8"
    return f"expected {wanted} as bytes, bytearray, or a contiguous flat view or array of uint8, got {name}"
