"""Damaged, hostile and unsuitable LMDB databases: one clear line each, nothing run, no process left."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
from kinds import recogniser
from lmdb_damage_program import HARMS, cases, page_size_of
from make import Bomb, encoded, write_lmdb

import packfmt
from packfmt import convert
from packfmt import open as open_pack
from packfmt.errors import DecodeError, SourceError
from packfmt.lmdb_pages import decode_head
from packfmt.sources.isolated import process as isolated
from packfmt.sources.isolated.frames import HEADER, FrameError, read_frame
from packfmt.sources.lmdb.source import LMDBSource
from packfmt.sources.lmdb.table import open_tables

recognise = recogniser("lmdb")

PIL_PICKLE = b"\x80\x04cPIL.Image\nImage\n)R\x94]\x94b\x94K\x03\x86\x94."
CODE_ROW = b"\x80\x02cdataset\nCodeRow\n(X\x03\x00\x00\x00topX\x06\x00\x00\x00bottomX\x01\x00\x00\x00ft\x81."

REFUSED = {
    "labels only": ([(b"%d" % n, b"img_%d.jpg word" % n) for n in range(3)] + [(b"total_number", b"3")], "labels only"),
    "json labels": ([(b"%d" % n, json.dumps({"text": "x"}).encode()) for n in range(3)], "labels only"),
    "PIL images": ([(b"%d" % n, PIL_PICKLE) for n in range(3)], "PIL images"),
    "code rows": ([(b"%d" % n, CODE_ROW) for n in range(3)] + [(b"length", b"3")], "VQ-VAE-2 code rows"),
    "lz4 features": ([(b"nlvr_%d" % n, b"\x04\x22\x4d\x18" + bytes(40)) for n in range(3)], "features .lz4"),
    "npz features": ([(b"nlvr_%d" % n, b"PK\x03\x04" + bytes(40)) for n in range(3)], "features .a zip or npz"),
    "npy arrays": ([(b"%d" % n, b"\x93NUMPY\x01\x00" + b"{'descr': '|O'}") for n in range(3)], "features .a .npy"),
    "pickled numbers": ([(b"%d" % n, pickle.dumps((1.5, "x"))) for n in range(3)], "no image"),
    "no entries": ([], "empty"),
    "counts only": ([(b"num-samples", b"0")], "no images"),
    "unknown": ([(b"%d" % n, bytes([250, n]) * 5) for n in range(3)], "no layout of images"),
    "a pack": ([(bytes(8), encoded(1)), (b"packfmt" + bytes(8), b"header")], "packfmt.open"),
    "web pages": ([(b"k%d" % n, b"<html>Access denied</html>") for n in range(3)], "an HTML"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_no_images_is_refused_by_name(tmp_path: Path, name: str) -> None:
    entries, told = REFUSED[name]
    path = write_lmdb(tmp_path / "db", entries)
    with pytest.raises(SourceError, match=told) as error:
        LMDBSource(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>404", "HTML"),
        (b"\x1f\x8b\x08" + bytes(50), "gunzip"),
        (b"", "empty"),
        (bytes(12) + b"\xde\xc0\xef\xbe" + bytes(5000), "32-bit"),
        (bytes(16) + b"\xbe\xef\xc0\xde" + bytes(5000), "big-endian"),
    ],
    ids=["lfs", "html", "gzip", "empty", "narrow", "big-endian"],
)
def test_files_that_are_no_database_are_told(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(SourceError, match=told):
        LMDBSource(tmp_path)


def test_recognise_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(encoded(1))
    assert recognise(tmp_path) is None
    assert recognise(tmp_path / "x.jpg") is None
    assert recognise(tmp_path / "absent") is None
    (tmp_path / "data.mdb").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert recognise(tmp_path) == "lmdb"


def test_no_environment_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LMDBSource(tmp_path)


def test_damaged_values_are_bad_entries_and_the_rest_is_read(tmp_path: Path) -> None:
    whole = pickle.dumps((encoded(0), 0))
    values = [whole, whole[:-20], pickle.dumps((b"no image", 1)), b"", pickle.dumps((encoded(4), "text")), whole]
    with LMDBSource(write_lmdb(tmp_path / "db", ((b"%d" % n, value) for n, value in enumerate(values)))) as source:
        told = []
        for handle in source.entries():
            try:
                told.append(source.load(handle).key)
            except DecodeError as error:
                told.append(error.message.split()[0] + " " + error.key)
        assert told == ["0", "a 1", "not 2", "a 3", "label 4", "5"]


@pytest.mark.parametrize(
    ("good", "odd", "told"),
    [
        (1, 1 << 70_000, "thousands of digits"),
        (1, 1 << 63, "9223372036854775808 is not a 64-bit integer"),
        (0.5, 10**400, "is not a number that a float64 holds"),
        ([1, 2], [1, 1 << 70_000], "thousands of digits"),
        ("word", "\ud800x", "written as UTF-8"),
        ("word", 5, "label 5 is not a text"),
    ],
    ids=["int of many digits", "int of 65 bits", "float", "row", "half a pair", "another kind"],
)
def test_a_label_that_no_column_holds_is_one_bad_entry(tmp_path: Path, good: object, odd: object, told: str) -> None:
    labels = [good] * 20 + [odd, good]
    values = [(b"%d" % n, pickle.dumps((encoded(n), label))) for n, label in enumerate(labels)]
    report = convert(write_lmdb(tmp_path / "db", values), tmp_path / "out.bin", bad="skip")
    assert (report.records, [problem.key for problem in report.problems]) == (21, ["20"])
    assert told in report.problems[0].reason


@pytest.mark.parametrize(
    ("good", "odd", "kept"),
    [
        (1, 1 << 70_000, -1),
        (1, None, -1),
        (0.5, "text", -1.0),
        ("word", 5, ""),
        ([1, 2], [1, 2, 3], [-1, -1]),
        (np.ones((2, 2), np.uint8), 1, [[0, 0], [0, 0]]),
    ],
    ids=["int", "none", "float", "text", "row", "array"],
)
def test_an_image_whose_label_is_odd_is_kept_when_asked(
    tmp_path: Path, good: object, odd: object, kept: object
) -> None:
    values = [(b"%d" % n, pickle.dumps((encoded(n), odd if n == 7 else good))) for n in range(21)]
    report = convert(write_lmdb(tmp_path / "db", values), tmp_path / "out.bin", bad="keep")
    assert (report.records, [problem.key for problem in report.problems]) == (21, ["7"])
    with open_pack(tmp_path / "out.bin") as pack:
        assert bytes(pack[7].data) == encoded(7)
        np.testing.assert_array_equal(pack[7].columns["label"], kept)


def test_a_name_that_cannot_be_written_is_one_bad_entry(tmp_path: Path) -> None:
    names = ["a.jpg", "\ud800.jpg"]
    values = [(b"%d" % n, pickle.dumps((name, encoded(n), "text"))) for n, name in enumerate(names)]
    report = convert(write_lmdb(tmp_path / "db", values), tmp_path / "out.bin", bad="skip")
    assert [(problem.key, problem.reason.split()[0]) for problem in report.problems] == [("1", "name")]


def test_an_array_of_a_size_of_many_digits_is_one_bad_entry(tmp_path: Path) -> None:
    odd = pickle.dumps((encoded(1), np.arange(3)), 2)
    size = (1 << 70_000).to_bytes(8751, "little")
    assert odd.count(b"K\x03\x85") == 1
    odd = odd.replace(b"K\x03\x85", b"\x8b" + len(size).to_bytes(4, "little") + size + b"\x85")
    values = [(b"0", pickle.dumps((encoded(0), 1))), (b"1", odd)]
    report = convert(write_lmdb(tmp_path / "db", values), tmp_path / "out.bin", bad="skip")
    assert [problem.key for problem in report.problems] == ["1"]


def test_pickles_run_nothing(tmp_path: Path) -> None:
    """Eighteen bombs: every protocol, before, between and after image and label."""
    canary = tmp_path / "canary"
    entries = [(b"__len__", pickle.dumps(Bomb(canary))), (b"__keys__", pickle.dumps(Bomb(canary)))]
    for number in range(18):
        value: list[object] = [encoded(number), 3]
        value.insert(number % 3, Bomb(canary))
        entries.append((b"%d" % number, pickle.dumps(tuple(value), number // 3)))
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        found = [(bytes(record.data), record.columns["label"]) for record in source]
        assert found == [(encoded(number), 3) for number in range(18)]
        assert any("was not run" in note for note in source.notes)
    assert not canary.exists()
    pickle.loads(entries[-1][1])[2].close()
    assert canary.exists()  # the bombs are live


def test_msgpack_numpy_object_arrays_run_nothing(tmp_path: Path) -> None:
    """Twelve bombs: every protocol, in both spellings of the kind O that msgpack-numpy unpickles."""
    canary = tmp_path / "canary"
    entries = []
    for number in range(12):
        kind = {b"kind": b"O"} if number < 6 else {"kind": "O"}
        pickled = pickle.dumps(Bomb(canary), number % 6)
        bomb = {b"nd": True, b"type": "|O", b"shape": [1], b"data": pickled, **kind}
        entries.append((b"%d" % number, msgpack.packb([encoded(number), bomb])))
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        assert [bytes(record.data) for record in source] == [encoded(number) for number in range(12)]
        assert any("was not run" in note for note in source.notes)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["num-samples", "length"])
def test_a_pickle_in_a_count_is_only_no_number(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    first = b"image-000000001" if name == "num-samples" else b"64-00000"
    entries = [(first, encoded(1)), (name.encode(), pickle.dumps(Bomb(canary)))]
    with LMDBSource(write_lmdb(tmp_path / "db", entries)) as source:
        list(source)
        assert "is not a number" in source.notes[-1]
    assert not canary.exists()


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", ((b"image-%09d" % n, encoded(n, height=64, width=64)) for n in range(200)))
    data = path / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(SourceError, match=re.escape(str(path))):
        list(LMDBSource(path))


def test_flipped_bytes_end_in_records_or_an_error_and_never_in_a_crash(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", ((b"image-%09d" % n, encoded(n)) for n in range(40)))
    whole = (path / "data.mdb").read_bytes()
    draw = random.Random(5)
    for _ in range(12):
        broken = bytearray(whole)
        for _ in range(30):
            page = draw.randrange(len(whole) // 4096)
            broken[page * 4096 + draw.randrange(200)] = draw.randrange(256)
        (path / "data.mdb").write_bytes(broken)
        with suppress(SourceError, DecodeError), LMDBSource(path, timeout=20) as source:
            for handle in source.entries():
                source.load(handle)


@pytest.fixture(scope="module")
def long_and_short(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Images in their leaves and on one page of their own, in a tree of two levels."""
    images = [(b"image-%09d" % n, encoded(n) + bytes([n]) * (3000 if n % 4 == 0 else 0)) for n in range(90)]
    path = write_lmdb(tmp_path_factory.mktemp("lmdb") / "db", images)
    return images, (path / "data.mdb").read_bytes()


