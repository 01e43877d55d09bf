"""The child process that parses foreign files: obeys one order, sends frames, ends. Started by ``isolated`` only.

It reads one line of JSON from its standard input, sends the plan, waits for ``GO``, and sends the records.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.isolated.frames import Batch, Item, write_frame

try:
    import resource
except ImportError:  # not Unix: crashes are still isolated, without limits
    resource = None  # type: ignore[assignment]

__all__ = ["GO", "READERS", "Flush", "Job", "main", "total"]

GO = b"go\n"

# The readers a child can be asked for; a name outside this table runs nothing.
READERS = {"lmdb": "packfmt.sources.lmdb.reading", "hdf5": "packfmt.sources.hdf5.reading"}


class Flush:
    """Yielded by a job between items: the buffers handed out so far are about to become invalid.

    Attributes:
        file: which of the request's files the next items lie in.
    """

    def __init__(self, file: int) -> None:
        self.file = file


class Job(ABC):
    """What a child's reader module makes of a request, by its function ``start(request) -> Job``.

    Args:
        files: the request's, a path first in each.
        options: the request's.
    """

    def __init__(self, files: list[Any], options: dict[str, Any]) -> None:
        self.files = files
        self.options = dict(options)
        self.notes: list[str] = []
        self.skipped: Counter[str] = Counter()

    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """JSON-able facts; ``columns`` among them, each as ``Column.spec``."""

    @abstractmethod
    def items(self) -> Iterator[Item | Flush]:
        """The records in order."""

    def end(self) -> dict[str, Any]:
        """What was passed over, and what a person should know, once the items are through."""
        return {"skipped": dict(self.skipped), "notes": self.notes}

    def of_one(self, path: str, said: object) -> str:
        """What is said of one file, which is named where there are several."""
        return f"{path}: {said}" if len(self.files) > 1 else str(said)

    def add_up(self, path: str, skipped: Mapping[str, int], notes: Iterable[str]) -> None:
        """Take what the items of one file have left."""
        self.skipped.update(skipped)
        self.notes += [self.of_one(path, note) for note in notes]


def total(counts: Sequence[int | None]) -> int | None:
    """The sum of the counts; None where one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def main() -> None:
    """The child: obey one order from standard input, then end."""
    output = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not break the frames
    order = json.loads(sys.stdin.buffer.readline())
    _limit(order["memory"])
    timeout = float(order["timeout"])
    try:
        with _Alarm(timeout) as alarm:
            job = importlib.import_module(READERS[order["reader"]]).start(order["request"])
            plan = job.plan()
            with alarm.paused():
                write_frame(output, {"plan": plan})
                if sys.stdin.buffer.readline() != GO:
                    return
            _send_items(job, output, alarm)
    except BrokenPipeError:
        return
    except MemoryError:
        write_frame(output, {"error": f"needs more than the {order['memory'] >> 20} MiB allowed for reading it"})
    except SourceError as error:
        write_frame(output, {"error": str(error)})
    except Exception as error:  # the border of the process: every failure must reach the parent as one line
        write_frame(output, {"error": f"cannot be read ({type(error).__name__}: {error}); is it damaged?"})


def _send_items(job: Job, output: int, alarm: _Alarm) -> None:
    batch = Batch(output, alarm.paused)
    for item in job.items():
        if isinstance(item, Item):
            batch.add(item)
        else:
            batch.flush()
            batch.file = item.file
    batch.flush()
    with alarm.paused():
        write_frame(output, {"end": job.end()})


def _limit(memory: int) -> None:
    """Bound address space, core dumps and written files; a limit that a system lacks is passed over."""
    if resource is None:
        return
    for name, value in (("RLIMIT_AS", memory), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 1 << 16)):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


class _Alarm:
    """Ends the process, by the signal's default action, when work takes longer than ``seconds`` between pauses.

    A thread could not: a C library in an endless loop holds the interpreter lock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds if hasattr(signal, "setitimer") else 0.0

    def __enter__(self) -> _Alarm:
        self._set(self._seconds)
        return self

    def __exit__(self, *exc: object) -> None:
        self._set(0.0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While the parent is being waited for, no time counts."""
        self._set(0.0)
        try:
            yield
        finally:
            self._set(self._seconds)

    def _set(self, seconds: float) -> None:
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
