"""Memory that pixels are written to over and over.

In huge pages where the system has them: a process that got small pages which happen to share cache sets decodes some
5 % slower for all its life, and each 4 KiB of new memory costs a fault.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

__all__ = ["GRAIN", "new_block"]

GRAIN = 2 << 20  # bytes of a huge page, which blocks are multiples of


def new_block(size: int) -> mmap.mmap:
    """Writable memory of at least ``size`` bytes, zero.

    Raises:
        OSError: the system has no more.
    """
    # Private: Python's default would share the block with forked children, which write to it too.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    block = mmap.mmap(-1, max(1, -(-size // GRAIN)) * GRAIN, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
