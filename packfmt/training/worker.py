"""Batches made in child processes, each with threads of its own: for a loop that holds the interpreter lock."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import queue
import signal
import threading
import traceback
import weakref
from collections import deque
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch

from packfmt.training.batch import BatchJob
from packfmt.training.collate import Collate
from packfmt.training.dataset import ImageDataset
from packfmt.training.engine import Finish, Made, Mix, Request, made_of
from packfmt.training.slots import SlotReader, SlotWriter

__all__ = ["ProcessEngine"]

PATIENCE = 5.0  # seconds a child has to end by itself


class ProcessEngine:
    """Makes batches in child processes, in turn. A child that dies is an error at once, never a wait.

    Args:
        dataset: as it is in each child; ``threads`` of it are shared out among them.
        collate, batch_transform: as ``Finish``.
        workers: number of children.
        start_method: "fork", "spawn", "forkserver", or None for Python's default.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        collate: Collate,
        batch_transform: Mix | None,
        workers: int,
        start_method: str | None,
    ) -> None:
        each = max(1, dataset.threads // workers)
        self.threads = each * workers
        context = mp.get_context(start_method)
        self._children = [_Child(context, dataset, collate, batch_transform, each) for _ in range(workers)]
        self._turn = 0
        self._finalizer = weakref.finalize(self, _stop_all, self._children)

    def request(self, request: Request) -> _Ticket:
        child = self._children[self._turn % len(self._children)]
        self._turn += 1
        return child.request(request)

    def ready(self, ticket: _Ticket) -> bool:
        return ticket.made is not None or ticket.child.has_answer(ticket)

    def collect(self, ticket: _Ticket) -> Made:
        return ticket.child.collect(ticket)

    def cancel(self, ticket: _Ticket) -> None:
        ticket.wanted = False

    def close(self) -> None:
        self._finalizer()


class _Ticket:
    def __init__(self, child: _Child) -> None:
        self.child = child
        self.wanted = True
        self.made: Made | None = None


class _Child:
    """The parent's hold on one child."""

    def __init__(
        self, context: BaseContext, dataset: ImageDataset, collate: Collate, batch_transform: Mix | None, threads: int
    ) -> None:
        # A socket pair, since descriptors of shared memory travel over it.
        self._connection, theirs = context.Pipe(duplex=True)
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_serve,
            args=(theirs, self._connection, dataset, collate, batch_transform, threads),
            daemon=True,
            name="packfmt-loader",
        )
        self.process.start()
        theirs.close()
        self._slots = SlotReader()
        self._open: deque[_Ticket] = deque()

    def request(self, request: Request) -> _Ticket:
        try:
            self._connection.send((request, self._slots.freed()))
        except OSError:
            raise self._death() from None
        ticket = _Ticket(self)
        self._open.append(ticket)
        return ticket

    def has_answer(self, ticket: _Ticket) -> bool:
        return bool(self._open) and self._open[0] is ticket and self._connection.poll(0)

    def collect(self, ticket: _Ticket) -> Made:
        while True:
            first = self._open[0]
            made = self._receive(first.wanted)
            self._open.popleft()
            if first is ticket and made is not None:
                return made

    def _receive(self, wanted: bool) -> Made | None:
        """The oldest answer; None where nobody wants it any more."""
        try:
            wait([self._connection, self.process.sentinel])
            if not self._connection.poll(0):
                raise EOFError
            parcel, made, failure = self._connection.recv()
            for slot, size in parcel.new if parcel is not None else ():
                self._slots.add(slot, size, reduction.recv_handle(self._connection))
        except (EOFError, OSError):
            raise self._death() from None
        if failure is not None:
            self._open.popleft()
            if wanted:
                raise _revive(*failure)
            self._open.appendleft(_Ticket(self))
            return None
        made.images, made.targets = self._slots.unwrap(parcel)
        return made if wanted else None  # an unwanted batch gives its slots back as it goes

    def _death(self) -> RuntimeError:
        self.process.join(PATIENCE)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return RuntimeError(
            f"the loader's worker process {self.process.pid} {how} while batches were awaited; if the system ran out "
            "of memory, use fewer workers, a smaller batch, or a smaller prefetch"
        )

    def stop(self) -> None:
        """End the child: ask, wait, then kill."""
        with suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _stop_all(children: list[_Child]) -> None:
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
    if hasattr(error, "add_note"):
        error.add_note(f"raised in a loader's worker process:\n{text}")
    else:  # Python 3.10
        error.__cause__ = RuntimeError(f"raised in a loader's worker process:\n{text}")
    return error


# The child


def _serve(
    connection: Connection,
    parents: Connection,
    dataset: ImageDataset,
    collate: Collate,
    batch_transform: Mix | None,
    threads: int,
) -> None:
    """Answer requests until told to stop, or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    parents.close()  # a forked child holds a copy, which would hide the parent's end
    torch.set_num_threads(1)
    dataset = dataset.with_threads(threads)
    slots = SlotWriter()
    jobs: queue.SimpleQueue[tuple[Request, BatchJob | BaseException] | None] = queue.SimpleQueue()
    reader = threading.Thread(
        target=_listen, args=(connection, dataset, collate, batch_transform, slots, jobs), daemon=True
    )
    reader.start()
    while (item := jobs.get()) is not None:
        try:
            _answer(connection, dataset, slots, item[1])
        except OSError:  # the parent is gone
            break
    os._exit(0)  # the listening thread may stand in a read; nothing here needs cleaning up


def _listen(
    connection: Connection,
    dataset: ImageDataset,
    collate: Collate,
    batch_transform: Mix | None,
    slots: SlotWriter,
    jobs: Any,
) -> None:
    """Begin each batch as soon as it is asked for, whatever the answering thread waits for."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = None
        if message is None:
            jobs.put(None)
            return
        request, freed = message
        slots.release(freed)
        finish = Finish(dataset, collate, batch_transform, request)
        try:
            job: Any = dataset.start(request.indices, request.epoch, allocate=slots.allocate, then=finish)
        except Exception as error:
            job = error
        jobs.put((request, job))


def _answer(connection: Connection, dataset: ImageDataset, slots: SlotWriter, job: BatchJob | BaseException) -> None:
    own = slots.slot_of(job.plan.out) if isinstance(job, BatchJob) else None
    try:
        if not isinstance(job, BatchJob):
            raise job
        made = made_of(dataset, job)
        parcel = slots.wrap((made.images, made.targets))
        made.images = made.targets = None
        failure = None
    except Exception as error:
        parcel, made, failure = None, None, _embalm(error)
    if own is not None and (parcel is None or own not in parcel.slots):
        slots.release([own])  # decoded there, but the batch lies elsewhere: a transform came after
    connection.send((parcel, made, failure))
    for slot, _ in parcel.new if parcel is not None else ():
        descriptor = slots.descriptor(slot)
        reduction.send_handle(connection, descriptor, os.getppid())
        os.close(descriptor)


def _embalm(error: BaseException) -> tuple[bytes | None, str]:
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps(error), text
    except Exception:
        return None, text
