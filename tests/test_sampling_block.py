"""BlockBatchSampler: what an epoch holds, how it is split, and what it costs."""

from __future__ import annotations

import tracemalloc
import warnings
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfmt.sampling import BlockBatchSampler
from packfmt.sampling.block import default_block_size, default_window
from packfmt.sampling.shuffle import BlockOrder, permutation

WORLDS = (1, 2, 3, 8)


def per_rank(count, batch_size, world_size, epoch=0, **options):
    """Each rank's batches of an epoch, as lists."""
    samplers = [
        BlockBatchSampler(count, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    return [[batch.tolist() for batch in sampler.batches(epoch)] for sampler in samplers]


shapes = st.tuples(
    st.integers(0, 60), st.integers(1, 7), st.sampled_from(WORLDS), st.integers(1, 9), st.integers(1, 6), st.booleans()
)


@given(shapes, st.integers(0, 3))
def test_keep_gives_every_sample_once_and_every_rank_as_many_batches(shape, epoch):
    count, batch_size, world_size, block_size, window, shuffle = shape
    ranks = per_rank(count, batch_size, world_size, epoch, block_size=block_size, window=window, shuffle=shuffle)
    assert len({len(batches) for batches in ranks}) == 1
    samples = sorted(index for batches in ranks for batch in batches for index in batch)
    assert sorted(set(samples)) == list(range(count))
    tail = count % (batch_size * world_size)
    assert len(samples) == count + (world_size - tail if 0 < tail < world_size else 0)
    for step in zip(*ranks, strict=True):
        sizes = [len(batch) for batch in step]
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
        assert max(sizes) <= batch_size


@given(shapes)
def test_pad_gives_full_batches_and_repeats_no_more_than_needed(shape):
    count, batch_size, world_size, block_size, window, shuffle = shape
    ranks = per_rank(
        count, batch_size, world_size, block_size=block_size, window=window, shuffle=shuffle, partial="pad"
    )
    samples = [index for batches in ranks for batch in batches for index in batch]
    assert all(len(batch) == batch_size for batches in ranks for batch in batches)
    assert set(samples) == set(range(count))
    assert len(samples) == -(-count // (batch_size * world_size)) * batch_size * world_size


@given(shapes)
def test_drop_gives_full_batches_and_loses_less_than_one(shape):
    count, batch_size, world_size, block_size, window, shuffle = shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # where nothing is left it says so, see below
        ranks = per_rank(
            count, batch_size, world_size, block_size=block_size, window=window, shuffle=shuffle, partial="drop"
        )
    samples = [index for batches in ranks for batch in batches for index in batch]
    assert all(len(batch) == batch_size for batches in ranks for batch in batches)
    assert len(samples) == len(set(samples)) == count // (batch_size * world_size) * batch_size * world_size


@pytest.mark.parametrize("partial", ["keep", "pad", "drop"])
@pytest.mark.parametrize("count", [24, 100, 113])
def test_the_order_does_not_depend_on_the_world_size(count, partial):
    orders = []
    for world_size in (1, 2, 3, 8):
        ranks = per_rank(count, 24 // world_size, world_size, epoch=2, partial=partial, block_size=3, window=4)
        # A tail smaller than the world is dealt round, hence without repetitions.
        orders.append([list(dict.fromkeys(chain(*step))) for step in zip(*ranks, strict=True)])
    assert orders[0] == orders[1] == orders[2] == orders[3]


def test_defaults_depend_on_the_global_batch_only():
    one = BlockBatchSampler(10**6, 512, rank=0, world_size=1)
    eight = BlockBatchSampler(10**6, 64, rank=3, world_size=8)
    assert (one.block_size, one.window) == (eight.block_size, eight.window)


def test_the_order_is_the_one_drawn_in_the_docstring():
    ranks = per_rank(16, 3, 2, block_size=2, window=4)
    assert ranks == [[[3, 5, 11], [0, 10, 12], [13, 14]], [[4, 2, 1], [7, 8, 9], [6, 15]]]
    for batches in ranks:
        for batch in batches:
            assert " ".join(map(str, batch)) in BlockBatchSampler.__doc__


def test_an_order_never_changes_between_versions():
    sampler = BlockBatchSampler(1000, 8, block_size=7, window=5, seed=2**64 - 1)
    assert sampler.batch(2**40, 3).tolist() == [517, 760, 756, 446, 163, 758, 164, 759]


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}])
def test_seed_and_epoch_change_the_order(change):
    options = {"block_size": 4, "window": 4}
    assert per_rank(100, 10, 1, **options) != per_rank(100, 10, 1, **{**options, **change})


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 9), st.integers(0, 5))
def test_a_window_holds_whole_blocks_and_no_more_than_asked(count, block_size, window, epoch):
    order = BlockOrder(count, block_size, window, 0, True)
    taken = order.take(epoch, 0, count)
    covered = 0
    for number in range(order.windows):
        first, end = order.window_range(epoch, number)
        assert first == covered
        covered = end
        assert {order.window_at(epoch, place) for place in range(first, end)} == {number}
        blocks = set((taken[first:end] // block_size).tolist())
        assert len(blocks) <= window
        assert sorted(taken[first:end]) == [r for r in range(count) if r // block_size in blocks]
    assert covered == count


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 9), st.data())
def test_any_piece_of_the_order_can_be_taken_alone(count, block_size, window, data):
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = BlockOrder(count, block_size, window, 5, True).take(1, 0, count)
    piece = BlockOrder(count, block_size, window, 5, True).take(1, start, stop)
    assert piece.tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 64])
