"""COCO, Pascal VOC and YOLO: boxes, classes, what is odd, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import recogniser
from make import jpg

from packfmt.errors import DecodeError, SourceError
from packfmt.record import Record
from packfmt.sources.annotations.coco import CocoSource
from packfmt.sources.annotations.voc import VocSource
from packfmt.sources.annotations.yolo import YoloSource, yaml_names
from packfmt.sources.base import BadEntry

recognise = recogniser("coco", "voc", "yolo")

DATA = os.environ.get("PACKFMT_TEST_DATA")


def put(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# COCO


def coco(tmp_path: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "images": [
            {"id": 7, "file_name": "a.jpg", "width": 8, "height": 6},
            {"id": 3, "file_name": "sub/b.jpg", "width": 8, "height": 6},
        ],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 90, "bbox": [1, 2, 3.5, 4], "iscrowd": 1, "segmentation": []},
            {"id": 2, "image_id": 7, "category_id": 1, "bbox": [0, 0, 0, 4], "iscrowd": 0, "area": 0},
            {"id": 3, "image_id": 7, "category_id": 1, "bbox": [5, 0, 5, 4], "iscrowd": 0},
        ],
    }
    content.update(changes)
    put(tmp_path / "val2017" / "a.jpg", jpg(1))
    put(tmp_path / "val2017" / "sub" / "b.jpg", jpg(2))
    return put(tmp_path / "annotations" / "instances_val2017.json", json.dumps(content))


def test_coco(tmp_path: Path) -> None:
    path = coco(tmp_path)
    assert recognise(path) == "coco"
    source = CocoSource(path)
    first, second = source
    assert (source.classes, source.metadata["category_ids"], source.count()) == (("person", "toothbrush"), [1, 90], 2)
    assert (first.key, first.data) == ("a.jpg", jpg(1))
    assert first.columns["boxes"].dtype == np.float32
    assert first.columns["boxes"].tolist() == [[1, 2, 4.5, 6], [0, 0, 0, 4], [5, 0, 10, 4]]
    assert first.columns["labels"].tolist() == [1, 0, 0]
    assert first.columns["iscrowd"].tolist() == [1, 0, 0]
    assert second.key == "sub/b.jpg"
    assert [second.columns[name].shape for name in ("boxes", "labels", "iscrowd")] == [(0, 4), (0,), (0,)]
    assert source.notes == [
        "1 boxes have no area; kept as they are",
        "1 boxes reach outside their image; kept as they are",
        "1 images have no boxes; kept with none",
    ]
    assert source.describe()["lost"] == ["segmentation"]


def test_coco_notes_do_not_double(tmp_path: Path) -> None:
    source = CocoSource(coco(tmp_path))
    list(source.entries())
    once = list(source.notes)
    list(source.entries())
    assert source.notes == once


def test_coco_without_iscrowd(tmp_path: Path) -> None:
    path = coco(tmp_path, annotations=[{"image_id": 7, "category_id": 1, "bbox": [0, 0, 1, 1]}])
    assert [column.name for column in CocoSource(path).columns] == ["boxes", "labels"]


@pytest.mark.parametrize(
    "change",
    [
        {"bbox": [0, 0, 1]},
        {"bbox": None},
        {"bbox": [0, 0, 1, "x"]},
        {"bbox": [0, 0, 1, float("nan")]},
        {"bbox": [0, 0, float("inf"), 1]},
        {"bbox": [10**400, 0, 1, 1]},
        {"bbox": [0, 0, 1e39, 1]},
        {"bbox": [2e38, 0, 2e38, 1]},
        {"bbox": [1.7e308, 0, 1.7e308, 1]},
        {"category_id": 2},
        {"category_id": [1]},
        {"iscrowd": 5},
    ],
)
def test_a_damaged_annotation_is_a_bad_entry_of_its_image(tmp_path: Path, change: dict[str, Any]) -> None:
    annotation = {"id": 1, "image_id": 7, "category_id": 1, "bbox": [0, 0, 1, 1], "iscrowd": 0} | change
    first, second = CocoSource(coco(tmp_path, annotations=[annotation])).entries()
    assert isinstance(first, BadEntry)
    assert first.key == "a.jpg"
    assert "bbox" not in change or "finite" in first.reason
    assert not isinstance(second, BadEntry)


@pytest.mark.parametrize("width", [10**400, "8", None, float("nan")])
def test_a_width_that_is_no_number_is_an_unknown_one(tmp_path: Path, width: Any) -> None:
    images = [{"id": 7, "file_name": "a.jpg", "width": width, "height": 6}]
    source = CocoSource(coco(tmp_path, images=images))
    (record,) = source
    assert len(record.columns["boxes"]) == 3
    assert source.notes == ["1 boxes have no area; kept as they are"]


def test_an_annotation_of_no_image_is_noted(tmp_path: Path) -> None:
    source = CocoSource(coco(tmp_path, annotations=[{"image_id": 8, "category_id": 1, "bbox": [0, 0, 1, 1]}]))
    list(source.entries())
    assert "1 annotations belong to no listed image and are lost" in source.notes


def test_a_listed_image_that_is_missing(tmp_path: Path) -> None:
    path = coco(tmp_path)
    (tmp_path / "val2017" / "sub" / "b.jpg").unlink()
    source = CocoSource(path)
    _, second = source.entries()
    with pytest.raises(DecodeError, match=r"sub/b\.jpg.*missing"):
        source.load(second)


@pytest.mark.parametrize(
    "name", ["../canary.jpg", "ABS", "sub/../../canary.jpg", "link.jpg", "", "a\0.jpg", "\ud800.jpg"]
)
def test_coco_reads_nothing_outside_its_root(tmp_path: Path, name: str) -> None:
    canary = put(tmp_path / "canary.jpg", jpg(99))
    images = [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": name.replace("ABS", str(canary))}]
    path = coco(tmp_path, images=images, annotations=[])
    (tmp_path / "val2017" / "link.jpg").symlink_to(canary)
    source = CocoSource(path, tmp_path / "val2017")
    first, second = source.entries()
    assert source.load(first).data == jpg(1)
    with pytest.raises(DecodeError):
        source.load(second)


@pytest.mark.parametrize(
    "change",
    [
        {"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 1, "file_name": "b.jpg"}]},
        {"images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "./a.jpg"}]},
        {"images": [{"id": 1}]},
        {"images": [{"id": [1], "file_name": "a.jpg"}]},
        {"images": 5},
        {"annotations": [5]},
        {"categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]},
        {"categories": [{"name": "a"}]},
        {"images": [{"id": 1, "file_name": "nowhere.jpg"}]},
    ],
)
def test_coco_files_that_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match="instances_val2017"):
        CocoSource(coco(tmp_path, **change))


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_coco_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    path = put(tmp_path / "x.json", text)
    assert recognise(path) is None
    with pytest.raises(SourceError, match=r"x\.json"):
        CocoSource(path)


def test_coco_of_nothing_but_lists_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = put(tmp_path / "x.json", '{"images": [' + "[]," * 100_000 + "[]]}")
    with pytest.raises(SourceError, match=r"lists and objects in .* bytes; annotations have far fewer"):
        CocoSource(path)


# Pascal VOC

OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
SIZE = "<size><width>8</width><height>6</height></size>"


def voc(tmp_path: Path, **annotations: str | bytes) -> Path:
    for name, text in annotations.items():
        put(tmp_path / "JPEGImages" / f"{name}.jpg", jpg())
        if text:
            put(tmp_path / "Annotations" / f"{name}.xml", text)
    return tmp_path


def annotation(*objects: str) -> str:
    return f"<annotation>{SIZE}{''.join(objects)}</annotation>"


def test_voc(tmp_path: Path) -> None:
    root = voc(
        tmp_path,
        a=annotation(OBJECT.format("dog", 1, 2, 5, 6), OBJECT.format("cat", 1, 1, 1, 9)),
        b=b'<?xml version="1.0" encoding="ISO-8859-1"?>\n'
        + annotation(OBJECT.format("é", 1, 1, 2, 2)).encode("latin-1"),
        c="",
    )
    put(root / "Annotations" / "d.xml", annotation())
    put(root / "JPEGImages" / "notes.txt", "x")
    assert recognise(root) == "voc"
    source = VocSource(root)
    first, second, third = source
    assert source.classes == ("cat", "dog", "é")
    assert (first.key, first.columns["labels"].tolist()) == ("JPEGImages/a.jpg", [1, 0])
    assert first.columns["boxes"].tolist() == [[1, 2, 5, 6], [1, 1, 1, 9]]
    assert second.columns["labels"].tolist() == [2]
    assert third.columns["boxes"].shape == (0, 4)
    assert sorted(source.notes) == [
        "1 annotation files belong to no image and are lost",
        "1 boxes have no area; kept as they are",
        "1 boxes reach outside their image; kept as they are",
        "1 images have no boxes; kept with none",
    ]
    assert source.skipped == {"not an image": 1}


LAUGHS = '<!DOCTYPE lolz [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS + "<annotation><object><name>&b;</name></object></annotation>",
        '<!DOCTYPE x [<!ENTITY a SYSTEM "CANARY">]><annotation><folder>&a;</folder></annotation>',
        '<!DOCTYPE x SYSTEM "CANARY"><annotation/>',
        '<?xml version="1.0"?>\n<!doctype x [<!entity a "b">]><annotation/>',
        ("\ufeff" + LAUGHS + "<annotation/>").encode(),
        ('<?xml version="1.0" encoding="utf-16"?>' + LAUGHS + "<annotation/>").encode("utf-16"),
        b'<?xml version="1.0" encoding="cp037"?>' + (LAUGHS + "<annotation/>").encode("cp037"),
        b'<?xml version="1.0" encoding="utf-7"?>+ADw-annotation/>',
        "<annotation>",
        "<annotation>&a;</annotation>",
        b"<annotation>\xff</annotation>",
        "no xml",
        annotation("<object><name>a</name></object>"),
        annotation(OBJECT.format("", 1, 1, 1, 1)),
        annotation(OBJECT.format("a", "x", 1, 1, 1)),
        annotation(OBJECT.format("a", "nan", 1, 1, 1)),
        annotation(OBJECT.format("a", "1e999", 1, 1, 1)),
        " " * (5 << 20),
        "<a>" * 200_000,
    ],
)
def test_voc_annotations_that_are_refused(tmp_path: Path, text: str | bytes) -> None:
    canary = put(tmp_path / "canary", "secret")
    if isinstance(text, str):
        text = text.replace("CANARY", canary.as_uri())
    root = voc(tmp_path / "set", a=annotation(OBJECT.format("dog", 1, 2, 5, 6)), b=text)
    source = VocSource(root)
    first, second = source.entries()
    assert isinstance(source.load(first), Record)
    assert isinstance(second, BadEntry)
    assert "secret" not in second.reason
    assert source.classes == ("dog",)


def test_voc_does_not_look_at_paths_in_the_xml(tmp_path: Path) -> None:
    put(tmp_path / "canary.jpg", jpg(99))
    text = "<annotation><filename>../../canary.jpg</filename><path>/etc/hostname</path></annotation>"
    (record,) = VocSource(voc(tmp_path / "set", a=text))
    assert (record.key, record.data) == ("JPEGImages/a.jpg", jpg())


@pytest.mark.parametrize("link", ["JPEGImages/a.jpg", "Annotations/a.xml"])
def test_voc_follows_no_link_out_of_the_root(tmp_path: Path, link: str) -> None:
    root = voc(tmp_path / "set", a=annotation(), b=annotation())
    (root / link).unlink()
    (root / link).symlink_to(put(tmp_path / "canary", annotation(OBJECT.format("canary", 1, 1, 2, 2))))
    source = VocSource(root)
    with pytest.raises(DecodeError, match="outside"):
        source.load(next(source.entries()))
    assert source.classes == ()


def test_voc_without_its_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Pascal VOC"):
        VocSource(tmp_path)


@pytest.mark.skipif(DATA is None, reason="PACKFMT_TEST_DATA is not set")
def test_bccd() -> None:
    source = VocSource(Path(str(DATA)) / "detection-bccd")
    records = list(source)
    assert len(records) == source.count() == 364
    assert source.classes == ("Platelets", "RBC", "WBC")
    assert sum(len(record.columns["boxes"]) for record in records) == 4888
    assert "2 boxes have no area; kept as they are" in source.notes
    assert all(record.columns["boxes"].shape[0] == len(record.columns["labels"]) for record in records)


# YOLO


def yolo(root: Path, **labels: str | None) -> Path:
    for name, text in labels.items():
        put(root / "images" / "train" / f"{name}.jpg", jpg())
        if text is not None:
            put(root / "labels" / "train" / f"{name}.txt", text)
    return root


def test_yolo(tmp_path: Path) -> None:
    root = yolo(tmp_path, a="1 0.5 0.5 0.5 1\n0 0.25 0.5 0 0.5\n", b=None, c="0 .9 .5 .4 .5\n\n")
    put(root / "data.yaml", "path: /etc\ntrain: ../../canary\nnames: [cat, 'dog']\n")
    put(root / "labels" / "train" / "z.txt", "")
    assert recognise(root) == "yolo"
    source = YoloSource(root)
    first, second, _ = source
    assert source.classes == ("cat", "dog")
    assert first.key == "images/train/a.jpg"
    assert first.columns["boxes"].tolist() == [[2, 0, 6, 6], [2, 1.5, 2, 4.5]]
    assert first.columns["labels"].tolist() == [1, 0]
    assert second.columns["boxes"].shape == (0, 4)
    assert source.notes == [
        "1 boxes have no area; kept as they are",
        "1 images have no boxes; kept with none",
        "1 boxes reach outside their image; kept as they are",
        "1 label files belong to no image and are lost",
    ]


def test_yolo_beside_the_images_and_polygons(tmp_path: Path) -> None:
    put(tmp_path / "a.jpg", jpg())
    put(tmp_path / "a.txt", "0 0.5 0.5 0.5 0.5 0.9\n0 0 0 1 0.5 0.5 1\n")
    source = YoloSource(tmp_path)
    (record,) = source
    assert record.columns["boxes"].tolist() == [[2, 1.5, 6, 4.5], [0, 0, 8, 6]]
    assert source.notes == ["1 polygons were reduced to their bounding boxes", "1 confidences beside boxes are lost"]


@pytest.mark.parametrize(
    "text",
    [
        "0 0.5 0.5 0.5",
        "0 a b c d",
        "0.5 0 0 1 1",
        "-1 0 0 1 1",
        "2 0 0 1 1",
        "0 nan 0 1 1",
        "0 inf 0 1 1",
        "0 1 1 1 1 1 1 1",
    ],
)
def test_yolo_labels_that_are_refused(tmp_path: Path, text: str) -> None:
    root = yolo(tmp_path, a=text)
    put(root / "classes.txt", "cat\ndog\n")
    (entry,) = YoloSource(root).entries()
    assert isinstance(entry, BadEntry)
    assert entry.key == "images/train/a.jpg"


def test_yolo_needs_the_image_for_its_size(tmp_path: Path) -> None:
    root = yolo(tmp_path, a="0 0.5 0.5 1 1")
    (root / "images" / "train" / "a.jpg").write_bytes(b"no image")
    source = YoloSource(root)
    with pytest.raises(DecodeError, match=r"images/train/a\.jpg"):
        source.load(next(source.entries()))


@pytest.mark.parametrize("link", ["images/train/a.jpg", "labels/train/a.txt"])
def test_yolo_follows_no_link_out_of_the_root(tmp_path: Path, link: str) -> None:
    root = yolo(tmp_path / "set", a="0 0.5 0.5 1 1")
    (root / link).unlink()
    (root / link).symlink_to(put(tmp_path / "canary", "0 0.5 0.5 1 1"))
    source = YoloSource(root)
    with pytest.raises(DecodeError, match="outside"):
        source.load(next(source.entries()))


def test_yolo_reads_no_names_through_a_link(tmp_path: Path) -> None:
    root = yolo(tmp_path / "set", a="0 0.5 0.5 1 1")
    (root / "classes.txt").symlink_to(put(tmp_path / "canary", "secret"))
    with pytest.raises(SourceError, match="outside"):
        YoloSource(root)


BOX = "0 .5 .5 .1 .1"
DAMAGED = ["-1 .5 .5 .1 .1", "cat .5 .5 .1 .1", "0 0.5 0.5", "0 nan 0 1 1", ""]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("named", [True, False])
def test_a_yolo_set_is_recognised_behind_damaged_and_empty_labels(tmp_path: Path, text: str, named: bool) -> None:
    root = yolo(tmp_path, **{f"a{number:03d}": text for number in range(1 if named else 100)}, b="" if named else BOX)
    if named:
        put(root / "classes.txt", "cat\ndog\n")
    assert recognise(root) == "yolo"
    first, *_, last = YoloSource(root).entries()
    assert isinstance(first, BadEntry) == bool(text)
    assert not isinstance(last, BadEntry)


@pytest.mark.parametrize("stray", ["README.txt", "0.txt", "train.txt"])
@pytest.mark.parametrize("text", ["labels of cats", BOX, ""])
def test_a_text_file_beside_the_labels_does_not_decide(tmp_path: Path, stray: str, text: str) -> None:
    put(tmp_path / "images" / "a.jpg", jpg())
    put(tmp_path / "labels" / stray, text)
    put(tmp_path / "classes.txt", "cat\n")
    assert recognise(tmp_path) is None
    put(tmp_path / "labels" / "a.txt", BOX)
    assert recognise(tmp_path) == "yolo"


def test_captions_of_images_are_no_yolo_set(tmp_path: Path) -> None:
    assert recognise(yolo(tmp_path, a="a cat on a mat", b="a dog")) is None


def test_a_yolo_set_below_many_folders(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"a{number}").mkdir()
    yolo(tmp_path / "train", a=BOX)
    assert recognise(tmp_path) == "yolo"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: [a, 'b c', \"d\"]", ("a", "b c", "d")),
        ("names: [\n  a,\n  b,\n]\n", ("a", "b")),
        ("nc: 2\nnames:\n  - a\n  - b # note\ntrain: x", ("a", "b")),
        ("names:\n- a\n- b\n", ("a", "b")),
        ("names:\n  1: b\n  0: a\n", ("a", "b")),
        ("names:\n  5: b\n", ()),
        ("names: !!python/object/apply:os.system ['touch canary']", ()),
        ("names: &a [*a]", ()),
        ("nothing: here", ()),
        ("names: ['person, standing', \"dog's\"]", ("person, standing", "dog's")),
        ("names: [cat,\n dog, # a comment, here\n bird]", ("cat", "dog", "bird")),
        ("names: [cat, # ]\r\n  dog's,\r\n]  # two\r\nnc: 2\r\n", ("cat", "dog's")),
        ('names: [\'a]\', "b\\"\\u00e9", c#, d:e, f g]', ("a]", 'b"é', "c#", "d:e", "f g")),
        ("names:\n  0: 'c #1'\n  1: \"d: #2\" # x\n", ("c #1", "d: #2")),
        ("names: # of classes\n# one\n\n  - 'it''s'\n  # two\n  - a, b [c]\n", ("it's", "a, b [c]")),
        ("names: []\nnc: 0", ()),
        ("nc: 3\nnames: [a, b]", ()),
        ("nc: 2 # classes\nnames: [a, b]", ("a", "b")),
        ("names: ['a, b]", ()),
        ("names: ['a' b, c]", ()),
        ('names: [a, "b]\nx: "', ()),
        ("names: [a,, b]", ()),
        ("names: [a, [b]]", ()),
        ("names: [a, b: c]", ()),
        ("names: [a, b", ()),
        ("names: [a] b", ()),
        ('names: ["\\x41"]', ("A",)),
        ("names: [a #,\n b]", ()),
        ("names:\n  - a\n  - 'b\n  - c\n", ()),
        ("names:\n  - a\n  -\n  - c\n", ()),
        ("names:\n- a\n-\n- c\n", ()),
        ("names:\n- a long name\n  that goes on\n- c\n", ("a long name that goes on", "c")),
        ("names:\n  - a\n  - b: c\n", ()),
        ("names:\n- a\nb\n- c\n", ()),
        ("names:\n  0: a\n  0: b\n  1: c\n", ()),
        ("names:\n  0: a\n  - b\n", ()),
        ("names:\n  - a\n    - b\n", ("a - b",)),
    ],
)
def test_names_in_yaml(text: str, names: tuple[str, ...]) -> None:
    assert yaml_names(text) == names


@pytest.mark.parametrize("data", [b"", jpg(), b"{}", b'{"images": []}'])
def test_foreign_files_are_not_recognised(tmp_path: Path, data: bytes) -> None:
    assert recognise(put(tmp_path / "x" / "y", data)) is None
    assert recognise(tmp_path / "x") is None
    assert recognise(tmp_path / "none") is None
