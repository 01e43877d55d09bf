"""What the tests are made of: images of every kind, records of foreign formats, and traps for who would run them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from PIL import Image, ImageOps

from packfmt.sources.tfrecord.framing import masked_crc32c

HEIGHT, WIDTH = 48, 40
EOI = b"\xff\xd9"


def picture(height: int = HEIGHT, width: int = WIDTH, channels: int = 3, seed: int = 0) -> np.ndarray:
    """A smooth coloured picture without symmetry, (H, W, C) uint8."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 5, channels), dtype=np.uint8)
    planes = [
        np.asarray(Image.fromarray(coarse[..., channel]).resize((width, height), Image.Resampling.BICUBIC))
        for channel in range(channels)
    ]
    return np.stack(planes, axis=2)


def saved(image: Image.Image | np.ndarray, format: str, **options: Any) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    target = io.BytesIO()
    image.save(target, format, **options)
    return target.getvalue()


def pillow_pixels(data: bytes, mode: str = "RGB", upright: bool = False) -> np.ndarray:
    """(H, W, C) uint8 as Pillow decodes and converts the first frame."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of dropped transparency
        with Image.open(io.BytesIO(data)) as image:
            shown = ImageOps.exif_transpose(image) if upright else image
            pixels = np.asarray(shown.convert(mode))
    return pixels.reshape(*pixels.shape[:2], -1)


# JPEG


def jpeg(height: int = HEIGHT, width: int = WIDTH, seed: int = 0, **options: Any) -> bytes:
    return saved(picture(height, width, seed=seed), "JPEG", **{"quality": 90, **options})


def progressive_jpeg(height: int = HEIGHT, width: int = WIDTH) -> bytes:
    return jpeg(height, width, progressive=True)


def gray_jpeg() -> bytes:
    return saved(picture(channels=1)[..., 0], "JPEG")


def with_segment(data: bytes, marker: int, payload: bytes) -> bytes:
    """Put a segment right behind the start marker."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload + data[2:]


def exif(orientation: int, order: str = ">", kind: int = 3) -> bytes:
    """An EXIF block of one tag, without the "Exif" prefix."""
    mark = b"MM\0*" if order == ">" else b"II*\0"
    value = struct.pack(order + "HH", orientation, 0) if kind in (3, 8) else struct.pack(order + "I", orientation)
    return mark + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, 1) + value + bytes(4)


def oriented_jpeg(orientation: int, order: str = ">") -> bytes:
    return with_segment(jpeg(), 0xE1, b"Exif\0\0" + exif(orientation, order))


def adobe(data: bytes, transform: int) -> bytes:
    return with_segment(data, 0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


def cmyk_jpeg(transform: int | None) -> bytes:
    """Four components: plain CMYK (0), YCCK (2), or without the marker that says so (None)."""
    data = saved(Image.frombytes("CMYK", (WIDTH, HEIGHT), picture(channels=4).tobytes()), "JPEG")
    start = data.index(b"\xff\xee")
    bare = data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]
    return bare if transform is None else adobe(bare, transform)


def rgb_jpeg() -> bytes:
    """Components that are RGB themselves, as the Adobe marker says."""
    plain = saved(picture(), "JPEG", subsampling=0)
    start = plain.index(b"\xff\xe0")
    return adobe(plain[:start] + plain[start + 18 :], 0)


def frame_at(data: bytes) -> int:
    """Where the frame header (SOF0 or SOF2) begins."""
    return next(place for marker in (b"\xff\xc0", b"\xff\xc2") if (place := data.find(marker)) >= 0)


def resized_header(data: bytes, width: int, height: int) -> bytes:
    """The same JPEG whose frame claims another size."""
    place = frame_at(data) + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


def reframed(data: bytes, marker: int, precision: int = 8) -> bytes:
    """The same JPEG, said to be coded in another process or precision."""
    place = frame_at(data)
    return data[: place + 1] + bytes([marker]) + data[place + 2 : place + 4] + bytes([precision]) + data[place + 5 :]


