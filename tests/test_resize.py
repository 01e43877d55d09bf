"""Resizing and mirroring in place."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make import picture
from PIL import Image

from packfmt.images import pillow
from packfmt.images.geometry import CenterCrop
from packfmt.training import resize as module
from packfmt.training.resize import flipped, resize, resizer


@pytest.mark.parametrize(
    ("shape", "size"), [((48, 40), (16, 16)), ((7, 9), (31, 20)), ((64, 64), (64, 20)), ((1, 1), (5, 4))]
)
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("make", [resizer, pillow.resizer], ids=["torch", "pillow"])
def test_equals_pillow_antialiased(
    make: Any, interpolation: Any, shape: tuple[int, int], size: tuple[int, int], channels: int
) -> None:
    source = picture(*shape, channels=channels)
    out = np.empty((*size, channels), np.uint8)
    make(interpolation)(source, out, False)
    expected = resized(source, size, interpolation)
    assert np.abs(out.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("make", [resizer, pillow.resizer], ids=["torch", "pillow"])
def test_an_interpolation_that_there_is_not(make: Any) -> None:
    with pytest.raises(ValueError, match="interpolation 'nearest' is not 'bilinear' or 'bicubic'"):
        make("nearest")


def resized(source: Any, size: tuple[int, int], interpolation: str) -> Any:
    """Pillow's."""
    image = Image.fromarray(source if source.shape[2] == 3 else source[..., 0])
    return np.asarray(image.resize(size[::-1], Image.Resampling[interpolation.upper()])).reshape(*size, -1)


@pytest.mark.parametrize("make", [resizer, pillow.resizer], ids=["torch", "pillow"])
@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    size=st.tuples(st.integers(4, 24), st.integers(4, 24)),
    more=st.integers(0, 20),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_centre_is_that_of_the_resized_image(
    make: Any, shape: tuple[int, int], size: tuple[int, int], more: int, interpolation: Any, seed: int
) -> None:
    """Of noise, where a pixel's share in another shows most: as torchvision's Resize and CenterCrop on PIL images."""
    source = np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)
    shorter = max(size) + more
    short = min(shape)
    whole = tuple(int(shorter * side / short) for side in shape)
    top, left = (round((side - shown) / 2.0) for side, shown in zip(whole, size, strict=True))
    expected = resized(source, whole, interpolation)[top : top + size[0], left : left + size[1]]
    out = np.empty((*size, 3), np.uint8)
    (box,) = CenterCrop(size, resize=shorter).boxes([shape[0]], [shape[1]]).tolist()
    make(interpolation)(source, out, 0, box)
    error = np.abs(out.astype(int) - expected)
    # Pillow begins with either axis. Each pass rounds, so that two orders are up to two levels apart; bicubic's
    # overshoots are cut off after each pass, too, which in noise makes more.
    if interpolation == "bilinear":
        assert error.max() <= 2
        assert error.mean() < 0.5
    else:
        assert np.sqrt((error**2).mean()) < 4


@pytest.mark.parametrize("box", [(0.3, 2.5, 30.2, 40.0), (0.0, 0.0, 40.0, 48.0), (10.0, 3.75, 11.5, 4.25)])
def test_any_box_is_what_pillow_makes_of_it(box: tuple[float, ...]) -> None:
    source = picture()
    expected = np.asarray(Image.fromarray(source).resize((9, 11), Image.Resampling.BILINEAR, box))
    for function in (resize, pillow.resize):
        out = np.empty((11, 9, 3), np.uint8)
        function(source, out, 0, box)
        assert np.abs(out.astype(int) - expected).max() <= 1


def test_a_long_image_is_not_resized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    kernel = module._kernels["bilinear"]

    def note(source: Any, size: list[int], *further: Any, out: Any) -> None:
        asked.append(size)
        kernel(source, size, *further, out=out)

    monkeypatch.setitem(module._kernels, "bilinear", note)
    out = np.empty((24, 24, 3), np.uint8)
    for width in (60, 6000):
        (box,) = CenterCrop(24, resize=26).boxes([40], [width]).tolist()
        resize(picture(40, width), out, 0, box)
    assert asked == [[26, 39]]


@pytest.mark.parametrize("function", [resize, pillow.resize], ids=["torch", "pillow"])
@pytest.mark.parametrize("size", [(16, 12), (48, 40)])
def test_flips(function: Any, size: tuple[int, int]) -> None:
    source = picture()
    plain, across, down, both = np.empty((4, *size, 3), np.uint8)
    for code, out in enumerate((plain, across, down, both)):
        function(source, out, code)
    assert np.array_equal(across, plain[:, ::-1])
    assert np.array_equal(down, plain[::-1])
    assert np.array_equal(both, plain[::-1, ::-1])


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
    found: Any = module._find_kernel("bilinear")
    monkeypatch.undo()
    assert found.func is module._interpolate
    monkeypatch.setitem(module._kernels, "bilinear", found)
    resize(source, without, False)
    assert np.array_equal(with_kernel, without)


def test_flipped_is_new_memory() -> None:
    source = picture()
    turned = flipped(source, 3)
    assert np.array_equal(turned, source[::-1, ::-1])
    assert not np.may_share_memory(turned, source)


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
        flipped(out, 1)
        grown.append(count() - before)

    setting = torch.get_num_threads()
    try:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(setting)
    assert grown == [0]
