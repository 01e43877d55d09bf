"""What each process of ``test_accelerate`` runs: loaders that Accelerate prepares, and which samples they give.

python -m torch.distributed.run --nproc-per-node 2 tests/accelerate_program.py OUT PACK
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import packfmt

BATCH = 8
EPOCHS = 2
SPLITS: dict[str, dict[str, Any]] = {
    "default": {},
    "split_batches": {"split_batches": True},
    "dispatch_batches": {"dispatch_batches": True},
    "dispatch_batches, split_batches": {"dispatch_batches": True, "split_batches": True},
    "uneven": {"even_batches": False},
    "no dispatch": {"dispatch_batches": False},
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "fork": {"num_workers": 1, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}


def numbers_of(loader: Any) -> list[list[list[int]]]:
    """The samples of each batch, for some epochs."""
    return [[targets.tolist() for _, targets in loader] for _ in range(EPOCHS)]


def look_at(pack: str) -> dict[str, Any]:
    dataset = packfmt.ImageDataset(pack, crop=packfmt.Resize(8), threads=1)
    found: dict[str, Any] = {}

    def prepared(loader: Any, split: str) -> Any:
        return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**SPLITS[split])).prepare(loader)

    for split in SPLITS:
        sampler = packfmt.BlockBatchSampler(dataset, BATCH)
        length = len(sampler)  # as for a schedule
        loader = prepared(DataLoader(dataset, batch_sampler=sampler), split)
        found[f"sampler, {split}"] = numbers_of(loader)
        found[f"length, {split}"] = [length, len(loader)]
    for workers, options in WORKERS.items():
        for split in ("default", "no dispatch"):
            stream = packfmt.ImageStream(packfmt.open(pack), crop=packfmt.Resize(8), threads=1)
            loader = prepared(DataLoader(stream, batch_size=BATCH, **options), split)
            found[f"stream, {split}, {workers}"] = numbers_of(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = Accelerator(cpu=True)
        given = packfmt.BlockBatchSampler(dataset, BATCH, rank=state.process_index, world_size=state.num_processes)
        list(prepared(DataLoader(dataset, batch_sampler=given), "default"))
    found["warnings"] = [str(each.message) for each in caught if "splits over the ranks" in str(each.message)]
    found["not prepared"] = numbers_of(DataLoader(dataset, batch_sampler=packfmt.BlockBatchSampler(dataset, BATCH)))
    return found


def main() -> None:
    out, pack = sys.argv[1:]
    state = Accelerator(cpu=True)
    Path(out, f"{state.process_index}.json").write_text(json.dumps(look_at(pack)))
    state.wait_for_everyone()
    state.end_training()


if __name__ == "__main__":
    main()
