"""When the system is asked to read ahead, and when no longer."""

from __future__ import annotations

import types

import pytest

from packfmt.storage import readahead
from packfmt.storage.readahead import CALM, ReadAhead


class Machine:
    """A system with a clock and a count of page faults that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.faults = 0
        self.asked = 0
        self.answer_seconds = 0.0
        monkeypatch.setattr(readahead.time, "perf_counter", lambda: self.now)
        usage = types.SimpleNamespace(
            RUSAGE_SELF=0, getrusage=lambda who: types.SimpleNamespace(ru_majflt=self.faults)
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
    for _ in range(3 * CALM):
        ahead.before([0, 9000], [10, 10])
    assert machine.asked == CALM


def test_a_page_fault_starts_it_again(machine: Machine) -> None:
    ahead = ReadAhead(machine.ask)
    for _ in range(2 * CALM):
        ahead.before([0], [10])
    machine.faults += 1
    ahead.before([0], [10])
    assert machine.asked == CALM + 1


def test_it_never_stops_while_answers_take_long(machine: Machine) -> None:
    machine.answer_seconds = 1e-3
    ahead = ReadAhead(machine.ask)
    for _ in range(3 * CALM):
        ahead.before([0, 9000], [10, 10])
    assert machine.asked == 3 * CALM


def test_one_slow_answer_begins_the_count_anew(machine: Machine) -> None:
    ahead = ReadAhead(machine.ask)
    for number in range(3 * CALM):
        machine.answer_seconds = 1.0 if number == CALM - 1 else 0.0
        ahead.before([0], [10])
    assert machine.asked == 2 * CALM