@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm != "scattered"])
def test_no_damaged_page_hands_out_another_image(
    tmp_path: Path, long_and_short: tuple[list[tuple[bytes, bytes]], bytes], harm: str
) -> None:
    """In this process, as nothing but Python reads the file. Pages without a reader may be damaged unseen."""
    images, whole = long_and_short
    size = page_size_of(whole)
    in_use = decode_head(whole, "").pages
    refused = 0
    for page, content in cases(whole[: in_use * size], HARMS[harm], seed=1):
        (tmp_path / "data.mdb").write_bytes(content)
        try:
            (table,) = open_tables(str(tmp_path / "data.mdb"), None)
            found = [(key, bytes(value)) for key, value in table.scan()]
            assert [bytes(table.get(key) or b"") for key, _ in images] == [value for _, value in found]
        except SourceError:
            refused += 1
            continue
        if harm != "few_bytes":  # which may be the image's own: such a file has no checksums
            assert found == images, (harm, page)
    assert refused > 10


@pytest.mark.parametrize("harm", ["zeroed", "swapped", "cut"])
def test_a_damaged_database_names_the_file(
    tmp_path: Path, long_and_short: tuple[list[tuple[bytes, bytes]], bytes], harm: str
) -> None:
    _, whole = long_and_short
    root = decode_head(whole, "").main.root
    content = dict(cases(whole, HARMS[harm], seed=2))[root]
    (tmp_path / "data.mdb").write_bytes(content)
    named = re.escape(str(tmp_path))
    with pytest.raises(SourceError, match=rf"^{named}: page {root} of LMDB is damaged: .* restore the file"):
        LMDBSource(tmp_path)


