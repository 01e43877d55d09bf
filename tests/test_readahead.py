"""When the system is asked to read ahead, and when no longer."""

from __future__ import annotations

import types

import pytest

from packfmt.storage import readahead
from packfmt.storage.readahead import QUIET_AFTER, ReadAhead


class Machine:
    """A system with a clock and counts of reading from disk that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.faults = self.blocks = 0
        self.asked = 0
        self.answer_seconds = 0.0
        monkeypatch.setattr(readahead.time, "perf_counter", lambda: self.now)
        usage = types.SimpleNamespace(
            RUSAGE_SELF=0,
            getrusage=lambda who: types.SimpleNamespace(ru_majflt=self.faults, ru_inblock=self.blocks),
        )
        monkeypatch.setattr(readahead, "resource", usage)

    def ask(self, offsets: list[int], sizes: list[int]) -> None:
        self.asked += 1
        self.now += self.answer_seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_asking_stops_after_a_long_run_of_reads_from_memory(machine: Machine) -> None:
    ahead = ReadAhead(machine.ask)
    for _ in range(QUIET_AFTER):
        ahead.before([0, 9000], [10, 10])
    assert machine.asked == QUIET_AFTER // 2
    assert ahead.everything_cached()


@pytest.mark.parametrize("count", ["faults", "blocks"])
def test_reading_from_disk_starts_it_again(machine: Machine, count: str) -> None:
    ahead = ReadAhead(machine.ask)
    for _ in range(QUIET_AFTER):
        ahead.before(range(64), [10] * 64)
    machine.asked = 0
    setattr(machine, count, 1)
    assert not ahead.everything_cached()
    ahead.before([0], [10])
    assert machine.asked == 1


@pytest.mark.parametrize("count", ["faults", "blocks"])
def test_it_never_stops_while_answers_lead_to_reading_from_disk(machine: Machine, count: str) -> None:
    ahead = ReadAhead(machine.ask)
    for number in range(QUIET_AFTER):
        ahead.before(range(64), [10] * 64)
        setattr(machine, count, number)
    assert machine.asked == QUIET_AFTER


def test_it_never_stops_while_answers_take_long(machine: Machine) -> None:
    machine.answer_seconds = 1e-3
    ahead = ReadAhead(machine.ask)
    for _ in range(QUIET_AFTER):
        ahead.before([0, 9000], [10, 10])
    assert machine.asked == QUIET_AFTER


@pytest.mark.parametrize(("seconds", "rests"), [(25e-6, True), (300e-6, False)])
def test_a_whole_block_is_one_piece(machine: Machine, seconds: float, rests: bool) -> None:
    """2 MiB of 2 KiB records: by what the system takes to look for the pages, and to begin reading them."""
    ahead = ReadAhead(machine.ask)
    machine.answer_seconds = seconds
    for _ in range(QUIET_AFTER):
        ahead.before(range(0, 2 << 20, 2048), [2048] * 1024)
    assert ahead.everything_cached() == rests


def test_ranges_are_put_together_before_the_clock_is_looked_at() -> None:
    asked: list[tuple[list[int], list[int]]] = []
    ahead = ReadAhead(lambda offsets, sizes: asked.append((list(offsets), list(sizes))))
    ahead.before([*range(0, 2 << 20, 2048), 8 << 20], [2048] * 1024 + [10])
    assert asked == [([0, 8 << 20], [2 << 20, 10])]


def test_one_slow_answer_begins_the_count_anew(machine: Machine) -> None:
    ahead = ReadAhead(machine.ask)
    for number in range(2 * QUIET_AFTER + 9):
        machine.answer_seconds = 1.0 if number == QUIET_AFTER - 1 else 0.0
        ahead.before([0], [10])
    assert machine.asked == 2 * QUIET_AFTER
