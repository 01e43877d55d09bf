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
    sampler = BlockBatchSampler(100, 5)  # the process group may come up yet
    with pytest.warns(UserWarning, match="WORLD_SIZE is 8 but torch.distributed is not initialised") as caught:
        next(iter(sampler))
    assert caught[0].filename == __file__
    assert len(list(sampler)) == 20  # once is enough


def test_a_length_without_a_process_group_warns(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(UserWarning, match="use the sampler after init_process_group") as caught:
        len(BlockBatchSampler(100, 5))
    assert caught[0].filename == __file__


EARLY = {
    "block": lambda **ranks: BlockBatchSampler(1000, 5, block_size=2, partial="pad", **ranks),
    "group": lambda **ranks: GroupBatchSampler(np.arange(100) // 30, 5, block_size=2, partial="pad", **ranks),
    "sequence": lambda **ranks: SequenceSampler(100, 5, length=3, partial="pad", **ranks),
}


@pytest.mark.parametrize("make", EARLY)
def test_a_sampler_made_before_the_process_group_follows_it(process_group, monkeypatch, make):
    process_group.is_initialized = lambda: False
    sampler, alone = EARLY[make](), EARLY[make](rank=0, world_size=1)
    assert len(sampler) == len(alone)  # somebody may plan a schedule before the processes are there
    process_group.is_initialized = lambda: True
    expected = EARLY[make](rank=2, world_size=4)
    assert (sampler.rank, sampler.world_size, sampler.global_batch_size) == (2, 4, 20)
    assert (len(sampler), sampler.repeated) == (len(expected), expected.repeated)
    assert sampler.state_dict() == expected.state_dict()
    assert list(sampler) == list(expected)
    assert [batch.tolist() for batch in sampler.batches(1)] == [batch.tolist() for batch in expected.batches(1)]


def test_a_batch_alone_is_of_the_ranks_of_the_moment(process_group):
    process_group.is_initialized = lambda: False
    sampler = BlockBatchSampler(100, 5)
    process_group.is_initialized = lambda: True
    assert sampler.batch(0, 1).tolist() == BlockBatchSampler(100, 5, rank=2, world_size=4).batch(0, 1).tolist()


class Deals:
    """Stands for Accelerate's ``BatchSamplerShard``: each of two ranks takes every second batch."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.drop_last = sampler.drop_last

    def __len__(self):
        return len(self.sampler) // 2

    def __iter__(self):
        for number, batch in enumerate(self.sampler):
            if number % 2 == 0:
                yield batch


@pytest.fixture
def accelerate(process_group, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", SimpleNamespace(BatchSamplerShard=Deals))


@pytest.mark.parametrize("first", ["made", "length", "batches"])
def test_who_deals_batches_out_gets_all_of_them(accelerate, first):
    sampler, alone = BlockBatchSampler(103, 5), BlockBatchSampler(103, 5, rank=0, world_size=1)
    assert (sampler.world_size, len(sampler)) == (4, 6)  # asked for before it is wrapped
    around = Deals(sampler)
    if first == "length":
        assert len(around) == 10
    if first == "batches":
        assert list(around) == list(alone)[::2]
    assert (sampler.rank, sampler.world_size, len(sampler)) == (0, 1, 21)
    assert around.drop_last is False
    sampler.set_epoch(0)
    alone.set_epoch(0)
    assert list(around) == list(alone)[::2]


def test_who_deals_out_knows_whether_short_batches_are_left_out(accelerate):
    assert Deals(BlockBatchSampler(10, 2, partial="drop")).drop_last
    assert not Deals(BlockBatchSampler(10, 2, partial="pad")).drop_last


def test_for_all_others_it_is_no_sampler_that_could_be_built_anew(accelerate):
    assert not hasattr(BlockBatchSampler(10, 2), "drop_last")


def test_splitting_for_given_ranks_twice_warns_once(accelerate):
    sampler = BlockBatchSampler(100, 5, rank=1, world_size=2)
    with pytest.warns(UserWarning, match=r"Deals splits .* pass rank=0, world_size=1") as caught:
        around = Deals(sampler)
    assert caught[0].filename == __file__
    assert list(around) == list(BlockBatchSampler(100, 5, rank=1, world_size=2))[::2]


def test_one_rank_under_somebody_who_deals_out_is_right(accelerate):
    assert len(list(Deals(BlockBatchSampler(100, 5, rank=0, world_size=1)))) == 10


def test_a_distributed_sampler_around_one_gets_all_batches(process_group, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.data.distributed", SimpleNamespace(DistributedSampler=Deals))

    class OfFramework(Deals):
        """What Lightning and others put in a sampler's place."""

    sampler = BlockBatchSampler(100, 5)
    assert list(OfFramework(sampler)) == list(BlockBatchSampler(100, 5, rank=0, world_size=1))[::2]


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
