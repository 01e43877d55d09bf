"""Writing in a thread: order, bounds, errors."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from packfmt.storage import shard_writer as behind
from packfmt.storage.shard_writer import WriteBehind


def give(stream: WriteBehind, pieces: int) -> None:
    for _ in range(pieces):
        stream.write(bytes(10))


@pytest.fixture
def out(tmp_path: Path) -> Any:
    with open(tmp_path / "out", "wb", buffering=0) as file:
        yield file


@pytest.mark.parametrize("mean", [3, 5000, 70_000])
def test_all_is_written_in_order(out: Any, mean: int) -> None:
    rng = random.Random(mean)
    pieces = [rng.randbytes(rng.randrange(2 * mean)) for _ in range(200)]
    told: list[int] = []
    stream = WriteBehind(out, told.append)
    assert [stream.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
    stream.flush()
    whole = b"".join(pieces)
    assert Path(out.name).read_bytes() == whole
    assert told == sorted(told)
    assert told[-1] == len(whole)
    stream.close()


def test_what_may_change_afterwards_is_copied(out: Any) -> None:
    stream = WriteBehind(out, lambda position: None)
    data = bytearray(b"before")
    stream.write(data)
    stream.write(memoryview(data))
    data[:] = b"after!"
    stream.flush()
    assert Path(out.name).read_bytes() == b"beforebefore"


def test_a_short_write_is_gone_on_with(out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(behind.os, "writev", lambda fd, pieces: real(fd, [memoryview(b"".join(pieces))[:7]]))
    stream = WriteBehind(out, lambda position: None)
    pieces = [bytes([65 + i]) * (i * 9000 % 20_011) for i in range(9)]
    for piece in pieces:
        stream.write(piece[:100])
    stream.flush()
    assert Path(out.name).read_bytes() == b"".join(piece[:100] for piece in pieces)


def test_a_system_without_gathered_writes(out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(behind.os, "writev")
    stream = WriteBehind(out, lambda position: None)
    for piece in (b"a" * 9000, b"", b"b" * 9000):
        stream.write(piece)
    stream.flush()
    assert Path(out.name).read_bytes() == b"a" * 9000 + b"b" * 9000


@pytest.mark.parametrize(("ahead", "portions"), [(1000, 10**6), (10**6, 10)])
def test_no_more_waits_than_is_allowed(out: Any, monkeypatch: pytest.MonkeyPatch, ahead: int, portions: int) -> None:
    monkeypatch.setattr(behind, "PORTION", 100)
    monkeypatch.setattr(behind, "AHEAD", ahead)
    monkeypatch.setattr(behind, "PORTIONS", portions)
    gate = threading.Event()
    given = threading.Semaphore(0)
    real = os.writev
    monkeypatch.setattr(behind.os, "writev", lambda fd, pieces: gate.wait() and real(fd, pieces))
    stream = WriteBehind(out, lambda position: None)

    def give_all() -> None:
        for _ in range(40):
            stream.write(bytes(100))
            given.release()

    giver = threading.Thread(target=give_all)
    giver.start()
    taken = 0
    while given.acquire(timeout=0.5):  # until it waits
        taken += 1
    gate.set()
    giver.join()
    stream.flush()
    assert 2 <= taken <= 12
    assert os.path.getsize(out.name) == 4000


def test_an_error_is_raised_by_a_later_call_and_nothing_more_is_written(
    out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "PORTION", 10)
    calls = []
    gate = threading.Event()

    def full(descriptor: int, pieces: Any) -> int:
        calls.append(pieces)
        gate.wait()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(behind.os, "writev", full)
    stream = WriteBehind(out, lambda position: None)
    give(stream, 5)  # four of them wait behind the first
    gate.set()
    with pytest.raises(OSError, match="full"):
        stream.flush()
    stream._thread.submit(int).result()  # type: ignore[union-attr]  # those that waited have had their turn
    with pytest.raises(ValueError, match="failed before"):
        stream.flush()
    stream.close()
    assert len(calls) == 1


def test_closing_ends_the_thread(out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "PORTION", 10)
    stream = WriteBehind(out, lambda position: None)
    give(stream, 5)
    stream.close()
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("packfmt-write")]


def kept(stream: WriteBehind) -> Any:
    (piece,) = stream._pieces
    return piece


@pytest.mark.parametrize("part", [slice(None), slice(100, 900)])
def test_a_view_of_bytes_is_kept_uncopied(out: Any, part: slice) -> None:
    whole = random.Random(0).randbytes(1000)
    stream = WriteBehind(out, lambda position: None)
    view = memoryview(whole)[part]
    stream.write(view)
    assert kept(stream).obj is whole
    view.release()  # whatever the giver does with his own
    stream.flush()
    assert Path(out.name).read_bytes() == whole[part]


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytes(10_000))[:10],  # which would keep a thousand times its size in memory
        memoryview(bytearray(1000)),
        memoryview(bytes(1000))[::2],
        memoryview(bytes(1000)).cast("H"),
        memoryview(bytes(1000)).cast("B", (10, 100)),
    ],
)
def test_other_views_are_copied(out: Any, view: memoryview) -> None:
    stream = WriteBehind(out, lambda position: None)
    assert stream.write(view) == view.nbytes
    assert kept(stream) == view.tobytes()
    assert type(kept(stream)) is bytes
