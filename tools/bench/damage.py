"""Damaged JPEGs: what packfmt and Pillow make of ten kinds of damage to real photos.

    PACKFMT_TEST_DATA=... python -m tools.bench.damage [--photos 300] [--each 2]

Photos of ``clothing`` and ``odd`` below PACKFMT_TEST_DATA. Each is damaged at random places of its scan data, which are
the same in every run. Bad are damaged files that Pillow refuses and packfmt shows, unless pixel for pixel as they
were; the exit code tells whether there are any.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

import packfmt
from packfmt.images.jpeg import read_jpeg
from tools.bench.timing import machine

SECTOR = 512
Damage = Callable[[bytes, int, Generator, bytes], bytes]  # a file, a place in its scan, another file


def marker(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """A marker put in."""
    return data[:at] + bytes([0xFF, int(rng.integers(1, 0xFF))]) + data[at:]


def fill(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """0xFF put in."""
    return data[:at] + b"\xff" + data[at:]


def byte(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """A byte changed."""
    return data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :]


def bit(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """A bit flipped."""
    return data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :]


def random_sector(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """A sector of random bytes."""
    return _sector(data, at, rng.bytes(SECTOR))


def zero_sector(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """A sector of zeros."""
    return _sector(data, at, bytes(SECTOR))


def foreign_sector(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """A sector of another file."""
    return _sector(data, at, other[at : at + SECTOR] or other[:SECTOR])


def joined(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """The rest is another JPEG."""
    return data[:at] + other


def missing(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """Bytes missing."""
    return data[:at] + data[at + int(rng.integers(1, SECTOR)) :]


def truncated(data: bytes, at: int, rng: Generator, other: bytes) -> bytes:
    """Truncated."""
    return data[:at]


KINDS: tuple[Damage, ...] = (
    *(marker, fill, byte, bit, random_sector, zero_sector, foreign_sector, joined, missing, truncated),
)


def _sector(data: bytes, at: int, content: bytes) -> bytes:
    start = at // SECTOR * SECTOR or SECTOR
    return data[:start] + content[: len(data) - start] + data[start + len(content) :]


def damaged(photos: Sequence[bytes], kind: Damage, each: int) -> list[tuple[bytes, bytes]]:
    """Whole files, and ``each`` damaged ones of each, always the same."""
    found = []
    for number, data in enumerate(photos):
        scan = read_jpeg(data).scan
        rng = np.random.default_rng((number, KINDS.index(kind)))
        for _ in range(each):
            at = int(rng.integers(scan + 1, len(data) - 2))
            found.append((data, kind(data, at, rng, photos[(number + 1) % len(photos)])))
    return found


def by_pillow(data: bytes) -> np.ndarray | None:
    """(H, W, 3) as Pillow decodes it; None if it refuses."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError):
        return None


def by_packfmt(data: bytes) -> np.ndarray | None:
    """(H, W, 3) as packfmt decodes it; None if it refuses."""
    try:
        return packfmt.decode(data)
    except packfmt.DecodeError:
        return None


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether both are there and equal."""
    return one is not None and other is not None and np.array_equal(one, other)


def verdict(whole: bytes, broken: bytes) -> str:
    """What became of one damaged file."""
    ours, theirs, before = by_packfmt(broken), by_pillow(broken), by_packfmt(whole)
    if ours is None:
        return "refused by both" if theirs is None else "refused by packfmt only"
    if same(ours, before):
        return "as it was"
    if theirs is None:
        return "BAD"
    return "shown by both, alike" if same(ours, theirs) else "shown by both, differently"


VERDICTS = (
    *("refused by both", "refused by packfmt only", "as it was"),
    *("shown by both, alike", "shown by both, differently", "BAD"),
)


def photos_of(root: Path, count: int) -> list[bytes]:
    """JPEGs below a folder that decode whole, spread over it."""
    paths = sorted(path for path in root.rglob("*.jpg") if path.is_file())
    chosen = [paths[at] for at in np.linspace(0, len(paths) - 1, min(count, len(paths))).astype(int).tolist()]
    contents = (path.read_bytes() for path in chosen)
    return [data for data in contents if by_packfmt(data) is not None and by_pillow(data) is not None]


def main() -> int:
    """Read the command line, damage, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--each", type=int, default=1, help="damaged files of each photo and kind")
    options = parser.parse_args()
    root = Path(os.environ["PACKFMT_TEST_DATA"])
    photos = photos_of(root / "clothing", options.photos) + photos_of(root / "odd", options.photos)
    print(machine())
    print(f"{len(photos)} photos, damaged {options.each} times in each way\n")
    print("damage".ljust(30) + "".join(name.rjust(28) for name in VERDICTS))
    bad = 0
    for kind in KINDS:
        counts = Counter(verdict(whole, broken) for whole, broken in damaged(photos, kind, options.each))
        print((kind.__doc__ or "").rstrip(".").ljust(30) + "".join(str(counts[name]).rjust(28) for name in VERDICTS))
        bad += counts["BAD"]
    print(f"\nrefused by Pillow and shown by packfmt otherwise than before: {bad} (none is allowed)")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
