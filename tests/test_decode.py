"""Pixels against Pillow's, the batch contract, damaged and hostile files, threads."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import time
import tracemalloc

import make
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make import EOI, HEIGHT, WIDTH, pillow_pixels
from PIL import Image, ImageFile

from packfmt.errors import DecodeError
from packfmt.images import libjpeg, pillow
from packfmt.images.decode import Decoder, decode, decode_into
from packfmt.images.jpeg import is_plain, read_jpeg

WHOLE = make.WHOLE
JPEGS = [name for name, data in WHOLE.items() if data[:2] == b"\xff\xd8"]


def slots(count: int, height: int = HEIGHT, width: int = WIDTH, channels: int = 3) -> np.ndarray:
    """A batch that is full of a value, so that what is not written shows."""
    return np.full((count, height, width, channels), 99, np.uint8)


def pillow_crop(data: bytes, box, size, flip=False, mode="RGB", upright=False) -> np.ndarray:
    """Crop, resize, flip, in this order, as torchvision does on PIL images."""
    pixels = pillow_pixels(data, mode, upright)
    image = Image.fromarray(pixels[..., 0] if mode == "L" else pixels).crop(tuple(box))
    image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    result = np.asarray(image).reshape(*size, -1)
    return result[:, ::-1] if flip else result


class TestPillowsPixels:
    @pytest.mark.parametrize("name", WHOLE)
    def test_alone(self, name):
        np.testing.assert_array_equal(decode(WHOLE[name]), pillow_pixels(WHOLE[name]))

    @pytest.mark.parametrize("name", WHOLE)
    def test_in_a_slot(self, name):
        expected = pillow_pixels(WHOLE[name])
        out = slots(1, *expected.shape[:2])
        assert decode_into([WHOLE[name]], out) == []
        np.testing.assert_array_equal(out[0], expected)

    @pytest.mark.parametrize("name", WHOLE)
    def test_cropped_and_resized(self, name):
        height, width, _ = pillow_pixels(WHOLE[name]).shape
        box = (width // 3, height // 4, width, height - height // 5)
        out = slots(1, 24, 20)
        assert decode_into([WHOLE[name]], out, boxes=np.array([box]), flips=np.array([True])) == []
        np.testing.assert_array_equal(out[0], pillow_crop(WHOLE[name], box, (24, 20), flip=True))

    @pytest.mark.parametrize("name", [name for name in WHOLE if name not in JPEGS] + ["cmyk", "ycck"])
    def test_gray(self, name):
        pixels = Image.fromarray(pillow_pixels(WHOLE[name])) if name in JPEGS else None
        expected = np.asarray(pixels.convert("L"))[..., None] if pixels else pillow_pixels(WHOLE[name], "L")
        np.testing.assert_array_equal(decode(WHOLE[name], mode="L"), expected)

    @pytest.mark.parametrize("name", ["baseline", "progressive", "gray", "422"])
    def test_gray_of_a_jpeg_is_its_luma(self, name):
        with Image.open(io.BytesIO(WHOLE[name])) as image:
            image.draft("L", image.size)
            expected = np.asarray(image)[..., None]
        np.testing.assert_array_equal(decode(WHOLE[name], mode="L"), expected)

    def test_fast_is_close(self):
        fast = decode(WHOLE["baseline"], fast=True).astype(int)
        exact = decode(WHOLE["baseline"])
        assert 0 < np.abs(fast - exact).max() < 40

    @pytest.mark.parametrize("wrap", [bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
    def test_any_buffer(self, wrap):
        for name in ("baseline", "cmyk", "png"):
            np.testing.assert_array_equal(decode(wrap(WHOLE[name])), decode(WHOLE[name]))


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(9))
    def test_apply(self, orientation):
        data = make.oriented_jpeg(orientation)
        expected = pillow_pixels(data, upright=True)
        np.testing.assert_array_equal(decode(data, orientation="apply"), expected)
        out = slots(1, *expected.shape[:2])
        assert Decoder(orientation="apply").decode_into([data], out) == []
        np.testing.assert_array_equal(out[0], expected)

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_boxes_count_in_the_upright_picture(self, orientation):
        data = make.oriented_jpeg(orientation)
        box = (3, 5, 31, 33)
        out = slots(1, 16, 18)
        Decoder(orientation="apply").decode_into([data], out, boxes=np.array([box]), flips=np.array([True]))
        np.testing.assert_array_equal(out[0], pillow_crop(data, box, (16, 18), flip=True, upright=True))

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_ignored_by_default(self, orientation):
        np.testing.assert_array_equal(decode(make.oriented_jpeg(orientation)), pillow_pixels(make.jpeg()))

    def test_tags_from_an_index_are_used(self):
        out = slots(1, WIDTH, HEIGHT)
        Decoder(orientation="apply").decode_into([make.jpeg()], out, orientations=np.array([6], np.uint8))
        np.testing.assert_array_equal(out[0], pillow_pixels(make.oriented_jpeg(6), upright=True))

    @pytest.mark.parametrize("orientation", [3, 6])
    def test_tiff_is_always_upright(self, orientation):
        data = make.tiff(tiffinfo={274: orientation})
        for policy in ("ignore", "apply"):
            np.testing.assert_array_equal(decode(data, orientation=policy), pillow_pixels(data))

    def test_png_and_webp(self):
        png = make.png()
        for data in (
            make.webp(exif=b"Exif\0\0" + make.exif(6)),
            png[:33] + make.png_chunk(b"eXIf", make.exif(8)) + png[33:],
        ):
            np.testing.assert_array_equal(decode(data, orientation="apply"), pillow_pixels(data, upright=True))


class TestSizes:
    def test_size_alone_resizes_the_whole(self):
        expected = pillow_crop(WHOLE["baseline"], (0, 0, WIDTH, HEIGHT), (10, 12))
        np.testing.assert_array_equal(decode(WHOLE["baseline"], size=(10, 12)), expected)

    def test_box_alone_crops(self):
        expected = pillow_pixels(WHOLE["baseline"])[5:30, 3:11]
        np.testing.assert_array_equal(decode(WHOLE["baseline"], box=(3, 5, 11, 30)), expected)

    def test_result_is_the_callers(self):
        for name in ("baseline", "png", "cmyk"):
            first = decode(WHOLE[name])
            kept = first.copy()
            first_writable = first.flags.writeable
            decode(make.jpeg(seed=5))
            np.testing.assert_array_equal(first, kept)
            assert first_writable

    def test_enlarging(self):
        box = (4, 4, 9, 8)
        expected = pillow_crop(WHOLE["png"], box, (40, 30))
        np.testing.assert_array_equal(decode(WHOLE["png"], box=box, size=(40, 30)), expected)

    def test_box_does_not_look_outside(self):
        """Crop, then resize: a pixel beside the box has no say, unlike in Pillow's resize(box=...)."""
        left = make.picture()
        right = left.copy()
        right[:, 20:] = 255 - right[:, 20:]
        one, other = (decode(make.saved(side, "PNG"), box=(0, 0, 20, 20), size=(7, 7)) for side in (left, right))
        np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("box", [(0, 0, 0, 5), (5, 5, 4, 9), (-1, 0, 5, 5), (0, 0, 41, 5), (0, 0, 5, 49)])
    def test_bad_box(self, box):
        with pytest.raises(DecodeError, match="40x48"):
            decode(WHOLE["baseline"], box=box)


