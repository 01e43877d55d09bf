"""The loader's worker processes: how they begin, die and end, and the memory they share."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from make import jpeg
from torch.utils.data import DataLoader
from training_packs import (
    CROP,
    FLIP,
    FORKS_BESIDE_THREADS,
    add_noise,
    labels_of,
    make_pack,
    open_descriptors,
    pixels_of,
    process_of,
    shared_names,
    stop_here,
)

import packfmt
from packfmt import ImageDataset, Loader, RandomResizedCrop
from packfmt.training import arena as slots
from packfmt.training.engine import Request

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def ds(pack: str) -> Iterator[ImageDataset]:
    with ImageDataset(pack, crop=CROP, flip=FLIP, threads=2) as dataset:
        yield dataset


def forked(dataset: ImageDataset, batch_size: int = 4, workers: int = 1, **options: Any) -> Loader:
    return Loader(dataset, batch_size, workers=workers, start_method="fork", **options)


def processes_of(loader: Loader) -> list[int]:
    return [child.process.pid for child in loader._engine._children]  # type: ignore[union-attr]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# Beginning


def test_torchvision_targets_come_whole_from_a_child(tmp_path: Path) -> None:
    with packfmt.create(tmp_path / "out") as writer:
        for count in (2, 0, 600):  # the last too large for a message
            boxes = np.tile(np.float32([[0, 0, 9, 9]]), (count, 1))
            writer.write(jpeg(), f"{count}", boxes=boxes, labels=np.arange(count))
    dataset = ImageDataset(tmp_path / "out", targets="torchvision", crop=packfmt.Resize(16), threads=1)
    with forked(dataset, 3, shuffle=False, collate="list") as loader:
        ((_, targets),) = loader
    assert [len(target["boxes"]) for target in targets] == [2, 0, 600]
    assert [target["image_id"].item() for target in targets] == [0, 1, 2]
    assert torch.equal(targets[2]["labels"], torch.arange(600))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start(pack: str, method: str) -> None:
    ds = ImageDataset(pack, crop=CROP, flip=FLIP, transform=add_noise, threads=2)
    alone = list(Loader(ds, 8))
    with Loader(ds, 8, workers=1, start_method=method) as loader:
        assert pixels_of(loader) == pixels_of(alone)


def test_what_cannot_be_pickled_is_an_error_at_once(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=lambda image: image)
    loader = Loader(ds, 8, workers=1, start_method="spawn")
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        list(loader)


def test_processes_do_the_work_and_stay_over_epochs(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=process_of, threads=2)
    with forked(ds, workers=2) as loader:
        seen = [{int(pid) for images, _ in loader for pid in images} for _ in range(2)]
        assert seen[0] == seen[1] == set(processes_of(loader))


def test_threads_are_shared_out(pack: str) -> None:
    with forked(ImageDataset(pack, crop=CROP, threads=7), workers=3) as loader:
        list(loader)
        assert (loader.stats().threads, loader.stats().workers) == (6, 3)


def test_forked_beside_threads_at_work(ds: ImageDataset) -> None:
    expected = labels_of(Loader(ds, 4))
    busy = iter(Loader(ds, 4, prefetch=5))
    next(busy)
    with forked(ds, workers=2) as loader:
        assert labels_of(loader) == expected


# Ending


def test_closing_ends_the_processes(ds: ImageDataset) -> None:
    loader = forked(ds, workers=2)
    next(iter(loader))
    pids = processes_of(loader)
    loader.close()
    assert all(map(gone, pids))
    loader.close()
    assert len(labels_of(loader)) == 10  # with new ones
    loader.close()


def test_going_on_after_closing_says_so(ds: ImageDataset) -> None:
    loader = forked(ds)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(RuntimeError, match="the loader was closed while batches were awaited"):
        list(batches)
    assert len(list(loader)) == len(loader)


def test_no_room_for_a_batchs_memory_says_what_to_do(ds: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(connection: object) -> int:
        raise RuntimeError("received 0 items of ancdata")

    monkeypatch.setattr("packfmt.training.process.reduction.recv_handle", refuse)
    with forked(ds, 16) as loader, pytest.raises(RuntimeError, match="may open no more files"):
        next(iter(loader))


def test_closing_does_not_wait_for_work(pack: str) -> None:
    loader = forked(ImageDataset(pack, crop=CROP, transform=stop_here))
    next(loader._start_engine().handles(iter([Request(0, 0, torch.arange(4).numpy(), torch.arange(0).numpy())])))
    (pid,) = processes_of(loader)
    began = time.monotonic()
    loader.close()
    assert gone(pid)
    assert time.monotonic() - began < 5


def test_a_dropped_loader_ends_its_processes(ds: ImageDataset) -> None:
    loader = forked(ds)
    next(iter(loader))
    (pid,) = processes_of(loader)
    del loader
    gc.collect()
    assert wait_until(lambda: gone(pid))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_an_error_and_the_next_epoch_has_a_new_one(ds: ImageDataset, sent: signal.Signals) -> None:
    with forked(ds, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(processes_of(loader)[0], sent)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=f"was killed by signal {int(sent)}"):
            list(batches)
        assert time.monotonic() - began < 5
        old = processes_of(loader)
        assert len(labels_of(loader)) == 10
        assert all(map(gone, old))


def test_a_process_killed_between_epochs_is_replaced(ds: ImageDataset) -> None:
    with forked(ds) as loader:
        list(loader)
        (child,) = loader._engine._children  # type: ignore[union-attr]
        child.process.kill()
        child.process.join(20)
        assert len(labels_of(loader)) == 10


def test_a_process_that_dies_while_it_works(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=lambda image: os._exit(3))
    with forked(ds) as loader, pytest.raises(RuntimeError, match="ended with exit code 3"):
        list(loader)


def test_a_request_that_a_process_cannot_read_ends_it(ds: ImageDataset, capfd: pytest.CaptureFixture[str]) -> None:
    with forked(ds) as loader:
        batches = iter(loader)
        next(batches)
        child = loader._engine._children[0]  # type: ignore[union-attr]
        child._requests.send_bytes(b"no pickle")
        with pytest.raises(RuntimeError, match="ended with exit code 1"):
            list(batches)
    assert "UnpicklingError" in capfd.readouterr().err


def test_an_interrupted_wait_does_not_mix_up_answers(ds: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = labels_of(Loader(ds, 4))
    with forked(ds) as loader:
        batches = iter(loader)
        next(batches)
        child = loader._engine._children[0]  # type: ignore[union-attr]

        receive = child._answers.recv

        def interrupted() -> Any:
            receive()
            raise KeyboardInterrupt

        monkeypatch.setattr(child._answers, "recv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        monkeypatch.undo()
        loader.set_epoch(0)
        assert labels_of(loader) == expected


def test_a_forked_process_leaves_its_parents_workers_alone(ds: ImageDataset) -> None:
    with forked(ds) as loader:
        batches = iter(loader)
        next(batches)
        pids = processes_of(loader)
        child = os.fork()
        if not child:
            try:
                own = len(labels_of(loader)) == 10 and processes_of(loader) != pids
                loader.close()
            finally:
                os._exit(0 if own else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(list(batches)) == 9


# A program that trains until it is stopped. It prints its children and the names it made in shared memory.
PROGRAM = """
import os, sys, time
import numpy as np
import psutil
import packfmt
sys.path.insert(0, sys.argv[2])
from training_packs import shared_names
ds = packfmt.ImageDataset(sys.argv[1], crop=packfmt.CenterCrop(16), threads=2)
threads = packfmt.Loader(ds, 4)
processes = packfmt.Loader(ds, 4, workers=2, start_method="fork")
try:
    while True:
        for number, _ in enumerate(zip(threads, processes)):
            if number == 2:
                print(*[child.pid for child in psutil.Process().children()], sorted(shared_names()), flush=True)
            time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def run_until(sent: signal.Signals, pack: str) -> tuple[int, str]:
    """The exit code and the rest of the output; what it started has ended."""
    command = [sys.executable, "-W", "error", "-W", FORKS_BESIDE_THREADS.partition(" .*")[0]]
    program = subprocess.Popen(
        [*command, "-c", PROGRAM, pack, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line.endswith("[]\n"), line + program.stdout.read()
    children = [int(word) for word in line.split()[:-1]]
    assert len(children) == 2
    if sent == signal.SIGINT:
        os.killpg(program.pid, sent)  # as a terminal does
    else:
        program.send_signal(sent)
    output, _ = program.communicate(timeout=30)
    assert wait_until(lambda: all(map(gone, children)))
    return program.returncode, output


def test_ctrl_c_leaves_nothing_behind(pack: str) -> None:
    code, output = run_until(signal.SIGINT, pack)
    assert "interrupted" in output
    assert "Traceback" not in output
    assert code == 0


def test_children_end_with_a_killed_parent(pack: str) -> None:
    code, _ = run_until(signal.SIGKILL, pack)
    assert code == -signal.SIGKILL


# Memory


def test_slots_are_used_again(pack: str) -> None:
    ds = ImageDataset(pack, crop=RandomResizedCrop(64), threads=2)
    with forked(ds, 4) as loader:
        for _ in range(10):
            for _ in loader:
                pass
        assert 1 <= len(loader._engine._children[0]._slots._maps) <= 8  # type: ignore[union-attr]


def test_batches_stay_intact_while_they_are_held(ds: ImageDataset) -> None:
    expected = [images for images, _ in Loader(ds, 8)]
    with forked(ds, 8) as loader:
        held = [images for images, _ in loader]
        list(loader)
    assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True))
    held[0].zero_()
    assert torch.equal(held[1], expected[1])


