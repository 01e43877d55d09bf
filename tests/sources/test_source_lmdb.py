"""LMDB layouts, each written as its original writes it."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import os
import pickle
import random
import re
import struct
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds import recogniser
from make import decoded, encoded, pixels, write_lmdb

from packfmt import convert, packing
from packfmt import open as open_pack
from packfmt.errors import DecodeError, SourceError
from packfmt.record import Column
from packfmt.sources import registry
from packfmt.sources.base import BadEntry
from packfmt.sources.isolated.source import GAP, InputFiles, Located, read_together
from packfmt.sources.lmdb.source import LMDBSource

recognise = recogniser("lmdb")

TEXT = Column("label", "|u1", (None,), "text")
NUMBER = Column("label", "<i8")

Row = tuple[str, bytes, dict[str, object]]


def rows(source: LMDBSource) -> list[Row]:
    return [(record.key, bytes(record.data), dict(record.columns)) for record in source]


def text_recognition(count: int, stated: int | None = None, labelled: bool = True) -> Iterable[tuple[bytes, bytes]]:
    for number in range(1, count + 1):
        yield b"image-%09d" % number, encoded(number)
        if labelled:
            yield b"label-%09d" % number, f"wörd {number}".encode()
    if stated is not None:
        yield b"num-samples", b"%d" % stated


def folder2lmdb(count: int, dumps: object, label: object = int) -> Iterable[tuple[bytes, bytes]]:
    """As the much copied script: the image in a list, and what a DataLoader makes of an int."""
    for number in range(count):
        yield b"%d" % number, dumps(([encoded(number)], label(number)))
    yield b"__keys__", dumps([b"%d" % number for number in range(count)])
    yield b"__len__", dumps(count)


def field(number: int, value: int | bytes) -> bytes:
    def varint(rest: int) -> bytes:
        rest &= 2**64 - 1
        out = b""
        while rest > 127:
            out += bytes([rest & 127 | 128])
            rest >>= 7
        return out + bytes([rest])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def raw_datum(image: np.ndarray, label: int) -> bytes:
    """As convert_imageset without --encoded: planes of a BGR image."""
    height, width, channels = image.shape
    planes = image[..., ::-1].transpose(2, 0, 1).tobytes()
    head = field(1, channels) + field(2, height) + field(3, width)
    return head + field(4, planes) + field(5, label)


def test_text_recognition(tmp_path: Path) -> None:
    with LMDBSource(write_lmdb(tmp_path / "db", text_recognition(12, 12), map_size=1 << 40)) as source:
        assert source.columns == (TEXT,)
        assert source.count() == 12
        assert source.describe()["layout"] == "text recognition"
        expected = [(f"image-{n:09d}", encoded(n), {"label": f"wörd {n}"}) for n in range(1, 13)]
        assert rows(source) == expected
        assert rows(source) == expected  # a second iteration starts a second child
        assert source.notes == []


def test_a_count_that_disagrees_is_noted_and_the_keys_are_trusted(tmp_path: Path) -> None:
    with LMDBSource(write_lmdb(tmp_path / "db", text_recognition(4, 9))) as source:
        assert source.count() is None
        assert len(rows(source)) == 4
        assert "num-samples says 9, but there are 4" in source.notes[0]


def test_an_interrupted_writer_leaves_all_that_is_there(tmp_path: Path) -> None:
    with LMDBSource(write_lmdb(tmp_path / "db", text_recognition(3))) as source:
        assert len(rows(source)) == 3
        assert "num-samples is missing" in source.notes[0]


def test_text_recognition_without_labels(tmp_path: Path) -> None:
    with LMDBSource(write_lmdb(tmp_path / "db", text_recognition(3, 3, labelled=False))) as source:
        assert source.columns == ()
        assert [row[2] for row in rows(source)] == [{}, {}, {}]


def test_an_image_without_its_label_is_a_bad_entry(tmp_path: Path) -> None:
    entries = [entry for entry in text_recognition(3, 3) if entry[0] != b"label-000000002"]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        handles = list(source.entries())
        source.load(handles[0])
        with pytest.raises(DecodeError, match="has no label"):
            source.load(handles[1])


def test_labels_of_another_encoding_keep_their_bytes(tmp_path: Path) -> None:
    entries = [(b"image-000000001", encoded(1)), (b"label-000000001", "größe".encode("latin-1"))]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        label = rows(source)[0][2]["label"]
        assert label.encode("utf-8", "surrogateescape") == "größe".encode("latin-1")
        assert "not UTF-8" in source.notes[0]


def test_many_environments_below_a_folder_are_one_set(tmp_path: Path) -> None:
    for name in ("train/b", "train/a", "valid"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lmdb(tmp_path / name, text_recognition(2, 2))
    assert recognise(tmp_path) == "lmdb"
    with LMDBSource(tmp_path) as source:
        assert source.count() == 6
        assert [row[0] for row in rows(source)] == [
            f"{place}/image-{n:09d}" for place in ("train/a", "train/b", "valid") for n in (1, 2)
        ]


def test_linked_environments_and_those_below_another_are_told(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for place in (root / "a", tmp_path / "elsewhere", root / "a" / "val"):
        place.parent.mkdir(exist_ok=True)
        write_lmdb(place, text_recognition(2))
    (root / "b").symlink_to(tmp_path / "elsewhere")
    with LMDBSource(root / "a") as source:
        assert len(rows(source)) == 2
        assert source.notes[-1].startswith("1 linked folders, or environments below another,")
        assert source.notes[-1].endswith("data.mdb")
    with LMDBSource(root) as source:
        assert source.notes[-1].endswith(f"first {root / 'b'}")
        assert [row[0] for row in rows(source)] == [f"a/{n}image-00000000{i}" for n in ("", "val/") for i in (1, 2)]


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lmdb(tmp_path / "a", text_recognition(2))
    (tmp_path / "b").mkdir()
    real = os.scandir

    def refuse(path: Any) -> Any:
        if os.fspath(path) == str(tmp_path / "b"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        LMDBSource(tmp_path)


def test_images_beside_a_database_are_a_question(tmp_path: Path) -> None:
    for name in ("cat", "cache"):
        (tmp_path / name).mkdir()
    write_lmdb(tmp_path / "cache" / "feat", text_recognition(2))
    (tmp_path / "cat" / "1.jpg").write_bytes(encoded(1))
    for ask in (recognise, registry.recognise, lambda path: convert(path, tmp_path / "out.bin")):
        with pytest.raises(SourceError, match=r"holds both LMDB .* and image files .*1\.jpg\); --from lmdb"):
            ask(tmp_path)
    assert convert(tmp_path, tmp_path.with_suffix(".bin"), kind="folder").records == 1
    with LMDBSource(tmp_path) as source:
        assert len(rows(source)) == 2
    assert recognise(tmp_path / "cache") == "lmdb"


def test_environments_of_different_layouts_are_refused(tmp_path: Path) -> None:
    write_lmdb(tmp_path / "a", text_recognition(2, 2))
    write_lmdb(tmp_path / "b", folder2lmdb(2, pickle.dumps))
    with pytest.raises(SourceError, match="one at a time"):
        LMDBSource(tmp_path)


@pytest.mark.parametrize("which", ["hr", "lr"])
def test_textzoom(tmp_path: Path, which: str) -> None:
    entries = [(b"num-samples", b"2")]
    for number in (1, 2):
        entries.append((b"image_hr-%09d" % number, encoded(number)))
        entries.append((b"image_lr-%09d" % number, encoded(number + 10)))
        entries.append((b"label-%09d" % number, b"text"))
    with LMDBSource(write_lmdb(tmp_path / "db", entries), which=which) as source:
        found = rows(source)
        assert [row[1] for row in found] == [encoded(n + (10 if which == "lr" else 0)) for n in (1, 2)]
        assert found[0][2] == {"label": "text"}
        assert f"image_{which}-* was read" in source.notes[0]
        assert source.count() == 2


def test_basicsr_is_compared_with_its_meta_info(tmp_path: Path) -> None:
    images = {"000_0000": pixels(1, 6, 9), "001/0001": pixels(2, 7, 7)}
    path = write_lmdb(tmp_path / "gt.lmdb", ((key.encode(), encoded(1, "PNG", height=6, width=9)) for key in images))
    (path / "meta_info.txt").write_text("000_0000.png (6,9,3) 1\n001/0001.png (7,7,3) 1\n002.png (7,7,3) 1\n")
    with LMDBSource(path) as source:
        assert source.describe()["layout"] == "BasicSR"
        assert [row[0] for row in rows(source)] == ["000_0000", "001/0001"]
        assert "1 images differ from meta_info.txt in size, first '001/0001'" in source.notes
        assert "1 images of meta_info.txt are not there, first '002'" in source.notes


def test_caffe_datum_raw_becomes_lossless_rgb(tmp_path: Path) -> None:
    path = write_lmdb(
        tmp_path / "db",
        [(b"%08d_cat/%d.jpg" % (n, n), raw_datum(pixels(n, 6, 9, 1 if n == 2 else 3), n - 1)) for n in range(3)],
    )
    with LMDBSource(path) as source:
        assert source.columns == (NUMBER,)
        found = rows(source)
        assert [row[2]["label"] for row in found] == [-1, 0, 1]
        np.testing.assert_array_equal(decoded(found[0][1]), pixels(0, 6, 9))
        np.testing.assert_array_equal(decoded(found[2][1]), pixels(2, 6, 9, 1)[..., 0])
        assert found[1][0] == "00000001_cat/1.jpg"
        assert any("raw BGR" in note for note in source.notes)


def test_caffe_datum_encoded_keeps_the_file(tmp_path: Path) -> None:
    values = [field(4, encoded(n)) + field(5, 7) + field(7, 1) for n in range(2)]
    path = write_lmdb(tmp_path / "db", [(b"%08d_x" % n, value) for n, value in enumerate(values)])
    with LMDBSource(path) as source:
        assert [row[1:] for row in rows(source)] == [(encoded(n), {"label": 7}) for n in range(2)]


def test_textzoom_of_one_kind_says_how_to_read_it(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [(b"image_lr-000000001", encoded(1)), (b"label-000000001", b"one")])
    with pytest.raises(SourceError, match=r"no images image_hr-\* in it; which='lr' reads"):
        LMDBSource(path)
    with LMDBSource(path, which="lr") as source:
        assert [row[0] for row in rows(source)] == ["image_lr-000000001"]


def test_a_count_among_caffe_datums_is_no_image(tmp_path: Path) -> None:
    entries = [(b"00000000_a", raw_datum(pixels(1), 1)), (b"num-samples", b"1")]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert source.count() == 1
        assert [row[0] for row in rows(source)] == ["00000000_a"]


def test_caffe_datum_of_floats_is_refused(tmp_path: Path) -> None:
    floats = field(1, 3) + field(2, 2) + field(3, 2) + field(6, struct.pack("<12f", *range(12)))
    path = write_lmdb(tmp_path / "db", [(b"%08d_x" % n, floats) for n in range(2)])
    with pytest.raises(SourceError, match="float_data"):
        LMDBSource(path)


def test_caffe_datum_with_sizes_that_do_not_add_up_is_bad(tmp_path: Path) -> None:
    good, bad = raw_datum(pixels(1), 1), field(1, 3) + field(2, 8) + field(3, 9) + field(4, b"x" * 10) + field(5, 1)
    with LMDBSource(write_lmdb(tmp_path / "db", [(b"00000000_a", good), (b"00000001_b", bad)])) as source:
        handles = list(source.entries())
        with pytest.raises(DecodeError, match=r"shape \(3, 8, 9\) with 10 bytes"):
            source.load(handles[1])


def test_lsun(tmp_path: Path) -> None:
    entries = [(hashlib.sha1(bytes([n])).hexdigest().encode(), encoded(n, "WEBP")) for n in range(3)]
    with LMDBSource(write_lmdb(tmp_path / "bedroom_lmdb", entries)) as source:
        assert source.describe()["layout"] == "LSUN"
        assert sorted(row[:2] for row in rows(source)) == sorted((key.decode(), value) for key, value in entries)


@pytest.mark.parametrize(("resolution", "chosen"), [(None, 256), (64, 64)])
def test_stylegan2_reads_one_resolution(tmp_path: Path, resolution: int | None, chosen: int) -> None:
    entries = [(f"{res}-{n:05d}".encode(), encoded(n + res)) for res in (64, 128, 256) for n in range(3)]
    with LMDBSource(write_lmdb(tmp_path / "db", [*entries, (b"length", b"3")]), resolution=resolution) as source:
        assert [row[:2] for row in rows(source)] == [(f"{chosen}-{n:05d}", encoded(n + chosen)) for n in range(3)]
        assert source.notes[0].startswith(f"resolution {chosen} was read")


def test_diffae_has_seven_digits(tmp_path: Path) -> None:
    entries = [(f"256-{n:07d}".encode(), encoded(n)) for n in range(2)]
    with LMDBSource(write_lmdb(tmp_path / "db", [*entries, (b"length", b"2")])) as source:
        assert len(rows(source)) == 2
        assert source.notes == []


def test_what_belongs_to_no_resolution_is_counted(tmp_path: Path) -> None:
    keys = [b"64-00000", b"256-00000", b"256-00001", b"cover.png"]
    entries = [*((key, encoded(n)) for n, key in enumerate(keys)), (b"length", b"2")]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert [row[0] for row in rows(source)] == ["256-00000", "256-00001"]
        assert source.notes[-1] == "1 entries belong to no resolution and were not read"


def test_stylegan2_whose_writer_was_stopped(tmp_path: Path) -> None:
    entries = [(f"16-{n:05d}".encode(), encoded(n, height=16, width=16)) for n in range(2)]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert source.describe()["layout"] == "images by resolution"
        assert len(rows(source)) == 2
        assert source.notes[0].startswith("length is missing")


@pytest.mark.parametrize(
    "keys",
    [["2021-00001", "cat0", "cat1"], [f"{v:05d}-{f:05d}" for v in range(3) for f in range(3)], ["7-00000", "7-00001"]],
    ids=["a date among names", "clip and frame", "of another size"],
)
def test_numbers_with_a_hyphen_are_no_resolutions(tmp_path: Path, keys: list[str]) -> None:
    with LMDBSource(write_lmdb(tmp_path / "db", [(key.encode(), encoded(n)) for n, key in enumerate(keys)])) as source:
        assert [row[0] for row in rows(source)] == keys
        assert source.notes == []


def test_integers_as_keys_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "db"), max_dbs=1) as environment:
        database = environment.open_db(b"images", integerkey=True)
        with environment.begin(write=True, db=database) as transaction:
            for number in range(300):
                transaction.put(number.to_bytes(8, sys.byteorder), encoded(1))
    with pytest.raises(SourceError, match=r"flags integer_?key"):
        LMDBSource(tmp_path / "db")


def test_an_absent_resolution_is_an_error_that_lists_those_there(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [(b"64-00000", encoded(1)), (b"length", b"1")])
    with pytest.raises(SourceError, match="choose one of 64"):
        LMDBSource(path, resolution=512)


def test_nvae_images_come_in_the_numbers_order(tmp_path: Path) -> None:
    with LMDBSource(write_lmdb(tmp_path / "db", ((b"%d" % n, encoded(n)) for n in range(12)))) as source:
        assert [row[:2] for row in rows(source)] == [(str(n), encoded(n)) for n in range(12)]


def test_nvae_raw_pixels_are_read_when_asked(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [(b"%d" % n, pixels(n, 9, 9).tobytes()) for n in range(11)])
    with pytest.raises(SourceError, match="raw_rgb=True"):
        LMDBSource(path)
    with LMDBSource(path, raw_rgb=True) as source:
        found = rows(source)
        assert [row[0] for row in found] == [str(n) for n in range(11)]
        np.testing.assert_array_equal(decoded(found[10][1]), pixels(10, 9, 9))
    with LMDBSource(path, raw_rgb=True, encode="jpeg:90") as source:
        assert rows(source)[0][1][:3] == b"\xff\xd8\xff"


def test_imaginaire_paths_with_texts_beside_the_images(tmp_path: Path) -> None:
    entries = [(b"images/seq1/%05d.jpg" % n, encoded(n)) for n in range(3)]
    entries += [(b"labels/seq1/%05d.json" % n, json.dumps({"x": n}).encode()) for n in range(3)]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert [row[:2] for row in rows(source)] == [(key.decode(), value) for key, value in entries[:3]]
        assert dict(source.skipped) == {"text beside the images": 3}


def test_keys_that_climb_stay_keys(tmp_path: Path) -> None:
    entries = [(b"../../etc/passwd", encoded(1)), (b"/abs/x.jpg", encoded(2)), (b"\xff\xfe.jpg", encoded(3))]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert [os.fsencode(row[0]) for row in rows(source)] == [key for key, _ in entries]


@pytest.mark.parametrize("label", [int, lambda n: np.array([n]), np.int64], ids=["int", "array", "numpy int"])
def test_folder2lmdb_pickles_of_every_protocol(tmp_path: Path, label: object) -> None:
    protocols = itertools.cycle(range(6))
    path = write_lmdb(tmp_path / "db", folder2lmdb(11, lambda value: pickle.dumps(value, next(protocols)), label))
    with LMDBSource(path) as source:
        assert source.columns == (NUMBER,)
        assert source.count() == 11
        assert rows(source) == [(str(n), encoded(n), {"label": n}) for n in range(11)]
        assert source.notes == []


def test_folder2lmdb_of_an_interrupted_writer_with_gaps(tmp_path: Path) -> None:
    entries = [entry for entry in folder2lmdb(9, pickle.dumps) if entry[0] not in (b"__keys__", b"__len__", b"3")]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert [row[0] for row in rows(source)] == [str(n) for n in range(9) if n != 3]
        assert "__len__ is missing" in source.notes[0]


def test_folder2lmdb_msgpack(tmp_path: Path) -> None:
    """As msgpack-numpy lays out an array, in the copies of the script before pickle."""

    def packed(value: object) -> bytes:
        if isinstance(value, tuple):
            image = {b"nd": True, b"type": "|u1", b"kind": b"", b"shape": (len(value[0][0]),), b"data": value[0][0]}
            return msgpack.packb([image, value[1]])
        return msgpack.packb(value)

    with LMDBSource(write_lmdb(tmp_path / "db", folder2lmdb(3, packed))) as source:
        assert rows(source) == [(str(n), encoded(n), {"label": n}) for n in range(3)]
        assert source.notes == []


@pytest.mark.parametrize("raw", [False, True], ids=["bin", "old raw"])
def test_tensorpack_msgpack(tmp_path: Path, raw: bool) -> None:
    def dumps(value: object) -> bytes:
        return msgpack.packb(value, use_bin_type=not raw)

    entries = [(b"%08d" % n, dumps([encoded(n), n])) for n in range(3)]
    entries.append((b"__keys__", dumps([key for key, _ in entries])))
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert source.describe()["layout"] == "tensorpack msgpack"
        assert rows(source) == [(f"{n:08d}", encoded(n), {"label": n}) for n in range(3)]
        assert source.notes == []


def test_images_that_old_msgpack_took_for_text_keep_their_bytes(tmp_path: Path) -> None:
    image = b"RIFF\x0e\0\0\0WEBPEXIF\x02\0\0\0" + "ä".encode()
    assert image.decode()
    values = [(b"%08d" % n, msgpack.packb([image, n], use_bin_type=False)) for n in range(3)]
    with LMDBSource(write_lmdb(tmp_path / "db", values)) as source:
        assert [row[1] for row in rows(source)] == [image] * 3


def test_table_master(tmp_path: Path) -> None:
    entries = [(b"%d" % n, pickle.dumps((f"p{n}.png", encoded(n, "PNG"), f"<tr>{n}\nlines"))) for n in range(3)]
    with LMDBSource(write_lmdb(tmp_path / "db", [*entries, (b"__len__", pickle.dumps(3))])) as source:
        assert source.describe()["layout"] == "TableMaster pickle"
        assert rows(source) == [
            (str(n), encoded(n, "PNG"), {"label": f"<tr>{n}\nlines", "name": f"p{n}.png"}) for n in range(3)
        ]


def test_where_most_records_have_no_label_those_there_are_kept(tmp_path: Path) -> None:
    values = [(b"%d" % n, pickle.dumps((encoded(n), None if n % 3 else n))) for n in range(9)]
    with LMDBSource(write_lmdb(tmp_path / "db", values)) as source:
        assert source.columns == (NUMBER,)
        handles = list(source.entries())
        assert [source.load(handle).columns["label"] for handle in handles[::3]] == [0, 3, 6]
        with pytest.raises(DecodeError, match="has no label"):
            source.load(handles[1])
        assert not any("no label" in note for note in source.notes)


@pytest.mark.parametrize("dumps", [pickle.dumps, msgpack.packb], ids=["pickle", "msgpack"])
@pytest.mark.parametrize(
    ("fields", "columns", "lost"),
    [
        (
            lambda image, n: {"image": image, "label": n, "bbox": [1, 2, 3, 4], "weight": 0.5, "caption": "x"},
            {"label": 5, "name": "x"},
            ["'bbox' of 20", "'weight' of 20"],
        ),
        (lambda image, n: (image, n, "name", 3.5), {"label": 5, "name": "name"}, ["further parts of 20"]),
        (lambda image, n: (image, ["a", "b", "c"]), {"label": "a", "name": "b"}, ["further parts of 20"]),
        (lambda image, n: (image, n, "name" if n % 2 else None), {"label": 5}, ["further parts of 10"]),
        (lambda image, n: {"image": image, "label": n, "mask": b"bytes", "none": None}, {"label": 5}, ["'mask' of 20"]),
    ],
    ids=["dict", "tuple", "texts", "some names", "bytes"],
)
def test_what_has_no_column_is_told(
    tmp_path: Path, dumps: Any, fields: Any, columns: dict[str, object], lost: list[str]
) -> None:
    path = write_lmdb(tmp_path / "db", ((b"%d" % n, dumps(fields(encoded(n), n))) for n in range(20)))
    with LMDBSource(path) as source:
        assert source.describe()["lost"] == [told.rpartition(" of ")[0].strip("'") for told in lost]
        assert rows(source)[5][2] == columns
        assert source.notes[:-1] == [f"not kept: {told} records" for told in lost]


@pytest.mark.parametrize("dumps", [pickle.dumps, msgpack.packb], ids=["pickle", "msgpack"])
@pytest.mark.parametrize("longer", [lambda n: n % 3 == 2, lambda n: n == 15], ids=["some", "one of the first"])
def test_rows_of_one_number_among_longer_ones_stay_rows(tmp_path: Path, dumps: Any, longer: Any) -> None:
    labels = [[n, n + 1] if longer(n) else [n] for n in range(20)]
    path = write_lmdb(tmp_path / "db", ((b"%d" % n, dumps((encoded(n), label))) for n, label in enumerate(labels)))
    with LMDBSource(path) as source:
        assert source.columns == (Column("label", "<i8", (None,)),)
        assert [row[2]["label"] for row in rows(source)] == labels


@pytest.mark.parametrize(
    "one", [lambda n: [n], lambda n: (n,), lambda n: np.array([n])], ids=["list", "tuple", "array"]
)
def test_rows_of_one_number_among_themselves_are_numbers(tmp_path: Path, one: Any) -> None:
    labels = [n if n % 2 else one(n) for n in range(20)]
    values = [(b"%d" % n, pickle.dumps((encoded(n), label))) for n, label in enumerate(labels)]
    with LMDBSource(write_lmdb(tmp_path / "db", values)) as source:
        assert source.columns == (NUMBER,)
        assert [row[2]["label"] for row in rows(source)] == list(range(20))


def msgpack_array(image: bytes, label: np.ndarray) -> bytes:
    packed = {b"nd": True, b"type": label.dtype.str, b"kind": b"", b"shape": label.shape, b"data": label.tobytes()}
    return msgpack.packb([image, packed])


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "|u1", "|b1", "<i2"])
@pytest.mark.parametrize(("lengths", "shape"), [((2,), (2, 4)), ((2, 3), (None, 4))], ids=["fixed", "ragged"])
@pytest.mark.parametrize("dumps", [lambda *parts: pickle.dumps(parts), msgpack_array], ids=["pickle", "msgpack"])
def test_label_arrays_of_several_axes_keep_shape_and_type(
    tmp_path: Path, dumps: Any, lengths: tuple[int, ...], shape: tuple[int | None, int], dtype: str
) -> None:
    labels = [(np.arange(4 * lengths[n % len(lengths)]).reshape(-1, 4) * 0.3 + n).astype(dtype) for n in range(6)]
    values = [(b"%d" % n, dumps(encoded(n), label)) for n, label in enumerate(labels)]
    path = write_lmdb(tmp_path / "db", values)
    with LMDBSource(path) as source:
        assert source.columns == (Column("label", dtype.replace(">", "<"), shape),)
    convert(path, tmp_path / "out.bin")
    with open_pack(tmp_path / "out.bin") as pack:
        for n, label in enumerate(labels):
            np.testing.assert_array_equal(pack[n].columns["label"], label)


def test_large_label_arrays_pass_in_several_frames(tmp_path: Path) -> None:
    image, labels = encoded(1), np.random.default_rng(1).random((300, 2, 2048))
    path = write_lmdb(tmp_path / "db", ((b"%d" % n, pickle.dumps((image, label))) for n, label in enumerate(labels)))
    with LMDBSource(path) as source:
        assert np.array_equal([row[2]["label"] for row in rows(source)], labels)


def test_a_label_array_of_another_shape_is_bad(tmp_path: Path) -> None:
    labels = [np.zeros((2, 4)) if n < 20 else np.zeros((4, 2)) for n in range(21)]
    values = [(b"%d" % n, pickle.dumps((encoded(n), label))) for n, label in enumerate(labels)]
    with LMDBSource(write_lmdb(tmp_path / "db", values)) as source:
        *_, odd = source.entries()
        with pytest.raises(DecodeError, match=r"shape \(4, 2\) is not an array of type <f8 and shape \(2, 4\)"):
            source.load(odd)


def test_no_other_field_stands_in_for_a_label_that_is_none(tmp_path: Path) -> None:
    fields = [{"image": encoded(n), "label": None if n == 2 else n, "height": 32} for n in range(4)]
    path = write_lmdb(tmp_path / "db", ((b"%d" % n, pickle.dumps(value)) for n, value in enumerate(fields)))
    report = convert(path, tmp_path / "out.bin", bad="skip")
    assert [(problem.key, problem.reason) for problem in report.problems] == [("2", "has no label that can be read")]


def arrow(body: bytes) -> bytes:
    """How pyarrow.serialize begins: four counts, an Arrow stream's continuation mark, and the buffers later."""
    return struct.pack("<4i", 0, 0, 0, 1) + b"\xff\xff\xff\xff" + struct.pack("<i", 64) + bytes(64) + body + bytes(13)


