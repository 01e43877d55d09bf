"""What the header says: formats by content, sizes, EXIF orientation, flags, and what is refused."""

from __future__ import annotations

import contextlib
import io
import warnings

import make
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from make import HEIGHT, WIDTH
from PIL import Image

from packfmt.errors import DecodeError
from packfmt.images import sniff as module
from packfmt.images.sniff import (
    ALPHA,
    ANIMATED,
    CMYK,
    DEEP,
    EXTRA,
    FORMATS,
    MAX_PIXELS,
    NO_END,
    PROGRESSIVE,
    UNUSUAL,
    ImageInfo,
    magic,
    sniff,
)
from packfmt.record import IMAGE_COLUMNS

JPEG, PNG, WEBP, GIF, BMP, TIFF = range(1, 7)

HEADERS = {
    "baseline": (3, JPEG, 0),
    "progressive": (3, JPEG, PROGRESSIVE),
    "gray": (1, JPEG, 0),
    "cmyk": (4, JPEG, CMYK),
    "ycck": (4, JPEG, CMYK),
    "mpo": (3, JPEG, 0),
    "png": (3, PNG, 0),
    "png gray": (1, PNG, 0),
    "png gray alpha": (2, PNG, ALPHA),
    "png rgba": (4, PNG, ALPHA),
    "png palette": (3, PNG, 0),
    "png palette tRNS": (3, PNG, ALPHA),
    "apng": (3, PNG, ANIMATED),
    "webp": (3, WEBP, 0),
    "webp lossless": (3, WEBP, 0),
    "webp alpha": (4, WEBP, ALPHA),
    "webp lossless alpha": (4, WEBP, ALPHA),
    "webp animated": (3, WEBP, ANIMATED),
    "gif": (3, GIF, 0),
    "gif animated": (3, GIF, ANIMATED),
    "bmp": (3, BMP, 0),
    "tiff": (3, TIFF, 0),
    "tiff gray": (1, TIFF, 0),
    "tiff two pages": (3, TIFF, ANIMATED),
}


@pytest.mark.parametrize("name", HEADERS)
def test_header(name):
    channels, code, flags = HEADERS[name]
    assert sniff(make.WHOLE[name]) == ImageInfo(WIDTH, HEIGHT, channels, code, 0, flags)


@pytest.mark.parametrize("name", make.WHOLE)
def test_size_is_pillows(name):
    found = sniff(make.WHOLE[name])
    with Image.open(io.BytesIO(make.WHOLE[name])) as image:
        assert (found.width, found.height) == image.size


@pytest.mark.parametrize("name", make.WHOLE)
def test_magic_agrees_with_pillow(name):
    with Image.open(io.BytesIO(make.WHOLE[name])) as image:
        expected = {"MPO": "jpeg"}.get(image.format, image.format.lower())
    assert FORMATS[magic(make.WHOLE[name])] == expected


def test_codes_never_change():
    assert FORMATS == ("unknown", "jpeg", "png", "webp", "gif", "bmp", "tiff")
    assert [1 << bit for bit in range(8)] == [PROGRESSIVE, CMYK, NO_END, DEEP, ANIMATED, ALPHA, EXTRA, UNUSUAL]


def test_fields_fill_the_image_columns():
    found = sniff(make.WHOLE["cmyk"])
    for column in IMAGE_COLUMNS:
        value = getattr(found, column.name)
        assert np.array(value, column.dtype) == value


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer(wrap):
    for data in make.WHOLE.values():
        assert sniff(wrap(data)) == sniff(data)


@pytest.mark.parametrize("wrap", [bytes, memoryview])
def test_a_jpeg_with_a_long_comment(wrap):
    """A header is taken from the first 4 KiB where it ends there, and from the whole file where it does not."""
    data = make.jpeg()
    for length in (*range(3400, 4096), 60_000):
        commented = data[:2] + b"\xff\xfe" + (length + 2).to_bytes(2, "big") + bytes(length) + data[2:]
        assert sniff(wrap(commented)) == sniff(data), length


