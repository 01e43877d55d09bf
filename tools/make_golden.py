"""Write the golden packs of tests/golden: one of each kind that version 1 knows, made with this version of packfmt.

    python tools/make_golden.py FOLDER

Run it once per format version or addition, before its first release, and never again: the files stand for what is in
the world. The test compares them byte for byte with what the writer makes now, and reads them and those of older
writers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packfmt import storage
from packfmt.record import Column, Record

GIF = bytes.fromhex("47494638396101000100800000102030ffffff2c00000000010001000002024401003b")

KINDS = (
    Column("boolean", "|b1"),
    Column("bytes", "|u1", (None,), "bytes"),
    Column("f2", "<f2"),
    Column("f4", "<f4"),
    Column("f8", "<f8"),
    Column("i1", "|i1"),
    Column("i2", "<i2"),
    Column("i4", "<i4"),
    Column("i8", "<i8"),
    Column("matrix", "<i2", (2, 3)),
    Column("ragged", "<f4", (None, 4)),
    Column("ragged.numbers", "<u2", (None,)),
    Column("text", "|u1", (None,), "text"),
    Column("u1", "|u1"),
    Column("u2", "<u2"),
    Column("u4", "<u4"),
    Column("u8", "<u8"),
    Column("vector", "<f8", (3,)),
)


def kinds(i: int) -> dict[str, Any]:
    """A value for every column of ``KINDS``."""
    return {
        "boolean": i % 2 == 1,
        "bytes": bytes(range(5 * i)),
        "f2": 0.5 - i,
        "f4": float("inf") if i == 2 else i / 3,
        "f8": -0.0 if i == 0 else i / 3,
        "i1": (-128, 0, 127)[i],
        "i2": (-(2**15), 0, 2**15 - 1)[i],
        "i4": (-(2**31), 0, 2**31 - 1)[i],
        "i8": (-(2**63), 0, 2**63 - 1)[i],
        "matrix": [[i, -i, 2], [3, 4, 5]],
        "ragged": np.arange(4 * i, dtype="<f4").reshape(i, 4),
        "ragged.numbers": list(range(2 - i)),
        "text": ("", "caf\u00e9 \udcff", "\U0001f600")[i],
        "u1": (0, 1, 255)[i],
        "u2": (0, 1, 2**16 - 1)[i],
        "u4": (0, 1, 2**32 - 1)[i],
        "u8": (0, 1, 2**64 - 1)[i],
        "vector": [i, 0.25, -1e300],
    }


# File name (a set of shards: its manifest) to records and what ``storage.create`` is given.
PACKS: Mapping[str, tuple[Sequence[Record], Mapping[str, Any]]] = {
    "v1-three.bin": (
        [
            Record(GIF, "cat/1.gif", {"label": 0}),
            Record(b"", "cat/\udcff", {"label": 0}),
            Record(GIF[:20], "dog/2", {"label": 1}),
        ],
        {"classes": ["cat", "dog"], "metadata": {"made by": "make_golden.py", "nested": {"list": [1, 2.5, None]}}},
    ),
    "v1-empty.bin": ([], {}),
    "v1-columns.bin": ([Record(b"%d" % i, f"{i}", kinds(i)) for i in range(3)], {"columns": KINDS}),
    "v1-set.json": (
        [Record(GIF + b"%d" % i, f"{i}.gif", {"label": i}) for i in range(3)],
        {"shard_size": 80},
    ),
}
# What an older packfmt wrote: read as ever, and not written so any more.
OLDER: Mapping[str, tuple[Sequence[Record], Mapping[str, Any]]] = {
    "v1-shards.json": PACKS["v1-set.json"],  # before shards knew of their set
}


def make(folder: Path) -> None:
    """Write all packs into a folder."""
    for name, (records, options) in PACKS.items():
        with storage.create(folder / name, **options) as writer:
            for record in records:
                writer.write(record.data, record.key, **record.columns)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