def test_pyarrow_serialize_is_refused_with_a_way_out_and_carved_when_asked(tmp_path: Path) -> None:
    entries = [(b"%d" % n, arrow(encoded(n))) for n in range(3)]
    entries[2] = (b"2", arrow(b"\xff\xd8\xff\xe0 no image \xff\xd9"))
    path = write_lmdb(tmp_path / "db", [*entries, (b"__len__", arrow(b"3"))])
    with pytest.raises(SourceError, match="carve=True"):
        LMDBSource(path)
    with LMDBSource(path, carve=True) as source:
        handles = list(source.entries())
        assert [bytes(source.load(handle).data) for handle in handles[:2]] == [encoded(0), encoded(1)]
        with pytest.raises(DecodeError):
            source.load(handles[2])
        assert "labels are lost" in source.notes[0]


def test_named_databases(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24, max_dbs=4) as environment:
        for name in (b"train", b"test"):
            database = environment.open_db(name)
            with environment.begin(write=True, db=database) as put:
                put.put(b"a.jpg", encoded(len(name)))
    with LMDBSource(tmp_path / "db") as source:
        assert [row[:2] for row in rows(source)] == [("test/a.jpg", encoded(4)), ("train/a.jpg", encoded(5))]
    with LMDBSource(tmp_path / "db", database="train") as source:
        assert [row[:2] for row in rows(source)] == [("a.jpg", encoded(5))]
    with pytest.raises(SourceError, match="no database named 'other'"):
        LMDBSource(tmp_path / "db", database="other")


