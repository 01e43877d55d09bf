"""tools/read_pack.py hashes by itself; this compares its XXH3 with the xxhash package."""

import random
import runpy
from pathlib import Path

import pytest
import xxhash

ORACLE = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "read_pack.py"))
SEEDS = (0, 1, 2, 255, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF)

# Each class of lengths that the algorithm treats apart, with its borders; above 240, stripes of 64 and blocks of 1024.
BORDERS = [1024 * k + d for k in (1, 2, 3) for d in (-64, -1, 0, 1, 63, 64, 65)]
LENGTHS = [*range(270), 319, 320, 321, 511, 512, 513, *BORDERS]


def bytes_of(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@pytest.mark.parametrize("seed", SEEDS)
def test_64_bits(seed: int) -> None:
    wrong = [n for n in LENGTHS if ORACLE["xxh3_64"](bytes_of(n), seed) != xxhash.xxh3_64_intdigest(bytes_of(n), seed)]
    assert wrong == []


def test_128_bits() -> None:
    wrong = [n for n in LENGTHS if ORACLE["xxh3_128"](bytes_of(n)) != xxhash.xxh3_128_digest(bytes_of(n))]
    assert wrong == []


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80])
def test_constant_bytes(fill: int) -> None:
    for length in LENGTHS:
        data = bytes([fill]) * length
        assert ORACLE["xxh3_64"](data, fill) == xxhash.xxh3_64_intdigest(data, fill)
        assert ORACLE["xxh3_128"](data) == xxhash.xxh3_128_digest(data)
