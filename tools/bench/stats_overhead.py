"""What a Loader's statistics cost: with and without recording, and the recording alone.

    python -m tools.bench.stats_overhead [--records 2048] [--side 64] [--rounds 15]

The smaller the images, the more the recording weighs: the default is far smaller than photos are. "Alone" goes through
all that is recorded of a batch, without the loading around it: on a machine where other programs run, it tells more
than the difference of two large numbers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

import packfmt
from packfmt.images.sniff import sniff
from packfmt.record import IMAGE_COLUMNS
from packfmt.storage.base import ReadPlan
from packfmt.training import batch, stats
from packfmt.training.batch import BatchJob, ChunkRecords, Timing
from packfmt.training.stats import StatsRecorder
from tools.bench.photos import jpegs
from tools.bench.timing import in_turn, machine, ratio, report, verdict

BATCH = 64
CHUNKS = 2  # of a batch, with two threads and others waiting behind it
ALL = 10**9
RECORDS = [memoryview(b"")] * BATCH


def write_pack(path: Path, count: int, side: int, target: int) -> None:
    """Photos of about ``target`` bytes, the same few over and over."""
    with packfmt.create(path) as writer:
        images = jpegs(target, side, side)
        for number in range(count):
            data = images[number % len(images)]
            found = sniff(data)
            columns = {column.name: getattr(found, column.name) for column in IMAGE_COLUMNS}
            writer.write(data, key=f"{number:08d}.jpg", label=0, **columns)


@contextmanager
def nothing_recorded() -> Iterator[None]:
    """Clocks that stand still, and recorders that record nothing."""

    def ignore(*arguments: Any, **options: Any) -> None:
        return None

    still = SimpleNamespace(perf_counter=lambda: 0.0)
    with (
        mock.patch.multiple(StatsRecorder, add=ignore, add_batch=ignore, leave=ignore, come_back=ignore),
        mock.patch.object(batch, "time", still),
    ):
        yield


def epoch(loader: packfmt.Loader) -> torch.Tensor:
    """One epoch, always the same. Returns the last batch."""
    loader.set_epoch(ALL)
    loader.set_epoch(0)
    last = torch.empty(0)
    for images, _ in loader:
        last = images
    return last


class Held(ReadPlan):
    """Records that need no reading."""

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        return iter(RECORDS[start:stop])


class Waiting(BatchJob):
    """A batch under way, of which nothing is known but that."""

    def __init__(self) -> None:
        self._unfinished = threading.Lock()


HELD = Held()
AHEAD = [Waiting(), Waiting()]  # as many as a loader makes ahead


def is_ready(job: BatchJob) -> bool:
    """As an engine tells the loader."""
    return job.done


def record_a_batch(recorder: StatsRecorder) -> None:
    """All that is recorded of one batch, in the threads and in the consumer's, and the way of the records past it."""
    timing = Timing()
    indices = np.arange(BATCH)
    clock = time.perf_counter
    for start in range(0, BATCH, BATCH // CHUNKS):
        began = clock()
        records = ChunkRecords(HELD, start, start + BATCH // CHUNKS, {})
        for _ in records:
            pass
        decoded = clock()
        seconds, place = records.slowest
        timing.slowest.append((seconds, int(indices[start + place])))
        done = clock()
        read = records.seconds
        timing.read += read
        timing.decode += decoded - began - read
        timing.transform += done - decoded
    timing.collate = clock() - clock()
    timing.slowest = sorted(timing.slowest, reverse=True)[: batch.SLOW_SAMPLES]
    depth = sum(map(is_ready, AHEAD))
    recorder.add_batch(BATCH, timing, [], depth)
    for stage in ("transfer", "wait"):
        recorder.add(stage, clock() - clock())
    recorder.leave()
    recorder.come_back()


def alone() -> float:
    """Seconds that the recording of one batch takes."""
    recorder = StatsRecorder()
    times = []
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(100):
            record_a_batch(recorder)
        times.append((time.perf_counter() - began) / 100)
    return statistics.median(times)


def compare(loader: packfmt.Loader, rounds: int) -> dict[str, list[float]]:
    """Epochs with and without recording, in turn."""
    with_it = epoch(loader)

    def without() -> torch.Tensor:
        with nothing_recorded():
            found = epoch(loader)
        return found

    loader.reset_stats()
    if not torch.equal(without(), with_it) or loader.stats() != stats.LoaderStats(threads=loader.dataset.threads):
        raise SystemExit("without recording something else came out, or something was recorded")
    contenders: dict[str, Callable[[], object]] = {"recording": lambda: epoch(loader), "not recording": without}
    return in_turn(contenders, rounds)


def measure(path: Path, options: argparse.Namespace, side: int, target: int) -> None:
    """Print what recording costs for images of one size."""
    write_pack(path, options.records, side, target)
    dataset = packfmt.MMapImageDataset(path, crop=packfmt.CenterCrop(side), threads=2)
    loader = packfmt.Loader(dataset, BATCH)
    times = compare(loader, options.rounds)
    report(f"{side} x {side} pixels, {dataset.reader.record_bytes:.0f} bytes", times, options.records, "images/s")
    per_batch = alone()
    whole = statistics.median(times["recording"]) / (options.records / BATCH)
    print(f"  recording alone: {per_batch * 1e6:.0f} µs per batch of {BATCH} that takes {whole * 1e3:.1f} ms")
    print(f"  with / without: {ratio(times, 'recording', 'not recording'):.4f}")
    verdict("recording alone, % of the time", 100 * per_batch / whole, 1, at_most=True)
    dataset.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "small.bin", options, options.side, 2000)
        measure(Path(folder) / "large.bin", options, 224, 18_000)


if __name__ == "__main__":
    main()
