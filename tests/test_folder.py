"""Folders as a source: what is taken, in which order, what is passed over and what is bad."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from make import jpeg, png

from packfmt.errors import DecodeError, SourceError
from packfmt.sources.base import BadEntry, SkipEntry
from packfmt.sources.folder import FolderSource

Plant = Callable[[Mapping[Any, bytes]], Path]
PICTURE = jpeg(8, 8)


def keys(root: Path, **options: Any) -> list[str]:
    return [record.key for record in FolderSource(root, **options)]


def labels(root: Path, **options: Any) -> dict[str, Any]:
    return {record.key: record.columns.get("label") for record in FolderSource(root, **options)}


def listed(root: Path, **options: Any) -> tuple[list[str], dict[str, str], dict[str, int]]:
    """Keys that load, bad keys with their reasons, and the counts of what was passed over."""
    source = FolderSource(root, **options)
    good, bad = [], {}
    for entry in source.entries():
        try:
            good.append(source.load(entry).key)
        except SkipEntry as skip:
            source.skipped[skip.reason] += 1
        except DecodeError as error:
            bad[error.key] = error.message
        except OSError as error:
            bad[entry.key] = str(error.strerror)
    return good, bad, dict(source.skipped)


# ---- layout and order


def test_class_folders(plant: Plant) -> None:
    root = plant({"dog/1.jpg": PICTURE, "cat/1.jpg": PICTURE, "cat/deep/er/2.jpg": PICTURE})
    assert FolderSource(root).classes == ("cat", "dog")
    assert labels(root) == {"cat/1.jpg": 0, "cat/deep/er/2.jpg": 0, "dog/1.jpg": 1}


def test_a_flat_folder_has_no_labels(plant: Plant) -> None:
    root = plant({"2.jpg": PICTURE, "1.jpg": PICTURE})
    source = FolderSource(root)
    assert (source.classes, source.columns) == ((), ())
    assert labels(root) == {"1.jpg": None, "2.jpg": None}


def test_labels_can_be_left_out(plant: Plant) -> None:
    root = plant({"dog/1.jpg": PICTURE, "0.jpg": PICTURE})
    assert labels(root, labelled=False) == {"0.jpg": None, "dog/1.jpg": None}


def test_classes_are_numbered_as_torchvision_does(plant: Plant) -> None:
    names = ["b", "a", "B", "10", "9", "_", "z z", "\u00e9", "a-b", "a.b"]
    root = plant({f"{name}/1.jpg": PICTURE for name in names})
    assert FolderSource(root).classes == tuple(sorted(names))


def test_an_empty_class_keeps_its_number(plant: Plant) -> None:
    root = plant({"a/1.jpg": PICTURE, "b/": b"", "c/1.jpg": PICTURE})
    assert FolderSource(root).classes == ("a", "b", "c")
    assert labels(root) == {"a/1.jpg": 0, "c/1.jpg": 2}


def test_the_order_is_that_of_the_keys_bytes(plant: Plant) -> None:
    names = [b"a/1.jpg", b"a.jpg", b"a-b/1.jpg", b"a/1/0.jpg", b"a/10.jpg", b"a/2.jpg", b"A/1.jpg", b"a0/1.jpg",
             b"\xc3\xa9/1.jpg", b"\xff/1.jpg", b"\xef\xbf\xbd/1.jpg", b"\xf0\x9f\x98\x80/1.jpg"]  # fmt: skip
    root = plant(dict.fromkeys(names, PICTURE))
    found = [key.encode("utf-8", "surrogateescape") for key in keys(root, labelled=False)]
    assert found == sorted(names)


def test_the_order_does_not_depend_on_the_file_system(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    root = plant({f"{i % 3}/{i}.jpg": PICTURE for i in range(30)})
    expected = keys(root)
    real = os.scandir

    class Turned:
        def __init__(self, path: Any) -> None:
            with real(path) as entries:
                self._entries = list(entries)[::-1]

        def __enter__(self) -> Any:
            return iter(self._entries)

        def __exit__(self, *exc: object) -> None:
            pass

    monkeypatch.setattr("packfmt.sources.folder.os.scandir", Turned)
    assert keys(root) == expected


def test_iterating_twice_gives_and_counts_the_same(plant: Plant) -> None:
    source = FolderSource(plant({"a/1.jpg": PICTURE, "a/.hidden": b"", "a/notes.txt": b"x", "b/2.jpg": PICTURE}))
    first = ([r.key for r in source], dict(source.skipped))
    assert ([r.key for r in source], dict(source.skipped)) == first


def test_images_are_read_verbatim(tree: Path, expected_tree: dict[str, bytes]) -> None:
    assert {record.key: record.data for record in FolderSource(tree)} == expected_tree


def test_classes_of_another_pack(plant: Plant) -> None:
    root = plant({"b/1.jpg": PICTURE})
    source = FolderSource(root, classes=("a", "b", "c"))
    assert source.classes == ("a", "b", "c")
    assert labels(root, classes=("a", "b", "c")) == {"b/1.jpg": 1}


def test_a_class_that_the_other_pack_has_not_is_an_error(plant: Plant) -> None:
    with pytest.raises(SourceError, match=r"class folders \['x'\] are not among the given classes"):
        FolderSource(plant({"x/1.jpg": PICTURE}), classes=("a", "b"))


def test_count_and_describe(tree: Path) -> None:
    source = FolderSource(tree)
    assert source.count() == 4
    told = {"kind": "folder", "records": 4, "columns": ["label"], "classes": ["cat", "dog"], "lost": []}
    assert source.describe() == told
    assert source.skipped == {}


# ---- folders that are none


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder of images: '.*none'"):
        FolderSource(tmp_path / "none")


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_folder(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"") if kind == "file" else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="not a folder of images"):
        FolderSource(path)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert keys(tmp_path) == []


# ---- what is passed over


JUNK = [".DS_Store", "._1.jpg", ".hidden.jpg", "Thumbs.db", "desktop.ini", ".git/x.jpg", ".ipynb_checkpoints/1.jpg",
        "__MACOSX/1.jpg"]  # fmt: skip


@pytest.mark.parametrize("name", JUNK)
@pytest.mark.parametrize("where", ["", "a/"])
def test_hidden_files_and_folders_are_passed_over_and_counted(plant: Plant, name: str, where: str) -> None:
    root = plant({"a/1.jpg": PICTURE, where + name: PICTURE})
    assert FolderSource(root).classes == ("a",)
    assert listed(root) == (["a/1.jpg"], {}, {"hidden or system file": 1})


def test_files_that_are_no_images_are_passed_over_and_counted(plant: Plant) -> None:
    root = plant({"a/1.jpg": PICTURE, "a/labels.csv": b"a,b", "a/empty": b"", "README.md": b"#", "a/list.txt": b"x"})
    assert listed(root) == (["a/1.jpg"], {}, {"not an image": 4})


@pytest.mark.parametrize("name", ["picture", "picture.dat", "picture.txt", "1"])
def test_images_under_other_names_are_taken(plant: Plant, name: str) -> None:
    assert keys(plant({f"a/{name}": png()})) == [f"a/{name}"]


@pytest.mark.parametrize("name", ["1.JPG", "1.JPEG", "1.Jpg", "1.png", "1.PNG", "1.webp", "1.gif", "1.bmp", "1.TIFF"])
def test_whatever_is_named_like_an_image_is_loaded(plant: Plant, name: str) -> None:
    assert keys(plant({f"a/{name}": b"no image; the copy loop says so"})) == [f"a/{name}"]


def test_an_image_beside_class_folders_is_bad(plant: Plant) -> None:
    root = plant({"a/1.jpg": PICTURE, "lost.jpg": PICTURE, "LICENSE": b"text"})
    bad = {"lost.jpg": "lies beside the class folders and has no class"}
    assert listed(root) == (["a/1.jpg"], bad, {"not an image": 1})


# ---- links and other files


def test_links_are_passed_over_by_default(plant: Plant, tmp_path: Path) -> None:
    root = plant({"a/1.jpg": PICTURE})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.jpg").write_bytes(PICTURE)
    (root / "a" / "2.jpg").symlink_to(outside / "secret.jpg")
    (root / "a" / "3.jpg").symlink_to("1.jpg")
    (root / "a" / "dangling.jpg").symlink_to("nothing")
    (root / "a" / "self.jpg").symlink_to("self.jpg")
    (root / "b").symlink_to(outside)
    assert FolderSource(root).classes == ("a",)
    assert listed(root) == (["a/1.jpg"], {}, {"symbolic link (--follow-links takes them)": 5})


def test_links_are_followed_when_asked(plant: Plant, tmp_path: Path) -> None:
    root = plant({"a/1.jpg": PICTURE})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.jpg").write_bytes(PICTURE)
    (root / "a" / "2.jpg").symlink_to(outside / "x.jpg")
    (root / "b").symlink_to(outside)
    assert labels(root, follow_links=True) == {"a/1.jpg": 0, "a/2.jpg": 0, "b/x.jpg": 1}


def test_circles_of_links_end(plant: Plant) -> None:
    root = plant({"a/1.jpg": PICTURE, "b/c/2.jpg": PICTURE})
    (root / "a" / "up").symlink_to("..")
    (root / "a" / "self").symlink_to(".")
    (root / "b" / "c" / "up").symlink_to("../..")
    good, bad, skipped = listed(root, follow_links=True)
    assert {"a/1.jpg", "b/c/2.jpg"} <= set(good)
    assert (len(good), bad, skipped) == (2, {}, {"link in a circle": 3})


@pytest.mark.parametrize("target", ["nothing", "it.jpg"])
def test_a_link_to_nothing_or_itself_is_bad_and_spoils_nothing_else(plant: Plant, target: str) -> None:
    root = plant({"a/1.jpg": PICTURE, "a/z.jpg": PICTURE})
    (root / "a" / "it.jpg").symlink_to(target)
    (root / "loop").symlink_to("loop")
    good, bad, _ = listed(root, follow_links=True)
    assert good == ["a/1.jpg", "a/z.jpg"]
    assert set(bad) == {"a/it.jpg", "loop"}
    assert all(reason.startswith("cannot be read: ") for reason in bad.values())


def test_fifos_sockets_devices_and_folders_under_image_names_never_block(plant: Plant, tmp_path: Path) -> None:
    root = plant({"a/1.jpg": PICTURE, "a/folder.jpg/2.jpg": PICTURE})
    os.mkfifo(root / "a" / "fifo.jpg")
    there = os.getcwd()
    os.chdir(root / "a")  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        os.chdir(there)
        (root / "a" / "null.jpg").symlink_to("/dev/null")
        (root / "a" / "zero.jpg").symlink_to("/dev/zero")
        assert listed(root) == (
            ["a/1.jpg", "a/folder.jpg/2.jpg"],
            {},
            {"not a regular file": 2, "symbolic link (--follow-links takes them)": 2},
        )
        assert listed(root, follow_links=True)[2] == {"not a regular file": 4}


def test_a_fifo_put_in_a_files_place_does_not_block(plant: Plant) -> None:
    root = plant({"1.jpg": PICTURE})
    source = FolderSource(root)
    (entry,) = source.entries()
    (root / "1.jpg").unlink()
    os.mkfifo(root / "1.jpg")
    outcomes: list[str] = []

    def load() -> None:
        try:
            source.load(entry)
        except SkipEntry as skip:
            outcomes.append(skip.reason)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join(10)
    assert outcomes == ["not a regular file"]


def test_a_link_put_in_a_files_place_is_not_followed(plant: Plant, tmp_path: Path) -> None:
    root = plant({"1.jpg": PICTURE})
    source = FolderSource(root)
    (entry,) = source.entries()
    (tmp_path / "secret.jpg").write_bytes(PICTURE)
    (root / "1.jpg").unlink()
    (root / "1.jpg").symlink_to(tmp_path / "secret.jpg")
    with pytest.raises(OSError, match="symbolic links"):
        source.load(entry)


# ---- names


ODD = [b"\xff.jpg", b"line\nbreak.jpg", b"tab\t.jpg", b"-rf.jpg", b" .jpg", b"caf\xc3\xa9.jpg", b"cafe\xcc\x81.jpg",
       b"\xf0\x9f\x98\x80.jpg", b"a.b.c.jpg", b"x" * 251 + b".jpg", b"quote'\".jpg", b"back\\slash.jpg", b"*?[x].jpg",
       b"A.jpg", b"a.jpg", b"$(x).jpg", b"~.jpg", b"\x01\x7f.jpg", b"\xed\xb3\xbf.jpg"]  # fmt: skip


def test_odd_names_come_through_unchanged(plant: Plant) -> None:
    root = plant({b"class \xff/" + name: PICTURE for name in ODD})
    source = FolderSource(root)
    assert source.classes == ("class \udcff",)
    found = [record.key.encode("utf-8", "surrogateescape") for record in source]
    assert found == sorted(b"class \xff/" + name for name in ODD)


def test_keys_do_not_depend_on_the_locale(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the locale's encoding is Latin-1, in which Python's names of files read otherwise."""
    root = plant(dict.fromkeys((b"\xff.jpg", b"caf\xc3\xa9.jpg"), PICTURE))
    expected = keys(root)
    monkeypatch.setattr("packfmt.sources.folder.os", Latin1(os))
    assert keys(root) == expected == ["caf\u00e9.jpg", "\udcff.jpg"]


