"""Memory shared between two processes, both sides of it in this one."""

from __future__ import annotations

import gc
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from training_packs import open_descriptors, shared_names

from packfmt.training import arena as module
from packfmt.training.arena import ArenaReader, ArenaWriter


class Pair:
    """A writer and the reader at its other end."""

    def __init__(self) -> None:
        self.writer, self.reader = ArenaWriter(), ArenaReader()

    def send(self, tree: Any) -> Any:
        self.writer.release(self.reader.freed())
        parcel = pickle.loads(pickle.dumps(self.writer.wrap(tree)))
        for slot, size in parcel.new:
            self.reader.add(slot, size, self.writer.descriptor(slot))
        return self.reader.unwrap(parcel)

    @property
    def count(self) -> int:
        return len(self.reader._maps)


@pytest.fixture
def pair() -> Pair:
    return Pair()


Point = namedtuple("Point", "x y")

BIG = torch.arange(5000, dtype=torch.float32)
TREES = {
    "small tensor": torch.arange(6).reshape(2, 3),
    "tensor": BIG.reshape(50, 100),
    "transposed": BIG.reshape(50, 100).T,
    "channels last": BIG.reshape(2, 10, 10, 25).permute(0, 3, 1, 2),
    "every other": BIG[::2],
    "expanded": torch.ones(1, 3).expand(5000, 3),
    "no dimensions": torch.tensor(3),
    "empty": torch.empty(0, 3, 5),
    "bfloat16": BIG.bfloat16(),
    "small bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "complex": torch.ones(3, dtype=torch.complex64),
    "bool": BIG > 7,
    "array": np.arange(5000.0).reshape(100, 50),
    "reversed array": np.arange(5000)[::-1],
    "fortran array": np.asfortranarray(np.arange(5000.0).reshape(100, 50)),
    "big-endian array": np.arange(5000, dtype=">i4"),
    "records": np.zeros(900, [("a", "i4"), ("b", "f8")]),
    "objects": np.array([{}, "text"], dtype=object),
    "nested": {"a": [BIG, (1, "text")], "b": Point(torch.zeros(3), None)},
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.stride() == right.stride() and left.tolist() == right.tolist()
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", TREES)
def test_what_arrives_is_what_was_sent(pair: Pair, name: str) -> None:
    tree = TREES[name]
    arrived = pair.send(tree)
    if name in ("every other", "expanded", "empty"):  # gaps are closed on the way
        assert torch.equal(arrived, tree)
    else:
        assert same(tree, arrived)


def test_a_tensor_that_learns_arrives_as_its_values(pair: Pair) -> None:
    assert torch.equal(pair.send(torch.ones(3, requires_grad=True) * 2), torch.full((3,), 2.0))


def test_arrays_in_a_slot_are_not_copied(pair: Pair) -> None:
    batch = pair.writer.allocate((4, 50, 50, 3))
    batch[...] = 7
    arrived = pair.send(torch.from_numpy(batch).permute(0, 3, 1, 2))
    assert arrived.shape == (4, 3, 50, 50)
    assert arrived.is_contiguous(memory_format=torch.channels_last)
    batch[2, 1, 0, 1] = 9  # the same memory, seen from the other side
    assert arrived[2, 1, 1, 0] == 9


def test_what_arrived_is_writable(pair: Pair) -> None:
    for sent in (torch.zeros(3), BIG, np.zeros(3), np.zeros(9000)):
        arrived = pair.send(sent)
        arrived[0] = 1
        assert arrived[0] == 1


def test_a_slot_is_used_again_when_both_sides_are_done(pair: Pair) -> None:
    for _ in range(20):
        arrived = pair.send(torch.from_numpy(pair.writer.allocate((5000,))))
        del arrived
    assert pair.count == 2  # the next one is allocated before the writer hears that this one is free


def test_a_batch_stays_intact_while_any_part_of_it_is_held(pair: Pair) -> None:
    first = pair.send({"images": BIG, "labels": BIG + 1})
    part = first["labels"][100:200].view(10, 10)
    del first
    for value in range(5):
        pair.send(torch.full((5000,), float(value)))
    assert torch.equal(part.flatten(), BIG[100:200] + 1)


def test_a_slot_is_not_used_again_while_its_writer_still_looks_at_it(pair: Pair) -> None:
    kept = pair.writer.allocate((5000,))
    kept[...] = 3
    arrived = pair.send(torch.from_numpy(kept))
    del arrived
    pair.send(torch.zeros(5000))
    pair.send(torch.from_numpy(pair.writer.allocate((5000,))).zero_())
    assert (kept == 3).all()


def test_an_array_that_is_never_sent_gives_its_slot_back(pair: Pair) -> None:
    for _ in range(20):
        pair.writer.allocate((5000,))
    assert len(pair.writer._maps) == 1


def test_slots_of_growing_batches_stay_few(pair: Pair) -> None:
    for size in range(1 << 18, 8 << 20, 1 << 18):
        pair.send(torch.zeros(size, dtype=torch.uint8))
    assert pair.count <= 5


def test_hoarded_batches_stay_intact_and_hold_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 3)
    pair = Pair()
    before = open_descriptors()
    hoard = [pair.send(torch.full((5000,), float(number))) for number in range(20)]
    assert pair.count <= 4
    assert open_descriptors() <= before + 2 * pair.count
    assert all((batch == number).all() for number, batch in enumerate(hoard))


def test_nothing_stays_open(pair: Pair) -> None:
    gc.collect()
    before = open_descriptors()
    kept = pair.send(BIG)
    pair.writer, pair.reader = ArenaWriter(), ArenaReader()
    gc.collect()
    assert torch.equal(kept, BIG)
    del kept
    gc.collect()
    assert open_descriptors() == before


def test_slots_have_no_name(pair: Pair) -> None:
    arrived = pair.send(BIG)
    assert shared_names() == set()
    assert len(arrived) == 5000
