"""Tar shards: grouping, columns, labels, damage, and that nothing in them is opened or executed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds import recogniser
from make import dot, jpg, trapped_pickle

from packfmt.errors import DecodeError, SourceError
from packfmt.record import Record
from packfmt.sources.base import BadEntry
from packfmt.sources.webdataset import stream as tarstream
from packfmt.sources.webdataset.source import TarSource
from packfmt.sources.webdataset.stream import TarStream, _sum_matches

recognise = recogniser("tar")

SIZE_FIELD, SUM_FIELD = 124, 148


def write_tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def npy(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, **options)
    return stream.getvalue()


def contents(path: Path) -> dict[str, bytes]:
    with TarStream(path) as stream:
        return {member.name: bytes(stream.read(1000)) for member in stream.members()}


def keys(source: TarSource) -> list[str]:
    return [record.key for record in source]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    members = []
    for number in range(3):
        members += [
            (f"s/{number:03d}.jpg", jpg(number)),
            (f"s/{number:03d}.cls", b"%d\n" % (number * 10)),
            (f"s/{number:03d}.json", b'{"n": %d}' % number),
            (f"s/{number:03d}.txt", "naïve".encode()),
            (f"s/{number:03d}.npy", npy(np.arange(4 * number, dtype=">f4").reshape(-1, 4))),
        ]
    return write_tar(tmp_path / "x-000.tar", members)


def test_parts_become_columns(shard: Path) -> None:
    source = TarSource(shard)
    records = list(source)
    assert [column.name for column in source.columns] == ["label", "json", "txt", "npy"]
    assert [record.key for record in records] == ["s/000.jpg", "s/001.jpg", "s/002.jpg"]
    assert records[2].data == jpg(2)
    assert records[2].columns["label"] == 20
    assert records[2].columns["json"] == '{"n": 2}'
    assert records[2].columns["txt"] == "naïve"
    assert records[2].columns["npy"].dtype.str == "<f4"
    assert records[2].columns["npy"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_iterating_twice_gives_the_same(shard: Path) -> None:
    source = TarSource(shard)
    assert keys(source) == keys(source)


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_archives_are_told_by_content(
    shard: Path, tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    packed = tmp_path / "odd-name"
    packed.write_bytes(pack(shard.read_bytes()))
    assert recognise(packed) == "tar"
    assert [record.data for record in TarSource(packed)] == [record.data for record in TarSource(shard)]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_odd_names_keep_every_character(tmp_path: Path, format: int) -> None:
    names = ["d" * 90 + "/" + "n" * 90 + ".jpg", "a b/ü.jpg", "c/\udcff.jpg"]
    if format != tarfile.USTAR_FORMAT:
        names.append("long" * 100 + ".jpg")
    path = write_tar(tmp_path / "x.tar", [(name, jpg()) for name in names], format=format)
    records = list(TarSource(path).entries())
    assert [record.key for record in records] == names


def test_dots_in_names_neither_merge_nor_lose(tmp_path: Path) -> None:
    names = ["v1.0/a.b.jpg", "v1.0/a.c.jpg", "img.0001.jpg", "img.0002.jpg", "x.tar.gz.png"]
    path = write_tar(tmp_path / "x.tar", [(name, jpg()) for name in names])
    assert keys(TarSource(path)) == names


def test_parts_of_dotted_names_go_to_their_own_image(tmp_path: Path) -> None:
    members = []
    for number in range(400):
        members += [(f"img.{number:04d}.cls", b"%d" % number), (f"img.{number:04d}.jpg", jpg(number))]
    source = TarSource(write_tar(tmp_path / "x.tar", members))
    assert [(record.key, record.columns["label"]) for record in source] == [
        (f"img.{number:04d}.jpg", number) for number in range(400)
    ]


def test_several_images_of_a_sample_share_its_parts(tmp_path: Path) -> None:
    members = [
        ("1.cls", b"4"),
        ("1.left.jpg", jpg()),
        ("1.right.jpg", jpg()),
        ("2.cls", b"5"),
        ("2.left.jpg", jpg()),
    ]
    source = TarSource(write_tar(tmp_path / "x.tar", members))
    assert [(record.key, record.columns["label"]) for record in source] == [
        ("1.left.jpg", 4),
        ("1.right.jpg", 4),
        ("2.left.jpg", 5),
    ]
    assert any("several images" in note for note in source.notes)


def test_a_part_of_one_image_is_not_lent_to_another(tmp_path: Path) -> None:
    members = [("1.json", b"{}"), ("1.l.jpg", jpg()), ("1.l.cls", b"4"), ("1.r.jpg", jpg())]
    left, right = TarSource(write_tar(tmp_path / "x.tar", members)).entries()
    assert isinstance(left, Record)
    assert isinstance(right, BadEntry)
    assert ".cls" in right.reason


def test_an_extension_of_two_pieces_is_a_column(tmp_path: Path) -> None:
    source = TarSource(write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("1.boxes.npy", npy(np.ones((2, 4), "<i2")))]))
    (record,) = source
    assert record.columns["boxes.npy"].shape == (2, 4)


def test_a_missing_part_is_a_bad_entry_with_its_key(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("1.cls", b"1"), ("2.jpg", jpg())])
    first, second = TarSource(path).entries()
    assert isinstance(first, Record)
    assert isinstance(second, BadEntry)
    assert second.key == "2.jpg"
    assert ".cls" in second.reason


@pytest.mark.parametrize("content", [b"cat", b"1.5", b"", b"9" * 30, b"1" * 100])
def test_a_class_that_is_no_integer_is_a_bad_entry(tmp_path: Path, content: bytes) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("1.cls", b"1"), ("2.cls", content), ("2.jpg", jpg())])
    assert isinstance(list(TarSource(path).entries())[1], BadEntry)


def test_class_names_as_text_stay_text(tmp_path: Path) -> None:
    (record,) = TarSource(write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("1.cls", b"cat")]))
    assert record.columns == {"cls": "cat"}


def test_what_is_lost_is_counted(tmp_path: Path) -> None:
    members = [
        ("1.jpg", jpg()),
        ("1.mp3", b"x"),
        ("2.jpg", jpg()),
        ("2.mp3", b"x"),
        ("2.json", b"{}"),
        ("README", b""),
    ]
    source = TarSource(write_tar(tmp_path / "x.tar", members))
    assert keys(source) == ["1.jpg", "2.jpg"]
    assert source.notes == ["2 parts .mp3 are lost", "1 parts .json are lost"]
    assert source.skipped == {"not an image": 1}


def test_an_image_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.data", dot()), ("2.JPG", dot())])
    assert [(record.key, record.data) for record in TarSource(path)] == [("1.data", dot()), ("2.JPG", dot())]


def test_hidden_members_are_skipped(tmp_path: Path) -> None:
    source = TarSource(write_tar(tmp_path / "x.tar", [("._1.jpg", jpg()), ("1.jpg", jpg()), (".DS_Store", b"")]))
    assert keys(source) == ["1.jpg"]
    assert source.skipped == {"hidden or system file": 2}


def test_class_folders_give_labels(tmp_path: Path) -> None:
    write_tar(tmp_path / "x-0.tar", [("set/dog/1.jpg", jpg()), ("set/cat/1.jpg", jpg())])
    write_tar(tmp_path / "x-1.tar", [("./set/emu/1.jpg", jpg()), ("set/stray.jpg", jpg())])
    source = TarSource(tmp_path / "x-{0..1}.tar")
    assert source.classes == ("cat", "dog", "emu")
    *records, stray = source.entries()
    assert [record.columns["label"] for record in records] == [1, 0, 2]
    assert isinstance(stray, BadEntry)


@pytest.mark.parametrize("folder", ["", "images/"])
def test_a_flat_archive_has_no_labels(tmp_path: Path, folder: str) -> None:
    source = TarSource(write_tar(tmp_path / "x.tar", [(f"{folder}{number}.jpg", jpg()) for number in range(3)]))
    assert (source.columns, source.classes) == ((), ())


def test_the_same_key_in_two_shards_names_both(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "0.tar", [("1.jpg", jpg())])
    with pytest.raises(SourceError, match=r"a/0\.tar and .*b/0\.tar both hold '1\.jpg'"):
        list(TarSource(tmp_path / "{a,b}" / "0.tar"))


def test_the_same_key_twice_in_a_shard(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("2.jpg", jpg()), ("1.jpg", jpg())])
    with pytest.raises(SourceError, match=r"x\.tar holds '1\.jpg' twice"):
        list(TarSource(path))


def test_links_and_devices_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("0.jpg")
        info.size = len(jpg())
        archive.addfile(info, io.BytesIO(jpg()))
        for name, kind in [("1.jpg", tarfile.SYMTYPE), ("2.jpg", tarfile.LNKTYPE), ("3", tarfile.CHRTYPE)]:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "/etc/hostname"
            archive.addfile(info)
    source = TarSource(path)
    first, *others = source.entries()
    assert isinstance(first, Record)
    assert [(type(entry), entry.key, entry.data) for entry in others] == [
        (BadEntry, "1.jpg", None),
        (BadEntry, "2.jpg", None),
    ]
    assert source.skipped == {"a device": 1}


@pytest.mark.parametrize("name", ["../../canary.jpg", "/tmp/canary.jpg", "a/../../canary.jpg", "C:\\canary.jpg"])
def test_names_that_leave_the_folder_are_keys_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "canary.jpg").write_bytes(b"untouched")
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    path = write_tar(folder / "x.tar", [(name, jpg())])
    (record,) = TarSource(path)
    assert (record.key, record.data) == (name, jpg())
    assert (tmp_path / "canary.jpg").read_bytes() == b"untouched"


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "pth", "pt", "npy", "cls", "json", "txt"])
def test_pickles_are_never_loaded(tmp_path: Path, extension: str) -> None:
    canary = tmp_path / "canary"
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), (f"1.{extension}", trapped_pickle(canary))])
    list(TarSource(path).entries())
    assert not canary.exists()


def test_an_object_array_is_never_unpickled(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    header = npy(np.array([None], object), allow_pickle=True)[:128]
    bad = header + trapped_pickle(canary)
    path = write_tar(
        tmp_path / "x.tar", [("1.jpg", jpg()), ("1.npy", npy(np.ones(1))), ("2.jpg", jpg()), ("2.npy", bad)]
    )
    entry = list(TarSource(path).entries())[1]
    assert isinstance(entry, BadEntry)
    assert "plain numbers" in entry.reason
    assert not canary.exists()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': 'O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f8', 'fortran_order': __import__('os'), 'shape': (1,)}",
        "(" * 500,
    ],
)
def test_hostile_npy_headers(tmp_path: Path, header: str) -> None:
    text = header.ljust(117).encode() + b"\n"
    bad = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)
    path = write_tar(
        tmp_path / "x.tar", [("1.jpg", jpg()), ("1.npy", npy(np.ones(1))), ("2.jpg", jpg()), ("2.npy", bad)]
    )
    assert isinstance(list(TarSource(path).entries())[1], BadEntry)


@pytest.mark.parametrize("cut", [1, 512, 700, 1300, 2048])
def test_an_archive_cut_anywhere_is_an_error_that_names_it(tmp_path: Path, cut: int) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("2.jpg", jpg())])
    whole = 2 * (512 + -(-len(jpg()) // 512) * 512)
    path.write_bytes(path.read_bytes()[: max(whole - cut, 100)])
    with pytest.raises(SourceError, match=r"x\.tar"):
        list(TarSource(path))


@pytest.mark.parametrize("piece", [1, 100, 511, 512, 513, 1000, 1024, 4000])
def test_members_may_lie_across_the_pieces_read(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    long = "d/" * 60 + "1.jpg"  # in a header extension
    path = write_tar(tmp_path / "y.tar", [(long, jpg()), ("2.txt", b""), ("3.jpg", jpg() + bytes(700))])
    expected = [list(TarSource(shard)), list(TarSource(path))]
    monkeypatch.setattr(tarstream, "_PIECE", piece)
    assert [list(TarSource(shard)), list(TarSource(path))] == expected
    assert [record.key for record in expected[1]] == [long, "3.jpg"]
    with TarStream(path) as stream:  # contents that nobody reads
        assert [member.size for member in stream.members()] == [len(jpg()), 0, len(jpg()) + 700]


@pytest.mark.parametrize("piece", [100, 512, 1 << 20])
def test_a_cut_is_found_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    whole = write_tar(tmp_path / "x.tar", [("1.jpg", bytes(700)), ("2.cls", b"7")]).read_bytes()
    end = 512 + 1024 + 512 + 512
    monkeypatch.setattr(tarstream, "_PIECE", piece)
    for packed in (lambda data: data, gzip.compress):
        path = tmp_path / "cut.tar"
        for size in range(0, end + 1, 64):
            path.write_bytes(packed(whole[:size]))
            with pytest.raises(SourceError, match=r"cut\.tar, at byte \d+: .*cut short") as caught:
                contents(path)
            place = int(str(caught.value).split("at byte ")[1].split(":")[0])
            assert place <= size < place + 2048, "within what the header said that it needs"
        path.write_bytes(packed(whole[: end + 512]))
        assert contents(path) == {"1.jpg": bytes(700), "2.cls": b"7"}


def test_a_small_content_does_not_keep_what_was_read_with_it(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", bytes(1000)), ("2.jpg", bytes(100_000))])
    with TarStream(path) as stream:
        small, large = (stream.read(1 << 20) for _ in stream.members())
    assert type(small) is bytes
    assert isinstance(large, memoryview)
    assert len(large.obj) <= tarstream._SHARE * len(large)


def test_a_missing_end_marker_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg())])
    path.write_bytes(path.read_bytes()[: 512 + -(-len(jpg()) // 512) * 512])
    with pytest.raises(SourceError, match="no end marker"):
        list(TarSource(path))


def test_a_damaged_header_is_no_silent_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("2.jpg", jpg())])
    data = bytearray(path.read_bytes())
    data[512 + -(-len(jpg()) // 512) * 512] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="checksum"):
        list(TarSource(path))


def test_joined_archives_are_no_silent_loss(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg())])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(SourceError, match="after the end marker"):
        list(TarSource(path))


def test_a_cut_gzip_archive(shard: Path, tmp_path: Path) -> None:
    packed = tmp_path / "x.tar.gz"
    packed.write_bytes(gzip.compress(shard.read_bytes())[:-200])
    with pytest.raises(SourceError, match=r"x\.tar\.gz"):
        list(TarSource(packed))


def patched(path: Path, at: int, field: bytes) -> None:
    """Change a header's field and mend its checksum."""
    data = bytearray(path.read_bytes())
    data[at : at + len(field)] = field
    start = at // 512 * 512
    blank = data[start : start + SUM_FIELD] + b" " * 8 + data[start + SUM_FIELD + 8 : start + 512]
    data[start + SUM_FIELD : start + SUM_FIELD + 8] = b"%06o\0 " % sum(blank)
    path.write_bytes(data)


