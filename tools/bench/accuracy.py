"""Does block order learn as well as a full shuffle? A small CNN on photos that lie sorted by class.

    PACKFMT_TEST_DATA=... python -m tools.bench.accuracy [--epochs 8] [--seeds 3] [--size 64]

Trains on ``clothing/train`` below PACKFMT_TEST_DATA (ten classes, packed in the order of their folders, as ``packfmt
pack`` does) and measures on ``clothing/validation`` and ``clothing/test`` together. Orders:

full shuffle    every sample anywhere
block, default  BlockBatchSampler as it chooses block size and window by itself
64 blocks of 4  windows of 256 records, a twelfth of the data, with as many blocks as a batch has samples
4 blocks of 64  windows as large, but of few blocks: what the defaults are there to prevent
no shuffle      for comparison

Every order trains the same initial weights with the same crops and flips for the same number of steps; only the order
differs. The images are decoded once and kept, so that the time goes to training. Each core trains one model at a time,
with one thread. ``mixing`` is the sampler's own measure, 1 for a full shuffle.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import packfmt
from packfmt.sampling import BatchSampler
from tools.bench.timing import machine

PARTS = ("train", "validation", "test")
BATCH = 64
MARGIN = 8  # pixels, of 64, by which the kept images are larger than their crops, for these to move in


class Net(nn.Module):
    """A small residual-free CNN with group normalisation: (N, 3, S, S) floats to (N, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((3, 24, 2), (24, 48, 2), (48, 96, 2), (96, 128, 2)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.float() / 64 - 2)


@cache
def read_all(pack: str, size: int) -> tuple[Tensor, Tensor]:
    """All images at one size, (n, 3, size, size) uint8, and their labels (n,)."""
    dataset = packfmt.MMapImageDataset(pack, crop=packfmt.Resize(size))
    images, labels = dataset[range(len(dataset))]
    dataset.close()
    return images, labels


def orders(pack: str, seed: int) -> dict[str, BatchSampler]:
    """The contenders, over the pack's records."""
    with packfmt.open(pack) as reader:
        count = len(reader)

        def block(**options: int) -> BatchSampler:
            return packfmt.BlockBatchSampler(reader, BATCH, seed=seed, partial="drop", **options)

        warnings.filterwarnings("ignore", message="(?s).*one-sided", category=UserWarning)  # which is the point here
        return {
            "full shuffle": block(block_size=1, window=count),
            "block, default": block(),
            "64 blocks of 4": block(block_size=4, window=64),
            "4 blocks of 64": block(block_size=64, window=4),
            "no shuffle": packfmt.BlockBatchSampler(reader, BATCH, shuffle=False, partial="drop"),
        }


def augmented(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A random crop for the batch and a random flip for each image: the same draws whatever the order."""
    top, left = torch.randint(images.shape[-1] - size + 1, (2,), generator=generator).tolist()
    images = images[..., top : top + size, left : left + size]
    flip = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(flip, images.flip(-1), images)


def train(sampler: BatchSampler, images: Tensor, labels: Tensor, seed: int, epochs: int, size: int) -> nn.Module:
    """A trained model."""
    torch.manual_seed(seed)
    model = Net(int(labels.max()) + 1).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * len(sampler))
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for epoch in range(epochs):
        for indices in sampler.batches(epoch):
            chosen = torch.from_numpy(indices)
            logits = model(augmented(images[chosen], size, generator))
            loss = nn.functional.cross_entropy(logits, labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, size: int) -> float:
    """The share of images that a model knows from their middle."""
    model.eval()
    edge = (images.shape[-1] - size) // 2
    middle = images[..., edge : edge + size, edge : edge + size]
    parts = zip(middle.split(256), labels.split(256), strict=True)
    return sum(int((model(part).argmax(1) == label).sum()) for part, label in parts) / len(labels)


def run(name: str, seed: int, packs: dict[str, str], epochs: int, size: int) -> tuple[float, float]:
    """Train with one order and one seed: accuracy on the test images, and the order's mixing."""
    torch.set_num_threads(1)
    large = size + size * MARGIN // 64
    images, labels = read_all(packs["train"], large)
    sampler = orders(packs["train"], seed)[name]
    mixing = sampler.quality(labels.numpy()).mixing
    model = train(sampler, images, labels, seed, epochs, size)
    unseen = [torch.cat(parts) for parts in zip(*(read_all(packs[part], large) for part in PARTS[1:]), strict=True)]
    return accuracy(model, unseen[0], unseen[1], size), mixing or 0.0


def report(results: dict[str, list[float]], mixing: dict[str, float]) -> None:
    """A line per order."""
    full = results["full shuffle"]
    print(f"\n{'order':16}{'mixing':>8}{'accuracy':>10}{'lowest':>9}{'highest':>9}{'less than full shuffle':>25}")
    for name, values in results.items():
        lost = [100 * (whole - value) for whole, value in zip(full, values, strict=True)]
        spread = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else float("nan")
        print(
            f"{name:16}{mixing[name]:8.3f}{statistics.mean(values):10.3f}{min(values):9.3f}{max(values):9.3f}"
            f"{statistics.mean(lost):14.1f} ± {spread:.1f} points"
        )


def main() -> None:
    """Read the command line, train everything, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args()
    began = time.perf_counter()
    root = Path(os.environ["PACKFMT_TEST_DATA"]) / "clothing"
    print(f"{machine()}\n{options.size} pixels a side, {options.epochs} epochs, batches of {BATCH}")
    results: dict[str, list[float]] = {}
    mixing: dict[str, float] = {}
    workers = ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=mp.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, workers:
        packs = {part: str(Path(folder) / f"{part}.bin") for part in PARTS}
        for part, pack in packs.items():
            packfmt.pack(root / part, pack, bad="skip")
        tasks = {
            (seed, name): workers.submit(run, name, seed, packs, options.epochs, options.size)
            for seed in range(options.seeds)
            for name in orders(packs["train"], seed)
        }
        for (seed, name), task in tasks.items():
            value, mixing[name] = task.result()
            results.setdefault(name, []).append(value)
            print(f"seed {seed}  {name:16} {value:.3f}  ({time.perf_counter() - began:.0f} s)", flush=True)
    report(results, mixing)


if __name__ == "__main__":
    main()
