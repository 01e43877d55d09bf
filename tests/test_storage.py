"""Writing packs: what is refused, what stays as it was, and how little memory and how few descriptors it takes."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from contracts.reader import COLUMNS, rich_records, some_records
from hypothesis import given
from hypothesis import strategies as st
from make import jpeg, picture
from PIL import Image

import packfmt
from packfmt import format as layout
from packfmt import storage
from packfmt.errors import CorruptError, FormatError
from packfmt.format import Directory, Layout, Section, Trailer
from packfmt.record import IMAGE_COLUMNS, KEY, Column, Record
from packfmt.sources.folder import FolderWriter
from packfmt.sources.parquet.writer import ParquetWriter
from packfmt.sources.webdataset.writer import TarWriter
from packfmt.storage import set_writer as sharding
from packfmt.storage.fileio import open_bytes
from packfmt.storage.keys import same_keys
from packfmt.storage.shard import read_frame
from packfmt.storage.shard_set import MAX_SHARDS, Manifest
from packfmt.storage.spool import ColumnSpool, Spool, TableSpool

ZEROS = dict.fromkeys((column.name for column in IMAGE_COLUMNS), 0)  # given, so that nothing is sniffed


def write(path: Path, records: Iterable[Record], **options: Any) -> Path:
    with storage.create(path, **options) as writer:
        for record in records:
            writer.write(record.data, record.key, **record.columns)
    return Path(writer.path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=[None, 1000], ids=["one file", "shards"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"shard_size": request.param}


# ---- what a writer refuses


@pytest.mark.parametrize("key", ["", b"a", None, 3])
def test_a_key_must_be_a_non_empty_str(tmp_path: Path, options: dict[str, Any], key: Any) -> None:
    with storage.create(tmp_path / "out", **options) as writer, pytest.raises(ValueError, match="non-empty str"):
        writer.write(b"x", key)


def test_lists_of_ints_beyond_63_bits_are_kept_exactly(tmp_path: Path) -> None:
    rows = [[2**64 - 1, 0, 3], [1, 2**63]]
    with storage.create(tmp_path / "out", columns=[Column("ids", "<u8", (None,))]) as writer:
        for number, row in enumerate(rows):
            writer.write(b"x", str(number), ids=row)
    with storage.open(tmp_path / "out") as reader:
        assert [value.tolist() for value in reader.columns["ids"]] == rows


def test_a_key_must_be_unicode(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out") as writer, pytest.raises(ValueError, match="is not text"):
        writer.write(b"x", "\ud800")


@pytest.mark.parametrize("between", [0, 30])
def test_two_records_with_one_key_are_refused(tmp_path: Path, options: dict[str, Any], between: int) -> None:
    records = some_records(between + 1)
    twice = Record(b"other", records[0].key, {"label": 0})
    with pytest.raises(ValueError, match=rf"records 0 and {between + 1} have the same key 'k/00000.jpg'"):
        write(tmp_path / "out", [*records, twice], **options)
    assert names(tmp_path) == []


def test_equal_hashes_alone_make_no_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packfmt.storage.keys.hash_key", len)
    keys = [b"aa", b"bb", b"c", b"bb"]
    assert list(same_keys({2}, keys)) == [(1, 3, b"bb")]


PIXELS = picture()
# What is no file's bytes, and what the error says to give instead: an expression of ``data``.
NOT_BYTES = {
    "nothing": (None, None),
    "a number": (3, None),
    "a list": ([1], None),
    "numbers of several bytes": (np.array([1, 2], "<u4"), None),
    "a number of its own": (np.uint8(3), None),
    "truth values": (np.array([True, False]), None),
    "pixels": (PIXELS, "encode_png(pixels)"),
    "gray pixels": (PIXELS[..., 0], "encode_png(pixels)"),
    "a view of pixels": (memoryview(PIXELS), "encode_png(numpy.asarray(pixels))"),
    "an opened image": (Image.fromarray(PIXELS), "packfmt.encode_png(numpy.asarray(image.convert('RGB')))"),
    "a path": (Path("a b.jpg"), "pathlib.Path('a b.jpg').read_bytes()"),
    "a name": ("a b.jpg", "pathlib.Path('a b.jpg').read_bytes()"),
    "a buffer of a file": (BytesIO(b"x"), "data.getvalue()"),
    "an open file": (BufferedReader(BytesIO(b"x")), "data.read()"),
}


WRITERS: dict[str, Callable[..., storage.Writer]] = {
    "out.bin": storage.create,
    "out.json": partial(storage.create, shard_size=1000),
    "out.lmdb": storage.create,
    "out.tar": TarWriter,
    "out.parquet": ParquetWriter,
    "out": FolderWriter,
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_takes_pixels_for_a_file(tmp_path: Path, name: str) -> None:
    with WRITERS[name](tmp_path / name) as writer:
        with pytest.raises(TypeError, match=r"out.*: record 0, key 'a\.jpg': expected the bytes of an encoded image"):
            writer.write(PIXELS, "a.jpg")
        assert len(writer) == 0
        writer.write(b"x", "b.jpg")


@pytest.mark.parametrize(("data", "advice"), NOT_BYTES.values(), ids=NOT_BYTES)
def test_data_must_be_flat_bytes(tmp_path: Path, data: Any, advice: str | None) -> None:
    with storage.create(tmp_path / "out") as writer, pytest.raises(TypeError, match="expected the bytes of") as error:
        writer.write(data, "a.jpg")
    assert advice is None or advice in str(error.value)


@pytest.mark.torch
def test_tensors_are_told_how_to_become_bytes(tmp_path: Path) -> None:
    import torch

    colour = torch.from_numpy(PIXELS).permute(2, 0, 1)
    flat = torch.frombuffer(bytearray(jpeg()), dtype=torch.uint8)
    with storage.create(tmp_path / "out") as writer:
        for data, advice in (
            (colour, "encode_png(pixels.permute(1, 2, 0).cpu().numpy())"),
            (colour[0], "encode_png(pixels.cpu().numpy())"),
            (flat, "data.cpu().numpy()"),
        ):
            with pytest.raises(TypeError, match=re.escape(advice)):
                writer.write(data, "a.jpg")
        writer.write(packfmt.encode_png(colour.permute(1, 2, 0).cpu().numpy()), "colour")
        writer.write(packfmt.encode_png(colour[0].cpu().numpy()), "gray")
        writer.write(flat.cpu().numpy(), "flat")
    with storage.open(tmp_path / "out") as reader:
        np.testing.assert_array_equal(packfmt.decode(reader["colour"].data), PIXELS)
        np.testing.assert_array_equal(packfmt.decode(reader["gray"].data)[..., 0], PIXELS[..., 0])
        assert reader["flat"].data == jpeg()


def test_a_record_of_pixels_is_refused() -> None:
    with pytest.raises(TypeError, match=r"record 'a\.jpg': expected the bytes of an encoded image"):
        Record(PIXELS, "a.jpg")


@pytest.mark.parametrize("image", [Image.fromarray(PIXELS), Image.fromarray(PIXELS).convert("P")], ids=["RGB", "P"])
def test_the_advice_for_pixels_works(tmp_path: Path, image: Image.Image) -> None:
    pixels = np.asarray(image.convert("RGB"))
    with storage.create(tmp_path / "out.bin") as writer:
        writer.write(packfmt.encode_png(pixels), "array.png")
    with storage.open(tmp_path / "out.bin") as reader:
        np.testing.assert_array_equal(packfmt.decode(reader[0].data), pixels)


@pytest.mark.parametrize(
    "data", [b"abc", bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8), array("b", b"abc")]
)
def test_any_buffer_is_stored(tmp_path: Path, data: Any) -> None:
    path = write(tmp_path / "out", [Record(data, "a"), Record(b"z", "b")])
    with storage.open(path, check="full") as reader:
        assert [bytes(r.data) for r in reader] == [bytes(data), b"z"]


def test_a_buffer_with_gaps_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out") as writer:
        writer.write(b"a", "a")
        with pytest.raises((BufferError, TypeError, ValueError)):
            writer.write(memoryview(b"abcdef")[::2], "b", **ZEROS)
        writer.write(b"c", "c")
    with storage.open(tmp_path / "out", check="full") as reader:
        assert [bytes(r.data) for r in reader] == [b"a", b"c"]


@pytest.mark.parametrize("given", [{"format": "x"}, {"flags": 1}, {"width": 3}, {"width": 3, "height": 3}])
def test_a_column_under_a_name_of_packfmt_s_own_is_refused_and_not_overwritten(
    tmp_path: Path, options: dict[str, Any], given: dict[str, Any]
) -> None:
    with storage.create(tmp_path / "out", **options) as writer:
        with pytest.raises(ValueError, match=rf"has columns \[.*'{max(given)}'.*\]: these names are for what packfmt"):
            writer.write(jpeg(), "a", **given)
        writer.write(jpeg(), "b")


@pytest.mark.parametrize("columns", [{}, {"label": 1, "extra": 2}, {"extra": 2}])
def test_columns_must_be_the_same_for_all_records(tmp_path: Path, columns: dict[str, int]) -> None:
    with storage.create(tmp_path / "out") as writer:
        writer.write(b"a", "a", label=0)
        with pytest.raises(ValueError, match=r"record 1 \('b'\) lacks columns .* and has unknown columns"):
            writer.write(b"b", "b", **columns)


def test_a_declared_column_must_be_given(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out", columns=[Column("label")]) as writer:
        with pytest.raises(ValueError, match=r"lacks columns \['label'\]"):
            writer.write(b"a", "a")
        writer.write(b"a", "a", label=1)


BAD_VALUES = [
    ("<u1", (), -1),
    ("<u1", (), 256),
    ("<u1", (), 1.0),
    ("<u1", (), "1"),
    ("<u1", (), None),
    ("<u1", (), [1]),
    ("<i8", (), 2**63),
    ("<f2", (), 1e6),
    ("<f4", (), 1e39),
    ("<f4", (), "nan"),
    ("|b1", (), 2),
    ("|b1", (), "no"),
    ("|b1", (), None),
    ("<f4", (3,), [1.0, 2.0]),
    ("<f4", (3,), [[1.0, 2.0, 3.0]]),
    ("<f4", (3,), [1e39, 0, 0]),
    ("<u2", (2,), [1, 65536]),
    ("<u2", (2,), [1, -1]),
    ("<u2", (2,), [1.0, 2.0]),
    ("<u2", (2,), ["a", "b"]),
    ("<u2", (2,), [1, None]),
    ("|b1", (2,), [0, 2]),
    ("<f4", (None, 4), [[1, 2, 3]]),
    ("<f4", (None, 4), [1, 2, 3, 4]),
    ("<f4", (None, 4), [[1, 2, 3, 4], [1]]),
    ("<i8", (2,), np.array([2**63, 0], "<u8")),
]


@pytest.mark.parametrize(("dtype", "shape", "value"), BAD_VALUES)
def test_a_value_that_does_not_fit_is_refused_and_leaves_no_trace(
    tmp_path: Path, dtype: str, shape: tuple[int | None, ...], value: Any
) -> None:
    good = np.zeros([size or 0 for size in shape], dtype)
    with storage.create(tmp_path / "out", columns=[Column("c", dtype, shape)]) as writer:
        writer.write(b"a", "a", c=good if shape else good.item())
        with pytest.raises(ValueError, match="column 'c'"):
            writer.write(b"b", "b", c=value)
        writer.write(b"c", "c", c=good if shape else good.item())
    with storage.open(tmp_path / "out", check="full") as reader:
        assert [r.key for r in reader] == ["a", "c"]


@pytest.mark.parametrize(("kind", "value"), [("text", b"a"), ("text", 1), ("bytes", "a"), ("bytes", 3), ("text", None)])
def test_a_value_of_another_kind_is_refused(tmp_path: Path, kind: Any, value: Any) -> None:
    column = Column("c", "|u1", (None,), kind)
    with (
        storage.create(tmp_path / "out", columns=[column]) as writer,
        pytest.raises(ValueError, match=rf"column 'c': .* is not {kind}"),
    ):
        writer.write(b"a", "a", c=value)


@pytest.mark.parametrize("value", [None, object(), 1j, {"a": 1}, [["a"]], np.array(["a"]), 2**70])
def test_no_column_is_inferred_from_what_none_can_hold(tmp_path: Path, value: Any) -> None:
    with storage.create(tmp_path / "out") as writer, pytest.raises(TypeError, match="column 'c'"):
        writer.write(b"a", "a", c=value)


def test_a_refused_first_record_does_not_decide_the_columns(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out", columns=[Column("small", "|u1")]) as writer:
        with pytest.raises(ValueError, match="column 'small'"):
            writer.write(b"a", "a", small=256, label="cat")
        writer.write(b"a", "a", small=255, label=1)
    with storage.open(tmp_path / "out") as reader:
        assert reader.columns["label"].tolist() == [1]


# ---- what is inferred from several records


@pytest.fixture(params=[{}, {"shard_size": 1}, {"backend": "lmdb"}], ids=["one file", "a shard each", "LMDB"])
def every(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def inferred(path: Path, rows: Iterable[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The user's columns of a pack of these rows: arrays where they have a fixed shape, else lists of lists."""
    path = write(path, (Record(b"x" * 9, str(place), row) for place, row in enumerate(rows)), **options)
    with storage.open(path, check="full") as reader:
        own = {name: reader.columns[name] for name in reader.columns if name not in (KEY, *ZEROS)}
        return {
            name: np.array(column) if isinstance(column, np.ndarray) else [value.tolist() for value in column[:]]
            for name, column in own.items()
        }


