"""Every kind of source is told by its content, none is taken for another, and being asked executes nothing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import kinds
import lmdb
import pytest

import packfmt
from packfmt.errors import FormatError, SourceError
from packfmt.sources.registry import KINDS, open_source, recognise


@pytest.fixture(params=kinds.MADE)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Kind and path of one small source."""
    kind, make = kinds.MADE[request.param]
    return kind, make(tmp_path, kinds.IMAGES)


def test_each_kind_is_recognised(made: tuple[str, Path]) -> None:
    kind, path = made
    assert recognise(path) == recognise(str(path)) == kind


def test_a_name_means_nothing(made: tuple[str, Path], tmp_path: Path) -> None:
    kind, path = made
    if kind == "table" or path.name == "made.json":
        pytest.skip("a table and a manifest are told by their suffix too")
    other = tmp_path / "renamed.jpg"
    if kind == "coco":
        other = path.with_name("renamed.jpg")
    path.rename(other)
    assert recognise(other) == kind


def test_none_is_taken_for_another(made: tuple[str, Path]) -> None:
    kind, path = made
    found = {name for name in KINDS if kinds.recogniser(name)(path) is not None}
    assert found <= {kind, "lmdb"} if path.name == "made-pack.lmdb" else found == ({kind} - {"folder"})


def test_a_source_says_what_kind_it_is(made: tuple[str, Path]) -> None:
    kind, path = made
    with open_source(path) as source:
        assert source.kind == source.describe()["kind"] == kind
        assert len(list(source)) == 3


def test_a_kind_can_be_given(tmp_path: Path) -> None:
    path = kinds.voc(tmp_path)
    with open_source(path / "JPEGImages", "folder") as source:
        assert [record.key for record in source] == ["0.jpg", "1.jpg", "2.jpg"]


@pytest.mark.parametrize("name", ["tar", "pack", "tfrecord", "parquet"])
def test_several_paths_are_one_set(name: str, tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        path = kinds.MADE[name][1](tmp_path / str(number), kinds.IMAGES)
        paths.append(path.rename(tmp_path / f"{number}{path.suffix}"))
    assert recognise(paths) == name
    if name != "tar":  # those two would hold the same keys
        with open_source(paths) as source:
            assert source.count() in (6, None)


def test_a_pattern_of_shards(tmp_path: Path) -> None:
    path = kinds.tar(tmp_path)
    shutil.copy(path, tmp_path / "x-000.tar")
    assert recognise(tmp_path / "x-{000..000}.tar") == "tar"
    kinds.pack_in_shards(tmp_path)
    assert recognise(tmp_path / "made-*.bin") == "pack"


@pytest.mark.parametrize("name", ["hdf5", "zip", "lmdb", "folder", "voc"])
def test_several_paths_of_a_kind_that_is_one_path_are_refused(name: str, tmp_path: Path) -> None:
    path = kinds.MADE[name][1](tmp_path, kinds.IMAGES)
    with pytest.raises(SourceError, match="not recognised as any of pack, tar, parquet, tfrecord;"):
        recognise([path, path])
    with pytest.raises(SourceError, match=f"a {name} source is one path"):
        open_source([path, path], name)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        recognise(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        recognise([kinds.zipped(tmp_path), tmp_path / "missing"])


@pytest.mark.parametrize("data", [b"\0" * 4096, b"hello, world\n", kinds.IMAGES[0], b"{}", b"PK"])
def test_anything_else_is_refused_with_the_kinds(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(SourceError, match=r"x\.bin: not recognised as any of pack, tar, .*folder; .* The file is "):
        recognise(tmp_path / "x.bin")


def test_a_file_that_cannot_be_read_is_named_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kinds.zipped(tmp_path)
    real = open

    def refuse(file: Any, *args: Any, **options: Any) -> Any:
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(file, *args, **options)

    monkeypatch.setattr("builtins.open", refuse)
    for ask in (recognise, lambda path: open_source(path, "hdf5"), lambda path: open_source(path, "lmdb")):
        with pytest.raises(PermissionError):
            ask(path)


def test_all_kinds_share_one_look_at_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(kinds.IMAGES[0])
    opened: list[str] = []
    real = open

    def noted(file: Any, *args: Any, **options: Any) -> Any:
        opened.append(str(file))
        return real(file, *args, **options)

    monkeypatch.setattr("builtins.open", noted)
    with pytest.raises(SourceError, match="The file is one image"):
        recognise(path)
    assert opened.count(str(path)) <= 2  # storage looks at its own kind of LMDB itself


@pytest.mark.parametrize("suffix", ["bin", "parquet", "tar", "csv", "tsv", "jsonl", "zip", "tfrecord", "json"])
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer, .*git lfs pull"),
        (b"<!DOCTYPE html>\n<html><body>a, b, c</body></html>\n", "an HTML or XML page"),
    ],
)
def test_what_stands_in_the_place_of_data_is_named(suffix: str, data: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"x\.{suffix}: {what}"):
        recognise(path)
    if suffix in ("tar", "parquet", "tfrecord"):
        with pytest.raises(SourceError, match=rf"x\.{suffix}: {what}"):
            recognise([path])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "path,label\n1.jpg,a,b\n", "line 2: 3 cells where the table has 2 columns"),
        ("x.tsv", "path\tpath\n1.jpg\ta\n", "line 1: two columns of one name"),
        ("x.jsonl", '{"path": "1.jpg"}\n{"path": \n', "line 2: not JSON "),
    ],
)
def test_a_damaged_table_says_which_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=message):
        recognise(tmp_path / name)


