"""Arrays to PNG and JPEG bytes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from make import picture, pillow_pixels
from PIL import Image

from packfmt.images.decode import decode
from packfmt.images.encode import encode_jpeg, encode_png, parse_encoding
from packfmt.images.sniff import FORMATS, sniff


@settings(max_examples=60, deadline=None)
@given(npst.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]))))
def test_png_keeps_every_pixel(pixels):
    assert (decode(encode_png(pixels), mode="L" if pixels.shape[2] == 1 else "RGB") == pixels).all()


def test_png_with_alpha():
    pixels = picture(channels=4)
    np.testing.assert_array_equal(pillow_pixels(encode_png(pixels), "RGBA"), pixels)


def test_png_of_two_dimensions_is_gray():
    pixels = picture(channels=1)
    assert encode_png(pixels[..., 0]) == encode_png(pixels)
    assert sniff(encode_png(pixels)).channels == 1


def test_png_of_sixteen_bits():
    pixels = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    with Image.open(io.BytesIO(encode_png(pixels))) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize("encode", [encode_png, encode_jpeg])
def test_strides_do_not_matter(encode):
    wide = picture(20, 60)
    assert encode(wide[::-1, ::2]) == encode(np.ascontiguousarray(wide[::-1, ::2]))


@pytest.mark.parametrize("encode", [encode_png, encode_jpeg])
def test_same_pixels_same_bytes(encode):
    assert encode(picture()) == encode(picture().copy())


def test_jpeg_is_close():
    pixels = picture()
    data = encode_jpeg(pixels, 95)
    assert FORMATS[sniff(data).format] == "jpeg"
    assert np.abs(decode(data).astype(int) - pixels).mean() < 4


def test_jpeg_of_one_channel_is_gray():
    assert sniff(encode_jpeg(picture(channels=1)[..., 0])).channels == 1


def test_jpeg_quality_counts():
    assert len(encode_jpeg(picture(), 20)) < len(encode_jpeg(picture(), 99))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2, 3), np.float32),
        np.zeros((2, 2, 3), bool),
        np.zeros((2, 2, 3), np.uint16),
        np.zeros((2, 2, 2), np.uint8),
        np.zeros((0, 2, 3), np.uint8),
        np.zeros((2, 0), np.uint16),
        np.zeros(4, np.uint8),
        np.zeros((1, 2, 2, 3), np.uint8),
    ],
)
@pytest.mark.parametrize("encode", [encode_png, encode_jpeg])
def test_other_arrays_are_refused(encode, array):
    with pytest.raises(ValueError, match="is no image that"):
        encode(array)


def test_jpeg_has_no_alpha_and_no_sixteen_bits():
    for array in (picture(channels=4), np.zeros((2, 2), np.uint16)):
        with pytest.raises(ValueError, match="is no image that JPEG can hold"):
            encode_jpeg(array)


def test_jpeg_side_limit():
    with pytest.raises(ValueError, match="65,500"):
        encode_jpeg(np.zeros((1, 65_501, 3), np.uint8))


@pytest.mark.parametrize("quality", [0, 101, -1])
def test_jpeg_quality_limits(quality):
    with pytest.raises(ValueError, match="between 1 and 100"):
        encode_jpeg(picture(), quality)


def test_jpeg_subsampling():
    assert encode_jpeg(picture(), 90, "444") != encode_jpeg(picture(), 90, "420")
    with pytest.raises(ValueError, match="subsampling"):
        encode_jpeg(picture(), 90, "410")


def test_parse_encoding():
    assert parse_encoding("png")(picture()) == encode_png(picture())
    assert parse_encoding("jpeg")(picture()) == encode_jpeg(picture(), 95)
    assert parse_encoding("jpeg:40")(picture()) == encode_jpeg(picture(), 40)


REFUSED = ("", "PNG", "png:9", "jpg:90", "jpeg:", "jpeg:x", "jpeg:0", "jpeg:101", "jpeg:9.5", "jpeg:-1", "jpeg:٩")


@pytest.mark.parametrize("text", REFUSED)
def test_parse_encoding_refuses(text):
    with pytest.raises(ValueError, match=r"encoding|quality"):
        parse_encoding(text)