def test_arrays_that_are_all_of_one_shape_make_a_column_of_it(tmp_path: Path, every: dict[str, Any]) -> None:
    rows = [{"hot": np.eye(4, dtype=np.float32)[place], "grid": [[place, 1]] * 3} for place in range(3)]
    found = inferred(tmp_path / "out", rows, **every)
    assert (found["hot"].dtype.str, found["hot"].tolist()) == ("<f4", np.eye(4)[:3].tolist())
    assert found["grid"].shape == (3, 3, 2)


@pytest.mark.parametrize("odd", [0, 2, 4])
def test_one_of_another_length_makes_the_column_ragged_and_nothing_is_lost(
    tmp_path: Path, every: dict[str, Any], odd: int
) -> None:
    values = [[place, 7.5, 1.0] for place in range(5)]
    values[odd] = [2.0]
    assert inferred(tmp_path / "out", [{"v": value} for value in values], **every)["v"] == values


def test_an_empty_list_does_not_decide_what_a_column_holds(tmp_path: Path, every: dict[str, Any]) -> None:
    rows = [{"ids": [], "places": []}, {"ids": [], "places": []}, {"ids": [2**60 + 1], "places": [[1.5, 2.0]]}]
    found = inferred(tmp_path / "out", [*rows, {"ids": [], "places": []}], **every)
    assert found == {"ids": [[], [], [2**60 + 1], []], "places": [[], [], [[1.5, 2.0]], []]}