class TestBatch:
    def test_another_size_is_never_resized_unasked(self):
        """Smaller, larger and turned images; the fast path must not leave part of a slot undefined."""
        records = [make.jpeg(), make.jpeg(24, 20), make.jpeg(96, 80), make.jpeg(40, 48), make.png()]
        out = slots(5)
        failures = decode_into(records, out)
        assert [position for position, _ in failures] == [1, 2, 3]
        assert failures[0][1].startswith("the image has 20x24 pixels and its place 40x48")
        assert not out[1:4].any()
        np.testing.assert_array_equal(out[0], decode(records[0]))
        np.testing.assert_array_equal(out[4], decode(records[4]))

    def test_failures_are_listed_and_zeroed(self):
        records = [WHOLE["baseline"], b"", WHOLE["png"], b"<html>", WHOLE["baseline"][:-400], WHOLE["gif"]]
        for boxes in (None, np.array([[0, 0, WIDTH, HEIGHT]] * 6)):
            out = slots(6)
            failures = decode_into(records, out, boxes=boxes)
            assert [position for position, _ in failures] == [1, 3, 4]
            assert not out[[1, 3, 4]].any()
            for position in (0, 2, 5):
                np.testing.assert_array_equal(out[position], decode(records[position]))

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_a_chunk_equals_one_by_one(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(WHOLE)), min_size=0, max_size=6))
        side = st.integers(0, 60)
        boxes = np.array([data.draw(st.tuples(side, side, side, side)) for _ in names], int).reshape(-1, 4)
        flips = np.array([data.draw(st.booleans()) for _ in names], bool)
        out = slots(len(names), 8, 9)
        failed = dict(decode_into([WHOLE[name] for name in names], out, boxes=boxes, flips=flips))
        for position, name in enumerate(names):
            box = boxes[position].tolist()
            if position in failed:
                with pytest.raises(DecodeError) as caught:
                    decode(WHOLE[name], box=box, size=(8, 9))
                assert failed[position] == caught.value.message
                assert not out[position].any()
            else:
                alone = decode(WHOLE[name], box=box, size=(8, 9))
                np.testing.assert_array_equal(out[position], alone[:, ::-1] if flips[position] else alone)

    @pytest.mark.parametrize("mode", ["RGB", "L"])
    def test_flip_without_box(self, mode):
        out = slots(2, channels=3 if mode == "RGB" else 1)
        Decoder(mode=mode).decode_into([WHOLE["baseline"], WHOLE["png"]], out, flips=np.array([True, True]))
        for slot, name in zip(out, ("baseline", "png"), strict=True):
            np.testing.assert_array_equal(slot, decode(WHOLE[name], mode=mode)[:, ::-1])

    def test_gray_crop(self):
        out = slots(1, 11, 13, 1)
        Decoder(mode="L").decode_into([WHOLE["png"]], out, boxes=np.array([[1, 2, 33, 44]]))
        np.testing.assert_array_equal(out[0], pillow_crop(WHOLE["png"], (1, 2, 33, 44), (11, 13), mode="L"))

    def test_slots_of_a_larger_batch(self):
        batch = slots(6)
        decode_into([WHOLE["baseline"]] * 2, batch[2:4])
        assert (batch[[0, 1, 4, 5]] == 99).all()
        decode_into([WHOLE["baseline"]] * 2, batch[::3])
        np.testing.assert_array_equal(batch[3], batch[2])

    def test_empty_chunk(self):
        assert decode_into([], slots(0)) == []

    @pytest.mark.parametrize(
        ("out", "options"),
        [
            (slots(2), {}),
            (slots(1, channels=1), {}),
            (slots(1).astype(np.float32), {}),
            (slots(1)[0], {}),
            (slots(1, width=80)[:, :, ::2], {}),
            (slots(1), {"boxes": np.zeros((1, 4), bool)}),
            (slots(1), {"boxes": np.zeros((2, 4), int)}),
            (slots(1), {"flips": np.zeros(1, int)}),
            (slots(1), {"flips": np.zeros(2, bool)}),
            (slots(1), {"orientations": np.zeros(2, int)}),
        ],
    )
    def test_arguments_that_do_not_fit(self, out, options):
        with pytest.raises(ValueError, match=r"out|boxes|flips|orientations"):
            decode_into([WHOLE["baseline"]], out, **options)

    def test_read_only_batch(self):
        out = slots(1)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="writable"):
            decode_into([WHOLE["baseline"]], out)


