"""Converting, end to end: bytes and labels of every kind, bad images, options, and nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import kinds
import numpy as np
import pytest
from make import example, frame, jpeg, png

import packfmt
from packfmt import converting
from packfmt.converting import convert, describe_source
from packfmt.errors import ConvertError, SourceError
from packfmt.packing import copy_records
from packfmt.record import Column, Record
from packfmt.reports import BadImage, BadImagesError
from packfmt.sources.base import BadEntry, Source

ROOT = Path(__file__).parent.parent

# Kinds whose images are numbered by labels of their own: case -> (column, its values).
LABELLED = {
    "lmdb": ("label", ["cat", "dog", "dog"]),
    **dict.fromkeys(kinds.BOXED, ("labels", [[0], [1], [1]])),
}
STREAMING = ("hdf5", "parquet", "tfrecord", "tar", "compressed tar")


def content(path: Path) -> list[tuple[str, bytes, dict[str, Any]]]:
    """Key, bytes and the user's columns of every record."""
    with packfmt.open(path, check="full") as reader:
        names = [name for name in reader.columns if name not in ("key", "width", "height", "channels")]
        names = [name for name in names if name not in ("format", "orientation", "flags")]
        return [(r.key, bytes(r.data), {name: np.asarray(r.columns[name]).tolist() for name in names}) for r in reader]


def made(name: str, folder: Path, *bad: bytes) -> Path:
    """The source of this case; with ``bad``, that is its second image."""
    images = [kinds.IMAGES[0], *(bad or kinds.IMAGES[1:2]), kinds.IMAGES[2]]
    return kinds.MADE[name][1](folder, images)


def left(folder: Path) -> set[str]:
    """What converting left in the folder beside the sources."""
    return {path.name for path in folder.iterdir() if not path.name.startswith("made")}


def children() -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


# Every kind


@pytest.mark.parametrize("name", kinds.MADE)
def test_bytes_and_labels_of_every_kind(name: str, tmp_path: Path) -> None:
    report = convert(made(name, tmp_path), tmp_path / "out.bin")
    records = content(tmp_path / "out.bin")
    column, labels = LABELLED.get(name, ("label", kinds.LABELS))
    assert [data for _, data, _ in records] == kinds.IMAGES
    assert [columns[column] for _, _, columns in records] == labels
    assert (report.records, report.bytes, report.formats) == (3, sum(map(len, kinds.IMAGES)), {"jpeg": 3})
    assert report.classes == ({} if name in (*STREAMING[:1], *STREAMING[2:], "lmdb") else {"cat": 1, "dog": 2})
    assert left(tmp_path) == {"out.bin"}


@pytest.mark.parametrize("name", kinds.MADE)
def test_the_same_source_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    convert(path, tmp_path / "one.bin", threads=1)
    convert(path, tmp_path / "two.bin", threads=3)
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()


@pytest.mark.parametrize("name", kinds.MADE)
def test_what_a_dry_run_says_is_what_comes(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    facts = describe_source(path)
    assert sorted(tmp_path.rglob("*")) == before
    convert(path, tmp_path / "out.bin")
    (key, _, columns), *rest = content(tmp_path / "out.bin")
    assert (facts["kind"], facts["records"], facts["bad"]) == (kinds.MADE[name][0], 1 + len(rest), {})
    assert facts["first"]["key"] == key
    assert facts["columns"].keys() == columns.keys() == facts["first"].keys() - {"key"}
    with packfmt.open(tmp_path / "out.bin") as reader:
        assert facts["classes"] == list(reader.classes)


def test_a_dry_run_counts_what_is_no_image(tmp_path: Path) -> None:
    path = made("folder", tmp_path)
    (path / "README").write_bytes(b"about")
    (path / ".hidden").write_bytes(b"")
    facts = describe_source(path)
    assert (facts["records"], facts["passed_over"]) == (3, {"hidden or system file": 1, "not an image": 1})


def test_a_dry_run_tells_layout_and_types(tmp_path: Path) -> None:
    facts = describe_source(made("lmdb", tmp_path))
    assert (facts["layout"], facts["columns"], facts["first"]) == (
        "text recognition",
        {"label": "text"},
        {"key": "image-000000001", "label": "cat"},
    )


def test_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int, int | None]] = []
    convert(made("tar", tmp_path), tmp_path / "out.bin", progress=lambda *call: calls.append(call))
    sizes = np.cumsum([len(data) for data in kinds.IMAGES]).tolist()
    assert calls == [(number + 1, size, None) for number, size in enumerate(sizes)]
    calls.clear()
    convert(made("zip", tmp_path), tmp_path / "out2.bin", progress=lambda *call: calls.append(call))
    assert [call[0] for call in calls] == [1, 2, 3]


