"""The copy loop: reports, bad images, the same bytes whatever the threads, bounded memory, sources that fail."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from make import cmyk_jpeg, gif, jpeg, oriented_jpeg, png

from packfmt import storage
from packfmt.cli.convert import convert as convert_command
from packfmt.cli.packing import pack as command
from packfmt.errors import ConvertError, DecodeError
from packfmt.packing import copy_records, pack
from packfmt.record import Column, Record
from packfmt.reports import BadImage, BadImagesError
from packfmt.sources.base import BadEntry, SkipEntry, Source

Plant = Callable[[Mapping[Any, bytes]], Path]
PICTURE = jpeg(8, 8)
NOT_AN_IMAGE = b"<html>Access denied</html>"


def contents(path: str | Path) -> dict[str, bytes]:
    with storage.open(path, check="full") as reader:
        return {record.key: bytes(record.data) for record in reader}


def in_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- what is packed


def test_bytes_keys_labels_and_classes(tree: Path, tmp_path: Path, expected_tree: dict[str, bytes]) -> None:
    report = pack(tree, tmp_path / "out.bin")
    assert list(contents(tmp_path / "out.bin").items()) == list(expected_tree.items())
    with storage.open(report.path) as reader:
        assert reader.classes == ("cat", "dog")
        assert reader.columns["label"].tolist() == [0, 0, 1, 1]
        assert reader.content_id == report.content_id


def test_the_report(plant: Plant, tmp_path: Path) -> None:
    root = plant(
        {
            "a/1.jpg": PICTURE,
            "a/2.jpg": cmyk_jpeg(2),
            "a/3.jpg": png(),
            "b/4.jpg": oriented_jpeg(6),
            "b/5.jpg": oriented_jpeg(1),
            "b/6.gif": gif(),
            "b/.DS_Store": b"",
            "b/notes.txt": b"x",
            "empty/": b"",
        }
    )
    report = pack(root, tmp_path / "out.bin")
    assert (report.records, report.bytes) == (6, sum(len(d) for d in contents(tmp_path / "out.bin").values()))
    assert report.classes == {"a": 3, "b": 3, "empty": 0}
    assert report.formats == {"jpeg": 4, "png": 1, "gif": 1}
    assert (report.cmyk, report.rotated) == (1, 1)
    assert report.skipped == {"hidden or system file": 1, "not an image": 1}
    assert report.notes == ["nothing is of class 'empty'; its number is kept"]
    assert (report.path, report.files) == (str(tmp_path / "out.bin"), (str(tmp_path / "out.bin"),))
    assert report.problems == []


def test_the_index_tells_each_image(plant: Plant, tmp_path: Path) -> None:
    root = plant({"1.jpg": jpeg(30, 50), "2.jpg": oriented_jpeg(6), "3.jpg": png()})
    pack(root, tmp_path / "out.bin")
    with storage.open(tmp_path / "out.bin") as reader:
        assert (reader.columns["width"][0], reader.columns["height"][0]) == (50, 30)
        assert reader.columns["orientation"].tolist()[1] == 6
        assert len(set(reader.columns["format"].tolist())) == 2


def test_real_photographs(data: Path, tmp_path: Path) -> None:
    folder = data / "clothing" / "test"
    report = pack(folder, tmp_path / "out.json", shard_size=2 << 20)
    on_disk = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.jpg")}
    assert contents(report.path) == on_disk
    assert (report.records, len(report.files)) == (372, 6)
    assert sum(report.classes.values()) == 372


def test_real_signs_keep_their_orientation(data: Path, tmp_path: Path) -> None:
    report = pack(data / "small-signs" / "images", tmp_path / "out.bin")
    assert (report.records, report.rotated, report.problems) == (2062, 3, [])


def test_odd_real_images_pack_or_are_named(data: Path, tmp_path: Path) -> None:
    report = pack(data / "odd", tmp_path / "out.bin", bad="skip")
    named = {problem.key for problem in report.problems}
    stored = contents(report.path)
    assert not named & stored.keys()
    on_disk = {path.name: path.read_bytes() for path in (data / "odd").iterdir()}
    assert stored == {key: on_disk[key] for key in stored}
    assert len(stored) + len(named) + sum(report.skipped.values()) == len(on_disk)
    assert report.cmyk >= 1


# ---- nothing to pack, or nowhere to


@pytest.mark.parametrize("files", [{}, {".hidden.jpg": PICTURE}, {"a/notes.txt": b"x"}, {"a/": b""}])
def test_a_folder_without_images_is_an_error(plant: Plant, tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConvertError, match=r"no image found \(.*\); name "):
        pack(plant(files), tmp_path / "out" / "x.bin")
    assert in_folder(tmp_path / "out") == []


@pytest.mark.parametrize("options", [{}, {"shard_size": 100}])
def test_an_existing_output_is_refused_before_anything_is_read(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    path = pack(tree, tmp_path / "out.bin", **options).path
    before = Path(path).read_bytes()
    monkeypatch.setattr("packfmt.packing._prepare_one", None)
    with pytest.raises(FileExistsError, match="--force"):
        pack(tree, tmp_path / "out.bin", **options)
    assert Path(path).read_bytes() == before


def test_packing_into_the_folder_itself(tree: Path) -> None:
    report = pack(tree, tree / "out.bin")
    assert report.records == 4
    again = pack(tree, tree / "out.bin", force=True)
    assert (again.content_id, again.skipped) == (report.content_id, {"hidden or system file": 1, "not an image": 1})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"threads": -1}, "threads=-1 must be at least 1"),
        ({"bad": "ignore"}, "allowed are 'fail', 'skip' and 'keep'"),
        ({"shuffle": -1}, "seed of 0 or more"),
        ({"shard_size": 0}, "at least 1 byte"),
    ],
)
def test_options_out_of_range_are_refused(tree: Path, tmp_path: Path, option: dict[str, Any], message: str) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        pack(tree, tmp_path / "out" / "x.bin", **option)
    assert in_folder(tmp_path / "out") == []


# ---- bad images


@pytest.fixture
def spoiled(plant: Plant) -> Path:
    """Two good images of four; the others are empty and no image."""
    return plant({"a/1.jpg": PICTURE, "a/2.jpg": b"", "b/3.jpg": NOT_AN_IMAGE, "b/4.jpg": PICTURE[:-2] + b"\xff\xd9"})


def test_bad_images_fail_all_at_once_and_nothing_is_written(spoiled: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BadImagesError) as caught:
        pack(spoiled, tmp_path / "out" / "x.bin")
    assert [problem.key for problem in caught.value.problems] == ["a/2.jpg", "b/3.jpg"]
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{spoiled}: 2 bad image(s), nothing was written; --bad skip leaves them out")
    assert lines[1:] == ["  'a/2.jpg': zero bytes", f"  'b/3.jpg': {caught.value.problems[1].reason}"]
    assert in_folder(tmp_path / "out") == []


def test_bad_images_are_skipped_when_asked(spoiled: Path, tmp_path: Path) -> None:
    report = pack(spoiled, tmp_path / "out.bin", bad="skip")
    assert list(contents(report.path)) == ["a/1.jpg", "b/4.jpg"]
    assert [problem.key for problem in report.problems] == ["a/2.jpg", "b/3.jpg"]
    assert report.classes == {"a": 1, "b": 1}


def test_bad_images_are_kept_when_asked(spoiled: Path, tmp_path: Path) -> None:
    report = pack(spoiled, tmp_path / "out.bin", bad="keep")
    found = contents(report.path)
    assert (found["a/2.jpg"], found["b/3.jpg"], len(found)) == (b"", NOT_AN_IMAGE, 4)
    assert [problem.key for problem in report.problems] == ["a/2.jpg", "b/3.jpg"]
    assert report.formats == {"unknown": 2, "jpeg": 2}
    with storage.open(report.path) as reader:
        assert reader.columns["width"].tolist() == [8, 0, 0, 8]
        assert reader.columns["label"].tolist() == [0, 0, 1, 1]


@pytest.fixture
def stray(plant: Plant) -> Path:
    """A good image, and one with a marker in its scan, which its header does not tell."""
    whole = jpeg()
    scan = whole.index(b"\xff\xda") + 40
    return plant({"a/1.jpg": whole, "a/2.jpg": whole[:scan] + b"\xff\x30" + whole[scan:]})


def test_images_are_decoded_when_asked(stray: Path, tmp_path: Path) -> None:
    assert pack(stray, tmp_path / "headers.bin").problems == []
    with pytest.raises(BadImagesError) as caught:
        pack(stray, tmp_path / "out.bin", decode=True)
    (problem,) = caught.value.problems
    assert problem.key == "a/2.jpg"
    assert "damaged JPEG" in problem.reason
    skipped = pack(stray, tmp_path / "out.bin", decode=True, bad="skip")
    assert list(contents(skipped.path)) == ["a/1.jpg"]


def test_what_was_not_decoded_keeps_its_bytes_and_header_when_asked(stray: Path, tmp_path: Path) -> None:
    report = pack(stray, tmp_path / "out.bin", decode=True, bad="keep")
    assert [(problem.key, problem.kept) for problem in report.problems] == [("a/2.jpg", True)]
    assert contents(report.path) == contents(pack(stray, tmp_path / "headers.bin").path)
    assert report.content_id == pack(stray, tmp_path / "again.bin").content_id


def test_records_that_are_handy_are_decoded_too(stray: Path, tmp_path: Path) -> None:
    handy = pack(stray, tmp_path / "in.bin").path
    result = CliRunner().invoke(convert_command, [handy, str(tmp_path / "out.bin"), "--decode", "--bad", "skip"])
    assert (result.exit_code, "a/2.jpg: damaged JPEG" in result.output) == (0, True)
    assert list(contents(tmp_path / "out.bin")) == ["a/1.jpg"]


@pytest.mark.parametrize("bad", ["skip", "keep"])
def test_an_unreadable_file_is_reported_and_left_out(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any
) -> None:
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if os.fspath(path).endswith("0.jpg"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **options)

    monkeypatch.setattr("packfmt.sources.folder.os.open", refuse)
    report = pack(tree, tmp_path / "out.bin", bad=bad)
    assert report.problems == [BadImage("cat/0.jpg", "cannot be read: Permission denied")]
    assert report.records == 3


@pytest.mark.parametrize("bad", ["skip", "keep"])
def test_an_image_without_class_is_reported_and_left_out(plant: Plant, tmp_path: Path, bad: Any) -> None:
    root = plant({"a/1.jpg": PICTURE, "lost.jpg": PICTURE, "README": b"text"})
    report = pack(root, tmp_path / "out.bin", bad=bad)
    assert report.problems == [BadImage("lost.jpg", "lies beside the class folders and has no class")]
    assert report.records == 1


def test_a_file_that_shrinks_vanishes_or_grows_is_never_stored_at_a_wrong_length(plant: Plant, tmp_path: Path) -> None:
    root = plant({f"{i:03d}.jpg": jpeg(8 + i % 5, 8, seed=i) for i in range(200)})
    done = threading.Event()

    def disturb() -> None:
        turn = 0
        while not done.is_set():
            path = root / f"{turn * 7 % 200:03d}.jpg"
            kind = turn % 3
            if kind == 0 and path.exists():
                os.truncate(path, path.stat().st_size // 2)
            elif kind == 1:
                path.unlink(missing_ok=True)
            else:
                with path.open("ab") as file:
                    file.write(b"\0" * 5000)
            turn += 1

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        report = pack(root, tmp_path / "out.bin", bad="skip", threads=4)
    except ConvertError:
        report = None  # none was left
    finally:
        done.set()
        disturbing.join()
    if report is not None:
        stored = contents(report.path)  # whole: lengths and checksums fit
        assert len(stored) == report.records
        assert not {problem.key for problem in report.problems} & stored.keys()


def test_names_in_messages_are_escaped(plant: Plant, tmp_path: Path) -> None:
    root = plant({b"\xff.jpg": b"", b"\x1b[31mred\n.jpg": b"", b"ok.jpg": PICTURE})
    with pytest.raises(BadImagesError) as caught:
        pack(root, tmp_path / "out.bin")
    text = str(caught.value)
    assert text.isascii()
    assert text.isprintable() or text.count("\n") == 2
    assert "'\\udcff.jpg'" in text


def test_a_message_names_a_hundred_and_counts_the_rest() -> None:
    error = BadImagesError("x", [BadImage(f"{i}.jpg", "zero bytes") for i in range(250)])
    assert len(str(error).splitlines()) == 102
    assert str(error).endswith("and 150 more")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.problems) == (str(error), error.problems)


# ---- the same bytes


@pytest.fixture
def many(plant: Plant) -> Path:
    return plant({f"{i % 7}/{i}.jpg": jpeg(8 + i % 9, 8, seed=i) for i in range(150)})


@pytest.mark.parametrize("threads", [2, 16])
def test_threads_do_not_change_a_byte(many: Path, tmp_path: Path, threads: int) -> None:
    pack(many, tmp_path / "1.bin", threads=1)
    pack(many, tmp_path / "n.bin", threads=threads)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "n.bin").read_bytes()


def test_neither_does_a_slow_file(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(many, tmp_path / "1.bin")
    from packfmt.sources.folder import FolderSource

    real = FolderSource.load

    def load(self: FolderSource, entry: Any) -> Record:
        if entry.key.endswith("0.jpg"):
            time.sleep(0.002)
        return real(self, entry)

    monkeypatch.setattr(FolderSource, "load", load)
    pack(many, tmp_path / "2.bin", threads=8)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()


def test_nor_the_locale_the_place_or_the_time(many: Path, tmp_path: Path) -> None:
    (many / os.fsdecode(b"0/\xff\xc3\xa9.jpg")).write_bytes(PICTURE)
    pack(many, tmp_path / "1.bin")
    elsewhere = tmp_path / "elsewhere"
    many.rename(elsewhere)
    for path in elsewhere.rglob("*"):
        os.utime(path, (1, 1))
    program = "import sys; from packfmt.packing import pack; pack(sys.argv[1], sys.argv[2])"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "Asia/Tokyo"}
    arguments = [sys.executable, "-c", program, str(elsewhere), str(tmp_path / "2.bin")]
    subprocess.run(arguments, check=True, timeout=60, env=environment)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()


def test_shuffling_is_a_permutation_that_depends_on_the_seed_alone(many: Path, tmp_path: Path) -> None:
    orders = []
    for name, seed, threads in [("a", 1, 1), ("b", 1, 8), ("c", 2, 1), ("d", None, 1)]:
        pack(many, tmp_path / name, shuffle=seed, threads=threads)
        orders.append(list(contents(tmp_path / name).items()))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(orders[3])


def test_the_shuffled_order_stays_as_it_is_for_good(plant: Plant, tmp_path: Path) -> None:
    root = plant({f"{i}.jpg": PICTURE for i in range(8)})
    pack(root, tmp_path / "out.bin", shuffle=0)
    assert "".join(key[0] for key in contents(tmp_path / "out.bin")) == "02154367"


def test_shards_hold_what_one_file_holds(many: Path, tmp_path: Path) -> None:
    one = pack(many, tmp_path / "one.bin")
    several = pack(many, tmp_path / "several.json", shard_size=20_000)
    assert len(several.files) > 4
    assert list(contents(one.path).items()) == list(contents(several.path).items())
    assert (several.records, several.bytes, several.classes) == (one.records, one.bytes, one.classes)


# ---- sources, and how much of them is in memory


class Numbers(Source):
    """Records made on demand: ``count`` of them, each of ``size`` bytes, which ``load`` makes."""

    random_access = True
    columns = (Column("label"),)

    def __init__(self, count: int, size: int, *, told: bool = True) -> None:
        super().__init__()
        self._count = count
        self._size = size
        self._told = told
        self.loaded = 0
        self._lock = threading.Lock()

    def entries(self) -> Iterator[Any]:
        yield from range(self._count)

    def size(self, entry: Any) -> int:
        return self._size if self._told else 0

    def load(self, entry: int) -> Record:
        with self._lock:
            self.loaded += 1
        return Record(PICTURE + bytes(self._size), f"{entry}.jpg", {"label": entry})


class Nowhere(storage.Writer):
    """A writer that keeps nothing and notes how far the loading is ahead of it."""

    def __init__(self, source: Numbers) -> None:
        self._source = source
        self._count = 0
        self.ahead = 0
        self.path = "nowhere"
        self.content_id = ""
        self.files = ()  # type: ignore[misc]

    files = ()  # type: ignore[assignment]

    def __len__(self) -> int:
        return self._count

    def _append(self, data: Any, key: str, columns: dict[str, Any]) -> None:
        self._count += 1
        if self._count % 200 == 1:
            time.sleep(0.01)  # so that loading has every chance to run away
        self.ahead = max(self.ahead, self._source.loaded - self._count)

    def close(self) -> None:
        pass

    def discard(self) -> None:
        pass


def copy_nowhere(source: Numbers, threads: int) -> Nowhere:
    writer = Nowhere(source)
    copy_records(source, "nowhere", where="numbers", threads=threads, create=lambda *args, **options: writer)
    return writer


@pytest.mark.parametrize("threads", [1, 4])
def test_loading_stays_a_bounded_number_of_small_records_ahead(threads: int) -> None:
    source = Numbers(3000, 10)
    assert copy_nowhere(source, threads).ahead <= 64 * (2 * threads + 2)
    assert source.loaded == 3000


@pytest.mark.parametrize("threads", [1, 4])
def test_loading_stays_a_bounded_number_of_bytes_ahead(threads: int) -> None:
    assert copy_nowhere(Numbers(60, 1 << 20), threads).ahead * (1 << 20) <= (2 << 20) * (2 * threads + 2)


def test_memory_does_not_grow_with_the_number_of_records() -> None:
    peaks = []
    for count in (30, 90):
        gc.collect()
        tracemalloc.start()
        copy_nowhere(Numbers(count, 1 << 20), 2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 40 << 20
    assert peaks[1] - peaks[0] < 5 << 20


class Failing(Numbers):
    """The 100th record raises."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(1000, 10)
        self._error = error

    def load(self, entry: int) -> Record:
        if entry == 100:
            raise self._error
        return super().load(entry)


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), KeyError("x"), ConvertError("stop")])
def test_an_unforeseen_error_ends_the_copy_at_once(tmp_path: Path, error: Exception) -> None:
    source = Failing(error)
    with pytest.raises(type(error)):
        copy_records(source, tmp_path / "out.bin", where="numbers", threads=2)
    assert source.loaded < 700
    assert in_folder(tmp_path) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("packfmt-read")] == []


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (DecodeError("broken", key="100.jpg"), BadImage("100.jpg", "broken")),
        (DecodeError("broken"), BadImage("?", "broken")),
        (OSError(5, "Input/output error", "100.jpg"), BadImage("100.jpg", "cannot be read: Input/output error")),
    ],
)
def test_a_bad_record_of_any_source_is_a_bad_image(tmp_path: Path, error: Exception, problem: BadImage) -> None:
    report = copy_records(Failing(error), tmp_path / "out.bin", where="numbers", bad="skip")
    assert (report.problems, report.records) == ([problem], 999)


