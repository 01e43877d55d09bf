"""Where the time of loading goes, and how it compares with image files through torch's DataLoader.

The files are read as an image folder commonly is: opened and decoded by Pillow one by one, in worker processes. They
get the crops and flips that packfmt chooses, which costs them nothing, so that both ways make the same batches.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from packfmt.errors import PackfmtError
from packfmt.images.geometry import HorizontalFlip, RandomResizedCrop
from packfmt.randomness import sample_keys
from packfmt.sampling import BlockBatchSampler
from packfmt.training.dataset import ImageDataset
from packfmt.training.loader import Loader
from packfmt.training.pool import default_threads
from packfmt.training.stats import LoaderStats

__all__ = ["Comparison", "Epoch", "PlainFiles", "Profile", "profile"]

SIZE = 224  # pixels a side, of the crops
BATCH = 32
BLOCK, WINDOW = 32, 256  # the same order for both, which do not know the same of the data
ROUNDS = 3  # of loading in turn, of which the best counts: other programs make single ones slower
EPOCHS = 1 + ROUNDS + 1  # one to check and to warm up, some to load, one to train
MOST_WORKERS = 8
RATE, MOMENTUM = 0.05, 0.9  # of learning
ALIKE = 3.0  # levels that the two decoders and resizers may differ by, on the average of a batch
PARTS = ("read", "decode, crop, flip", "collate")


@dataclass(frozen=True, slots=True)
class Epoch:
    """What an epoch took, in seconds.

    Args:
        seconds: wall time.
        waited: of it, for batches.
        parts: time per stage, summed over threads or processes.
        first, last: mean loss of the first and the last quarter, where a model was trained.
    """

    seconds: float
    waited: float
    parts: dict[str, float]
    first: float = 0.0
    last: float = 0.0


class PlainFiles:
    """A map-style dataset: ``files[i]`` is ``(image, label, seconds per part)``.

    Args:
        paths: the files.
        labels: (n,) their labels.
        boxes: (epochs, n, 4) crops in source pixels.
        flips: (epochs, n) bool.
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: npt.NDArray[np.int64],
        boxes: npt.NDArray[np.int64],
        flips: npt.NDArray[np.bool_],
    ) -> None:
        self._paths = list(paths)
        self._labels, self._boxes, self._flips = labels, boxes, flips

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, int, tuple[float, float]]:
        epoch = index.epoch
        began = time.perf_counter()
        data = Path(self._paths[index]).read_bytes()
        read = time.perf_counter()
        with Image.open(io.BytesIO(data)) as image:
            box = tuple(self._boxes[epoch, index].tolist())
            shown = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if self._flips[epoch, index]:
            shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(shown)).permute(2, 0, 1)
        return pixels, int(self._labels[index]), (read - began, time.perf_counter() - read)


def collate_timed(samples: list[Any]) -> tuple[Any, Any, tuple[float, float, float]]:
    """torch's collation, with the seconds spent per part."""
    began = time.perf_counter()
    images, labels = default_collate([sample[:2] for sample in samples])
    read, decode = (sum(times) for times in zip(*(sample[2] for sample in samples), strict=True))
    return images, labels, (read, decode, time.perf_counter() - began)


