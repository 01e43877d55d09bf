"""CRC-32C: the vectors of RFC 3720, and agreement with the plain loop at every length where the rounds change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfmt.sources.tfrecord.crc32c import crc32c, masked_crc32c


def plain(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 if crc & 1 else crc >> 1
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_vectors(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize("length", [63, 64, 65, 767, 768, 769, 3071, 3073, 12_289, 49_153])
def test_agrees_with_the_plain_loop_where_rounds_change(length: int) -> None:
    data = bytes(value * 7 % 251 for value in range(length))
    assert crc32c(data) == plain(data)


def test_agrees_with_the_plain_loop_over_several_chunks() -> None:
    data = bytes(range(256)) * 1025 + b"tail"
    assert crc32c(data) == plain(data)


@given(st.binary(max_size=300))
def test_agrees_with_the_plain_loop(data: bytes) -> None:
    assert crc32c(data) == plain(data)


def test_mask_of_the_empty_message() -> None:
    assert masked_crc32c(b"") == 0xA282EAD8


def test_any_flipped_bit_changes_it() -> None:
    data = bytearray(range(100))
    whole = crc32c(data)
    for bit in range(800):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != whole
        data[bit // 8] ^= 1 << bit % 8
