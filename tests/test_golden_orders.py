"""Orders, crops, flips and states as they have been since they were written down: they are every user's training run.

python tests/test_golden_orders.py    writes down those that are not there yet, and changes none
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packfmt
from packfmt.images.geometry import HorizontalFlip, VerticalFlip
from packfmt.randomness import batch_rng, integers, sample_keys, sample_rng, sampling, uniform
from packfmt.sampling.order import BatchSampler

GOLDEN = Path(__file__).parent / "golden" / "orders.json"
COUNT = 1020
GROUPS = np.arange(COUNT) // 17
WEIGHTS = 1 + np.arange(COUNT) % 5

Sampler = Callable[..., BatchSampler]
SAMPLERS: dict[str, Sampler] = {
    "block": lambda **ranks: packfmt.BlockBatchSampler(COUNT, 8, block_size=16, window=4, seed=3, **ranks),
    "block, defaults": lambda **ranks: packfmt.BlockBatchSampler(COUNT, 8, **ranks),
    "block, not shuffled": lambda **ranks: packfmt.BlockBatchSampler(COUNT, 8, shuffle=False, **ranks),
    "block, indices": lambda **ranks: packfmt.BlockBatchSampler(
        COUNT, 8, block_size=8, window=4, indices=np.r_[0:400:3, 5, 5, 5], **ranks
    ),
    "block, weights": lambda **ranks: packfmt.BlockBatchSampler(
        COUNT, 8, block_size=8, window=4, weights=WEIGHTS, **ranks
    ),
    "group": lambda **ranks: packfmt.GroupBatchSampler(GROUPS, 4, seed=1, **ranks),
    "sequence": lambda **ranks: packfmt.SequenceSampler(COUNT, 2, length=5, seed=2, groups=GROUPS, **ranks),
    "sequence, steps": lambda **ranks: packfmt.SequenceSampler(COUNT, 2, length=3, seed=2, step=2, **ranks),
}
CROPS = {
    "RandomResizedCrop": packfmt.RandomResizedCrop(32),
    "RandomResizedCrop, narrow": packfmt.RandomResizedCrop((20, 30), scale=(0.01, 0.02), ratio=(3, 4)),
    "RandomCrop": packfmt.RandomCrop(24),
    "CenterCrop": packfmt.CenterCrop(24),
    "CenterCrop, resized": packfmt.CenterCrop(24, resize=32),
    "Resize": packfmt.Resize(24),
}


def digest(parts: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for part in parts:
        array = np.asarray(part)
        array = array.astype("<f8" if array.dtype.kind == "f" else "<u8" if array.dtype.kind == "u" else "<i8")
        found.update(f"{array.shape}{array.dtype}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:32]


def order_of(sampler: BatchSampler, epoch: int, start: int = 0) -> str:
    return digest(list(sampler.batches(epoch, start)))


def draws_of(sampler: BatchSampler) -> str:
    """As a dataset hears them: index, epoch, number of the draw, and whose random key."""
    return digest(
        [[int(i), i.epoch, i.draw, int(i) if i.source is None else i.source] for i in batch] for batch in sampler
    )


def found_orders() -> dict[str, str]:
    found = {}
    for name, make in SAMPLERS.items():
        for partial in ("keep", "drop", "pad"):
            found[f"{name}, {partial}"] = order_of(make(rank=0, world_size=1, partial=partial), 5)
            for rank in range(2):
                found[f"{name}, {partial}, rank {rank} of 2"] = order_of(
                    make(rank=rank, world_size=2, partial=partial), 5
                )
        sampler = make(rank=0, world_size=1)
        sampler.set_epoch(4)
        found[f"{name}, draws"] = draws_of(sampler)
        found[f"{name}, resumed"] = order_of(sampler, 5, len(sampler) // 3)
        state = sampler.state_dict(epoch=5, position=len(sampler) // 3)
        again = make(rank=0, world_size=1)
        again.load_state_dict(json.loads(json.dumps(state)))
        found[f"{name}, from a state"] = draws_of(again)
        found[f"{name}, state"] = digest([sorted(json.dumps(state, sort_keys=True).encode())])
    heights, widths = 30 + np.arange(200) % 91, 24 + np.arange(200) % 67
    keys = sample_keys(7, 2, np.arange(200))
    for name, crop in CROPS.items():
        found[f"crop, {name}"] = digest([crop.boxes(heights, widths, keys)])
    for name, flip in (("horizontal", HorizontalFlip(0.3)), ("vertical", VerticalFlip(0.6))):
        found[f"flip, {name}"] = digest([flip.flips(keys)])
    found["keys"] = digest([keys])
    found["uniform"] = digest([uniform(keys, (0, 5, 2000))])
    found["integers"] = digest([integers(keys, 3, -5, 1000)])
    found["batch_rng"] = digest([batch_rng(1, 2, 3).bit_generator.random_raw(8)])
    with sampling(keys[0]):
        found["sample_rng"] = digest([sample_rng().bit_generator.random_raw(8)])
    return found


FOUND = found_orders()
WRITTEN: dict[str, str] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_as_it_was(name: str) -> None:
    assert FOUND[name] == WRITTEN.get(name), f"{name} is another order than before, or was never written down"


def test_none_was_given_up() -> None:
    assert not WRITTEN.keys() - FOUND.keys()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(FOUND | WRITTEN, indent=0, sort_keys=True) + "\n")
