"""Tiny inputs for the tests of LMDB and HDF5: images, databases as their own writers make them, canaries."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import lmdb
import numpy as np
from PIL import Image


def pixels(number: int, height: int = 8, width: int = 8, channels: int = 3) -> np.ndarray:
    """Random pixels (H, W, C), uint8, differing with the number."""
    return np.random.default_rng(number).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(number: int, kind: str = "JPEG", **size: int) -> bytes:
    """An encoded image."""
    out = io.BytesIO()
    array = pixels(number, **size)
    Image.fromarray(array if array.shape[2] > 1 else array[..., 0]).save(out, kind)
    return out.getvalue()


def decoded(data: bytes | memoryview) -> np.ndarray:
    """The pixels of an encoded image, by Pillow."""
    return np.asarray(Image.open(io.BytesIO(bytes(data))))


def write_lmdb(path: Path, entries: Iterable[tuple[bytes, bytes]], **options: object) -> Path:
    """A database with these entries, put in this order."""
    with lmdb.open(str(path), **{"map_size": 1 << 26, **options}) as environment, environment.begin(write=True) as put:
        for key, value in entries:
            put.put(key, value)
    return path


class Bomb:
    """An object whose unpickling makes the canary file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.canary), "w"))