def test_png_named_jpg_is_a_png(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(make.png())
    assert FORMATS[sniff(path.read_bytes()).format] == "png"


class TestOrientation:
    @pytest.mark.parametrize("order", [">", "<"])
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_jpeg(self, orientation, order):
        assert sniff(make.oriented_jpeg(orientation, order)).orientation == orientation

    @pytest.mark.parametrize("orientation", [0, 9, 255, 65535])
    def test_impossible_values_are_no_tag(self, orientation):
        assert sniff(make.oriented_jpeg(orientation)).orientation == 0

    @pytest.mark.parametrize("kind", [3, 4, 8, 9])
    def test_whole_number_types(self, kind):
        data = make.with_segment(make.jpeg(), 0xE1, b"Exif\0\0" + make.exif(6, kind=kind))
        assert sniff(data).orientation == 6

    def test_other_types_are_no_tag(self):
        data = make.with_segment(make.jpeg(), 0xE1, b"Exif\0\0" + make.exif(6, kind=5))
        assert sniff(data).orientation == 0

    @pytest.mark.parametrize("cut", range(1, 26))
    def test_cut_exif_is_no_error(self, cut):
        data = make.with_segment(make.jpeg(), 0xE1, b"Exif\0\0" + make.exif(6)[:cut])
        assert sniff(data).orientation in (0, 6)

    def test_directory_outside_the_segment(self):
        block = make.exif(6)
        data = make.with_segment(make.jpeg(), 0xE1, b"Exif\0\0" + block[:4] + b"\xff\xff\xff\xf0" + block[8:])
        assert sniff(data).orientation == 0

    def test_is_not_read_beyond_the_segment(self):
        """The directory claims more entries than the segment holds, and what follows looks like the tag."""
        cut = b"Exif\0\0" + make.exif(6)[:10]
        segment = b"\xff\xe1" + (len(cut) + 2).to_bytes(2, "big") + cut
        data = make.jpeg()
        assert sniff(data[:2] + segment + make.exif(6)[10:22] + data[2:]).orientation == 0

    def test_first_exif_block_wins(self):
        assert sniff(make.with_segment(make.oriented_jpeg(3), 0xE1, b"Exif\0\0" + make.exif(6))).orientation == 6

    def test_png(self):
        data = make.png()
        chunk = make.png_chunk(b"eXIf", make.exif(6))
        assert sniff(data[:33] + chunk + data[33:]).orientation == 6

    def test_webp(self):
        assert sniff(make.webp(exif=b"Exif\0\0" + make.exif(8))).orientation == 8
        assert sniff(make.webp(exif=make.exif(5))).orientation == 5

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_tiff_counts_as_upright(self, orientation):
        """Its decoders turn the pixels themselves, so that the size is that of the turned picture."""
        found = sniff(make.tiff(tiffinfo={274: orientation}))
        size = (HEIGHT, WIDTH) if orientation >= 5 else (WIDTH, HEIGHT)
        assert (found.orientation, found.width, found.height) == (0, *size)

    def test_real_photos(self):
        for path in sorted((make.real_images() / "exif-orientation").glob("*.jpg")):
            assert sniff(path.read_bytes()).orientation == int(path.stem[-1])


class TestEnd:
    @pytest.mark.parametrize("name", ["baseline", "progressive", "cmyk", "png", "webp", "gif"])
    def test_cut_in_the_middle(self, name):
        data = make.WHOLE[name]
        assert sniff(data[: len(data) * 2 // 3]).flags & NO_END

    def test_marker_alone_missing(self):
        assert sniff(make.jpeg()[:-2]).flags == NO_END
        assert sniff(make.png()[:-12]).flags == NO_END

    @pytest.mark.parametrize("name", ["baseline", "png", "webp"])
    def test_bytes_behind_it(self, name):
        assert sniff(make.WHOLE[name] + b"trailing").flags == EXTRA

    def test_marker_within_exif_is_not_the_end(self):
        data = make.with_segment(make.jpeg(), 0xE1, b"Exif\0\0" + make.exif(1) + b"\xff\xd8thumbnail\xff\xd9")
        assert sniff(data[:-30]).flags == NO_END


class TestUnusual:
    def test_twelve_bits(self):
        assert sniff(make.reframed(make.jpeg(), 0xC1, 12)).flags == DEEP | UNUSUAL

    @pytest.mark.parametrize("frame", [0xC3, 0xC5, 0xC7, 0xC9, 0xCB])
    def test_lossless_hierarchical_arithmetic(self, frame):
        assert sniff(make.reframed(make.jpeg(), frame)).flags == UNUSUAL

    def test_progressive_arithmetic(self):
        assert sniff(make.reframed(make.jpeg(), 0xCA)).flags == UNUSUAL | PROGRESSIVE

    def test_sixteen_bits(self):
        assert sniff(make.png("I;16")).flags == DEEP
        assert sniff(make.tiff("I;16")).flags == DEEP


STRANGERS = {
    "zero bytes": b"",
    "HTML page": b"\xef\xbb\xbf\n <!DOCTYPE html><title>404</title>",
    "XML document": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
    "PDF": b"%PDF-1.7",
    "zip": b"PK\x03\x04",
    "Photoshop": b"8BPS\0\1",
    "AVIF": b"\0\0\0\x1cftypavif\0\0\0\0",
    "HEIC": b"\0\0\0\x1cftypheic\0\0\0\0",
    "netpbm": b"P6\n2 2\n255\n",
    "JPEG XL": b"\xff\x0a\x00",
    "icon": b"\0\0\1\0\1\0",
    "never written": bytes(4096),
    "text beginning with 'BMW, Audi": b"BMW, Audi, Opel, Volkswagen and others",
    "ab cd ef": b"\xab\xcd\xef\x01\x02",
}


@pytest.mark.parametrize("named", STRANGERS)
def test_no_image_is_named(named):
    with pytest.raises(DecodeError) as caught:
        sniff(STRANGERS[named])
    assert named in caught.value.message
    assert magic(STRANGERS[named]) == 0


class TestBrokenHeader:
    def test_jpeg_cut_before_its_frame(self):
        data = make.jpeg()
        for length in range(3, make.frame_at(data) + 10):
            with pytest.raises(DecodeError, match="no frame"):
                sniff(data[:length])

    def test_jpeg_with_two_frames(self):
        data = make.jpeg()
        place = make.frame_at(data)
        with pytest.raises(DecodeError, match="second frame"):
            sniff(data[:place] + data[place : place + 19] + data[place:])

    def test_jpeg_segment_length(self):
        data = make.jpeg()
        with pytest.raises(DecodeError, match="impossible length 1"):
            sniff(data[:4] + b"\0\1" + data[6:])

    def test_jpeg_components(self):
        data = make.jpeg()
        place = make.frame_at(data) + 9
        with pytest.raises(DecodeError, match="7 components"):
            sniff(data[:place] + b"\7" + data[place + 1 :])

    @pytest.mark.parametrize("size", [(0, 5), (5, 0)])
    def test_no_pixels(self, size):
        with pytest.raises(DecodeError, match="at least 1x1"):
            sniff(make.resized_header(make.jpeg(), *size))
        with pytest.raises(DecodeError, match="at least 1x1"):
            sniff(make.png_header(*size) + bytes(20))

    def test_png_without_its_header(self):
        with pytest.raises(DecodeError, match="IHDR"):
            sniff(make.png()[:32])

    @pytest.mark.parametrize("code", ["webp", "gif", "bmp", "tiff"])
    def test_cut(self, code):
        with pytest.raises(DecodeError, match=r"cut|directory"):
            sniff(make.WHOLE[code][: 18 if code == "bmp" else 12])

    def test_tiff_without_size(self):
        with pytest.raises(DecodeError, match="no width"):
            sniff(b"II*\0" + (8).to_bytes(4, "little") + bytes(20))


class TestLimit:
    @pytest.mark.parametrize("data", [make.resized_header(make.jpeg(), 65_500, 65_500), make.png_bomb()])
    def test_bombs(self, data):
        with pytest.raises(DecodeError, match="max_pixels = 178,956,970"):
            sniff(data)

    def test_default_is_pillows(self):
        assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS

    def test_limit_itself_is_allowed(self):
        assert sniff(make.jpeg(), max_pixels=WIDTH * HEIGHT).width == WIDTH
        with pytest.raises(DecodeError, match="raise max_pixels"):
            sniff(make.jpeg(), max_pixels=WIDTH * HEIGHT - 1)


class TestBoundedWork:
    """Headers made to keep a reader busy."""

    def test_many_tiny_segments(self):
        """The frame behind them is not even looked for."""
        with pytest.raises(DecodeError, match="no frame"):
            sniff(b"\xff\xd8" + b"\xff\xe5\0\2" * 10_000 + make.jpeg()[2:])

    def test_fill_bytes(self):
        with pytest.raises(DecodeError, match="no frame"):
            sniff(b"\xff\xd8" + b"\xff" * 4_000_000)

    def test_gif_of_empty_blocks(self):
        data = make.gif()
        assert sniff(data[:13] + b"\x21\xfe\0" * 1_000_000 + data[13:]).format == GIF

    def test_png_of_empty_chunks(self):
        data = make.png()
        assert sniff(data[:33] + make.png_chunk(b"abCd", b"") * 300_000 + data[33:]).width == WIDTH

    def test_tiff_directory_in_a_loop(self):
        data = bytearray(make.tiff())
        start = int.from_bytes(data[4:8], "little")
        end = start + 2 + 12 * int.from_bytes(data[start : start + 2], "little")
        data[end : end + 4] = data[4:8]
        assert sniff(bytes(data)).flags == ANIMATED


@pytest.mark.parametrize("name", ["baseline", "progressive", "png", "apng", "webp", "gif animated", "bmp", "tiff"])
def test_every_prefix_is_read_or_refused(name):
    data = make.WHOLE[name]
    whole = sniff(data)
    for length in range(len(data)):
        try:
            found = sniff(data[:length])
        except DecodeError:
            continue
        assert (found.width, found.height, found.format) == (whole.width, whole.height, whole.format)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(make.WHOLE)), st.data())
def test_mutated_files_are_read_or_refused(name, data):
    content = bytearray(make.WHOLE[name])
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, min(len(content), 700) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = sniff(content)
    except DecodeError:
        return
    assert 0 < found.width * found.height <= MAX_PIXELS
    assert 0 <= found.orientation <= 8
    assert 0 <= found.flags < 256


PREFIXES = (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF0000WEBPVP8X", b"GIF89a", b"II*\0", b"MM\0+", b"BM")


@given(st.binary(max_size=200))
@example(b"\0\0\0\0\x80" + bytes(7))
@example(b"\xff\xd8\xff")
@example(b"GIF89a")
def test_any_bytes_are_read_or_refused(data):
    for prefix in PREFIXES:
        with contextlib.suppress(DecodeError):
            sniff(prefix + data)


def test_real_headers_agree_with_pillow():
    folder = make.real_images()
    paths = [*(folder / "odd").iterdir(), *sorted((folder / "small-signs" / "images").rglob("*.JPG"))[::20]]
    compared = 0
    for path in paths:
        data = path.read_bytes()
        try:
            found = sniff(data)
        except DecodeError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of broken EXIF and MPO
            with Image.open(io.BytesIO(data)) as image:
                assert (found.width, found.height) == image.size, path.name
                if found.format == JPEG and "xmp" not in image.info:
                    assert found.orientation == image.getexif().get(0x0112, 0), path.name
        compared += 1
    assert compared > 150


def test_exports_are_there():
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("junk", [b"junk", b"\x00\xdb\xff\xff", b"\x01\xe2\x40\x00"])
def test_junk_between_segments_is_not_taken_for_a_segment(junk: bytes) -> None:
    data = make.WHOLE["baseline"]
    place = make.frame_at(data)
    assert sniff(data[:place] + junk + data[place:]) == sniff(data)
