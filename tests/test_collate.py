"""Samples to batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from packfmt.training.collate import collate_column, collate_images, collate_targets, pad_images, to_tensor


def image(height: int, width: int, value: int = 1) -> torch.Tensor:
    return torch.full((3, height, width), value, dtype=torch.uint8)


def test_tensor_over_the_same_memory() -> None:
    pixels = np.zeros((4, 5, 3), np.uint8)
    tensor = to_tensor(pixels)
    tensor[2, 1, 0] = 9
    assert tensor.shape == (3, 4, 5)
    assert pixels[1, 0, 2] == 9


@pytest.mark.parametrize("other", [image(1, 1).float(), image(1, 1)[0]], ids=["dtype", "axes"])
def test_padding_needs_images_of_one_kind(other: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"needs images \(C, H, W\) of one dtype, got torch"):
        pad_images([image(2, 3), other])


def test_whole_numbers_that_torch_has_no_room_for_are_refused() -> None:
    assert collate_column(np.array([1, 2**63 - 1], np.uint64)).tolist() == [1, 2**63 - 1]
    with pytest.raises(ValueError, match="18446744073709551615 does not fit"):
        collate_column(np.array([1, 2**64 - 1], np.uint64))


def test_stack() -> None:
    assert collate_images([image(2, 3), image(2, 3)], "stack").shape == (2, 3, 2, 3)
    arrays = collate_images([np.zeros((2, 3, 3)), np.ones((2, 3, 3))], "stack")
    assert isinstance(arrays, np.ndarray)
    assert arrays.shape == (2, 2, 3, 3)


def test_stack_of_several_views_of_each_image() -> None:
    first, second = collate_images([[image(2, 2), image(4, 4)]] * 3, "stack")
    assert first.shape == (3, 3, 2, 2)
    assert second.shape == (3, 3, 4, 4)


def test_stack_of_differing_shapes_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2, 3\), \(3, 4, 3\).*crop.*collate='list' or 'pad'"):
        collate_images([image(2, 3), image(4, 3)], "stack")


def test_list_keeps_the_images() -> None:
    images = [image(2, 3), image(4, 3)]
    assert collate_images(images, "list") == images


def test_pad_puts_images_into_the_top_left_corner() -> None:
    padded = collate_images([image(2, 3), image(4, 1)], "pad")
    assert padded.shape == (2, 3, 4, 3)
    assert padded.is_contiguous(memory_format=torch.channels_last)
    assert padded[0, :, :2].eq(1).all()
    assert padded[1, :, :, :1].eq(1).all()
    assert int(padded.sum()) == 3 * (6 + 4)


def test_pad_keeps_the_type() -> None:
    assert pad_images([image(2, 3).float(), image(1, 1).float()]).dtype == torch.float32


def test_pad_takes_tensors_only() -> None:
    with pytest.raises(TypeError, match="output='tensor'"):
        pad_images([np.zeros((2, 2, 3), np.uint8)])  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["stack", "pad"])
def test_no_images(how: Any) -> None:
    assert collate_images([], how).shape == (0, 3, 0, 0)


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        [True, False],
        [0.5, 2.0],
        [np.float32(0.5), np.float32(1)],
        ["a", "b"],
        [torch.ones(2), torch.zeros(2)],
        [np.ones(2, np.float32), np.zeros(2, np.float32)],
        [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
        [(1, torch.ones(2)), (2, torch.zeros(2))],
    ],
    ids=str,
)
def test_targets_that_fit_together_are_as_torch_collates_them(values: list[Any]) -> None:
    ours, theirs = collate_targets(values), default_collate(values)
    assert repr(ours) == repr(theirs)
    assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


def test_targets_that_do_not_fit_together_are_a_list() -> None:
    ours = collate_targets([{"boxes": np.ones((2, 4))}, {"boxes": np.ones((1, 4))}])
    assert [tuple(boxes.shape) for boxes in ours["boxes"]] == [(2, 4), (1, 4)]
    assert collate_targets([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]
    assert collate_targets([None, 1]) == [None, 1]
    assert collate_targets([]) == []


@pytest.mark.parametrize("dtype", ["<i4", "|u1", "<u2", "<i8"])
def test_whole_numbers_are_int64(dtype: str) -> None:
    assert collate_column(np.array([1, 2], dtype)).dtype == torch.int64


def test_columns_of_other_types_keep_theirs() -> None:
    assert collate_column(np.ones(2, np.float32)).dtype == torch.float32
    assert collate_column(np.ones(2, np.bool_)).dtype == torch.bool
    assert collate_column(np.ones((2, 3), np.int32)).dtype == torch.int32


def test_ragged_columns_are_lists_also_where_all_are_of_one_length() -> None:
    source = np.ones((2, 4), np.float32)
    first, second = collate_column([source, source])
    assert first.shape == second.shape == (2, 4)
    first[:] = 7
    assert source.max() == 1


def test_decoded_images_are_stacked_channels_last() -> None:
    images = [to_tensor(np.full((5, 7, 3), value, np.uint8)) for value in range(2)]
    batch = collate_images(images, "stack")
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch, torch.stack(images))


def test_tensors_of_a_transform_are_stacked_in_their_own_layout() -> None:
    images = [torch.full((3, 5, 7), value) for value in range(2)]
    batch = collate_images(images, "stack")
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.stack(images))