def test_the_first_value_after_empty_lists_is_kept_to(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out") as writer:
        for place, value in enumerate(([], [0.5], [3])):
            writer.write(b"x", str(place), v=value)
        with pytest.raises(ValueError, match=r"column 'v'.*its shape is"):
            writer.write(b"x", "more", v=[[1, 2]])
    with storage.open(tmp_path / "out") as reader:
        assert [value.tolist() for value in reader.columns["v"][:]] == [[], [0.5], [3.0]]


def test_a_refused_record_does_not_decide_what_empty_lists_are(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out", columns=[Column("small", "|u1")]) as writer:
        writer.write(b"a", "a", small=1, v=[])
        with pytest.raises(ValueError, match="column 'small'"):
            writer.write(b"b", "b", small=256, v=[[1, 2]])
        writer.write(b"b", "b", small=1, v=[0.5])
    with storage.open(tmp_path / "out") as reader:
        assert reader.columns["v"][1].tolist() == [0.5]


def test_boxes_stay_ragged_with_what_has_an_entry_for_each(tmp_path: Path, every: dict[str, Any]) -> None:
    box, rows = [0, 0, 5, 5], []
    for place in range(3):
        rows.append({"boxes": [box, box], "labels": [place, 1], "position": [0.5, 1.5, 2.5]})
    found = inferred(tmp_path / "out", rows, **every)
    assert found["boxes"] == [[box, box]] * 3
    assert found["labels"] == [[0, 1], [1, 1], [2, 1]]
    assert found["position"].shape == (3, 3)


def test_a_declared_ragged_column_stays_so(tmp_path: Path, every: dict[str, Any]) -> None:
    column = Column("v", "<f8", (None,))
    assert inferred(tmp_path / "out", [{"v": [1.0, 2.0]}] * 3, columns=[column], **every)["v"] == [[1.0, 2.0]] * 3


def test_shards_written_anew_are_those_that_were_declared(tmp_path: Path) -> None:
    rows = [{"v": [place] * (2 + (place == 4)), "name": f"n{place}", "sure": True} for place in range(6)]
    for folder, columns in (("one", []), ("two", [Column("v", "<i8", (None,))])):
        (tmp_path / folder).mkdir()
        records = (Record(b"x" * 9, str(place), row) for place, row in enumerate(rows))
        write(tmp_path / folder / "out", records, columns=columns, shard_size=20)
    one, two = (sorted((tmp_path / folder).iterdir()) for folder in ("one", "two"))
    assert len(one) == 4
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


# ---- labels given by name


@pytest.mark.parametrize("label", ["cat", np.str_("cat")])
def test_class_names_become_their_numbers(tmp_path: Path, every: dict[str, Any], label: str) -> None:
    rows = [{"label": "dog", "labels": ["cat"]}, {"label": label, "labels": ["dog", "cat"]}, {"label": 0, "labels": []}]
    found = inferred(tmp_path / "out", rows, classes=["dog", "cat"], **every)
    assert found["label"].tolist() == [0, 1, 0]
    assert found["labels"] == [[1], [0, 1], []]


@pytest.mark.parametrize("values", [{"label": "cow"}, {"labels": ["dog", "cow"]}])
def test_a_class_that_there_is_not(tmp_path: Path, values: dict[str, Any]) -> None:
    message = r"out: record 0 \('a'\): labels? 'cow' is none of the classes 'dog', 'cat'"
    with storage.create(tmp_path / "out", classes=["dog", "cat"]) as writer, pytest.raises(ValueError, match=message):
        writer.write(b"x", "a", **values)


def test_a_label_declared_as_text_stays_text(tmp_path: Path) -> None:
    columns = [Column("label", "|u1", (None,), "text")]
    path = write(tmp_path / "out", [Record(b"x", "a", {"label": "cow"})], columns=columns, classes=["dog"])
    with storage.open(path) as reader:
        assert reader.columns["label"][0] == "cow"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324])
