"""Tiny packs to train from, and transforms that child processes can import."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from make import jpeg

import packfmt
from packfmt.record import Column

CROP = packfmt.RandomResizedCrop(16)
FLIP = packfmt.HorizontalFlip()
NO_IMAGE = b"this is no image"

multiprocessing.set_forkserver_preload(["torch", "packfmt.training.process"])  # once for all tests, not once for each

FORKS_BESIDE_THREADS = "ignore:This process .* is multi-threaded:DeprecationWarning"  # what the tests are about


def make_pack(
    folder: Path, count: int = 40, *, broken: Iterable[int] = (), same_size: bool = False, name: str = "pack.bin"
) -> str:
    """A pack whose labels count the records, with a float32 ``score``, and ``boxes`` with their ``names``.

    Record i has i % 3 boxes, the first its left half, the second its top right pixel.
    """
    path = folder / name
    columns = [Column("score", "<f4"), Column("boxes", "<f4", (None, 4)), Column("names", "<i4", (None,))]
    with packfmt.create(path, columns=columns) as writer:
        for i in range(count):
            height, width = (24, 20) if same_size else (20 + i % 5, 24 + i % 7)
            boxes = np.array([[0, 0, width / 2, height], [width - 1, 0, width, 1]], np.float32)[: i % 3]
            data = NO_IMAGE if i in broken else jpeg(height, width, seed=i)
            writer.write(data, f"{i:03}.jpg", label=i, score=i / 2, boxes=boxes, names=np.arange(i % 3, dtype=np.int32))
    return os.fspath(path)


def damage(path: str, index: int) -> None:
    """Change one byte of a record."""
    with packfmt.open(path) as reader:
        start = int(reader.offsets([index])[0])
    with open(path, "r+b") as file:
        file.seek(start + 30)
        byte = file.read(1)[0]
        file.seek(start + 30)
        file.write(bytes([byte ^ 0xFF]))


def labels_of(batches: Iterable[Any]) -> list[list[int]]:
    return [targets.tolist() for _, targets in batches]


def pixels_of(batches: Iterable[Any]) -> dict[int, bytes]:
    """Label to pixels, of batches (images, labels)."""
    return {
        int(label): image.contiguous().numpy().tobytes()
        for images, labels in batches
        for image, label in zip(images, labels, strict=True)
    }


def decoding_threads() -> int:
    return sum(thread.name.startswith("packfmt-decode") for thread in threading.enumerate())


def in_fork(check: Callable[[], object]) -> int:
    """The exit code of a forked child: 0 where ``check`` held."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def open_descriptors() -> int:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the open descriptors of a process are counted on Linux only")
    return len(os.listdir("/proc/self/fd"))


def shared_names() -> set[str]:
    """Names of shared memory that this process and its children have mapped; none where the system does not tell.

    Not those in /dev/shm: other processes' come and go there.
    """
    found: set[str] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8", "surrogateescape").splitlines()
        except (FileNotFoundError, ProcessLookupError):  # not Linux, or a child that has just ended
            continue
        paths = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line]
        found |= {path for path in paths if not path.endswith(" (deleted)")}  # what has no name any more
    return found


# Transforms


def add_noise(image: torch.Tensor) -> torch.Tensor:
    return image + torch.from_numpy(packfmt.sample_rng().integers(0, 9, image.shape, dtype=np.uint8))


class Unlucky(Exception):
    """An error of the user's own, which knows more than its message."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code


def fail(image: torch.Tensor) -> torch.Tensor:
    raise Unlucky("out of luck", 7)


def stop_here(image: torch.Tensor) -> torch.Tensor:
    time.sleep(60)
    return image


def process_of(image: torch.Tensor) -> torch.Tensor:
    return torch.tensor(os.getpid())


def add_rng(images: torch.Tensor, labels: torch.Tensor, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return images, labels + int(rng.integers(1, 1 << 40)) * 1000


def double(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return images, labels * 2
