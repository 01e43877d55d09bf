"""What a pack holds, told from its index: for every kind of label and every backend, and for packs of other writers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import cmyk_jpeg, jpeg, oriented_jpeg

import packfmt
from packfmt import cli, storage
from packfmt.converting import convert, describe_source
from packfmt.describing import describe
from packfmt.errors import FormatError
from packfmt.record import KEY, Column
from packfmt.storage import recording

CLASSES = ("cat", "dog", "emu")
TEXT, RAGGED = ("|u1", (None,), "text"), ("<i8", (None,))
Make = Callable[..., str]


@pytest.fixture(params=[{}, {"shard_size": 1500}, {"backend": "lmdb"}], ids=["shard", "shards", "lmdb"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A function that writes a pack of these columns and rows, one image for each."""

    def write(columns: Sequence[Column], rows: Sequence[dict[str, Any]], classes: Sequence[str] = CLASSES) -> str:
        with storage.create(tmp_path / "out", columns=columns, classes=classes, **request.param) as writer:
            for number, row in enumerate(rows):
                writer.write(jpeg(20 + number, 30, seed=number), f"{number}.jpg", **row)
        return writer.path

    return write


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers leave packfmt's own columns out, as the format allows; it asks for the key alone."""
    key = Column(KEY, *TEXT)
    monkeypatch.setattr(recording, "merge_columns", lambda declared: (key, *declared))
    monkeypatch.setattr(recording, "image_values", lambda data: {})


def facts_of(path: str) -> dict[str, Any]:
    with storage.open(path) as reader:
        return json.loads(json.dumps(describe(reader)))  # type: ignore[no-any-return]


# What the labels of three images are, and what is told of them.
LABELS: dict[str, tuple[Column, list[Any], dict[str, Any]]] = {
    "numbers": (Column("label"), [0, 1, 1], {"classes": {"cat": 1, "dog": 2, "emu": 0}}),
    "numbers of no class": (
        Column("label"),
        [-1, 2, 3],
        {"classes": {"cat": 0, "dog": 0, "emu": 1}, "other_labels": 2},
    ),
    "huge numbers": (
        Column("label", "<u8"),
        [2**64 - 1, 2, 0],
        {"classes": {"cat": 1, "dog": 0, "emu": 1}, "other_labels": 1},
    ),
    "floats": (
        Column("label", "<f4"),
        [1.0, 0.5, float("nan")],
        {"classes": {"cat": 0, "dog": 1, "emu": 0}, "other_labels": 2},
    ),
    "truth values": (Column("label", "|b1"), [True, False, True], {"classes": {"cat": 1, "dog": 2, "emu": 0}}),
    "several each": (Column("label", *RAGGED), [[], [2], [0, 2]], {"classes": {"cat": 1, "dog": 0, "emu": 2}}),
    "two each": (Column("label", "<i4", (2,)), [[0, 1], [1, 1], [2, 1]], {"classes": {"cat": 1, "dog": 4, "emu": 1}}),
    "multi-hot": (
        Column("label", "|u1", (3,)),
        [[1, 0, 1], [0, 0, 0], [1, 0, 0]],
        {"classes": {"cat": 2, "dog": 0, "emu": 1}},
    ),
    "multi-hot, of truth values": (
        Column("label", "|b1", (3,)),
        [[True, False, True], [False] * 3, [True, False, False]],
        {"classes": {"cat": 2, "dog": 0, "emu": 1}},
    ),
    "parts of one": (
        Column("label", "<f4", (3,)),
        [[0.5, 0, 0.5], [0, 0, 1], [0, 0, 1]],
        {"classes": {"cat": 1, "dog": 0, "emu": 3}},
    ),
    "text": (Column("label", *TEXT), ["one", "zwei \udcff", "one"], {"labels": {"one": 2, "zwei \udcff": 1}}),
    "bytes": (Column("label", "|u1", (None,), "bytes"), [b"", b"\xff", b"1"], {}),
    "a place": (Column("label", "<f4", (2,)), [[0.1, 0.2]] * 3, {}),
}


@pytest.mark.parametrize(("column", "labels", "told"), LABELS.values(), ids=LABELS)
def test_labels_of_every_kind(make: Make, column: Column, labels: list[Any], told: dict[str, Any]) -> None:
    facts = facts_of(make([column], [{"label": label} for label in labels]))
    assert {name: facts[name] for name in ("classes", "other_labels", "labels") if name in facts} == told


