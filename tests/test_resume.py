"""Going on where a run was cut: the sequence of samples continues exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader
from training_packs import CROP, FLIP, FORKS_BESIDE_THREADS, labels_of, make_pack, pixels_of

from packfmt import BlockBatchSampler, ImageDataset, Loader

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)

BATCHES = 6  # of an epoch


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"), 46)


def loader_over(pack: str, batch_size: int = 8, *, threads: int = 2, **options: Any) -> Loader:
    return Loader(
        ImageDataset(pack, crop=CROP, flip=FLIP, threads=threads), batch_size, seed=5, start_method="fork", **options
    )


def endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return [next(batches) for _ in range(count)]


def same(left: list[Any], right: list[Any]) -> bool:
    return labels_of(left) == labels_of(right) and all(
        pixels_of([a]) == pixels_of([b]) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("cut", range(2 * BATCHES + 1))
def test_cut_at_every_batch(pack: str, cut: int) -> None:
    expected = take(endless(loader_over(pack)), cut + BATCHES + 2)
    before = loader_over(pack)
    running = endless(before)
    assert same(take(running, cut), expected[:cut])
    state = json.loads(json.dumps(before.state_dict()))
    after = loader_over(pack, threads=3)
    after.load_state_dict(state)
    assert same(take(endless(after), BATCHES + 2), expected[cut:])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_workers_made_ahead_is_not_counted(pack: str, workers: int) -> None:
    expected = take(endless(loader_over(pack)), 9)
    with loader_over(pack, workers=workers) as before:
        running = endless(before)
        take(running, 2)
        state = before.state_dict()
        running.close()
    assert state["position"] == 2
    with loader_over(pack, workers=3 - workers) as after:
        after.load_state_dict(state)
        assert same(take(endless(after), 7), expected[2:])


@pytest.mark.parametrize("cut", [1, 5, 6, 8])
def test_with_another_number_of_ranks(pack: str, cut: int) -> None:
    whole = [sorted(batch) for batch in labels_of(take(endless(loader_over(pack)), cut + 7))]
    before = loader_over(pack, 4, rank=1, world_size=2)
    take(endless(before), cut)
    after = [loader_over(pack, 2, rank=rank, world_size=4) for rank in range(4)]
    for loader in after:
        loader.load_state_dict(before.state_dict())
    parts = zip(*(labels_of(take(endless(loader), 7)) for loader in after), strict=True)
    assert [sorted(label for part in batch for label in part) for batch in parts] == whole[cut:]


def test_a_state_is_used_once(pack: str) -> None:
    reference, resumed = loader_over(pack), loader_over(pack)
    epochs = [labels_of(reference) for _ in range(3)]
    resumed.load_state_dict(resumed.sampler.state_dict(epoch=0, position=4))
    assert [labels_of(resumed) for _ in range(3)] == [epochs[0][4:], epochs[1], epochs[2]]


def test_setting_the_epoch_that_a_state_is_in_keeps_its_place(pack: str) -> None:
    reference, resumed = loader_over(pack), loader_over(pack)
    epochs = [labels_of(reference) for _ in range(3)]
    resumed.load_state_dict(resumed.sampler.state_dict(epoch=1, position=4))
    seen = []
    for epoch in range(1, 3):
        resumed.set_epoch(epoch)
        seen.append(labels_of(resumed))
    assert seen == [epochs[1][4:], epochs[2]]


def test_a_state_between_two_epochs(pack: str) -> None:
    reference = loader_over(pack)
    epochs = [labels_of(reference) for _ in range(2)]
    for count in (0, 1):
        stopped = loader_over(pack)
        for _, _ in zip(range(BATCHES), stopped, strict=True) if count else ():
            pass
        resumed = loader_over(pack)
        resumed.load_state_dict(stopped.state_dict())
        assert labels_of(resumed) == epochs[count]


def test_after_the_last_batch_comes_the_next_epoch_and_no_empty_one(pack: str) -> None:
    loader = loader_over(pack)
    batches = iter(loader)
    take(batches, BATCHES)
    state = loader.state_dict()  # the epoch's end has not been seen yet
    resumed = loader_over(pack)
    resumed.load_state_dict(state)
    assert len(labels_of(resumed)) == BATCHES
    assert (state["epoch"], state["position"]) == (1, 0)


def test_loading_while_an_iteration_is_under_way(pack: str) -> None:
    loader, reference = loader_over(pack), loader_over(pack)
    expected = labels_of(reference)
    state = loader.sampler.state_dict(epoch=0, position=3)
    batches = iter(loader)
    take(batches, 1)
    loader.load_state_dict(state)
    take(batches, 1)  # of no account any more
    assert loader.state_dict() == state
    assert labels_of(loader) == expected[3:]


def test_an_error_leaves_the_place_of_what_was_handed_out(pack: str, tmp_path: Any) -> None:
    bad = ImageDataset(make_pack(tmp_path, 12, broken=[9]), crop=CROP)
    loader = Loader(bad, 4, shuffle=False)
    with pytest.raises(Exception, match=r"009\.jpg"):
        list(loader)
    assert loader.state_dict()["position"] == 2


def test_a_state_of_another_order_is_refused(pack: str) -> None:
    loader = loader_over(pack)
    with pytest.raises(ValueError, match="seed"):
        loader.load_state_dict({**loader.state_dict(), "seed": 6})
    with pytest.raises(ValueError, match="global_batch"):
        loader.load_state_dict(loader_over(pack, 4).state_dict())
    assert len(labels_of(loader)) == BATCHES


def test_a_sampler_in_a_dataloader(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, flip=FLIP)
    expected = list(DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 8)))
    sampler = BlockBatchSampler(ds, 8)
    running = iter(DataLoader(ds, batch_sampler=sampler))
    assert same(take(running, 2), expected[:2])
    resumed = BlockBatchSampler(ds, 8)
    resumed.load_state_dict(sampler.state_dict())
    assert same(list(DataLoader(ds, batch_sampler=resumed)), expected[2:])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_dataloader(pack: str, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader() -> Any:
        ds = ImageDataset(pack, crop=CROP, flip=FLIP, threads=1)
        options = {"multiprocessing_context": "fork"} if workers else {}
        return stateful.StatefulDataLoader(
            ds, batch_sampler=BlockBatchSampler(ds, 8, seed=5), num_workers=workers, **options
        )

    expected = list(loader())
    first = loader()
    running = iter(first)
    assert same(take(running, 2), expected[:2])
    state = first.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert same(list(resumed), expected[2:])
