"""A pack appears whole or not at all: failing calls, full disks, killed writers, two writers at once."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from contracts.reader import some_records
from faults import FailingCalls, below, failing, in_child, outcome

from packfmt import storage
from packfmt.record import Record
from packfmt.storage.atomic import PendingFile

RECORDS = some_records(12)
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
SHARDED = pytest.mark.parametrize("options", [{}, {"shard_size": 6000}], ids=["one file", "shards"])


def write(path: Path, records: list[Record] = RECORDS, **options: Any) -> storage.Writer:
    with storage.create(path, **options) as writer:
        for record in records:
            writer.write(record.data, record.key, **record.columns)
    return writer


def write_all(writer: storage.Writer) -> None:
    for record in RECORDS:
        writer.write(record.data, record.key)


def contents(path: str | Path) -> list[tuple[bytes, str]]:
    with storage.open(path, check="full") as reader:
        return [(bytes(r.data), r.key) for r in reader]


EXPECTED = [(r.data, r.key) for r in RECORDS]


# ---- failing calls


def count_calls(tmp_path: Path, records: list[Record], **options: Any) -> int:
    (tmp_path / "count").mkdir()
    with failing(FailingCalls()) as calls:
        write(tmp_path / "count" / "out", records, **options)
    return len(calls.made)


@SHARDED
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_every_failing_call_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], code: int
) -> None:
    monkeypatch.setattr("packfmt.storage.spool.LIMIT", 64)  # so that spools write to files too
    total = count_calls(tmp_path, RECORDS[:5], **options)
    assert total > 30
    folder = tmp_path / "work"
    silent, left = [], []
    for nth in range(1, total + 1):
        folder.mkdir()
        with failing(FailingCalls(nth, code)) as calls:
            try:
                write(folder / "out", **options)
                silent.append((nth, calls.made[nth - 1]))
            except OSError:
                pass
            calls.active = False
        if below(folder):
            left.append((nth, calls.made[nth - 1], below(folder)))
        shutil.rmtree(folder)
    assert silent == []
    assert left == []


@SHARDED
def test_a_writer_that_failed_once_cannot_be_finished(tmp_path: Path, options: dict[str, Any]) -> None:
    with failing(FailingCalls()) as calls:
        writer = storage.create(tmp_path / "out", **options)
        calls.nth = len(calls.made) + 1
        with pytest.raises(OSError, match="Input/output error"):
            write_all(writer)
        calls.nth = 0
        with pytest.raises(ValueError, match="a write failed before"):
            writer.write(b"x", "more")
        with pytest.raises(ValueError, match="a write failed before"):
            writer.close()
    assert below(tmp_path) == []


@SHARDED
def test_a_failing_fsync_of_the_folder_takes_the_pack_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EIO, "no", str(folder))

    monkeypatch.setattr("packfmt.storage.atomic.fsync_folder", refuse)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "out", **options)
    assert below(tmp_path) == []


def test_a_failing_replacement_keeps_the_old_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out")

    def refuse(*names: Any) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr("packfmt.storage.atomic.os.replace", refuse)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "out", some_records(3, seed=5), force=True)
    assert contents(tmp_path / "out") == EXPECTED
    assert below(tmp_path) == ["out"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, "no")
        real(descriptor)

    monkeypatch.setattr("packfmt.storage.atomic.os.fsync", fsync)
    write(tmp_path / "out")
    assert contents(tmp_path / "out") == EXPECTED


@SHARDED
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, options: dict[str, Any]
) -> None:
    def refuse(*names: Any) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr("packfmt.storage.atomic.os.link", refuse)
    writer = write(tmp_path / "out", **options)
    assert contents(writer.path) == EXPECTED
    with pytest.raises(FileExistsError):
        write(tmp_path / "out", **options)
    assert contents(writer.path) == EXPECTED


def test_a_file_system_without_locks_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "no")

    monkeypatch.setattr("packfmt.storage.leftovers.fcntl.flock", refuse)
    leftover = PendingFile(tmp_path / "out")
    write(tmp_path / "out")
    assert leftover.temporary.exists()  # a living writer's, for all one can tell
    leftover.discard()
    assert contents(tmp_path / "out") == EXPECTED


def test_everything_is_on_the_disk_before_it_is_named(tmp_path: Path) -> None:
    with failing(FailingCalls()) as calls:
        write(tmp_path / "out")
    ends = calls.made[-12:]
    assert [name for name in ends if name in ("fsync", "link", "unlink")] == ["fsync", "link", "unlink", "fsync"]
    assert "write" not in ends[ends.index("fsync") :]


def test_a_target_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    writer = storage.create(tmp_path / "out")
    write_all(writer)
    (tmp_path / "out").write_bytes(b"theirs")
    with pytest.raises(FileExistsError, match="exists; choose another name"):
        writer.close()
    assert (tmp_path / "out").read_bytes() == b"theirs"
    assert below(tmp_path) == ["out"]


def test_a_shard_that_appears_meanwhile_takes_the_others_back(tmp_path: Path) -> None:
    writer = storage.create(tmp_path / "out", shard_size=6000)
    write_all(writer)
    (tmp_path / "out-00001.bin").write_bytes(b"theirs")
    with pytest.raises(FileExistsError, match=r"out-00001\.bin"):
        writer.close()
    assert below(tmp_path) == ["out-00001.bin"]


# ---- full disks


def write_on_a_disk_of(limit: int, path: Path, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    write(path, **options)


@FORKS
@SHARDED
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    writer = write(tmp_path / "whole", **options)
    need = max(Path(path).stat().st_size for path in writer.files)
    folder = tmp_path / "work"
    folder.mkdir()
    for limit in [1, 64, 4096, *range(1000, need, need // 24), need - 1]:
        child = in_child(partial(write_on_a_disk_of, limit, folder / "out", options))
        assert (outcome(child), below(folder)) == (errno.EFBIG, []), limit
    assert outcome(in_child(partial(write_on_a_disk_of, need, folder / "out", options))) == 0
    assert contents(folder / ("out.json" if options else "out")) == EXPECTED


@pytest.mark.parametrize("size", [4 << 10, 3 << 20])
@pytest.mark.parametrize("name", ["out.bin", "out-0.bin", "out.tar", "out-%d.tar", "out.parquet", "out"])
def test_the_error_of_a_full_disk_names_the_file(name: str, size: int, tmp_path: Path) -> None:
    code = """
        import resource, sys
        from packfmt import storage
        from packfmt.sources import folder
        from packfmt.sources.parquet import writer as parquet
        from packfmt.sources.webdataset import writer as tar
        path, size = sys.argv[1], int(sys.argv[2])
        makes = {".tar": tar.TarWriter, ".parquet": parquet.ParquetWriter, "/out": folder.FolderWriter}
        make = next((make for end, make in makes.items() if path.endswith(end)), storage.create)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with make(path, **({"shard_size": 1 << 30} if "/out-" in path else {})) as writer:
                writer.write(bytes(size), "key")
        except OSError as error:
            print(error.strerror, error.filename, sep="\\n")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / name), str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    written = {"out-0.bin": "out-0-00000.bin", "out-%d.tar": "out-0.tar", "out": "out/key"}.get(name, name)
    assert done.stdout.splitlines() == ["File too large", str(tmp_path / written)], done
    assert list(tmp_path.iterdir()) == []


