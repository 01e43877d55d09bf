"""Which part of a global batch is whose: ranks, and how a batch is split over them."""

from __future__ import annotations

import operator
import os
import sys
import warnings
from multiprocessing.context import get_spawning_popen

import numpy as np
import numpy.typing as npt

__all__ = ["Indices", "Ranks", "on_one_machine", "share", "split_by", "warn_user", "whole_number"]

Indices = npt.NDArray[np.int64]

# Modules and classes in them that split what they are given over the ranks: Accelerate's, and torch's with its kin.
SPLITTERS = (
    ("accelerate.data_loader", "BatchSamplerShard"),
    ("accelerate.data_loader", "IterableDatasetShard"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
    ("torch.utils.data.distributed", "DistributedSampler"),
)
LIBRARIES = ("packfmt", "torch", "accelerate")  # whose callers a warning is for


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


class Ranks:
    """The rank and the number of ranks that a sampler or stream is for.

    Given ones are taken as they are. Where neither is given they are those of ``torch.distributed`` (looked for among
    the loaded modules and never imported) at the moment they are asked for, and 0 of 1 while that is not up: a sampler
    may be made before the processes are, as in a script for Lightning.

    They are 0 of 1 from the moment on that somebody else is seen to deal the batches out over the ranks, which
    ``split_by`` looks for. Where others are given, a warning says so, since each rank would get a part of its part.

    Pickled for a process that starts, it takes along what it found: a DataLoader worker has no process group.

    Args:
        rank: or None.
        world_size: or None.

    Raises:
        ValueError: only one of the two is given, or the rank is not below the world size.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        self._given: tuple[int, int] | None = None
        self._inherited: tuple[int, int] | None = None
        self._elsewhere = self._warned = False
        if rank is None and world_size is None:
            return
        if rank is None and world_size == 1:
            rank = 0
        if rank is None or world_size is None:
            raise ValueError(f"rank and world_size go together, got rank={rank!r} and world_size={world_size!r}")
        world_size = whole_number("world_size", world_size, 1)
        self._given = whole_number("rank", rank, 0, world_size - 1), world_size

    @property
    def of_process(self) -> tuple[int, int]:
        """This process's, also where somebody else deals the batches out."""
        return self._given or process_ranks() or self._inherited or (0, 1)

    def now(self, what: str | None = None) -> tuple[int, int]:
        """The rank, and the number of ranks.

        Args:
            what: that is about to be used, such as a sampler, for the warning where a launcher has announced several
                processes but the process group is not up yet; None does not warn.
        """
        if what is not None and self._given is None and not self._warned and self.of_process == (0, 1):
            announced = os.environ.get("WORLD_SIZE", "1")
            if announced.isdecimal() and int(announced) > 1 and process_ranks() is None:
                self._warned = True
                warn_user(
                    f"WORLD_SIZE is {announced} but torch.distributed is not initialised, so every rank gets all "
                    f"samples; use the {what} after init_process_group, or pass rank= and world_size="
                )
        return (0, 1) if self._elsewhere else self.of_process

    def heed_splitters(self, what: str) -> None:
        """Look whether somebody else deals out over the ranks what is being asked for; called where it is."""
        if self._elsewhere or self._warned or self.of_process[1] == 1:
            return
        splitter = split_by()
        if splitter is None:
            return
        if self._given is None:
            self._elsewhere = True
            return
        self._warned = True
        rank, world_size = self._given
        warn_user(
            f"{splitter} splits over the ranks what this {what} has split already, for rank={rank} of world_size="
            f"{world_size}: each rank gets a part of its part, and the rest is lost. Leave rank and world_size out, "
            "or pass rank=0, world_size=1"
        )

    def __getstate__(self) -> dict[str, object]:
        if get_spawning_popen() is None:
            return self.__dict__
        self.heed_splitters("stream")
        return self.__dict__ | {"_inherited": process_ranks() or self._inherited}


def process_ranks() -> tuple[int, int] | None:
    """The rank and the number of ranks of ``torch.distributed``; None where that is not up."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    return None


def split_by() -> str | None:
    """The class, if any, of an object that deals batches or samples out over ranks and has just asked for them.

    It is looked for among the callers: such objects wrap a sampler or a stream, and neither tell it so nor change it.
    """
    kinds = tuple(
        getattr(sys.modules[module], name) for module, name in SPLITTERS if hasattr(sys.modules.get(module), name)
    )
    frame = sys._getframe(1) if kinds else None
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), kinds):
            return type(frame.f_locals["self"]).__name__
        frame = frame.f_back
    return None


def warn_user(message: str) -> None:
    """A ``UserWarning`` at the first caller that is not of a library that asks for others."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


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
