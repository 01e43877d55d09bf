"""Unpacking: every byte comes back, and whatever a pack holds, no file outside the target folder is touched."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from packfmt import storage, unpacking
from packfmt.converting import convert
from packfmt.errors import ConvertError, CorruptError
from packfmt.format import HEADER

ROOT = Path(__file__).parent.parent

# Keys that lead out of a folder, or are no file name. No such pack may be unpacked at all. HERE stands for a folder of
# the test's own, so that code which lets a key through does no harm.
REFUSED = [
    "..",
    "../out.jpg",
    "../../out.jpg",
    "../" * 40 + "HERE/out.jpg",
    "../target/../out.jpg",
    "../target2/out.jpg",
    "a/..",
    "a/../..",
    "a/../out.jpg",
    "a/../../out.jpg",
    "a/b/../../../out.jpg",
    "a/b/c/../../../../out.jpg",
    "a/../a/../../out.jpg",
    "./../out.jpg",
    ".././out.jpg",
    "..//out.jpg",
    "a//../../out.jpg",
    ".",
    "./out.jpg",
    "a/./out.jpg",
    "a/.",
    "././out.jpg",
    "/",
    "//",
    "///",
    "/HERE/out.jpg",
    "//HERE/out.jpg",
    "///HERE/out.jpg",
    "//HERE/share/out.jpg",
    "file:///HERE/out.jpg",
    "/../HERE/out.jpg",
    "/./HERE/out.jpg",
    "/proc/self/cwd/out.jpg",
    "a/",
    "a/b/",
    "a//b.jpg",
    "a///b.jpg",
    "../",
    "a/../",
    "\0",
    "out.jpg\0",
    "\0out.jpg",
    "out.jpg\0.png",
    "..\0/out.jpg",
    "a/\0/out.jpg",
    "a\0/../../out.jpg",
]

# Names that look dangerous, or would be elsewhere, and are plain ones where only "/" and NUL mean something.
HARMLESS = [
    "...",
    "....",
    ".../out.jpg",
    "..a/out.jpg",
    "a../out.jpg",
    "a/..b",
    ".hidden",
    " ",
    " ../out.jpg",
    ".. /out.jpg",
    "~",
    "~/out.jpg",
    "~root/out.jpg",
    "$HOME/out.jpg",
    "`out`",
    "-rf",
    "--force",
    "-",
    "%2e%2e%2fout.jpg",
    "..%2fout.jpg",
    "..%5cout.jpg",
    "..\\out.jpg",
    "..\\..\\out.jpg",
    "\\out.jpg",
    "\\\\server\\share\\out.jpg",
    "a\\..\\..\\out.jpg",
    "C:",
    "C:out.jpg",
    "C:\\out.jpg",
    "C:/out.jpg",
    "file.jpg:stream",
    "out.jpg::$DATA",
    "CON",
    "nul.jpg",
    "com1/out.jpg",
    "LPT9.txt",
    "ends with a dot.",
    "ends with a blank ",
    "tab\there",
    "line\nbreak",
    "return\rhere",
    "\x1b[31mred",
    "*?<>|\"'",
    "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/out.jpg",
    "\N{TWO DOT LEADER}/out.jpg",
    "..\N{DIVISION SLASH}out.jpg",
    "..\N{FRACTION SLASH}out.jpg",
    "\N{RIGHT-TO-LEFT OVERRIDE}gpj.exe",
    "\udcff\udcfe",
    "\udcc0\udcae\udcc0\udcae\udcc0\udcafout.jpg",
    "n" * 255,
]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="what a name means is another question on Windows")


def make_pack(path: Path, keys: list[str]) -> Path:
    with storage.create(path) as writer:
        for key in keys:
            writer.write(b"content of " + key.encode("utf-8", "surrogateescape"), key)
    return path


def tree_of(folder: Path) -> dict[bytes, bytes]:
    """Path below the folder, as bytes, to content, for every file (to target, for links); folders are left out."""
    found = {}
    for parent, _, names in os.walk(os.fsencode(folder)):
        for name in names:
            path = os.path.join(parent, name)
            if os.path.islink(path):
                found[os.path.relpath(path, os.fsencode(folder))] = os.readlink(path)
                continue
            with open(path, "rb") as file:
                found[os.path.relpath(path, os.fsencode(folder))] = file.read()
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder two levels down, so that keys that lead up have somewhere to go where they are seen."""
    home = tmp_path / "one" / "two"
    home.mkdir(parents=True)
    (tmp_path / "one" / "out.jpg").write_bytes(b"untouched")
    return home


def test_there_are_enough_names() -> None:
    assert len({*REFUSED, *HARMLESS}) == len(REFUSED) + len(HARMLESS) >= 60