@pytest.mark.parametrize("field", [b"77777777777\0", b"\x80" + bytes(4) + b"\x7f" * 7, b"\xff" * 12, b"12345x789012"])
def test_a_size_beyond_the_file_is_refused_before_reading(tmp_path: Path, field: bytes) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg())])
    patched(path, SIZE_FIELD, field)
    tracemalloc.start()
    with pytest.raises(SourceError, match=r"x\.tar"):
        list(TarSource(path))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_member_larger_than_the_rest_of_the_file_is_told_before_its_data_is_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg())])
    patched(path, SIZE_FIELD, b"00000100000\0")
    with pytest.raises(SourceError, match=r"'1\.jpg' declares 32768 bytes"):
        list(TarSource(path))


def test_a_huge_name_extension_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar.gz", [("n" * (2 << 20) + ".jpg", jpg())], format=tarfile.GNU_FORMAT)
    with pytest.raises(SourceError, match="header extension"):
        TarSource(path)


def test_an_archive_without_images_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no image"):
        TarSource(write_tar(tmp_path / "x.tar", [("1.txt", b"text")]))


def test_a_missing_shard_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TarSource(tmp_path / "x-{0..1}.tar")


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    image = jpg() + bytes(100_000)
    path = write_tar(tmp_path / "x.tar", [(f"{number}.jpg", image) for number in range(200)])
    source = TarSource(path)
    tracemalloc.start()
    assert sum(1 for _ in source.entries()) == 200
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20


