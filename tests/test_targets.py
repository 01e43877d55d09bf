"""What is written for other tools: what they find in it, what packfmt reads back, and what is refused."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import kinds
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packfmt
from packfmt.converting import convert
from packfmt.errors import ConvertError, SourceError
from packfmt.record import DTYPES, Column
from packfmt.sources.columns import PackSchema, from_json, to_json
from packfmt.sources.folder import FolderWriter
from packfmt.sources.parquet.source import ParquetSource
from packfmt.sources.parquet.writer import ParquetWriter
from packfmt.sources.webdataset.source import TarSource
from packfmt.sources.webdataset.writer import TarWriter

WRITERS = {"out.tar": TarWriter, "out-%02d.tar": TarWriter, "out.parquet": ParquetWriter, "out": FolderWriter}
LABEL = Column("label", "<i8")
DATA = kinds.IMAGES[0]

RICH = (
    LABEL,
    Column("boxes", "<f4", (None, 4)),
    Column("ids", "<u8", (None,)),
    Column("half", "<f2", (3,)),
    Column("grid", "|i1", (2, 2)),
    Column("sure", "|b1"),
    Column("caption", "|u1", (None,), "text"),
    Column("raw", "|u1", (None,), "bytes"),
)
ROWS: list[dict[str, Any]] = [
    {
        "label": 1,
        "boxes": np.float32([[0.1, 2, 3, np.inf], [1e-30, 0, -0.0, 7]]),
        "ids": np.array([2**64 - 1, 0], np.uint64),
        "half": [0.1, 1, -65504],
        "grid": [[1, 2], [-128, 127]],
        "sure": True,
        "caption": 'grüße "日本"\n',
        "raw": bytes(range(256)),
    },
    {
        "label": 0,
        "boxes": np.empty((0, 4), np.float32),
        "ids": [],
        "half": [float("nan"), 0, 0],
        "grid": [[0, 0], [0, 0]],
        "sure": False,
        "caption": "",
        "raw": b"",
    },
]
METADATA = {"made by": "a test", "numbers": [1, 2.5, None]}


@pytest.fixture(params=WRITERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rich_pack(path: Path) -> Path:
    with packfmt.create(path, columns=RICH, classes=("dog", "cat"), metadata=METADATA) as writer:
        for number, row in enumerate(ROWS):
            writer.write(kinds.IMAGES[number], f"{('dog', 'cat')[row['label']]}/{number}.jpg", **row)
    return path


def write(make: Any, path: Path, *rows: tuple[str, dict[str, Any]], **options: Any) -> Any:
    """Write these records; the writer that did it."""
    with make(path, **options) as writer:
        for key, values in rows:
            writer.write(DATA, key, **values)
    return writer


# What every target keeps to


def test_nothing_is_there_before_the_end(name: str, tmp_path: Path) -> None:
    with WRITERS[name](tmp_path / name) as writer:
        writer.write(DATA, "a.jpg")
        assert {path.name[:9] for path in tmp_path.iterdir()} == {".packfmt-"}
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    assert len(writer) == 1
    assert all(os.path.exists(path) for path in writer.files)


def test_an_error_leaves_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write(WRITERS[name], tmp_path / name, ("a.jpg", {}), ("b.jpg", None))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_discarding_twice_and_late_does_no_harm(name: str, tmp_path: Path) -> None:
    writer = WRITERS[name](tmp_path / name)
    writer.discard()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder to write to"):
        WRITERS[name](tmp_path / "missing" / name)


def test_the_same_records_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    rich_pack(tmp_path / "made.bin")
    found = []
    for turn in ("one", "two"):
        (tmp_path / turn).mkdir()
        convert(tmp_path / "made.bin", tmp_path / turn / name)
        files = sorted(path for path in (tmp_path / turn).rglob("*") if path.is_file())
        found.append([path.read_bytes() for path in files])
    assert found[0] == found[1]


@pytest.mark.parametrize("given", [{}, {"label": 1, "more": 2}, {"more": 2}])
def test_columns_are_those_that_were_declared(name: str, given: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"'a\.jpg' has columns .*, declared are \['label'\]"):
        write(WRITERS[name], tmp_path / name, ("a.jpg", {"width": 3, **given}), columns=[LABEL])
    assert list(tmp_path.iterdir()) == []


UNSAFE = ["../x.jpg", "/etc/x.jpg", "a/../../x.jpg", "a//x.jpg", "./x.jpg", "..", "a/", "x\0.jpg"]


@pytest.mark.parametrize("key", UNSAFE)
@pytest.mark.parametrize("target", ["out.tar", "out"])
def test_a_key_that_leads_elsewhere_is_refused(target: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(ConvertError, match="is not a file name inside a folder"):
        write(WRITERS[target], tmp_path / "in" / target, ("fine.jpg", {}), (key, {}))
    assert list(tmp_path.rglob("*")) == [tmp_path / "in"]


# Columns, classes and metadata


@pytest.mark.parametrize("target", ["out.tar", "out-%02d.tar", "out.parquet"])
def test_everything_comes_back(target: str, tmp_path: Path) -> None:
    pack = rich_pack(tmp_path / "made.bin")
    report = convert(pack, tmp_path / target)
    convert(report.files, tmp_path / "again.bin")
    with packfmt.open(pack) as one, packfmt.open(tmp_path / "again.bin") as two:
        assert two.content_id == one.content_id
        assert (two.classes, two.metadata) == (("dog", "cat"), METADATA)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_column_comes_back(data: st.DataObject, tmp_path: Path) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    inner = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    column = Column("c", dtype, data.draw(st.sampled_from([inner, (None, *inner)])))
    count = data.draw(st.integers(1, 3))
    rows = []
    for _ in range(count):
        shape = (data.draw(st.integers(0, 3)), *inner) if column.ragged else inner
        raw = data.draw(st.binary(min_size=64 * 9, max_size=64 * 9))
        numbers = np.frombuffer(raw, "|u1").astype("|b1") if dtype == "|b1" else np.frombuffer(raw, dtype)
        rows.append(np.nan_to_num(numbers[: int(np.prod(shape))].reshape(shape), nan=7))
    with packfmt.create(tmp_path / "made.bin", columns=[column], force=True) as writer:
        for number, row in enumerate(rows):
            writer.write(DATA, f"{number}.jpg", c=row)
    for target in ("out.tar", "out.parquet"):
        convert(tmp_path / "made.bin", tmp_path / target, force=True)
        convert(tmp_path / target, tmp_path / "again.bin", force=True)
        with packfmt.open(tmp_path / "made.bin") as one, packfmt.open(tmp_path / "again.bin") as two:
            assert one.content_id == two.content_id


def test_labels_that_are_no_integers_come_back(tmp_path: Path) -> None:
    for column, value in [(Column("label", "|u1", (None,), "text"), "word"), (Column("label", "<f4", (2,)), [0.5, 1])]:
        with packfmt.create(tmp_path / "made.bin", columns=[column], force=True) as writer:
            writer.write(DATA, "a.jpg", label=value)
        for target in ("out.tar", "out.parquet"):
            convert(tmp_path / "made.bin", tmp_path / target, force=True)
            convert(tmp_path / target, tmp_path / "again.bin", force=True)
            with packfmt.open(tmp_path / "again.bin") as reader:
                assert np.array_equal(reader.columns["label"][0], value)


# Tar


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_webdataset_finds_what_it_looks_for(tmp_path: Path) -> None:
    convert(rich_pack(tmp_path / "made.bin"), tmp_path / "out.tar")
    found = members(tmp_path / "out.tar")
    stems = ("cat/0", "dog/1")
    assert list(found) == ["__packfmt__", *(stem + suffix for stem in stems for suffix in (".jpg", ".cls", ".json"))]
    assert (found["cat/0.jpg"], found["cat/0.cls"]) == (DATA, b"1")
    told = json.loads(found["cat/0.json"])
    assert (told["ids"], told["sure"], told["caption"]) == ([2**64 - 1, 0], True, ROWS[0]["caption"])


def test_shards_are_cut_by_size_and_each_says_what_it_holds(tmp_path: Path) -> None:
    report = convert(rich_pack(tmp_path / "made.bin"), tmp_path / "out-%02d.tar", shard_size=1)
    assert [Path(path).name for path in report.files] == ["out-00.tar", "out-01.tar"]
    assert all(next(iter(members(Path(path)))) == "__packfmt__" for path in report.files)
    assert TarSource(report.files[1]).classes == ("dog", "cat")


@pytest.mark.parametrize("bad", ["a%sb.tar", "a-%d-%d.tar", "a-%.tar", "a-%(x)d.tar", "a-%5f.tar", "a-%%d.tar"])
def test_a_name_that_gives_no_numbers_is_refused(bad: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="shards need one number in their name"):
        TarWriter(tmp_path / bad)


def test_a_percent_sign_in_a_folder_s_name_is_one_of_its_characters(tmp_path: Path) -> None:
    (tmp_path / "100%-%02d").mkdir()
    write(TarWriter, tmp_path / "100%-%02d" / "out.tar", ("a.jpg", {}))
    write(TarWriter, tmp_path / "100%-%02d" / "out-%d.tar", ("a.jpg", {}))
    assert [path.name for path in tmp_path.iterdir()] == ["100%-%02d"]
    assert sorted(path.name for path in (tmp_path / "100%-%02d").iterdir()) == ["out-0.tar", "out.tar"]


def test_one_file_is_not_split(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="several shards need a number"):
        TarWriter(tmp_path / "out.tar", shard_size=5)


def write_shards(folder: Path, count: int, force: bool = False) -> None:
    with TarWriter(folder / "out-%d.tar", shard_size=1, force=force) as writer:
        for number in range(count):
            writer.write(DATA, f"{number}.jpg")


def test_replacing_removes_shards_that_are_no_more(tmp_path: Path) -> None:
    write_shards(tmp_path, 4)
    write_shards(tmp_path, 2, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-0.tar", "out-1.tar"]


def test_shards_of_another_set_are_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "out-2.tar").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="exists"):
        write_shards(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["out-2.tar"]


def test_many_shards_hold_few_files_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with TarWriter(tmp_path / "out-%d.tar", shard_size=1) as writer:
        for number in range(50):
            writer.write(DATA, f"{number}.jpg")
        assert len(os.listdir("/proc/self/fd")) < before + 10


def test_images_of_one_name_share_their_parts(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar", columns=[LABEL]) as writer:
        for key in ("1.jpg", "1.png", "1.b.jpg", "1.gif"):
            writer.write(DATA, key, label=3)
    with tarfile.open(tmp_path / "out.tar") as archive:
        names = archive.getnames()
    assert names == ["__packfmt__", "1.jpg", "1.cls", "1.png", "1.b.jpg", "1.b.cls", "1.gif", "1.cls"]
    assert [(r.key, r.columns["label"]) for r in TarSource(tmp_path / "out.tar")] == [
        (key, 3) for key in ("1.jpg", "1.png", "1.b.jpg", "1.gif")
    ]


def test_images_of_one_name_with_different_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"'1\.png' and the image before it share the name '1'"):
        write(TarWriter, tmp_path / "out.tar", ("1.jpg", {"label": 3}), ("1.png", {"label": 4}), columns=[LABEL])


@pytest.mark.parametrize("key", ["a.json", "a.CLS", "b/x.cls", "__packfmt__"])
def test_images_named_like_parts_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="would be taken for a label or JSON"):
        write(TarWriter, tmp_path / "out.tar", (key, {}))


@pytest.mark.parametrize("key", ["a.txt", "b/x.npy", ".hidden.jpg", "__MACOSX/x.jpg", "Thumbs.db", "x", "a/b.c/x"])
def test_other_odd_names_come_back(key: str, tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar", columns=[LABEL]) as writer:
        writer.write(DATA, key, label=2)
    assert [(r.key, r.data, r.columns) for r in TarSource(tmp_path / "out.tar")] == [(key, DATA, {"label": 2})]


def test_bytes_that_are_no_image_come_back(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar") as writer:
        for key, data in (("a.xyz", b"odd"), ("b", b""), ("c.jpg", b"BM")):
            writer.write(data, key)
    found = {record.key: record.data for record in TarSource(tmp_path / "out.tar")}
    assert found == {"a.xyz": b"odd", "b": b"", "c.jpg": b"BM"}


def test_what_webdataset_will_not_see_is_noted(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar") as writer:
        for key in ("a.jpg", "b", "v1.0/c", "d.e.jpg", "f.g.jpg", "v1.0/h.jpg"):
            writer.write(DATA, key)
    assert writer.notes == [
        "2 names have no suffix; WebDataset passes over them",
        "2 names hold several dots; WebDataset cuts them at the first",
    ]


def test_a_tar_without_labels_gets_none_from_its_folders(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar") as writer:
        for key in ("cat/1.jpg", "dog/1.jpg"):
            writer.write(DATA, key)
    assert TarSource(tmp_path / "out.tar").columns == ()


def rewrite(path: Path, held: dict[str, bytes]) -> Path:
    """The archive again with these members."""
    with tarfile.open(path, "w") as archive:
        for name, data in held.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def good(**changes: Any) -> bytes:
    body = {"version": 1, "columns": [["label", "<i8", [], "array"]], "classes": ["a"], "metadata": {}}
    return json.dumps(body | changes).encode()


DAMAGED = [
    b"",
    b"[]",
    b"null",
    b"{",
    b"[" * 100_000,
    good(version=2),
    good(columns=[["label", "O", [], "array"]]),
    good(columns=[["label", "<i8", [-1], "array"]]),
    good(columns=[["label", "<i8", [10**12], "array"]]),
    good(columns=[["label", "<i8", [], "pickle"]]),
    good(columns=[["label", "<i8", [], "array"]] * 2),
    good(columns=[["width", "<u4", [], "array"]]),
    good(columns=[["label"]]),
    good(columns=7),
    good(classes="ab"),
    good(classes=[1]),
    good(metadata=[]),
]


@pytest.mark.parametrize("facts", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_notes_are_an_error_that_says_where(facts: bytes, tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar", columns=[LABEL]) as writer:
        writer.write(DATA, "a.jpg", label=0)
    with pytest.raises(SourceError, match=r"out\.tar, member __packfmt__: what packfmt noted there .* is damaged"):
        TarSource(rewrite(tmp_path / "out.tar", {"__packfmt__": facts, "a.jpg": DATA}))
    with pytest.raises(SourceError, match="is damaged"):
        PackSchema.decode(facts, "x")


def test_a_tar_whose_notes_were_removed_is_read_as_any_other(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar", columns=[LABEL, Column("x")], classes=["a"]) as writer:
        writer.write(DATA, "a.jpg", label=0, x=3)
    held = members(tmp_path / "out.tar")
    del held["__packfmt__"]
    source = TarSource(rewrite(tmp_path / "out.tar", held))
    (record,) = source
    assert (record.columns, source.classes) == ({"label": 0, "json": '{"x": 3}'}, ())


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"x": "3"}', b'{"x": [3]}', b'{"x": 1.5}', b'{"x": null}', b"[" * 9999]
)
def test_values_that_do_not_fit_are_bad_entries(text: bytes, tmp_path: Path) -> None:
    with TarWriter(tmp_path / "out.tar", columns=[LABEL, Column("x")]) as writer:
        writer.write(DATA, "a.jpg", label=0, x=3)
    held = members(tmp_path / "out.tar") | {"a.json": text}
    (entry,) = TarSource(rewrite(tmp_path / "out.tar", held)).entries()
    assert entry.reason.startswith("part .json")
    assert entry.data is None


def test_shards_of_two_sets_are_not_mixed(tmp_path: Path) -> None:
    for number, classes in enumerate((["cat", "dog"], ["dog", "cat"])):
        with TarWriter(tmp_path / f"{number}.tar", columns=[LABEL], classes=classes) as writer:
            writer.write(DATA, f"{number}.jpg", label=0)
    with pytest.raises(SourceError, match=r"1\.tar: its __packfmt__ tells other columns or classes than the fir"):
        list(TarSource([tmp_path / "0.tar", tmp_path / "1.tar"]))


# Parquet


def test_hugging_face_s_notes(tmp_path: Path) -> None:
    import pyarrow.parquet

    convert(rich_pack(tmp_path / "made.bin"), tmp_path / "out.parquet")
    schema = pyarrow.parquet.read_schema(tmp_path / "out.parquet")
    assert {field.name: str(field.type) for field in schema} == {
        "image": "struct<bytes: binary, path: string>",
        "boxes": "list<element: fixed_size_list<element: float>[4]>",
        "caption": "string",
        "grid": "fixed_size_list<element: fixed_size_list<element: int8>[2]>[2]",
        "half": "fixed_size_list<element: halffloat>[3]",
        "ids": "list<element: uint64>",
        "label": "int64",
        "raw": "binary",
        "sure": "bool",
    }
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    assert features["label"] == {"names": ["dog", "cat"], "_type": "ClassLabel"}
    assert features["boxes"] == {
        "feature": {"feature": {"dtype": "float32", "_type": "Value"}, "_type": "Sequence", "length": 4},
        "_type": "Sequence",
    }
    assert features["caption"] == {"dtype": "string", "_type": "Value"}


def test_class_names_of_boxes_are_told(tmp_path: Path) -> None:
    import pyarrow.parquet

    convert(kinds.voc(tmp_path), tmp_path / "out.parquet")
    schema = pyarrow.parquet.read_schema(tmp_path / "out.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["labels"] == {"feature": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "_type": "Sequence"}


def test_datasets_opens_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets, which packfmt does not depend on")
    convert(rich_pack(tmp_path / "made.bin"), tmp_path / "out.parquet")
    found = datasets.Dataset.from_parquet(str(tmp_path / "out.parquet"), cache_dir=str(tmp_path / "cache"))
    assert found.features["label"].names == ["dog", "cat"]
    assert (found[0]["image"].size, found[0]["label"], found[0]["caption"]) == ((24, 20), 1, ROWS[0]["caption"])


def test_a_file_changed_by_others_is_read_as_any_other(tmp_path: Path) -> None:
    import pyarrow.parquet

    convert(rich_pack(tmp_path / "made.bin"), tmp_path / "out.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    pyarrow.parquet.write_table(table.drop_columns(["caption"]), tmp_path / "out.parquet")
    source = ParquetSource(tmp_path / "out.parquet")
    assert [column.name for column in source.columns] == ["label", "half", "ids", "raw", "sure"]
    assert (source.classes, source.notes) == (
        ("dog", "cat"),
        ["columns were changed since packfmt wrote the file; it is read as of any other program"],
    )


def test_row_groups_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    monkeypatch.setattr("packfmt.sources.parquet.writer.GROUP_ROWS", 2)
    with ParquetWriter(tmp_path / "out.parquet") as writer:
        for number in range(5):
            writer.write(DATA, f"{number}.jpg")
    facts = pyarrow.parquet.ParquetFile(tmp_path / "out.parquet").metadata
    assert [facts.row_group(number).num_rows for number in range(facts.num_row_groups)] == [2, 2, 1]


def test_a_column_called_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="a column 'image' would hide the images"):
        ParquetWriter(tmp_path / "out.parquet", columns=[Column("image")])
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    column = Column("caption", "|u1", (None,), "text")
    with pytest.raises(ConvertError, match=r"caption of 'a\.jpg' is not valid UTF-8"):
        write(ParquetWriter, tmp_path / "out.parquet", ("a.jpg", {"caption": "\udcff"}), columns=[column])
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_nothing_is_left_and_the_install_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"pip install 'packfmt\[parquet\]'"):
        ParquetWriter(tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


# Folders


def test_a_folder_says_what_is_lost(tmp_path: Path) -> None:
    report = convert(rich_pack(tmp_path / "made.bin"), tmp_path / "out")
    assert report.notes == [
        "files have no place for columns: lost are boxes, caption, grid, half, ids, raw, sure",
        "class folders are numbered by their names; this set counted its classes otherwise",
    ]


@pytest.mark.parametrize(
    ("key", "classes", "label", "lost"),
    [
        ("cat/1.jpg", ["cat"], 0, False),
        ("cat/a/1.jpg", ["cat"], 0, False),
        ("cat/1.jpg", ["cat", "dog"], 1, True),
        ("1.jpg", ["cat"], 0, True),
        ("cat/1.jpg", [], 0, True),
        ("cat/1.jpg", ["cat"], 5, True),
        ("cat/1.jpg", ["cat"], -1, True),
    ],
)
def test_a_label_is_kept_by_its_folder(key: str, classes: list[str], label: int, lost: bool, tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "out", columns=[LABEL], classes=classes) as writer:
        writer.write(DATA, key, label=label)
    assert writer.notes == (["1 labels are lost: no class folder in the key tells them"] if lost else [])


def test_a_label_that_is_text_is_lost(tmp_path: Path) -> None:
    convert(kinds.lmdb(tmp_path), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"image-{n:09d}" for n in (1, 2, 3)]


@pytest.mark.parametrize("keys", [["a.jpg", "a.jpg"], ["a", "a/b.jpg"], ["a/b.jpg", "a"]])
def test_keys_that_cannot_both_be_files_are_refused(keys: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="another record takes the place of"):
        write(FolderWriter, tmp_path / "out", *((key, {}) for key in keys))
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        FolderWriter(tmp_path / "out")


@pytest.mark.parametrize("column", RICH, ids=lambda column: column.name)
def test_json_holds_what_it_was_given(column: Column) -> None:
    value = ROWS[0][column.name]
    back = from_json(column, json.loads(json.dumps(to_json(column, value))))
    assert np.array_equal(back, value if column.kind != "array" else np.asarray(value, column.dtype))