class Latin1:
    """``os`` as in a Latin-1 locale."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def fsencode(self, name: Any) -> bytes:
        return self._real.fspath(name).encode("latin-1")

    def fsdecode(self, name: Any) -> str:
        return name.decode("latin-1")

    def scandir(self, path: str) -> Any:
        return Listing(self._real.scandir(path.encode("latin-1")))

    def open(self, path: str, flags: int) -> int:
        return self._real.open(path.encode("latin-1"), flags)


class Listing:
    def __init__(self, entries: Any) -> None:
        self._entries = entries

    def __enter__(self) -> Any:
        return (Entry(entry) for entry in self._entries)

    def __exit__(self, *exc: object) -> None:
        self._entries.close()


class Entry:
    def __init__(self, entry: Any) -> None:
        self._entry = entry
        self.name = entry.name.decode("latin-1")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


@contextlib.contextmanager
def nested(root: Path, names: list[str], content: bytes | None = None) -> Iterator[None]:
    """Folders in folders, each in the one before it, with a file 1.jpg in the last; gone afterwards."""
    there = os.getcwd()
    os.chdir(root)
    try:
        for name in names:
            os.mkdir(name)
            os.chdir(name)
        if content is not None:
            Path("1.jpg").write_bytes(content)
        os.chdir(root)
        yield
        for name in names:
            os.chdir(name)
        if content is not None:
            os.unlink("1.jpg")
        for name in reversed(names):
            os.chdir("..")
            os.rmdir(name)
    finally:
        os.chdir(there)


def test_a_tree_deeper_than_the_stack(tmp_path: Path) -> None:
    with nested(tmp_path, ["d"] * 1500, PICTURE):
        assert [len(key) for key in keys(Path("."))] == [1500 * 2 + 5]


def test_a_path_longer_than_the_system_takes_is_bad_and_spoils_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "z.jpg").write_bytes(PICTURE)
    with nested(tmp_path, ["d" * 250] * 20):
        good, bad, _ = listed(tmp_path, labelled=False)
    assert good == ["z.jpg"]
    assert list(bad.values()) == ["cannot list the folder: File name too long"]


# ---- files that change, and files that cannot be read


def load_changed(root: Path, change: Callable[[Path], Any]) -> Any:
    source = FolderSource(root)
    (entry,) = source.entries()
    change(root / "1.jpg")
    return source.load(entry)


def test_a_file_that_vanishes_is_an_error(plant: Plant) -> None:
    with pytest.raises(FileNotFoundError):
        load_changed(plant({"1.jpg": PICTURE}), os.unlink)


@pytest.mark.parametrize("size", [0, 1, len(PICTURE) - 1, len(PICTURE) + 1, 3 * len(PICTURE)])
def test_a_file_that_changed_between_listing_and_reading_is_read_as_it_is(plant: Plant, size: int) -> None:
    record = load_changed(plant({"1.jpg": PICTURE}), lambda path: os.truncate(path, size))
    assert len(record.data) == size


@pytest.mark.parametrize("size", [0, 1, len(PICTURE) - 1, len(PICTURE) + 1, 3 * len(PICTURE)])
def test_a_file_that_changes_while_it_is_read_is_bad(plant: Plant, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    root = plant({"1.jpg": PICTURE})
    real = os.fstat

    def fstat(descriptor: int) -> Any:
        status = real(descriptor)
        os.truncate(root / "1.jpg", size)
        return status

    monkeypatch.setattr("packfmt.sources.folder.os.fstat", fstat)
    with pytest.raises(DecodeError, match=f"changed while it was read; it had {len(PICTURE)} bytes"):
        load_changed(root, lambda path: None)


def test_a_file_read_in_pieces_is_whole(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.read
    monkeypatch.setattr("packfmt.sources.folder.os.read", lambda descriptor, size: real(descriptor, min(size, 100)))
    assert load_changed(plant({"1.jpg": PICTURE}), lambda path: None).data == PICTURE


def test_a_huge_file_is_bad_and_not_read(plant: Plant) -> None:
    with pytest.raises(DecodeError, match="1099511627776 bytes, allowed are 268435456"):
        load_changed(plant({"1.jpg": PICTURE}), lambda path: os.truncate(path, 1 << 40))


def test_a_huge_file_of_another_kind_is_passed_over(plant: Plant) -> None:
    root = plant({"1.jpg": PICTURE, "disk.img": b""})
    os.truncate(root / "disk.img", 1 << 40)
    assert listed(root) == (["1.jpg"], {}, {"not an image": 1})


def test_an_unreadable_folder_is_bad_and_spoils_nothing_else(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    root = plant({"a/1.jpg": PICTURE, "b/2.jpg": PICTURE, "c/3.jpg": PICTURE})
    real = os.scandir

    def scandir(path: str) -> Any:
        if path.endswith("b/"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("packfmt.sources.folder.os.scandir", scandir)
    assert listed(root) == (["a/1.jpg", "c/3.jpg"], {"b/": "cannot list the folder: Permission denied"}, {})


def test_an_unreadable_file_raises(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError(13, "Permission denied")

    root = plant({"1.jpg": PICTURE})
    monkeypatch.setattr("packfmt.sources.folder.os.open", refuse)
    with pytest.raises(PermissionError):
        keys(root)


def test_loading_leaves_no_descriptor_open(plant: Plant) -> None:
    root = plant({"1.jpg": PICTURE, "2.txt": b"x", "3.jpg": b""})
    before = len(os.listdir("/proc/self/fd"))
    listed(root)
    assert len(os.listdir("/proc/self/fd")) == before


def test_sizes_are_known_before_loading(plant: Plant) -> None:
    source = FolderSource(plant({"1.jpg": PICTURE}))
    (entry,) = source.entries()
    assert (source.size(entry), source.size(BadEntry("x", "y"))) == (len(PICTURE), 0)