def test_odd_floats_come_back_bit_for_bit(tmp_path: Path, value: float) -> None:
    path = write(tmp_path / "out", [Record(b"a", "a", {"c": value})])
    with storage.open(path) as reader:
        assert struct.pack("<d", reader.columns["c"][0]) == struct.pack("<d", value)


@pytest.mark.parametrize(
    "columns",
    [
        [Column("a"), Column("a", "<f4")],
        [Column(KEY)],
        [Column("width")],
    ],
)
def test_a_column_declared_twice_or_otherwise_is_refused(tmp_path: Path, columns: list[Column]) -> None:
    with pytest.raises(ValueError, match="declared twice, or is packfmt's own"):
        storage.create(tmp_path / "out", columns=columns)


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": math.nan},
        {"a": [math.inf]},
        {"a": b"bytes"},
        {"a": {1, 2}},
        {"a": np.int64(1)},
        {1: "a"},
        {"a": [{2: "b", "2": "c"}]},
        {None: 1},
        {"a": 10**5000},
    ],
)
def test_metadata_that_would_not_come_back_is_refused_at_once(tmp_path: Path, metadata: dict[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"metadata|JSON|digit"):
        storage.create(tmp_path / "out", metadata=metadata)
    assert names(tmp_path) == []


def test_metadata_nested_without_end_is_refused(tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for _ in range(500):
        nested = {"a": nested}
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        storage.create(tmp_path / "out", metadata=nested)


def test_metadata_is_taken_as_it_was(tmp_path: Path) -> None:
    metadata = {"list": [1]}
    with storage.create(tmp_path / "out", metadata=metadata) as writer:
        metadata["list"].append(math.nan)
        writer.write(b"a", "a")
    with storage.open(tmp_path / "out") as reader:
        assert reader.metadata == {"list": [1]}


@pytest.mark.parametrize("classes", ["cat", [1, 2], [b"cat"], [None]])
def test_classes_must_be_a_list_of_str(tmp_path: Path, classes: Any) -> None:
    with pytest.raises(ValueError, match="list of str"):
        storage.create(tmp_path / "out", classes=classes)


@pytest.mark.parametrize("size", [0, -1])
def test_a_shard_size_must_be_positive(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        storage.create(tmp_path / "out", shard_size=size)


def test_a_single_file_must_not_look_like_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name of a manifest"):
        storage.create(tmp_path / "out.json")


# ---- targets


@pytest.mark.parametrize("force", [False, True])
def test_a_missing_folder_is_named(tmp_path: Path, options: dict[str, Any], force: bool) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder to write to: '.*/none'"):
        storage.create(tmp_path / "none" / "out", force=force, **options)


def test_a_folder_in_place_of_the_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder; name a file"):
        storage.create(tmp_path / "out", force=True)


def test_an_existing_target_is_refused_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "out", some_records(3), **options)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"exists; choose another name or force overwriting \(--force\)"):
        storage.create(tmp_path / "out", **options)
    assert path.read_bytes() == before


def test_a_dangling_link_counts_as_a_target(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        storage.create(tmp_path / "out")


def test_force_replaces(tmp_path: Path, options: dict[str, Any]) -> None:
    write(tmp_path / "out", some_records(3, seed=1), **options)
    path = write(tmp_path / "out", some_records(30, seed=2), force=True, **options)
    with storage.open(path, check="full") as reader:
        assert len(reader) == 30


def test_replacing_a_pack_removes_its_shards_and_no_others(tmp_path: Path) -> None:
    write(tmp_path / "out", some_records(30), shard_size=1000)
    (tmp_path / "out-99999.bin").write_bytes(b"not of this pack")
    path = write(tmp_path / "out", some_records(2), shard_size=100_000, force=True)
    with storage.open(path) as reader:
        assert len(reader) == 2
        assert names(tmp_path) == sorted([Path(reader.files[0]).name, "out-99999.bin", "out.json"])


def test_new_shards_are_called_by_their_set_while_the_old_have_their_names(tmp_path: Path) -> None:
    shards = []
    for seed in (1, 2, 2, 2):
        path = write(tmp_path / "out", some_records(6, seed=seed), shard_size=5000, force=True)
        shards.append([name for name in names(tmp_path) if name != "out.json"])
    with storage.open(path) as reader, contextlib.closing(open_bytes(reader.files[0], "mmap")) as source:
        member = read_frame(source, reader.files[0])[1].member
    assert member is not None
    assert [len(found) for found in shards] == [member.count] * 4
    called = f"out-{member.set_id[:8]}-00000.bin"
    assert [found[0] for found in shards] == ["out-00000.bin", called, "out-00000.bin", called]


@pytest.mark.parametrize("name", ["out", "out.bin", "out.json"])
def test_the_names_of_shards(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, some_records(9), shard_size=4000)
    assert path == tmp_path / "out.json"
    assert names(tmp_path)[0] == "out-00000.bin"


def test_shards_hold_at_most_the_asked_bytes_or_one_record(tmp_path: Path) -> None:
    sizes = [10, 10, 10, 50, 10, 31, 10, 0, 0]
    path = write(tmp_path / "out", [Record(bytes(n), str(i)) for i, n in enumerate(sizes)], shard_size=30)
    counts = []
    for shard in sorted(tmp_path.glob("out-*.bin")):
        with storage.open(shard) as reader:
            counts.append(reader.lengths(range(len(reader))).tolist())
    assert counts == [[10, 10, 10], [50], [10], [31], [10, 0, 0]]
    with storage.open(path) as reader:
        assert reader.lengths(range(9)).tolist() == sizes


def test_a_refused_record_that_began_a_shard_leaves_no_empty_shard(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out", shard_size=10) as writer:
        writer.write(bytes(10), "a", label=1)
        with pytest.raises(ValueError, match="lacks columns"):
            writer.write(bytes(10), "b")
    assert names(tmp_path) == ["out-00000.bin", "out.json"]


# ---- states


def test_nothing_is_seen_before_close(tmp_path: Path, options: dict[str, Any]) -> None:
    writer = storage.create(tmp_path / "out", **options)
    for record in some_records(20):
        writer.write(record.data, record.key)
    assert [name for name in names(tmp_path) if not name.startswith(".packfmt-")] == []
    writer.close()
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_an_exception_inside_with_leaves_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    def interrupted() -> Iterator[Record]:
        yield from some_records(20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", interrupted(), **options)
    assert names(tmp_path) == []


def test_discarding_leaves_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    writer = storage.create(tmp_path / "out", **options)
    writer.write(b"a", "a")
    writer.discard()
    writer.discard()
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="was thrown away"):
        writer.write(b"b", "b")
    with pytest.raises(ValueError, match="was thrown away"):
        writer.close()


def test_closing_twice_and_discarding_afterwards_change_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    with storage.create(tmp_path / "out", **options) as writer:
        writer.write(b"a", "a")
        writer.close()
    writer.close()
    writer.discard()
    with storage.open(writer.path, check="full") as reader:
        assert (len(reader), reader.content_id) == (1, writer.content_id)


def test_nothing_can_be_added_once_closed(tmp_path: Path, options: dict[str, Any]) -> None:
    with storage.create(tmp_path / "out", **options) as writer:
        writer.write(b"a", "a")
    with pytest.raises(ValueError, match="records cannot be added"):
        writer.write(b"b", "b")


def test_a_writer_says_what_it_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    with storage.create(tmp_path / "out", **options) as writer:
        for record in some_records(9):
            writer.write(record.data, record.key)
        assert len(writer) == 9
    assert {Path(path).name for path in writer.files} == set(names(tmp_path))


# ---- the same bytes


def test_the_same_records_give_the_same_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    contents = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "out", rich_records(), columns=COLUMNS, metadata={"b": 1, "a": 2}, classes=["x"], **options)
        contents.append({name: (folder / name).read_bytes() for name in names(folder)})
    assert contents[0] == contents[1]


def test_the_order_of_columns_does_not_matter(tmp_path: Path) -> None:
    first = write(tmp_path / "1", [Record(b"a", "a", {"x": 1, "y": 2})])
    second = write(tmp_path / "2", [Record(b"a", "a", {"y": 2, "x": 1})], columns=[Column("y")])
    assert first.read_bytes() == second.read_bytes()


def test_spooling_to_disk_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write(tmp_path / "1", rich_records(), columns=COLUMNS)
    monkeypatch.setattr("packfmt.storage.spool.LIMIT", 16)
    spooled = write(tmp_path / "2", rich_records(), columns=COLUMNS)
    assert plain.read_bytes() == spooled.read_bytes()


def test_reading_a_pack_and_writing_it_again_gives_the_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "1", rich_records(), columns=COLUMNS, classes=["a"])
    with storage.open(first) as reader:
        second = write(tmp_path / "2", list(reader), columns=COLUMNS, classes=reader.classes)
    assert first.read_bytes() == second.read_bytes()


@given(parts=st.lists(st.binary(max_size=40), max_size=30), limit=st.integers(1, 64))
def test_a_spool_gives_back_what_was_appended(tmp_path_factory: Any, parts: list[bytes], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packfmt.storage.spool.LIMIT", limit)
        spool = Spool(tmp_path_factory.getbasetemp())
        for part in parts:
            spool.append(part)
        assert b"".join(spool.chunks()) == b"".join(parts) == b"".join(spool.chunks())
        assert spool.size == len(b"".join(parts))
        spool.close()


@given(values=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20)), limit=st.integers(8, 64))
def test_a_ragged_spool_gives_back_its_values(tmp_path_factory: Any, values: list[str], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packfmt.storage.spool.LIMIT", limit // 8 * 8)
        spool = ColumnSpool(Column("c", "|u1", (None,), "text"), tmp_path_factory.getbasetemp())
        for value in values:
            spool.append(spool.encode(value))
        assert [raw.decode() for raw in spool.each()] == values
        spool.close()


NUMBERS = (Column("flag", "|b1"), Column("half", "<f2"), Column("large", "<u8"), Column("word", "|u1", (None,), "text"))


@given(
    rows=st.lists(st.tuples(st.booleans(), st.floats(width=16), st.integers(0, 2**64 - 1), st.text("abc"))),
    limit=st.integers(8, 64),
)
def test_a_table_gives_back_section_by_section_what_came_record_by_record(
    tmp_path_factory: Any, rows: list[tuple[Any, ...]], limit: int
) -> None:
    def section(name: str, dtype: str) -> list[Any]:
        return np.frombuffer(b"".join(table.chunks(name)), dtype).tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packfmt.storage.spool.LIMIT", limit // 8 * 8)
        table = TableSpool(NUMBERS, tmp_path_factory.getbasetemp())
        for place, row in enumerate(rows):
            values = dict(zip(["flag", "half", "large", "word"], row, strict=True))
            table.append(table.encode((place, 2**64 - 1 - place, place * place), values))

    assert section("index.offset", "<u8") == list(range(len(rows)))
    assert section("index.length", "<u8") == [2**64 - 1 - place for place in range(len(rows))]
    assert section("index.checksum", "<u8") == [place * place for place in range(len(rows))]
    assert section("column.flag", "|b1") == [row[0] for row in rows]
    np.testing.assert_array_equal(section("column.half", "<f2"), [row[1] for row in rows])
    assert section("column.large", "<u8") == [row[2] for row in rows]
    assert b"".join(table.chunks("column.word")).decode() == "".join(row[3] for row in rows)
    assert section("rows.word", "<u8") == np.cumsum([0] + [len(row[3]) for row in rows]).tolist()
    table.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("flag", 2), ("flag", "no"), ("flag", np.ones(3)), ("half", 1e9), ("large", -1), ("large", 0.5), ("large", None)],
)
def test_a_table_names_the_column_that_a_value_does_not_fit(tmp_path: Path, name: str, value: Any) -> None:
    table = TableSpool(NUMBERS, tmp_path)
    with pytest.raises(ValueError, match=f"column '{name}'") as raised:
        table.encode((0, 0, 0), {"flag": True, "half": 1.0, "large": 1, "word": "w", name: value})
    assert repr(value) in str(raised.value)


