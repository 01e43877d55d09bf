"""The same (seed, epoch, index) gives the same pixels, however they are come by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from make import jpeg
from torch.utils.data import DataLoader
from training_packs import CROP, FLIP, FORKS_BESIDE_THREADS, add_noise, labels_of, make_pack, pixels_of

import packfmt
from packfmt import BlockBatchSampler, ImageDataset, Loader, SequenceSampler
from packfmt.randomness import sample_keys

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


def noise(image: torch.Tensor) -> torch.Tensor:
    """The sample's key, as far as one can see it."""
    return torch.tensor(int(packfmt.sample_rng().integers(2**62)))


def seen_by_key(seed: int, epoch: int, sources: Any, draws: Any) -> list[int]:
    keys = sample_keys(seed, epoch, np.array(sources), np.array(draws))
    return [int(packfmt.randomness.generator(key).integers(2**62)) for key in keys]


def loader_of(ds: ImageDataset, sampler: Any, way: str) -> Any:
    if way.startswith("dataloader"):
        workers = int(way[-1])
        options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
        return DataLoader(ds, batch_sampler=sampler, num_workers=workers, **options)
    return Loader(ds, sampler=sampler, workers=int(way[-1]), start_method="fork")


MANY_DRAWS = {
    "weights": lambda ds: BlockBatchSampler(ds, 5, weights=np.arange(36) < 6, num_samples=60),
    "listed": lambda ds: BlockBatchSampler(ds, 5, indices=[1, 2, 3] * 9, partial="pad"),
    "clips": lambda ds: SequenceSampler(ds, 2, length=3, step=2, partial="pad"),
}
ways = pytest.mark.parametrize("way", ["loader 0", "loader 2", "dataloader 0", "dataloader 2"])


@ways
@pytest.mark.parametrize("kind", MANY_DRAWS)
def test_keys_are_those_of_the_samplers_draws(pack: str, kind: str, way: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=noise, seed=SEED)
    loader = loader_of(ds, MANY_DRAWS[kind](ds), way)
    for epoch in range(2):
        reference = MANY_DRAWS[kind](ds)
        reference.set_epoch(epoch)
        batches = list(reference)
        found = list(loader)
        assert labels_of(found) == batches
        for (numbers, _), batch in zip(found, batches, strict=True):
            sources = [int(i) if i.source is None else i.source for i in batch]
            assert numbers.tolist() == seen_by_key(SEED, epoch, sources, [i.draw for i in batch])
    if way == "loader 2":
        loader.close()


@ways
def test_draws_of_a_record_within_an_epoch_have_different_crops(pack: str, way: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=noise)
    loader = loader_of(ds, MANY_DRAWS["weights"](ds), way)
    numbers = [number for images, _ in loader for number in images.tolist()]
    assert len(set(numbers)) == len(numbers) == 60
    if way == "loader 2":
        loader.close()


@ways
def test_the_frames_of_a_clip_have_one_crop(way: str, tmp_path: Any) -> None:
    path = tmp_path / "film.bin"
    with packfmt.create(path) as writer:
        for frame in range(24):
            writer.write(jpeg(40, 60, seed=5), str(frame), label=frame)  # a film in which nothing moves
    ds = ImageDataset(path, crop=packfmt.RandomResizedCrop(16), flip=FLIP, transform=add_noise)
    loader = loader_of(ds, SequenceSampler(ds, 2, length=4), way)
    clips = [clip for images, _ in loader for clip in images.unflatten(0, (-1, 4))]
    for clip in clips:
        assert all(torch.equal(frame, clip[0]) for frame in clip)
    assert len({clip[0].contiguous().numpy().tobytes() for clip in clips}) == len(clips) == 6
    if way == "loader 2":
        loader.close()
