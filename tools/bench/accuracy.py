"""Does block order learn as well as a full shuffle? A small CNN on photos that lie sorted by class.

    PACKFMT_TEST_DATA=... python -m tools.bench.accuracy [--epochs 12] [--seeds 3] [--size 64]

Trains on ``clothing/train`` below PACKFMT_TEST_DATA (ten classes) and measures on ``clothing/validation`` and
``clothing/test`` together. The pack is sorted by class, as ``packfmt pack`` writes a folder, or was packed with
``--shuffle``. Orders, in batches of 16:

full shuffle         every sample anywhere
8 blocks a sample    128 blocks of 4: the rule of ``default_window``, in windows of a sixth of the data. (The default
                     itself would take all of so small a set into one window.)
4 blocks a sample    64 blocks of 4
1 block a sample     16 blocks of 4
few large blocks     4 blocks of 16
shuffled pack        the same 4 blocks of 16, packed with ``--shuffle``: windows of a forty-eighth of the data
no shuffle           for comparison

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

UNSEEN = ("validation", "test")
BATCH = 16
MOST_LR = 0.03
FULL = "full shuffle"
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


def orders(seed: int) -> dict[str, tuple[str, dict[str, int]]]:
    """The contenders: which pack, and the options of the order."""
    few = {"block_size": BATCH, "window": 4}
    contenders: dict[str, tuple[str, dict[str, int]]] = {
        FULL: ("sorted", {"block_size": 1, "window": 10**9}),
        "8 blocks a sample": ("sorted", {"block_size": 4, "window": 8 * BATCH}),
        "4 blocks a sample": ("sorted", {"block_size": 4, "window": 4 * BATCH}),
        "1 block a sample": ("sorted", {"block_size": 4, "window": BATCH}),
        "few large blocks": ("sorted", few),
        "shuffled pack": ("shuffled", few),
        "no shuffle": ("sorted", {"shuffle": False}),
    }
    return {name: (pack, {**options, "seed": seed}) for name, (pack, options) in contenders.items()}


def augmented(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A random crop for the batch and a random flip for each image: the same draws whatever the order."""
    top, left = torch.randint(images.shape[-1] - size + 1, (2,), generator=generator).tolist()
    images = images[..., top : top + size, left : left + size]
    flip = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(flip, images.flip(-1), images)


def train(sampler: BatchSampler, images: Tensor, labels: Tensor, seed: int, epochs: int, size: int) -> nn.Module:
    """A trained model."""
    torch.manual_seed(seed)
    model = Net(int(labels.max()) + 1).to("cpu", memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=MOST_LR, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=MOST_LR, total_steps=epochs * len(sampler))
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


def run(name: str, seed: int, folder: str, epochs: int, size: int) -> tuple[float, float]:
    """Train with one order and one seed: accuracy on the test images, and the order's mixing."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="(?s).*one-sided", category=UserWarning)  # which is the point here
    pack, options = orders(seed)[name]
    large = size + size * MARGIN // 64
    images, labels = read_all(f"{folder}/{pack}.bin", large)
    sampler = packfmt.BlockBatchSampler(len(labels), BATCH, partial="drop", **options)
    model = train(sampler, images, labels, seed, epochs, size)
    unseen = [read_all(f"{folder}/{part}.bin", large) for part in UNSEEN]
    images_unseen, labels_unseen = (torch.cat(parts) for parts in zip(*unseen, strict=True))
    return accuracy(model, images_unseen, labels_unseen, size), sampler.quality(labels.numpy()).mixing or 0.0


def report(results: dict[str, list[float]], mixing: dict[str, float]) -> None:
    """A line per order."""
    full = results[FULL]
    print(f"\n{'order':20}{'mixing':>8}{'accuracy':>10}{'lowest':>9}{'highest':>9}{'less than full shuffle':>25}")
    for name, values in results.items():
        lost = [100 * (whole - value) for whole, value in zip(full, values, strict=True)]
        spread = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else float("nan")
        print(
            f"{name:20}{mixing[name]:8.3f}{statistics.mean(values):10.3f}"
            f"{min(values):9.3f}{max(values):9.3f}{statistics.mean(lost):14.1f} ± {spread:.1f} points"
        )


def main() -> None:
    """Read the command line, train everything, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
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
        packfmt.pack(root / "train", f"{folder}/sorted.bin", bad="skip")
        packfmt.pack(root / "train", f"{folder}/shuffled.bin", bad="skip", shuffle=1)
        for part in UNSEEN:
            packfmt.pack(root / part, f"{folder}/{part}.bin", bad="skip")
        tasks = {
            (seed, name): workers.submit(run, name, seed, folder, options.epochs, options.size)
            for seed in range(options.seeds)
            for name in orders(seed)
        }
        for (seed, name), task in tasks.items():
            value, mixing[name] = task.result()
            results.setdefault(name, []).append(value)
            print(f"seed {seed}  {name:20} {value:.3f}  ({time.perf_counter() - began:.0f} s)", flush=True)
    report(results, mixing)


if __name__ == "__main__":
    main()
