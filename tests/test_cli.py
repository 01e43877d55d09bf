"""The command line: what the verbs do, print and exit with, in this process and in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packfmt import cli, storage
from packfmt.cli import show
from packfmt.format import HEADER

ROOT = Path(__file__).parent.parent
VERBS = list(cli.FAMILIES)


@dataclass
class Done:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


Run = Callable[..., Done]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """A function that runs the command line in this process."""

    def call(*arguments: object) -> Done:
        with pytest.raises(SystemExit) as stop:
            cli.main([os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments])
        out, err = capfdbinary.readouterr()
        assert isinstance(stop.value.code, int)
        return Done(stop.value.code, out, err.decode())

    return call


@pytest.fixture
def pack(tree: Path, tmp_path: Path, run: Run) -> Path:
    """``tree``, packed."""
    assert run("pack", tree, tmp_path / "out.bin").code == 0
    return tmp_path / "out.bin"


def process(*arguments: object, code: str = "", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The command line in a process of its own; ``code`` runs before it."""
    program = f"import sys\nfrom packfmt.cli import main\n{code}\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, timeout=60, env=environment, check=False, **options)


def damage(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def is_one_line(text: str) -> bool:
    return text.startswith("packfmt: ") and text.endswith("\n") and text.count("\n") == 1


# Help and usage


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, run: Run) -> None:
    done = run(verb, "--help")
    assert done.code == 0
    assert done.text.startswith(f"Usage: packfmt {verb} ")


def test_help_lists_every_verb(run: Run) -> None:
    text = run("--help").text
    assert [verb for verb in VERBS if f"\n  {verb} " not in text] == []