class TestTruncated:
    @pytest.mark.parametrize("name", ["baseline", "progressive", "gray", "cmyk", "restart markers", "rgb components"])
    def test_every_cut_fails(self, name):
        """No cut that loses picture data gives a picture; the last two bytes are the end marker."""
        data = WHOLE[name]
        for length in range(len(data) - 6):
            with pytest.raises(DecodeError):
                decode(data[:length])

    @pytest.mark.parametrize("name", ["baseline", "gray", "cmyk", "restart markers"])
    @pytest.mark.parametrize("tail", [b"", b"\xff"])
    def test_missing_end_marker_alone_is_no_loss(self, name, tail):
        data = WHOLE[name][:-2]
        np.testing.assert_array_equal(decode(data + tail), decode(WHOLE[name]))

    def test_progressive_without_end_marker_fails(self):
        """Whether a pass is missing cannot be known."""
        with pytest.raises(DecodeError, match="truncated"):
            decode(WHOLE["progressive"][:-2])

    @pytest.mark.parametrize("lost", [5, 20, 40, 60])
    @pytest.mark.parametrize(
        "data",
        [
            WHOLE["baseline"],
            WHOLE["rare subsampling"],
            make.saved(make.picture(channels=1)[..., 0], "JPEG", quality=10, optimize=True),  # zeros are codes
        ],
        ids=["baseline", "through Pillow", "optimised"],
    )
    def test_cut_and_filled_with_zeros_fails(self, data, lost):
        """As a file is that was allocated at its full size, and not written to its end."""
        for filled in (16, 512, 4096):
            with pytest.raises(DecodeError):
                decode(data[:-lost] + bytes(filled))

    def test_cut_and_closed_by_an_end_marker_fails(self):
        with pytest.raises(DecodeError, match="damaged JPEG"):
            decode(WHOLE["baseline"][:-200] + EOI)

    @pytest.mark.parametrize("name", ["png", "webp", "gif", "bmp", "tiff"])
    @pytest.mark.parametrize("partial", [False, True])
    def test_other_formats_fail_always(self, name, partial):
        data = WHOLE[name]
        with pytest.raises(DecodeError):
            decode(data[: len(data) * 2 // 3], partial=partial)

    @pytest.mark.parametrize("name", ["baseline", "progressive", "gray", "cmyk"])
    def test_partial(self, name):
        whole = decode(WHOLE[name])
        part = decode(WHOLE[name][:-150], partial=True)
        assert part.shape == whole.shape
        assert (part != whole).any()
        if name != "progressive":
            np.testing.assert_array_equal(part[:8], whole[:8])

    def test_partial_through_pillow(self):
        data = make.rare_subsampling_jpeg()
        with pytest.raises(DecodeError, match="truncated"):
            decode(data[:-4])
        assert decode(data[:-4], partial=True).shape == (16, 16, 3)

    def test_partial_needs_a_whole_header(self):
        data = WHOLE["baseline"]
        with pytest.raises(DecodeError):
            decode(data[: make.frame_at(data) + 19], partial=True)

    def test_partial_leaves_no_setting_behind(self):
        decode(make.rare_subsampling_jpeg()[:-4], partial=True)
        assert ImageFile.LOAD_TRUNCATED_IMAGES is False


class TestGivenUp:
    """A progressive file that libjpeg gives up on before any pixel is written, though not in the first pass."""

    def data(self) -> bytes:
        data = bytearray(WHOLE["progressive"])
        second = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
        table = data.rindex(b"\xff\xc4", 0, second)
        data[table] = 0  # no marker any more: the pass lacks its Huffman table
        return bytes(data)

    @pytest.mark.parametrize("partial", [False, True])
    def test_memorys_content_is_no_picture(self, partial):
        with pytest.raises(DecodeError):
            decode(self.data(), partial=partial)


class TestHarmless:
    @pytest.mark.parametrize("tail", [b"\0" * 5000, b"trailing", b"\xff\xd8\xff\xe0 another"])
    def test_bytes_behind_the_end(self, tail):
        np.testing.assert_array_equal(decode(WHOLE["baseline"] + tail), decode(WHOLE["baseline"]))

    @pytest.mark.parametrize("name", ["baseline", "progressive", "cmyk"])
    def test_junk_between_segments(self, name):
        data = WHOLE[name]
        place = make.frame_at(data)
        np.testing.assert_array_equal(decode(data[:place] + b"junk" + data[place:]), decode(data))

    def test_junk_does_not_hide_a_cut(self):
        data = WHOLE["baseline"]
        place = make.frame_at(data)
        with pytest.raises(DecodeError, match="truncated"):
            decode(data[:place] + b"junk" + data[place:-100])

    def test_unknown_adobe_transform(self):
        data = make.adobe(make.jpeg(), 77)
        np.testing.assert_array_equal(decode(data), pillow_pixels(data))

    def test_bad_profile(self):
        data = make.with_segment(make.jpeg(), 0xE2, b"ICC_PROFILE\0\x09\x02broken")
        np.testing.assert_array_equal(decode(data), decode(make.jpeg()))

    def test_bad_exif(self):
        data = make.with_segment(make.jpeg(), 0xE1, b"Exif\0\0MM\0*\xff\xff\xff\xff")
        np.testing.assert_array_equal(decode(data, orientation="apply"), decode(make.jpeg()))

    def test_bad_exif_in_pillows_hands_warns_nobody(self):
        data = make.with_segment(make.rare_subsampling_jpeg(), 0xE1, b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0")
        np.testing.assert_array_equal(decode(data), decode(make.rare_subsampling_jpeg()))

    @pytest.mark.parametrize("number", range(4))
    def test_lost_restart_marker_is_damage(self, number):
        data = WHOLE["restart markers"]
        place = data.index(b"\xff" + bytes([0xD0 + number]))
        with pytest.raises(DecodeError, match="damaged JPEG"):
            decode(data[:place] + data[place + 2 :])


class TestRefused:
    @pytest.mark.parametrize("data", [make.png("I;16"), make.tiff("I;16"), make.tiff("F")])
    def test_more_than_eight_bits(self, data):
        with pytest.raises(DecodeError, match="more than 8 bits"):
            decode(data)

    def test_twelve_bit_jpeg(self):
        with pytest.raises(DecodeError, match="12 bits per sample"):
            decode(make.reframed(make.jpeg(), 0xC1, 12))

    def test_lossless_jpeg(self):
        with pytest.raises(DecodeError, match="JPEG"):
            decode(make.reframed(make.jpeg(), 0xC3))

    @pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "EPS", "SGI", "PCX"])
    def test_formats_off_the_list(self, kind):
        with pytest.raises(DecodeError, match="not an image"):
            decode(make.saved(make.picture(), kind))

    def test_zero_bytes(self):
        with pytest.raises(DecodeError, match="zero bytes"):
            decode(b"")


class TestHostile:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: make.resized_header(make.jpeg(), 65_500, 65_500),
            lambda: make.resized_header(make.jpeg(), 13_000, 13_000),
            lambda: make.resized_header(make.progressive_jpeg(), 65_500, 2_700),
            lambda: make.resized_header(make.cmyk_jpeg(0), 13_000, 13_000),
            lambda: make.png_header(13_000, 13_000) + make.png()[33:],
            make.png_bomb,
            make.text_bomb_png,
            make.many_scans_jpeg,
        ],
    )
    def test_bombs_fail_fast_in_little_memory(self, make):
        data = make()
        out = slots(1, 32, 32)
        tracemalloc.start()
        start = time.perf_counter()
        try:
            failures = decode_into([data, data], slots(2, 32, 32), boxes=np.array([[0, 0, 32, 32]] * 2))
            failures += decode_into([data], out)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(failures) == 3
        assert not out.any()
        assert time.perf_counter() - start < 6
        assert peak < 200 << 20

    def test_flat_pictures_are_no_bombs(self):
        """A JPEG of one colour is the most compact there is."""
        flat = make.saved(np.full((2000, 3000, 3), 90, np.uint8), "JPEG", optimize=True, quality=1)
        assert (decode(flat) == pillow_pixels(flat)).all()
        flat = make.saved(np.full((2000, 3000, 3), 90, np.uint8), "JPEG", progressive=True, quality=1)
        assert (decode(flat) == pillow_pixels(flat)).all()

    def test_thousands_of_frames(self):
        gif = make.gif()
        frame = gif[gif.index(b"\x2c", 13 + 768) : -1]
        data = gif[:-1] + frame * 2_000 + b";"
        np.testing.assert_array_equal(decode(data), decode(gif))

    @pytest.mark.parametrize("tail", [b"", bytes(6000)])  # short files are looked at in another way
    @pytest.mark.parametrize("sampling", [*range(0x11, 0x15), 0x22, 0x41, 0x44])
    def test_subsamplings_without_a_name(self, sampling, tail):
        data = bytearray(WHOLE["baseline"])
        data[make.frame_at(bytes(data)) + 11] = sampling
        with contextlib.suppress(DecodeError):
            assert decode(bytes(data) + tail).shape == (HEIGHT, WIDTH, 3)

    @pytest.mark.parametrize("name", ["baseline", "progressive", "gray", "rgb components", "cmyk", "422", "mpo"])
    def test_the_header_says_what_libjpeg_says(self, name, monkeypatch):
        size = libjpeg.usual_size(WHOLE[name])
        assert size == (None if name.startswith(("cmyk", "ycck")) else libjpeg.read_size(WHOLE[name])[:2])
        monkeypatch.setattr(libjpeg, "_SHORT", 0)
        assert libjpeg.usual_size(WHOLE[name]) == size

    @pytest.mark.parametrize("name", JPEGS)
    def test_a_glance_agrees_with_a_look(self, name):
        header = read_jpeg(WHOLE[name])
        plain = header.one_scan and header.components != 4 and header.frame in (0xC0, 0xC1) and not header.junk
        assert is_plain(WHOLE[name]) == plain
        assert not is_plain(memoryview(WHOLE[name])[: make.frame_at(WHOLE[name])])

    def test_a_second_scan_where_one_is_announced_is_no_way_round_the_limit(self, monkeypatch):
        data = WHOLE["baseline"]
        scan = data[data.index(b"\xff\xda") : -2]
        monkeypatch.setattr(libjpeg, "_SHORT", 0)
        with pytest.raises(DecodeError, match="more than 500 scans"):
            decode(data[:-2] + scan * 2_000 + data[-2:])

    def test_scans_up_to_the_limit(self):
        assert libjpeg.few_scans(make.many_scans_jpeg(480))
        assert not libjpeg.few_scans(make.many_scans_jpeg(501))
        with pytest.raises(DecodeError, match="more than 500 scans"):
            decode(make.many_scans_jpeg(501))

    def test_limit_is_an_option(self):
        for name in ("baseline", "cmyk", "png"):
            with pytest.raises(DecodeError, match="raise max_pixels"):
                decode(WHOLE[name], max_pixels=WIDTH * HEIGHT - 1)
            assert decode(WHOLE[name], max_pixels=WIDTH * HEIGHT).size

    def test_limit_holds_for_slots(self):
        failures = Decoder(max_pixels=100).decode_into([WHOLE["baseline"]], slots(1))
        assert "max_pixels = 100" in failures[0][1]

    def test_pillows_own_warning_is_not_in_play(self, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        assert decode(WHOLE["png"]).shape == (HEIGHT, WIDTH, 3)

    @settings(max_examples=400, deadline=None)
    @given(st.sampled_from(sorted(WHOLE)), st.data())
    def test_mutated_files_decode_or_fail(self, name, data):
        content = bytearray(WHOLE[name])
        for _ in range(data.draw(st.integers(1, 6))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(DecodeError):
            pixels = decode(content, max_pixels=1 << 20)
            assert pixels.dtype == np.uint8
            assert pixels.shape[2] == 3


MEMORY = make.jpeg(700, 900)  # whose pixels make a thread's memory larger than any other's here need


def outcome(decoder: Decoder, data: bytes, before: bytes | None) -> tuple[list[tuple[int, str]], bytes, bytes]:
    """What a new thread makes of an image in three ways, once it has decoded another one: errors and pixels."""
    found = []

    def work() -> None:
        box = np.array([[3, 2, 23, 18]])
        if before is not None:
            decoder.decode_into([before], slots(1, 8, 8, channels), boxes=box)
        cropped, straight = slots(1, 16, 20, channels), slots(1, channels=channels)
        failures = decoder.decode_into([data], cropped, boxes=box) + decoder.decode_into([data], straight)
        with contextlib.suppress(DecodeError):
            found.append(decoder.decode(data, box=box[0], size=(9, 9)).tobytes())
        found.extend((failures, cropped.tobytes(), straight.tobytes()))

    channels = 3 if decoder.mode == "RGB" else 1
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return tuple(found)


class TestMemoryThatLiesReady:
    """A thread decodes at once what fits into the memory that its last image left: nothing else may come of it."""

    @pytest.mark.parametrize("mode", ["RGB", "L"])
    @pytest.mark.parametrize("name", sorted(WHOLE))
    def test_whole_files(self, name, mode):
        for decoder in (Decoder(mode), Decoder(mode, "apply", partial=True, fast=True)):
            assert outcome(decoder, WHOLE[name], MEMORY) == outcome(decoder, WHOLE[name], None)

    @pytest.mark.parametrize("name", JPEGS)
    @pytest.mark.parametrize("partial", [False, True])
    def test_cut_files(self, name, partial):
        decoder = Decoder(partial=partial)
        for length in range(0, len(WHOLE[name]), 97):
            data = WHOLE[name][:length]
            assert outcome(decoder, data, MEMORY) == outcome(decoder, data, None), length

    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from(JPEGS), st.data())
    def test_mutated_files(self, name, data):
        content = bytearray(WHOLE[name])
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, min(len(content) - 1, 700)))] = data.draw(st.integers(0, 255))
        decoder = Decoder(max_pixels=1 << 20)
        assert outcome(decoder, bytes(content), MEMORY) == outcome(decoder, bytes(content), None)

    @pytest.mark.parametrize(
        "data",
        [
            make.resized_header(make.jpeg(), 600, 500),
            make.many_scans_jpeg(501),
            b"\xff\xd8" + b"\xff\xe5\0\2" * 9_990 + make.jpeg()[2:],
            b"\xff\xd8" + b"\xff\xe5\0\2" * 10_000 + make.jpeg()[2:],
        ],
    )
    def test_hostile_files(self, data):
        assert outcome(Decoder(), data, MEMORY) == outcome(Decoder(), data, None)

    @pytest.mark.parametrize("most", [HEIGHT * WIDTH - 1, HEIGHT * WIDTH])
    def test_the_limit_holds_there_too(self, most):
        with_memory = outcome(Decoder(max_pixels=most), WHOLE["baseline"], MEMORY)
        assert with_memory == outcome(Decoder(max_pixels=most), WHOLE["baseline"], None)

    def test_the_header_is_not_looked_at_twice(self, monkeypatch):
        records = [make.jpeg(seed=seed) for seed in range(3)]
        boxes = np.array([[0, 0, 20, 20]] * 3)
        decode_into(records, slots(3, 16, 16), boxes=boxes)
        monkeypatch.setattr(libjpeg, "usual_size", None)
        assert not decode_into(records, slots(3, 16, 16), boxes=boxes)
        assert not decode_into(records, slots(3))


