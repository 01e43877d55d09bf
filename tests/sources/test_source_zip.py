"""Zip archives: classes, what is passed over, and what is refused."""

from __future__ import annotations

import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kinds import recogniser
from make import dot, jpg

from packfmt.errors import DecodeError, SourceError
from packfmt.sources.zip import ZipSource

recognise = recogniser("zip")

FLAGS_IN_DIRECTORY, CRC_IN_DIRECTORY, SIZE_IN_DIRECTORY = 8, 16, 24


def write_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def patch_directory(path: Path, at: int, field: bytes) -> None:
    """Change a field of the first member's entry in the directory."""
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02") + at
    data[start : start + len(field)] = field
    path.write_bytes(data)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_class_folders(tmp_path: Path, method: int) -> None:
    path = write_zip(tmp_path / "x.zip", {"dog/1.jpg": jpg(1), "cat/1.png": dot(), "empty/": b""}, method)
    source = ZipSource(path)
    assert source.classes == ("cat", "dog", "empty")
    assert [(record.key, record.data, record.columns["label"]) for record in source] == [
        ("dog/1.jpg", jpg(1), 1),
        ("cat/1.png", dot(), 0),
    ]


def test_flat(tmp_path: Path) -> None:
    source = ZipSource(write_zip(tmp_path / "x.zip", {"1.jpg": jpg(), "2": dot()}))
    assert [record.key for record in source] == ["1.jpg", "2"]
    assert source.columns == ()


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    members = {"__MACOSX/._1.jpg": b"x", "1.jpg": jpg(), ".DS_Store": b"x", "notes.txt": b"x", "Thumbs.db": b"x"}
    source = ZipSource(write_zip(tmp_path / "x.zip", members))
    assert [record.key for record in source] == ["1.jpg"]
    assert source.skipped == {"hidden or system file": 3, "not an image": 1}


def test_loading_in_threads_gives_every_member_its_own_bytes(tmp_path: Path) -> None:
    members = {f"{number}.jpg": jpg(number) for number in range(100)}
    with (
        ZipSource(write_zip(tmp_path / "x.zip", members, zipfile.ZIP_DEFLATED)) as source,
        ThreadPoolExecutor(4) as pool,
    ):
        assert {record.key: record.data for record in pool.map(source.load, source.entries())} == members


@pytest.mark.parametrize(
    "name", ["../../canary.jpg", "/canary.jpg", "a/../../canary.jpg", "C:\\canary.jpg", "a\\..\\b.jpg"]
)
def test_names_that_leave_the_folder_are_keys_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    path = write_zip(folder / "x.zip", {name: jpg()})
    assert [record.key for record in ZipSource(path)] == [name]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, path])


@pytest.mark.parametrize("raw", [b"ok\xffx.jpg", "ü.jpg".encode()])
def test_names_without_the_utf8_flag_are_the_bytes_they_are(tmp_path: Path, raw: bytes) -> None:
    path = write_zip(tmp_path / "x.zip", {"N" * (len(raw) - 4) + ".jpg": jpg()})
    path.write_bytes(path.read_bytes().replace(b"N" * (len(raw) - 4) + b".jpg", raw))
    (record,) = ZipSource(path)
    assert record.key.encode("utf-8", "surrogateescape") == raw


def test_a_wrong_crc_names_the_member(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg(), "2.jpg": jpg()})
    patch_directory(path, CRC_IN_DIRECTORY, b"\0\0\0\0")
    source = ZipSource(path)
    first, second = source.entries()
    with pytest.raises(DecodeError, match=r"x\.zip, key '1\.jpg'.*CRC"):
        source.load(first)
    assert source.load(second).data == jpg()


def test_a_bomb_is_refused_unpacked(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg() + bytes(20 << 20)}, zipfile.ZIP_DEFLATED)
    source = ZipSource(path)
    with pytest.raises(DecodeError, match="more than 200 times"):
        source.load(next(source.entries()))