@pytest.mark.parametrize(("column", "labels", "told"), LABELS.values(), ids=LABELS)
def test_a_copy_reports_the_same_classes(
    make: Make, column: Column, labels: list[Any], told: dict[str, Any], tmp_path: Path
) -> None:
    path = make([column], [{"label": label} for label in labels])
    report = convert(path, tmp_path / "copy.bin")
    assert report.classes == told.get("classes", {})
    empty = [name for name, count in report.classes.items() if not count]
    assert report.notes == [f"nothing is of class {name!r}; its number is kept" for name in empty]
    assert describe_source(path)["records"] == 3


@pytest.mark.parametrize(("column", "labels", "told"), LABELS.values(), ids=LABELS)
@pytest.mark.parametrize(
    "verb", [["info"], ["info", "--json"], ["verify", "--decode"], ["cat", "1.jpg"], ["unpack", "again"]]
)
def test_every_verb_takes_labels_of_every_kind(
    make: Make,
    column: Column,
    labels: list[Any],
    told: dict[str, Any],
    verb: list[str],
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make([column], [{"label": label} for label in labels])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main([verb[0], path, *verb[1:]])
    assert stop.value.code == 0
    assert capfdbinary.readouterr().err == b""


def test_captions_are_not_listed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packfmt.describing.LISTED", 2)
    assert "labels" not in facts_of(make([Column("label", *TEXT)], [{"label": str(i)} for i in range(3)]))


def test_without_class_names_no_classes_are_told(make: Make) -> None:
    assert "classes" not in facts_of(make([Column("label")], [{"label": 1}], classes=()))


def test_two_classes_of_one_name_are_counted_together(make: Make) -> None:
    path = make([Column("label")], [{"label": i} for i in (0, 1, 2)], classes=("a", "b", "a"))
    assert facts_of(path)["classes"] == {"a": 2, "b": 1}


def test_values_are_counted_a_chunk_at_a_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packfmt.describing.CHUNK", 2)
    facts = facts_of(make([Column("label")], [{"label": i % 3} for i in range(7)]))
    assert facts["classes"] == {"cat": 3, "dog": 2, "emu": 2}


BOXES, NAMES = Column("boxes", "<f4", (None, 4)), Column("labels", *RAGGED)


def test_boxes_and_their_classes(make: Make) -> None:
    rows = [{"boxes": np.ones((count, 4), "<f4"), "labels": [1] * count} for count in (0, 3, 1, 1)]
    facts = facts_of(make([BOXES, NAMES], rows))
    assert facts["classes"] == {"cat": 0, "dog": 5, "emu": 0}
    assert (facts["boxes"], facts["boxes_per_image"], facts["images_without_boxes"]) == (5, "0 to 3, median 1", 1)


def test_labels_of_images_come_before_those_of_boxes(make: Make) -> None:
    rows = [{"label": 2, "boxes": np.ones((2, 4), "<f4"), "labels": [0, 1]}]
    facts = facts_of(make([Column("label"), BOXES, NAMES], rows))
    assert (facts["classes"], facts["boxes"]) == ({"cat": 0, "dog": 0, "emu": 1}, 2)


def test_labels_of_boxes_are_told_where_those_of_images_are_no_classes(make: Make) -> None:
    rows = [{"label": [0.5, 1], "boxes": np.ones((2, 4), "<f4"), "labels": [0, 1]}]
    facts = facts_of(make([Column("label", "<f4", (2,)), BOXES, NAMES], rows))
    assert facts["classes"] == {"cat": 1, "dog": 1, "emu": 0}


@pytest.mark.parametrize("column", [Column("boxes", *TEXT), Column("boxes", "<f4", (None, 5)), Column("boxes")])
def test_a_column_called_boxes_that_holds_none(make: Make, column: Column) -> None:
    value = {"text": "x"}.get(column.kind, [[1, 2, 3, 4, 5]] if column.ragged else 1)
    assert "boxes_per_image" not in facts_of(make([column], [{"boxes": value}]))


def test_a_fixed_number_of_boxes(make: Make) -> None:
    facts = facts_of(make([Column("boxes", "<f4", (2, 4))], [{"boxes": np.zeros((2, 4))}] * 3))
    assert (facts["boxes"], facts["boxes_per_image"], facts["images_without_boxes"]) == (6, "2 to 2, median 2", 0)


def test_an_empty_pack(make: Make) -> None:
    facts = facts_of(make([Column("label"), BOXES, NAMES], []))
    assert (facts["records"], facts["classes"]) == (0, {"cat": 0, "dog": 0, "emu": 0})
    assert not {"boxes", "formats", "width"} & facts.keys()


def test_what_headers_tell(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out") as writer:
        for number, data in enumerate([jpeg(20, 30), oriented_jpeg(6), cmyk_jpeg(0), b"no image"]):
            writer.write(data, str(number))
    facts = facts_of(writer.path)
    assert facts["formats"] == {"unknown": 1, "jpeg": 3}
    assert (facts["width"], facts["height"]) == ("0 to 40, median 35", "0 to 48, median 34")
    assert (facts["exif_rotated"], facts["cmyk"]) == (1, 1)


def test_formats_of_a_later_version_are_told_by_their_codes(make: Make) -> None:
    known = {"width": 30, "height": 20, "channels": 3, "orientation": 0, "flags": 0}
    facts = facts_of(make([], [{**known, "format": code} for code in (1, 9, 9, 255)]))
    assert facts["formats"] == {"jpeg": 1, "unknown (code 9)": 2, "unknown (code 255)": 1}


# Packs of other writers

OWN = [Column("format", *TEXT), Column("width", "<f4"), Column("flags", "<u4", (2,)), Column("orientation", *RAGGED)]
OWN_ROWS = [{"format": f"x{i}", "width": i / 2, "flags": [i, 1], "orientation": [7] * i} for i in range(3)]


@pytest.mark.usefixtures("foreign")
def test_columns_under_names_that_packfmt_gives_to_others_are_not_taken_for_those(make: Make) -> None:
    facts = facts_of(make(OWN, OWN_ROWS))
    assert facts["columns"] == {
        "flags": "uint32 (2,)",
        "format": "text",
        "key": "text",
        "orientation": "<i8 (None,)",
        "width": "float32",
    }
    assert not {"formats", "width", "height", "exif_rotated", "cmyk"} & facts.keys()


@pytest.mark.usefixtures("foreign")
def test_a_pack_of_nothing_but_keys(make: Make) -> None:
    facts = facts_of(make([], [{}] * 3))
    assert facts["columns"] == {"key": "text"}
    assert not {"formats", "width", "height", "exif_rotated", "cmyk", "classes"} & facts.keys()


def test_a_copy_keeps_such_columns_under_other_names(
    make: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "merge_columns", lambda declared: (Column(KEY, *TEXT), *declared))
        patch.setattr(recording, "image_values", lambda data: {})
        path = make(OWN, OWN_ROWS)
    convert(path, tmp_path / "copy.bin")
    with storage.open(tmp_path / "copy.bin") as reader:
        assert reader.columns["format"].tolist() == [1, 1, 1]
        assert reader.columns["width"].tolist() == [30, 30, 30]
        assert list(reader.columns["source_format"]) == ["x0", "x1", "x2"]
        assert reader.columns["source_width"].tolist() == [0, 0.5, 1]
        assert reader.columns["source_flags"].tolist() == [[0, 1], [1, 1], [2, 1]]
        assert [value.tolist() for value in reader.columns["source_orientation"]] == [[], [7], [7, 7]]


@pytest.mark.torch
@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize(("columns", "rows"), [(OWN, OWN_ROWS), ([], [{}] * 3)], ids=["of other types", "none"])
def test_a_dataset_over_a_pack_without_sizes_says_how_to_get_them(
    make: Make, columns: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(columns, rows)
    with pytest.raises(FormatError, match=r"has no column '(width|height)' .*: packfmt convert .*out.* new\.bin"):
        packfmt.ImageDataset(path)
    monkeypatch.undo()
    convert(path, tmp_path / "new.bin")
    with packfmt.ImageDataset(tmp_path / "new.bin", crop=packfmt.CenterCrop(16)) as dataset:
        assert dataset[0][0].shape == (3, 16, 16)
