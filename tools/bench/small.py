"""Small images: how much a second thread helps, and how much a second process.

    PACKFMT_TEST_DATA=... python -m tools.bench.small [--sizes 64 128 256] [--rounds 5]

Photos of ``clothing/train`` below PACKFMT_TEST_DATA, cropped and shrunk, each several times. With RandomResizedCrop to
7/8 of their size and a flip, and without either, in batches of 128. Everything is warm in the page cache.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import packfmt
from packfmt.images.encode import encode_jpeg
from tools.bench.timing import in_turn, machine, ratio, report

BATCH = 128
WAYS = {"one thread": (1, 0), "two threads": (2, 0), "two processes": (2, 2)}


def shrink(photos: str, folder: Path, size: int, times: int) -> None:
    """Write crops of the photos as files."""
    folder.mkdir()
    with packfmt.ImageDataset(photos, crop=packfmt.RandomResizedCrop(size)) as dataset:
        for epoch in range(times):
            dataset.set_epoch(epoch)
            for start in range(0, len(dataset), 512):
                images = dataset[start : start + 512][0].permute(0, 2, 3, 1).numpy()
                for number, image in enumerate(images, start):
                    (folder / f"{epoch}-{number:06}.jpg").write_bytes(encode_jpeg(np.ascontiguousarray(image), 85))


def go_through(loader: packfmt.Loader, samples: int) -> Callable[[], None]:
    """The same epoch each time."""

    def go() -> None:
        loader.set_epoch(0)
        found = sum(len(images) for images, _ in loader)
        if found != samples:
            raise SystemExit(f"{found} samples came instead of {samples}")

    return go


def compare(pack: str, crop: packfmt.RandomResizedCrop | None, title: str, rounds: int) -> None:
    """One line of results."""
    flip = packfmt.HorizontalFlip() if crop is not None else None
    loaders = {
        name: packfmt.Loader(packfmt.ImageDataset(pack, crop=crop, flip=flip, threads=threads), BATCH, workers=workers)
        for name, (threads, workers) in WAYS.items()
    }
    first = [next(iter(loader))[0].clone() for loader in loaders.values()]
    if not all(torch.equal(first[0], images) for images in first):
        raise SystemExit("they made different pixels")
    samples = len(loaders["one thread"].dataset)
    times = in_turn({name: go_through(loader, samples) for name, loader in loaders.items()}, rounds)
    report(title, times, samples, "images/s")
    for name in ("two threads", "two processes"):
        print(f"  {name}: {ratio(times, 'one thread', name):.2f} times one thread")
    for loader in loaders.values():
        loader.close()
        loader.dataset.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=3, help="that each photo is taken")
    options = parser.parse_args()
    photos = Path(os.environ["PACKFMT_TEST_DATA"]) / "clothing" / "train"
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packfmt.pack(photos, folder / "photos.bin", bad="skip")
        for size in options.sizes:
            shrink(str(folder / "photos.bin"), folder / str(size), size, options.times)
            pack = str(folder / f"{size}.bin")
            packed = packfmt.pack(folder / str(size), pack)
            title = f"{packed.records} JPEGs of {size} x {size}, {packed.bytes / packed.records / 1000:.1f} KB"
            compare(pack, None, title, options.rounds)
            compare(pack, packfmt.RandomResizedCrop(size * 7 // 8), f"{title}, cropped and flipped", options.rounds)


if __name__ == "__main__":
    main()