def test_a_permutation_holds_each_element_once(count):
    assert sorted(permutation(count, 1, 2, 0)) == list(range(count))


def test_permutations_are_uniform():
    seen = np.zeros(24)
    for number in range(24_000):
        a, b, c, _ = permutation(4, 0, 0, 1, number).tolist()
        seen[a * 6 + (b - (b > a)) * 2 + (c - (c > a) - (c > b) > 0)] += 1
    assert ((seen - 1000) ** 2 / 1000).sum() < 60  # chi-square with 23 degrees of freedom exceeds 60 once in 30,000


def test_neighbours_of_a_block_are_spread_over_the_window():
    order = BlockOrder(64 * 100, 64, 100, 0, True)  # one window
    places = np.argsort(order.take(0, 0, order.count))[:64]
    assert 0.4 < places.mean() / order.count < 0.6
    assert places.std() / order.count > 0.2


def test_without_shuffle_the_order_is_that_of_the_data():
    assert per_rank(7, 2, 1, shuffle=False) == [[[0, 1], [2, 3], [4, 5], [6]]]


class TestSubset:
    def test_holds_exactly_the_indices(self):
        chosen = np.arange(5, 90, 3)
        ranks = per_rank(100, 4, 3, indices=chosen, block_size=4, window=2)
        assert {index for batches in ranks for batch in batches for index in batch} == set(chosen.tolist())

    def test_of_one(self):
        assert per_rank(100, 4, 1, indices=[42]) == [[[42]]]

    def test_of_one_reaches_every_rank(self):
        assert per_rank(100, 4, 3, indices=[42]) == [[[42]], [[42]], [[42]]]

    def test_of_none_has_no_batches(self):
        assert per_rank(100, 4, 2, indices=[]) == [[], []]

    def test_keeps_its_order_without_shuffle(self):
        assert per_rank(100, 2, 1, indices=[9, 3, 5], shuffle=False) == [[[9, 3], [5]]]

    def test_given_in_any_order_is_read_in_blocks(self):
        mixed = permutation(1000, 0, 0, 0)
        assert per_rank(1000, 8, 1, indices=mixed, block_size=10, window=4) == per_rank(
            1000, 8, 1, indices=np.arange(1000), block_size=10, window=4
        )

    def test_gives_an_index_twice_where_it_is_listed_twice(self):
        assert sorted(chain(*per_rank(10, 2, 1, indices=[3, 3, 4])[0])) == [3, 3, 4]

    @pytest.mark.parametrize("bad", [[0, 10], [-1], [2**63]])
    def test_outside_the_data_is_refused(self, bad):
        with pytest.raises(IndexError, match=r"there are 10 records, 0\.\.9"):
            BlockBatchSampler(10, 2, indices=np.array(bad))

    def test_as_a_mask_is_refused(self):
        with pytest.raises(TypeError, match="flatnonzero"):
            BlockBatchSampler(3, 2, indices=[True, False, True])

    @pytest.mark.parametrize(("bad", "error"), [([1.5], TypeError), ([[1]], ValueError)])
    def test_of_another_type_is_refused(self, bad, error):
        with pytest.raises(error, match="indices must"):
            BlockBatchSampler(3, 2, indices=bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"block_size": 0}, "block_size must be 1 or more, got 0"),
        ({"window": 0}, "window must be 1 or more, got 0"),
        ({"seed": -1}, "seed must be 0.*got -1"),
        ({"rank": 0, "world_size": 0}, "world_size must be 1 or more, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must be 0\.\.1, got 2"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"world_size": 2}, "rank and world_size go together"),
        ({"partial": "fill"}, "partial must be 'drop', 'pad' or 'keep', got 'fill'"),
        ({"dataset_or_length": -1}, "length must be 0 or more, got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockBatchSampler(**{"dataset_or_length": 10, "batch_size": 2, **arguments})


@pytest.mark.parametrize("arguments", [{"batch_size": 2.0}, {"batch_size": True}, {"dataset_or_length": None}])
def test_arguments_of_other_types_are_refused(arguments):
    with pytest.raises(TypeError, match="must be an integer"):
        BlockBatchSampler(**{"dataset_or_length": 10, "batch_size": 2, **arguments})


@pytest.mark.parametrize("partial", ["keep", "pad", "drop"])
def test_no_records_are_no_batches(partial):
    assert list(BlockBatchSampler(0, 4, partial=partial)) == []


def test_fewer_records_than_a_batch_are_one_short_batch():
    assert [len(batch) for batch in BlockBatchSampler(3, 8)] == [3]


def test_dropping_everything_warns():
    with pytest.warns(UserWarning, match="no global batch of 8 samples"):
        sampler = BlockBatchSampler(7, 8, partial="drop")
    assert len(sampler) == 0


@pytest.mark.parametrize(("partial", "repeated"), [("keep", 5), ("pad", 13), ("drop", 0)])
def test_repeated_samples_are_counted(partial, repeated):
    assert BlockBatchSampler(19, 2, rank=0, world_size=8, partial=partial).repeated == repeated


def test_batches_belong_to_the_caller():
    sampler = BlockBatchSampler(100, 10, block_size=10, window=10)
    first = sampler.batch(0, 0)
    kept = first.tolist()
    first[:] = 0
    assert sampler.batch(0, 0).tolist() == kept


@pytest.mark.parametrize("position", [-1, 10])
def test_a_batch_outside_the_epoch_is_refused(position):
    with pytest.raises(IndexError, match="an epoch has 10 batches"):
        BlockBatchSampler(100, 10).batch(0, position)


class TestDefaults:
    def test_a_block_is_about_two_megabytes(self):
        assert default_block_size(110_000) == 19
        assert default_block_size(10**9) == 1

    def test_small_data_is_one_window(self):
        sampler = BlockBatchSampler(4000, 32)
        assert sampler._order.windows == 1

    def test_a_window_has_8_blocks_per_sample_of_the_batch(self):
        assert default_window(block_size=512, global_batch_size=100, record_bytes=4096) == 800

    def test_a_window_holds_32_batches(self):
        assert default_window(block_size=2, global_batch_size=16, record_bytes=2**20) == 256

    def test_a_window_has_256_megabytes(self):
        assert default_window(block_size=32, global_batch_size=8, record_bytes=65536) == 128

    def test_a_window_stays_below_four_gigabytes(self):
        assert default_window(block_size=32, global_batch_size=10**6, record_bytes=65536) == 2048

    def test_a_window_stays_below_four_million_records(self):
        assert default_window(block_size=4096, global_batch_size=256, record_bytes=512) == 1024

    def test_a_window_of_huge_records_still_has_16_blocks(self):
        assert default_window(block_size=1, global_batch_size=4, record_bytes=2**30) == 16

    @pytest.mark.parametrize("place", ["dataset", "reader"])
    def test_the_record_size_comes_from_the_data(self, place):
        class Data(SimpleNamespace):
            def __len__(self):
                return 100

        size = {"record_bytes": 2**19}
        data = Data(**size) if place == "dataset" else Data(reader=SimpleNamespace(**size))
        assert BlockBatchSampler(data, 4).block_size == 4


def test_a_hundred_million_records_need_no_array_of_that_size():
    tracemalloc.start()
    try:
        sampler = BlockBatchSampler(100_000_000, 256, block_size=4096)
        sampler.batch(0, 0)
        sampler.batch(0, len(sampler) // 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20


def draws_per_rank(count, batch_size, world_size, epoch=0, **options):
    """Each rank's (indices, draw numbers) of an epoch."""
    samplers = [
        BlockBatchSampler(count, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    return [
        [
            (index, int(number))
            for batch, draws in zip(sampler.batches(epoch), sampler.draws(epoch), strict=True)
            for index, number in zip(
                batch.tolist(), np.zeros(len(batch)) if draws.numbers is None else draws.numbers, strict=True
            )
        ]
        for sampler in samplers
    ]


class TestDraws:
    """Which draw of its record a sample is."""

    @given(
        st.lists(st.integers(0, 9), max_size=30),
        st.integers(1, 7),
        st.sampled_from(WORLDS),
        st.sampled_from(["pad", "drop"]),
        st.booleans(),
    )
    @pytest.mark.filterwarnings("ignore:no global batch:UserWarning")
    def test_every_draw_of_a_record_has_its_own_number(self, indices, batch_size, world_size, partial, shuffle):
        options = {"indices": indices, "partial": partial, "shuffle": shuffle, "block_size": 2, "window": 2}
        ranks = draws_per_rank(10, batch_size, world_size, **options)
        found = list(chain(*ranks))
        assert len(set(found)) == len(found)

    @given(st.lists(st.integers(0, 9), max_size=30), st.booleans())
    def test_they_count_from_the_first_one_on(self, indices, shuffle):
        (found,) = draws_per_rank(10, 4, 1, indices=indices, shuffle=shuffle, block_size=2, window=2)
        expected = [(record, number) for record in set(indices) for number in range(indices.count(record))]
        assert sorted(found) == sorted(expected)

    def test_where_each_record_comes_once_there_is_nothing_to_tell(self):
        sampler = BlockBatchSampler(10, 4, indices=[1, 2, 5])
        assert [draws.numbers for draws in sampler.draws(0)] == [None]
        assert [draws.numbers for draws in BlockBatchSampler(10, 4, partial="keep").draws(0)] == [None] * 3

    def test_samples_that_fill_up_a_batch_are_second_draws(self):
        batches = list(BlockBatchSampler(10, 4, partial="pad"))
        assert [index.draw for index in batches[-1]] == [0, 0, 1, 1]
        assert batches[-1][2:] == batches[0][:2]

    def test_a_batch_does_not_depend_on_where_an_epoch_was_begun(self):
        sampler = BlockBatchSampler(10, 4, indices=[3] * 9 + [4] * 9, block_size=2, window=2)
        whole = [draws.numbers.tolist() for draws in sampler.draws(1)]
        assert [draws.numbers.tolist() for draws in sampler.draws(1, 3)] == whole[3:]
        sampler.load_state_dict(sampler.state_dict(epoch=1, position=3))
        assert [[index.draw for index in batch] for batch in sampler] == whole[3:]


class TestWeights:
    def test_records_come_as_often_as_their_weights_say(self):
        sampler = BlockBatchSampler(4, 8, weights=[1, 0, 3, 4], num_samples=80_000)
        counts = np.bincount(np.concatenate(list(sampler.batches(0))), minlength=4)
        assert counts.sum() == 80_000
        assert np.abs(counts - [10_000, 0, 30_000, 40_000]).max() < 600  # four standard deviations

    def test_every_epoch_draws_anew_and_a_seed_repeats_it(self):
        weights = np.arange(50)
        sampler, again = (BlockBatchSampler(50, 8, weights=weights, seed=3) for _ in range(2))
        epochs = [list(sampler) for _ in range(3)]
        assert sorted(chain(*epochs[0])) != sorted(chain(*epochs[1]))
        again.set_epoch(2)
        assert list(again) == epochs[2]
        assert list(BlockBatchSampler(50, 8, weights=weights, seed=4)) != epochs[0]

    def test_an_order_never_changes_between_versions(self):
        sampler = BlockBatchSampler(1000, 8, weights=np.arange(1000), block_size=7, window=5, seed=5)
        assert sampler.batch(2**40, 3).tolist() == [944, 944, 960, 779, 919, 942, 960, 918]

    @pytest.mark.parametrize("partial", ["keep", "pad", "drop"])
    def test_the_order_does_not_depend_on_the_world_size(self, partial):
        orders = []
        for world_size in (1, 2, 3, 8):
            options = {"weights": np.arange(100), "partial": partial, "block_size": 3, "window": 4}
            ranks = per_rank(100, 24 // world_size, world_size, epoch=2, **options)
            orders.append([list(chain(*step))[:4] for step in zip(*ranks, strict=True)])
        assert orders[0] == orders[1] == orders[2] == orders[3]

    def test_draws_of_a_record_are_numbered(self):
        found = draws_per_rank(3, 8, 2, weights=[1, 5, 1], num_samples=100, block_size=2, window=2)
        assert len(set(chain(*found))) == 100

    def test_reads_stay_in_blocks(self):
        sampler = BlockBatchSampler(10_000, 8, weights=np.ones(10_000), block_size=50, window=4)
        window = np.concatenate([sampler.batch(0, position) for position in range(25)])  # one window of 200 draws
        assert len(np.unique(window // 100)) < 12

    def test_of_a_subset(self):
        sampler = BlockBatchSampler(10, 4, weights=np.arange(10), indices=[7, 0, 7, 5], num_samples=1000)
        counts = np.bincount(np.concatenate(list(sampler.batches(0))), minlength=10)
        assert set(np.flatnonzero(counts)) == {5, 7}
        assert 2.4 < counts[7] / counts[5] < 3.3  # 7 is listed twice
        assert len(list(chain(*BlockBatchSampler(10, 4, weights=np.arange(10), indices=[7, 5, 1])))) == 3

    def test_resume(self):
        options = {"weights": np.arange(50), "num_samples": 40}
        whole = [list(batch) for batch in BlockBatchSampler(50, 8, **options)]
        sampler = BlockBatchSampler(50, 8, **options)
        sampler.load_state_dict(BlockBatchSampler(50, 8, **options).state_dict(epoch=0, position=2))
        assert list(sampler) == whole[2:]

    @pytest.mark.parametrize("other", [{}, {"weights": np.ones(50)}, {"weights": np.arange(50), "num_samples": 41}])
    def test_a_state_of_other_weights_is_refused(self, other):
        state = BlockBatchSampler(50, 8, weights=np.arange(50)).state_dict()
        with pytest.raises(ValueError, match="the state was taken with weights"):
            BlockBatchSampler(50, 8, **other).load_state_dict(state)

    def test_a_state_from_before_there_were_weights_goes_on(self):
        state = BlockBatchSampler(50, 8).state_dict(epoch=1, position=2)
        del state["weights"]
        sampler = BlockBatchSampler(50, 8)
        sampler.load_state_dict(state)
        assert sampler.place == (1, 2)
        with pytest.raises(ValueError, match="the state was taken with weights -1"):
            BlockBatchSampler(50, 8, weights=np.arange(50)).load_state_dict(state)

    def test_no_draws_are_no_batches(self):
        assert list(BlockBatchSampler(5, 2, weights=np.ones(5), num_samples=0)) == []
        assert list(BlockBatchSampler(0, 2, weights=[])) == []

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"weights": [1, 2]}, ValueError, r"weights must have shape \(3,\), one for each record, got \(2,\)"),
            ({"weights": [1, -2, 3]}, ValueError, r"weights\[1\] is -2.0; weights must be finite and not below 0"),
            ({"weights": [1, 2, np.nan]}, ValueError, r"weights\[2\] is nan"),
            ({"weights": [np.inf, 2, 3]}, ValueError, r"weights\[0\] is inf"),
            ({"weights": [0, 0, 0]}, ValueError, "the weights add up to 0.0; their sum must be finite and above 0"),
            ({"weights": [1e308] * 3}, ValueError, "the weights add up to inf"),
            ({"weights": [0, 0, 1], "indices": [1]}, ValueError, "the weights of the indices add up to 0.0"),
            ({"weights": ["a", "b", "c"]}, TypeError, "weights must be numbers"),
            ({"weights": [1, 2, 3], "num_samples": -1}, ValueError, "num_samples must be 0 or more, got -1"),
            ({"num_samples": 4}, ValueError, "num_samples goes with weights"),
        ],
    )
    def test_bad_weights_are_refused(self, options, error, message):
        with pytest.raises(error, match=message):
            BlockBatchSampler(3, 2, **options)
