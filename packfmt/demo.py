"""The main job on images of its own making: what ``packfmt demo`` runs.

Images are drawn from a seed, packed and verified; where torch is installed, a tiny model is trained for an epoch from
the pack and from the image files, and the times are given side by side.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from packfmt.checking import verify
from packfmt.errors import CorruptError
from packfmt.images.encode import encode_jpeg
from packfmt.packing import pack

__all__ = ["SHAPES", "Stage", "can_train", "draw", "pack_stages", "training_stages"]

SIDE = 256  # pixels of each image's width and height
QUALITY = 90
PACK, IMAGES = "images.bin", "images"  # names inside the folder


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the demo's table.

    Args:
        name: what was done; indented where it is a part of the stage above.
        seconds: that packfmt took.
        plain: seconds that files and a DataLoader took for the same work, where they did it too.
        note: in a few words, what there is to say.
    """

    name: str
    seconds: float
    plain: float | None = None
    note: str = ""


def pack_stages(folder: Path, images: int, seed: int = 0) -> Iterator[Stage]:
    """Draw images into ``folder``, pack and verify them.

    Args:
        folder: to work in; new or empty.
        images: how many.
        seed: of their contents.

    Raises:
        CorruptError: the pack is not whole.
        FileExistsError: the folder holds something.
        OSError: the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(errno.EEXIST, "exists and is not an empty folder; name a new one", os.fspath(folder))
    started = time.perf_counter()
    size = _draw_all(folder / IMAGES, images, seed)
    drawn = f"{images} JPEGs, {SIDE}x{SIDE}, {len(SHAPES)} classes, {size / 1e6:.1f} MB"
    yield Stage("draw", time.perf_counter() - started, note=drawn)
    report = pack(folder / IMAGES, folder / PACK)
    yield Stage("pack", report.seconds, note=f"{report.records} records in one file")
    checked = verify(folder / PACK, decode=True)
    if not checked.ok:
        first = checked.damaged[0]
        raise CorruptError(first.message, path=first.path, index=first.index, key=first.key)
    yield Stage("verify", checked.seconds, note="every checksum, every picture decoded")


def can_train() -> bool:
    """Whether torch is there to train with."""
    return importlib.util.find_spec("torch") is not None


def training_stages(folder: Path) -> Iterator[Stage]:
    """Load and train an epoch from what ``pack_stages`` left in ``folder``, and the same from files.

    Raises:
        PackfmtError: the two ways of loading gave different batches.
    """
    from packfmt.training.profiling import Comparison  # torch: only here, and only now

    with Comparison(folder / PACK, folder / IMAGES) as compared:
        compared.check()
        ours, theirs = compared.load()
        note = f"best of {compared.rounds}; {compared.threads} threads; files: {compared.workers} worker processes"
        yield Stage("load an epoch", ours.seconds, theirs.seconds, note)
        for name in ("read", "decode, crop, flip", "collate"):
            yield Stage(f"  {name}", ours.parts[name], theirs.parts[name], "summed over threads or processes")
        ours, theirs = compared.train()
        yield Stage("train an epoch", ours.seconds, theirs.seconds, f"loss {ours.first:.2f} to {ours.last:.2f}")
        yield Stage("  waited for data", ours.waited, theirs.waited)


def draw(label: int, seed: int, number: int) -> npt.NDArray[np.uint8]:
    """One image: a coloured shape before a blurred, noisy background; a pure function of its arguments.

    Args:
        label: which of ``SHAPES``.
        seed: of the set.
        number: of the image.

    Returns:
        (256, 256, 3) uint8.
    """
    rng = np.random.Generator(np.random.PCG64([seed, number]))
    background = _blurred(rng.uniform(40, 190, (9, 9, 3)).astype(np.float32))
    centre, radius = rng.uniform(0.35, 0.65, 2) * SIDE, rng.uniform(0.18, 0.3) * SIDE
    rows, columns = (np.arange(SIDE) - centre[0])[:, None] / radius, (np.arange(SIDE) - centre[1])[None, :] / radius
    inside = SHAPES[list(SHAPES)[label]](np.abs(rows), np.abs(columns), rows)
    background[inside] = COLOURS[label] + rng.uniform(-25, 25, 3)
    background += rng.integers(0, 24, (SIDE, SIDE, 1), dtype=np.uint8)
    return np.clip(background, 0, 255).astype(np.uint8)


# Class name -> which points are inside, from |row|, |column| and row, in units of the radius.
SHAPES = {
    "circle": lambda y, x, row: y**2 + x**2 < 1,
    "cross": lambda y, x, row: (np.minimum(y, x) < 0.35) & (np.maximum(y, x) < 1),
    "diamond": lambda y, x, row: y + x < 1,
    "square": lambda y, x, row: np.maximum(y, x) < 0.8,
    "triangle": lambda y, x, row: (x < (row + 1) / 2) & (y < 1),
}


# One per class, so that a small model learns something from a few hundred images.
COLOURS = ((200, 60, 50), (60, 170, 70), (50, 90, 200), (200, 180, 50), (150, 60, 180))


def _blurred(corners: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A few random colours (k, k, 3) drawn out to the size of an image, linearly."""
    places = np.linspace(0, len(corners) - 1, SIDE, dtype=np.float32)
    low = np.minimum(places.astype(int), len(corners) - 2)
    part = (places - low)[:, None]
    tall = corners[low] * (1 - part[..., None]) + corners[low + 1] * part[..., None]
    wide: npt.NDArray[np.float32] = tall[:, low] * (1 - part) + tall[:, low + 1] * part
    return wide


def _draw_all(root: Path, images: int, seed: int) -> int:
    """Write the files, one folder per class; returns their bytes."""
    size = 0
    for name in SHAPES:
        (root / name).mkdir(parents=True)
    for number in range(images):
        label = number % len(SHAPES)
        data = encode_jpeg(draw(label, seed, number), QUALITY)
        (root / list(SHAPES)[label] / f"{number:06}.jpg").write_bytes(data)
        size += len(data)
    return size