def test_a_database_of_lmdb_1_is_told(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(24) + b"\xde\xc0\xef\xbe\3" + bytes(5000))
    assert recognise(tmp_path) == "lmdb"
    with pytest.raises(SourceError, match=r"of LMDB 1\.0, packfmt reads those of 0\.9"):
        LMDBSource(tmp_path)


def test_a_loop_of_pages_ends(tmp_path: Path) -> None:
    """A leaf whose second entry points at its first again, as a damaged tree does."""
    path = write_lmdb(tmp_path / "db", ((b"image-%09d" % n, encoded(n)) for n in range(3)))
    data = bytearray((path / "data.mdb").read_bytes())
    for page in range(2, len(data) // 4096):
        head = page * 4096
        if int.from_bytes(data[head + 10 : head + 12], "little") == 2:  # a leaf
            data[head + 18 : head + 20] = data[head + 16 : head + 18]
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(SourceError, match="out of order"):
        list(LMDBSource(path))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def child_of(source: LMDBSource) -> int:
    (reader,) = source._running
    return reader.pid


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    image = encoded(1)
    return write_lmdb(tmp_path / "db", ((b"%06d.jpg" % n, image) for n in range(5000)))


@pytest.mark.parametrize("way", ["close", "with", "drop", "end", "early"])
def test_no_child_outlives_its_source(numbered: Path, way: str) -> None:
    source = LMDBSource(numbered)
    pid = child_of(source)
    assert alive(pid)
    if way == "close":
        source.close()
        source.close()
    elif way == "with":
        with source:
            next(iter(source))
    elif way == "end":
        assert sum(1 for _ in source) == 5000
    elif way == "early":
        records = iter(source)
        next(records)
        records.close()
    else:
        del source
        gc.collect()
    assert not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_crash_of_the_reader_is_an_error_that_names_the_file(numbered: Path, number: signal.Signals) -> None:
    with LMDBSource(numbered) as source:
        os.kill(child_of(source), number)
        with pytest.raises(SourceError, match=rf"{re.escape(str(numbered))}: .*crashed .{number.name}"):
            list(source)


def test_a_reader_that_hangs_is_ended(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_GRACE", 0.1)
    with LMDBSource(numbered) as source:
        (reader,) = source._running
        reader._timeout = 0.1
        os.kill(reader.pid, signal.SIGSTOP)
        with pytest.raises(SourceError, match=rf"{re.escape(str(numbered))}: .*no progress"):
            list(source)


def test_the_child_finds_a_package_that_an_import_hook_found(numbered: Path, tmp_path: Path) -> None:
    """As an editable installation's: the package is in no folder of the path."""
    program = textwrap.dedent(f"""
        import sys
        from importlib.util import spec_from_file_location

        class Finder:
            def find_spec(name, path=None, target=None):
                folder = {str(Path(packfmt.__file__).parent)!r}
                if name == "packfmt":
                    return spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])

        sys.meta_path.insert(0, Finder)
        from packfmt.sources.lmdb.source import LMDBSource
        print(len(list(LMDBSource({str(numbered)!r}))))
    """)
    paths = [path for path in sys.path if "site-packages" in path or path.startswith(sys.base_prefix)]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {paths!r}\n{program}"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["5000"], done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_its_parent(numbered: Path, number: signal.Signals) -> None:
    program = textwrap.dedent(f"""
        import sys
        from packfmt.sources.lmdb.source import LMDBSource
        source = LMDBSource({str(numbered)!r})
        records = iter(source)
        next(records)
        (reader,) = source._running
        print(reader.pid, flush=True)
        sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(number)
        parent.wait(10)
        # The child held the write end of nothing of ours; its own end of the pipe tells when it is gone.
        for _ in range(1000):
            if not alive(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                break
            os.sched_yield()
            signal.sigtimedwait([signal.SIGCHLD], 0.01)
        else:
            pytest.fail("the child is still there")


def test_memory_beyond_the_limit_is_an_error(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packfmt.sources.lmdb.source._MEMORY", 200 << 20)
    bomb = b"\x80\x04" + b"X" + (50 << 20).to_bytes(4, "little") + b"a" * (50 << 20) + b"\x94"
    bomb += b"(" + b"h\x00c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 20 + b"t."
    path = write_lmdb(numbered.parent / "bomb", [(b"0", bomb)], map_size=1 << 28)
    with pytest.raises(SourceError, match=r"MiB|no image"):
        list(LMDBSource(path))


@pytest.mark.parametrize(
    ("stream", "told"),
    [
        (b"PKF1", "inside a frame"),
        (b"NOPE" + bytes(12), "not a frame"),
        (HEADER.pack(b"PKF1", 2, 1 << 62) + b"{}", "not a frame"),
        (HEADER.pack(b"PKF1", 1 << 31, 0), "not a frame"),
        (HEADER.pack(b"PKF1", 4, 0) + b"nope", "not JSON"),
        (HEADER.pack(b"PKF1", 100_000, 0) + b"[" * 100_000, "not JSON"),
        (HEADER.pack(b"PKF1", 2, 0) + b"[]", "not an object"),
        (HEADER.pack(b"PKF1", 2, 9) + b"{}" + b"short", "inside a frame"),
    ],
)
def test_streams_that_are_no_frames_are_errors(tmp_path: Path, stream: bytes, told: str) -> None:
    (tmp_path / "stream").write_bytes(stream)
    with (tmp_path / "stream").open("rb", buffering=0) as reader, pytest.raises(FrameError, match=told):
        read_frame(reader)
