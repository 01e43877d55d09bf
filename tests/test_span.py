"""Batches whose crops are chosen together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from training_packs import CROP, FLIP, make_pack

import packfmt
from packfmt import BlockBatchSampler, ImageDataset, Loader
from packfmt.randomness import sample_keys
from packfmt.training import engine, plan
from packfmt.training.plan import Pipeline, Plan, choose

BATCHES = [np.array(batch) for batch in ([3, 1], [30, 30, 7, 0], [], [39])]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each choosing was for."""
    sizes: list[int] = []

    def spy(pipeline: Pipeline, indices: np.ndarray, keys: np.ndarray) -> Plan:
        sizes.append(len(indices))
        return choose(pipeline, indices, keys)

    monkeypatch.setattr(plan, "choose", spy)
    return sizes


def assert_equal(found: Plan, wanted: Plan, count: int) -> None:
    for name in ("indices", "keys", "heights", "widths", "boxes", "flips", "orientations"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None)
        assert one is None or (np.array_equal(one, other) and one.dtype == other.dtype)
    assert list(found.records.views(0, count)) == list(wanted.records.views(0, count))


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
@pytest.mark.parametrize("crop", [CROP, None])
def test_together_they_are_what_they_are_alone(pack: str, orientation: str, crop: packfmt.Resize | None) -> None:
    with ImageDataset(pack, crop=crop, flip=crop and FLIP, orientation=orientation, seed=4) as ds:  # type: ignore[arg-type]
        chosen = ds.plan_ahead([np.array(batch, np.int64) for batch in BATCHES], 5)
        for number, batch in enumerate(BATCHES):
            positions = batch.astype(np.int64)
            alone = choose(ds._pipeline, positions, sample_keys(4, 5, positions))
            assert_equal(chosen[number](), alone, len(batch))
            assert list(chosen[number]().records.views(1, 2)) == list(alone.records.views(1, 2))


def test_they_are_chosen_once_whoever_asks_first(pack: str, counted: list[int]) -> None:
    with ImageDataset(pack, crop=CROP) as ds, ThreadPoolExecutor(4) as pool:
        chosen = ds.plan_ahead([np.arange(n, n + 4) for n in range(0, 40, 4)], 0)
        assert counted == []
        found = list(pool.map(lambda each: each().indices.tolist(), reversed(chosen)))
        assert found == [list(range(n, n + 4)) for n in range(36, -4, -4)]
        assert counted == [40]


def test_an_error_comes_with_its_own_batch(pack: str) -> None:
    with ImageDataset(pack, crop=packfmt.RandomCrop((22, 20))) as ds:  # record i has 20 + i % 5 rows
        sampler = BlockBatchSampler(ds, 2, shuffle=False, indices=[2, 3, 4, 7, 5, 8, 9, 12])
        batches = iter(Loader(ds, sampler=sampler))
        assert [next(batches)[1].tolist() for _ in range(2)] == [[2, 3], [4, 7]]
        with pytest.raises(ValueError, match="RandomCrop needs images") as caught:
            next(batches)
        assert caught.value.__notes__ == ["it is record 5, key '005.jpg'"]


@pytest.mark.parametrize(
    ("samples", "batches", "sizes"), [(12, 99, [12, 12, 12, 4]), (99, 2, [8] * 5), (1, 9, [4] * 10)]
)
def test_a_loader_chooses_for_some_batches_at_a_time(
    pack: str, counted: list[int], monkeypatch: pytest.MonkeyPatch, samples: int, batches: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(engine, "GROUP", samples)
    monkeypatch.setattr(engine, "MOST_BATCHES", batches)
    with ImageDataset(pack, crop=CROP, threads=1) as ds:
        assert len(list(Loader(ds, 4))) == 10
        assert counted == sizes


def test_few_batches_are_taken_from_a_sampler_ahead(pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "GROUP", 8)
    taken = []

    class Watched(BlockBatchSampler):
        def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
            for batch in super().batches(epoch, start):
                taken.append(len(batch))
                yield batch

    with ImageDataset(pack, crop=CROP) as ds:
        loader = iter(Loader(ds, sampler=Watched(ds, 4), prefetch=1))
        assert not taken
        next(loader)  # one batch handed out and one under way
        assert len(taken) == 2
        next(loader)
        assert len(taken) == 4


def test_a_file_that_is_cut_after_choosing_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = make_pack(tmp_path)
    with ImageDataset(path, crop=CROP) as ds:
        ds.reader._file.ahead.everything_cached = lambda: True  # type: ignore[attr-defined]
        first, second = ds.plan_ahead([np.arange(20), np.arange(20, 40)], 0)
        assert len(list(first().records.views(0, 20))) == 20
        with open(path, "r+b") as file:
            file.truncate(100)
        with pytest.raises(packfmt.CorruptError, match="changed it in place"):
            next(second().records.views(0, 20))
