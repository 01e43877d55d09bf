"""The threads that decode."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import get_worker_info

__all__ = ["CallerPool", "DecodePool", "Pool", "default_threads", "reset_after_fork"]

Task: TypeAlias = Callable[[], None]

_thread = threading.local()


def default_threads() -> int:
    """The cores this process may use: a container's or a job's share, not the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fair_threads() -> int:
    """This process's part of ``default_threads``, which DataLoader's workers share out among them."""
    worker = get_worker_info()
    return max(1, default_threads() // (1 if worker is None else worker.num_workers))


class Pool(Protocol):
    """Runs tasks."""

    @property
    def threads(self) -> int:
        """How many run at a time."""

    @property
    def waiting(self) -> bool:
        """Whether there are tasks that no thread has begun."""

    def submit(self, task: Task, dropped: Task) -> None:
        """Run a task, which must not raise, or ``dropped`` instead if the pool is closed before its turn."""


class CallerPool:
    """Runs a task at once, in the calling thread: what a single sample needs."""

    threads = 1
    waiting = False

    def submit(self, task: Task, dropped: Task) -> None:
        """Run a task."""
        task()


class _Tasks:
    """Those that wait, and how many threads are at work. A thread goes on to the next task by itself: while there are
    some, none is handed to the executor, whose bookkeeping for each took about 1 per cent of decoding photos."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[tuple[Task, Task]] = deque()
        self.busy = 0

    def work_off(self) -> None:
        """In one of the threads."""
        while True:
            with self.lock:
                if not self.waiting:
                    self.busy -= 1
                    return
                task, _ = self.waiting.popleft()
            task()


class DecodePool:
    """Threads, started at the first task and once per process.

    A fork copies no threads, so a child starts its own; nothing of the parent's is touched there. Tasks that one of the
    threads submits run in that thread: it would otherwise wait for itself. Thread-safe. Pickles as the number of
    threads.

    Args:
        threads: None takes the cores this process may use, shared out among DataLoader's workers.
    """

    def __init__(self, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}, at least 1 is needed; None takes all cores")
        self._asked = threads
        self._finalizer: weakref.finalize[..., DecodePool] | None = None
        self.start_process()
        reset_after_fork(self)

    def start_process(self) -> None:
        """Be without threads, as at first."""
        if self._finalizer is not None:
            self._finalizer.detach()  # another process's threads end there
        self._finalizer = None
        self._tasks = _Tasks()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (DecodePool, (self._asked,))

    @property
    def threads(self) -> int:
        """How many tasks run at a time."""
        return self._asked or fair_threads()

    @property
    def waiting(self) -> bool:
        """Whether there are tasks that no thread has begun."""
        return bool(self._tasks.waiting)

    def submit(self, task: Task, dropped: Task) -> None:
        """Run a task in one of the threads."""
        if getattr(_thread, "decodes", False):
            task()
            return
        with self._lock:
            if self._executor is None:
                self._executor = _one_core_each(self.threads)
                self._finalizer = weakref.finalize(self, self._executor.shutdown, wait=False)
            tasks = self._tasks
            with tasks.lock:
                tasks.waiting.append((task, dropped))
                if tasks.busy < self.threads:
                    self._executor.submit(tasks.work_off)
                    tasks.busy += 1  # after it: a Ctrl-C between them must not leave a thread counted that never comes

    def close(self) -> None:
        """Stop the threads, waiting for running tasks. A later task starts new ones."""
        with self._lock:
            executor, self._executor = self._executor, None
            tasks, self._tasks = self._tasks, _Tasks()
            if self._finalizer is not None:
                self._finalizer.detach()
        with tasks.lock:
            left = list(tasks.waiting)
            tasks.waiting.clear()
        for _, dropped in left:
            dropped()
        if executor is not None:
            executor.shutdown(wait=True)


def _one_core_each(threads: int) -> ThreadPoolExecutor:
    """An executor whose threads use one core each, also inside torch.

    torch would start a team of threads for each of ours. Its setting is per thread, but also becomes the default of
    threads that come later, so it is put back once ours are up.
    """
    before = torch.get_num_threads()
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        _thread.decodes = True
        torch.get_num_threads()  # takes over the default now, which it would otherwise do later and undo the next line
        torch.set_num_threads(1)
        ready.wait()

    executor = ThreadPoolExecutor(threads, thread_name_prefix="packfmt-decode", initializer=begin)
    try:
        for _ in range(threads):
            executor.submit(int)  # the executor starts a thread per waiting task
        ready.wait()
    except BaseException:  # the system grants no more threads, or Ctrl-C: let those go that wait
        ready.abort()
        executor.shutdown(wait=False)
        raise
    finally:
        torch.set_num_threads(before)
    return executor


class _PerProcess(Protocol):
    def start_process(self) -> None:
        """Forget locks, threads and jobs of another process."""


_forked: weakref.WeakSet[_PerProcess] = weakref.WeakSet()


def reset_after_fork(thing: _PerProcess) -> None:
    """Have ``thing.start_process()`` called in every forked child, before anything else runs there.

    Its locks may be held there by threads that do not exist.
    """
    _forked.add(thing)


def _reset_all() -> None:
    for thing in list(_forked):
        thing.start_process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
