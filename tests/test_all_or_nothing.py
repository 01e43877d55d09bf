"""Whatever is written appears whole or not at all, wherever it is interrupted, and the next run finds a clean place."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from faults import FailingCalls, failing, in_child, outcome
from kinds import IMAGES

import packfmt
from packfmt import storage
from packfmt.sources.folder import FolderWriter
from packfmt.sources.parquet.writer import ParquetWriter
from packfmt.sources.webdataset.writer import TarWriter
from packfmt.storage import Writer

FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
OLD, NEW = 3, 2  # records, each a shard of its own where there are shards
Snapshot = dict[str, bytes | None]


def fill(writer: Writer, count: int) -> None:
    with writer:
        for number in range(count):
            writer.write(IMAGES[0] + b"%d of %d" % (number, count), f"{number}.jpg")


def shuffled(folder: Path, count: int, force: bool) -> None:
    source = folder.parent / f"{count}.tar"
    if not source.exists():
        fill(TarWriter(source), count)
    packfmt.convert(source, folder / "out.bin", shuffle=1, force=force, bad="keep")


def without_exchange(folder: Path, count: int, force: bool) -> None:
    with mock.patch("packfmt.storage.folders._exchange", return_value=False):
        KINDS["lmdb"](folder, count, force)


KINDS: dict[str, Callable[[Path, int, bool], None]] = {
    "shard": lambda folder, count, force: fill(storage.create(folder / "out.bin", force=force), count),
    "shards": lambda folder, count, force: fill(storage.create(folder / "out.json", shard_size=1, force=force), count),
    "lmdb": lambda folder, count, force: fill(storage.create(folder / "out.lmdb", force=force), count),
    "lmdb without exchange": without_exchange,
    "tar": lambda folder, count, force: fill(TarWriter(folder / "out.tar", force=force), count),
    "tars": lambda folder, count, force: fill(TarWriter(folder / "out-%d.tar", shard_size=1, force=force), count),
    "parquet": lambda folder, count, force: fill(ParquetWriter(folder / "out.parquet", force=force), count),
    "folder": lambda folder, count, force: fill(FolderWriter(folder / "out", force=force), count),
    "shuffled": shuffled,
}
REPLACED = [name for name in KINDS if name != "folder"]  # a folder that holds something never is


def look(folder: Path, *, hidden: bool = False) -> Snapshot:
    """All below a folder by name, without or with temporary files only."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else None
        for name, path in found.items()
        if name.startswith(".packfmt-") == hidden
    }


class Place:
    """A folder for one kind of target, and what it may hold after an interruption.

    Attributes:
        old: without an interruption before, and ``new`` after.
    """

    def __init__(self, kind: str, folder: Path, replace: bool) -> None:
        self.kind, self.folder, self.replace = kind, folder / "work", replace
        self.write = KINDS[kind]
        self.reset()
        self.old = look(self.folder)
        self.write(self.folder, NEW, replace)
        self.new = look(self.folder)
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.write(self.folder, NEW, False)
        self.alone = look(self.folder)  # what the next run makes
        assert look(self.folder, hidden=True) == {}

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if self.replace:
            self.write(self.folder, OLD, False)

    def run(self) -> None:
        self.write(self.folder, NEW, self.replace)

    def count(self, **options: bool) -> list[str]:
        self.reset()
        with failing(FailingCalls(quick=True, **options)) as calls:
            self.run()
        return calls.made

    def check_next_run(self, nth: int) -> None:
        """A run that may not replace finds a place with all of the old, all of the new, or nothing, and cleans up."""
        before = look(self.folder)
        try:
            self.write(self.folder, NEW, False)
        except FileExistsError:
            assert look(self.folder) in ([self.old, self.new] if self.replace else [self.new])
        else:
            assert look(self.folder) == self.alone
            assert not self.replace or before == {}
        assert look(self.folder, hidden=True) == {}
        if self.kind != "folder" and nth % 4 == 0:
            self.write(self.folder, NEW, True)
            assert {*look(self.folder).values()} >= {*self.alone.values()} - {self.alone.get("out.json")}
            assert len(look(self.folder)) == len(self.alone)
            assert look(self.folder, hidden=True) == {}


@pytest.fixture(params=[*((kind, False) for kind in KINDS), *((kind, True) for kind in REPLACED)], ids=str)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind, replace = request.param
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    with mock.patch("os.fsync"):
        yield Place(kind, tmp_path, replace)


