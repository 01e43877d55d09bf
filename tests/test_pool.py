"""The threads that decode."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import pytest
import torch
from training_packs import FORKS_BESIDE_THREADS, decoding_threads, in_fork

from packfmt.training import pool as module
from packfmt.training.pool import CallerPool, DecodePool, Pool

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)


def submit(pool: Pool, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a function, and have its result."""
    future: Future[Any] = Future()
    pool.submit(lambda: future.set_result(function(*arguments)), lambda: future.set_exception(CancelledError()))
    return future


@pytest.fixture
def pool() -> Any:
    pool = DecodePool(3)
    yield pool
    pool.close()


def test_threads_start_with_the_first_task(pool: DecodePool) -> None:
    before = decoding_threads()
    assert submit(pool, int, "7").result() == 7
    assert decoding_threads() == before + 3
    pool.close()
    assert decoding_threads() == before


def test_all_threads_work_at_once(pool: DecodePool) -> None:
    meeting = threading.Barrier(3)
    done, _ = wait([submit(pool, meeting.wait, 10) for _ in range(3)])
    assert sorted(future.result() for future in done) == [0, 1, 2]


def test_torch_uses_one_core_per_thread_and_the_callers_setting_stays(pool: DecodePool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        meeting = threading.Barrier(3)

        def look() -> int:
            meeting.wait(10)
            return torch.get_num_threads()

        assert [future.result() for future in [submit(pool, look) for _ in range(3)]] == [1, 1, 1]
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
    finally:
        torch.set_num_threads(before)


def test_a_task_of_a_task_runs_in_its_thread() -> None:
    pool = DecodePool(1)
    assert submit(pool, lambda: submit(pool, int, "7").result(timeout=10)).result(timeout=20) == 7
    pool.close()


def test_the_callers_pool_has_it_done_at_once() -> None:
    assert submit(CallerPool(), int, "7").result(timeout=0) == 7


def test_closing_drops_what_waits(pool: DecodePool) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def task() -> bool:
        begun.release()
        return go_on.wait(10)

    running = [submit(pool, task) for _ in range(3)]
    for _ in running:
        assert begun.acquire(timeout=10)
    waiting = submit(pool, int, "7")
    waiting.add_done_callback(lambda _: go_on.set())  # else closing would wait for those that run
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(timeout=0)
    assert [future.result(timeout=0) for future in running] == [True] * 3


def test_tasks_come_in_their_order() -> None:
    pool, order = DecodePool(1), []
    done = [submit(pool, order.append, number) for number in range(50)]
    wait(done)
    pool.close()
    assert order == list(range(50))


def test_an_interrupted_submit_costs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DecodePool(1)
    submit(pool, int).result()
    executor = pool._executor
    assert executor is not None
    executor.submit(int).result()  # its turn comes when the thread is done with tasks

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor, "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            submit(pool, int)
    assert submit(pool, int, "7").result(timeout=10) == 7
    pool.close()


def test_a_closed_pool_starts_again(pool: DecodePool) -> None:
    submit(pool, int).result()
    pool.close()
    pool.close()
    assert submit(pool, int, "7").result() == 7


def test_a_dropped_pool_ends_its_threads() -> None:
    pool = DecodePool(2)
    submit(pool, int).result()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("packfmt-decode")]
    del pool
    for thread in threads[-2:]:
        thread.join(10)
        assert not thread.is_alive()


def test_a_fork_starts_threads_of_its_own(pool: DecodePool) -> None:
    submit(pool, int).result()
    assert in_fork(lambda: submit(pool, int, "7").result(timeout=10) == 7) == 0
    assert submit(pool, int, "7").result() == 7


def test_a_fork_while_a_lock_is_held(pool: DecodePool) -> None:
    submit(pool, int).result()
    with pool._lock, pool._tasks.lock, pool._executor._shutdown_lock:  # type: ignore[union-attr]
        assert in_fork(lambda: submit(pool, int, "7").result(timeout=10) == 7 and pool.close() is None) == 0


def test_pickles_as_what_was_asked_for() -> None:
    assert pickle.loads(pickle.dumps(DecodePool(5))).threads == 5
    assert pickle.loads(pickle.dumps(DecodePool(None))).threads == module.default_threads()


def test_workers_of_a_dataloader_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        num_workers = 3

    monkeypatch.setattr(module, "default_threads", lambda: 8)
    assert DecodePool(None).threads == 8
    monkeypatch.setattr(module, "get_worker_info", Info)
    assert DecodePool(None).threads == 2
    assert DecodePool(5).threads == 5


def test_too_few_threads_to_be_had_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = decoding_threads(), threading.Thread.start
    started = []

    def refuse_the_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    setting = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        submit(DecodePool(3), int)
    for thread in started:
        thread.join(10)
    assert decoding_threads() == before
    assert torch.get_num_threads() == setting


def test_a_program_ends_with_its_main_thread() -> None:
    program = "from packfmt.training.pool import DecodePool as P; pool = P(2); pool.submit(int, int); print('end')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "end\n"
    assert done.stderr == ""
