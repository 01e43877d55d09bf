"""The loader tells the system of whole batches before its threads come to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the training layer needs torch")

from training_packs import FORKS_BESIDE_THREADS

import packfmt
from packfmt.images.encode import encode_jpeg
from packfmt.storage import fileio as filebytes
from packfmt.storage.base import ReadPlan
from packfmt.storage.fileio import DEFAULT_STEP
from packfmt.storage.readahead import PROBE
from packfmt.storage.shard import MappedReader


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "small.bin"
    rng = np.random.default_rng(0)
    with packfmt.create(path) as writer:
        for number in range(24):
            writer.write(encode_jpeg(rng.integers(0, 256, (16, 16, 3), np.uint8), 90), key=f"{number}", label=number)
    return path


def test_each_batch_is_asked_for_whole_before_it_is_read(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    read: set[int] = set()
    read_unasked: list[int] = []
    will_need, plan = MappedReader.will_need, MappedReader.plan

    def spy_will_need(self: MappedReader, indices: np.ndarray) -> None:
        asked.append(set(np.asarray(indices).tolist()))
        will_need(self, indices)

    class Spied(ReadPlan):
        def __init__(self, indices: np.ndarray, inner: ReadPlan) -> None:
            self.indices, self.inner = indices.tolist(), inner

        def views(self, start: int, stop: int) -> Iterator[memoryview]:
            known = set().union(*asked)
            read.update(self.indices[start:stop])
            read_unasked.extend(i for i in self.indices[start:stop] if i not in known)
            return self.inner.views(start, stop)

    def spy_plan(self: MappedReader, indices: np.ndarray) -> ReadPlan:
        return Spied(indices, plan(self, indices))  # looked up for some batches together, read for a part of one

    monkeypatch.setattr(MappedReader, "will_need", spy_will_need)
    monkeypatch.setattr(MappedReader, "plan", spy_plan)
    dataset = packfmt.MMapImageDataset(pack, threads=2)
    batches = [set(labels.tolist()) for _, labels in packfmt.Loader(dataset, 8)]
    assert asked == batches
    assert read == set(range(24))
    assert read_unasked == []


@pytest.mark.filterwarnings(FORKS_BESIDE_THREADS, "ignore:batches will be one-sided")
@pytest.mark.parametrize("workers", [0, 1])
def test_blocks_are_asked_for_with_the_batches(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    log = tmp_path / "asked.txt"
    will_need = MappedReader.will_need

    def spy(self: MappedReader, indices: np.ndarray) -> None:
        with log.open("a") as file:
            file.write(" ".join(map(str, indices.tolist())) + "\n")
        will_need(self, indices)

    monkeypatch.setattr(MappedReader, "will_need", spy)
    monkeypatch.setattr(MappedReader, "will_need_blocks", spy)
    dataset = packfmt.MMapImageDataset(pack, threads=2)
    sampler = packfmt.BlockBatchSampler(dataset, 2, block_size=2, window=3)
    with packfmt.Loader(dataset, sampler=sampler, workers=workers, start_method="fork") as loader:
        for _ in loader:
            pass
    expected = []
    for batch, near in sampler.with_read_ahead(0):
        expected += [part.tolist() for part in (batch, near) if len(part)]
    assert len(expected) > len(sampler)
    assert [list(map(int, line.split())) for line in log.read_text().splitlines()] == expected


def test_a_process_that_does_not_read_asks_now_and_then(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with DataLoader's workers: what they read from a disk is not counted here."""
    asked: list[int] = []
    with packfmt.open(pack) as reader:
        ahead = reader._file.ahead
        monkeypatch.setattr(ahead, "everything_cached", lambda: True)
        monkeypatch.setattr(ahead, "_begin", lambda offsets, sizes: asked.append(len(offsets)))
        reader.will_need(range(8))
        assert not asked
        for _ in range(2 * PROBE):
            reader.will_need_blocks(range(8))
    assert asked == [1, 1]


def test_lmdb_does_not_look_up_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with packfmt.create(tmp_path / "small.lmdb") as writer:
        writer.write(encode_jpeg(np.zeros((8, 8, 3), np.uint8), 90), key="0")
    with packfmt.open(tmp_path / "small.lmdb") as reader:
        monkeypatch.setattr(reader._file, "ranges", None)
        reader.will_need_blocks([0])


@pytest.mark.parametrize(
    ("files", "step"),
    [
        ({"8:1/queue/read_ahead_kb": "128", "8:1/queue/max_sectors_kb": "1280"}, 1280 << 10),
        ({"8:1/queue/read_ahead_kb": "8192", "8:1/queue/max_sectors_kb": "4096"}, 8192 << 10),
        ({"8:1/start": "", "queue/read_ahead_kb": "64", "queue/max_sectors_kb": "32"}, 64 << 10),  # a partition
        ({"8:1/queue/read_ahead_kb": "0", "8:1/queue/max_sectors_kb": "127"}, 124 << 10),  # whole pages
        ({"8:1/queue/read_ahead_kb": "0", "8:1/queue/max_sectors_kb": "3"}, DEFAULT_STEP),
        ({"8:1/queue/read_ahead_kb": "0"}, DEFAULT_STEP),
        ({"8:1/queue/read_ahead_kb": "much"}, DEFAULT_STEP),
        ({}, DEFAULT_STEP),
    ],
)
def test_what_linux_begins_to_read_at_once_is_the_disks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], step: int
) -> None:
    monkeypatch.setattr(filebytes, "DEVICES", str(tmp_path))
    monkeypatch.setattr(filebytes.mmap, "PAGESIZE", 4096)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert filebytes._begun_at_once.__wrapped__(os.makedev(8, 1)) == step


def test_a_long_range_is_asked_for_in_steps(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: asked.append((start, size)))
    with packfmt.open(pack, io="pread") as reader:
        reader._file.bytes._step = 4096
        reader.will_need(range(24))
        last = int(reader.offsets([23])[0] + reader.lengths([23])[0])
    assert len(asked) > 2
    assert [start for start, _ in asked] == list(range(0, 4096 * len(asked), 4096))
    assert all(size == 4096 for _, size in asked[:-1])
    assert sum(asked[-1]) == last
