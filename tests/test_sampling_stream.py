"""What every sampler does as an iterator: epochs, resuming, announcing; all samplers pass the same tests."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from packfmt.sampling import (
    BlockBatchSampler,
    BucketBatchSampler,
    GroupBatchSampler,
    SampleIndex,
    SequenceSampler,
)


class Data:
    """Stands for a dataset: notes what a sampler tells it."""

    def __init__(self, count, prefetch=0):
        self.count = count
        self.prefetch = prefetch
        self.told = []

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        self.told.append(("epoch", epoch))

    def announce(self, upcoming):
        epoch, batch = upcoming
        self.told.append((epoch, batch.tolist()))


def block(batch_size, dataset=None, **options):
    return BlockBatchSampler(dataset or Data(50), batch_size, block_size=4, window=3, **options)


def group(batch_size, dataset=None, **options):
    groups = np.arange(50) // 7 % 4
    return GroupBatchSampler(groups, batch_size, dataset=dataset or Data(50), block_size=4, window=3, **options)


def bucket(batch_size, dataset=None, **options):
    sides = (100 + np.arange(50) % 3 * 70, np.full(50, 100))
    sampler = BucketBatchSampler(sides, batch_size, block_size=4, window=3, **options)
    sampler._dataset = dataset  # what a dataset with columns would be
    return sampler


def sequence(batch_size, dataset=None, **options):
    groups = np.arange(50) // 25
    return SequenceSampler(dataset or Data(50), batch_size, length=3, groups=groups, **options)


ALL = [block, group, bucket, sequence]
every_sampler = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)


@every_sampler
class TestEpochs:
    def test_each_iteration_is_the_next_epoch(self, make):
        sampler = make(4)
        for epoch in range(3):
            assert list(sampler) == [batch.tolist() for batch in make(4).batches(epoch)]

    def test_epochs_have_equally_many_batches_in_different_order(self, make):
        sampler = make(4)
        epochs = [list(sampler) for _ in range(4)]
        assert {len(epoch) for epoch in epochs} == {len(sampler)}
        assert all(epochs[0] != epoch for epoch in epochs[1:])

    def test_set_epoch_chooses_the_epoch(self, make):
        sampler = make(4)
        next(iter(sampler))
        sampler.set_epoch(7)
        sampler.set_epoch(7)
        assert list(sampler) == [batch.tolist() for batch in make(4).batches(7)]

    def test_an_epoch_set_again_starts_again(self, make):
        sampler = make(4)
        first = list(sampler)
        sampler.set_epoch(0)
        assert list(sampler) == first

    def test_a_broken_off_epoch_set_again_starts_again(self, make):
        sampler = make(4)
        next(iter(sampler))
        sampler.set_epoch(0)
        assert list(sampler) == [batch.tolist() for batch in make(4).batches(0)]

    def test_after_a_break_comes_the_next_epoch(self, make):
        sampler = make(4)
        next(iter(sampler))
        assert list(sampler) == [batch.tolist() for batch in make(4).batches(1)]

    def test_an_iterator_that_is_never_used_claims_no_epoch(self, make):
        sampler = make(4)
        iter(sampler)
        assert list(sampler) == [batch.tolist() for batch in make(4).batches(0)]

    def test_an_abandoned_iterator_moves_nothing(self, make):
        sampler = make(4)
        abandoned = iter(sampler)
        next(abandoned)
        sampler.set_epoch(5)
        list(abandoned)
        assert sampler.state_dict() == make(4).state_dict(epoch=5, position=0)

    def test_the_same_global_batch_for_every_world_size(self, make):
        whole = make(8, rank=0, world_size=1)
        for world_size in (2, 4, 8):
            ranks = [make(8 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)]
            assert {len(sampler) for sampler in ranks} == {len(whole)}
            for position in range(len(whole)):
                dealt = np.concatenate([sampler.batch(1, position) for sampler in ranks])
                # A tail smaller than the world is dealt round.
                assert dealt[: len(whole.batch(1, position))].tolist() == whole.batch(1, position).tolist()

    @pytest.mark.parametrize("partial", ["drop", "pad"])
    def test_without_keep_all_batches_are_full(self, make, partial):
        sampler = make(3, partial=partial, rank=1, world_size=2)
        full = 3 * getattr(sampler, "length", 1)
        assert {len(batch) for batch in sampler} == {full}

    @pytest.mark.parametrize("epoch", [-1, 2**63])
    def test_epochs_out_of_range_are_refused(self, make, epoch):
        with pytest.raises(ValueError, match="epoch must be"):
            make(4).set_epoch(epoch)


@every_sampler
class TestResume:
    def test_at_every_step_goes_on_as_if_uncut(self, make):
        uncut = make(4)
        stream = [batch for _ in range(3) for batch in uncut]
        for cut in range(len(uncut) * 2 + 1):
            sampler = make(4)
            steps = (batch for _ in range(3) for batch in sampler)
            before = [next(steps) for _ in range(cut)]
            resumed = make(4)
            resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
            after = []
            while len(before) + len(after) < len(stream):
                after += list(resumed)
            assert before + after == stream

    def test_with_another_world_size_goes_on(self, make):
        one = make(4, rank=0, world_size=1)
        steps = iter(one)
        for _ in range(2):
            next(steps)
        ranks = [make(2, rank=rank, world_size=2) for rank in range(2)]
        for sampler in ranks:
            sampler.load_state_dict(one.state_dict())
        rest = [left + right for left, right in zip(*ranks, strict=True)]
        # A tail smaller than the world is dealt round.
        assert [both[: len(batch)] for both, batch in zip(rest, steps, strict=True)] == [
            batch.tolist() for batch in make(4).batches(0, 2)
        ]

    def test_the_state_is_used_once(self, make):
        sampler = make(4)
        sampler.load_state_dict(make(4).state_dict(epoch=3, position=2))
        assert list(sampler) == [batch.tolist() for batch in make(4).batches(3, 2)]
        assert list(sampler) == [batch.tolist() for batch in make(4).batches(4)]

    def test_naming_the_resumed_epoch_keeps_the_position(self, make):
        sampler = make(4)
        sampler.load_state_dict(make(4).state_dict(epoch=3, position=2))
        sampler.set_epoch(3)
        assert list(sampler) == [batch.tolist() for batch in make(4).batches(3, 2)]

    def test_at_the_end_of_an_epoch_is_the_next_one(self, make):
        sampler = make(4)
        state = sampler.state_dict(epoch=3, position=len(sampler))
        assert (state["epoch"], state["position"]) == (4, 0)

    @pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 5}, {"shuffle": False}, {"partial": "drop"}])
    def test_of_another_order_is_refused(self, make, change):
        other = make(**{"batch_size": 4, **change})
        with pytest.raises(ValueError, match=r"the state was taken with \w+ .*, this sampler has "):
            make(4).load_state_dict(other.state_dict())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"position": -1}, "position must be 0"),
            ({"position": 10**6}, "position must be 0"),
            ({"epoch": -1}, "epoch must be 0"),
            ({"version": 99}, "version 99"),
            ({"sampler": "Other"}, "sampler 'Other'"),
        ],
    )
    def test_of_a_state_out_of_range_is_refused(self, make, change, message):
        with pytest.raises(ValueError, match=message):
            make(4).load_state_dict({**make(4).state_dict(), **change})

    def test_of_something_else_is_refused(self, make):
        with pytest.raises(ValueError, match="the state has no 'version'"):
            make(4).load_state_dict({})

    def test_needs_epoch_and_position_together(self, make):
        with pytest.raises(ValueError, match="go together"):
            make(4).state_dict(epoch=1)

    def test_a_refused_state_changes_nothing(self, make):
        sampler = make(4)
        before = sampler.state_dict()
        with pytest.raises(ValueError, match="position"):
            sampler.load_state_dict({**before, "epoch": 2, "position": -1})
        assert sampler.state_dict() == before

    def test_survives_pickling(self, make):
        sampler = make(4)
        stream = iter(sampler)
        next(stream)
        copy = pickle.loads(pickle.dumps(sampler))
        assert copy.state_dict() == sampler.state_dict()


@every_sampler
class TestTelling:
    def test_the_dataset_hears_the_epoch_before_its_first_batch(self, make):
        data = Data(50)
        sampler = make(4, dataset=data)
        sampler.set_epoch(2)
        stream = iter(sampler)
        assert data.told == []
        next(stream)
        assert data.told == [("epoch", 2)]

    @pytest.mark.parametrize("prefetch", [1, 3, 100])
    def test_each_batch_is_announced_once_and_in_time(self, make, prefetch):
        data = Data(50, prefetch)
        sampler = make(4, dataset=data)
        yielded = []
        for number, batch in enumerate(sampler):
            yielded.append((0, batch))
            announced = data.told[1:]
            assert len(announced) == min(number + 1 + prefetch, len(sampler))
            assert announced[: number + 1] == yielded
        assert announced == yielded

    def test_nothing_is_announced_without_lookahead(self, make):
        data = Data(50)
        list(make(4, dataset=data))
        assert data.told == [("epoch", 0)]


class TestSampleIndex:
    def test_is_an_int_that_knows_its_epoch(self):
        index = SampleIndex(5, 3)
        assert (index, index.epoch, [10, 20, 30, 40, 50, 60][index]) == (5, 3, 60)
        assert type(index * 2) is int

    def test_shifting_keeps_what_it_knows(self):
        index = SampleIndex(5, 3, 2, 4)
        for shifted in (index + 10, 10 + index, index - 5, index - np.int64(5)):
            assert type(shifted) is SampleIndex
            assert (shifted.epoch, shifted.draw, shifted.source) == (3, 2, 4)
        assert (index + 10, 10 + index, index - 5) == (15, 15, 0)
        assert type(index + 0.5) is float

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_crosses_process_borders(self, protocol):
        index = pickle.loads(pickle.dumps(SampleIndex(5, 3), protocol))
        assert (index, index.epoch, index.draw, index.source) == (5, 3, 0, None)
        again = pickle.loads(pickle.dumps(SampleIndex(5, 3, 2, 4), protocol))
        assert (again, again.epoch, again.draw, again.source) == (5, 3, 2, 4)

    def test_every_index_of_a_batch_is_one(self):
        sampler = block(4)
        sampler.set_epoch(6)
        assert {index.epoch for batch in sampler for index in batch} == {6}
