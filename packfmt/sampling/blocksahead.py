"""Whole blocks, read ahead of the batches that take single records from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from packfmt.sampling.ranks import Indices
from packfmt.sampling.shuffle import BlockOrder

__all__ = ["NONE", "blocks_ahead"]

PACE = 4.0  # times the speed of the batches, at which a window is caught up on that was not read before its turn
NONE = np.empty(0, dtype=np.int64)


def blocks_ahead(order: BlockOrder, epoch: int, start: int, size: int) -> Iterator[Indices]:
    """For each batch from place ``start`` on, the blocks whose reading should begin before it; often none.

    While a window is in use the next one is read, in the order of the file and in step with the batches, so that no
    batch waits for it. A disk gives whole blocks many times faster than the single records of a batch where the number
    of its operations is limited, as that of spinning and of rented disks is. A window that nobody could read before its
    turn, the first one, is caught up on at ``PACE`` times the speed of the batches.

    Args:
        order: whose windows.
        epoch: 0 <= epoch < 2**63.
        start: 0 <= start <= order.count.
        size: places that a batch takes.

    Returns:
        (n,) int64 numbers of blocks for each batch, each block once.
    """
    waiting: deque[tuple[int, int]] = deque()  # (window, block)
    late = 0  # of them, in the window in use
    known = order.window_at(epoch, start) if start < order.count else 0  # the first window that is not among them
    stop = start  # of the window in use
    pace = PACE * size / order.block_size
    credit = 0.0
    while start < order.count:
        if start >= stop:
            window = order.window_at(epoch, start)
            stop = order.window_range(epoch, window)[1]
            for number in range(max(known, window), min(window + 2, order.windows)):
                waiting.extend((number, block) for block in order.blocks_of(epoch, number))
                known = number + 1
            while waiting and waiting[0][0] < window:
                waiting.popleft()
            late = sum(number == window for number, _ in waiting)
        due = 0
        if waiting:
            batches = max(1.0, (stop - start) / size)
            credit += pace if late > 0 else min(pace, len(waiting) / batches)
            due = min(int(credit), len(waiting))
            credit -= due
            late -= due
        yield np.array([waiting.popleft()[1] for _ in range(due)], dtype=np.int64) if due else NONE
        start += size
