"""CRC-32C (Castagnoli, RFC 3720 appendix B.4) of large buffers in numpy: the checksum that TFRecord files carry.

A CRC is linear over GF(2): the checksum of a message is the XOR of what each piece of it contributes by its value
and its distance to the end. So a table per distance turns a row of pieces into one number with no dependence between
rows, and the rows' numbers are pieces of the next, four times shorter round. (Table look-up per byte distance is
Kounavis and Berry's "slicing-by-8", 2005; the distances here are the columns of a matrix.)
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["crc32c", "masked_crc32c"]

_POLYNOMIAL = 0x82F63B78  # reflected
_ONES = 0xFFFF_FFFF
_WORDS = 8  # 16-bit words in a row of the first round: 8 tables of 256 KiB stay in the second-level cache
_FOLD = 4  # numbers that a later round makes one of
_SMALL = 64  # below this a plain loop is faster
_CHUNK = 1 << 18  # bytes taken at a time, so that the look-ups' indices stay in cache too
_LEAST = 48  # numbers left when the plain loop takes over

U32 = npt.NDArray[np.uint32]


def _byte_table() -> U32:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


_TABLE = _byte_table()
_LOOP = _TABLE.tolist()


@cache
def _word_tables() -> list[U32]:
    """Per 16-bit word of a row: what its value contributes at the row's end."""
    by_byte = [_TABLE]
    for _ in range(2 * _WORDS - 1):
        by_byte.append(_advance(by_byte[-1], 1))
    by_byte.reverse()
    low, high = np.arange(1 << 16) & 255, np.arange(1 << 16) >> 8
    return [by_byte[2 * word][low] ^ by_byte[2 * word + 1][high] for word in range(_WORDS)]


@cache
def _fold_tables(step: int) -> list[list[U32]]:
    """Per number of a row, per byte of it: its value after ``step`` bytes for each number behind it."""
    return [_shift_tables(step * behind) for behind in range(_FOLD - 1, -1, -1)]


@cache
def _shift_tables(distance: int) -> list[U32]:
    """Tables that move a checksum over ``distance`` bytes of zeros, one per byte of the checksum."""
    single = np.uint32(1) << np.arange(32, dtype=np.uint32)
    half = distance // 2
    bits = _advance(_advance(single, half), distance - half)
    byte_values = np.arange(256)
    tables = []
    for byte in range(4):
        table = np.zeros(256, np.uint32)
        for bit in range(8):
            table ^= np.where(byte_values >> bit & 1, bits[8 * byte + bit], np.uint32(0))
        tables.append(table)
    return tables


@cache
def _shift_lists(distance: int) -> list[list[int]]:
    return [table.tolist() for table in _shift_tables(distance)]


def _advance(values: U32, distance: int) -> U32:
    """Checksums ``values`` after ``distance`` more bytes of zeros; doubling, so that long distances are cheap."""
    while distance:
        power = 1 << (distance.bit_length() - 1)
        if power == 1:
            values = (values >> np.uint32(8)) ^ _TABLE[values & np.uint32(255)]
        else:
            values = _look_up(_shift_tables(power), values)
        distance -= power
    return values


def _look_up(tables: list[U32], values: U32) -> U32:
    columns = np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(-1, 4)
    result = tables[0].take(columns[:, 0])
    for byte in range(1, 4):
        result ^= tables[byte].take(columns[:, byte])
    return result


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """The CRC-32C of ``data``, as an int below 2**32. Thread-safe.

    Memory: about 3 MiB of tables, made at first use, and a few times 256 KiB.
    """
    view = memoryview(data).cast("B")
    if len(view) < _SMALL:
        return _loop(_ONES, view) ^ _ONES
    crc = _ONES
    first = len(view) % _CHUNK or _CHUNK
    start = 0
    for stop in range(first, len(view) + 1, _CHUNK):
        crc = _chunk(crc, view[start:stop])
        start = stop
    return crc ^ _ONES


def masked_crc32c(data: bytes | bytearray | memoryview) -> int:
    """CRC-32C as TFRecord stores it: turned right by 15 bits, plus a constant (tensorflow/core/lib/hash/crc32c.h)."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


def _loop(crc: int, view: memoryview) -> int:
    for byte in view:
        crc = (crc >> 8) ^ _LOOP[(crc ^ byte) & 255]
    return crc


def _chunk(crc: int, view: memoryview) -> int:
    """The running checksum after ``view``. Zeros in front change nothing once the start value is in the first four
    bytes."""
    if len(view) < _SMALL:
        return _loop(crc, view)
    unit = 2 * _WORDS
    rounds = 0
    while -(-len(view) // unit) > _LEAST:
        unit *= _FOLD
        rounds += 1
    padded = -(-len(view) // unit) * unit
    buffer = np.zeros(padded, np.uint8)
    buffer[padded - len(view) :] = np.frombuffer(view, np.uint8)
    head = buffer[padded - len(view) :][:4]
    head ^= np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    rows = buffer.view("<u2").reshape(-1, _WORDS)
    tables = _word_tables()
    values = tables[0].take(rows[:, 0])
    for word in range(1, _WORDS):
        values ^= tables[word].take(rows[:, word])
    step = 2 * _WORDS
    for _ in range(rounds):
        values = _fold(values, step)
        step *= _FOLD
    a, b, c, d = _shift_lists(step)
    total = 0
    for value in values.tolist():
        total = a[total & 255] ^ b[total >> 8 & 255] ^ c[total >> 16 & 255] ^ d[total >> 24] ^ value
    return total


def _fold(values: U32, step: int) -> U32:
    columns = values.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4 * _FOLD)
    result: U32 = values[_FOLD - 1 :: _FOLD].copy()  # nothing behind it
    for number, tables in enumerate(_fold_tables(step)[:-1]):
        for byte, table in enumerate(tables):
            result ^= table.take(columns[:, 4 * number + byte])
    return result