@pytest.mark.parametrize("name", ["parquet", "hdf5"])
def test_a_file_of_metadata_beside_images_leaves_the_folder_one_of_images(name: str, tmp_path: Path) -> None:
    train = tmp_path / "train"
    train.mkdir()
    kinds.MADE[name][1](train, kinds.IMAGES)
    (train / ".hidden.jpg").write_bytes(kinds.IMAGES[0])
    assert recognise(train) == name
    for number in range(3):
        (train / f"{number}.jpg").write_bytes(kinds.IMAGES[number])
    assert recognise(train) == "folder"
    if name == "parquet":  # which is looked for in all folders
        assert recognise(tmp_path) == "folder"
    with open_source(train) as source:
        assert len(list(source)) == 3


def test_a_picture_above_the_shards_leaves_a_folder_parquet(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    kinds.parquet(tmp_path / "data")
    (tmp_path / "logo.png").write_bytes(kinds.IMAGES[0])
    assert recognise(tmp_path) == "parquet"


def test_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"unknown kind 'beton'; there are pack, tar"):
        open_source(tmp_path, "beton")


@pytest.mark.parametrize("name", KINDS)
def test_an_option_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    path = kinds.MADE[name][1](tmp_path, kinds.IMAGES)
    with pytest.raises(SourceError, match=f"a {name} source takes no flavour; it takes "):
        open_source(path, flavour="salt")


def test_an_option_that_is_none_is_left_out(tmp_path: Path) -> None:
    with open_source(kinds.zipped(tmp_path), resolution=None, layout=None) as source:
        assert source.kind == "zip"


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_a_class_of_its_name(name: str) -> None:
    assert KINDS[name].load().kind == name
    assert KINDS[name].what


# Packs


@pytest.mark.parametrize("keep", [20, 100, -1])
@pytest.mark.parametrize("make", [kinds.pack, kinds.pack_in_lmdb])
def test_a_damaged_pack_is_a_pack_and_says_what_is_wrong(make: Any, keep: int, tmp_path: Path) -> None:
    path = make(tmp_path)
    file = path / "data.mdb" if path.is_dir() else path
    data = file.read_bytes()
    if path.is_dir() and keep != -1:
        pytest.skip("what is left shows no more whose it was")
    file.write_bytes(data[:keep] if keep != -1 else data + b"more")
    assert recognise(path) == "pack"
    with pytest.raises(FormatError):
        open_source(path)


def test_a_pack_in_lmdb_that_is_cut_is_never_read_as_a_foreign_database(tmp_path: Path) -> None:
    path = kinds.pack_in_lmdb(tmp_path)
    data = (path / "data.mdb").read_bytes()
    for keep in range(4096, len(data), 4096):
        (path / "data.mdb").write_bytes(data[:keep])
        with pytest.raises((SourceError, FormatError)), open_source(path) as source:
            list(source)


def test_asking_what_a_database_is_does_not_have_lmdb_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, foreign = kinds.pack_in_lmdb(tmp_path), kinds.lmdb(tmp_path)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(lmdb, "open", refuse)
    monkeypatch.setattr(lmdb, "Environment", refuse)
    assert (recognise(own), recognise(foreign)) == ("pack", "lmdb")


def test_a_database_of_many_records_is_followed_to_its_last_key(tmp_path: Path) -> None:
    with packfmt.create(tmp_path / "deep.lmdb") as writer:
        for number in range(3000):
            writer.write(kinds.IMAGES[0][:20], f"{number}.jpg")
    assert recognise(tmp_path / "deep.lmdb") == "pack"


def test_any_bytes_as_a_database_end_in_an_answer(tmp_path: Path) -> None:
    path = kinds.pack_in_lmdb(tmp_path) / "data.mdb"
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 20)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice([len(data), rng.randrange(len(data))])])
        assert kinds.recogniser("pack")(path) in ("pack", None)
