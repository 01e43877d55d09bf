"""Parquet files: Hugging Face's layout and plain columns; paths in them are never opened."""

from __future__ import annotations

import builtins
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from kinds import recogniser
from make import dot, jpg, trapped_pickle

import packfmt
from packfmt.converting import convert
from packfmt.errors import DecodeError, SourceError
from packfmt.sources.base import BadEntry
from packfmt.sources.parquet.source import ParquetSource

recognise = recogniser("parquet")

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path: Path, columns: dict[str, Any], features: Any = None, **options: Any) -> Path:
    table = pa.table(columns)
    if features is not None:
        text = features if isinstance(features, bytes) else json.dumps({"info": {"features": features}}).encode()
        table = table.replace_schema_metadata({b"huggingface": text})
    pq.write_table(table, path, **options)
    return path


def images(*rows: tuple[bytes | None, str | None] | None) -> Any:
    return pa.array([None if row is None else {"bytes": row[0], "path": row[1]} for row in rows], IMAGE)


def test_hugging_face_layout(tmp_path: Path) -> None:
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    columns = {
        "image": images((jpg(1), "a.jpg"), (dot(), "b/c.png")),
        "label": [1, 0],
        "caption": ["naïve", None],
    }
    source = ParquetSource(write(tmp_path / "x.parquet", columns, features))
    assert (source.classes, source.count()) == (("cat", "dog"), 2)
    assert [(record.key, record.data, record.columns) for record in source] == [
        ("a.jpg", jpg(1), {"label": 1, "caption": "naïve"}),
        ("b/c.png", dot(), {"label": 0, "caption": ""}),
    ]


def test_a_plain_binary_column_is_found_by_its_content(tmp_path: Path) -> None:
    columns = {"raw": [b"no image"], "photo": [jpg()], "small": pa.array([7], pa.int8()), "x": [[1.5, 2.5]]}
    (record,) = source = ParquetSource(write(tmp_path / "x.parquet", columns))
    assert (record.key, record.data) == ("x.parquet/00000000", jpg())
    assert record.columns == {"raw": b"no image", "small": 7, "x": [1.5, 2.5]}
    assert [(column.name, column.dtype, column.shape) for column in source.columns[1:]] == [
        ("small", "|i1", ()),
        ("x", "<f8", (None,)),
    ]


def test_names_of_the_index_are_not_taken(tmp_path: Path) -> None:
    (record,) = ParquetSource(write(tmp_path / "x.parquet", {"image": [dot()], "width": [5], "label": [1]}))
    assert record.columns == {"label": 1, "source_width": 5}


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "x.parquet", {"image": [dot()], "objects": [{"a": 1}], "tags": [["a"]]}))
    assert source.describe()["lost"] == ["objects", "tags"]


CLASSES = {"names": ["cat", "dog"], "_type": "ClassLabel"}


@pytest.mark.parametrize(
    "feature", [{"feature": CLASSES, "_type": "Sequence"}, {"feature": CLASSES, "_type": "List"}, [CLASSES]]
)
@pytest.mark.parametrize("name", ["label", "labels", "tags"])
def test_several_classes_of_an_image_keep_their_names(tmp_path: Path, feature: Any, name: str) -> None:
    columns = {"image": [dot(), jpg()], name: [[1, 0], []]}
    source = ParquetSource(write(tmp_path / "x.parquet", columns, {name: feature}))
    assert (source.classes, source.lost) == (("cat", "dog"), [])
    assert [record.columns for record in source] == [{"labels": [1, 0]}, {"labels": []}]


def test_lists_of_labels_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [dot()], "label": [3], "more": [[1, 0]]}, {"more": [CLASSES]})
    source = ParquetSource(path, label="more")
    assert source.classes == ("cat", "dog")
    assert [column.name for column in source.columns] == ["labels", "label"]


def test_class_names_of_a_second_column_are_told_to_be_lost(tmp_path: Path) -> None:
    columns = {"image": [dot()], "fine_label": [1], "coarse_label": [0]}
    source = ParquetSource(
        write(tmp_path / "x.parquet", columns, {"fine_label": CLASSES, "coarse_label": {**CLASSES, "names": ["pet"]}})
    )
    assert (source.classes, source.lost) == (("cat", "dog"), ["class names of coarse_label"])
    assert [record.columns for record in source] == [{"label": 1, "coarse_label": 0}]


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int8(), pa.string()), "string_view", pa.large_string()])
def test_texts_of_every_form_are_kept(tmp_path: Path, kind: Any) -> None:
    kind = getattr(pa, kind)() if isinstance(kind, str) else kind
    texts = pa.array(["left", None, "left"]).cast(kind)
    source = ParquetSource(write(tmp_path / "x.parquet", {"image": [dot()] * 3, "side": texts}))
    assert source.lost == []
    assert [record.columns["side"] for record in source] == ["left", "", "left"]


def test_paths_that_are_alike_give_row_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": images((dot(1), "image.png"), (dot(2), "image.png"))})
    source = ParquetSource(path)
    assert [record.key for record in source] == ["x.parquet/00000000", "x.parquet/00000001"]
    assert "row numbers" in source.notes[0]


def test_a_key_column_is_the_key(tmp_path: Path) -> None:
    (record,) = ParquetSource(write(tmp_path / "x.parquet", {"image": images((dot(), "p")), "key": ["a/b.png"]}))
    assert (record.key, record.columns) == ("a/b.png", {})