def test_a_skipped_record_is_counted(tmp_path: Path) -> None:
    report = copy_records(Failing(SkipEntry("no image")), tmp_path / "out.bin", where="numbers")
    assert (report.skipped, report.records) == ({"no image": 1}, 999)


class Listed(Source):
    def __init__(self, entries: list[Any], *, random_access: bool = False) -> None:
        super().__init__()
        self._entries = entries
        self.random_access = random_access

    def entries(self) -> Iterator[Any]:
        for entry in self._entries:
            if isinstance(entry, BaseException):
                raise entry
            yield entry


def test_a_value_that_its_column_cannot_hold_makes_a_bad_entry(tmp_path: Path) -> None:
    records = [Record(PICTURE, str(size), {"size": size}) for size in (1, 300, 2)]
    source = Listed(records)
    source.columns = (Column("size", "|u1"),)
    with pytest.raises(BadImagesError) as caught:
        copy_records(source, tmp_path / "out.bin", where="list")
    report = copy_records(source, tmp_path / "out.bin", where="list", bad="keep")
    assert tuple(report.problems) == caught.value.problems
    assert [(problem.key, problem.kept) for problem in report.problems] == [("300", False)]
    assert report.problems[0].reason.startswith("column 'size': 300 is not |u1 of shape ()")
    assert list(contents(report.path)) == ["1", "2"]
    assert report.records == 2