# Bad images


BAD = [name for name in kinds.MADE if name not in ("compressed tar", "pack in shards")]


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_all_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadImagesError, match="1 bad image") as caught:
        convert(made(name, tmp_path, kinds.BROKEN), tmp_path / "out.bin")
    assert caught.value.problems[0].key[-5:] in ("1.jpg", "00001", "00002")
    assert left(tmp_path) == set()


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_left_out(name: str, tmp_path: Path) -> None:
    report = convert(made(name, tmp_path, kinds.BROKEN), tmp_path / "out.bin", bad="skip")
    assert [data for _, data, _ in content(tmp_path / "out.bin")] == [kinds.IMAGES[0], kinds.IMAGES[2]]
    assert (report.records, len(report.problems), report.bad) == (2, 1, "skip")


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_kept_with_their_columns(name: str, tmp_path: Path) -> None:
    report = convert(made(name, tmp_path, kinds.BROKEN), tmp_path / "out.bin", bad="keep")
    records = content(tmp_path / "out.bin")
    column, labels = LABELLED.get(name, ("label", kinds.LABELS))
    if name == "yolo":  # its boxes are fractions of a size that such an image does not have
        assert [data for _, data, _ in records] == [kinds.IMAGES[0], kinds.IMAGES[2]]
        return
    assert [data for _, data, _ in records] == [kinds.IMAGES[0], kinds.BROKEN, kinds.IMAGES[2]]
    assert [columns[column] for _, _, columns in records] == labels
    assert report.formats == {"unknown": 1, "jpeg": 2}


def test_a_source_without_images_says_what_was_passed_over(tmp_path: Path) -> None:
    path = made("folder", tmp_path)
    for name in kinds.NAMES:
        (path / name).write_bytes(b"text")
        (path / name).rename(path / f"{name}.txt")
    with pytest.raises(ConvertError, match=r"made-folder: no image found \(3 not an image\)"):
        convert(path, tmp_path / "out.bin")
    assert left(tmp_path) == set()


# Labels


def write_table(folder: Path, *rows: str, head: str = "path,label,score") -> Path:
    path = folder / "made-labels.csv"
    path.write_text("\n".join([head, *rows]))
    return path


def test_a_table_chooses_and_labels_the_images_of_a_folder(tmp_path: Path) -> None:
    table = write_table(tmp_path, "dog/2.jpg,two,0.5", "cat/0.jpg,zero,1.5")
    convert(made("folder", tmp_path), tmp_path / "out.bin", labels=table)
    assert content(tmp_path / "out.bin") == [
        ("dog/2.jpg", kinds.IMAGES[2], {"label": 0, "score": 0.5}),
        ("cat/0.jpg", kinds.IMAGES[0], {"label": 1, "score": 1.5}),
    ]
    with packfmt.open(tmp_path / "out.bin") as reader:
        assert reader.classes == ("two", "zero")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("zip", kinds.NAMES),
        ("zip", ["0.jpg", "1.jpg", "2.jpg"]),
        ("zip", ["0", "1", "2"]),
        ("zip", ["cat/0", "dog/1", "dog/2"]),
        ("lmdb", [f"image-{number:09d}" for number in (1, 2, 3)]),
        ("tar", ["000.jpg", "001.jpg", "002.jpg"]),
    ],
)
def test_a_table_is_joined_by_key(name: str, keys: list[str], tmp_path: Path) -> None:
    rows = [f"{key},{label},{number}" for number, (key, label) in enumerate(zip(keys, "bab", strict=True))]
    report = convert(
        made(name, tmp_path),
        tmp_path / "out.bin",
        labels=write_table(tmp_path, *rows, "elsewhere.jpg,a,9"),
        key_column="path",
    )
    assert [columns for _, _, columns in content(tmp_path / "out.bin")] == [
        {"label": label, "score": number} for number, label in enumerate([1, 0, 1])
    ]
    assert report.classes == {"a": 1, "b": 2}
    assert report.notes == [f"1 rows of {tmp_path / 'made-labels.csv'} belong to no image"]