def test_version(run: Run) -> None:
    assert run("--version").text == "packfmt, version 0.1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["pack"],
        ["pack", "images"],
        ["pack", "images", "out.bin", "more"],
        ["pack", "images", "out.bin", "--nonsense"],
        ["pack", "images", "out.bin", "--bad", "maybe"],
        ["pack", "images", "out.bin", "--threads", "0"],
        ["pack", "images", "out.bin", "--shard-size", "huge"],
        ["pack", "images", "out.bin", "--shard-size", "-1"],
        ["info"],
        ["info", "out.bin", "--system"],
        ["verify"],
        ["cat", "out.bin"],
        ["unpack", "out.bin"],
        ["convert"],
        ["convert", "images"],
        ["demo", "--images", "1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str], run: Run) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert "Usage: packfmt" in done.err


# pack


def test_pack_reports(tree: Path, tmp_path: Path, run: Run) -> None:
    (tree / "dog" / ".DS_Store").write_bytes(b"x")
    done = run("pack", tree, tmp_path / "out.bin")
    assert done.code == 0
    words = " ".join(done.text.split())
    assert "images 4 " in words
    assert "classes cat 2 dog 2 " in words
    assert "formats jpeg 3 png 1 " in words
    assert "passed over hidden or system file 1 " in words


def test_pack_json(tree: Path, tmp_path: Path, run: Run) -> None:
    report = json.loads(run("pack", tree, tmp_path / "out.bin", "--json").out)
    assert (report["records"], report["classes"]) == (4, {"cat": 2, "dog": 2})
    assert report["content_id"] == storage.open(tmp_path / "out.bin").content_id


def test_pack_refuses_an_existing_output(tree: Path, pack: Path, run: Run) -> None:
    before = pack.read_bytes()
    done = run("pack", tree, pack)
    assert done.code == 1
    assert is_one_line(done.err)
    assert str(pack) in done.err
    assert pack.read_bytes() == before


def test_pack_force_replaces(tree: Path, pack: Path, run: Run) -> None:
    (tree / "cat" / "0.jpg").unlink()
    assert run("pack", tree, pack, "--force").code == 0
    assert len(storage.open(pack)) == 3


def test_pack_lists_every_bad_image(tree: Path, tmp_path: Path, run: Run) -> None:
    for name in ("cat/empty.jpg", "dog/page.jpg"):
        (tree / name).write_bytes(b"<html>" if "page" in name else b"")
    done = run("pack", tree, tmp_path / "out.bin")
    assert done.code == 1
    assert "cat/empty.jpg" in done.err
    assert "dog/page.jpg" in done.err
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(("bad", "records"), [("skip", 4), ("keep", 5)])
def test_pack_bad(bad: str, records: int, tree: Path, tmp_path: Path, run: Run) -> None:
    (tree / "cat" / "empty.jpg").write_bytes(b"")
    done = run("pack", tree, tmp_path / "out.bin", "--bad", bad)
    assert done.code == 0
    assert "cat/empty.jpg: " in done.text
    assert len(storage.open(tmp_path / "out.bin")) == records


def test_pack_flat_stores_no_labels(tree: Path, tmp_path: Path, run: Run) -> None:
    assert run("pack", tree, tmp_path / "out.bin", "--flat").code == 0
    assert "label" not in storage.open(tmp_path / "out.bin").columns


def test_pack_in_shards(tree: Path, tmp_path: Path, run: Run, expected_tree: dict[str, bytes]) -> None:
    assert run("pack", tree, tmp_path / "out.json", "--shard-size", "1KB").code == 0
    assert len(list(tmp_path.glob("out-*.bin"))) > 1
    with storage.open(tmp_path / "out.json") as reader:
        assert {record.key: bytes(record.data) for record in reader} == expected_tree


@pytest.mark.parametrize("source", ["missing", "empty", "file"])
def test_pack_of_nothing_is_one_line(source: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    done = run("pack", tmp_path / source, tmp_path / "out.bin")
    assert done.code == 1
    assert is_one_line(done.err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_pack_into_a_missing_folder_is_one_line(tree: Path, tmp_path: Path, run: Run) -> None:
    done = run("pack", tree, tmp_path / "missing" / "out.bin")
    assert done.code == 1
    assert is_one_line(done.err)
    assert str(tmp_path / "missing") in done.err


# info


def test_info(pack: Path, run: Run) -> None:
    words = " ".join(run("info", pack).text.split())
    assert "records 4 " in words
    assert "classes cat 2 dog 2 " in words
    assert "content id " in words


def test_info_json(pack: Path, run: Run) -> None:
    facts = json.loads(run("info", pack, "--json").out)
    assert facts["records"] == 4
    assert facts["bytes"] == pack.stat().st_size
    assert facts["columns"]["label"] == "int64"
    assert facts["columns"]["key"] == "text"


def test_info_system(run: Run) -> None:
    facts = json.loads(run("info", "--system", "--json").out)
    assert facts["cores_usable"] >= 1
    assert facts["memory_usable"] > 2**20
    assert facts["packages"]["numpy"]


def test_info_of_no_pack_is_one_line(tree: Path, run: Run) -> None:
    done = run("info", tree / "dog" / "1.jpg")
    assert done.code == 1
    assert is_one_line(done.err)
    assert "not a packfmt shard" in done.err


def test_info_of_a_folder_says_how_to_pack_it(tree: Path, run: Run) -> None:
    assert f"packfmt pack {tree} {tree}.bin" in run("info", tree).err


# verify


@pytest.mark.parametrize("options", [[], ["--decode"], ["--decode", "--threads", "1"]], ids=" ".join)
def test_verify_of_a_whole_pack(options: list[str], pack: Path, run: Run) -> None:
    done = run("verify", pack, *options)
    assert done.code == 0
    assert ": whole (4 records" in done.text


def test_verify_names_shard_index_and_key(pack: Path, run: Run) -> None:
    damage(pack, HEADER.size)
    done = run("verify", pack)
    assert done.code == 1
    assert done.text.startswith(f"{pack}, record 0, key 'cat/0.jpg': ")
    assert "faults" in done.text


def test_verify_json_of_a_damaged_pack(pack: Path, run: Run) -> None:
    damage(pack, HEADER.size)
    done = run("verify", pack, "--json")
    (found,) = json.loads(done.out)["damaged"]
    assert (done.code, found["path"], found["index"], found["key"]) == (1, str(pack), 0, "cat/0.jpg")


def test_verify_goes_on_after_the_first_fault(pack: Path, run: Run) -> None:
    with storage.open(pack) as reader:
        offsets = reader.offsets(range(len(reader))).tolist()
    for offset in offsets[1:3]:
        damage(pack, offset)
    found = json.loads(run("verify", pack, "--json").out)["damaged"]
    assert [fault["index"] for fault in found] == [1, 2]


def test_verify_decode_finds_what_checksums_do_not(tmp_path: Path, tree: Path, run: Run) -> None:
    whole = (tree / "dog" / "1.jpg").read_bytes()
    (tree / "dog" / "1.jpg").write_bytes(whole[:200])
    assert run("pack", tree, tmp_path / "out.bin", "--bad", "keep").code == 0
    assert run("verify", tmp_path / "out.bin").code == 0
    done = run("verify", tmp_path / "out.bin", "--decode")
    assert done.code == 1
    assert "key 'dog/1.jpg'" in done.text


def test_verify_of_several_shards(tree: Path, tmp_path: Path, run: Run) -> None:
    run("pack", tree, tmp_path / "out.json", "--shard-size", "1KB")
    shards = sorted(tmp_path.glob("out-*.bin"))
    damage(shards[1], HEADER.size)
    done = run("verify", tmp_path / "out.json")
    assert done.code == 1
    assert done.text.startswith(f"{shards[1]}, record 0, key ")


# cat


def test_cat_by_index(pack: Path, run: Run, expected_tree: dict[str, bytes]) -> None:
    assert run("cat", pack, 1).out == expected_tree["cat/a b.jpg"]


def test_cat_by_key(pack: Path, run: Run, expected_tree: dict[str, bytes]) -> None:
    assert run("cat", pack, "dog/2.JPEG").out == expected_tree["dog/2.JPEG"]


def test_cat_of_a_key_that_looks_like_a_number(tmp_path: Path, run: Run) -> None:
    with storage.create(tmp_path / "numbers.bin") as writer:
        writer.write(b"first", "1")
        writer.write(b"second", "0")
    assert run("cat", tmp_path / "numbers.bin", "0").out == b"first"
    assert run("cat", tmp_path / "numbers.bin", "0", "--key").out == b"second"


@pytest.mark.parametrize("record", ["4", "99999999999999999999", "no/such.jpg", "\N{SUPERSCRIPT TWO}"])
def test_cat_of_a_record_that_is_not_there(record: str, pack: Path, run: Run) -> None:
    done = run("cat", pack, record)
    assert (done.code, done.out) == (1, b"")
    assert is_one_line(done.err)
    assert str(pack) in done.err


def test_cat_of_a_damaged_record_writes_nothing(pack: Path, run: Run) -> None:
    damage(pack, HEADER.size)
    done = run("cat", pack, 0)
    assert (done.code, done.out) == (1, b"")
    assert "record 0, key 'cat/0.jpg'" in done.err


# unpack


def test_unpack_gives_the_tree_back(pack: Path, tmp_path: Path, run: Run, expected_tree: dict[str, bytes]) -> None:
    target = tmp_path / "again"
    assert run("unpack", pack, target).code == 0
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == expected_tree


def test_unpack_json(pack: Path, tmp_path: Path, run: Run) -> None:
    report = json.loads(run("unpack", pack, tmp_path / "again", "--json").out)
    assert report["records"] == 4


# Errors


def test_debug_shows_the_traceback(tmp_path: Path, run: Run) -> None:
    for arguments in (["--debug", "info", tmp_path / "missing"], ["info", tmp_path / "missing", "--debug"]):
        done = run(*arguments)
        assert done.code == 1
        assert done.err.startswith("Traceback")


def test_an_error_shows_no_traceback(tmp_path: Path, run: Run) -> None:
    done = run("info", tmp_path / "missing")
    assert done.code == 1
    assert done.err == f"packfmt: {tmp_path / 'missing'}: No such file or directory\n"


def test_debug_behind_two_dashes_is_a_name(run: Run) -> None:
    assert run("info", "--", "--debug").err == "packfmt: --debug: No such file or directory\n"


def test_names_that_no_terminal_can_show_are_escaped(tmp_path: Path, run: Run) -> None:
    done = run("info", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert is_one_line(done.err)
    assert r"\udcff" in done.err


# Progress


def test_progress_is_plain_lines_where_there_is_no_terminal(
    tree: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "LOG_SECONDS", 0.0)
    lines = run("pack", tree, tmp_path / "out.bin").err.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("packing: 2 images of 4, about ")
    assert not any(character in "".join(lines) for character in "\r\x1b")


def test_progress_is_silent_for_short_jobs(tree: Path, tmp_path: Path, run: Run) -> None:
    assert run("pack", tree, tmp_path / "out.bin").err == ""


# Processes of their own


def test_from_end_to_end_in_processes(tree: Path, tmp_path: Path, expected_tree: dict[str, bytes]) -> None:
    assert process("pack", tree, tmp_path / "out.bin").returncode == 0
    shown = process("cat", tmp_path / "out.bin", "dog/1.jpg")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, expected_tree["dog/1.jpg"], b"")


def test_an_error_in_a_process_is_one_line() -> None:
    done = process("verify", "missing.bin")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"packfmt: missing.bin: No such file or directory\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes of Windows end otherwise")
@pytest.mark.parametrize("verb", ["info", "cat"])
def test_a_reader_that_has_gone_is_no_error_of_ours(verb: str, tmp_path: Path) -> None:
    with storage.create(tmp_path / "out.bin") as writer:
        writer.write(bytes(1 << 20), "large")
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [verb, str(tmp_path / "out.bin"), *(["0"] if verb == "cat" else [])]
    command = [sys.executable, "-m", "packfmt.cli", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, cwd=ROOT, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(os.name == "nt", reason="needs a Unix shell")
@pytest.mark.parametrize("arguments", [["verify", "out.bin"], ["cat", "out.bin", "0"], ["--help"]])
def test_closed_standard_output_is_said(arguments: list[str], pack: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "packfmt.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=pack.parent, env=environment, check=False)
    expected = b"packfmt: standard output is closed; send it to a file, or to /dev/null\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.skipif(os.name == "nt", reason="needs a Unix shell")
def test_closed_standard_error_sends_no_message_to_standard_output(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "packfmt.cli", "cat", "missing.bin", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=tmp_path, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


# The signal comes when the second record is written: the first is on the disk, the threads are at work.
AT_THE_SECOND_RECORD = """
import os
from packfmt.storage.shard_writer import ShardWriter
store = ShardWriter._store
count = 0
def stored(self, data):
    global count
    count += 1
    if count == 2:
        os.kill(os.getpid(), {number})
    store(self, data)
ShardWriter._store = stored
"""


@pytest.mark.skipif(os.name == "nt", reason="no such signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("options", [["out.bin"], ["out.json", "--shard-size", "1KB"]], ids=["shard", "shards"])
def test_an_interrupted_pack_leaves_nothing(
    number: int, code: int, options: list[str], tree: Path, tmp_path: Path
) -> None:
    code_before = AT_THE_SECOND_RECORD.format(number=int(number))
    done = process("pack", tree, tmp_path / options[0], *options[1:], code=code_before)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.skipif(os.name == "nt", reason="no such limits")
def test_a_full_disk_is_one_line_and_leaves_nothing(tree: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    done = process("pack", tree, tmp_path / "out.bin", code=limit)
    assert done.returncode == 1
    assert is_one_line(done.stderr.decode())
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


# demo


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_demo_leaves_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    done = run("demo", "--images", 20)
    assert done.code == 0
    for stage in ("draw ", "pack ", "verify ", "load an epoch ", "  decode, crop, flip ", "train an epoch "):
        assert f"\n{stage}" in done.text
    assert not list(tmp_path.iterdir())


def test_demo_without_torch_packs_and_says_what_to_install(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("demo", "--images", 20, "--keep", tmp_path / "demo")
    assert done.code == 0
    assert done.text.endswith("To install it: pip install torch\n")
    assert len(storage.open(tmp_path / "demo" / "images.bin")) == 20


def test_demo_refuses_a_folder_that_holds_something(tree: Path, run: Run) -> None:
    done = run("demo", "--images", 20, "--keep", tree)
    assert done.code == 1
    assert is_one_line(done.err)