def test_an_error_between_entries_ends_the_copy(tmp_path: Path) -> None:
    source = Listed([Record(PICTURE, "1"), OSError(5, "gone")])
    with pytest.raises(OSError, match="gone"):
        copy_records(source, tmp_path / "out.bin", where="list")
    assert in_folder(tmp_path) == []


def test_a_bad_entry_with_bytes_is_kept_when_asked(tmp_path: Path) -> None:
    entries = [Record(PICTURE, "1"), BadEntry("2", "cut", b"half", {}), BadEntry("3", "gone")]
    report = copy_records(Listed(entries), tmp_path / "out.bin", where="list", bad="keep")
    assert contents(report.path) == {"1": PICTURE, "2": b"half"}
    assert report.problems == [BadImage("2", "cut", kept=True), BadImage("3", "gone")]


@pytest.mark.parametrize("bad", ["skip", "keep"])
def test_where_no_image_can_be_stored_there_is_no_pack(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(ConvertError, match=r"list: none of 2 images .* the first is '1': gone"):
        copy_records(Listed([BadEntry("1", "gone"), BadEntry("2", "cut")]), tmp_path / "out.bin", where="list", bad=bad)
    assert in_folder(tmp_path) == []


def test_the_report_says_which_bad_images_were_kept(plant: Plant, tmp_path: Path) -> None:
    root = plant({"a/1.jpg": PICTURE, "a/2.jpg": b"half", "lost.jpg": PICTURE})
    arguments = [str(root), str(tmp_path / "out.bin"), "--bad", "keep"]
    lines = CliRunner().invoke(command, arguments).output.splitlines()
    kept = next(place for place, line in enumerate(lines) if line.startswith("bad, kept"))
    assert [line.split()[-2:] for line in lines[kept : kept + 4 : 2]] == [["1", "images"], ["1", "images"]]
    assert "a/2.jpg: " in lines[kept + 1]
    assert lines[kept + 2].startswith("bad, left out")
    assert "lost.jpg: " in lines[kept + 3]


def test_two_entries_of_one_key_are_refused(tmp_path: Path) -> None:
    source = Listed([Record(PICTURE, "1"), Record(PICTURE, "1")])
    with pytest.raises(ValueError, match="records 0 and 1 have the same key '1'"):
        copy_records(source, tmp_path / "out.bin", where="list")
    assert in_folder(tmp_path) == []


def test_a_stream_cannot_be_shuffled(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="read in one go"):
        copy_records(Listed([Record(PICTURE, "1")]), tmp_path / "out.bin", where="list", shuffle=1)
    assert in_folder(tmp_path) == []


@pytest.mark.parametrize("value", [3, [1.0, 2.0], "text", b"bytes", 0.5])
@pytest.mark.parametrize("name", ["label", "labels", "boxes", "data", "self", "path"])
def test_columns_of_any_name_and_kind_are_copied(tmp_path: Path, name: str, value: Any) -> None:
    report = copy_records(Listed([Record(PICTURE, "1", {name: value})]), tmp_path / "out.bin", where="list")
    with storage.open(report.path) as reader:
        found = reader.columns[name][0]
        assert (found == value) if not isinstance(value, list) else (found.tolist() == value)


def test_progress(many: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int, int | None]] = []
    report = pack(many, tmp_path / "out.bin", progress=lambda *args: calls.append(args))
    assert calls[-1] == (150, report.bytes, 150)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_an_error_of_the_progress_call_ends_the_copy(many: Path, tmp_path: Path) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        pack(many, tmp_path / "out" / "x.bin", progress=stop)
    assert in_folder(tmp_path / "out") == []