def test_a_label_replaces_the_one_of_the_source(tmp_path: Path) -> None:
    table = write_table(tmp_path, "0.jpg,a", "1.jpg,b", "2.jpg,a", head="path,label")
    convert(made("zip", tmp_path), tmp_path / "out.bin", labels=table)
    assert [columns for _, _, columns in content(tmp_path / "out.bin")] == [{"label": n} for n in (0, 1, 0)]


@pytest.mark.parametrize("labels", [("in", "out", "in"), ("0", "1", "0")])
@pytest.mark.parametrize("name", kinds.BOXED)
def test_a_label_of_other_names_than_the_boxes_is_refused(name: str, labels: tuple[str, ...], tmp_path: Path) -> None:
    table = write_table(tmp_path, *(f"{n}.jpg,{label}" for n, label in enumerate(labels)), head="path,label")
    with pytest.raises(SourceError, match=r"s\.csv: its label counts .* of the boxes cat, dog; .*label_column"):
        convert(made(name, tmp_path), tmp_path / "out.bin", labels=table)
    convert(made(name, tmp_path), tmp_path / "out.bin", labels=table, label_column="")
    with packfmt.open(tmp_path / "out.bin") as reader:
        assert (reader.classes, "source_label" in reader.columns) == (("cat", "dog"), True)


def test_a_label_of_the_names_of_the_boxes_is_kept_beside_them(tmp_path: Path) -> None:
    table = write_table(tmp_path, "0.jpg,cat", "1.jpg,dog", "2.jpg,cat", head="path,label")
    convert(made("coco", tmp_path), tmp_path / "out.bin", labels=table)
    told = [(columns["label"], columns["labels"]) for _, _, columns in content(tmp_path / "out.bin")]
    assert told == [(0, [0]), (1, [1]), (0, [1])]


@pytest.mark.parametrize("column", ["boxes", "labels"])
def test_a_column_of_the_source_is_not_replaced(column: str, tmp_path: Path) -> None:
    table = write_table(tmp_path, "0.jpg,1", "1.jpg,2", "2.jpg,3", head=f"path,{column}")
    with pytest.raises(SourceError, match=f"the images have columns {column} of their own; .*Rename"):
        convert(made("coco", tmp_path), tmp_path / "out.bin", labels=table)


def test_a_table_is_joined_to_hdf5_by_its_own_columns(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "made.h5", "w") as file:
        for name, data in zip(("ISIC_1", "ISIC_2"), kinds.IMAGES, strict=False):
            file[name] = np.void(data)
    table = write_table(tmp_path, "ISIC_1,0", "ISIC_2,1", head="isic_id,target")
    convert(tmp_path / "made.h5", tmp_path / "out.bin", labels=table, key_column="isic_id")
    assert [(key, columns) for key, _, columns in content(tmp_path / "out.bin")] == [
        ("ISIC_1", {"label": 0}),
        ("ISIC_2", {"label": 1}),
    ]


def test_an_image_without_a_row_is_bad_and_cannot_be_kept(tmp_path: Path) -> None:
    table = write_table(tmp_path, "0.jpg,a,1", "2.jpg,b,2")
    with pytest.raises(BadImagesError, match=r"'dog/1\.jpg': the table .*made-labels\.csv has no row for it"):
        convert(made("zip", tmp_path), tmp_path / "out.bin", labels=table)
    report = convert(made("zip", tmp_path), tmp_path / "out.bin", labels=table, bad="keep")
    assert (report.records, len(report.problems)) == (2, 1)


def test_a_row_with_a_gap_makes_its_image_bad(tmp_path: Path) -> None:
    table = write_table(tmp_path, "0.jpg,a,1", "1.jpg,,2", "2.jpg,b,3")
    with pytest.raises(BadImagesError, match=r"its row in .*: line 3: column 'label' is empty"):
        convert(made("zip", tmp_path), tmp_path / "out.bin", labels=table)


