"""What each rank of ``test_distributed`` runs: train on a pack, and write down what was seen.

    python -m torch.distributed.run --nproc-per-node 2 tests/ranks_program.py OUT PACK [PACK ...]

Run alone, it is the single process that the ranks are compared with: its batches are as large as theirs together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import packfmt

GLOBAL_BATCH = 8
EPOCHS = 2
MODES = ("keep", "drop", "pad")


def small_model() -> nn.Module:
    """The same in every process. In float64, so that only the order of sums differs between numbers of ranks."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)]
    return nn.Sequential(*layers).double()


def dataset_of(pack: str) -> packfmt.MMapImageDataset:
    return packfmt.MMapImageDataset(
        pack, crop=packfmt.RandomResizedCrop(16), flip=packfmt.HorizontalFlip(), fields=["label", "number"], threads=1
    )


def total(value: float) -> float:
    """The sum over the ranks."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def train(pack: str, partial: str, ranks: int) -> dict:
    """Numbers of the samples in each batch and the loss over all ranks, for each epoch."""
    dataset = dataset_of(pack)
    loader = packfmt.Loader(dataset, GLOBAL_BATCH // ranks, partial=partial, seed=2)
    model = small_model()
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches, losses = [], []
    state = None
    for _ in range(EPOCHS):
        for images, targets in loader:
            count = total(len(images))
            logits = model(images.double() / 255)
            loss = nn.functional.cross_entropy(logits, targets["label"] % 3, reduction="sum")
            optimizer.zero_grad()
            (loss * ranks / count).backward()  # the ranks' gradients are averaged
            optimizer.step()
            batches.append(targets["number"].tolist())
            losses.append(total(loss.item()) / count)
            state = state or loader.state_dict()
    found = {
        "rank": [loader.sampler.rank, loader.sampler.world_size],
        "length": len(loader),
        "repeated": loader.sampler.repeated,
        "batches": batches,
        "losses": losses,
        "state": state,
    }
    dataset.close()
    return found


def through_dataloader(pack: str, ranks: int) -> list[list[int]]:
    """Numbers of the samples in each batch of a plain DataLoader with packfmt's sampler."""
    dataset = dataset_of(pack)
    sampler = packfmt.BlockBatchSampler(dataset, GLOBAL_BATCH // ranks, seed=2)
    seen = [targets["number"].tolist() for _, targets in DataLoader(dataset, batch_sampler=sampler)]
    dataset.close()
    return seen


def short_tail(pack: str, ranks: int) -> list[int]:
    """Batch sizes where the last global batch has one sample."""
    dataset = dataset_of(pack)
    sampler = packfmt.BlockBatchSampler(dataset, GLOBAL_BATCH // ranks, indices=range(GLOBAL_BATCH + 1))
    sizes = [len(images) for images, _ in packfmt.Loader(dataset, sampler=sampler)]
    dataset.close()
    return sizes


def through_stream(pack: str, partial: str) -> list[int]:
    """Numbers of the samples that a stream over the pack gives."""
    with packfmt.open(pack) as reader:
        stream = packfmt.ImageStream(reader, fields="number", partial=partial, threads=1)
        return [number for _, number in stream]


def through_spawned_workers(pack: str) -> list[int]:
    """The same from DataLoader's workers, which have no process group."""
    with packfmt.open(pack) as reader:
        stream = packfmt.ImageStream(reader, crop=packfmt.Resize(8), fields="number", threads=1, partial="keep")
        loader = DataLoader(stream, batch_size=4, num_workers=1, multiprocessing_context="spawn")
        return [number for _, numbers in loader for number in numbers.tolist()]


def early_sampler(pack: str) -> packfmt.BlockBatchSampler:
    """One that is made before the process group is up."""
    return packfmt.BlockBatchSampler(dataset_of(pack), GLOBAL_BATCH // 2, seed=2)


def look_at(pack: str, ranks: int, early: packfmt.BlockBatchSampler | None = None) -> dict:
    found = {partial: train(pack, partial, ranks) for partial in MODES}
    found["dataloader"] = through_dataloader(pack, ranks)
    found["tail"] = short_tail(pack, ranks)
    found["stream"] = {partial: through_stream(pack, partial) for partial in ("keep", "drop")}
    if early is not None:
        found["early"] = list(early)
        found["spawned"] = through_spawned_workers(pack)
    return found


def main() -> None:
    out, *packs = sys.argv[1:]
    early = {packs[0]: early_sampler(packs[0])}
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    Path(out, f"{rank}.json").write_text(json.dumps([look_at(pack, ranks, early.get(pack)) for pack in packs]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