# ---- killed writers


def write_slowly(path: Path, options: dict[str, Any], pipe: int) -> None:
    """Every record goes to the file at once, so that a kill at any time finds something half done."""
    with mock.patch("packfmt.storage.shard_writer.PORTION", 64), storage.create(path, **options) as writer:
        os.write(pipe, b"s")
        for record in some_records(40):
            writer.write(record.data, record.key, **record.columns)
            time.sleep(0.0005)


@FORKS
@SHARDED
def test_a_killed_writer_leaves_no_pack_and_the_next_one_clears_up(tmp_path: Path, options: dict[str, Any]) -> None:
    seed = int(os.environ.get("PACKFMT_TEST_SEED", time.time_ns() % 10**6))
    print(f"PACKFMT_TEST_SEED={seed}")
    rng = random.Random(seed)
    expected = [(r.data, r.key) for r in some_records(40)]
    target = tmp_path / ("out.json" if options else "out")
    ended = set()
    for _ in range(20):
        read, written = os.pipe()
        child = in_child(partial(write_slowly, tmp_path / "out", options, written))
        os.close(written)
        assert os.read(read, 1) == b"s"
        os.close(read)
        time.sleep(rng.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
        ended.add(outcome(child))
        if target.exists():
            assert contents(target) == expected
            target.unlink()
        for shard in tmp_path.glob("out-*.bin"):  # killed between the shards' names and the manifest's
            shard.unlink()
    assert ended <= {0, -signal.SIGKILL}
    write(tmp_path / "out", **options)
    assert [name for name in below(tmp_path) if name.startswith(".")] == []
    assert contents(target) == EXPECTED


class ExitAt(FailingCalls):
    """Ends the process at the nth call."""

    def call(self, name: str) -> None:
        self.made.append(name)
        if len(self.made) == self.nth:
            os._exit(9)


def write_until(nth: int, path: Path, options: dict[str, Any]) -> None:
    with failing(ExitAt(nth)):
        write(path, **options)


@FORKS
@SHARDED
def test_a_writer_that_ends_between_calls_leaves_all_or_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    total = count_calls(tmp_path, RECORDS, **options)
    last = total - (30 if options else 10)  # where parts are synced and named; before, most calls are writes
    for nth in [*range(1, last, last // 10), *range(last, total + 1)]:
        folder = tmp_path / str(nth)
        folder.mkdir()
        target = folder / ("out.json" if options else "out")
        assert outcome(in_child(partial(write_until, nth, folder / "out", options))) == 9
        if target.exists():
            assert contents(target) == EXPECTED
        write(folder / "out", force=True, **options)
        assert contents(target) == EXPECTED
        assert [name for name in below(folder) if name.startswith(".")] == []


PACKER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from contracts.reader import some_records
from packfmt import storage
with storage.create(sys.argv[1]) as writer:
    print("started", flush=True)
    for record in some_records(1000):
        writer.write(record.data, record.key, **record.columns)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_writer_at_once(tmp_path: Path, number: int) -> None:
    packer = subprocess.Popen(
        [sys.executable, "-c", PACKER, str(tmp_path / "out"), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert packer.stdout is not None
    packer.stdout.readline()
    packer.send_signal(number)
    _, errors = packer.communicate(timeout=10)
    assert packer.returncode == -number
    if number == signal.SIGINT:  # an exception in Python: the writer clears up itself
        assert "KeyboardInterrupt" in errors
        assert below(tmp_path) == []
    write(tmp_path / "out")
    assert below(tmp_path) == ["out"]


# ---- two writers


@SHARDED
def test_of_two_writers_one_wins(tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = (storage.create(tmp_path / "out", **options) for _ in range(2))
    for record, other in zip(RECORDS, some_records(12, seed=7), strict=True):
        first.write(record.data, record.key)
        second.write(other.data, other.key)
    first.close()
    with pytest.raises(FileExistsError):
        second.close()
    assert contents(first.path) == EXPECTED
    assert {Path(path).name for path in first.files} == set(below(tmp_path))


def test_a_living_writers_file_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    with storage.create(tmp_path / "out", shard_size=3000) as living:
        for record in RECORDS[:6]:
            living.write(record.data, record.key)
        storage.create(tmp_path / "out", shard_size=3000).discard()
        for record in RECORDS[6:]:
            living.write(record.data, record.key)
    assert contents(living.path) == EXPECTED


@FORKS
@SHARDED
def test_two_packers_race_for_one_name(tmp_path: Path, options: dict[str, Any]) -> None:
    for turn in range(30):
        folder = tmp_path / str(turn)
        folder.mkdir()
        children = [in_child(partial(write, folder / "out", **options)) for _ in range(2)]
        assert sorted(map(outcome, children)) == [0, errno.EEXIST]
        assert contents(folder / ("out.json" if options else "out")) == EXPECTED
        assert [name for name in below(folder) if name.startswith(".")] == []


# ---- leftovers


def write_and_die(path: Path) -> None:
    writer = storage.create(path, shard_size=3000)
    for record in some_records(40):
        writer.write(record.data, record.key, **record.columns)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def leftovers(tmp_path: Path) -> list[str]:
    """What a killed packer of several shards left: the manifest's file and those of its finished shards."""
    assert outcome(in_child(partial(write_and_die, tmp_path / "out"))) == -signal.SIGKILL
    left = below(tmp_path)
    assert len(left) > 10
    return left


@FORKS
def test_the_next_writer_removes_what_its_target_left(tmp_path: Path, leftovers: list[str]) -> None:
    writer = write(tmp_path / "out", some_records(3), shard_size=3000)
    assert set(below(tmp_path)) == {Path(path).name for path in writer.files}


@FORKS
def test_another_targets_leftovers_are_left_alone(tmp_path: Path, leftovers: list[str]) -> None:
    write(tmp_path / "other")
    assert set(below(tmp_path)) == {*leftovers, "other"}


def test_a_file_that_only_looks_like_a_leftover_of_ours_is_left_alone(tmp_path: Path) -> None:
    for name in (".packfmt-notes", ".packfmt-0123456789abcdef-x.tmp"):
        (tmp_path / name).write_bytes(b"mine")
    write(tmp_path / "out")
    assert below(tmp_path) == [".packfmt-0123456789abcdef-x.tmp", ".packfmt-notes", "out"]


def test_a_leftover_is_removed_even_where_the_target_is_refused(tmp_path: Path) -> None:
    pending = PendingFile(tmp_path / "out")
    pending.stream.close()  # as when its process ends: the lock goes, the file stays
    (tmp_path / "out").write_bytes(b"there")
    with pytest.raises(FileExistsError):
        storage.create(tmp_path / "out")
    assert below(tmp_path) == ["out"]


@SHARDED
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    if os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(PermissionError, match="cannot write here"):
        storage.create(tmp_path / "closed" / "out", **options)
