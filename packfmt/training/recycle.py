"""Memory for batches that is used again.

New memory costs a page fault for every 4 KiB when it is first written, a tenth of the time that small crops take to
decode; the allocator gives pieces of this size back to the system at once, so each batch would pay anew.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt

__all__ = ["Recycler"]

GRAIN = 1 << 20  # blocks are rounded up to this, so that batches of nearly equal size fit into each other's
KEPT = 8  # free blocks: a loader's look-ahead and what a loop holds


class Recycler:
    """Gives arrays whose memory comes back when the last array or tensor over it is dropped. Thread-safe.

    Pickles as nothing. After a fork each process has blocks of its own (copied on write), like all memory.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def __reduce__(self) -> tuple[type[Recycler], tuple[()]]:
        return (Recycler, ())

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