def rare_subsampling_jpeg() -> bytes:
    """A flat 16x16 picture with two differently subsampled chroma planes, which libjpeg's simple interface refuses."""
    data = saved(np.full((16, 16, 3), 128, np.uint8), "JPEG", subsampling=2)
    place = frame_at(data) + 10
    frame = bytes([1, 0x22, 0, 2, 0x21, 1, 3, 0x11, 1])
    scan = data.index(b"\xff\xda") + 14
    # One brightness step, then empty blocks: 4 of Y, 2 of Cb, 1 of Cr, in the standard Huffman codes.
    bits = "01011010" + "001010" * 3 + "0000" * 3 + "11"
    return data[:place] + frame + data[place + 9 : scan] + int(bits, 2).to_bytes(5, "big") + EOI


def many_scans_jpeg(scans: int = 10_000) -> bytes:
    """A progressive JPEG that repeats one pass again and again."""
    data = progressive_jpeg()
    last = data.rindex(b"\xff\xda")
    return data[:last] + (data[last:-2]) * scans + EOI


def mpo() -> bytes:
    return saved(picture(), "MPO", save_all=True, append_images=[Image.fromarray(picture(seed=1))])


# Other formats


def png(mode: str = "RGB", **options: Any) -> bytes:
    """In one of Pillow's modes 1, L, LA, P, RGB, RGBA and I;16."""
    if mode == "I;16":
        return saved(picture(channels=1)[..., 0].astype(np.uint16) * 200, "PNG", **options)
    return saved(_in_mode(mode), "PNG", **options)


def palette_png_with_transparency() -> bytes:
    return saved(_in_mode("P"), "PNG", transparency=bytes(range(0, 256, 8)))


def png_chunk(name: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    """Signature and IHDR alone."""
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def png_bomb() -> bytes:
    """A header of 3.6 gigapixels over a few bytes of data."""
    return png_header(60_000, 60_000) + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b"")


def text_bomb_png() -> bytes:
    """A small picture with 200 MB of zeros in a compressed comment."""
    packer = zlib.compressobj()
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    data = png()
    return data[:33] + png_chunk(b"zTXt", b"Comment\0\0" + packed) + data[33:]


def webp(lossless: bool = False, alpha: bool = False, **options: Any) -> bytes:
    return saved(_in_mode("RGBA" if alpha else "RGB"), "WEBP", lossless=lossless, **options)


def animated(format: str) -> bytes:
    """Two frames of GIF, WEBP, PNG or TIFF."""
    return saved(picture(), format, save_all=True, append_images=[Image.fromarray(picture(seed=1))])


def gif() -> bytes:
    return saved(_in_mode("P"), "GIF")


def bmp(mode: str = "RGB") -> bytes:
    return saved(_in_mode(mode), "BMP")


def tiff(mode: str = "RGB", **options: Any) -> bytes:
    if mode == "I;16":
        return saved(picture(channels=1)[..., 0].astype(np.uint16) * 200, "TIFF")
    if mode == "F":
        return saved(picture(channels=1)[..., 0].astype(np.float32), "TIFF")
    return saved(_in_mode(mode), "TIFF", **options)


def _in_mode(mode: str) -> Image.Image:
    if mode in ("RGBA", "LA"):
        pixels = picture(channels=4 if mode == "RGBA" else 2)
        return Image.frombytes(mode, (WIDTH, HEIGHT), pixels.tobytes())
    return Image.fromarray(picture()).convert(mode)