class Comparison:
    """Both loaders over the same images. Close it, or use it as a context manager: it holds processes and threads.

    Args:
        pack: the pack.
        folder: the folder of images that it was made from.
    """

    def __init__(self, pack: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
        self.rounds = ROUNDS
        self.threads = self.workers = min(default_threads(), MOST_WORKERS)
        self.dataset = ImageDataset(
            pack, crop=RandomResizedCrop(SIZE), flip=HorizontalFlip(), threads=self.threads, verify=True
        )
        files = _plain_files(self.dataset, os.fspath(folder))
        self._classes = len(self.dataset.classes)
        # Workers first: a fork wants a process without threads.
        self._plain: DataLoader[Any] = DataLoader(
            files,  # type: ignore[arg-type]
            batch_sampler=BlockBatchSampler(len(files), BATCH, block_size=BLOCK, window=WINDOW),
            num_workers=self.workers,
            persistent_workers=True,
            collate_fn=collate_timed,
        )
        self._ours = Loader(self.dataset, BATCH, block_size=BLOCK, window=WINDOW)

    def check(self) -> None:
        """Go through an epoch of both, which also warms them up.

        Raises:
            PackfmtError: they gave different batches.
        """
        for (theirs, their_labels, _), (ours, labels) in zip(self._plain, self._ours, strict=True):
            difference = (ours.float() - theirs.float()).abs().mean().item()
            if difference > ALIKE or not torch.equal(labels, their_labels):
                raise PackfmtError(
                    f"{self.dataset.reader.path}: batches from the pack and from the files differ by {difference:.1f} "
                    "levels on average, or in their labels; please report this"
                )

    def load(self) -> tuple[Epoch, Epoch]:
        """An epoch of loading alone: from the pack, and from files; the best of a few."""
        rounds = [self._both(_do_nothing, _do_nothing) for _ in range(ROUNDS)]
        ours, theirs = (min(epochs, key=lambda epoch: epoch.seconds) for epochs in zip(*rounds, strict=True))
        return ours, theirs

    def train(self) -> tuple[Epoch, Epoch]:
        """An epoch of training a small model: from the pack, and from files."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores are busy decoding, and teams of threads wait for each other
        try:
            return self._both(_trainer(self._classes), _trainer(self._classes))
        finally:
            torch.set_num_threads(threads)

    def _both(self, ours: Step, theirs: Step) -> tuple[Epoch, Epoch]:
        self._ours.reset_stats()
        epoch = _run(self._ours, ours, {})
        stats = self._ours.stats()
        epoch.parts.update(zip(PARTS, (stats.read, stats.decode + stats.transform, stats.collate), strict=True))
        return epoch, _run(self._plain, theirs, dict.fromkeys(PARTS, 0.0))

    def close(self) -> None:
        """Stop threads and processes."""
        self._ours.close()
        self.dataset.close()
        self._plain._iterator = None  # persistent workers end with their iterator

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Step = Callable[[torch.Tensor, torch.Tensor], float]


def _plain_files(dataset: ImageDataset, folder: str) -> PlainFiles:
    reader, columns = dataset.reader, dataset.reader.columns
    count = len(reader)
    heights, widths = (columns[name].astype(np.int64) for name in ("height", "width"))
    keys = [sample_keys(dataset.seed, epoch, np.arange(count)) for epoch in range(EPOCHS)]
    crop, flip = RandomResizedCrop(SIZE), HorizontalFlip()
    return PlainFiles(
        [os.path.join(folder, reader.key(index)) for index in range(count)],
        np.array(columns["label"]),
        np.stack([crop.boxes(heights, widths, each) for each in keys]),
        np.stack([flip.flips(each) for each in keys]),
    )


def _run(batches: Iterable[Any], step: Step, parts: dict[str, float]) -> Epoch:
    losses: list[float] = []
    waited = 0.0
    started = asked = time.perf_counter()
    for images, labels, *times in batches:
        waited += time.perf_counter() - asked
        losses.append(step(images, labels))
        for name, seconds in zip(parts, *times, strict=True):
            parts[name] += seconds
        asked = time.perf_counter()
    ended = time.perf_counter()
    quarter = max(1, len(losses) // 4)
    return Epoch(ended - started, waited, parts, float(np.mean(losses[:quarter])), float(np.mean(losses[-quarter:])))


def _do_nothing(images: torch.Tensor, labels: torch.Tensor) -> float:
    return 0.0


def _trainer(classes: int) -> Step:
    """A step of training a small network, the same one every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 5, stride=5),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=3),
            torch.nn.ReLU(),
            torch.nn.AdaptiveMaxPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(32, classes),
        )
    # Gradient descent by hand: importing torch.optim takes a second and leaves a cache folder behind.
    parameters = list(model.parameters())
    moves = [torch.zeros_like(parameter) for parameter in parameters]

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        loss = torch.nn.functional.cross_entropy(model((images.float() - 128) / 64), labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient, move in zip(parameters, gradients, moves, strict=True):
                parameter.sub_(move.mul_(MOMENTUM).add_(gradient), alpha=RATE)
        return loss.item()

    return step


STAGES = ("read", "decode", "transform", "collate", "transfer")


@dataclass(frozen=True, slots=True)
class Profile:
    """What a loader did in ``seconds`` of wall time."""

    seconds: float
    stats: LoaderStats

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.stats.samples / max(self.seconds, 1e-9)

    @property
    def stages(self) -> dict[str, float]:
        """Stage to its seconds, summed over threads."""
        return {stage: getattr(self.stats, stage) for stage in STAGES}

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        derived = {"seconds": self.seconds, "images_per_second": self.rate, "waited": self.stats.waited}
        return {**derived, "verdict": self.stats.verdict, "advice": self.stats.advice, **asdict(self.stats)}


def profile(loader: Loader, batches: int, *, consume: float = 0.0) -> Profile:
    """Go through a loader's batches, epoch after epoch where one has too few.

    The loader's statistics start anew.

    Args:
        loader: whose time.
        batches: how many to take, at least 1.
        consume: seconds that a training step stands still for each batch, leaving the processor free as a GPU does.

    Raises:
        ValueError: the loader has no batches.
    """
    if not len(loader):
        raise ValueError(f"{loader.dataset.reader.path}: has no batch to profile")
    loader.reset_stats()
    started = time.perf_counter()
    left = batches
    while left:
        for _ in loader:
            time.sleep(consume)
            left -= 1
            if not left:
                break
    return Profile(time.perf_counter() - started, loader.stats())
