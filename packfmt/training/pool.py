"""The threads that decode."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

__all__ = ["CallerPool", "DecodePool", "Pool", "default_threads"]


def default_threads() -> int:
    """The cores this process may use: a container's or a job's share, not the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pool(Protocol):
    """Runs tasks."""

    @property
    def threads(self) -> int:
        """How many run at a time."""

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a task."""


class CallerPool:
    """Runs a task at once, in the calling thread: what a single sample needs."""

    threads = 1

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a task and return it done."""
        future: Future[Any] = Future()
        try:
            future.set_result(task(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class DecodePool:
    """Threads, started at the first task and once per process.

    A fork copies no threads, so a child starts its own; nothing of the parent's is touched there. Thread-safe. Pickles
    as the number of threads.
    """

    def __init__(self, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}, at least 1 is needed; None takes all cores")
        self.threads = threads or default_threads()
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (DecodePool, (self.threads,))

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a task in one of the threads."""
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            if self._executor is None:
                self._executor = _one_core_each(self.threads)
                weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
            return self._executor.submit(task, *arguments)

    def close(self) -> None:
        """Stop the threads, waiting for running tasks. A later task starts new ones."""
        if self._pid != os.getpid():
            return
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


def _one_core_each(threads: int) -> ThreadPoolExecutor:
    """An executor whose threads use one core each, also inside torch.

    torch would start a team of threads for each of ours. Its setting is per thread, but also becomes the default of
    threads that come later, so it is put back once ours are up.
    """
    before = torch.get_num_threads()
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # takes over the default now, which it would otherwise do later and undo the next line
        torch.set_num_threads(1)
        ready.wait()

    executor = ThreadPoolExecutor(threads, thread_name_prefix="packfmt-decode", initializer=begin)
    for _ in range(threads):
        executor.submit(int)  # the executor starts a thread per waiting task
    ready.wait()
    torch.set_num_threads(before)
    return executor