WHOLE = {
    "baseline": jpeg(),
    "progressive": progressive_jpeg(),
    "gray": gray_jpeg(),
    "rgb components": rgb_jpeg(),
    "adobe transform 1": adobe(jpeg(), 1),
    "cmyk": cmyk_jpeg(0),
    "ycck": cmyk_jpeg(2),
    "cmyk without marker": cmyk_jpeg(None),
    "restart markers": jpeg(restart_marker_blocks=2),
    "422": jpeg(subsampling=1),
    "rare subsampling": rare_subsampling_jpeg(),
    "1x1": jpeg(1, 1),
    "odd size": jpeg(31, 17),
    "mpo": mpo(),
    "png": png(),
    "png gray": png("L"),
    "png gray alpha": png("LA"),
    "png rgba": png("RGBA"),
    "png palette": png("P"),
    "png palette tRNS": palette_png_with_transparency(),
    "png gray tRNS": png("L", transparency=7),
    "png bits": png("1"),
    "apng": animated("PNG"),
    "webp": webp(),
    "webp lossless": webp(lossless=True),
    "webp alpha": webp(alpha=True),
    "webp lossless alpha": webp(lossless=True, alpha=True),
    "webp animated": animated("WEBP"),
    "gif": gif(),
    "gif animated": animated("GIF"),
    "bmp": bmp(),
    "bmp palette": bmp("P"),
    "bmp rgba": bmp("RGBA"),
    "tiff": tiff(),
    "tiff gray": tiff("L"),
    "tiff lzw": tiff(compression="tiff_lzw"),
    "tiff two pages": animated("TIFF"),
}


def real_images() -> Path:
    """The folder of real images; the calling test is skipped where there is none."""
    folder = os.environ.get("PACKFMT_TEST_DATA")
    if not folder:
        pytest.skip("PACKFMT_TEST_DATA is not set: no real images")
    return Path(folder)


def jpg(value: int = 0, size: tuple[int, int] = (8, 6)) -> bytes:
    """A JPEG of (width, height) ``size`` in one colour."""
    stream = io.BytesIO()
    Image.new("RGB", size, (value % 256, 90, 30)).save(stream, "JPEG")
    return stream.getvalue()


def dot(value: int = 0) -> bytes:
    """A PNG of 5 x 4 pixels in one colour."""
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value % 256, 1, 2)).save(stream, "PNG")
    return stream.getvalue()


class Trap:
    """Pickles to a call that creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.canary,))


def trapped_pickle(canary: Path) -> bytes:
    return pickle.dumps(Trap(canary))


def frame(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def chunk(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features: object) -> bytes:
    """A tf.train.Example; "__" in a name stands for "/"."""
    entries = b""
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(item, int) for item in values):
            feature = chunk(3, chunk(1, b"".join(map(varint, values))))
        elif all(isinstance(item, float) for item in values):
            feature = chunk(2, chunk(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = chunk(1, b"".join(chunk(1, item) for item in values))
        entries += chunk(1, chunk(1, name.replace("__", "/").encode()) + chunk(2, feature))
    return chunk(1, entries)


def pixels(number: int, height: int = 8, width: int = 8, channels: int = 3) -> np.ndarray:
    """Random pixels (H, W, C), uint8, differing with the number."""
    return np.random.default_rng(number).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(number: int, kind: str = "JPEG", **size: int) -> bytes:
    """An encoded image."""
    out = io.BytesIO()
    array = pixels(number, **size)
    Image.fromarray(array if array.shape[2] > 1 else array[..., 0]).save(out, kind)
    return out.getvalue()


def decoded(data: bytes | memoryview) -> np.ndarray:
    """The pixels of an encoded image, by Pillow."""
    return np.asarray(Image.open(io.BytesIO(bytes(data))))


def write_lmdb(path: Path, entries: Iterable[tuple[bytes, bytes]], **options: object) -> Path:
    """A database with these entries, put in this order."""
    with lmdb.open(str(path), **{"map_size": 1 << 26, **options}) as environment, environment.begin(write=True) as put:
        for key, value in entries:
            put.put(key, value)
    return path


class Bomb:
    """An object whose unpickling makes the canary file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.canary), "w"))