def write_named(path: Path, databases: dict[bytes, list[tuple[bytes, bytes]]], counts: bytes = b"") -> Path:
    with lmdb.open(str(path), map_size=1 << 24, max_dbs=4) as environment:
        for name, entries in databases.items():
            database = environment.open_db(name)
            with environment.begin(write=True, db=database) as put:
                for key, value in entries:
                    put.put(key, value)
        if counts:
            with environment.begin(write=True) as put:
                put.put(b"num-samples", counts)
    return path


def test_a_count_beside_named_databases_is_no_entry(tmp_path: Path) -> None:
    with LMDBSource(write_named(tmp_path / "db", {b"images": [(b"a.jpg", encoded(1))]}, counts=b"1\n")) as source:
        assert [row[0] for row in rows(source)] == ["a.jpg"]


def test_a_refused_one_among_named_databases_is_named_with_a_way_out(tmp_path: Path) -> None:
    path = write_named(tmp_path / "db", {b"train": [(b"a.jpg", encoded(1))], b"val": []})
    with pytest.raises(SourceError, match=r"database 'val': .* empty.* There are 'train', 'val'; database="):
        LMDBSource(path)


@pytest.mark.parametrize("form", ["folder", "data file", "lone file", "link"])
def test_the_ways_to_name_an_environment(tmp_path: Path, form: str) -> None:
    path = write_lmdb(tmp_path / "db", text_recognition(2, 2))
    if form == "data file":
        path = path / "data.mdb"
    elif form == "lone file":
        path = write_lmdb(tmp_path / "lone.lmdb", text_recognition(2, 2), subdir=False)
    elif form == "link":
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    assert recognise(path) == "lmdb"
    with LMDBSource(path) as source:
        assert [row[1] for row in rows(source)] == [encoded(1), encoded(2)]


