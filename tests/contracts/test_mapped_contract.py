"""The reader contract for shard files: mapped, read with pread, and several opened as one."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from contracts.reader import ReaderContract, digest, some_records

from packfmt import storage
from packfmt.errors import CorruptError
from packfmt.record import Record
from packfmt.storage.base import JoinedPlan, LaterPlan
from packfmt.storage.readahead import ReadAhead
from packfmt.storage.shard import ShardFile


def write(path: Path, records: Sequence[Record], **options: Any) -> str:
    with storage.create(path, **options) as writer:
        for record in records:
            writer.write(record.data, record.key, **record.columns)
    return writer.path


class TestMapped(ReaderContract):
    open_options: ClassVar[dict[str, Any]] = {"io": "mmap"}

    def make(self, tmp_path: Path, records: Sequence[Record], **options: Any) -> str:
        return write(tmp_path / "out.bin", records, **options)


class TestPread(TestMapped):
    open_options: ClassVar[dict[str, Any]] = {"io": "pread"}


class TestSharded(ReaderContract):
    mapped_columns = False

    def make(self, tmp_path: Path, records: Sequence[Record], **options: Any) -> str:
        return write(tmp_path / "out.json", records, shard_size=9000, **options)

    def test_it_is_several_shards(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(30)) as reader:
            assert len(reader.files) > 3


class TestFewShardsOpen(TestSharded):
    """As above, where most reads must open a shard again."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("packfmt.storage.shard_set.max_open", lambda: 2)

    @pytest.mark.parametrize("everything_cached", [True, False])
    def test_a_plan_outlives_its_shards(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything_cached: bool
    ) -> None:
        monkeypatch.setattr(ReadAhead, "everything_cached", lambda self: everything_cached)
        records = some_records(30)
        with self.opened(tmp_path, records) as reader:
            first = [reader.locate(index)[0] for index in range(30)]
            two = [first.index(path) for path in sorted(set(first))[:2]]
            plan = reader.plan(two)
            reader.read(range(30))  # which closes those two in favour of others
            assert [bytes(view) for view in plan.views(0, 2)] == [records[index].data for index in two]

    def test_a_plan_maps_no_more_shards_than_may_be_open(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ReadAhead, "everything_cached", lambda self: True)
        with self.opened(tmp_path, some_records(30)) as reader:
            assert isinstance(reader.plan(range(30)), LaterPlan)
            assert isinstance(reader.plan([0, 29]), JoinedPlan)


@pytest.mark.parametrize("kind", ["pattern", "list"])
def test_shards_opened_by_pattern_or_list_pickle_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "with [brackets]"
    folder.mkdir()
    write(folder / "out.json", some_records(60), shard_size=9000)
    monkeypatch.chdir(folder)
    source = "out-*.bin" if kind == "pattern" else sorted(Path().glob("out-*.bin"))
    with storage.open(source) as reader:
        raw, expected = pickle.dumps(reader), digest(reader)
    monkeypatch.chdir(tmp_path)
    with pickle.loads(raw) as copy:
        assert (digest(copy), copy.content_id) == (expected, reader.content_id)


@pytest.mark.parametrize("everything_cached", [True, False])
@pytest.mark.parametrize("verify", [True, False, "once"])
def test_a_plan_with_a_damaged_range_gives_the_other_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything_cached: bool, verify: Any
) -> None:
    records = some_records(4)
    monkeypatch.setattr(ReadAhead, "everything_cached", lambda self: everything_cached)
    index = ShardFile.index

    def damaged(self: ShardFile, name: str) -> np.ndarray:
        array = index(self, name).copy()
        array[2] += (1 << 40) * (name == "length")
        return array

    with storage.open(write(tmp_path / "x.bin", records), verify=verify) as reader:
        monkeypatch.setattr(ShardFile, "index", damaged)
        plan = reader.plan([3, 2, 0])
        views = plan.views(0, 3)
        assert bytes(next(views)) == records[3].data
        with pytest.raises(CorruptError, match="lie outside the records"):
            next(views)
        assert [bytes(view) for view in plan.views(2, 3)] == [records[0].data]
