"""Where the time goes."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from packfmt.training.batch import Timing

__all__ = ["LoaderStats", "StatsRecorder"]

SLOWEST = 10
KEYS = 1000  # keys of skipped records that are remembered
STAGES = ("read", "decode", "transform", "collate", "transfer", "wait", "consume")
BRIEF = 200e-6  # seconds that an image takes, under which threads gain less than processes: see docs/benchmarks.md


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What a loader did since it was made, or since ``reset``.

    Times in seconds. ``read``, ``decode`` and ``transform`` are summed over threads and can exceed the wall time;
    ``collate`` too is spent in the threads. ``transfer`` and ``wait`` pass in the consumer's thread.

    Attributes:
        batches, samples: handed out.
        read, decode, transform, collate: per stage, over all threads.
        transfer: pinning and copying to the device.
        wait: the consumer waited for a batch.
        consume: the consumer did something else between two batches.
        threads: that decode, over all workers.
        workers: child processes, 0 where the threads are in this one.
        depth: batches ready when one was asked for, on average.
        skipped: records left out by ``on_error="skip"``.
        skipped_keys: their keys (file and number, where the key is damaged too), the first thousand.
        slowest: (seconds, key) of the samples that took longest to decode.
    """

    batches: int = 0
    samples: int = 0
    read: float = 0.0
    decode: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    transfer: float = 0.0
    wait: float = 0.0
    consume: float = 0.0
    threads: int = 1
    workers: int = 0
    depth: float = 0.0
    skipped: int = 0
    skipped_keys: tuple[str, ...] = ()
    slowest: tuple[tuple[float, str], ...] = ()

    @property
    def waited(self) -> float:
        """The share of the time that the consumer waited, 0 to 1."""
        return self.wait / max(self.wait + self.consume + self.transfer, 1e-12)

    @property
    def verdict(self) -> str:
        """What limits the run: "consumer-bound", "disk-bound", "transform-bound" or "decode-bound"."""
        if self.waited < 0.1:
            return "consumer-bound"
        transform = self.transform + self.collate
        stages = {"disk-bound": self.read, "decode-bound": self.decode, "transform-bound": transform}
        return max(stages, key=lambda name: stages[name])

    @property
    def advice(self) -> str:
        """One line on what would help."""
        brief = self.decode < BRIEF * self.samples and self.threads > max(self.workers, 1)
        if brief and self.verdict == "decode-bound":
            return (
                "images this small are decoded more quickly than threads can pass the interpreter lock around: "
                f"Loader(workers={self.threads}) gives each a process of its own"
            )
        return {
            "consumer-bound": "the loop is the limit, not the loading: nothing to gain here",
            "disk-bound": "reading is the limit: use a local disk, larger blocks, or more memory for the page cache",
            "decode-bound": "decoding is the limit: more cores, images stored nearer to the size used, or fast=True",
            "transform-bound": "the transform is the limit: crop and flip with packfmt's, normalise on the device",
        }[self.verdict]


@dataclass(slots=True)
class StatsRecorder:
    """Adds up what ``LoaderStats`` shows. Used by the consumer's thread only."""

    threads: int = 1
    workers: int = 0
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    batches: int = 0
    samples: int = 0
    depth: int = 0
    skipped: int = 0
    skipped_keys: list[str] = field(default_factory=list)
    slowest: list[tuple[float, int]] = field(default_factory=list)
    _left_at: float | None = None

    def add(self, stage: str, seconds: float) -> None:
        """Count seconds towards a stage."""
        self.times[stage] += seconds

    def add_batch(self, samples: int, timing: Timing, failures: Sequence[Exception], depth: int) -> None:
        """Count a batch that was handed out.

        Args:
            samples: in it.
            timing: the time it took.
            failures: errors of records left out.
            depth: batches that were ready.
        """
        self.batches += 1
        self.samples += samples
        self.depth += depth
        self.skipped += len(failures)
        for error in failures[: max(0, KEYS - len(self.skipped_keys))]:
            self.skipped_keys.append(getattr(error, "key", None) or str(error))
        times = self.times
        times["read"] += timing.read
        times["decode"] += timing.decode
        times["transform"] += timing.transform
        times["collate"] += timing.collate
        if len(self.slowest) < SLOWEST or max(timing.slowest, default=self.slowest[-1]) > self.slowest[-1]:
            self.slowest = heapq.nlargest(SLOWEST, self.slowest + timing.slowest)

    def leave(self) -> None:
        """The consumer goes away with a batch."""
        self._left_at = time.perf_counter()

    def come_back(self) -> None:
        """The consumer asks for the next one."""
        if self._left_at is not None:
            self.add("consume", time.perf_counter() - self._left_at)
            self._left_at = None

    def snapshot(self, key: Callable[[int], str]) -> LoaderStats:
        """The sums so far.

        Args:
            key: gives a record's key. Asked here only: a pack's keys can be larger than memory, and need not be read.
        """
        return LoaderStats(
            batches=self.batches,
            samples=self.samples,
            threads=self.threads,
            workers=self.workers,
            depth=self.depth / max(self.batches, 1),
            skipped=self.skipped,
            skipped_keys=tuple(self.skipped_keys),
            slowest=tuple((seconds, key(index)) for seconds, index in self.slowest),
            **self.times,
        )
