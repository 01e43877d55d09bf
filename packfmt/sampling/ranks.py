"""Which part of a global batch is whose: ranks, and how a batch is split over them."""

from __future__ import annotations

import operator
import os
import sys
import warnings

import numpy as np
import numpy.typing as npt

__all__ = ["Indices", "on_one_machine", "resolve_ranks", "share", "whole_number"]

Indices = npt.NDArray[np.int64]


def whole_number(name: str, value: object, low: int, high: int = 2**63 - 1) -> int:
    """``value`` as an int within ``low`` to ``high``.

    Raises:
        TypeError: it is no integer (a bool is none either).
        ValueError: it is out of range.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not low <= number <= high:
        upper = f"..{high}" if high < 2**63 - 1 else " or more"
        raise ValueError(f"{name} must be {low}{upper}, got {number}")
    return number


def resolve_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The rank and the number of ranks to sample for.

    Given ones are taken as they are. Where neither is given they come from ``torch.distributed`` if that is up (it is
    looked for among the loaded modules and never imported), and are 0 of 1 otherwise. Where a launcher has announced
    several processes but the process group is not up yet, a warning says so: each rank would see all samples.

    Raises:
        ValueError: only one of the two is given, or the rank is not below the world size.
    """
    if rank is None and world_size is None:
        return _ranks_of_process_group()
    if rank is None and world_size == 1:
        rank = 0
    if rank is None or world_size is None:
        raise ValueError(f"rank and world_size go together, got rank={rank!r} and world_size={world_size!r}")
    world_size = whole_number("world_size", world_size, 1)
    return whole_number("rank", rank, 0, world_size - 1), world_size


def _ranks_of_process_group() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdecimal() and int(announced) > 1:
        warnings.warn(
            f"WORLD_SIZE is {announced} but torch.distributed is not initialised, so every rank would get all samples; "
            "build the sampler after init_process_group, or pass rank= and world_size=",
            UserWarning,
            stacklevel=5,
        )
    return 0, 1


def on_one_machine(world_size: int) -> bool:
    """Whether all ranks run here: torchrun says how many do, and nobody else is believed."""
    return world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)


def share(rows: Indices, rank: int, world_size: int) -> Indices:
    """The rows of one rank: a contiguous part, sizes differing by one row at most.

    Where there are fewer rows than ranks the rows are dealt round, so that every rank gets one and none stays without
    a batch: a rank without one would leave the others waiting in their next collective call.

    Args:
        rows: (n, ...) the global batch, n >= 1.
        rank: 0 <= rank < world_size.
        world_size: number of ranks.

    Returns:
        (n // world_size or one more, ...); over all ranks every row once, and ``world_size - n`` rows twice or more
        where n < world_size.
    """
    count = len(rows)
    if count < world_size:
        row = rank % count
        return rows[row : row + 1]
    return rows[rank * count // world_size : (rank + 1) * count // world_size]