def test_images_of_one_name_that_share_a_row_are_counted(tmp_path: Path) -> None:
    (tmp_path / "made-tree").mkdir()
    source = Fixed([("a/1.jpg", kinds.IMAGES[0], {}), ("b/1.jpg", kinds.IMAGES[1], {})])
    table = Fixed([("1.jpg", b"", {"score": 1})], [Column("score")])
    joined = converting.JoinedSource(source, table, "t.csv")
    for _ in range(2):
        assert [record.columns for record in joined] == [{"score": 1}] * 2
        assert joined.notes == ["1 images share a row of t.csv with another, by their file's name"]


class Fixed(Source):
    """Records from a list."""

    def __init__(self, rows: list[tuple[str, bytes, dict[str, Any]]], columns: list[Column] | None = None) -> None:
        super().__init__()
        self._rows = rows
        self.columns = tuple(columns or ())

    def entries(self) -> Iterator[Any]:
        for key, data, columns in self._rows:
            yield Record(data, key, columns)


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A pack whose classes are numbered otherwise than cat and dog by their names."""
    with packfmt.create(tmp_path / "made-training.bin", classes=("dog", "bird", "cat")) as writer:
        writer.write(kinds.IMAGES[0], "x.jpg", label=0)
    return tmp_path / "made-training.bin"


@pytest.mark.parametrize("name", ["folder", "zip", "parquet", "pack", "table"])
def test_classes_are_numbered_as_in_the_other_pack(name: str, training: Path, tmp_path: Path) -> None:
    report = convert(made(name, tmp_path), tmp_path / "out.bin", classes_from=training)
    assert [columns["label"] for _, _, columns in content(tmp_path / "out.bin")] == [2, 0, 0]
    assert report.classes == {"dog": 2, "bird": 0, "cat": 1}


@pytest.mark.parametrize("name", kinds.BOXED)
def test_classes_of_boxes_are_numbered_as_in_the_other_pack(name: str, training: Path, tmp_path: Path) -> None:
    convert(made(name, tmp_path), tmp_path / "out.bin", classes_from=training)
    assert [columns["labels"] for _, _, columns in content(tmp_path / "out.bin")] == [[2], [0], [0]]


def test_classes_come_from_a_folder_too(tmp_path: Path) -> None:
    (tmp_path / "made-other" / "ant").mkdir(parents=True)
    for name in ("cat", "dog"):
        (tmp_path / "made-other" / name).mkdir()
    convert(made("zip", tmp_path), tmp_path / "out.bin", classes_from=tmp_path / "made-other")
    assert [columns["label"] for _, _, columns in content(tmp_path / "out.bin")] == [1, 2, 2]


def test_a_class_that_the_other_pack_does_not_know_is_refused(training: Path, tmp_path: Path) -> None:
    path = made("folder", tmp_path)
    (path / "horse").mkdir()
    with pytest.raises(SourceError, match=r"classes \['horse'\] are not among those of .*g\.bin: dog, bird, cat"):
        convert(path, tmp_path / "out.bin", classes_from=training)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("name", ["tar", "hdf5", "lmdb"])
def test_labels_without_names_cannot_be_matched(name: str, training: Path, tmp_path: Path) -> None:
    before = children()  # those of multiprocessing may live on from earlier tests
    with pytest.raises(SourceError, match="the source has no class names to match with"):
        convert(made(name, tmp_path), tmp_path / "out.bin", classes_from=training)
    assert children() <= before


def test_a_label_beyond_the_names_is_bad_and_never_passed_on(training: Path, tmp_path: Path) -> None:
    with packfmt.create(tmp_path / "made.bin", classes=("cat", "dog")) as writer:
        for label in (1, 2, -1):
            writer.write(kinds.IMAGES[0], f"{label}.jpg", label=label)
    report = convert(tmp_path / "made.bin", tmp_path / "out.bin", classes_from=training, bad="skip")
    assert report.problems == [
        BadImage("2.jpg", "label 2 has no class name to renumber it by"),
        BadImage("-1.jpg", "label -1 has no class name to renumber it by"),
    ]


def test_labels_of_a_narrow_type_get_room_for_the_other_numbers(tmp_path: Path) -> None:
    with packfmt.create(tmp_path / "made.bin", columns=[Column("label", "|u1")], classes=("z",)) as writer:
        writer.write(kinds.IMAGES[0], "z.jpg", label=0)
    with packfmt.create(tmp_path / "made-many.bin", classes=[f"a{n}" for n in range(300)] + ["z"]) as writer:
        writer.write(kinds.IMAGES[0], "x.jpg", label=0)
    convert(tmp_path / "made.bin", tmp_path / "out.bin", classes_from=tmp_path / "made-many.bin")
    assert content(tmp_path / "out.bin")[0][2] == {"label": 300}


def test_kept_bad_entries_are_renumbered_too(training: Path) -> None:
    source = Fixed([], [Column("label")])
    source.classes = ("cat", "dog")
    bad = [BadEntry(key, "odd", b"data", {"label": label}) for key, label in (("x", 0), ("y", 9))]
    source.entries = lambda: iter(bad)  # type: ignore[method-assign]
    (first, second) = converting.RelabelledSource(source, ("dog", "cat"), "other").entries()
    assert (first.columns, first.data, second.data) == ({"label": 1}, b"data", None)


# Shuffling


@pytest.mark.parametrize("name", kinds.MADE)
def test_every_kind_can_be_shuffled(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    convert(path, tmp_path / "plain.bin")
    report = convert(path, tmp_path / "out.bin", shuffle=5)
    plain, shuffled = content(tmp_path / "plain.bin"), content(tmp_path / "out.bin")
    assert shuffled != plain
    assert sorted(shuffled, key=str) == sorted(plain, key=str)
    assert left(tmp_path) == {"plain.bin", "out.bin"}
    assert (report.path, report.records, report.problems) == (str(tmp_path / "out.bin"), 3, [])


def test_the_order_is_that_of_the_seed_whatever_the_source(tmp_path: Path) -> None:
    orders = []
    for name in ("zip", "folder", "parquet", "tar"):
        convert(made(name, tmp_path), tmp_path / f"{name}.bin", shuffle=0)
        orders.append([data for _, data, _ in content(tmp_path / f"{name}.bin")])
    assert orders == orders[:1] * 4


def test_shuffling_a_stream_keeps_columns_classes_and_metadata(tmp_path: Path) -> None:
    convert(made("parquet", tmp_path), tmp_path / "out.lmdb", shuffle=2)
    with packfmt.open(tmp_path / "out.lmdb") as reader:
        assert reader.classes == kinds.CLASSES
        assert [reader.classes[label] for label in reader.columns["label"]] == [
            record.key.partition("/")[0] for record in reader
        ]


@pytest.mark.parametrize(("bad", "count"), [("skip", 2), ("keep", 3)])
def test_shuffling_a_stream_reports_bad_images_once(bad: Any, count: int, tmp_path: Path) -> None:
    report = convert(made("tar", tmp_path, kinds.BROKEN), tmp_path / "out.bin", shuffle=1, bad=bad)
    assert (report.records, [problem.key for problem in report.problems], report.bad) == (count, ["001.jpg"], bad)


@pytest.mark.parametrize("bad", ["skip", "keep"])
def test_shuffling_a_stream_decodes_when_asked(bad: Any, tmp_path: Path) -> None:
    cut = kinds.IMAGES[1][:-20]
    source = made("tar", tmp_path, cut)
    assert convert(source, tmp_path / "headers.bin", shuffle=1).problems == []
    report = convert(source, tmp_path / "out.bin", shuffle=1, bad=bad, decode=True)
    assert [(problem.key, problem.kept) for problem in report.problems] == [("001.jpg", bad == "keep")]
    assert report.records == (3 if bad == "keep" else 2)


def test_shuffling_a_stream_fails_before_the_target_is_touched(tmp_path: Path) -> None:
    with pytest.raises(BadImagesError, match=r"made\.tar: 1 bad image"):
        convert(made("tar", tmp_path, kinds.BROKEN), tmp_path / "out.bin", shuffle=1)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("stop", [2, 3 + 2])
def test_a_shuffle_that_is_interrupted_leaves_nothing(stop: int, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(made("tar", tmp_path), tmp_path / "out.bin", shuffle=1, progress=Interrupt(stop))
    assert left(tmp_path) == set()


# Targets and options


@pytest.mark.parametrize(
    "name",
    [
        "out.tar.gz",
        "out.tgz",
        "out.zip",
        "out.h5",
        "out.tfrecord",
        "out.tfrecords",
        "out.csv",
        "out.npz",
        "out.jpg",
        "out.webp",
        "OUT.HDF5",
        "OUT.TAR",
        "out.Parquet",
        "OUT.LMDB",
    ],
)
def test_a_target_of_a_format_that_is_not_written_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="packfmt writes no such format, but out"):
        convert(made("zip", tmp_path), tmp_path / name)


@pytest.mark.parametrize("name", ["out.parquet", "out/", "out.lmdb"])
def test_a_target_that_has_no_shards(name: str, tmp_path: Path) -> None:
    with pytest.raises((ConvertError, ValueError), match="shards"):
        convert(made("zip", tmp_path), f"{tmp_path}/{name}", shard_size=1000)
    assert left(tmp_path) == set()


def test_a_name_without_suffix_is_a_folder_unless_it_gets_shards(tmp_path: Path) -> None:
    convert(made("zip", tmp_path), tmp_path / "tree")
    assert sorted(str(p.relative_to(tmp_path / "tree")) for p in (tmp_path / "tree").rglob("*.jpg")) == kinds.NAMES
    report = convert(made("zip", tmp_path), tmp_path / "many", shard_size=1)
    assert len(report.files) == 4


def test_backend_decides_over_the_name(tmp_path: Path) -> None:
    convert(made("zip", tmp_path), tmp_path / "out.v2", backend="lmdb")
    assert (tmp_path / "out.v2" / "data.mdb").is_file()


@pytest.mark.parametrize("name", ["out.bin", "out.lmdb", "out.tar", "out.parquet"])
def test_what_exists_is_refused_before_the_source_is_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("zip", tmp_path)
    convert(path, tmp_path / name)
    monkeypatch.setattr(converting, "open_source", None)
    if name != "out.lmdb":
        with pytest.raises(FileExistsError, match="exists"):
            convert(path, tmp_path / name)
    monkeypatch.undo()
    with pytest.raises(FileExistsError, match="exists"):
        convert(path, tmp_path / name)
    assert convert(path, tmp_path / name, force=True).records == 3
    assert left(tmp_path) == {name}


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for force in (False, True):
        with pytest.raises(FileExistsError, match="is not an empty folder"):
            convert(made("zip", tmp_path), tmp_path / "out", force=force)
    (tmp_path / "out" / "mine").unlink()
    assert convert(made("zip", tmp_path), tmp_path / "out").records == 3


@pytest.mark.parametrize("option", [{"layout": "NHWC"}, {"resolution": 3}, {"follow_links": True}])
def test_options_that_a_kind_does_not_have_are_refused(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"a zip source takes no {next(iter(option))}"):
        convert(made("zip", tmp_path), tmp_path / "out.bin", **option)


def test_the_kind_can_be_given(tmp_path: Path) -> None:
    convert(made("voc", tmp_path) / "JPEGImages", tmp_path / "out.bin", kind="folder")
    with pytest.raises(SourceError, match="zip"):
        convert(made("tar", tmp_path), tmp_path / "out2.bin", kind="zip")


def test_hdf5_has_labels_of_its_own(tmp_path: Path) -> None:
    convert(made("hdf5", tmp_path), tmp_path / "out.bin", h5_labels="")
    assert "label" not in content(tmp_path / "out.bin")[0][2]


# Interruptions, memory


class Interrupt:
    """A progress function that is Ctrl-C at its n-th call."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self, *call: Any) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("target", ["out.bin", "out.lmdb", "out-%03d.tar", "out.parquet", "out"])