@pytest.mark.parametrize("key", REFUSED, ids=ascii)
def test_a_key_that_leads_out_is_refused(key: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    key = key.replace("HERE", os.fspath(home).lstrip("/"))
    pack = make_pack(home / "pack.bin", ["good.jpg", key])
    before = tree_of(tmp_path)
    with pytest.raises(ConvertError, match="no file names inside a folder"):
        unpacking.unpack(pack, home / "target")
    assert tree_of(tmp_path) == before
    assert [path.name for path in home.iterdir()] == ["pack.bin"]


@pytest.mark.parametrize("key", HARMLESS, ids=ascii)
def test_a_harmless_key_becomes_a_file_inside(key: str, home: Path, tmp_path: Path) -> None:
    pack = make_pack(home / "pack.bin", [key])
    before = tree_of(tmp_path)
    unpacking.unpack(pack, home / "target")
    name = key.encode("utf-8", "surrogateescape")
    assert tree_of(home / "target") == {name: b"content of " + name}
    assert tree_of(tmp_path) == before | {b"one/two/target/" + name: b"content of " + name}


def test_classes_that_lead_out_make_no_folders(home: Path) -> None:
    with storage.create(home / "pack.bin", classes=["../out", f"{home}/out", "..", "good", "a/b", "nul\0"]) as writer:
        writer.write(b"x", "good/x.jpg", label=3)
    unpacking.unpack(home / "pack.bin", home / "target")
    assert sorted(path.name for path in home.iterdir()) == ["pack.bin", "target"]
    assert [path.name for path in (home / "target").iterdir()] == ["good"]


def test_a_class_without_images_comes_back(home: Path) -> None:
    with storage.create(home / "pack.bin", classes=["empty", "full"]) as writer:
        writer.write(b"x", "full/x.jpg", label=1)
    unpacking.unpack(home / "pack.bin", home / "target")
    assert sorted(path.name for path in (home / "target").iterdir()) == ["empty", "full"]


@pytest.mark.parametrize("there", ["file", "full folder", "link", "dangling link", "link to itself"])
def test_a_target_that_is_there_is_refused(there: str, home: Path, tmp_path: Path) -> None:
    pack, target, outside = make_pack(home / "pack.bin", ["x.jpg"]), home / "target", tmp_path / "outside"
    outside.mkdir()
    if there == "file":
        target.write_bytes(b"precious")
    elif there == "full folder":
        target.mkdir()
        (target / "x.jpg").write_bytes(b"precious")
    else:
        target.symlink_to({"link": outside, "dangling link": tmp_path / "nowhere", "link to itself": target}[there])
    before = tree_of(tmp_path)
    with pytest.raises(FileExistsError, match="name a new one"):
        unpacking.unpack(pack, target)
    assert tree_of(tmp_path) == before


def test_links_that_wait_in_an_empty_looking_target_are_not_followed(home: Path, tmp_path: Path) -> None:
    pack = make_pack(home / "pack.bin", ["a/x.jpg"])
    outside = tmp_path / "outside"
    outside.mkdir()
    (home / "target").mkdir()
    (home / "target" / "a").symlink_to(outside)
    with pytest.raises(FileExistsError):
        unpacking.unpack(pack, home / "target")
    assert not list(outside.iterdir())


def test_a_link_planted_while_unpacking_is_not_followed(home: Path, tmp_path: Path) -> None:
    pack = make_pack(home / "pack.bin", ["a.jpg", "b.jpg"])
    outside = tmp_path / "outside"
    outside.mkdir()

    def plant(*_: object) -> None:
        if not os.path.lexists(home / "target"):
            (home / "target").symlink_to(outside)

    with pytest.raises(OSError, match="target"):
        unpacking.unpack(pack, home / "target", progress=plant)
    assert not list(outside.iterdir())
    assert sorted(path.name for path in home.iterdir()) == ["pack.bin", "target"]


def test_an_empty_folder_is_taken(home: Path) -> None:
    (home / "target").mkdir()
    report = unpacking.unpack(make_pack(home / "pack.bin", ["x.jpg"]), home / "target")
    assert (report.records, report.bytes) == (1, len(b"content of x.jpg"))
    assert tree_of(home / "target") == {b"x.jpg": b"content of x.jpg"}


@pytest.mark.parametrize("name", [".", "./", "", "../target"])
def test_the_working_directory_is_refused(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, target = make_pack(home / "pack.bin", ["x.jpg"]), home / "target"
    target.mkdir()
    monkeypatch.chdir(target)
    with pytest.raises(OSError, match="is the working directory, which is not replaced; name a new folder") as caught:
        unpacking.unpack(pack, name)
    assert caught.value.filename == os.fspath(target)
    for shuffle in (None, 1):
        with pytest.raises(OSError, match="is the working directory"):
            convert(pack, f"{name}/" if name else "./", shuffle=shuffle)
    assert sorted(path.name for path in home.rglob("*")) == ["pack.bin", "target"]


def test_a_mount_point_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, target = make_pack(home / "pack.bin", ["x.jpg"]), home / "target"
    target.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    with pytest.raises(OSError, match="is a mount point, which is not replaced; name a new folder"):
        unpacking.unpack(pack, target)
    assert sorted(path.name for path in home.rglob("*")) == ["pack.bin", "target"]


@pytest.mark.parametrize("target", ["new", "new/", "./new", "../home/new", "new/."])
def test_a_target_is_found_however_it_is_written(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = make_pack(tmp_path / "pack.bin", ["x.jpg"])
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    unpacking.unpack(pack, target)
    assert [path.name for path in (tmp_path / "home").rglob("*")] == ["new", "x.jpg"]


def test_a_missing_parent_is_named(home: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder to write to"):
        unpacking.unpack(make_pack(home / "pack.bin", ["x.jpg"]), home / "missing" / "target")


@pytest.mark.parametrize("keys", [["a", "a/b"], ["a/b", "a"]])
def test_a_key_that_is_both_file_and_folder_is_an_error(keys: list[str], home: Path) -> None:
    pack = make_pack(home / "pack.bin", keys)
    place = re.escape(str(home / "target"))
    with pytest.raises(ConvertError, match=f"^{place}: another record takes the place of '{keys[1]}'"):
        unpacking.unpack(pack, home / "target")
    assert [path.name for path in home.iterdir()] == ["pack.bin"]


def test_an_error_names_the_file_that_was_to_be(home: Path) -> None:
    pack = make_pack(home / "pack.bin", ["a/" + "x" * 256])
    with pytest.raises(OSError, match="too long") as caught:
        unpacking.unpack(pack, home / "target")
    assert caught.value.filename == os.fspath(home / "target" / "a" / ("x" * 256))


def test_a_record_in_the_place_of_a_class_folder_is_an_error(home: Path) -> None:
    with storage.create(home / "pack.bin", classes=["empty"]) as writer:
        writer.write(b"x", "empty", label=0)
    with pytest.raises(ConvertError, match="place of the class folder 'empty'"):
        unpacking.unpack(home / "pack.bin", home / "target")
    assert [path.name for path in home.iterdir()] == ["pack.bin"]


def test_the_next_run_removes_what_a_killed_one_left(home: Path) -> None:
    pack = make_pack(home / "pack.bin", ["a.jpg", "b.jpg"])
    program = "import os, sys, packfmt; packfmt.unpack(*sys.argv[1:], progress=lambda *_: os.kill(os.getpid(), 9))"
    command = [sys.executable, "-c", program, pack, home / "target"]
    killed = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert killed.returncode == -9
    assert len(list(home.iterdir())) == 2
    unpacking.unpack(pack, home / "target")
    assert sorted(path.name for path in home.iterdir()) == ["pack.bin", "target"]


def test_a_damaged_record_leaves_nothing(home: Path) -> None:
    pack = make_pack(home / "pack.bin", ["a.jpg", "b.jpg"])
    content = bytearray(pack.read_bytes())
    content[HEADER.size + 20] ^= 1
    pack.write_bytes(content)
    with pytest.raises(CorruptError):
        unpacking.unpack(pack, home / "target")
    assert [path.name for path in home.iterdir()] == ["pack.bin"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt(), SystemExit(143)])
def test_a_broken_off_run_leaves_nothing(error: BaseException, home: Path) -> None:
    pack = make_pack(home / "pack.bin", ["a.jpg", "b.jpg"])

    def stop(*_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        unpacking.unpack(pack, home / "target", progress=stop)
    assert [path.name for path in home.iterdir()] == ["pack.bin"]


def test_the_folder_gets_the_rights_that_are_usual(home: Path) -> None:
    before = os.umask(0o027)
    try:
        unpacking.unpack(make_pack(home / "pack.bin", ["a/x.jpg"]), home / "target")
    finally:
        os.umask(before)
    assert (home / "target").stat().st_mode & 0o777 == 0o750
    assert (home / "target" / "a" / "x.jpg").stat().st_mode & 0o777 == 0o640


def test_names_are_bytes_in_any_locale(home: Path) -> None:
    pack = make_pack(home / "pack.bin", ["caf\u00e9.jpg", "\udcff.jpg"])
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    program = "import sys, packfmt; packfmt.unpack(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", program, pack, home / "target"]
    subprocess.run(command, check=True, env={**os.environ, **plain}, timeout=60)
    assert set(tree_of(home / "target")) == {"caf\u00e9.jpg".encode(), b"\xff.jpg"}
