"""Small packs and streams to train from, made in the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from make import jpeg, saved

import packfmt
from packfmt.images.sniff import sniff
from packfmt.record import IMAGE_COLUMNS

COLOURS = [(200, 40, 40), (40, 200, 40), (40, 40, 200)]


def image_columns(data: bytes) -> dict[str, int]:
    """What the index of a pack holds of an image."""
    found = sniff(data)
    return {column.name: getattr(found, column.name) for column in IMAGE_COLUMNS}


def coloured_jpeg(label: int, seed: int) -> bytes:
    """A noisy picture whose colour tells its class, of a size of its own."""
    rng = np.random.default_rng(seed)
    shape = (24 + seed % 9, 28 + seed % 7, 3)
    pixels = np.array(COLOURS[label]) + rng.normal(0, 40, shape)
    return saved(np.clip(pixels, 0, 255).astype(np.uint8), "JPEG", quality=85)


def coloured_pack(path: Path, count: int) -> Path:
    """A pack of ``count`` images in three classes, sorted by class as folders are."""
    with packfmt.create(path, classes=("red", "green", "blue")) as writer:
        for number in range(count):
            label = number * len(COLOURS) // count
            data = coloured_jpeg(label, number)
            writer.write(data, key=f"{number}.jpg", label=label, **image_columns(data))
    return path


def records(count: int, **columns: Any) -> list[packfmt.Record]:
    """Records of differing pictures, labelled with their own number. ``columns`` hold a value per record."""
    return [
        packfmt.Record(
            jpeg(20 + number % 3, 24, seed=number),
            f"{number}.jpg",
            {"label": number, **{name: values[number] for name, values in columns.items()}},
        )
        for number in range(count)
    ]