@pytest.mark.parametrize("name", ["lmdb", "hdf5", "tar", "folder"])
def test_an_interruption_leaves_neither_file_nor_process(name: str, target: str, tmp_path: Path) -> None:
    before = children()
    with pytest.raises(KeyboardInterrupt):
        convert(made(name, tmp_path), tmp_path / target, progress=Interrupt(2))
    assert left(tmp_path) == set()
    assert children() <= before


STOPPED = """
import os, signal, sys
from packfmt.cli import show, main
class Stop:
    def __init__(self, verb): pass
    def __call__(self, *call): os.kill(os.getpid(), int(sys.argv[1]))
show._Log = Stop
main(["convert", *sys.argv[2:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_its_children(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED, str(int(number)), made("lmdb", tmp_path), tmp_path / "out.bin"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert "Traceback" not in done.stderr
    assert left(tmp_path) == set()


class Endless(Source):
    """Records made as they are asked for."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.columns = (Column("label"), Column("text", "|u1", (None,), "text"))
        self._head = jpeg()

    def entries(self) -> Iterator[Record]:
        for number in range(self._count):
            yield Record(self._head[:-2] + bytes(100_000) + b"\xff\xd9", f"{number}", {"label": 1, "text": "x" * 50})


@pytest.mark.parametrize(
    ("target", "limit"), [("out.bin", 30), ("out-%03d.tar", 30), ("out", 30), ("out.parquet", 110)]
)
def test_memory_does_not_grow_with_the_source(target: str, limit: int, tmp_path: Path) -> None:
    create, options = converting._target(str(tmp_path / target), None, None)
    tracemalloc.start()
    try:
        source = Endless(1500)  # 150 MB
        copy_records(source, tmp_path / target, where="made", create=create, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit << 20


# Round trips


ODD = {
    "cat/1.jpg": jpeg(20, 21),
    "cat/1.mid.jpg": jpeg(20, 22),
    "cat/1.png": png(),
    "cat/IMG 0001.JPG": jpeg(20, 23),
    "cat/deep er/grüße 日本.jpeg": jpeg(20, 24),
    "cat/no suffix": jpeg(20, 25),
    "dog/v1.0/a.b.c.jpg": jpeg(20, 26),
    "dog/new\nline.jpg": jpeg(20, 27),
    "dog/-x.jpg": jpeg(20, 28),
}


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / "made-tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "made-tree" / "empty").mkdir()
    return folder / "made-tree"


def test_the_round_trip_through_every_format(tmp_path: Path) -> None:
    convert(tree(tmp_path, ODD), tmp_path / "1.bin")
    first = content(tmp_path / "1.bin")
    assert {key: data for key, data, _ in first} == ODD
    steps = ["1.bin", "2.lmdb", "3.tar", "4.parquet", "5-%03d.tar", "6.json", "7"]
    for source, target in itertools.pairwise(steps):
        options: dict[str, Any] = {"shard_size": 2000} if "%" in target or target.endswith("json") else {}
        path = str(tmp_path / source)
        several = sorted(tmp_path.glob("5-*.tar")) if "%" in source else path
        convert(several, tmp_path / target, **options)
    assert len(list(tmp_path.glob("5-*.tar"))) > 2
    convert(tmp_path / "7", tmp_path / "8.bin")
    assert content(tmp_path / "8.bin") == first
    with packfmt.open(tmp_path / "1.bin") as one, packfmt.open(tmp_path / "8.bin") as last:
        assert one.classes == last.classes == ("cat", "dog", "empty")
        assert one.content_id == last.content_id


def test_names_that_are_no_text_pass_where_they_can(tmp_path: Path) -> None:
    os.makedirs(os.fsencode(tmp_path) + b"/made-tree/a")
    with open(os.fsencode(tmp_path) + b"/made-tree/a/\xff\xfe.jpg", "wb") as file:
        file.write(kinds.IMAGES[0])
    steps = ["made-tree", "1.bin", "2.lmdb", "3.tar", "4", "5.bin"]
    for source, target in itertools.pairwise(steps):
        convert(tmp_path / source, tmp_path / target)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "5.bin").read_bytes()
    with pytest.raises(ConvertError, match=r"key of 'a/\\udcff\\udcfe.jpg' is not valid UTF-8, which Parquet demands"):
        convert(tmp_path / "1.bin", tmp_path / "6.parquet")
    assert not list(tmp_path.glob("*parquet*"))


