"""Packs in LMDB with damaged pages: every way to read them ends in what is stored or in an error that names the file.

Each kind of damage has a process of its own: a crash ends that, and its signal is seen here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lmdb_damage_program
import pytest
from images import jpeg
from lmdb_damage_program import HARMS, page_size_of

from packfmt import storage

RECORDS = 60
LONG = 7  # every seventh record has pages of its own
WAYS = ("read", "train", "info", "verify", "convert")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Branch, leaves of records and of index and columns, and values with pages of their own."""
    path = tmp_path_factory.mktemp("packs") / "whole.lmdb"
    with storage.create(path) as writer:
        for i in range(RECORDS):
            data = jpeg(16, 16, seed=i, quality=60) + bytes([i]) * (5000 if i % LONG == 1 else 0)
            writer.write(data, f"{i:03}.jpg", label=i)
    return path


@pytest.mark.parametrize("harm", HARMS)
def test_no_damage_to_a_page_ends_the_process_or_gives_other_data(pack: Path, tmp_path: Path, harm: str) -> None:
    done = subprocess.run(
        [sys.executable, lmdb_damage_program.__file__, pack, tmp_path, harm],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["wrong"] == []
    data = (pack / "data.mdb").read_bytes()
    pages = len(data) // page_size_of(data)
    assert {way: seen["right"].get(way, 0) + seen["errors"].get(way, 0) for way in WAYS} == dict.fromkeys(WAYS, pages)
    assert seen["errors"]["verify"] > 0.8 * pages  # most of the file means something
