"""What runs in a loader's worker process: one thread listens, one answers, the dataset's decode."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import NoReturn, TypeAlias

import torch

from packfmt.sampling.facts import ask_of
from packfmt.training.batch import BatchJob
from packfmt.training.dataset import ImageDataset
from packfmt.training.engine import Batching, Finish, made_of
from packfmt.training.slots import SlotWriter

__all__ = ["Failure", "serve"]

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
    slots = SlotWriter()
    jobs: queue.SimpleQueue[BatchJob | Exception] = queue.SimpleQueue()
    arguments = (requests, dataset, how, slots, jobs)
    threading.Thread(target=_listen, args=arguments, daemon=True).start()
    while True:
        _answer(answers, dataset, slots, jobs.get())


def _listen(
    requests: Connection,
    dataset: ImageDataset,
    how: Batching,
    slots: SlotWriter,
    jobs: queue.SimpleQueue[BatchJob | Exception],
) -> None:
    """Begin each batch as soon as it is asked for, whatever the answering thread waits for."""
    ask = ask_of(dataset)
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


def _answer(answers: Connection, dataset: ImageDataset, slots: SlotWriter, job: BatchJob | Exception) -> None:
    made, failure = None, None
    try:
        if isinstance(job, Exception):
            raise job
        made = made_of(dataset, job)
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
