"""TFRecord files of tf.train.Example: framing, features, boxes, damage."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import recogniser
from make import dot, example, frame, jpg, trapped_pickle

from packfmt.errors import DecodeError, SourceError
from packfmt.sources.tfrecord.framing import frames, read_frame
from packfmt.sources.tfrecord.source import TFRecordSource, parse_example

recognise = recogniser("tfrecord")

# Written by another program (the PyPI package tfrecord 1.14.6, over Google's protobuf and the C library of crc32c):
# image/class/label -7, image/encoded ff d8 ff e0 "JPEG", image/filename "a.jpg", w [0.5, 1.5].
FOREIGN = bytes.fromhex(
    "76000000000000004e43f07d0a740a230a11696d6167652f636c6173732f6c6162656c120e1a0c0a0af9ffffffffffffffff010a1d0a0d"
    "696d6167652f656e636f646564120c0a0a0a08ffd8ffe04a5045470a1b0a0e696d6167652f66696c656e616d6512090a070a05612e6a7067"
    "0a110a0177120c120a0a080000003f0000c03fbe2b5ac4"
)
LENGTH, LENGTH_CRC, DATA = 0, 8, 12


def write(path: Path, *examples: bytes) -> Path:
    path.write_bytes(b"".join(map(frame, examples)))
    return path


def imagenet(number: int, **more: Any) -> bytes:
    return example(
        image__encoded=jpg(number),
        image__filename=b"n%d.jpg" % number,
        image__class__label=number,
        image__class__text=b"class %d" % number,
        image__width=8,
        image__height=6,
        **more,
    )


def test_a_file_of_another_writer(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FOREIGN)
    (record,) = TFRecordSource(tmp_path / "x")
    assert (record.key, record.data) == ("a.jpg", b"\xff\xd8\xff\xe0JPEG")
    assert record.columns["label"] == -7
    assert record.columns["w"].tolist() == [0.5, 1.5]


def test_imagenet_features(tmp_path: Path) -> None:
    source = TFRecordSource(write(tmp_path / "train-00000-of-00001", *map(imagenet, range(3))))
    records = list(source)
    assert [column.name for column in source.columns] == ["label", "class_text"]
    assert [record.key for record in records] == ["n0.jpg", "n1.jpg", "n2.jpg"]
    assert (records[2].data, records[2].columns) == (jpg(2), {"label": 2, "class_text": "class 2"})


def test_boxes_become_pixels_of_the_stored_image(tmp_path: Path) -> None:
    sides = {
        "image__object__bbox__xmin": [0.0, 0.5],
        "image__object__bbox__xmax": [0.5, 1.5],
        "image__object__bbox__ymin": [0.0, 0.5],
        "image__object__bbox__ymax": [0.5, 0.5],
    }
    source = TFRecordSource(
        write(tmp_path / "x", imagenet(0, **sides, image__object__class__label=[3, 4]), imagenet(1))
    )
    first, second = source
    assert first.columns["boxes"].dtype == np.float32
    assert first.columns["boxes"].tolist() == [[0, 0, 4, 3], [4, 3, 12, 3]]
    assert first.columns["labels"].tolist() == [3, 4]
    assert second.columns["boxes"].shape == (0, 4)
    assert source.notes == [
        "1 boxes reach outside their image; kept as they are",
        "1 boxes have no area; kept as they are",
    ]


@pytest.mark.parametrize("sides", [{"xmin": [0.5, 0.5]}, {"xmin": [float("nan")]}, {"labels": [1, 2]}])
def test_boxes_that_do_not_fit_together(tmp_path: Path, sides: dict[str, list[float]]) -> None:
    good = {f"image__object__bbox__{side}": [0.5] for side in ("xmin", "xmax", "ymin", "ymax")}
    bad = dict(good, image__object__class__label=sides.get("labels", [1]))
    bad["image__object__bbox__xmin"] = sides.get("xmin", [0.5])
    path = write(tmp_path / "x", imagenet(0, **good, image__object__class__label=[1]), imagenet(1, **bad))
    source = TFRecordSource(path)
    _, second = source.entries()
    with pytest.raises(DecodeError, match=r"record 1.*n1\.jpg"):
        source.load(second)


def test_the_image_is_found_by_its_content(tmp_path: Path) -> None:
    source = TFRecordSource(write(tmp_path / "x.tfrecords", example(odd=dot(), label=5, size=[1.5, 2.5])))
    (record,) = source
    assert (record.key, record.data) == ("x.tfrecords/00000000", dot())
    assert record.columns["size"].tolist() == [1.5, 2.5]


def test_names_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "x", example(image=dot(1), thumb=dot(2), label=1, coarse=9, ident=b"k"))
    (record,) = TFRecordSource(path, image="thumb", label="coarse", key="ident")
    assert (record.data, record.key, record.columns) == (dot(2), "k", {"label": 9, "source_label": 1})


@pytest.mark.parametrize(
    "names", [{"image": "label"}, {"image": "none"}, {"label": "none"}, {"label": "image"}, {"key": "x"}]
)
def test_a_name_that_does_not_fit_is_refused(tmp_path: Path, names: dict[str, str]) -> None:
    path = write(tmp_path / "x", example(image=dot(1), label=1))
    with pytest.raises(SourceError, match="image, label"):
        TFRecordSource(path, **names)


def test_no_image_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no feature holds"):
        TFRecordSource(write(tmp_path / "x", example(label=1)))


def test_another_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"tf\.train\.Example"):
        TFRecordSource(write(tmp_path / "x", b"\x0f\x0f"))


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    source = TFRecordSource(write(tmp_path / "x", example(image=dot(), tags=[b"a", b"b"], other=jpg())))
    assert source.describe()["lost"] == ["other", "tags"]


@pytest.mark.parametrize("side", [3e38, -1e38, float("inf"), float("nan"), 2, b"x"])
def test_a_box_side_that_cannot_be_stored(tmp_path: Path, side: object) -> None:
    sides = {f"image__object__bbox__{name}": [0.5] for name in ("xmin", "ymin", "xmax", "ymax")}
    odd = imagenet(1, **sides | {"image__object__bbox__xmax": [side]})
    source = TFRecordSource(write(tmp_path / "x", imagenet(0, **sides), odd))
    _, entry = source.entries()
    if side == 2:
        assert source.load(entry).columns["boxes"].tolist() == [[4, 3, 16, 3]]
        return
    with pytest.raises(DecodeError, match=r"record 1.*side"):
        source.load(entry)


def test_a_feature_that_comes_late_is_counted(tmp_path: Path) -> None:
    sides = {f"image__object__bbox__{side}": [0.0, 0.5] for side in ("xmin", "ymin", "xmax", "ymax")}
    late = imagenet(40, **sides, image__object__class__label=[1, 2], nothing=[])
    path = write(tmp_path / "x", *map(imagenet, range(40)), late, imagenet(41, **sides))
    source = TFRecordSource(path)
    for _ in range(2):
        list(source)
        assert source.notes == [
            "2 records have feature 'image/object/bbox/xmax', which the first 32 had not; it is lost",
            "2 records have feature 'image/object/bbox/xmin', which the first 32 had not; it is lost",
            "2 records have feature 'image/object/bbox/ymax', which the first 32 had not; it is lost",
            "2 records have feature 'image/object/bbox/ymin', which the first 32 had not; it is lost",
            "1 records have feature 'image/object/class/label', which the first 32 had not; it is lost",
        ]


def test_features_that_the_first_records_have_are_no_late_ones(tmp_path: Path) -> None:
    source = TFRecordSource(write(tmp_path / "x", imagenet(0, tags=[b"a", b"b"], n=1), imagenet(1, tags=[b"c"], n=2)))
    assert len(list(source)) == 2
    assert source.notes == []


def test_late_features_without_number_do_not_fill_the_notes(tmp_path: Path) -> None:
    late = [imagenet(40 + number, **{f"n{number}_{one}": 1 for one in range(9)}) for number in range(9)]
    source = TFRecordSource(write(tmp_path / "x", *map(imagenet, range(40)), *late))
    list(source)
    assert len(source.notes) == 17
    assert source.notes[-1] == "8 records have further features which the first 32 had not; they are lost"


def test_a_number_that_is_missing_later_is_an_error_with_its_place(tmp_path: Path) -> None:
    examples = [example(image=dot(), n=1) for _ in range(40)] + [example(image=dot())]
    source = TFRecordSource(write(tmp_path / "x", *examples))
    *_, last = source.entries()
    with pytest.raises(DecodeError, match=r"record 40.*'n' holds 0 values"):
        source.load(last)


@pytest.mark.parametrize("value", [2.5, b"x", [1, 2]])
def test_a_value_of_another_type_later(tmp_path: Path, value: object) -> None:
    examples = [example(image=dot(), n=1) for _ in range(40)] + [example(image=dot(), n=value)]
    source = TFRecordSource(write(tmp_path / "x", *examples))
    *_, last = source.entries()
    with pytest.raises(DecodeError, match=r"record 40.*'n'"):
        source.load(last)


def test_several_shards(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"x-{number}", example(image=dot(number)))
    assert [record.key for record in TFRecordSource(tmp_path / "x-{0..1}")] == ["x-0/00000000", "x-1/00000000"]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_compressed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path / "x", *map(imagenet, range(50)))
    path.write_bytes(pack(path.read_bytes()))
    assert recognise(path) == "tfrecord"
    assert [record.columns["label"] for record in TFRecordSource(path)] == list(range(50))


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_compressed_and_cut(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path / "x", *map(imagenet, range(50)))
    path.write_bytes(pack(path.read_bytes())[:-30])
    with pytest.raises(SourceError, match="cut"):
        list(TFRecordSource(path))


def test_every_flipped_bit_of_the_data_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"0123456789")
    whole = path.read_bytes()
    for bit in range(8 * DATA, 8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(DecodeError, match="CRC-32C"):
            read_frame(next(frames(path)))


def test_a_damaged_record_spares_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "x", imagenet(0), imagenet(1), imagenet(2))
    data = bytearray(path.read_bytes())
    data[len(frame(imagenet(0))) + DATA + 20] ^= 4
    path.write_bytes(data)
    source = TFRecordSource(path)
    first, second, third = source.entries()
    assert source.load(first).key == "n0.jpg"
    with pytest.raises(DecodeError, match=r"record 1, key 'x/00000001': damaged"):
        source.load(second)
    assert source.load(third).key == "n2.jpg"


@pytest.mark.parametrize("at", [LENGTH, LENGTH_CRC])
def test_a_damaged_length_ends_the_file(tmp_path: Path, at: int) -> None:
    path = write(tmp_path / "x", imagenet(0), imagenet(1))
    data = bytearray(path.read_bytes())
    data[len(frame(imagenet(0))) + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="record 1: the checksum of its length"):
        list(TFRecordSource(path).entries())


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_length_beyond_the_file_is_refused_before_reading(tmp_path: Path, length: int) -> None:
    bomb = frame(struct.pack("<Q", length))[DATA:]  # the length as data has the checksum that it needs as a length
    path = tmp_path / "x"
    path.write_bytes(frame(imagenet(0)) + bomb + b"tail")
    tracemalloc.start()
    with pytest.raises(SourceError, match="record 1"):
        list(TFRecordSource(path).entries())
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_compressed_bomb_is_refused_by_its_length(tmp_path: Path) -> None:
    bomb = frame(struct.pack("<Q", 1 << 30))[DATA:]
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(frame(imagenet(0)) + bomb + bytes(1 << 20)))
    with pytest.raises(SourceError, match="record 1: 1073741824 bytes; at most"):
        list(TFRecordSource(path).entries())


@pytest.mark.parametrize("cut", [1, 4, 20, 5])
def test_a_cut_file(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "x", imagenet(0), imagenet(1))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SourceError, match="record 1"):
        list(TFRecordSource(path).entries())


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert list(TFRecordSource(tmp_path / "x")) == []


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = write(
        tmp_path / "x", example(image=dot(), extra=trapped_pickle(canary), image__filename=b"../../etc/passwd")
    )
    (record,) = TFRecordSource(path)
    assert record.key == "../../etc/passwd"
    assert record.columns["extra"] == trapped_pickle(canary)
    assert not canary.exists()


@pytest.mark.parametrize("data", [b"", b"x" * 12, bytes(12), b"\x1f\x8bjunkjunkjunk", b"\x78\x9cjunkjunkjunk", jpg()])
def test_foreign_files_are_not_recognised(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert recognise(tmp_path / "x") is None


def test_unpacked_and_repeated_lists() -> None:
    # field 1 of Int64List twice, unpacked
    message = b"\x0a\x0d\x0a\x0b\x0a\x01n\x12\x06\x1a\x04\x08\x05\x08\x06"
    assert parse_example(message) == {"n": [5, 6]}