@pytest.mark.parametrize("data", [b"", b"x", bytes(1024), b"\x1f\x8bjunk", b"BZhjunk", b"\xfd7zXZ\x00junk", jpg()])
def test_foreign_files_are_not_recognised(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert recognise(tmp_path / "x") is None


def test_folders_and_missing_files_are_not_recognised(tmp_path: Path) -> None:
    assert recognise(tmp_path) is None
    assert recognise(tmp_path / "none") is None


def test_a_bad_entry_loads_as_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpg()), ("1.cls", b"1"), ("2.jpg", jpg())])
    with pytest.raises(DecodeError, match=r"2\.jpg"):
        list(TarSource(path))


def summed(content: bytes, total: int) -> bytes:
    """A header that states ``total`` as its sum, in the field that counts as blanks."""
    return content[:SUM_FIELD] + b"%06o\0 " % total + content[SUM_FIELD + 8 :]


@given(content=st.binary(min_size=512, max_size=512), apart=st.integers(-70_000, 70_000))
def test_a_header_is_taken_at_its_sum_only(content: bytes, apart: int) -> None:
    blank = content[:SUM_FIELD] + b" " * 8 + content[SUM_FIELD + 8 :]
    signed = sum(byte - 256 * (byte > 127) for byte in blank)
    for total in {sum(blank), max(0, signed)}:
        assert _sum_matches(summed(content, total)) == (total in (sum(blank), signed))
    stated = max(0, sum(blank) + apart)
    allowed = {sum(blank), signed, sum(blank) - 65521, sum(blank) + 65521}  # see there for the last two
    if stated not in allowed:
        assert not _sum_matches(summed(content, stated))
