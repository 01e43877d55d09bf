"""The ordered prefetch queue: what is slow is begun some items before it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

__all__ = ["prefetched"]

T = TypeVar("T")


def prefetched(
    begun: Iterator[T], depth: int, *, cancel: Callable[[T], object] | None = None
) -> Generator[tuple[T, deque[T]], None, None]:
    """Items in order, each drawn from its iterator, which begins it, ``depth`` items before it is given out.

    Args:
        begun: begins an item each time that it is asked.
        depth: items that are under way beyond the one given out, 0 or more.
        cancel: called with each item that is under way when nobody wants it any more: at ``close``, or an error.

    Yields:
        An item, and those under way behind it, which the caller may look at.
    """
    waiting: deque[T] = deque()
    try:
        for item in begun:
            waiting.append(item)
            if len(waiting) > depth:
                yield waiting.popleft(), waiting
        while waiting:
            yield waiting.popleft(), waiting
    finally:
        if cancel is not None:
            for item in waiting:
                cancel(item)
