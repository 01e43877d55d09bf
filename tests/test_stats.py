"""Where the time goes: sums, the verdict, the slowest samples."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_packs import CROP, FORKS_BESIDE_THREADS, make_pack

from packfmt import DecodeError, ImageDataset, Loader, LoaderStats
from packfmt.images.decode import Decoder
from packfmt.storage.base import LaterPlan
from packfmt.storage.readahead import ReadAhead
from packfmt.training import loader as loader_module
from packfmt.training.batch import Timing
from packfmt.training.stats import KEYS, SLOWEST, StatsRecorder

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"))


def wait_a_little(image: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)
    return image


# The verdict


@pytest.mark.parametrize(
    ("stats", "verdict"),
    [
        (LoaderStats(wait=0.5, consume=9.5, decode=30), "consumer-bound"),
        (LoaderStats(wait=5, consume=5, read=1, decode=30, transform=2), "decode-bound"),
        (LoaderStats(wait=5, consume=5, read=40, decode=30, transform=2), "disk-bound"),
        (LoaderStats(wait=5, consume=5, read=1, decode=3, transform=9), "transform-bound"),
        (LoaderStats(wait=5, consume=5, read=1, decode=3, transform=2, collate=2), "transform-bound"),
        (LoaderStats(), "consumer-bound"),
    ],
)
def test_verdict(stats: LoaderStats, verdict: str) -> None:
    assert stats.verdict == verdict
    assert len(stats.advice.splitlines()) == 1


@pytest.mark.parametrize(
    ("threads", "workers", "samples", "processes"),
    [(2, 0, 1000, True), (4, 2, 1000, True), (2, 0, 100, False), (1, 0, 1000, False), (2, 2, 1000, False)],
)
def test_small_images_want_processes(threads: int, workers: int, samples: int, processes: bool) -> None:
    """0.1 ms each, where several threads share a process."""
    stats = LoaderStats(wait=1, decode=0.1, samples=samples, threads=threads, workers=workers)
    assert stats.verdict == "decode-bound"
    assert (f"workers={threads}" in stats.advice) == processes


def test_the_share_of_waiting() -> None:
    assert LoaderStats(wait=1, consume=2, transfer=1).waited == 0.25
    assert LoaderStats().waited == 0


# The sums


def test_the_recorder_adds_up() -> None:
    recorder = StatsRecorder()
    recorder.threads = 3
    recorder.add_batch(4, Timing(1, 2, 3, 4, [(0.1, 7), (0.3, 8)]), [], 2)
    failures = [DecodeError("bad", key="x"), DecodeError("bad", path="p")]
    recorder.add_batch(3, Timing(1, 2, 3, 4, [(0.2, 9)]), failures, 1)
    recorder.add("wait", 0.5)
    recorder.add("wait", 0.25)
    stats = recorder.snapshot("key {}".format)
    assert (stats.batches, stats.samples, stats.depth, stats.threads) == (2, 7, 1.5, 3)
    assert (stats.read, stats.decode, stats.transform, stats.collate, stats.wait) == (2, 4, 6, 8, 0.75)
    assert (stats.skipped, stats.skipped_keys) == (2, ("x", "p: bad"))
    assert stats.slowest == ((0.3, "key 8"), (0.2, "key 9"), (0.1, "key 7"))


def test_what_is_remembered_is_bounded() -> None:
    recorder = StatsRecorder()
    for number in range(30):
        failures = [DecodeError("bad", key=f"{number}.{i}") for i in range(100)]
        recorder.add_batch(1, Timing(slowest=[(number / 10, number)]), failures, 0)
    stats = recorder.snapshot(str)
    assert stats.skipped == 3000
    assert len(stats.skipped_keys) == KEYS
    assert len(stats.slowest) == SLOWEST
    assert stats.slowest[0] == (2.9, "29")


# The loader's


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_transform_is_found(pack: str, workers: int) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=wait_a_little, threads=2)
    with Loader(ds, 8, workers=workers, start_method="fork") as loader:
        began = time.perf_counter()
        list(loader)
        wall = time.perf_counter() - began
        stats = loader.stats()
    assert (stats.batches, stats.samples, stats.threads) == (5, 40, 2)
    assert stats.transform >= 40 * 0.002
    assert stats.verdict == "transform-bound"
    assert 0 < stats.read + stats.decode + stats.transform + stats.collate <= 2 * wall
    assert stats.wait + stats.consume + stats.transfer <= wall


def test_the_loops_own_time_is_counted(pack: str) -> None:
    loader = Loader(ImageDataset(pack, crop=CROP, threads=2), 8)
    list(loader)
    loader.reset_stats()
    for _ in loader:
        time.sleep(0.02)
    assert loader.stats().consume >= 5 * 0.02


def test_transfer_is_not_counted_as_waiting_too(pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowMover:
        def send(self, batch: Any) -> tuple[Any, Any]:
            time.sleep(0.02)
            return batch, None

        def receive(self, moved: Any, pending: Any) -> Any:
            return moved

    monkeypatch.setattr(loader_module, "DeviceMover", lambda device: SlowMover())
    loader = Loader(ImageDataset(pack, crop=CROP), 8, device="cpu")
    began = time.perf_counter()
    list(loader)
    wall = time.perf_counter() - began
    stats = loader.stats()
    assert stats.transfer >= 5 * 0.02
    assert stats.wait + stats.consume + stats.transfer <= wall


def test_a_break_does_not_count_as_consuming(pack: str) -> None:
    loader = Loader(ImageDataset(pack, crop=CROP), 8)
    next(iter(loader))
    time.sleep(0.05)
    next(iter(loader))
    assert loader.stats().consume < 0.05


def test_counting_anew_in_the_middle(pack: str) -> None:
    loader = Loader(ImageDataset(pack, crop=CROP), 8)
    for number, _ in enumerate(loader):
        if number == 1:
            loader.reset_stats()
    assert loader.stats().batches == 3
    assert loader.stats().wait > 0


def test_the_slowest_sample_is_named(pack: str) -> None:
    loader = Loader(ImageDataset(pack, crop=CROP, threads=2), 8, shuffle=False)
    list(loader)
    slowest = loader.stats().slowest
    assert len(slowest) == SLOWEST
    assert [seconds for seconds, _ in slowest] == sorted((seconds for seconds, _ in slowest), reverse=True)
    assert {key for _, key in slowest} <= {f"{i:03}.jpg" for i in range(40)}


def test_keys_are_read_when_stats_are_asked_for_only(pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = ImageDataset(pack, crop=CROP)
    asked: list[Any] = []
    monkeypatch.setattr(ds.reader, "key", lambda index: asked.append(index) or "a key", raising=False)
    loader = Loader(ds, 8)
    list(loader)
    assert not asked
    assert loader.stats().slowest[0][1] == "a key"


def test_stats_outlive_the_dataset(pack: str) -> None:
    with ImageDataset(pack, crop=CROP) as ds:
        loader = Loader(ds, 8)
        list(loader)
    assert all(key.startswith("record ") for _, key in loader.stats().slowest)


@pytest.mark.parametrize("slow", [0, 6, 7, 39])  # the first and the last of a chunk among them
def test_reading_and_decoding_are_told_apart_and_the_slowest_is_named(
    pack: str, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """By a clock that moves on by 1 for a record read, and by 10 for one decoded, 100 for one of them."""
    now = [0.0]
    views, fill = LaterPlan.views, Decoder._fill
    decoded: list[int] = []

    def slow_views(self: LaterPlan, start: int, stop: int) -> Iterator[memoryview]:
        for view in views(self, start, stop):
            now[0] += 1
            yield view

    def slow_fill(self: Decoder, *arguments: Any) -> None:
        fill(self, *arguments)
        now[0] += 100 if len(decoded) == slow else 10
        decoded.append(len(decoded))

    dataset = ImageDataset(pack, crop=CROP, threads=1)
    monkeypatch.setattr(ReadAhead, "everything_cached", lambda self: False)
    monkeypatch.setattr(LaterPlan, "views", slow_views)
    monkeypatch.setattr(Decoder, "_fill", slow_fill)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    loader = Loader(dataset, 8, shuffle=False)
    for _ in loader:
        pass
    stats = loader.stats()
    assert len(decoded) == len(dataset) > 8
    assert stats.read == len(dataset)
    assert stats.decode == 10 * len(dataset) + 90
    assert stats.slowest[0] == (100, dataset.reader.key(slow))


def test_the_benchmark_of_recording_follows_what_is_recorded() -> None:
    """It goes through the same steps by hand, and refuses to measure where switching them off leaves some."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "tools.bench.stats_overhead", "--records", "128", "--rounds", "1"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "recording alone" in done.stdout
