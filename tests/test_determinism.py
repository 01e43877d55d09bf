"""The same (seed, epoch, index) gives the same pixels, however they are come by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from training_packs import CROP, FLIP, FORKS_BESIDE_THREADS, add_noise, make_pack, pixels_of

from packfmt import BlockBatchSampler, ImageDataset, Loader

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)

SEED, EPOCH, BATCH = 11, 3, 7


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"), 36)


@pytest.fixture(scope="module")
def lmdb_pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"), 36, name="pack.lmdb")


def dataset(pack: str, **options: Any) -> ImageDataset:
    return ImageDataset(pack, **{"crop": CROP, "flip": FLIP, "transform": add_noise, "seed": SEED, **options})


@pytest.fixture(scope="module")
def expected(pack: str) -> dict[int, bytes]:
    """Label to pixels, one sample after the other in one thread."""
    ds = dataset(pack, threads=1)
    ds.set_epoch(EPOCH)
    return pixels_of([(image[None], torch.tensor([label])) for image, label in (ds[i] for i in range(len(ds)))])


def through_batches(pack: str) -> Any:
    ds = dataset(pack)
    ds.set_epoch(EPOCH)
    return [ds[list(range(start, start + 9))] for start in range(27, -1, -9)]


def through_loader(**options: Any) -> Callable[[str], Any]:
    def run(pack: str) -> Any:
        of_dataset = {name: options[name] for name in ("threads", "io") if name in options}
        of_loader = {name: value for name, value in options.items() if name not in of_dataset}
        with Loader(dataset(pack, **of_dataset), BATCH, start_method="fork", **of_loader) as loader:
            loader.set_epoch(EPOCH)
            return list(loader)

    return run


def through_ranks(pack: str) -> Any:
    batches = []
    for rank in range(3):
        loader = Loader(dataset(pack), 2, rank=rank, world_size=3)
        loader.set_epoch(EPOCH)
        batches += list(loader)
    return batches


def through_resumed(pack: str) -> Any:
    first, second = Loader(dataset(pack, threads=1), BATCH), Loader(dataset(pack, threads=3), BATCH)
    first.set_epoch(EPOCH)
    batches = iter(first)
    seen = [next(batches), next(batches)]
    second.load_state_dict(first.state_dict())
    return seen + list(second)


def through_dataloader(io: Any = "auto", **options: Any) -> Callable[[str], Any]:
    def run(pack: str) -> Any:
        ds = dataset(pack, io=io)
        sampler = BlockBatchSampler(ds, BATCH)
        sampler.set_epoch(EPOCH)
        return list(DataLoader(ds, batch_sampler=sampler, **options))

    return run


WAYS = {
    "batches": through_batches,
    "one thread": through_loader(threads=1),
    "three threads": through_loader(threads=3),
    "pread": through_loader(io="pread"),
    "one worker": through_loader(workers=1, threads=2),
    "three workers": through_loader(workers=3, threads=3),
    "three ranks": through_ranks,
    "resumed": through_resumed,
    "dataloader": through_dataloader(),
    "dataloader workers": through_dataloader(num_workers=2, multiprocessing_context="fork"),
    "pread in workers": through_dataloader(io="pread", num_workers=2, multiprocessing_context="fork"),
}


@pytest.mark.parametrize("way", WAYS)
def test_pixels(pack: str, expected: dict[int, bytes], way: str) -> None:
    assert pixels_of(WAYS[way](pack)) == expected


@pytest.mark.parametrize("way", ["batches", "three threads", "three workers", "dataloader workers"])
def test_pixels_from_lmdb(lmdb_pack: str, expected: dict[int, bytes], way: str) -> None:
    assert pixels_of(WAYS[way](lmdb_pack)) == expected


def test_seed_and_epoch_matter(pack: str, expected: dict[int, bytes]) -> None:
    other_epoch, other_seed = dataset(pack), dataset(pack, seed=SEED + 1)
    other_epoch.set_epoch(EPOCH + 1)
    other_seed.set_epoch(EPOCH)
    for ds in (other_epoch, other_seed):
        seen = pixels_of([ds[list(range(36))]])
        assert sum(seen[i] == expected[i] for i in range(36)) == 0
