"""The ordered prefetch queue, and the one public word for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from make import jpeg

import packfmt
from packfmt.prefetch import prefetched


def numbers(count: int, begun: list[int]) -> Iterator[int]:
    for number in range(count):
        begun.append(number)
        yield number


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_items_come_in_order_and_begin_ahead(depth: int, count: int) -> None:
    begun: list[int] = []
    given = []
    for item, waiting in prefetched(numbers(count, begun), depth):
        given.append(item)
        assert len(begun) == min(item + 1 + depth, count)
        assert list(waiting) == begun[item + 1 :]
    assert given == list(range(count))


def test_what_is_under_way_is_cancelled_when_nobody_wants_it() -> None:
    begun: list[int] = []
    cancelled: list[int] = []
    queue = prefetched(numbers(9, begun), 2, cancel=cancelled.append)
    assert next(queue)[0] == 0
    queue.close()
    assert (begun, cancelled) == ([0, 1, 2], [1, 2])


def test_an_error_comes_after_the_items_before_it_were_cancelled() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    cancelled: list[int] = []
    with pytest.raises(OSError, match="no more"):
        next(prefetched(failing(), 1, cancel=cancelled.append))
    assert cancelled == [1]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    with packfmt.create(tmp_path / "pack.bin") as writer:
        for number in range(4):
            writer.write(jpeg(20, 24, seed=number), f"{number}.jpg", label=number)
    return tmp_path / "pack.bin"


def test_the_dataset_s_old_word_warns_and_works(pack: Path) -> None:
    with pytest.warns(DeprecationWarning, match="lookahead is called prefetch"):
        dataset = packfmt.MMapImageDataset(pack, lookahead=5)
    assert dataset.prefetch == 5
    with pytest.warns(DeprecationWarning, match="lookahead is called prefetch"):
        assert dataset.lookahead == 5
    with pytest.warns(DeprecationWarning, match="lookahead is called prefetch"):
        dataset.lookahead = 1
    assert dataset.prefetch == 1
    dataset.close()


def test_the_stream_s_old_word_warns_and_works(pack: Path) -> None:
    with packfmt.open(pack) as reader:
        records = [(bytes(record.data), number) for number, record in enumerate(reader)]
    with pytest.warns(DeprecationWarning, match="ahead is called prefetch"):
        stream = packfmt.ImageStream(records, ahead=2)
    assert [int(torch.as_tensor(label)) for _, label in stream] == [0, 1, 2, 3]
