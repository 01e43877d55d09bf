"""Batches made in worker processes, each with threads of its own: for a loop that holds the interpreter lock.

In a worker one thread listens, one answers, and the dataset's decode.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import NoReturn, TypeAlias

import torch

from packfmt.sampling.dataset import readahead_of
from packfmt.training.arena import ArenaReader, ArenaWriter
from packfmt.training.batch import BatchJob
from packfmt.training.dataset import ImageDataset
from packfmt.training.engine import Batch, Batching, Finish, Request, batch_of
from packfmt.training.plan import add_note

__all__ = ["Failure", "ProcessEngine", "serve"]

Failure: TypeAlias = "tuple[bytes | None, str]"  # an exception, pickled if that is possible, and its traceback


def serve(
    requests: Connection,
    answers: Connection,
    parents: Sequence[Connection],
    dataset: ImageDataset,
    how: Batching,
) -> None:
    """Answer requests until told to stop, or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    for connection in parents:
        connection.close()
    torch.set_num_threads(1)
    slots = ArenaWriter()
    jobs: queue.SimpleQueue[BatchJob | Exception] = queue.SimpleQueue()
    arguments = (requests, dataset, how, slots, jobs)
    threading.Thread(target=_listen, args=arguments, daemon=True).start()
    while True:
        _answer(answers, dataset, slots, jobs.get())


def _listen(
    requests: Connection,
    dataset: ImageDataset,
    how: Batching,
    slots: ArenaWriter,
    jobs: queue.SimpleQueue[BatchJob | Exception],
) -> None:
    """Begin each batch as soon as it is asked for, whatever the answering thread waits for."""
    ask = readahead_of(dataset)
    while True:
        try:
            message = requests.recv()
        except (EOFError, OSError):
            message = None
        except Exception:  # without this thread nobody would ever be answered
            traceback.print_exc()
            _leave(1)
        if message is None:
            _leave()
        request, freed = message
        slots.release(freed)
        finish = Finish(dataset, how, request)
        try:
            job = dataset.start(
                request.indices, request.epoch, draws=request.draws, allocate=slots.allocate, then=finish
            )
            jobs.put(job)
        except Exception as error:
            jobs.put(error)
        ask(request.near)


def _answer(answers: Connection, dataset: ImageDataset, slots: ArenaWriter, job: BatchJob | Exception) -> None:
    made, failure = None, None
    try:
        if isinstance(job, Exception):
            raise job
        made = batch_of(dataset, job)
        made.batch = slots.wrap(made.batch)
        message = reduction.ForkingPickler.dumps((made, None))
    except Exception as error:
        made, failure = None, _embalm(error)
        message = reduction.ForkingPickler.dumps((None, failure))
    try:
        answers.send_bytes(message)
        for slot, _ in made.batch.new if made is not None else ():
            descriptor = slots.descriptor(slot)
            reduction.send_handle(answers, descriptor, os.getppid())
            os.close(descriptor)
    except OSError:  # the parent is gone
        _leave()


def _embalm(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps(error), text
    except Exception:
        return None, text


def _leave(code: int = 0) -> NoReturn:
    """End the process at once, also where threads are at work: nothing here needs cleaning up but what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


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

    def handles(self, requests: Iterator[Request]) -> Iterator[_Handle]:
        for request in requests:
            child = self._children[self._turn % len(self._children)]
            self._turn += 1
            yield child.request(request)

    def ready(self, handle: _Handle) -> bool:
        return handle.child.has_answer(handle)

    def collect(self, handle: _Handle) -> Batch:
        return handle.child.collect(handle)

    def cancel(self, handle: _Handle) -> None:
        handle.wanted, handle.made = False, None

    def close(self) -> None:
        self._finalizer()


@dataclass(slots=True)
class _Handle:
    child: _Child
    wanted: bool = True  # an unwanted batch gives its slots back as it comes
    answered: bool = False
    made: Batch | None = None
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
        self._slots = ArenaReader()
        self._open: deque[_Handle] = deque()
        self._broken = self._closed = False
        self._error: Exception | None = None

    @property
    def usable(self) -> bool:
        return not self._broken and bool(self.process.is_alive())

    def request(self, request: Request) -> _Handle:
        try:
            self._requests.send((request, self._slots.freed()))
        except BaseException as error:
            self._fail(error)
        handle = _Handle(self)
        self._open.append(handle)
        return handle

    def has_answer(self, handle: _Handle) -> bool:
        with suppress(Exception):  # a dead child is for ``collect`` to report, when its turn comes
            while not handle.answered and self._answers.poll(0):
                self._receive()
        return handle.answered

    def collect(self, handle: _Handle) -> Batch:
        while not handle.answered:
            self._receive()
        if handle.failure is not None:
            raise _revive(*handle.failure)
        made, handle.made = handle.made, None
        if made is None:
            raise RuntimeError("a batch was collected twice, or after it was cancelled")
        return made

    def _receive(self) -> None:
        """Take in the oldest answer."""
        if self._error is not None:  # answers that came since would go to the wrong handles
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
        handle = self._open.popleft()
        if made is not None:
            made.batch = self._slots.unwrap(made.batch)
        if handle.wanted:
            handle.made, handle.failure = made, failure
        handle.answered = True

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
