"""Memory for batches that is used again: a process's own, and arenas that a worker process shares with its parent.

New memory costs a page fault for every 4 KiB when it is first written, a tenth of the time that small crops take to
decode; the allocator gives pieces of this size back to the system at once, so each batch would pay anew.

Shared memory has no name: nothing to clean up in /dev/shm, however a process ends. The child writes batches into blocks
of an arena (memfd, mapped by both sides). The parent hands out tensors that lie in them. A block is used again when
neither side has an array in it any more. Pickle's out-of-band buffers would not spare the walk through a batch: torch
does not hand out tensors that way, and numpy only contiguous arrays, while images are channels-last.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["MOST_BLOCKS", "Arena", "ArenaReader", "ArenaWriter", "PackedBatch", "nameless_file"]

GRAIN = 1 << 20  # blocks are rounded up to this, so that batches of nearly equal size fit into each other's
KEPT = 8  # free blocks: a loader's look-ahead and what a loop holds


class Arena:
    """Gives arrays whose memory comes back when the last array or tensor over it is dropped. Thread-safe.

    Pickles as nothing. After a fork each process has blocks of its own (copied on write), like all memory.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def __reduce__(self) -> tuple[type[Arena], tuple[()]]:
        return (Arena, ())

    def allocate(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A uint8 array, undefined."""
        size = math.prod(shape)
        block = self._take(size)
        # Whatever is made of the array refers to this owner, which unlike a map can be watched.
        owner = (ctypes.c_ubyte * len(block)).from_buffer(block)
        weakref.finalize(owner, _give_back, self._free, block).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8, size).reshape(shape)

    def _take(self, size: int) -> mmap.mmap:
        for block in self._free[::-1]:  # the one dropped last may still be in the processor's cache
            if size <= len(block) <= 2 * size + GRAIN:  # an epoch's last batch must not cost the others their blocks
                with suppress(ValueError):  # another thread was faster
                    self._free.remove(block)
                    return block
        # Private: Python's default would share the block with forked children, which write batches too.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        return mmap.mmap(-1, max(1, -(-size // GRAIN)) * GRAIN, **private)


def _give_back(free: list[mmap.mmap], block: mmap.mmap) -> None:
    free.append(block)
    if len(free) > KEPT:
        with suppress(IndexError):  # other threads took them all
            free.pop(0)  # of a size that nobody asks for any more


LEAST = 1 << 20  # bytes of a slot. All are powers of two, so that batches fit into each other's; unused pages are free
SMALL = 4 << 10  # bytes up to which an array travels in the message itself
ALIGNMENT = 64
# Each slot holds a file descriptor on either side. Batches beyond these that the caller hoards are copied out.
MOST_BLOCKS = 64

Array = npt.NDArray[Any]
Visit = Callable[[Array, "torch.dtype | None"], Any]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Where an array lies: in a slot, or (``slot`` None) in ``data``. ``order`` is its axes by descending stride."""

    slot: int | None
    offset: int
    data: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # in the order of ``order``
    order: tuple[int, ...]
    tensor: torch.dtype | None  # None for a numpy array


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch on its way: the tree with leaves in the place of arrays, and the slots it lies in."""

    tree: Any
    slots: tuple[int, ...]
    new: tuple[tuple[int, int], ...]  # (slot, size) whose descriptors follow the message


class ArenaWriter:
    """The child's side. Thread-safe.

    Each slot in use has claims: one while arrays of this side lie in it, one while it is with the other side.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: list[mmap.mmap] = []
        self._starts: list[int] = []
        self._claims: list[int] = []
        self._dropped: deque[int] = deque()  # claims that ended; a garbage collection may add to it anywhere, unlocked
        self._new: dict[int, tuple[int, int]] = {}  # slot: (size, descriptor), until it is sent

    def allocate(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A uint8 array in a slot of its own, or outside of them if it is small."""
        size = int(np.prod(shape))
        if size <= SMALL:
            return np.empty(shape, np.uint8)
        slot = self._take(size)
        array: npt.NDArray[np.uint8] = np.frombuffer(
            _watched(self._maps[slot], self._dropped.append, slot), np.uint8, size
        ).reshape(shape)
        return array

    def release(self, slots: Iterable[int]) -> None:
        """Hear which slots the other side needs no more."""
        self._dropped.extend(slots)

    def wrap(self, tree: Any) -> PackedBatch:
        """Describe a batch, copying into a slot what does not lie in one yet and is not small."""
        outside: list[Array] = []
        _walk(tree, lambda array, _: outside.append(array) if self._moves(array) else None)
        slot = self._take(sum(array.nbytes + ALIGNMENT for array in outside)) if outside else None
        used: set[int] = set() if slot is None else {slot}
        position = 0

        def place(array: Array, tensor: torch.dtype | None) -> _Leaf:
            nonlocal position
            order = tuple(int(axis) for axis in np.argsort([-stride for stride in array.strides], kind="stable"))
            flat = array.transpose(order)
            if array.nbytes <= SMALL:
                return _Leaf(None, 0, flat.tobytes(), array.dtype, flat.shape, order, tensor)
            own = self._slot_of(array)
            if own is not None:
                used.add(own)
                offset = _address(array) - self._starts[own]
                return _Leaf(own, offset, b"", array.dtype, flat.shape, order, tensor)
            if slot is None:
                raise RuntimeError("the batch changed while it was sent: a batch transform's thread still writes to it")
            offset, position = position, position + -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            np.frombuffer(self._maps[slot], array.dtype, array.size, offset).reshape(flat.shape)[...] = flat
            return _Leaf(slot, offset, b"", array.dtype, flat.shape, order, tensor)

        wrapped = _walk(tree, place)
        with self._lock:
            for own in used - {slot}:
                self._claims[own] += 1  # the parcel's, beside that of the arrays here
            new = tuple((number, size) for number, (size, _) in self._new.items())
        return PackedBatch(wrapped, tuple(used), new)

    def descriptor(self, slot: int) -> int:
        """The file descriptor of a new slot, to be sent once and closed by the caller."""
        with self._lock:
            return self._new.pop(slot)[1]

    def _moves(self, array: Array) -> bool:
        return array.nbytes > SMALL and self._slot_of(array) is None

    def _slot_of(self, array: Array) -> int | None:
        """The slot that a gapless array lies in, None for memory of another kind."""
        address = _address(array)
        for slot, start in enumerate(self._starts):
            if start <= address < start + len(self._maps[slot]):
                gapless = array.transpose(np.argsort([-stride for stride in array.strides], kind="stable"))
                return slot if gapless.flags.c_contiguous else None
        return None

    def _take(self, size: int) -> int:
        """A free slot, with one claim on it."""
        with self._lock:
            while self._dropped:
                self._claims[self._dropped.popleft()] -= 1
            fitting = [slot for slot, claims in enumerate(self._claims) if not claims and len(self._maps[slot]) >= size]
            if fitting:
                slot = min(fitting, key=lambda slot: len(self._maps[slot]))
                self._claims[slot] = 1
                return slot
            rounded = max(LEAST, 1 << (size - 1).bit_length())
            descriptor = nameless_file()
            os.ftruncate(descriptor, rounded)
            mapped = mmap.mmap(descriptor, rounded)
            slot = len(self._maps)
            self._maps.append(mapped)
            self._claims.append(1)
            self._new[slot] = (rounded, descriptor)
            self._starts.append(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
            return slot


class ArenaReader:
    """The parent's side. Used by one thread; slots may be given back in any."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._freed: deque[int] = deque()

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
            taken.append(self._freed.popleft())
        return taken

    def unwrap(self, parcel: PackedBatch) -> Any:
        """The batch: tensors and arrays that lie in the slots, writable, the user's own until dropped."""
        views = {slot: _watched(self._maps[slot], self._freed.append, slot) for slot in parcel.slots}

        def restore(leaf: _Leaf) -> Any:
            count = int(np.prod(leaf.shape))
            if leaf.slot is None:
                flat = np.frombuffer(bytearray(leaf.data), leaf.dtype, count)
            else:
                flat = np.frombuffer(views[leaf.slot], leaf.dtype, count, leaf.offset)
                if leaf.slot >= MOST_BLOCKS:
                    flat = flat.copy()
            array = flat.reshape(leaf.shape).transpose(np.argsort(leaf.order))
            return array if leaf.tensor is None else _tensor(array, leaf.tensor)

        return _unwalk(parcel.tree, restore)


def _watched(mapped: mmap.mmap, when_gone: Callable[[int], None], slot: int) -> memoryview:
    """A view of a slot that says when nothing refers to it any more.

    numpy arrays forget which array they were cut from, but not whose buffer they lie in: a ctypes array is such an
    owner, and unlike an mmap can be watched.
    """
    holder = (ctypes.c_ubyte * len(mapped)).from_buffer(mapped)
    weakref.finalize(holder, when_gone, slot).atexit = False
    return memoryview(holder)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _walk(tree: Any, visit: Visit) -> Any:
    """A copy of nested dicts, lists and tuples with ``visit(array, dtype of the tensor)`` for arrays and tensors."""
    if isinstance(tree, torch.Tensor):
        return visit(_array(tree), tree.dtype)
    if isinstance(tree, np.ndarray) and not tree.dtype.hasobject:
        return visit(np.asarray(tree), None)
    return _rebuilt(tree, lambda value: _walk(value, visit))


def _unwalk(tree: Any, restore: Callable[[_Leaf], Any]) -> Any:
    if isinstance(tree, _Leaf):
        return restore(tree)
    return _rebuilt(tree, lambda value: _unwalk(value, restore))


def _rebuilt(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: change(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(change, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(change, tree))
    return tree


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _array(tensor: torch.Tensor) -> Array:
    """A tensor's memory; numbers that numpy lacks, as bfloat16, as integers of the same bits."""
    tensor = tensor.detach()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_BITS[tensor.element_size()]).numpy()


def _tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def nameless_file() -> int:
    """The descriptor of an empty file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("packfmt", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # other POSIX systems: an unlinked file
        return os.dup(file.fileno())
