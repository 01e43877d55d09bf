"""The packs of tests/golden are read as they were written, and are still written as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from packfmt import storage

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
MAKER = runpy.run_path(str(ROOT / "tools" / "make_golden.py"))
PACKS = MAKER["PACKS"] | MAKER["OLDER"]
OLDER = sorted(path.name for name in MAKER["OLDER"] for path in GOLDEN.glob(f"{Path(name).stem}*"))
FILES = sorted({path.name for path in GOLDEN.glob("v1-*.*")} - {*OLDER})


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    MAKER["make"](folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_the_writer_makes_the_same_bytes(name: str, fresh: Path) -> None:
    assert (fresh / name).read_bytes() == (GOLDEN / name).read_bytes()


def test_all_are_compared(fresh: Path) -> None:
    assert sorted(path.name for path in fresh.iterdir()) == FILES


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("name", PACKS)
def test_records_and_columns_are_read_as_written(name: str, io: str) -> None:
    records, options = PACKS[name]
    with storage.open(GOLDEN / name, io=io, check="full") as reader:
        assert [(bytes(r.data), r.key) for r in reader] == [(r.data, r.key) for r in records]
        assert (reader.classes, reader.metadata) == (tuple(options.get("classes", ())), options.get("metadata", {}))
        for index, record in enumerate(records):
            for column, value in record.columns.items():
                found = reader.columns[column][index]
                wanted = np.asarray(value, getattr(found, "dtype", None)) if not isinstance(value, bytes) else value
                np.testing.assert_array_equal(found, wanted, err_msg=column)


def test_shards_of_an_older_writer_are_opened_by_a_pattern() -> None:
    assert len(OLDER) == 3
    with storage.open(GOLDEN / "v1-shards-*.bin") as reader, storage.open(GOLDEN / "v1-shards.json") as whole:
        assert reader.content_id == whole.content_id


CONTENT_IDS = {
    "v1-three.bin": "e157209a4e522a7e2a4627fd4bab01f1",
    "v1-empty.bin": "e6d1e41deb39e027ff070a40e403e4eb",
    "v1-columns.bin": "ca2ddefc260bde81306fa98cf79db47c",
    "v1-set.json": "1d1abd973450bc046b311a673d6893a4",
    "v1-shards.json": "1d1abd973450bc046b311a673d6893a4",
}


@pytest.mark.parametrize("name", PACKS)
def test_content_ids_stay(name: str) -> None:
    with storage.open(GOLDEN / name) as reader:
        assert reader.content_id == CONTENT_IDS[name]
