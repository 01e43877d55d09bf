"""Whole blocks are asked for ahead of the batches that take single records from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfmt.errors import CorruptError
from packfmt.sampling import BatchSampler, BlockBatchSampler, SequenceSampler
from packfmt.sampling import block as block_module
from packfmt.sampling.block import CATCH_UP, block_readahead
from packfmt.sampling.ranks import Indices
from packfmt.sampling.shuffle import BlockOrder


class Asked:
    """A reader that remembers what was asked of it."""

    def __init__(self, asked: list[int], count: int, error: Exception | None = None) -> None:
        self.asked, self.count, self.error = asked, count, error

    def __len__(self) -> int:
        return self.count

    def will_need_blocks(self, indices: np.ndarray) -> None:
        self.asked.extend(indices.tolist())
        if self.error is not None:
            raise self.error


class Data:
    """So many records of a kilobyte."""

    record_bytes = 1000.0

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []
        self.reader = Asked(self.asked, count)

    def __len__(self) -> int:
        return self.count


def in_blocks(sampler: BatchSampler, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """What is to be read before each batch."""
    pairs = zip(sampler.batches(epoch, start), sampler.read_ahead(epoch, start), strict=True)
    return [near.tolist() for _, near in pairs]


# Which blocks, and when


@given(
    count=st.integers(0, 3000),
    block_size=st.integers(1, 40),
    window=st.integers(1, 40),
    size=st.integers(1, 100),
    epoch=st.integers(0, 3),
    part=st.floats(0, 1),
)
def test_each_block_is_asked_for_once_and_none_before_those_of_the_window_before(
    count: int, block_size: int, window: int, size: int, epoch: int, part: float
) -> None:
    order = BlockOrder(count, block_size, window, 0, True)
    start = int(part * count) // size * size
    batches = [blocks.tolist() for blocks in block_readahead(order, epoch, start, size)]
    assert len(batches) == -(-(count - start) // size)
    asked = [block for blocks in batches for block in blocks]
    assert len(set(asked)) == len(asked)
    assert all(len(blocks) <= CATCH_UP * size / block_size + 1 for blocks in batches)
    if asked:
        first = order.window_at(epoch, start)
        rest = [block for number in range(first, order.windows) for block in order.blocks_of(epoch, number)]
        assert asked == [block for block in rest if block in set(asked)]  # in this order; some windows pass too quickly


@given(block_size=st.integers(1, 40), window=st.integers(8, 60), windows=st.integers(2, 6), size=st.integers(1, 50))
def test_a_window_has_been_asked_for_when_its_turn_comes(block_size: int, window: int, windows: int, size: int) -> None:
    if window * block_size < 8 * size:
        window = -(-8 * size // block_size)  # some batches, over which the reading is spread
    order = BlockOrder(windows * window * block_size, block_size, window, 0, True)
    asked: set[int] = set()
    for number, blocks in enumerate(block_readahead(order, 0, 0, size)):
        asked.update(blocks.tolist())
        used = order.window_at(0, min((number + 1) * size, order.count - 1))  # by the next batch
        if used:
            assert asked >= set(order.blocks_of(0, used))


def test_later_windows_are_read_in_step_with_the_batches() -> None:
    order = BlockOrder(40_000, 10, 1000, 0, True)
    batches = [len(blocks) for blocks in block_readahead(order, 0, 0, 50)]
    assert sum(batches) == order.blocks
    assert max(batches[210:600]) == 5  # as many as a batch takes records for
    assert all(batches[210:590])
    assert batches[195:200] != [0] * 5  # the second window's last blocks come when the first one ends
    assert not any(batches[600:])


def test_windows_that_a_batch_passes_over_are_forgotten() -> None:
    order = BlockOrder(20_000, 2, 16, 0, True)
    asked = np.zeros(order.windows, int)
    for number, blocks in enumerate(block_readahead(order, 0, 0, 256)):
        for block in blocks.tolist():
            window = next(w for w in range(order.windows) if block in order.blocks_of(0, w))
            assert window >= order.window_at(0, number * 256)
            asked[window] += 1
    assert asked.any()


def test_the_first_window_is_caught_up_on_within_a_quarter_of_it() -> None:
    order = BlockOrder(40_000, 10, 1000, 0, True)
    batches = list(block_readahead(order, 0, 0, 50))
    quarter = np.concatenate(batches[: 200 // 4 + 1])
    assert set(order.blocks_of(0, 0)) <= set(quarter.tolist())


# Through the sampler


def test_the_records_of_later_windows_come_before_their_batches() -> None:
    sampler = BlockBatchSampler(Data(4000), 10, block_size=10, window=40)
    asked: set[int] = set()
    for position, near in enumerate(in_blocks(sampler)):
        batch = sampler.batch(0, position).tolist()
        assert position < 40 or asked >= set(batch)
        asked.update(near)


def test_records_of_a_subset_are_its_own() -> None:
    chosen = np.arange(1, 4000, 2)
    sampler = BlockBatchSampler(Data(4000), 10, block_size=10, window=40, indices=chosen)
    near = [record for records in in_blocks(sampler) for record in records]
    assert near
    assert set(near) <= set(chosen.tolist())


def test_a_sparse_subset_is_not_read_in_blocks() -> None:
    assert not any(in_blocks(BlockBatchSampler(Data(4000), 10, block_size=10, window=4, indices=range(0, 4000, 3))))


def test_what_lies_between_a_subset_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_module, "memory_bytes", lambda: 4 * 40 * 10 * 1000)
    assert not any(in_blocks(BlockBatchSampler(Data(4000), 10, block_size=10, window=40, indices=range(0, 4000, 2))))


def test_ranks_of_one_machine_share_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks = [BlockBatchSampler(Data(4000), 5, block_size=10, window=40, rank=r, world_size=2) for r in (0, 1)]
    alone = BlockBatchSampler(Data(4000), 10, block_size=10, window=40)
    for first, second, all_of_them in zip(*map(in_blocks, ranks), in_blocks(alone), strict=True):
        assert sorted(first + second) == sorted(all_of_them)


@pytest.mark.parametrize("here", [None, "1"])
def test_ranks_of_several_machines_read_their_own_records_only(
    monkeypatch: pytest.MonkeyPatch, here: str | None
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    sampler = BlockBatchSampler(Data(4000), 5, block_size=10, window=40, rank=0, world_size=2)
    assert not any(in_blocks(sampler))


@pytest.mark.parametrize(("memory", "asked"), [(4 * 40 * 10 * 1000, True), (4 * 40 * 10 * 1000 - 1, False)])
def test_two_windows_take_half_of_the_memory_at_most(monkeypatch: pytest.MonkeyPatch, memory: int, asked: bool) -> None:
    monkeypatch.setattr(block_module, "memory_bytes", lambda: memory)
    assert any(in_blocks(BlockBatchSampler(Data(4000), 10, block_size=10, window=40))) == asked


@pytest.mark.parametrize(
    "sampler",
    [BlockBatchSampler(Data(400), 10, block_size=10, window=4, shuffle=False), SequenceSampler(400, 8, length=8)],
    ids=["in order", "sequences"],
)
def test_orders_without_blocks_ask_for_none(sampler: BatchSampler) -> None:
    assert not any(in_blocks(sampler))


@pytest.mark.parametrize("partial", ["keep", "drop", "pad"])
def test_every_batch_has_its_turn(partial: str) -> None:
    sampler = BlockBatchSampler(Data(401), 10, block_size=10, window=4, partial=partial)
    assert len(in_blocks(sampler)) == len(sampler)
    assert len(in_blocks(sampler, start=len(sampler))) == 0


def test_iterating_asks_the_reader() -> None:
    data = Data(4000)
    sampler = BlockBatchSampler(data, 10, block_size=10, window=40)
    for _ in sampler:
        pass
    assert data.asked == [record for records in in_blocks(sampler) for record in records]


@pytest.mark.parametrize(
    "error", [CorruptError("bad offset"), IndexError("no such"), ValueError("closed"), FileNotFoundError("a shard")]
)
def test_what_is_wrong_is_said_where_the_record_is_read(error: Exception) -> None:
    data = Data(4000)
    data.reader.error = error
    assert len(list(BlockBatchSampler(data, 10, block_size=10, window=40))) == 400
    assert data.asked


def test_a_reader_is_asked_where_it_is_the_data() -> None:
    asked: list[int] = []
    list(BlockBatchSampler(Asked(asked, 4000), 10, block_size=10, window=40))
    assert asked


def test_a_reader_that_numbers_records_in_another_way_is_not_asked() -> None:
    data = Data(4000)
    data.reader.count = 5000
    list(BlockBatchSampler(data, 10, block_size=10, window=40))
    assert not data.asked


def test_samplers_of_ones_own_need_not_know_of_it() -> None:
    class Own(BlockBatchSampler):
        def read_ahead(self, epoch: int, start: int = 0) -> Iterator[Indices]:
            return iter(())

    assert len(list(Own(Data(4000), 10, block_size=10, window=40))) == 400
