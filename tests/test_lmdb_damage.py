"""Packs in LMDB with damaged pages: every way to read them ends in what is stored or in an error that names the file.

They are read in a process of their own: a crash ends that, and its signal is seen here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb_damage_program
import pytest
from lmdb_damage_program import HARMS, page_size_of
from make import jpeg

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


@pytest.fixture(scope="module")
def seen(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each kind of damage: as far as the process got."""
    done = subprocess.run(
        [sys.executable, lmdb_damage_program.__file__, pack, tmp_path_factory.mktemp("damaged")],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["harm"]: line for line in lines} | {"end": {"code": done.returncode}}


@pytest.mark.torch
@pytest.mark.parametrize("harm", HARMS)
def test_no_damage_to_a_page_ends_the_process_or_gives_other_data(
    pack: Path, seen: dict[str, dict[str, Any]], harm: str
) -> None:
    assert harm in seen, seen["end"]
    right, errors, wrong = (seen[harm][kind] for kind in ("right", "errors", "wrong"))
    assert wrong == []
    data = (pack / "data.mdb").read_bytes()
    pages = len(data) // page_size_of(data)
    assert {way: right.get(way, 0) + errors.get(way, 0) for way in WAYS} == dict.fromkeys(WAYS, pages)
    assert errors["verify"] > 0.8 * pages  # most of the file means something
