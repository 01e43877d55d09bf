"""Small images and the traps that hostile inputs are tested with."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path

from PIL import Image

from packfmt.sources.tfrecord.framing import masked_crc32c


def jpeg(value: int = 0, size: tuple[int, int] = (8, 6)) -> bytes:
    """A JPEG of (width, height) ``size`` in one colour."""
    stream = io.BytesIO()
    Image.new("RGB", size, (value % 256, 90, 30)).save(stream, "JPEG")
    return stream.getvalue()


def png(value: int = 0) -> bytes:
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