def test_a_member_of_gigabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg()})
    patch_directory(path, SIZE_IN_DIRECTORY, struct.pack("<I", 3 << 30))
    source = ZipSource(path)
    with pytest.raises(DecodeError, match="at most"):
        source.load(next(source.entries()))


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_a_size_that_lies_is_never_a_short_record(tmp_path: Path, size: int) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg()}, zipfile.ZIP_DEFLATED)
    patch_directory(path, SIZE_IN_DIRECTORY, struct.pack("<I", size))
    source = ZipSource(path)
    with pytest.raises(DecodeError, match=r"1\.jpg"):
        source.load(next(source.entries()))


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg()})
    patch_directory(path, FLAGS_IN_DIRECTORY, b"\x01\x00")
    source = ZipSource(path)
    with pytest.raises(DecodeError, match="password first"):
        source.load(next(source.entries()))


def test_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg()})
    patch_directory(path, 10, b"\x63\x00")
    source = ZipSource(path)
    with pytest.raises(DecodeError, match=r"1\.jpg"):
        source.load(next(source.entries()))


def test_two_members_of_one_name(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg(), "2.jpg": jpg()})
    path.write_bytes(path.read_bytes().replace(b"2.jpg", b"1.jpg"))
    with pytest.raises(SourceError, match=r"two members named '1\.jpg'"):
        ZipSource(path)


def with_unicode_path(name: str, field: bytes) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.extra = struct.pack("<HHH", 0x5455, 2, 0) + struct.pack("<HH", 0x7075, len(field)) + field
    return member


@pytest.mark.parametrize(
    ("stored", "version", "crc", "key"),
    [
        ("???/1.jpg", 1, zlib.crc32(b"???/1.jpg"), "日本/1.jpg"),
        ("???/1.jpg", 2, zlib.crc32(b"???/1.jpg"), "???/1.jpg"),
        ("???/1.jpg", 1, 0, "???/1.jpg"),
    ],
)
def test_a_unicode_path_counts_where_it_belongs_to_the_name(
    tmp_path: Path, stored: str, version: int, crc: int, key: str
) -> None:
    member = with_unicode_path(stored, struct.pack("<BL", version, crc) + "日本/1.jpg".encode())
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(member, jpg())
    assert [(record.key, record.data) for record in ZipSource(tmp_path / "x.zip")] == [(key, jpg())]


def test_a_name_that_zipfile_has_decoded_itself_is_no_error(tmp_path: Path) -> None:
    source = ZipSource(write_zip(tmp_path / "x.zip", {"1.jpg": jpg()}))
    (member,) = source.entries()
    member.filename = "日本.jpg"  # as Python 3.13 does for a Unicode path
    assert source.load(member).key == "1.jpg"


def test_backslashes_part_folders_where_nothing_else_does(tmp_path: Path) -> None:
    source = ZipSource(write_zip(tmp_path / "x.zip", {"cat\\": b"", "cat\\1.jpg": jpg(1), "dog\\1.jpg": jpg(2)}))
    assert [(record.key, record.columns["label"]) for record in source] == [("cat/1.jpg", 0), ("dog/1.jpg", 1)]
    assert source.notes == ["3 members have backslashes in their names; they are read as / between folders"]


@pytest.mark.parametrize(
    "names", [("a/1.jpg", "a\\2.jpg"), ("a\\1.jpg", "b\\..\\..\\2.jpg"), ("a\\1.jpg", "C:\\2.jpg"), ("\\1.jpg",)]
)
def test_backslashes_are_kept_where_they_may_mean_something_else(tmp_path: Path, names: tuple[str, ...]) -> None:
    source = ZipSource(write_zip(tmp_path / "x.zip", dict.fromkeys(names, jpg())))
    assert tuple(record.key for record in source) == names
    assert "kept as part of the name" in source.notes[0]


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_a_cut_archive_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": jpg()})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SourceError, match=r"x\.zip"):
        ZipSource(path)


def test_a_stray_image_has_no_class(tmp_path: Path) -> None:
    source = ZipSource(write_zip(tmp_path / "x.zip", {"1.jpg": jpg(), "a/1.jpg": jpg(), "b/1.jpg": jpg()}))
    with pytest.raises(DecodeError, match="no class"):
        source.load(next(source.entries()))


def test_recognised_by_content(tmp_path: Path) -> None:
    assert recognise(write_zip(tmp_path / "odd", {"1.jpg": jpg()})) == "zip"
    (tmp_path / "x.zip").write_bytes(b"PK no")
    assert recognise(tmp_path / "x.zip") is None
    assert recognise(tmp_path) is None
    assert recognise(tmp_path / "none") is None
