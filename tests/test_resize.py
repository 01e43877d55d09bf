"""Resizing and mirroring in place."""

from __future__ import annotations

import threading

import numpy as np
import psutil
import pytest
import torch
from images import picture
from PIL import Image

from packfmt.training import resize as module
from packfmt.training.resize import mirrored, resize


@pytest.mark.parametrize(
    ("shape", "size"), [((48, 40), (16, 16)), ((7, 9), (31, 20)), ((64, 64), (64, 20)), ((1, 1), (5, 4))]
)
@pytest.mark.parametrize("channels", [3, 1])
def test_equals_pillow_antialiased_bilinear(shape: tuple[int, int], size: tuple[int, int], channels: int) -> None:
    source = picture(*shape, channels=channels)
    out = np.empty((*size, channels), np.uint8)
    resize(source, out, False)
    image = Image.fromarray(source if channels == 3 else source[..., 0])
    expected = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR)).reshape(out.shape)
    assert np.abs(out.astype(int) - expected).max() <= 1


def test_mirrors_what_it_resized() -> None:
    source = picture()
    plain, flipped = np.empty((2, 16, 12, 3), np.uint8)
    resize(source, plain, False)
    resize(source, flipped, True)
    assert np.array_equal(flipped, plain[:, ::-1])


def test_a_crop_of_the_right_size_is_copied() -> None:
    source = picture()
    crop = source[3:19, 5:21]
    out = np.empty((16, 16, 3), np.uint8)
    resize(crop, out, False)
    assert np.array_equal(out, crop)
    resize(crop, out, True)
    assert np.array_equal(out, crop[:, ::-1])


def test_mirrors_in_place() -> None:
    source = picture()
    out = source.copy()
    resize(out, out, True)
    assert np.array_equal(out, source[:, ::-1])


def test_writes_to_strided_slots_and_reads_strided_crops() -> None:
    source = picture(60, 50)
    crop = source[10:40, 5:45]
    batch = np.zeros((2, 16, 16, 3), np.uint8)
    expected = np.empty((16, 16, 3), np.uint8)
    resize(np.ascontiguousarray(crop), expected, False)
    resize(crop, batch[1], False)
    assert np.array_equal(batch[1], expected)
    assert not batch[0].any()


def test_takes_pixels_that_must_not_be_written_to() -> None:
    source = picture()
    source.flags.writeable = False
    out = np.empty((16, 16, 3), np.uint8)
    resize(source, out, True)  # torch would warn, which is an error here
    assert not source.flags.writeable


def test_a_torch_without_the_kernel_resizes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = picture()
    with_kernel, without = np.empty((2, 16, 12, 3), np.uint8)
    resize(source, with_kernel, False)
    monkeypatch.setattr(torch._C, "_nn", object())
    found = module._find_kernel()
    monkeypatch.undo()
    assert found is module._interpolate
    monkeypatch.setattr(module, "_kernel", found)
    resize(source, without, False)
    assert np.array_equal(with_kernel, without)


def test_mirrored_is_new_memory() -> None:
    source = picture()
    flipped = mirrored(source)
    assert np.array_equal(flipped, source[:, ::-1])
    assert not np.may_share_memory(flipped, source)


def test_no_team_of_threads_is_started_for_one_image() -> None:
    """In a caller's thread, where torch may use all cores: a team that waits for a busy core is slow."""
    source, out = picture(400, 400), np.empty((224, 224, 3), np.uint8)
    grown: list[int] = []

    def count() -> int:
        return len(psutil.Process().threads())

    def look() -> None:
        torch.set_num_threads(3)
        before = count()
        resize(source[10:350, 20:390], out, True)
        mirrored(out)
        grown.append(count() - before)

    setting = torch.get_num_threads()
    try:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(setting)
    assert grown == [0]