# ---- memory and descriptors


def test_memory_stays_flat_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packfmt.storage.spool.LIMIT", 1 << 14)
    monkeypatch.setattr("packfmt.storage.shard_writer.PORTION", 1 << 14)
    monkeypatch.setattr("packfmt.storage.shard_writer.AHEAD", 1 << 16)
    peaks = []
    for count in (5_000, 25_000):
        with storage.create(tmp_path / str(count)) as writer:
            writer.write(b"warm", "up", label=0, **ZEROS)
            gc.collect()
            tracemalloc.start()
            for index in range(count):
                writer.write(b"x", f"{index}/" + "long" * 20, label=index, **ZEROS)
            writer.close()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 20_000 * 8 * 5  # only the hashes of the keys, while they are sorted


def test_memory_and_descriptors_stay_flat_over_many_shards(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out", shard_size=1000) as writer:
        for index in range(20):
            writer.write(bytes(990), f"{index}", **ZEROS)
        before = open_descriptors()
        gc.collect()
        tracemalloc.start()
        for index in range(20, 220):
            writer.write(bytes(990), f"{index}", **ZEROS)
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert open_descriptors() == before
        assert grown < 220 * 20_000
    with storage.open(writer.path) as reader:
        assert (len(reader), len(reader.files)) == (220, 221 - 1)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is released without the collector is released at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("close", [True, False])
def test_thousands_of_opens_leave_no_descriptor(tmp_path: Path, io: Any, close: bool) -> None:
    path = write(tmp_path / "out", some_records(3))
    before = open_descriptors()
    for index in range(2000 if close else 300):
        reader = storage.open(path, io=io)
        assert len(reader[index % 3].data)
        reader.columns["label"]
        if close:
            reader.close()
    del reader
    assert open_descriptors() == before


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_set_of_shards_leaves_no_descriptor(tmp_path: Path) -> None:
    path = write(tmp_path / "out", some_records(30), shard_size=1000)
    before = open_descriptors()
    for _ in range(20):
        reader = storage.open(path)
        reader.read(range(30))
        list(reader.columns.values())
    del reader
    assert open_descriptors() == before


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("content", [b"", b"x", b"\x89packfmt\r\n\x1a\n" + bytes(500), bytes(5000)])
def test_failed_opens_leave_no_descriptor(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    before = open_descriptors()
    for _ in range(300):
        with pytest.raises(FormatError):
            storage.open(path)
    assert open_descriptors() == before


def test_closing_frees_the_file_although_columns_were_used(tmp_path: Path) -> None:
    path = write(tmp_path / "out", some_records(3))
    before = open_descriptors()
    with storage.open(path) as reader:
        reader.columns["label"][0]
        reader.read([0])
    assert open_descriptors() == before


def test_closing_during_a_read_does_not_hand_the_descriptor_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = some_records(3)
    reader = storage.open(write(tmp_path / "out", records), io="pread", verify=False)
    reader.offsets([0])
    reader.lengths([0])
    (tmp_path / "other").write_bytes(bytes(10_000))
    real = os.pread
    others: list[int] = []

    def pread(*args: int) -> bytes:
        reader.close()
        others.append(os.open(tmp_path / "other", os.O_RDONLY))
        return real(*args)

    monkeypatch.setattr("packfmt.storage.fileio.os.pread", pread)
    assert bytes(reader.read([0])[0]) == records[0].data
    for other in others:
        os.close(other)


FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from packfmt import storage
with storage.create(sys.argv[1], shard_size=100) as writer:
    for i in range(200):
        writer.write(b"%090d" % i, str(i), label=i)
with storage.open(writer.path) as reader:
    assert len(reader.files) == 200, reader.files
    for step in (1, 7, 199):
        for i in range(0, 200, step):
            assert int(bytes(reader[i].data)) == i and reader.key(i) == str(i)
    assert reader.columns["label"].tolist() == list(range(200))
    assert [int(bytes(v)) for v in reader.read(range(199, -1, -1))] == list(range(199, -1, -1))
    assert not list(reader.problems())
"""


def test_hundreds_of_shards_with_64_descriptors(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path / "out")], check=True, timeout=60)


# ---- numbers beyond 32 bits


def test_records_beyond_4_gib_in_a_sparse_file(tmp_path: Path) -> None:
    places = [64, 2**31 - 1, 2**31 + 1, 2**32 - 1, 2**32 + 1, 2**37 - 3, 2**37 + 2**36]
    path = tmp_path / "sparse.bin"
    records = write_sparse(path, places)
    assert path.stat().st_blocks * 512 < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for io in ("mmap", "pread"):
        with storage.open(path, io=io) as reader:
            assert reader.offsets(range(len(places))).tolist() == places
            assert [bytes(view) for view in reader.read(range(len(places) - 1, -1, -1))] == records[::-1]
            reader.will_need(range(len(places)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def write_sparse(path: Path, places: list[int]) -> list[bytes]:
    """A shard whose records stand at these offsets, with holes between, which only a full check minds."""
    records = [b"r%d" % index for index in range(len(places))]
    keys = [b"%d" % place for place in places]
    stops = np.cumsum([0] + [len(key) for key in keys])
    contents = {
        "index.offset": np.array(places, "<u8").tobytes(),
        "index.length": np.array([len(r) for r in records], "<u8").tobytes(),
        "index.checksum": np.array([layout.record_checksum(r, i) for i, r in enumerate(records)], "<u8").tobytes(),
        "rows.key": stops.astype("<u8").tobytes(),
        "column.key": b"".join(keys),
    }
    end = places[-1] + len(records[-1])
    plan = Layout.plan(end, {name: len(content) for name, content in contents.items()})
    sections = {n: Section(s.offset, s.size, xxhash.xxh3_64_intdigest(contents[n])) for n, s in plan.sections.items()}
    raw = Directory(sections, (Column(KEY, "|u1", (None,), "text"),), (), {}).encode()
    directory = Section(plan.directory_offset, len(raw), xxhash.xxh3_64_intdigest(raw))
    trailer = Trailer(len(places), end, directory, plan.file_size(len(raw)), bytes(16))
    with path.open("wb") as file:
        file.write(layout.encode_header())
        parts = [(s.offset, contents[n]) for n, s in plan.sections.items()]
        for offset, content in [*zip(places, records, strict=True), *parts, (plan.directory_offset, raw)]:
            file.seek(offset)
            file.write(content)
        file.seek(trailer.file_size - layout.TRAILER.size)
        file.write(trailer.encode())
    return records


def test_opening_millions_of_records_takes_no_memory(tmp_path: Path) -> None:
    """The index is never read as a whole: a sparse one of 64 million records, all of 0 bytes."""
    count, path = 1 << 26, tmp_path / "many.bin"
    sizes = layout.section_sizes(count, [Column(KEY, "|u1", (None,), "text")], {"key": 0})
    plan = Layout.plan(64, sizes)
    raw = Directory(plan.sections, (Column(KEY, "|u1", (None,), "text"),), (), {}).encode()
    directory = Section(plan.directory_offset, len(raw), xxhash.xxh3_64_intdigest(raw))
    trailer = Trailer(count, 64, directory, plan.file_size(len(raw)), bytes(16))
    with path.open("wb") as file:
        file.write(layout.encode_header())
        file.seek(plan.directory_offset)
        file.write(raw)
        file.seek(trailer.file_size - layout.TRAILER.size)
        file.write(trailer.encode())
    tracemalloc.start()
    with storage.open(path) as reader:
        assert len(reader) == count
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# ---- what open takes


def test_a_list_of_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "out", some_records(30), shard_size=9000)
    with storage.open(path) as whole, storage.open(sorted(tmp_path.glob("*.bin"), reverse=True)) as turned:
        assert turned[0].key == whole[len(whole) - len(storage.open(whole.files[-1]))].key
        assert len(turned) == 30


# ---- shards know their set


def written_set(folder: Path, name: str, seed: int = 0, **options: Any) -> Path:
    return write(folder / name, some_records(20, seed=seed), shard_size=9000, **options)


@pytest.mark.parametrize("lost", [0, 1, -1])
@pytest.mark.parametrize("listed", [False, True], ids=["pattern", "list"])
def test_a_part_of_a_set_is_refused(tmp_path: Path, lost: int, listed: bool) -> None:
    shards = sorted(Path(path) for path in storage.open(written_set(tmp_path, "out")).files)
    shards.pop(lost).unlink()
    message = rf"{len(shards)} of {len(shards) + 1} shards of a set, .*; missing are 0000{lost % (len(shards) + 1)}\."
    with pytest.raises(FormatError, match=message):
        storage.open(shards if listed else tmp_path / "out-*.bin")
    for shard in shards:  # as the message says
        storage.open(shard, check="full").close()


def test_many_missing_shards_are_not_all_listed(tmp_path: Path) -> None:
    write(tmp_path / "out", some_records(20), shard_size=1)
    for shard in sorted(tmp_path.glob("*.bin"))[:-1]:
        shard.unlink()
    with pytest.raises(FormatError, match=r"missing are 00000, 00001, 00002, 00003, 00004, \.\.\.\. Restore"):
        storage.open(tmp_path / "out-*.bin")


@pytest.mark.parametrize("listed", [False, True], ids=["pattern", "list"])
def test_shards_of_two_sets_are_refused_and_the_manifests_named(tmp_path: Path, listed: bool) -> None:
    one, two = written_set(tmp_path, "out-a"), written_set(tmp_path, "out-b", seed=1)
    shards = sorted(tmp_path.glob("*.bin"))
    message = r"not the shards of one pack: .*number 00000 of .* Open .*\.json or "
    with pytest.raises(FormatError, match=message) as caught:
        storage.open(shards if listed else tmp_path / "out-*.bin")
    assert str(one) in str(caught.value)
    assert str(two) in str(caught.value)


def test_sets_of_the_same_records_are_told_apart(tmp_path: Path) -> None:
    written_set(tmp_path, "out-a", metadata={"made": 1})
    written_set(tmp_path, "out-b", metadata={"made": 2})
    with pytest.raises(FormatError, match="not the shards of one pack"):
        storage.open(tmp_path / "out-*.bin")


def test_a_set_with_a_shard_of_no_set_is_refused(tmp_path: Path) -> None:
    written_set(tmp_path, "out")
    write(tmp_path / "out-x.bin", some_records(3, seed=1))
    with pytest.raises(FormatError, match=r"not the shards of one pack: .*number 00000 .*out-x\.bin is in no set"):
        storage.open(tmp_path / "out-*.bin")


def test_without_a_manifest_the_advice_is_another(tmp_path: Path) -> None:
    written_set(tmp_path, "out-a").unlink()
    written_set(tmp_path, "out-b", seed=1).unlink()
    with pytest.raises(FormatError, match=r"Name the shards of one set only$"):
        storage.open(tmp_path / "out-*.bin")
    storage.open(tmp_path / "out-a-*.bin").close()


def test_a_shard_named_twice_is_refused(tmp_path: Path) -> None:
    shards = storage.open(written_set(tmp_path, "out")).files
    with pytest.raises(FormatError, match="the same shard of its set as"):
        storage.open([*shards, shards[0]])


def test_a_pattern_follows_the_numbers_of_shards_whatever_they_are_called(tmp_path: Path) -> None:
    path = written_set(tmp_path, "out")
    with storage.open(path) as reader:
        keys, shards = [record.key for record in reader], reader.files
    for number, shard in enumerate(shards):
        os.rename(shard, tmp_path / f"x-{9 - number}.bin")
    with storage.open(tmp_path / "x-*.bin") as reader:
        assert [record.key for record in reader] == keys


def test_a_list_of_manifests_joins_packs(tmp_path: Path) -> None:
    one, two = written_set(tmp_path, "out-a"), written_set(tmp_path, "out-b", seed=1)
    single = write(tmp_path / "more.bin", some_records(3, seed=2))
    parts = [storage.open(path) for path in (two, single, one)]
    with storage.open([two, single, one]) as joined, pickle.loads(pickle.dumps(joined)) as again:
        assert [r.key for r in again] == [record.key for part in parts for record in part]
        assert joined.files == (*parts[0].files, str(single), *parts[2].files)


def test_a_manifest_that_names_a_shard_twice_is_refused(tmp_path: Path) -> None:
    path = written_set(tmp_path, "out")
    rows = Manifest.load(str(path)).shards
    path.write_bytes(Manifest([*rows, rows[1]]).encode())
    with pytest.raises(FormatError, match=f"it names '{rows[1][0]}' twice"):
        storage.open(path)


def test_keys_that_are_in_several_shards_are_found_by_verify(tmp_path: Path) -> None:
    records = some_records(6)
    paths = [write(tmp_path / "a.bin", records[:4]), write(tmp_path / "b.bin", records[3:])]
    with storage.open(paths) as reader:
        (problem,) = reader.problems()
    assert isinstance(problem, CorruptError)
    assert (problem.path, problem.index, problem.key) == (str(paths[1]), 0, records[3].key)
    assert f"has the key of a record in {paths[0]}" in str(problem)


def test_no_more_shards_are_written_than_a_manifest_may_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "MAX_SHARDS", 3)
    with pytest.raises(ValueError, match="more than 3 shards; give a shard_size above 9,000 bytes"):
        written_set(tmp_path, "out")
    assert names(tmp_path) == []


def test_the_largest_manifest_is_read(tmp_path: Path) -> None:
    rows = [(f"out-{number:05d}.bin", 1 << 40, 1 << 50, f"{number:032x}") for number in range(MAX_SHARDS)]
    (tmp_path / "out.json").write_bytes(Manifest(rows).encode())
    assert Manifest.load(str(tmp_path / "out.json")).shards == tuple(rows)


@pytest.mark.parametrize("path", [[], ()])
def test_no_shards(path: Any) -> None:
    with pytest.raises(FormatError, match="an empty list names no shards"):
        storage.open(path)


def test_a_pattern_that_matches_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file matches the pattern"):
        storage.open(tmp_path / "out-*.bin")


@pytest.mark.parametrize("name", ["[1]", "a*", "?", "{a,b}", "x-%05d", "a b{0}.x-0%d"])
def test_folders_whose_names_look_like_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    records = some_records(9)
    write(folder / "one.bin", records)
    write(folder / "set.json", records, shard_size=5000)
    write(folder / "out.lmdb", records)
    monkeypatch.chdir(folder)
    for found in ("one.bin", "set.json", "out.lmdb", "set-*.bin", folder / "on?.bin", folder / "set-*.bin"):
        with storage.open(found) as reader, pickle.loads(pickle.dumps(reader)) as again:
            assert [record.key for record in again] == [record.key for record in records]
    with pytest.raises(FileNotFoundError, match="No such file"):
        storage.open(folder / "missing.bin")


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    path = write(tmp_path / "out[1].bin", some_records(3))
    with storage.open(path) as reader:
        assert len(reader) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.bin"):
        storage.open(tmp_path / "none.bin")


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match="not a regular file"):
        storage.open(tmp_path / "fifo")


def test_a_folder_is_told_how_to_become_a_pack(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"packfmt pack .* .*\.bin"):
        storage.open(tmp_path)


def test_shards_with_other_columns_do_not_go_together(tmp_path: Path) -> None:
    first = write(tmp_path / "1.bin", [Record(b"a", "a", {"label": 1})])
    second = write(tmp_path / "2.bin", [Record(b"b", "b")])
    with pytest.raises(FormatError, match=r"2\.bin: its columns or classes differ from those of .*1\.bin"):
        storage.open([first, second])


def test_reading_needs_no_free_descriptor(tmp_path: Path) -> None:
    path = write(tmp_path / "out", some_records(3))
    with storage.open(path) as reader:
        held: list[int] = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 3, hard))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            assert digest_of(reader) == digest_of(reader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)


def digest_of(reader: storage.Reader) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(bytes(r.data) + r.key.encode() for r in reader))