def test_hoarded_batches(ds: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MOST_BLOCKS", 2)
    expected = pixels_of(Loader(ds, 4))
    with forked(ds, 4) as loader:
        assert pixels_of(list(loader)) == expected


def test_a_batch_transform_may_keep_the_batch_before(pack: str) -> None:
    ds = ImageDataset(pack, crop=RandomResizedCrop(64), threads=1)  # several threads call it in any order
    kept: list[torch.Tensor] = []

    def with_the_one_before(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept.append(images)
        return torch.stack([kept.pop(0) if len(kept) > 1 else images, images]), labels

    plain = [images.clone() for images, _ in Loader(ds, 8)]
    with forked(ds, 8, batch_transform=with_the_one_before) as loader:
        for number, (images, _) in enumerate(loader):
            assert torch.equal(images[0], plain[max(number - 1, 0)])
            del images


def test_descriptors_stay_few(ds: ImageDataset) -> None:
    before = open_descriptors()
    with forked(ds, 8, workers=2) as loader:
        for _ in range(15):
            list(loader)
            next(iter(loader))
        assert open_descriptors() - before <= 2 * (3 + 8)  # two pipes, a sentinel and a few slots for each child
    gc.collect()
    assert open_descriptors() <= before


def test_nothing_has_a_name_in_shared_memory(ds: ImageDataset) -> None:
    with forked(ds, 8) as loader:
        for _ in loader:
            assert shared_names() == set()


def test_memory_does_not_grow(tmp_path: Path) -> None:
    ds = ImageDataset(make_pack(tmp_path, 24), crop=RandomResizedCrop(200), threads=2)
    with forked(ds, 8) as loader:

        def resident() -> int:
            return sum(psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *processes_of(loader)))

        for _ in range(10):
            list(loader)
        before = resident()
        for _ in range(30):
            list(loader)
        assert resident() - before < 30 << 20  # 90 batches of 1 MB


def test_dataloader_around_forked_loader_processes(ds: ImageDataset) -> None:
    with forked(ds) as loader:
        batches = iter(loader)
        next(batches)
        torchs = DataLoader(ds, batch_size=8, num_workers=1, multiprocessing_context="fork")
        assert len(list(torchs)) == 5
        assert len(list(batches)) == 9
