"""Tables beside a folder: types, labels, twins, and paths that must not lead out."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from kinds import recogniser
from make import jpg

from packfmt.errors import DecodeError, SourceError
from packfmt.record import Record
from packfmt.sources.base import BadEntry
from packfmt.sources.table import Table, TableSource

recognise = recogniser("table")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    for number in range(3):
        (root / "images").mkdir(parents=True, exist_ok=True)
        (root / "images" / f"{number}.jpg").write_bytes(jpg(number))
    (tmp_path / "canary.jpg").write_bytes(jpg(99))
    return root


def write(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_named_classes_and_typed_columns(folder: Path) -> None:
    text = "path,label,age,score,code,empty\nimages/0.jpg,dog,3,1.5,007,\nimages/1.jpg,cat,4,2,8,\n"
    source = TableSource(write(folder, text))
    assert source.classes == ("cat", "dog")
    assert [(column.name, column.kind, column.dtype) for column in source.columns] == [
        ("label", "array", "<i8"),
        ("age", "array", "<i8"),
        ("score", "array", "<f8"),
        ("code", "text", "|u1"),
        ("empty", "text", "|u1"),
    ]
    first, second = source
    assert (first.key, first.data) == ("images/0.jpg", jpg(0))
    assert first.columns == {"label": 1, "age": 3, "score": 1.5, "code": "007", "empty": ""}
    assert second.columns["code"] == "8"
    assert source.count() == 2


def test_integer_labels_stay_as_they_are(folder: Path) -> None:
    source = TableSource(write(folder, "file,label\nimages/0.jpg,10\nimages/1.jpg,-1\n"))
    assert [record.columns["label"] for record in source] == [10, -1]
    assert source.classes == ()


def test_fractions_are_no_labels(folder: Path) -> None:
    source = TableSource(write(folder, "file,label\nimages/0.jpg,0.5\nimages/1.jpg,1\n"))
    assert [(column.name, column.dtype) for column in source.columns] == [("label", "<f8")]
    assert source.notes


def test_a_gap_in_numbers_is_nan(folder: Path) -> None:
    source = TableSource(write(folder, "file,n\nimages/0.jpg,1\nimages/1.jpg,\n"))
    assert [math.isnan(record.columns["n"]) for record in source] == [False, True]


@pytest.mark.parametrize(
    ("name", "text", "cells"),
    [
        ("t.csv", "file,n\nimages/0.jpg,1234567890123456789\nimages/1.jpg,\n", ["1234567890123456789", ""]),
        ("t.csv", "file,n\nimages/0.jpg,9007199254740993\nimages/1.jpg,0.5\n", ["9007199254740993", "0.5"]),
        ("t.csv", "file,n\nimages/0.jpg,12345678901234567890\nimages/1.jpg,1\n", ["12345678901234567890", "1"]),
        ("t.csv", f"file,n\nimages/0.jpg,{'9' * 5000}\nimages/1.jpg,1\n", ["9" * 5000, "1"]),
        (
            "t.jsonl",
            '{"file": "images/0.jpg", "n": 1234567890123456789}\n{"file": "images/1.jpg", "n": 0.5}\n',
            ["1234567890123456789", "0.5"],
        ),
    ],
)
def test_integers_that_a_float_would_round_are_text(folder: Path, name: str, text: str, cells: list[str]) -> None:
    source = TableSource(write(folder, text, name))
    assert [column.kind for column in source.columns] == ["text"]
    assert [record.columns["n"] for record in source] == cells


def test_integers_that_a_float_holds_may_have_gaps(folder: Path) -> None:
    source = TableSource(write(folder, f"file,n\nimages/0.jpg,{1 << 60}\nimages/1.jpg,\nimages/2.jpg,-3\n"))
    assert [column.dtype for column in source.columns] == ["<f8"]
    assert [record.columns["n"] for record in source][::2] == [1 << 60, -3]


def test_large_integer_labels_stay_as_they_are(folder: Path) -> None:
    source = TableSource(write(folder, f"f,label\nimages/0.jpg,{2**60 + 1}\nimages/1.jpg,\n"))
    entries = list(source.entries())
    assert (source.load(entries[0]).columns, source.classes) == ({"label": 2**60 + 1}, ())
    assert isinstance(entries[1], BadEntry)


def test_a_gap_in_labels_is_a_bad_entry(folder: Path) -> None:
    first, second = TableSource(write(folder, "file,label\nimages/0.jpg,a\nimages/1.jpg,\n")).entries()
    assert isinstance(second, BadEntry)
    assert "line 3" in second.reason
    assert not isinstance(first, BadEntry)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "path;label\nimages/0.jpg;a\n"),
        ("t.csv", "path|label\nimages/0.jpg|a\n"),
        ("t.csv", "path\tlabel\nimages/0.jpg\ta\n"),
        ("t.tsv", "path\tlabel\nimages/0.jpg\ta\n"),
        ("t.csv", "\ufeffpath,label\r\nimages/0.jpg,a\r\n"),
        ("t.csv", '"path","label"\n"images/0.jpg","a"'),
        ("t.csv", "images/0.jpg,a\n"),
        ("t.jsonl", '{"path": "images/0.jpg", "label": "a"}\n'),
        ("t.jsonl", '\ufeff{"file_name": "images/0.jpg", "label": "a"}\n\n'),
    ],
)
def test_every_way_of_writing_it(folder: Path, name: str, text: str) -> None:
    path = write(folder, text, name)
    assert recognise(path) == "table"
    (record,) = source = TableSource(path)
    assert (record.key, record.columns, source.classes) == ("images/0.jpg", {"label": 0}, ("a",))


def test_quoted_newlines_and_delimiters(folder: Path) -> None:
    source = TableSource(write(folder, 'path,caption\nimages/0.jpg,"two\nlines, ""and"" more"\nimages/1.jpg,x\n'))
    assert [record.columns["caption"] for record in source] == ['two\nlines, "and" more', "x"]


def test_json_keeps_nested_values_as_text(folder: Path) -> None:
    lines = '{"path": "images/0.jpg", "n": 1, "l": [1, 2], "s": "5"}\n'
    lines += '{"path": "images/1.jpg", "n": null, "l": {}, "s": "6"}\n'
    first, _ = TableSource(write(folder, lines, "t.jsonl"))
    assert first.columns == {"n": 1.0, "l": "[1, 2]", "s": "5"}


def test_columns_and_root_can_be_given(folder: Path) -> None:
    path = write(folder.parent, "a,b,label\nx,0.jpg,q\n")
    (record,) = TableSource(path, folder / "images", key_column="b", label_column="a")
    assert (record.key, record.columns) == ("0.jpg", {"label": 0, "source_label": "q"})


def test_without_labels(folder: Path) -> None:
    source = TableSource(write(folder, "path,label\nimages/0.jpg,7\n"), label_column="")
    assert [column.name for column in source.columns] == ["source_label"]
    assert source.classes == ()


@pytest.mark.parametrize("options", [{"key_column": "none"}, {"label_column": "none"}])
def test_a_column_that_is_not_there(folder: Path, options: dict[str, str]) -> None:
    with pytest.raises(SourceError, match="columns are path, label"):
        TableSource(write(folder, "path,label\nimages/0.jpg,7\n"), **options)


def test_no_column_of_paths(folder: Path) -> None:
    path = write(folder, "a,b\n1,2\n")
    assert recognise(path) is None
    with pytest.raises(SourceError, match="no column of image paths among a, b"):
        TableSource(path)


@pytest.mark.parametrize("twin", ["images/0.jpg", "./images/0.jpg", "images/../images//0.jpg"])
def test_a_file_named_twice_names_both_lines(folder: Path, twin: str) -> None:
    with pytest.raises(SourceError, match=r"lines 2 and 4 both name 'images/0\.jpg'"):
        TableSource(write(folder, f"path\nimages/0.jpg\nimages/1.jpg\n{twin}\n"))


def test_a_missing_file_is_a_damaged_record_with_its_key(folder: Path) -> None:
    source = TableSource(write(folder, "path\nimages/none.jpg\n"))
    with pytest.raises(DecodeError, match=r"images/none\.jpg.*missing"):
        source.load(next(source.entries()))


def outside(folder: Path) -> list[str]:
    (folder / "link").symlink_to(folder.parent)
    (folder / "images" / "link.jpg").symlink_to(folder.parent / "canary.jpg")
    return [
        "../canary.jpg",
        "images/../../canary.jpg",
        str(folder.parent / "canary.jpg"),
        "link/canary.jpg",
        "images/link.jpg",
        "",
        "..",
        "/etc/hostname",
        "a\\..\\..\\canary.jpg",
    ]


@pytest.mark.parametrize("number", range(9))
def test_no_row_leads_out_of_the_root(folder: Path, number: int) -> None:
    name = outside(folder)[number]
    source = TableSource(write(folder, f'path,n\nimages/0.jpg,1\n"{name}",2\n'))
    first, second = source.entries()
    assert source.load(first).data == jpg(0)
    with pytest.raises(DecodeError):
        source.load(second)


def test_a_nul_in_a_path_is_refused(folder: Path) -> None:
    path = write(
        folder, '{"path": "images/0.jpg"}\n{"path": "images/1.jpg\\u0000.png"}\n{"path": "\\ud800"}\n', "t.jsonl"
    )
    entries = list(TableSource(path).entries())
    assert [isinstance(entry, BadEntry) for entry in entries] == [False, True, True]


def test_an_absolute_path_inside_the_root_is_fine(folder: Path) -> None:
    (record,) = TableSource(write(folder, f"path\n{folder}/images/0.jpg\n"))
    assert record == Record(jpg(0), "images/0.jpg", {})


def test_a_pipe_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "images" / "pipe.jpg")
    source = TableSource(write(folder, "path\nimages/pipe.jpg\n"))
    with pytest.raises(DecodeError, match="regular"):
        source.load(next(source.entries()))


def test_names_that_are_not_utf8(folder: Path) -> None:
    os.link(folder / "images" / "0.jpg", os.fsencode(folder) + b"/\xff.jpg")
    (record,) = TableSource(write(folder, b"path\n\xff.jpg\n"))
    assert os.fsencode(record.key) == b"\xff.jpg"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "empty"),
        ("t.csv", "path,path\n", "two columns of one name"),
        ("t.csv", "path,n\nimages/0.jpg\n", "line 2: 1 cells"),
        ("t.csv", "path,n\nimages/0.jpg,1,2\n", "line 2: 3 cells"),
        ("t.csv", 'path\n"images/0.jpg\n' + "x" * 200_000, "line"),
        ("t.csv", 'path\n"images/0.jpg\n', "line"),
        ("t.csv", "path\nx.jpg\n".encode("utf-16"), "UTF-16"),
        ("t.jsonl", "", "empty"),
        ("t.jsonl", "{\n", "line 1: not JSON"),
        ("t.jsonl", '{"path": "a.jpg"}\n[1]\n', "line 2: not a JSON object"),
        ("t.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("t.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1: not JSON"),
        ("t.jsonl", '{"a": [' + "[]," * 150_000 + "[]]}", "line 1: not JSON .*lists, objects and members"),
        ("t.jsonl", b"\xff\xfe", "UTF-16"),
        ("t.jsonl", b'{"a": "\xff"}', "line 1: not JSON"),
    ],
)
def test_damaged_tables(folder: Path, name: str, text: str | bytes, message: str) -> None:
    path = write(folder, text, name)
    for read in (recognise, TableSource):
        with pytest.raises(SourceError, match=message):
            read(path)


def test_a_missing_table_or_root(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TableSource(folder / "none.csv")
    with pytest.raises(FileNotFoundError):
        TableSource(write(folder, "path\nx.jpg\n"), folder / "none")


@pytest.mark.parametrize(
    ("cell", "number"),
    [("1", 1), ("-0", 0), ("1.50", 1.5), (".5", 0.5), ("1e3", 1000.0), ("NaN", "nan"), ("-inf", float("-inf"))]
    + [
        (text, None)
        for text in ("007", "00.5", "+1", "1_000", "0x1", "1e999", "９", " 1", "9223372036854775808", "Infinity")
    ],
)
def test_which_cells_are_numbers(folder: Path, cell: str, number: object) -> None:
    found = Table(write(folder, "path\nx.jpg\n")).number(cell)
    assert str(found) == "nan" if number == "nan" else (found, type(found)) == (number, type(number))
