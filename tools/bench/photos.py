"""Synthetic photos for benchmarks: JPEGs of about a wanted size in bytes, made once and kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from packfmt.images.encode import encode_jpeg

DISTINCT = 32


def photo(seed: int, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8: soft shapes with fine grain, which compress like a photo."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return np.clip(soft + rng.normal(0, 6, soft.shape), 0, 255).astype(np.uint8)


def jpegs(target: int, height: int, width: int, count: int = DISTINCT) -> list[bytes]:
    """``count`` JPEGs of about ``target`` bytes each: the quality is searched for."""
    low, high = 5, 98
    pixels = photo(0, height, width)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(encode_jpeg(pixels, middle)) <= target else (low, middle)
    return [encode_jpeg(photo(seed, height, width), low) for seed in range(count)]


def write_tree(folder: Path, count: int, target: int = 110_000, size: tuple[int, int] = (640, 800)) -> int:
    """``count`` files in ten class folders; returns the bytes written. A finished tree is kept."""
    images = jpegs(target, *size)
    total = 0
    for number in range(count):
        path = folder / f"class{number % 10}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = images[number % len(images)]
        if not path.exists():
            path.write_bytes(data)
        total += len(data)
    return total
