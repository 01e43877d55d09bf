"""JSON from files that nobody vouches for: bounded before anything is made of it.

``json`` makes an object of every two characters of ``[],[],[],``: 63 MiB of that took 1.7 GB and 6 to 14 seconds. What
is to be made is counted beforehand, outside of strings, a piece at a time, so that counting ends where a bound is
passed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MAX_BYTES", "PACK", "RECORD", "Bounds", "check_json", "parse_json"]

MAX_BYTES = 24 << 20  # of what describes a pack: a million class names of 20 characters


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much JSON may hold.

    Args:
        size: bytes.
        strings: names of members included.
        numbers: and other values behind a comma that do not follow a string, which is a few more.
        nodes: lists, objects and members: each takes many times the time and memory of a string.
        depth: lists and objects within each other.
    """

    size: int
    strings: int
    numbers: int
    nodes: int
    depth: int = 64


PACK = Bounds(MAX_BYTES, strings=1 << 20, numbers=1 << 20, nodes=1 << 16)
RECORD = Bounds(16 << 20, strings=1 << 20, numbers=1 << 23, nodes=1 << 17)  # an array's numbers are in it

_PIECE = 1 << 18  # bytes looked at together: what is made of them stays in the processor's cache
_QUOTE, _COMMA, _COLON = b'",:'
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def parse_json(raw: bytes, bounds: Bounds = PACK, *, encoding: str = "utf-8-sig", **hooks: Any) -> Any:
    """``json.loads`` with its hooks, once ``check_json`` has passed.

    Raises:
        ValueError: it is not JSON in this encoding, or beyond the bounds.
    """
    check_json(raw, bounds)
    return json.loads(raw.decode(encoding), **hooks)


def check_json(raw: bytes, bounds: Bounds = PACK) -> None:
    """Refuse JSON that would take long to parse, or much memory. Whether it is JSON at all is not looked at.

    Raises:
        ValueError: it is beyond the bounds.
    """
    _refuse_more("bytes", len(raw), bounds.size)
    # Each of them takes a byte at least: counting those of a usual directory would be a sixth of opening it.
    few = min(bounds.strings, bounds.numbers, bounds.nodes)
    if len(raw) <= few and raw.count(b"[") + raw.count(b"{") <= bounds.depth:
        return
    if b"\\" in raw:  # only within strings, where an escaped quote ends nothing
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = numbers = nodes = depth = before = 0
    inside = False
    data = np.frombuffer(raw, np.uint8)
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        within = np.logical_xor.accumulate(piece == _QUOTE) ^ inside
        inside = bool(within[-1])
        plain = piece[~within]  # with the quotes that end strings, which tell a comma behind one from others
        if not len(plain):
            continue
        quotes, steps = plain == _QUOTE, _STEPS[plain]
        commas = plain == _COMMA
        commas[1:] &= ~quotes[:-1]
        commas[0] &= before != _QUOTE
        strings += int(np.count_nonzero(quotes))
        numbers += int(np.count_nonzero(commas))
        nodes += int(np.count_nonzero(plain == _COLON) + np.count_nonzero(steps > 0))
        levels = depth + steps[steps != 0].cumsum(dtype=np.int64)
        _refuse_more("strings", strings, bounds.strings)
        _refuse_more("numbers", numbers, bounds.numbers)
        _refuse_more("lists, objects and members", nodes, bounds.nodes)
        _refuse_more("levels", int(levels.max(initial=0)), bounds.depth)
        depth = int(levels[-1]) if len(levels) else depth
        before = int(plain[-1])


def _refuse_more(what: str, found: int, allowed: int) -> None:
    if found > allowed:
        raise ValueError(f"JSON of {found:,} {what} or more; allowed are {allowed:,}")