@pytest.mark.parametrize("as_given", ["folder", "glob", "braces"])
def test_several_files(tmp_path: Path, as_given: str) -> None:
    for number in range(2):
        write(tmp_path / f"x-{number}.parquet", {"image": [dot(number)]})
    paths = {"folder": tmp_path, "glob": tmp_path / "*.parquet", "braces": tmp_path / "x-{0..1}.parquet"}[as_given]
    assert recognise(paths) == "parquet"
    assert [record.data for record in ParquetSource(paths)] == [dot(0), dot(1)]


def test_files_of_differing_schemas_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"image": [dot()]})
    write(tmp_path / "b.parquet", {"image": [dot()], "label": [1]})
    with pytest.raises(SourceError, match=r"b\.parquet has another schema than .*a\.parquet"):
        ParquetSource(tmp_path)


@pytest.mark.parametrize(
    "where", ["canary.jpg", "absolute", "../canary.jpg", "file://absolute", "http://localhost:1/x.jpg"]
)
def test_a_row_with_only_a_path_is_a_bad_entry_and_nothing_is_opened(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary.jpg"
    canary.write_bytes(jpg(77))
    monkeypatch.chdir(tmp_path)
    where = where.replace("absolute", str(canary))
    path = write(tmp_path / "x.parquet", {"image": images((dot(), "a.png"), (None, where)), "label": [0, 1]})
    source = ParquetSource(path)
    opened: list[object] = []
    real = builtins.open
    monkeypatch.setattr(builtins, "open", lambda *args, **options: opened.append(args[0]) or real(*args, **options))
    first, second = source.entries()
    assert first.data == dot()
    assert isinstance(second, BadEntry)
    assert (second.key, second.data, second.columns) == (where, None, {"label": 1})
    assert not any("canary" in str(name) for name in opened)


@pytest.mark.parametrize("row", [None, (None, None), (b"", "b")])
def test_a_row_without_an_image(tmp_path: Path, row: tuple[bytes | None, str | None] | None) -> None:
    path = write(tmp_path / "x.parquet", {"image": images((dot(), "a"), row)})
    entry = list(ParquetSource(path).entries())[1]
    assert isinstance(entry, BadEntry) or entry.data == b""


def test_a_null_number_is_a_bad_entry(tmp_path: Path) -> None:
    source = ParquetSource(write(tmp_path / "x.parquet", {"image": [dot(), dot()], "label": [1, None]}))
    with pytest.raises(DecodeError, match="'label' is null"):
        list(source)


def test_a_null_among_bytes_is_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": images((dot(), "a.png"), (dot(), "b.png")), "mask": [b"m", None]})
    report = convert(path, tmp_path / "out.bin")
    assert report.problems == []
    with packfmt.open(report.path) as reader:
        assert list(reader.columns["mask"]) == [b"m", b""]


def test_pickles_in_cells_and_metadata_are_never_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    trap = trapped_pickle(canary)
    schema = pa.schema(
        [
            pa.field("image", pa.binary()),
            pa.field(
                "x",
                pa.binary(),
                metadata={b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": trap},
            ),
        ]
    )
    pq.write_table(pa.table({"image": [dot()], "x": [trap]}, schema=schema), tmp_path / "x.parquet")
    (record,) = ParquetSource(tmp_path / "x.parquet")
    assert record.columns == {"x": trap}
    assert not canary.exists()


@pytest.mark.parametrize(
    "features", [b"no json", b"[]", b'{"info": 1}', b'{"info": {"features": {"label": {"names": [1]}}}}']
)
def test_damaged_metadata_gives_no_classes(tmp_path: Path, features: bytes) -> None:
    source = ParquetSource(write(tmp_path / "x.parquet", {"image": [dot()], "label": [1]}, features))
    assert source.classes == ()


def test_names_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [dot(1)], "second": [dot(2)], "label": [1], "coarse": [2]})
    (record,) = ParquetSource(path, image="second", label="coarse")
    assert (record.data, record.columns["label"]) == (dot(2), 2)


@pytest.mark.parametrize("names", [{"image": "none"}, {"image": "label"}, {"label": "image"}, {"label": "none"}])
def test_a_name_that_does_not_fit_is_refused(tmp_path: Path, names: dict[str, str]) -> None:
    with pytest.raises(SourceError, match="columns are"):
        ParquetSource(write(tmp_path / "x.parquet", {"image": [dot()], "label": [1]}), **names)


def test_no_image_column(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no column holds"):
        ParquetSource(write(tmp_path / "x.parquet", {"label": [1], "text": ["a"]}))


@pytest.mark.parametrize("cut", [1, 8, 200])
def test_a_cut_file(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "x.parquet", {"image": [dot()]})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SourceError, match=r"x\.parquet"):
        ParquetSource(path)


def test_a_damaged_page_is_an_error(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.parquet",
        {"image": [dot(), jpg()], "label": [1, 2]},
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    data = bytearray(path.read_bytes())
    data[data.index(jpg()) + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"x\.parquet"):
        list(ParquetSource(path, image="image"))


def test_memory_stays_bounded(tmp_path: Path) -> None:
    image = jpg() + bytes(1_000_000)
    pages = {"use_dictionary": False, "write_batch_size": 4}  # a page is cut after so many rows at the earliest
    path = write(tmp_path / "x.parquet", {"image": [image] * 60}, compression="none", **pages)
    source = ParquetSource(path)
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    peak = 0
    for _ in source.entries():
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak + tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


def test_without_pyarrow_the_install_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"image": [dot()]})
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SourceError, match=r"pip install 'packfmt\[parquet\]'"):
        ParquetSource(path)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1junk", jpg()])
def test_foreign_files_are_not_recognised(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert (recognise(tmp_path / "x"), recognise(tmp_path), recognise(tmp_path / "none")) == (
        "parquet" if data == b"PAR1" else None,
        None,
        None,
    )