def coco_with_polygons(folder: Path) -> Path:
    path = kinds.coco(folder)
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        annotation |= {"segmentation": [[1, 2, 3, 4, 5, 6]], "keypoints": [1, 2, 2]}
    path.write_text(json.dumps(content))
    return path


def parquet_with_objects(folder: Path) -> Path:
    import pyarrow.parquet

    path = kinds.parquet(folder)
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.append_column("objects", [[[{"a": 1}]] * len(table)]), path)
    return path


def hdf5_with_more(folder: Path) -> Path:
    import h5py

    path = kinds.hdf5(folder)
    with h5py.File(path, "a") as file:
        file["meta/ids"] = [1, 2]
    return path


def tfrecord_with_texts(folder: Path) -> Path:
    data = frame(example(image__encoded=kinds.IMAGES[0], image__object__class__text=[b"cat", b"dog"]))
    (folder / "made.tfrecord").write_bytes(data)
    return folder / "made.tfrecord"


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (coco_with_polygons, "keypoints, segmentation"),
        (parquet_with_objects, "objects"),
        (tfrecord_with_texts, "image/object/class/text"),
        (hdf5_with_more, "meta/ids"),
        (kinds.voc, "parts, pose, truncated"),
    ],
)
def test_the_report_says_what_was_lost(make: Any, names: str, tmp_path: Path) -> None:
    source = make(tmp_path)
    assert describe_source(source)["lost"] == names.split(", ")
    for options in ({}, {"shuffle": 1, "force": True}):
        report = convert(source, tmp_path / "out.bin", **options)
        assert [note for note in report.notes if note.startswith("lost")] == [f"lost: {names}"]


