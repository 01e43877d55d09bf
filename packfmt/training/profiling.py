"""Runs a loader for a while, to see where its time goes."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from packfmt.training.loader import Loader
from packfmt.training.stats import LoaderStats

__all__ = ["Profile", "profile"]

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
