"""From the host's memory to the device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DeviceMover", "pinned_array"]


def pinned_array(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """A uint8 array in page-locked memory, to decode into: a device copies from there without another copy between."""
    array: npt.NDArray[np.uint8] = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    return array


class DeviceMover:
    """Copies batches to a device, on a stream beside the one that computes, so that both go on at the same time.

    On devices without streams the copy is a plain one. Used by one thread.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start copying every tensor of a batch. Returns the copies and what ``receive`` waits for."""
        if self._stream is None:
            return map_tensors(batch, lambda tensor: tensor.to(self._device)), None
        with torch.cuda.stream(self._stream):
            moved = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return moved, (event, batch)  # the source must live until the copy is done

    def receive(self, moved: Any, pending: Any) -> Any:
        """Make the computing stream wait for a copy, and give the batch."""
        if pending is not None:
            event, _ = pending
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            map_tensors(moved, lambda tensor: tensor.record_stream(current))
        return moved


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested dicts, lists and tuples; the rest stays."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([map_tensors(value, function) for value in tree])
    return tree
