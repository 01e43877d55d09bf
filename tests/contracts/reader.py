"""What every reader keeps, whatever it reads from. A backend's tests subclass ``ReaderContract`` and say ``make``."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import pickle
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import jpeg

from packfmt import storage
from packfmt.errors import CorruptError, FormatError
from packfmt.record import KEY, Column, Record
from packfmt.storage import Reader
from packfmt.storage.readahead import ReadAhead

MAX_PICKLE = 10_000

# Keys as a file system may give them: each a str that the pack must give back unchanged.
ODD_KEYS = [
    "plain.jpg",
    "a/b/c.jpg",
    "caf\udcc3.jpg",  # the first half of a UTF-8 character
    "\udcff",
    "line\nbreak\ttab.jpg",
    "-rf",
    "../../etc/passwd",
    "nul\0inside",
    "\N{GRINNING FACE}.jpg",
    "caf\u00e9.jpg",  # the same to the eye, composed
    "cafe\u0301.jpg",  # and decomposed
    "A.jpg",
    "a.jpg",
    " ",
    "x" * 300,
]
BOXES = [np.arange(8, dtype="<f4").reshape(2, 4), np.empty((0, 4), "<f4"), np.ones((1, 4), "<f4")]
COLUMNS = [
    Column("label"),
    Column("weight", "<f4"),
    Column("seen", "|b1"),
    Column("small", "<u2"),
    Column("vector", "<f4", (3,)),
    Column("matrix", "<i2", (2, 2)),
    Column("caption", "|u1", (None,), "text"),
    Column("mask", "|u1", (None,), "bytes"),
    Column("boxes", "<f4", (None, 4)),
    Column("tags", "<u4", (None,)),
    Column("column.with.dots"),
    Column("data"),  # named as an argument of Writer.write
]


def some_records(count: int, seed: int = 0) -> list[Record]:
    """Records of up to 3,000 bytes, all different."""
    rng = random.Random(seed)
    datas = (b"%d" % i + rng.randbytes(rng.randrange(3000)) for i in range(count))
    return [Record(data, f"k/{i:05d}.jpg", {"label": i}) for i, data in enumerate(datas)]


def rich_records() -> list[Record]:
    """Three records with a value of every kind of column."""
    return [
        Record(
            b"record %d" % i,
            f"{i}.jpg",
            {
                "label": i - 1,
                "weight": i / 4,
                "seen": i == 1,
                "small": 65535 - i,
                "vector": np.array([i, -i, 0.5], "<f4"),
                "matrix": [[i, 2], [3, -4]],
                "caption": ["", "h\u00e9 \udcff", "x" * 1000][i],
                "mask": [b"\0\xff", b"", bytes(range(256))][i],
                "boxes": BOXES[i],
                "tags": [np.arange(i, dtype="<u4"), np.array([7], "<u4"), np.array([4294967295] * 3, "<u4")][i],
                "column.with.dots": 10 * i,
                "data": 100 + i,
            },
        )
        for i in range(3)
    ]


def flip_a_byte(file: str, record: bytes) -> None:
    """Change the first byte of a record in place, if the file holds it."""
    with open(file, "r+b") as stream:
        at = stream.read().find(record)
        if at >= 0:
            stream.seek(at)
            stream.write(bytes([record[0] ^ 0xFF]))


def digest(reader: Reader) -> str:
    """A hash over everything a reader says about its records."""
    total = hashlib.sha256()
    for record in reader:
        total.update(b"%d %d" % (len(record.data), hash_of(record.data)))
        total.update(repr((record.key, int(record.columns["label"]))).encode("ascii", "backslashreplace"))
    return total.hexdigest()


def hash_of(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def send_digest(reader: Reader, queue: Any) -> None:
    queue.put(digest(reader))


class ReaderContract:
    """Tests for any backend.

    Attributes:
        open_options: given to ``open``.
        mapped_columns: whether columns of numbers lie over the file rather than in memory of their own.
        views_outlive_close: whether what ``read`` returned stays valid after ``close``.
    """

    open_options: dict[str, Any] = {}  # noqa: RUF012 (subclasses replace it)
    mapped_columns = True
    views_outlive_close = True

    def make(self, tmp_path: Path, records: Sequence[Record], **options: Any) -> str:
        """Write a pack of these records; ``options`` as ``storage.create``. Returns what to open."""
        raise NotImplementedError

    def open(self, path: str, **options: Any) -> Reader:
        return storage.open(path, **{**self.open_options, **options})

    def opened(self, tmp_path: Path, records: Sequence[Record], **options: Any) -> Reader:
        return self.open(self.make(tmp_path, records, **options))

    # ---- records

    @pytest.mark.parametrize("count", [0, 1, 2, 7, 200])
    def test_iteration_gives_all_records_in_order(self, tmp_path: Path, count: int) -> None:
        records = some_records(count)
        with self.opened(tmp_path, records, columns=[Column("label")]) as reader:
            found = [(bytes(r.data), r.key, r.columns["label"]) for r in reader]
        assert found == [(r.data, r.key, r.columns["label"]) for r in records]

    @pytest.mark.parametrize("count", [0, 1, 7])
    def test_len(self, tmp_path: Path, count: int) -> None:
        with self.opened(tmp_path, some_records(count), columns=[Column("label")]) as reader:
            assert len(reader) == count

    def test_two_iterations_at_a_time_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        records = some_records(150)
        with self.opened(tmp_path, records) as reader:
            pairs = [(bytes(a.data), bytes(b.data)) for a, b in zip(reader, reader, strict=True)]
        assert pairs == [(r.data, r.data) for r in records]

    def test_indexing(self, tmp_path: Path) -> None:
        records = some_records(9)
        with self.opened(tmp_path, records) as reader:
            for index in (0, 4, 8, -1, -9, np.int64(3), np.uint8(5)):
                assert (bytes(reader[index].data), reader[index].key) == (records[index].data, records[index].key)

    @pytest.mark.parametrize("index", [9, -10, 2**63, -(2**63)])
    def test_an_index_out_of_range_is_refused(self, tmp_path: Path, index: int) -> None:
        with self.opened(tmp_path, some_records(9)) as reader, pytest.raises(IndexError, match="has 9 records"):
            reader[index]

    @pytest.mark.parametrize("index", [1.0, b"1", None, slice(0, 1)])
    def test_an_index_that_is_neither_an_integer_nor_a_key_is_refused(self, tmp_path: Path, index: Any) -> None:
        with self.opened(tmp_path, some_records(9)) as reader, pytest.raises(TypeError):
            reader[index]

    def test_nothing_can_be_read_from_an_empty_pack(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, []) as reader:
            assert reader.read([]) == []
            for index in (0, -1):
                with pytest.raises(IndexError, match="has 0 records"):
                    reader[index]

    @pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.uint64)])
    def test_read_keeps_the_asked_order_and_repeats(self, tmp_path: Path, kind: Any) -> None:
        records = some_records(40)
        asked = [39, 0, 7, 7, 20, 0, 38, 1]
        with self.opened(tmp_path, records) as reader:
            assert [bytes(view) for view in reader.read(kind(asked))] == [records[i].data for i in asked]

    def test_read_takes_a_range(self, tmp_path: Path) -> None:
        records = some_records(40)
        with self.opened(tmp_path, records) as reader:
            assert [bytes(view) for view in reader.read(range(30, 3, -9))] == [records[i].data for i in (30, 21, 12)]

    @pytest.mark.parametrize("indices", [[9], [0, -1], [-1], np.array([2**63], np.uint64)])
    def test_read_refuses_indices_out_of_range(self, tmp_path: Path, indices: Any) -> None:
        with self.opened(tmp_path, some_records(9)) as reader, pytest.raises(IndexError, match="has 9 records"):
            reader.read(indices)

    @pytest.mark.parametrize("indices", [[0.0], [True, False], ["0"], np.zeros((1, 1), int)])
    def test_read_refuses_what_is_no_flat_list_of_integers(self, tmp_path: Path, indices: Any) -> None:
        with self.opened(tmp_path, some_records(9)) as reader, pytest.raises(TypeError, match="flat sequence of int"):
            reader.read(indices)

    def test_what_read_returns_cannot_be_written_to(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(3)) as reader:
            assert all(isinstance(view, memoryview) and view.readonly for view in reader.read([2, 0]))

    def test_records_without_bytes(self, tmp_path: Path) -> None:
        data = [b"", b"x", b"", b"", b"yy", b""]
        with self.opened(tmp_path, [Record(d, str(i)) for i, d in enumerate(data)]) as reader:
            assert [bytes(view) for view in reader.read(range(6))] == data
            assert [bytes(reader[i].data) for i in range(6)] == data

    def test_a_pack_of_nothing_but_an_empty_record(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, [Record(b"", "k")]) as reader:
            assert (len(reader), bytes(reader[0].data), reader[0].key) == (1, b"", "k")

    def test_a_record_of_megabytes(self, tmp_path: Path) -> None:
        large = random.Random(1).randbytes(9 << 20)
        with self.opened(tmp_path, [Record(b"a", "1"), Record(large, "2"), Record(b"b", "3")]) as reader:
            assert [bytes(view) for view in reader.read([2, 1, 0])] == [b"b", large, b"a"]

    @pytest.mark.parametrize("verify", [False, "once"])
    def test_reading_with_fewer_checks_gives_the_same(self, tmp_path: Path, verify: Any) -> None:
        records = some_records(20)
        with self.open(self.make(tmp_path, records), verify=verify) as reader:
            for order in ([3], [3, 4, 3], range(20), range(19, -1, -1)):
                assert [bytes(view) for view in reader.read(order)] == [records[i].data for i in order]

    def test_verifying_once_sees_what_is_damaged_before_and_not_after_the_first_reading(self, tmp_path: Path) -> None:
        records = some_records(6)
        path = self.make(tmp_path, records)
        with self.open(path, verify="once") as reader, self.open(path) as strict:
            assert reader.read([1])[0] == records[1].data
            for file in {os.path.realpath(name) for name in reader.files}:
                for index in (1, 2, 3):
                    flip_a_byte(file, records[index].data)
            for _ in range(2):  # what failed has not passed
                with pytest.raises(CorruptError, match=records[2].key):
                    reader.read([2])
                with pytest.raises(CorruptError, match=records[3].key):
                    reader.read([0, 1, 3])
            assert reader.read([1])[0] != records[1].data
            with pytest.raises(CorruptError, match=records[1].key):
                strict.read([1])

    @pytest.fixture(params=["from the disk", "from memory"])
    def found(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a plan believes that records are found, which it reads in two ways."""
        monkeypatch.setattr(ReadAhead, "everything_cached", lambda self: request.param == "from memory")

    @pytest.mark.usefixtures("found")
    @pytest.mark.parametrize("verify", [True, False, "once"])
    @pytest.mark.parametrize("kind", [list, tuple, np.array])
    def test_a_plan_gives_what_read_gives(self, tmp_path: Path, verify: Any, kind: Any) -> None:
        records = some_records(40)
        with self.open(self.make(tmp_path, records), verify=verify) as reader:
            for asked in ([], [3], [39, 0, 7, 7, 20, 0, 38, 1]):
                plan = reader.plan(kind(asked) if asked else asked)
                for start, stop in ((0, 8), (0, 0), (2, 5), (5, 20), (0, 8)):
                    views = plan.views(start, stop)
                    assert iter(views) is views
                    assert [bytes(view) for view in views] == [records[i].data for i in asked[start:stop]]
            views = reader.plan(range(30, 3, -9)).views(0, 3)
            assert [bytes(view) for view in views] == [records[i].data for i in (30, 21, 12)]

    @pytest.mark.usefixtures("found")
    @pytest.mark.parametrize("verify", [True, "once"])
    def test_a_plan_raises_at_the_damaged_record_s_turn(self, tmp_path: Path, verify: Any) -> None:
        records = some_records(9)
        with self.open(self.make(tmp_path, records), verify=verify) as reader:
            for file in {os.path.realpath(name) for name in reader.files}:
                flip_a_byte(file, records[4].data)
            plan = reader.plan([8, 0, 4, 1, 5])
            for _ in range(2):  # what failed has not passed
                views = plan.views(0, 5)
                assert [bytes(next(views)) for _ in range(2)] == [records[8].data, records[0].data]
                with pytest.raises(CorruptError, match=records[4].key):
                    next(views)
                assert next(views, None) is None
            assert [bytes(view) for view in plan.views(3, 5)] == [records[1].data, records[5].data]

    @pytest.mark.usefixtures("found")
    def test_a_plan_checks_once_where_that_is_asked_for(self, tmp_path: Path) -> None:
        records = some_records(9)
        with self.open(self.make(tmp_path, records), verify="once") as reader:
            assert [bytes(view) for view in reader.plan([4, 1]).views(0, 1)] == [records[4].data]
            for file in {os.path.realpath(name) for name in reader.files}:
                for index in (1, 4):
                    flip_a_byte(file, records[index].data)
            views = reader.plan([4, 1]).views(0, 2)
            assert bytes(next(views)) != records[4].data
            with pytest.raises(CorruptError, match=records[1].key):
                next(views)

    @pytest.mark.usefixtures("found")
    def test_a_plan_refuses_what_read_refuses(self, tmp_path: Path) -> None:
        reader = self.opened(tmp_path, some_records(9))
        with reader:
            with pytest.raises(IndexError, match="has 9 records"):
                reader.plan([0, 9])
            with pytest.raises(TypeError, match="flat sequence of int"):
                reader.plan(["0"])
        with pytest.raises(ValueError, match="is closed"):
            list(reader.plan([0, 1]).views(0, 2))

    @pytest.mark.usefixtures("found")
    def test_a_plan_serves_many_threads(self, tmp_path: Path) -> None:
        records = some_records(40)
        with self.opened(tmp_path, records) as reader, ThreadPoolExecutor(4) as pool:
            plan = reader.plan(range(40))
            parts = pool.map(lambda start: [bytes(view) for view in plan.views(start, start + 4)], range(0, 40, 4))
            assert [data for part in parts for data in part] == [record.data for record in records]

    def test_an_unknown_way_of_verifying_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="allowed are True, False and 'once'"):
            self.open(self.make(tmp_path, some_records(1)), verify="sometimes")

    def test_a_record_compares_with_what_was_written(self, tmp_path: Path) -> None:
        written = some_records(3)
        image = {"width": 0, "height": 0, "channels": 0, "format": 0, "orientation": 0, "flags": 0}
        with self.opened(tmp_path, written) as reader:
            assert list(reader) == [Record(r.data, r.key, {**r.columns, **image}) for r in written]

    def test_a_record_pickles_by_value(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(3)) as reader:
            record = pickle.loads(pickle.dumps(reader[1]))
            assert record == reader[1]
            assert type(record) is Record

    # ---- keys and places

    def test_keys_come_back_unchanged(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, [Record(b"%d" % i, key) for i, key in enumerate(ODD_KEYS)]) as reader:
            assert [reader.key(i) for i in range(len(reader))] == ODD_KEYS
            assert [record.key for record in reader] == ODD_KEYS
            assert list(reader.columns[KEY]) == ODD_KEYS

    def test_find(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, [Record(b"%d" % i, key) for i, key in enumerate(ODD_KEYS)]) as reader:
            assert [reader.find(key) for key in ODD_KEYS] == list(range(len(ODD_KEYS)))
            for _ in range(2):
                with pytest.raises(KeyError, match=r"no record has the key 'b\.jpg'"):
                    reader.find("b.jpg")

    @pytest.mark.parametrize("key", ["caf\udcc3\udca9.jpg", "\ud800", "plain", ""])
    def test_a_key_that_only_looks_like_another_is_not_there(self, tmp_path: Path, key: str) -> None:
        """The first has the bytes of a key that is there; the second has none."""
        with self.opened(tmp_path, [Record(b"%d" % i, key) for i, key in enumerate(ODD_KEYS)]) as reader:
            assert [key in reader for _ in range(3)] == [False] * 3

    def test_records_by_key(self, tmp_path: Path) -> None:
        records = [Record(b"%d" % i, key) for i, key in enumerate(ODD_KEYS)]
        with self.opened(tmp_path, records) as reader:
            for record in records:
                assert (bytes(reader[record.key].data), reader[record.key].key) == (record.data, record.key)
                assert record.key in reader
            for _ in range(2):
                assert "b.jpg" not in reader
                with pytest.raises(KeyError, match=r"no record has the key 'b\.jpg'"):
                    reader["b.jpg"]

    def test_keys_among_many(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(200)) as reader:
            asked = random.Random(0).sample(range(-50, 250), 300)
            assert [f"k/{i:05d}.jpg" in reader for i in asked] == [0 <= i < 200 for i in asked]

    def test_a_record_is_in_the_pack_it_came_from(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(9)) as reader:
            record = reader[4]
            assert record in reader
            assert Record(b"other", record.key, record.columns) not in reader
            assert Record(record.data, "other", record.columns) not in reader

    @pytest.mark.parametrize("item", [4, b"k/00004.jpg", None])
    def test_what_is_neither_key_nor_record_is_not_looked_for(self, tmp_path: Path, item: Any) -> None:
        with self.opened(tmp_path, some_records(9)) as reader, pytest.raises(TypeError, match="looks for a key"):
            item in reader  # noqa: B015

    def test_no_key_is_in_an_empty_pack(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, []) as reader:
            assert ["k" in reader for _ in range(3)] == [False] * 3

    def test_locate_names_the_file_and_the_index_in_it(self, tmp_path: Path) -> None:
        records = some_records(30)
        with self.opened(tmp_path, records) as reader:
            for index in (0, 13, 29):
                path, local = reader.locate(index)
                with storage.open(path) as alone:
                    assert (bytes(alone[local].data), alone.key(local)) == (records[index].data, records[index].key)

    @pytest.mark.parametrize("index", [30, -1])
    def test_locate_refuses_an_index_out_of_range(self, tmp_path: Path, index: int) -> None:
        with self.opened(tmp_path, some_records(30)) as reader, pytest.raises(IndexError):
            reader.locate(index)

    def test_lengths_and_mean(self, tmp_path: Path) -> None:
        records = some_records(30)
        sizes = [len(r.data) for r in records]
        with self.opened(tmp_path, records) as reader:
            assert reader.lengths([29, 3, 3]).tolist() == [sizes[29], sizes[3], sizes[3]]
            assert reader.record_bytes == pytest.approx(sum(sizes) / 30)

    def test_offsets_rise(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(30)) as reader:
            offsets = reader.offsets(range(30))
            assert (offsets[1:] > offsets[:-1]).all()
            assert reader.offsets([7, 2]).tolist() == [offsets[7], offsets[2]]

    def test_the_mean_of_nothing_is_zero(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, []) as reader:
            assert reader.record_bytes == 0.0

    def test_files_are_there(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(30)) as reader:
            assert reader.files
            assert all(os.path.exists(path) for path in reader.files)

    @pytest.mark.parametrize("indices", [[], [0], [29, 3, 3], range(30)])
    def test_will_need_changes_nothing(self, tmp_path: Path, indices: Any) -> None:
        records = some_records(30)
        with self.opened(tmp_path, records) as reader:
            assert reader.will_need(indices) is None
            assert reader.will_need_blocks(indices) is None
            assert [bytes(view) for view in reader.read(range(30))] == [r.data for r in records]

    def test_will_need_refuses_indices_out_of_range(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(3)) as reader, pytest.raises(IndexError):
            reader.will_need([3])

    # ---- columns

    @pytest.mark.parametrize("name", [c.name for c in COLUMNS])
    def test_columns_of_every_kind(self, tmp_path: Path, name: str) -> None:
        records = rich_records()
        with self.opened(tmp_path, records, columns=COLUMNS) as reader:
            found = reader.columns[name]
            assert len(found) == 3
            for index, record in enumerate(records):
                np.testing.assert_array_equal(found[index], record.columns[name])
                np.testing.assert_array_equal(reader[index].columns[name], record.columns[name])

    @pytest.mark.parametrize(("name", "dtype", "shape"), [(c.name, c.dtype, c.shape) for c in COLUMNS if not c.ragged])
    def test_columns_of_fixed_width_are_arrays_of_the_declared_type(
        self, tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...]
    ) -> None:
        with self.opened(tmp_path, rich_records(), columns=COLUMNS) as reader:
            found = reader.columns[name]
            assert type(found) is np.ndarray
            assert (found.dtype, found.shape) == (np.dtype(dtype), (3, *shape))
            assert not found.flags.writeable
            assert found.flags.owndata is False or not self.mapped_columns

    def test_ragged_values_have_their_dtype_and_inner_shape(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, rich_records(), columns=COLUMNS) as reader:
            assert [(v.dtype, v.shape) for v in reader.columns["boxes"]] == [
                (np.dtype("<f4"), (2, 4)),
                (np.dtype("<f4"), (0, 4)),
                (np.dtype("<f4"), (1, 4)),
            ]

    def test_ragged_columns_take_slices_and_arrays_of_indices(self, tmp_path: Path) -> None:
        captions = [record.columns["caption"] for record in rich_records()]
        with self.opened(tmp_path, rich_records(), columns=COLUMNS) as reader:
            found = reader.columns["caption"]
            assert found[1:] == captions[1:]
            assert found[::-1] == captions[::-1]
            assert found[np.array([2, 0, 2])] == [captions[2], captions[0], captions[2]]
            assert found[-1] == captions[-1]
            with pytest.raises(IndexError, match="has 3 values"):
                found[3]

    def test_columns_of_an_empty_pack(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, [], columns=COLUMNS) as reader:
            assert {name: len(reader.columns[name]) for name in reader.columns} == dict.fromkeys(reader.columns, 0)
            assert reader.columns["vector"].shape == (0, 3)

    def test_inferred_columns(self, tmp_path: Path) -> None:
        values = {"label": 3, "score": 0.5, "name": "x", "raw": b"y", "points": [[1, 2], [3, 4]]}
        with self.opened(tmp_path, [Record(b"a", "1", values)]) as reader:
            found = {name: reader.columns[name][0] for name in values}
        np.testing.assert_equal(found, {**values, "points": np.array([[1, 2], [3, 4]])})

    def test_column_names(self, tmp_path: Path) -> None:
        image = ["width", "height", "channels", "format", "orientation", "flags"]
        with self.opened(tmp_path, some_records(2)) as reader:
            assert set(reader.columns) == {KEY, "label", *image}
            assert len(reader.columns) == 8
            assert "label" in reader.columns
            assert "labels" not in reader.columns
            assert set(reader[0].columns) == {"label", *image}
            with pytest.raises(KeyError, match=r"no column 'labels'; there are .*label"):
                reader.columns["labels"]
            with pytest.raises(KeyError):
                reader[0].columns[KEY]

    def test_the_index_knows_the_image(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, [Record(jpeg(30, 50), "a.jpg")]) as reader:
            columns = reader[0].columns
            assert (columns["width"], columns["height"], columns["channels"]) == (50, 30, 3)

    @pytest.mark.parametrize("classes", [[], ["cat", "dog"], ["", "a\udcff", "b\n", "\N{GRINNING FACE}"]])
    def test_classes(self, tmp_path: Path, classes: list[str]) -> None:
        with self.opened(tmp_path, some_records(2), classes=classes) as reader:
            assert reader.classes == tuple(classes)

    def test_metadata(self, tmp_path: Path) -> None:
        metadata = {"a": [1, 2.5, None, True, {"b": "\udcff"}], "": {}, "big": 2**70}
        with self.opened(tmp_path, some_records(2), metadata=metadata) as reader:
            assert reader.metadata == metadata

    # ---- identity and checks

    def test_equal_content_has_equal_ids(self, tmp_path: Path) -> None:
        ids = []
        for number, (count, seed) in enumerate([(9, 0), (9, 0), (9, 1), (8, 0)]):
            folder = tmp_path / str(number)
            folder.mkdir()
            with self.opened(folder, some_records(count, seed)) as reader:
                ids.append(reader.content_id)
        assert ids[0] == ids[1]
        assert len(set(ids)) == 3
        assert all(len(bytes.fromhex(i)) == 16 for i in ids)

    def test_a_whole_pack_has_no_problems(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, rich_records(), columns=COLUMNS, classes=["a"], metadata={"b": 1})
        with self.open(path, check="full") as reader:
            assert list(reader.problems()) == []

    def test_an_empty_pack_has_no_problems(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, [], columns=COLUMNS) as reader:
            assert list(reader.problems()) == []

    @pytest.mark.parametrize("option", [{"check": "fast"}, {"io": "read"}])
    def test_an_unknown_option_is_refused(self, tmp_path: Path, option: dict[str, Any]) -> None:
        path = self.make(tmp_path, some_records(1))
        with pytest.raises(ValueError, match="allowed are"):
            self.open(path, **option)

    # ---- life and death

    def test_closing_twice_is_allowed(self, tmp_path: Path) -> None:
        reader = self.opened(tmp_path, some_records(3))
        reader.close()
        reader.close()

    def test_a_closed_reader_reads_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(3)) as reader:
            reader.read([0])
            assert reader.columns["label"][1] == 1
            assert "k/00001.jpg" in reader
            assert "k/00002.jpg" in reader
        uses = [
            lambda: reader.read([0]),
            lambda: reader[0],
            lambda: list(reader),
            lambda: reader.lengths([0]),
            lambda: reader.columns["width"],
            lambda: reader.columns["label"],
            lambda: reader.key(0),
            lambda: "k/00001.jpg" in reader,
            lambda: "missing" in reader,
            lambda: reader.will_need([0]),
        ]
        for use in uses:
            with pytest.raises(ValueError, match="the reader is closed"):
                use()

    def test_the_context_manager_gives_the_reader_and_closes_it(self, tmp_path: Path) -> None:
        reader = self.opened(tmp_path, some_records(3))
        with reader as inside:
            assert inside is reader
        with pytest.raises(ValueError, match="closed"):
            reader.read([0])

    def test_what_was_handed_out_outlives_the_reader(self, tmp_path: Path) -> None:
        if not self.views_outlive_close:
            pytest.skip("this backend's views end with the reader")
        records = some_records(30)
        reader = self.opened(tmp_path, records)
        views, labels, keys = reader.read(range(30)), reader.columns["label"], reader.columns[KEY]
        names = list(keys)
        reader.close()
        del reader
        gc.collect()
        assert [bytes(view) for view in views] == [r.data for r in records]
        assert labels.tolist() == list(range(30))
        assert names == [r.key for r in records]

    def test_two_readers_of_one_pack_are_independent(self, tmp_path: Path) -> None:
        records = some_records(5)
        path = self.make(tmp_path, records)
        with self.open(path) as second:
            with self.open(path) as first:
                assert bytes(first[0].data) == records[0].data
            assert bytes(second[4].data) == records[4].data

    def test_reading_leaves_files_and_folders_as_they_are(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, some_records(20))
        before = _snapshot(tmp_path)
        _set_writable(tmp_path, False)
        try:
            with self.open(path) as reader:
                digest(reader)
                assert list(reader.problems()) == []
        finally:
            _set_writable(tmp_path, True)
        assert _snapshot(tmp_path) == before

    def test_the_content_id_does_not_change_with_reading(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, some_records(20))
        with self.open(path) as reader:
            before = reader.content_id
            digest(reader)
        with self.open(path) as reader:
            assert reader.content_id == before

    def test_a_pack_replaced_while_open_is_read_old_or_refused(self, tmp_path: Path) -> None:
        old, new = some_records(60, seed=1), some_records(60, seed=2)
        path = self.make(tmp_path, old)
        with self.open(path) as reader:
            reader.read([0])
            self.make(tmp_path, new, force=True)
            for index in range(60):
                try:
                    assert bytes(reader[index].data) == old[index].data
                except FormatError as error:
                    assert "was replaced" in str(error)  # noqa: PT017 (either is right)
        with self.open(path) as reader:
            assert [bytes(r.data) for r in reader] == [r.data for r in new]

    # ---- pickling and processes

    def test_a_pickled_reader_is_small_and_reads_the_same(self, tmp_path: Path) -> None:
        records = some_records(500)
        with self.opened(tmp_path, records, classes=[f"class {i}" for i in range(1000)]) as reader:
            list(reader.columns.values())
            raw = pickle.dumps(reader)
            expected = digest(reader)
        assert len(raw) < MAX_PICKLE
        with pickle.loads(raw) as copy:
            assert digest(copy) == expected
            assert (copy.io, copy.content_id) == (reader.io, reader.content_id)

    def test_a_pickled_reader_keeps_its_options(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, some_records(3))
        with self.open(path, verify=False) as reader, pickle.loads(pickle.dumps(reader)) as copy:
            assert pickle.dumps(copy) == pickle.dumps(reader)

    def test_a_reader_opened_by_a_relative_path_pickles_after_a_change_of_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = self.make(tmp_path, some_records(3))
        monkeypatch.chdir(tmp_path)
        with self.open(os.path.relpath(path)) as reader:
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            with pickle.loads(pickle.dumps(reader)) as copy:
                assert digest(copy) == digest(reader)

    def test_a_pickled_reader_refuses_another_pack_in_its_place(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, some_records(60, seed=1)) as reader:
            raw = pickle.dumps(reader)
        self.make(tmp_path, some_records(60, seed=2), force=True)
        with pytest.raises(FormatError, match="replaced"):
            pickle.loads(raw)

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
    def test_child_processes_read_the_same(self, tmp_path: Path, method: str) -> None:
        with self.opened(tmp_path, some_records(100)) as reader:
            expected = digest(reader)  # before the fork: what is cached goes along
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            children = [context.Process(target=send_digest, args=(reader, queue)) for _ in range(2)]
            for child in children:
                child.start()
            assert [queue.get(timeout=30) for _ in children] == [expected] * 2
            assert digest(reader) == expected
            for child in children:
                child.join(30)
            assert [child.exitcode for child in children] == [0, 0]
            queue.close()
            queue.join_thread()

    # ---- threads

    def test_many_threads_read_one_reader(self, tmp_path: Path) -> None:
        records = some_records(64)
        sums = [hash_of(r.data) for r in records]
        with self.opened(tmp_path, records) as reader:

            def work(seed: int) -> None:
                rng = random.Random(seed)
                for _ in range(50):
                    asked = [rng.randrange(64) for _ in range(4)]
                    assert [hash_of(view) for view in reader.read(asked)] == [sums[i] for i in asked]
                    assert int(reader.columns["label"][asked[0]]) == asked[0]

            _run_threads(work, 16)

    def test_closing_under_reading_threads_gives_right_bytes_or_an_error(self, tmp_path: Path) -> None:
        records = some_records(64)
        sums = [hash_of(r.data) for r in records]
        path = self.make(tmp_path, records)
        readers = [self.open(path)]
        done = threading.Event()

        def work(seed: int) -> None:
            if not seed:
                for _ in range(20):
                    fresh = self.open(path)
                    readers.append(fresh)
                    readers.pop(0).close()
                    gc.collect(0)
                done.set()
                return
            rng = random.Random(seed)
            while not done.is_set():
                reader, asked = readers[-1], [rng.randrange(64) for _ in range(3)]
                try:
                    found = [hash_of(view) for view in reader.read(asked)]
                except ValueError as error:
                    assert "closed" in str(error)  # noqa: PT017 (either is right)
                    continue
                assert found == [sums[i] for i in asked]

        _run_threads(work, 16)
        readers[0].close()


def _run_threads(work: Any, count: int) -> None:
    failures: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads meet in the middle of things, and none waits long for its turn
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


def _set_writable(folder: Path, writable: bool) -> None:
    """Take or give the right to write to a folder and all below (which does not stop the superuser)."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod((0o755 if path.is_dir() else 0o644) if writable else (0o555 if path.is_dir() else 0o444))