def test_many_records_pass_in_several_frames(tmp_path: Path) -> None:
    image = encoded(1)
    path = write_lmdb(tmp_path / "db", ((b"%06d.jpg" % n, image + bytes([n % 256]) * (n % 7)) for n in range(3000)))
    with LMDBSource(path) as source:
        for number, record in enumerate(source):
            assert record.key == f"{number:06d}.jpg"
            assert record.data == image + bytes([number % 256]) * (number % 7)
    assert number == 2999


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and size of each read of an input file."""
    seen: list[tuple[int, int]] = []
    real = InputFiles.read

    def read(self: InputFiles, file: int, offset: int, size: int) -> bytes:
        seen.append((offset, size))
        return real(self, file, offset, size)

    monkeypatch.setattr(InputFiles, "read", read)
    return seen


def test_neighbours_are_read_together(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    images = {b"%06d.jpg" % n: encoded(n) + bytes(n * 100) for n in range(100)}
    with LMDBSource(write_lmdb(tmp_path / "db", images.items())) as source:
        entries = list(source.entries())
        fetched = source.fetch(entries[::-1])
        assert len(reads) < 10
        assert [(r.key.encode(), bytes(r.data)) for r in fetched] == list(images.items())[::-1]
        assert [source.load(entry) for entry in entries] == fetched[::-1]


@given(
    places=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 200_000), st.integers(0, 30_000)), max_size=12),
)
def test_what_lies_apart_is_not_read_along(tmp_path_factory: Any, places: list[tuple[int, int, int]]) -> None:
    folder = tmp_path_factory.mktemp("files")
    contents = [random.Random(n).randbytes(250_000) for n in (0, 1)]
    for n, content in enumerate(contents):
        (folder / str(n)).write_bytes(content)
    entries: list[Any] = [Located(str(i), *place, {}) for i, place in enumerate(places)]
    with pytest.MonkeyPatch.context() as patch, closing(InputFiles([str(folder / n) for n in "01"])) as files:
        asked: list[int] = []
        real = files.read
        patch.setattr(files, "read", lambda file, offset, size: asked.append(size) or real(file, offset, size))
        fetched = read_together(files, [*entries, BadEntry("bad", "reason")])
    assert fetched.pop() == BadEntry("bad", "reason")
    assert [bytes(record.data) for record in fetched] == [contents[f][o : o + n] for f, o, n in places]
    assert sum(asked) <= sum(place[2] for place in places) + len(places) * GAP


def test_a_stretch_that_cannot_be_read_costs_its_damaged_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lmdb(tmp_path / "db", ((b"%06d.jpg" % n, encoded(n) + bytes(9000)) for n in range(5)))
    with LMDBSource(path) as source:
        bad = list(source.entries())[2]
    real = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if offset <= bad.offset < offset + size:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    report = convert(path, tmp_path / "out.bin", bad="skip")
    assert report.records == 4
    assert [(problem.key, problem.reason) for problem in report.problems] == [
        ("000002.jpg", "cannot be read: Input/output error")
    ]


def test_in_order_no_thread_is_asked_and_in_random_order_many_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lmdb(tmp_path / "db", ((b"%06d.jpg" % n, encoded(n)) for n in range(200)))
    asked: list[int] = []

    class Counted(ThreadPoolExecutor):
        def submit(self, *arguments: Any) -> Any:
            asked.append(1)
            return super().submit(*arguments)

    monkeypatch.setattr(packing, "ThreadPoolExecutor", Counted)
    convert(path, tmp_path / "in-order.bin")
    assert not asked
    convert(path, tmp_path / "shuffled.bin", shuffle=1)
    assert asked


@pytest.mark.skipif("PACKFMT_TEST_DATA" not in os.environ, reason="PACKFMT_TEST_DATA is not set")
class TestRealData:
    root = Path(os.environ.get("PACKFMT_TEST_DATA", "."))

    def test_word_crops(self) -> None:
        with LMDBSource(self.root / "lmdb-text-recognition") as source:
            assert source.count() == 920
            found = rows(source)
        assert len(found) == 920
        place = str(self.root / "lmdb-text-recognition/valid")
        with lmdb.open(place, readonly=True, lock=False) as environment, environment.begin() as reading:
            for key, data, columns in found:
                assert data == reading.get(key.encode())
                assert columns["label"].encode() == reading.get(key.replace("image", "label").encode())

    def test_restoration(self) -> None:
        with LMDBSource(self.root / "lmdb-restoration") as source:
            names = [row[0] for row in rows(source)]
        assert names == ["gt.lmdb/baboon", "gt.lmdb/comic", "lq.lmdb/baboon", "lq.lmdb/comic"]


@pytest.mark.parametrize("timeout", [0, -1.0, 86401, 1e7, 1e18, float("inf"), float("nan")])
def test_a_timeout_out_of_range_is_refused(tmp_path: Path, timeout: float) -> None:
    path = write_lmdb(tmp_path / "db", text_recognition(1))
    with pytest.raises(ValueError, match=rf"db: timeout {re.escape(str(timeout))} must be above 0 and at most 86400 s"):
        LMDBSource(path, timeout=timeout)
    with LMDBSource(path, timeout=86400) as source:
        assert len(rows(source)) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_dropped_source_leaves_no_descriptor(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", text_recognition(3))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        source = LMDBSource(path)
        assert len(rows(source)) == 3
        del source
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_input_files_are_opened_again_after_closing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    files = InputFiles([str(tmp_path / "x")])
    for _ in range(2):
        assert files.read(0, 3, 4) == b"tent"
        files.close()
        files.close()
