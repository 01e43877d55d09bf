"""Batches made in child processes, each with threads of its own: for a loop that holds the interpreter lock."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import NoReturn

from packfmt.training.child import Failure, serve
from packfmt.training.dataset import ImageDataset
from packfmt.training.engine import Batching, Made, Request
from packfmt.training.plan import add_note
from packfmt.training.slots import SlotReader

__all__ = ["ProcessEngine"]

PATIENCE = 2.0  # seconds a child has to end by itself


class ProcessEngine:
    """Makes batches in child processes, in turn. A child that dies is an error at once, never a wait.

    Args:
        dataset: as it is in each child; ``threads`` of it are shared out among them.
        how: batches are made.
        workers: number of children.
        start_method: "fork", "spawn", "forkserver", or None for Python's default.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        how: Batching,
        workers: int,
        start_method: str | None,
    ) -> None:
        each = max(1, dataset.threads // workers)
        self.threads = each * workers
        self._pid = os.getpid()
        self._turn = 0
        self._children: list[_Child] = []
        self._finalizer = weakref.finalize(self, _stop_all, self._children, self._pid)
        context = mp.get_context(start_method)
        for _ in range(workers):
            self._children.append(_Child(context, dataset.with_threads(each), how))

    @property
    def usable(self) -> bool:
        return self._pid == os.getpid() and all(child.usable for child in self._children)

    def tickets(self, requests: Iterator[Request]) -> Iterator[_Ticket]:
        for request in requests:
            child = self._children[self._turn % len(self._children)]
            self._turn += 1
            yield child.request(request)

    def ready(self, ticket: _Ticket) -> bool:
        return ticket.child.has_answer(ticket)

    def collect(self, ticket: _Ticket) -> Made:
        return ticket.child.collect(ticket)

    def cancel(self, ticket: _Ticket) -> None:
        ticket.wanted, ticket.made = False, None

    def close(self) -> None:
        self._finalizer()


@dataclass(slots=True)
class _Ticket:
    child: _Child
    wanted: bool = True  # an unwanted batch gives its slots back as it comes
    answered: bool = False
    made: Made | None = None
    failure: Failure | None = None


class _Child:
    """The parent's hold on one child."""

    def __init__(self, context: BaseContext, dataset: ImageDataset, how: Batching) -> None:
        requests, self._requests = context.Pipe(duplex=False)
        self._answers, answers = context.Pipe()  # a socket pair, since descriptors of shared memory travel over it
        # A forked child holds copies of the parent's ends, which would hide the parent's death from it.
        copies = (self._requests, self._answers) if context.get_start_method() == "fork" else ()
        self.process = context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(requests, answers, copies, dataset, how),
            daemon=True,
            name="packfmt-loader",
        )
        self.process.start()
        requests.close()
        answers.close()
        self._slots = SlotReader()
        self._open: deque[_Ticket] = deque()
        self._broken = self._closed = False
        self._error: Exception | None = None

    @property
    def usable(self) -> bool:
        return not self._broken and bool(self.process.is_alive())

    def request(self, request: Request) -> _Ticket:
        try:
            self._requests.send((request, self._slots.freed()))
        except BaseException as error:
            self._fail(error)
        ticket = _Ticket(self)
        self._open.append(ticket)
        return ticket

    def has_answer(self, ticket: _Ticket) -> bool:
        with suppress(Exception):  # a dead child is for ``collect`` to report, when its turn comes
            while not ticket.answered and self._answers.poll(0):
                self._receive()
        return ticket.answered

    def collect(self, ticket: _Ticket) -> Made:
        while not ticket.answered:
            self._receive()
        if ticket.failure is not None:
            raise _revive(*ticket.failure)
        made, ticket.made = ticket.made, None
        if made is None:
            raise RuntimeError("a batch was collected twice, or after it was cancelled")
        return made

    def _receive(self) -> None:
        """Take in the oldest answer."""
        if self._error is not None:  # answers that came since would go to the wrong tickets
            raise self._error
        try:
            wait([self._answers, self.process.sentinel])
            if not self._answers.poll(0):
                raise EOFError
            made, failure = self._answers.recv()
            for slot, size in made.batch.new if made is not None else ():
                self._slots.add(slot, size, reduction.recv_handle(self._answers))
        except BaseException as error:
            self._fail(error)
        ticket = self._open.popleft()
        if made is not None:
            made.batch = self._slots.unwrap(made.batch)
        if ticket.wanted:
            ticket.made, ticket.failure = made, failure
        ticket.answered = True

    def _fail(self, error: BaseException) -> NoReturn:
        self._broken = True  # the streams may stand in the middle of a message, and nothing more can be sent
        if not isinstance(error, Exception):
            raise error
        self._error = self._explained(error)
        if self._error is error:
            raise error
        raise self._error from None

    def _explained(self, error: Exception) -> Exception:
        if self._closed:
            return RuntimeError("the loader was closed while batches were awaited; begin a new iteration")
        if "ancdata" in str(error):  # multiprocessing's words where a descriptor could not be received
            return RuntimeError(
                "a batch's memory could not be received: this process may open no more files. Each batch in use takes "
                "one; keep fewer of them, or raise the limit (ulimit -n)"
            )
        if not isinstance(error, (EOFError, OSError)):
            return error
        self.process.join(PATIENCE)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return RuntimeError(
            f"the loader's worker process {self.process.pid} {how} while batches were awaited; if the system ran out "
            "of memory, use fewer workers, a smaller batch, or a smaller prefetch"
        )

    def ask_to_stop(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._requests.send(None)
        self._requests.close()
        self._answers.close()

    def stop(self) -> None:
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _stop_all(children: Sequence[_Child], pid: int) -> None:
    if pid != os.getpid():
        return  # a forked process: the children are its parent's
    for child in children:
        child.ask_to_stop()
    for child in children:
        child.stop()


def _revive(pickled: bytes | None, text: str) -> BaseException:
    """The child's exception, with its traceback as a note."""
    try:
        error = pickle.loads(pickled) if pickled is not None else None
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        return RuntimeError(f"a loader's worker process failed:\n{text}")
    add_note(error, f"raised in a loader's worker process:\n{text}")
    return error
