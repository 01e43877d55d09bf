"""Train a small image classifier from a pack, on one device or several.

    packfmt pack photos/train train.bin
    packfmt pack photos/validation val.bin
    python examples/train.py train.bin --val val.bin
    torchrun --nproc-per-node 2 examples/train.py train.bin --val val.bin

Each epoch, and every ``--save-every`` steps, everything that is needed to go on is saved to ``--checkpoint``. With
``--resume`` the run goes on from there, in the middle of an epoch too, and ends with the weights it would have had
without the break.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import packfmt


class SmallNet(nn.Module):
    """Four convolutions and a classifier. Takes (N, 3, H, W) uint8 images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))

    def forward(self, images: Tensor) -> Tensor:
        # Normalised here, on the device: bytes are a quarter of what floats would be to copy there.
        return self.layers(images.float() / 128 - 1)


class Run:
    """Model, optimizer and loader, and how to save and load them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cpu")
        if args.cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        dataset = packfmt.ImageDataset(
            args.pack,
            crop=packfmt.RandomResizedCrop(args.size, scale=(0.5, 1.0)),
            flip=packfmt.HorizontalFlip(),
            threads=args.threads,
            seed=args.seed,
        )
        self.classes = dataset.classes
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if len(dataset) < args.batch_size * ranks:
            raise SystemExit(
                f"{args.pack} has {len(dataset)} images, which fill no batch of {args.batch_size} for each of {ranks} "
                "processes; give a smaller --batch-size"
            )
        # Ranks are taken from torch.distributed. "drop" keeps all batches full, so that ranks weigh alike.
        self.loader = packfmt.Loader(
            dataset, args.batch_size, seed=args.seed, partial="drop", workers=args.workers, device=self.device
        )
        torch.manual_seed(args.seed)
        self.model: nn.Module = SmallNet(len(dataset.classes)).to(self.device, memory_format=torch.channels_last)
        self.plain_model = self.model
        if dist.is_initialized():
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.totals = torch.zeros(3, dtype=torch.float64, device=self.device)  # of the epoch: loss, right, samples

    def save(self, path: str) -> None:
        """Write a checkpoint under a temporary name first: a run killed meanwhile still has the old one."""
        totals = summed(self.totals)
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        state = {
            "model": self.plain_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),  # counts what was trained on, not what was loaded ahead
            "totals": totals,
        }
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)

    def load(self, path: str) -> int:
        """Read a checkpoint; returns the epoch to go on with."""
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        self.plain_model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        # The totals of an epoch that is under way are sums over ranks, to be counted once.
        if state["loader"]["position"] and (not dist.is_initialized() or dist.get_rank() == 0):
            self.totals.copy_(state["totals"])
        return int(state["loader"]["epoch"])


def train_epoch(run: Run, args: argparse.Namespace) -> Tensor:
    """Train to the end of the epoch; returns sums over all ranks: loss, right answers, samples."""
    run.model.train()
    for step, (images, labels) in enumerate(run.loader, 1):
        logits = run.model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        run.totals += count(logits.detach(), labels)
        if args.save_every and step % args.save_every == 0:
            run.save(args.checkpoint)
    totals = summed(run.totals)
    run.totals.zero_()
    run.save(args.checkpoint)
    return totals


@torch.no_grad()
def evaluate(run: Run, args: argparse.Namespace) -> Tensor:
    """The same sums over the validation pack. Each rank looks at its part, and none at a sample of another's."""
    run.model.eval()
    dataset = packfmt.ImageDataset(
        args.val, crop=packfmt.CenterCrop(args.size, resize=round(args.size * 8 / 7)), threads=args.threads
    )
    if dataset.classes != run.classes:
        raise SystemExit(f"{args.val} has the classes {dataset.classes}, {args.pack} has {run.classes}")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sampler = packfmt.BlockBatchSampler(
        dataset, args.batch_size, shuffle=False, rank=0, world_size=1, indices=range(rank, len(dataset), ranks)
    )
    totals = torch.zeros_like(run.totals)
    with packfmt.Loader(dataset, sampler=sampler, device=run.device) as loader:
        for images, labels in loader:
            totals += count(run.plain_model(images), labels)
    dataset.close()
    return summed(totals)


def count(logits: Tensor, labels: Tensor) -> Tensor:
    """Of one batch: summed loss, right answers, samples."""
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    right = (logits.argmax(1) == labels).sum()
    return torch.stack([loss.double(), right.double(), loss.new_tensor(len(labels)).double()])


def summed(totals: Tensor) -> Tensor:
    """The sum over all ranks."""
    totals = totals.clone()
    if dist.is_initialized():
        dist.all_reduce(totals)
    return totals


def describe(name: str, totals: Tensor) -> str:
    loss, right, samples = totals.tolist()
    return f"{name} loss {loss / max(samples, 1):.4f} accuracy {right / max(samples, 1):.3f}"


def profile_table(stats: packfmt.LoaderStats) -> str:
    """Where the loader's time went, and what would help."""
    stages = ("read", "decode", "transform", "collate", "transfer", "wait", "consume")
    lines = [f"  {stage:10}{getattr(stats, stage):9.3f} s" for stage in stages]
    lines += [f"  slowest   {seconds:9.3f} s {key}" for seconds, key in stats.slowest[:3]]
    return "\n".join([*lines, f"  the loop waited {stats.waited:.0%} of the time: {stats.verdict}, {stats.advice}"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", help="the pack to train on, with labels")
    parser.add_argument("--val", help="a pack to validate on after each epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step on each rank")
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes to decode in; 0 decodes in threads")
    parser.add_argument("--threads", type=int, help="threads that decode (default: all cores)")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="save within epochs too")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint if it exists")
    parser.add_argument("--profile", action="store_true", help="say where the loading time went")
    args = parser.parse_args(arguments)
    args.cuda = torch.cuda.is_available()
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if "RANK" in os.environ:  # torchrun; before the loader is used, which asks for the ranks
        dist.init_process_group("nccl" if args.cuda else "gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    run = Run(args)
    start = 0
    if args.resume and os.path.exists(args.checkpoint):
        start = run.load(args.checkpoint)
    elif args.resume and first:
        print(f"there is no {args.checkpoint}: starting from the beginning")
    for epoch in range(start, args.epochs):
        text = describe("train", train_epoch(run, args))
        if args.val:
            text += "  " + describe("val", evaluate(run, args))
        if first:
            print(f"epoch {epoch + 1}: {text}", flush=True)
    if args.profile and first:
        print(profile_table(run.loader.stats()))
    run.loader.close()
    run.loader.dataset.close()
    if dist.is_initialized():
        del run  # DDP first: a group destroyed while it is still in use can abort the process at its exit
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