class Interrupted(FailingCalls):
    """Ctrl-C at the nth call."""

    def fail(self) -> None:
        raise KeyboardInterrupt


class ExitAt(FailingCalls):
    """Ends the process at the nth call."""

    def fail(self) -> None:
        os._exit(9)


def test_an_error_leaves_the_old_or_nothing(place: Place) -> None:
    made = place.count()
    for nth in range(1, len(made) + 1):
        place.reset()
        with failing(FailingCalls(nth, errno.EIO, quick=True)) as calls:
            try:
                place.run()
                silent = True
            except OSError:
                silent = False
            calls.active = False
        found = look(place.folder)
        if silent:
            assert found == place.new, (nth, made[nth - 1])
        elif made[nth - 1] == "unlink":  # of what the new has replaced, perhaps
            assert is_whole(found, place), (nth, made[nth - 1], sorted(found))
        else:
            assert found == place.old, (nth, made[nth - 1], sorted(found))
        assert found != place.old or look(place.folder, hidden=True) == {}, (nth, made[nth - 1])
        place.check_next_run(nth)


@pytest.mark.parametrize("late", [False, True], ids=["before the call", "after it"])
def test_an_interrupt_leaves_the_old_or_the_new(place: Place, late: bool) -> None:
    made = place.count(late=late)
    for nth in range(1, len(made) + 1):
        place.reset()
        with failing(Interrupted(nth, late=late, quick=True)) as calls:
            with pytest.raises(KeyboardInterrupt):
                place.run()
            calls.active = False
        found = look(place.folder)
        assert is_whole(found, place), (nth, made[nth - 1], sorted(found))
        assert found != place.old or look(place.folder, hidden=True) == {}, (nth, made[nth - 1])
        place.check_next_run(nth)


def is_whole(found: Snapshot, place: Place) -> bool:
    """Whether these are the old files or the new, and of shards besides the new at most old ones that are to go."""
    if place.kind == "shards" and place.replace and place.new.items() <= found.items():
        return found.items() <= (place.old | place.new).items()
    return found in (place.old, place.new)


def run_until(nth: int, place: Place) -> None:
    with failing(ExitAt(nth, quick=True)):
        place.run()


def looks_whole(found: Snapshot, place: Place) -> bool:
    """Whether somebody may take it for a pack: a manifest, or tars from the first on."""
    if place.kind == "tars":
        return "out-0.tar" in found
    return "out.json" in found if place.kind == "shards" else bool(found)


@FORKS
@pytest.mark.parametrize("kind", ["shards", "tars"])
@pytest.mark.parametrize("force", [False, True])
def test_of_two_at_once_one_wins_whole(tmp_path: Path, kind: str, force: bool) -> None:
    wholes = []
    for count in (OLD, NEW):
        (tmp_path / f"whole {count}").mkdir()
        KINDS[kind](tmp_path / f"whole {count}", count, False)
        wholes.append(look(tmp_path / f"whole {count}"))
    for turn in range(12):
        folder = tmp_path / str(turn)
        folder.mkdir()
        children = [in_child(partial(KINDS[kind], folder, count, force)) for count in (OLD, NEW)]
        codes = sorted(outcome(child) for child in children)
        assert codes in ([0, errno.EEXIST], *([[0, 0]] if force else []))
        found = look(folder)
        if kind == "shards":
            with storage.open(folder / "out.json", check="full") as reader:
                assert {Path(path).name for path in reader.files} == found.keys() - {"out.json"}
                assert len(reader) in (OLD, NEW)
        if kind == "tars" or not force:
            assert found in wholes
        assert look(folder, hidden=True) == {}


@FORKS
def test_a_killed_run_leaves_what_does_not_look_whole_or_is(place: Place) -> None:
    made = place.count()
    last = len(made) - 25  # before, most calls are writes to temporary files
    for nth in [*range(1, last, 4), *range(max(last, 1), len(made) + 1)]:
        place.reset()
        assert outcome(in_child(partial(run_until, nth, place))) == 9
        found = look(place.folder)
        if looks_whole(found, place):
            wholes = [place.old, place.new] if place.replace else [place.new]
            assert any(whole.items() <= found.items() for whole in wholes), (nth, made[nth - 1], sorted(found))
            if place.kind == "tars":  # nothing tells which belong together
                assert found in wholes, (nth, made[nth - 1], sorted(found))
        place.check_next_run(nth)
