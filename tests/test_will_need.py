"""The loader tells the system of whole batches before its threads come to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the training layer needs torch")

from training_packs import FORKS_BESIDE_THREADS

import packfmt
from packfmt.images.encode import encode_jpeg
from packfmt.storage.mapped import MappedReader
from packfmt.storage.readplan import ReadPlan


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
    dataset = packfmt.MMapImageDataset(pack, threads=2)
    sampler = packfmt.BlockBatchSampler(dataset, 2, block_size=2, window=3)
    with packfmt.Loader(dataset, sampler=sampler, workers=workers, start_method="fork") as loader:
        for _ in loader:
            pass
    expected = []
    for batch, near in zip(sampler.batches(0), sampler.read_ahead(0), strict=False):
        expected += [part.tolist() for part in (batch, near) if len(part)]
    assert len(expected) > len(sampler)
    assert [list(map(int, line.split())) for line in log.read_text().splitlines()] == expected
