"""Memory that two processes share and that has no name: nothing to clean up in /dev/shm, however a process ends.

The child writes batches into slots (memfd, mapped by both sides). The parent hands out tensors that lie in them; when
the last of a slot's tensors is gone, the slot's number goes back to the child, which uses it again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Parcel", "SlotReader", "SlotWriter"]

GRAIN = 1 << 20  # slots are rounded up to this, so that batches of nearly equal size fit into each other's
SMALL = 4 << 10  # bytes up to which an array travels in the message itself
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Where an array lies: in a slot, or (``slot`` None) in ``data``. ``order`` is its axes by descending stride."""

    slot: int | None
    offset: int
    data: bytes
    dtype: str
    shape: tuple[int, ...]  # in the order of ``order``
    order: tuple[int, ...]
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Parcel:
    """A batch on its way: the tree with leaves in the place of arrays, and the slots it lies in."""

    tree: Any
    slots: tuple[int, ...]
    new: tuple[tuple[int, int], ...]  # (slot, size) whose descriptors follow the message


class SlotWriter:
    """The child's side. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._starts: dict[int, int] = {}
        self._free: set[int] = set()
        self._unsent: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}

    def allocate(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A uint8 array in a slot of its own."""
        size = int(np.prod(shape))
        slot = self._take(size)
        return np.frombuffer(self._maps[slot], np.uint8, size).reshape(shape)

    def release(self, slots: tuple[int, ...] | list[int]) -> None:
        """Use these slots again."""
        with self._lock:
            self._free.update(slots)

    def slot_of(self, array: npt.NDArray[Any] | None) -> int | None:
        """The slot an array lies in, None for memory of another kind."""
        if array is None:
            return None
        address = array.__array_interface__["data"][0]
        for slot, start in self._starts.items():
            if start <= address < start + len(self._maps[slot]):
                return slot
        return None

    def wrap(self, tree: Any) -> Parcel:
        """Describe a batch, copying into a slot what does not lie in one yet and is not small."""
        outside: list[npt.NDArray[Any]] = []
        _walk(tree, lambda array, _: outside.append(array) if self._moves(array) else None)
        room = sum(array.nbytes + ALIGNMENT for array in outside)
        slot = self._take(room) if outside else None
        used: set[int] = set() if slot is None else {slot}
        position = 0

        def place(array: npt.NDArray[Any], is_tensor: bool) -> _Leaf:
            nonlocal position
            order = tuple(int(axis) for axis in np.argsort([-stride for stride in array.strides], kind="stable"))
            flat = array.transpose(order)
            own = self.slot_of(array)
            if own is not None and flat.flags.c_contiguous:
                used.add(own)
                offset = array.__array_interface__["data"][0] - self._starts[own]
                return _Leaf(own, offset, b"", array.dtype.str, flat.shape, order, is_tensor)
            if not self._moves(array) or slot is None:
                return _Leaf(None, 0, flat.tobytes(), array.dtype.str, flat.shape, order, is_tensor)
            offset, position = position, position + -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            room = np.frombuffer(self._maps[slot], array.dtype, array.size, offset)
            room.reshape(flat.shape)[...] = flat
            return _Leaf(slot, offset, b"", array.dtype.str, flat.shape, order, is_tensor)

        wrapped = _walk(tree, place)
        with self._lock:
            new = tuple(self._unsent.items())
            self._unsent = {}
        return Parcel(wrapped, tuple(used), new)

    def descriptor(self, slot: int) -> int:
        """The file descriptor of a new slot, to be sent once and closed by the caller."""
        return self._descriptors.pop(slot)

    def _moves(self, array: npt.NDArray[Any]) -> bool:
        return array.nbytes > SMALL and self.slot_of(array) is None

    def _take(self, size: int) -> int:
        with self._lock:
            fitting = [slot for slot in self._free if len(self._maps[slot]) >= size]
            if fitting:
                slot = min(fitting, key=lambda slot: len(self._maps[slot]))
                self._free.discard(slot)
                return slot
            slot = len(self._maps)
            rounded = max(1, -(-size // GRAIN)) * GRAIN
            descriptor = _nameless_file()
            os.ftruncate(descriptor, rounded)
            self._maps[slot] = mmap.mmap(descriptor, rounded)
            self._starts[slot] = ctypes.addressof(ctypes.c_char.from_buffer(self._maps[slot]))
            self._descriptors[slot] = descriptor
            self._unsent[slot] = rounded
            return slot


class SlotReader:
    """The parent's side. Used by one thread; slots may be given back in any."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._freed: list[int] = []

    def add(self, slot: int, size: int, descriptor: int) -> None:
        """Map a slot that the child made. Closes the descriptor."""
        try:
            self._maps[slot] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def freed(self) -> list[int]:
        """Slots whose tensors are gone, once each."""
        taken = []
        while self._freed:
            taken.append(self._freed.pop())
        return taken

    def unwrap(self, parcel: Parcel) -> Any:
        """The batch: tensors and arrays that lie in the slots, writable, the user's own until dropped."""
        holders = {}
        for slot in parcel.slots:
            # numpy arrays forget which array they were cut from, but not whose buffer they lie in: a ctypes array is
            # such an owner, and unlike an mmap can be watched.
            mapped = self._maps[slot]
            holders[slot] = (ctypes.c_ubyte * len(mapped)).from_buffer(mapped)
            weakref.finalize(holders[slot], self._freed.append, slot).atexit = False

        def restore(leaf: _Leaf) -> Any:
            dtype = np.dtype(leaf.dtype)
            count = int(np.prod(leaf.shape))
            if leaf.slot is None:
                flat = np.frombuffer(bytearray(leaf.data), dtype, count)
            else:
                flat = np.frombuffer(memoryview(holders[leaf.slot]), dtype, count, leaf.offset)
            array = flat.reshape(leaf.shape).transpose(np.argsort(leaf.order))
            return torch.from_numpy(array) if leaf.is_tensor else array

        return _unwalk(parcel.tree, restore)


def _walk(tree: Any, visit: Callable[[npt.NDArray[Any], bool], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with ``visit(array, is_tensor)`` in the place of arrays and tensors."""
    if isinstance(tree, torch.Tensor):
        return visit(tree.detach().numpy(), True)
    if isinstance(tree, np.ndarray):
        return visit(tree, False)
    if isinstance(tree, dict):
        return {key: _walk(value, visit) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([_walk(value, visit) for value in tree])
    return tree


def _unwalk(tree: Any, restore: Callable[[_Leaf], Any]) -> Any:
    if isinstance(tree, _Leaf):
        return restore(tree)
    if isinstance(tree, dict):
        return {key: _unwalk(value, restore) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([_unwalk(value, restore) for value in tree])
    return tree


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("packfmt", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # other POSIX systems: an unlinked file
        return os.dup(file.fileno())
