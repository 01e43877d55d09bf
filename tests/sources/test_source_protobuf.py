"""The wire format: what is read, and that every damage is a WireError."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make import chunk, varint

from packfmt.sources.protobuf import BYTES, FIXED32, FIXED64, VARINT, WireError, fields, floats, integers, signed
from packfmt.sources.tfrecord.source import parse_example


def test_the_published_example() -> None:
    # protobuf.dev: message Test1 { int32 a = 1; } with a = 150, and Test2 with b = "testing"
    assert list(fields(b"\x08\x96\x01")) == [(1, VARINT, 150)]
    assert [(number, wire, bytes(value)) for number, wire, value in fields(b"\x12\x07testing")] == [
        (2, BYTES, b"testing")
    ]


def test_fixed_widths() -> None:
    found = [(number, wire, bytes(value)) for number, wire, value in fields(b"\x0d1234\x1112345678")]
    assert found == [(1, FIXED32, b"1234"), (2, FIXED64, b"12345678")]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_integers_round_trip(values: list[int]) -> None:
    assert integers(b"".join(map(varint, values))) == values


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_signed(value: int, expected: int) -> None:
    assert signed(value) == expected


@pytest.mark.parametrize(
    "message",
    [
        b"\x08",  # a field without its value
        b"\x08\x80",  # a number cut
        b"\x08" + b"\xff" * 9 + b"\x02",  # 65 bits
        b"\x08" + b"\x80" * 10 + b"\x01",  # eleven bytes
        b"\x0a\x05abcd",  # a length past the end
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # 2**63 bytes
        b"\x0d123",  # a fixed width cut
        b"\x0b",  # a group
        b"\x0f",  # wire type 7
        b"\x02\x00",  # field number 0
    ],
)
def test_damage(message: bytes) -> None:
    with pytest.raises(WireError):
        list(fields(message))


def test_floats_of_a_broken_length() -> None:
    with pytest.raises(WireError):
        floats(b"12345")


@given(st.binary(max_size=60))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        parse_example(data)


def test_nesting_costs_no_depth() -> None:
    message = b""
    for _ in range(2000):
        message = chunk(1, message)
    with pytest.raises(WireError):
        parse_example(message + b"\x0f")