class TestDecoder:
    def test_pickles(self):
        decoder = Decoder(mode="L", orientation="apply", partial=True, fast=True, max_pixels=5)
        assert pickle.loads(pickle.dumps(decoder)) == decoder

    @pytest.mark.parametrize("options", [{"mode": "BGR"}, {"orientation": "rotate"}, {"max_pixels": 0}])
    def test_unknown_options(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            Decoder(**options)

    def test_resize_is_injected(self):
        calls = []

        def record(crop, out, flip):
            assert all(stride > 0 for stride in crop.strides)
            calls.append((crop.shape, out.shape, flip, crop is out))
            pillow.resize(crop, out, flip)

        decoder = Decoder(resize=record, orientation="apply")
        out = slots(1, 10, 10)
        decoder.decode_into([make.oriented_jpeg(7)], out, boxes=np.array([[0, 0, 30, 20]]), flips=np.array([True]))
        Decoder(resize=record).decode_into([make.jpeg()] * 2, slots(2), flips=np.array([True, False]))
        assert calls == [((20, 30, 3), (10, 10, 3), True, False), ((HEIGHT, WIDTH, 3),) * 2 + (True, True)]

    def test_odd_addresses(self):
        """libjpeg-turbo writes rows that begin at a multiple of 32 bytes past the cache, which costs a tenth."""
        crops = []

        def record(crop, out, flip):
            crops.append(crop.ctypes.data)

        wide = make.jpeg(64, 96)
        Decoder(resize=record).decode_into([wide], slots(1, 16, 16), boxes=np.array([[0, 0, 96, 64]]))
        Decoder(resize=record).decode(wide, size=(16, 16))
        assert [address % 2 for address in (*crops, decode(wide).ctypes.data)] == [1, 1, 1]

    def test_a_result_is_the_callers_own(self):
        """Not the scratch memory that the next picture goes to."""
        for options in ({}, {"box": (0, 0, 20, 20)}, {"box": (0, 0, 20, 20), "size": (20, 20)}, {"size": (40, 60)}):
            first = decode(make.jpeg(40, 60, seed=1), **options)
            kept = first.copy()
            decode(make.jpeg(40, 60, seed=2), **options)
            np.testing.assert_array_equal(first, kept)

    def test_many_threads(self):
        """Each has its own scratch memory: sizes differ, so that shared memory would mix pictures."""
        records = [make.jpeg(30 + 7 * step, 90 - 5 * step, seed=step) for step in range(12)]
        boxes = np.array([[1, 2, 28, 29]] * len(records))
        expected = slots(len(records), 16, 16)
        decode_into(records, expected, boxes=boxes)
        wrong = []

        def work(first: int) -> None:
            order = np.roll(np.arange(len(records)), first)
            for _ in range(20):
                out = slots(len(records), 16, 16)
                failures = decode_into([records[i] for i in order], out, boxes=boxes)
                if failures or (out != expected[order]).any():
                    wrong.append(first)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


REFUSED = {
    "16_bit_binary.pgm": "netpbm",
    "hopper_16bit.pgm": "netpbm",
    "16_bit_binary_pgm.tiff": "more than 8 bits",
    "16_bit_noise.tif": "more than 8 bits",
    "16bit.cropped.tif": "more than 8 bits",
    "i_trns.png": "more than 8 bits",
    "LICENSE": "not an image",
    "broken.png": "IHDR",
    "decompression_bomb.gif": "max_pixels",
    "decompression_bomb.ico": "icon",
    "hopper16.rgb": "not an image",
    "transparent.sgi": "not an image",
    "rgba.psd": "Photoshop",
    "hopper_bad_exif.jpg": "damaged JPEG",  # Pillow shows noise: its stored Huffman tables are not those of its data
    "truncated_jpeg.jpg": "truncated JPEG",
    "ultrahdr.jpg": "truncated JPEG",
}


class TestRealImages:
    def test_odd(self):
        """Pillow's pixels, or the stated reason."""
        paths = sorted((make.real_images() / "odd").iterdir())
        for path in paths:
            data = path.read_bytes()
            if path.name in REFUSED:
                with pytest.raises(DecodeError, match=REFUSED[path.name]):
                    decode(data)
            else:
                np.testing.assert_array_equal(decode(data), pillow_pixels(data), err_msg=path.name)
        assert len(paths) > 80

    def test_orientation(self):
        for path in sorted((make.real_images() / "exif-orientation").glob("*.jpg")):
            upright = decode(path.read_bytes(), orientation="apply")
            np.testing.assert_array_equal(upright, pillow_pixels(path.read_bytes(), upright=True), err_msg=path.name)

    def test_photos(self):
        paths = sorted((make.real_images() / "clothing" / "validation").rglob("*.jpg"))[::40]
        for path in paths:
            data = path.read_bytes()
            np.testing.assert_array_equal(decode(data), pillow_pixels(data), err_msg=path.name)
            box = (10, 20, 210, 310)
            cropped = decode(data, box=box, size=(224, 224))
            np.testing.assert_array_equal(cropped, pillow_crop(data, box, (224, 224)), err_msg=path.name)
