"""Copies to a device, with devices that are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from training_packs import CROP, labels_of, make_pack

from packfmt import ImageDataset, Loader
from packfmt.training import loader as loader_module
from packfmt.training.device import DeviceMover, map_tensors


class FakeCuda:
    """Writes down what is asked of streams and events. Its device is the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        cuda = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = "copy"

            def wait_event(self, event: Any) -> None:
                cuda.log.append(f"wait {event.number}")

        class Event:
            count = 0

            def record(self, stream: Any) -> None:
                Event.count += 1
                self.number = Event.count
                cuda.log.append(f"copied {self.number}")

        @contextmanager
        def within(stream: Any) -> Iterator[None]:
            yield

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: tensor.clone())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("keep"))


def test_copies_go_beside_the_computing_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    mover = DeviceMover(torch.device("cuda"))
    source = (torch.ones(2), {"label": torch.ones(3), "key": ["a"]})
    moved, pending = mover.send(source)
    assert cuda.log == ["copied 1"]
    assert pending[1] is source  # alive until the copy is waited for
    images, targets = mover.receive(moved, pending)
    assert cuda.log == ["copied 1", "wait 1", "keep", "keep"]
    assert images.tolist() == [1, 1]
    assert targets["key"] == ["a"]


def test_other_devices_get_plain_copies() -> None:
    mover = DeviceMover(torch.device("meta"))
    moved, pending = mover.send((torch.ones(2), [torch.ones(3)]))
    assert pending is None
    images, (boxes,) = mover.receive(moved, pending)
    assert images.device.type == boxes.device.type == "meta"


def test_tensors_are_found_in_nested_trees() -> None:
    tree = {"a": [torch.tensor(1), (torch.tensor(2), "text")], "b": None}
    assert map_tensors(tree, int) == {"a": [1, (2, "text")], "b": None}


class SlowMover:
    """A device whose copies are written down."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def send(self, batch: Any) -> tuple[Any, Any]:
        self.log.append(f"send {batch[1].tolist()}")
        return batch, None

    def receive(self, moved: Any, pending: Any) -> Any:
        self.log.append(f"receive {moved[1].tolist()}")
        return moved


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(loader_module, "DeviceMover", lambda device: SlowMover(log))
    return log


def test_a_batch_is_copied_while_the_one_before_it_is_used(tmp_path: Any, log: list[str]) -> None:
    loader = Loader(ImageDataset(make_pack(tmp_path, 6), crop=CROP), 2, shuffle=False, device="cpu")
    batches = iter(loader)
    next(batches)
    assert log == ["send [0, 1]", "send [2, 3]", "receive [0, 1]"]
    assert loader.state_dict()["position"] == 1  # what is on the device ahead of the loop is not consumed
    assert labels_of(batches) == [[2, 3], [4, 5]]


def test_an_error_comes_after_the_batches_before_it(tmp_path: Any, log: list[str]) -> None:
    loader = Loader(ImageDataset(make_pack(tmp_path, 6, broken=[4]), crop=CROP), 2, shuffle=False, device="cpu")
    batches = iter(loader)
    assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(Exception, match=r"004\.jpg"):
        next(batches)


def test_the_host_as_device(tmp_path: Any) -> None:
    loader = Loader(ImageDataset(make_pack(tmp_path, 6), crop=CROP), 2, shuffle=False, device="cpu")
    assert labels_of(loader) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_pinning_without_cuda_does_nothing(tmp_path: Any) -> None:
    loader = Loader(ImageDataset(make_pack(tmp_path, 6), crop=CROP), 2, shuffle=False, pin_memory=True)
    images, _ = next(iter(loader))
    assert not images.is_pinned()
