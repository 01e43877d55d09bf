"""Where ranks come from, and how samplers get on with torch."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from packfmt.sampling import BlockBatchSampler, GroupBatchSampler, SequenceSampler
from packfmt.sampling.ranks import share


@pytest.fixture
def process_group(monkeypatch):
    """A stand-in for torch.distributed, up with rank 2 of 4."""
    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 2, get_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    return distributed


def test_ranks_are_taken_from_the_process_group(process_group):
    sampler = BlockBatchSampler(100, 5)
    assert (sampler.rank, sampler.world_size) == (2, 4)
    assert list(sampler) == list(BlockBatchSampler(100, 5, rank=2, world_size=4))


def test_given_ranks_win_over_the_process_group(process_group):
    sampler = BlockBatchSampler(100, 5, rank=0, world_size=1)
    assert (sampler.rank, sampler.world_size) == (0, 1)


@pytest.mark.parametrize("answer", ["is_available", "is_initialized"])
def test_without_a_process_group_there_is_one_rank(process_group, monkeypatch, answer):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    setattr(process_group, answer, lambda: False)
    assert BlockBatchSampler(100, 5).world_size == 1


def test_a_launcher_without_a_process_group_warns(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 8 but torch.distributed is not initialised") as caught:
        BlockBatchSampler(100, 5)
    assert caught[0].filename == __file__


def test_a_launcher_with_given_ranks_does_not_warn(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert BlockBatchSampler(100, 5, rank=0, world_size=1).world_size == 1


@pytest.mark.parametrize("announced", ["1", "", "many"])
def test_a_launcher_of_one_does_not_warn(monkeypatch, announced):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv("WORLD_SIZE", announced)
    assert BlockBatchSampler(100, 5).world_size == 1


def test_a_world_of_one_needs_no_rank():
    assert BlockBatchSampler(100, 5, world_size=1).rank == 0


def test_sampling_does_not_import_torch():
    code = "import sys, packfmt.sampling as s; list(s.BlockBatchSampler(9, 2)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_cover_the_batch_and_differ_by_one(count, world_size):
    shares = [share(np.arange(count), rank, world_size).tolist() for rank in range(world_size)]
    assert min(map(len, shares)) >= 1
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert list(chain(*shares))[:count] == list(range(count))


class TestTorch:
    """Samplers in an ordinary DataLoader."""

    @pytest.fixture(autouse=True)
    def data(self):
        self.data = pytest.importorskip("torch.utils.data")

        class Numbers(self.data.Dataset):
            def __len__(self):
                return 20

            def __getitems__(self, indices):
                return [(int(index), getattr(index, "epoch", -1)) for index in indices]

            def __getitem__(self, index):
                return self.__getitems__([index])[0]

        self.numbers = Numbers()

    @pytest.mark.parametrize(
        "make",
        [
            lambda data: BlockBatchSampler(data, 6, block_size=2, window=3),
            lambda data: GroupBatchSampler([index // 9 for index in range(20)], 4, dataset=data),
            lambda data: SequenceSampler(data, 2, length=3),
        ],
        ids=["block", "group", "sequence"],
    )
    def test_gives_the_batches_of_the_sampler(self, make):
        loader = self.data.DataLoader(self.numbers, batch_sampler=make(self.numbers))
        for epoch in range(2):
            want = [batch.tolist() for batch in make(self.numbers).batches(epoch)]
            assert [numbers.tolist() for numbers, _ in loader] == want
        assert len(loader) == len(want)

    def test_the_epoch_reaches_persistent_workers(self):
        sampler = BlockBatchSampler(self.numbers, 6, block_size=2, window=3)
        loader = self.data.DataLoader(
            self.numbers,
            batch_sampler=sampler,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            batches = [(numbers.tolist(), set(epochs.tolist())) for numbers, epochs in loader]
            assert batches == [(batch.tolist(), {epoch}) for batch in sampler.batches(epoch)]

    def test_takes_a_subset_as_its_dataset(self):
        subset = self.data.Subset(self.numbers, [3, 5, 7, 11])
        loader = self.data.DataLoader(subset, batch_sampler=BlockBatchSampler(subset, 3))
        assert sorted(number for numbers, _ in loader for number in numbers.tolist()) == [3, 5, 7, 11]
