"""Memory for batches: given back when the last thing over it is dropped, and never before."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training layer needs torch")

from packfmt.training.arena import GRAIN, KEPT, Arena  # noqa: E402 (it needs torch)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_it_is_dropped() -> None:
    recycler = Arena()
    array = recycler.allocate((4, 8, 8, 3))
    first = address(array)
    del array
    assert address(recycler.allocate((4, 8, 8, 3))) == first


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[1:, 2:],
        lambda array: torch.from_numpy(array).permute(0, 3, 1, 2),
        lambda array: torch.from_numpy(array)[0, 1],
        lambda array: memoryview(array),
    ],
)
def test_a_view_of_any_kind_keeps_it(keep: object) -> None:
    recycler = Arena()
    array = recycler.allocate((4, 8, 8, 3))
    array[...] = 7
    view = keep(array)  # type: ignore[operator]
    del array
    gc.collect()
    other = recycler.allocate((4, 8, 8, 3))
    other[...] = 9
    assert np.asarray(view).max() == 7


def test_a_smaller_batch_does_not_take_the_memory_of_the_others() -> None:
    recycler = Arena()
    large = recycler.allocate((8 * GRAIN,))
    first = address(large)
    del large
    small = recycler.allocate((GRAIN,))
    assert address(small) != first
    assert address(recycler.allocate((8 * GRAIN,))) == first


def test_free_memory_is_bounded() -> None:
    recycler = Arena()
    held = [recycler.allocate((10,)) for _ in range(3 * KEPT)]
    held.clear()
    assert len(recycler._free) == KEPT


def test_shapes_of_nothing_and_pickling() -> None:
    recycler = pickle.loads(pickle.dumps(Arena()))
    assert recycler.allocate((0, 8, 8, 3)).shape == (0, 8, 8, 3)


def test_the_memory_dropped_last_is_taken_first() -> None:
    recycler = Arena()
    one, two = (recycler.allocate((64,)) for _ in range(2))
    last = address(two)
    del one, two
    assert address(recycler.allocate((64,))) == last


def test_a_size_nobody_asks_for_any_more_makes_room() -> None:
    recycler = Arena()
    small = [recycler.allocate((64,)) for _ in range(KEPT)]
    del small
    large = recycler.allocate((8 * GRAIN,))
    first = address(large)
    del large
    assert address(recycler.allocate((8 * GRAIN,))) == first