def test_what_was_lost_is_said_of_a_renumbered_source(tmp_path: Path) -> None:
    report = convert(coco_with_polygons(tmp_path), tmp_path / "out.bin", classes_from=kinds.voc(tmp_path))
    assert "lost: keypoints, segmentation" in report.notes


# Real data


@pytest.mark.torch
def test_word_crops_keep_their_labels(data: Path, tmp_path: Path) -> None:
    report = convert(data / "lmdb-text-recognition", tmp_path / "out.bin")
    assert report.records == 920
    with packfmt.open(tmp_path / "out.bin") as reader:
        assert all(reader.columns["label"])
    assert train(tmp_path / "out.bin", ["label"], "list") == 920


@pytest.mark.torch
def test_restoration_pairs(data: Path, tmp_path: Path) -> None:
    assert convert(data / "lmdb-restoration", tmp_path / "out.bin").records == 4
    assert train(tmp_path / "out.bin", [], "stack") == 4


@pytest.mark.torch
def test_blood_cells_keep_their_boxes(data: Path, tmp_path: Path) -> None:
    report = convert(data / "detection-bccd", tmp_path / "out.bin")
    assert (report.records, report.boxes, sum(report.classes.values())) == (364, 4888, 4888)
    assert "2 boxes have no area; kept as they are" in report.notes
    assert train(tmp_path / "out.bin", ["boxes", "labels"], "list") == 364


def train(pack: Path, fields: list[str], collate: str) -> int:
    """The number of images in one epoch."""
    dataset = packfmt.MMapImageDataset(pack, crop=packfmt.RandomResizedCrop(32), fields=fields or None)
    with dataset:
        return sum(len(images) for images, _ in packfmt.Loader(dataset, batch_size=32, collate=collate, partial="keep"))


def test_signs_come_back_as_they_were(data: Path, tmp_path: Path) -> None:
    folder = data / "small-signs" / "images"
    steps = ["1.bin", "2.tar", "3.parquet", "4.lmdb", "5"]
    convert(folder, tmp_path / steps[0])
    for source, target in itertools.pairwise(steps):
        convert(tmp_path / source, tmp_path / target)
    was = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    now = {str(path.relative_to(tmp_path / "5")): path for path in (tmp_path / "5").rglob("*") if path.is_file()}
    assert len(now) == 2062
    assert now.keys() == was.keys()
    assert all(path.read_bytes() == was[name].read_bytes() for name, path in now.items())
