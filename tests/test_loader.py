"""The loader: order, look-ahead, collation, epochs, errors."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from training_packs import (
    CROP,
    FLIP,
    FORKS_BESIDE_THREADS,
    Unlucky,
    add_rng,
    damage,
    decoding_threads,
    double,
    fail,
    labels_of,
    make_pack,
    open_descriptors,
)

import packfmt
from packfmt import BlockBatchSampler, CorruptError, DecodeError, ImageDataset, Loader

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)

WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def ds(pack: str) -> Iterator[ImageDataset]:
    with ImageDataset(pack, crop=CROP, flip=FLIP, threads=2) as dataset:
        yield dataset


@pytest.fixture(scope="module")
def bad_pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Records 9, 12, 13, 14 and 15 are no images, a byte of record 2 is changed."""
    path = make_pack(tmp_path_factory.mktemp("packs"), 22, broken=[9, 12, 13, 14, 15])
    damage(path, 2)
    return path


class Counted(ImageDataset):
    """Counts the batches begun and finished."""

    begun = 0
    ended = 0
    most = 0

    def start(self, *arguments: Any, **options: Any) -> Any:
        self.begun += 1
        self.most = max(self.most, self.begun - self.ended)
        return super().start(*arguments, **options)


# Order and look-ahead


@WORKERS
def test_batches_come_in_the_samplers_order(ds: ImageDataset, workers: int) -> None:
    sampler = BlockBatchSampler(ds, 7, seed=3)
    with Loader(ds, 7, seed=3, workers=workers, start_method="fork") as loader:
        for epoch in range(2):
            assert labels_of(loader) == [batch.tolist() for batch in sampler.batches(epoch)]
        assert len(loader) == 6


def test_images_are_one_channels_last_tensor_of_the_callers_own(ds: ImageDataset) -> None:
    batches = list(Loader(ds, 8, shuffle=False))
    for images, _ in batches:
        assert images.shape == (8, 3, 16, 16)
        assert images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
    kept = batches[0][0].clone()
    batches[1][0].zero_()
    assert torch.equal(batches[0][0], kept)
    assert torch.equal(kept, ds[list(range(8))][0] if ds.set_epoch(0) is None else kept)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_look_ahead_is_bounded(pack: str, prefetch: int) -> None:
    ds = Counted(pack, crop=CROP)
    for taken, _ in enumerate(Loader(ds, 4, prefetch=prefetch), 1):
        assert ds.begun == min(taken + prefetch, 10)


def test_batches_are_begun_before_they_are_asked_for(pack: str) -> None:
    ds = Counted(pack, crop=CROP)
    batches = iter(Loader(ds, 4, prefetch=2))
    assert ds.begun == 0
    next(batches)
    assert ds.begun == 3


def test_a_sampler_of_ones_own(ds: ImageDataset) -> None:
    sampler = packfmt.BlockBatchSampler(ds, 5, shuffle=False, indices=range(10, 22))
    loader = Loader(ds, sampler=sampler)
    assert labels_of(loader) == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19], [20, 21]]
    assert loader.sampler is sampler


def test_ranks_share_every_batch(ds: ImageDataset) -> None:
    whole = labels_of(Loader(ds, 8, seed=1))
    ranks = [labels_of(Loader(ds, 4, seed=1, rank=rank, world_size=2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(batch) for batch in whole]


@WORKERS
def test_less_data_than_a_batch(pack: str, tmp_path: Any, workers: int) -> None:
    few = ImageDataset(make_pack(tmp_path, 3), crop=CROP)
    with Loader(few, 8, shuffle=False, workers=workers, start_method="fork") as loader:
        assert labels_of(loader) == [[0, 1, 2]]
    none = ImageDataset(make_pack(tmp_path, 0, name="none.bin"), crop=CROP)
    with Loader(none, 8, workers=workers, start_method="fork") as loader:
        assert len(loader) == 0
        assert list(loader) == []
        assert list(loader) == []


def test_more_ranks_than_batches(tmp_path: Any) -> None:
    few = ImageDataset(make_pack(tmp_path, 3), crop=CROP)
    seen = [labels_of(Loader(few, 2, shuffle=False, rank=rank, world_size=8)) for rank in range(8)]
    assert all(len(batches) == 1 for batches in seen)
    assert {label for batches in seen for label in batches[0]} == {0, 1, 2}


# Collation


@WORKERS
@pytest.mark.parametrize("collate", ["stack", "list", "pad"])
def test_collation(pack: str, workers: int, collate: Any) -> None:
    ds = ImageDataset(pack, crop=CROP if collate == "stack" else None)
    plain = [ImageDataset(pack, crop=ds._pipeline.crop)[i][0] for i in range(3)]
    with Loader(ds, 3, shuffle=False, collate=collate, workers=workers, start_method="fork") as loader:
        images, labels = next(iter(loader))
    assert labels.tolist() == [0, 1, 2]
    for image, expected in zip(images, plain, strict=True):
        cut = image[:, : expected.shape[1], : expected.shape[2]]
        assert torch.equal(cut, expected)
    assert (type(images) is list) == (collate == "list")


@WORKERS
def test_several_fields(pack: str, workers: int) -> None:
    ds = ImageDataset(pack, crop=packfmt.Resize(16), fields=["key", "score", "boxes"])
    with Loader(ds, 3, shuffle=False, workers=workers, start_method="fork") as loader:
        _, targets = next(iter(loader))
    assert targets["key"] == ["000.jpg", "001.jpg", "002.jpg"]
    assert targets["score"].dtype == torch.float32
    assert [tuple(boxes.shape) for boxes in targets["boxes"]] == [(0, 4), (1, 4), (2, 4)]


def test_numpy_and_pil(pack: str) -> None:
    images, _ = next(iter(Loader(ImageDataset(pack, crop=CROP, output="numpy"), 3)))
    assert type(images) is np.ndarray
    assert images.shape == (3, 16, 16, 3)
    images, _ = next(iter(Loader(ImageDataset(pack, crop=CROP, output="pil"), 3, collate="list")))
    assert images[0].size == (16, 16)


@WORKERS
def test_a_batch_transform(ds: ImageDataset, workers: int) -> None:
    with Loader(ds, 4, shuffle=False, batch_transform=double, workers=workers, start_method="fork") as loader:
        assert labels_of(loader)[1] == [8, 10, 12, 14]


def test_a_batch_transforms_generator_is_keyed_by_epoch_batch_and_rank(ds: ImageDataset) -> None:
    def draws(workers: int = 0, **options: Any) -> list[list[int]]:
        options = {"shuffle": False, "batch_transform": add_rng, "start_method": "fork", **options}
        with Loader(ds, 4, workers=workers, **options) as loader:
            return [[batch[0] // 1000 for batch in labels_of(loader)] for _ in range(2)]

    first = draws()
    assert draws(2) == first
    seen = [draw for rank in range(2) for epoch in draws(rank=rank, world_size=2) for draw in epoch]
    assert len(set(seen)) == len(seen) == 20


def test_a_third_parameter_with_a_default_is_left_to_it(ds: ImageDataset) -> None:
    def shift(images: Any, labels: Any, by: int = 100) -> Any:
        return images, labels + by

    def named(images: Any, labels: Any, rng: Any = None) -> Any:
        return images, labels * 0 + (rng is not None)

    assert labels_of(Loader(ds, 4, shuffle=False, batch_transform=shift))[0] == [100, 101, 102, 103]
    assert labels_of(Loader(ds, 4, batch_transform=named))[0] == [1, 1, 1, 1]


def test_mixing(ds: ImageDataset) -> None:
    mix = packfmt.MixUp(num_classes=40)
    images, labels = next(iter(Loader(ds, 4, batch_transform=mix)))
    assert images.shape == (4, 3, 16, 16)
    assert labels.shape == (4, 40)


# Epochs


def test_every_iteration_is_the_next_epoch(ds: ImageDataset) -> None:
    sampler = BlockBatchSampler(ds, 8, seed=0)
    expected = [[batch.tolist() for batch in sampler.batches(epoch)] for epoch in range(6)]
    loader = Loader(ds, 8)
    assert labels_of(loader) == expected[0]
    assert labels_of(loader) == expected[1]
    loader.set_epoch(0)
    assert labels_of(loader) == expected[0]
    loader.set_epoch(5)
    assert labels_of(loader) == expected[5]


def test_setting_the_epoch_every_time(ds: ImageDataset) -> None:
    loader, counting = Loader(ds, 8), Loader(ds, 8)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert labels_of(loader) == labels_of(counting)
    loader.set_epoch(1)
    first = labels_of(loader)
    loader.set_epoch(1)
    assert labels_of(loader) == first


def test_a_sampler_may_be_told_the_epoch_instead(ds: ImageDataset) -> None:
    loader, other = Loader(ds, 8), Loader(ds, 8)
    loader.sampler.set_epoch(4)
    other.set_epoch(4)
    assert loader.state_dict() == other.state_dict()
    assert labels_of(loader) == labels_of(other)
    assert labels_of(loader) == labels_of(other)


def test_a_sampler_may_be_told_the_same_again(ds: ImageDataset) -> None:
    loader = Loader(ds, 8)
    passes = []
    for _ in range(2):
        loader.sampler.set_epoch(0)
        passes.append(labels_of(loader))
    assert passes[0] == passes[1] == labels_of(Loader(ds, 8))
    state = loader.sampler.state_dict(epoch=1, position=2)
    for _ in range(2):
        loader.sampler.load_state_dict(state)
        assert len(list(loader)) == len(loader) - 2


def test_a_copy_of_a_loader_has_processes_of_its_own(ds: ImageDataset) -> None:
    with Loader(ds, 8, workers=1, start_method="fork") as loader:
        batches = iter(loader)
        first = next(batches)[1].tolist()
        with copy.deepcopy(loader) as other:
            assert labels_of(other)[0] != first  # the next epoch
        assert len(list(batches)) == len(loader) - 1


@pytest.mark.parametrize("sampler", [[[0, 1], [2, 3]], torch.utils.data.SequentialSampler(range(4))], ids=repr)
def test_samplers_of_another_kind_are_refused(ds: ImageDataset, sampler: Any) -> None:
    with pytest.raises(TypeError, match=type(sampler).__name__):
        Loader(ds, sampler=sampler)


@WORKERS
def test_leaving_early_and_beginning_anew(ds: ImageDataset, workers: int) -> None:
    expected = [labels_of(Loader(ds, 4)) for _ in range(1)]
    reference = Loader(ds, 4)
    with Loader(ds, 4, workers=workers, start_method="fork") as loader:
        for number, (_, labels) in enumerate(loader):
            assert labels.tolist() == expected[0][number]
            if number == 2:
                break
        reference.set_epoch(1)
        assert labels_of(loader) == labels_of(reference)
        next(iter(loader))
        reference.set_epoch(3)
        assert labels_of(loader) == labels_of(reference)


@WORKERS
def test_two_iterations_at_once(ds: ImageDataset, workers: int) -> None:
    reference = Loader(ds, 4)
    expected = [labels_of(reference), labels_of(reference)]
    with Loader(ds, 4, workers=workers, start_method="fork") as loader:
        first, second = iter(loader), iter(loader)
        pairs = list(zip(labels_of_each(first), labels_of_each(second), strict=True))
        assert [pair[0] for pair in pairs] == expected[0]
        assert [pair[1] for pair in pairs] == expected[1]
        loader.set_epoch(0)
        assert labels_of(loader) == expected[0]


def labels_of_each(batches: Iterator[Any]) -> Iterator[list[int]]:
    return (labels.tolist() for _, labels in batches)


# Errors


def test_options_are_checked(ds: ImageDataset) -> None:
    sampler = BlockBatchSampler(40, 4)
    for options, message in (
        ({}, "batch_size or a sampler"),
        ({"batch_size": 4, "sampler": sampler}, "batch_size or a sampler"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 4, "collate": "cat"}, "'stack', 'list' and 'pad'"),
        ({"batch_size": 4, "workers": -1}, "workers=-1"),
        ({"batch_size": 4, "prefetch": 0}, "prefetch=0"),
    ):
        with pytest.raises(ValueError, match=message):
            Loader(ds, **options)  # type: ignore[arg-type]


@WORKERS
def test_a_damaged_image_stops_the_iteration_in_its_place(bad_pack: str, workers: int) -> None:
    before, processes = decoding_threads(), children()
    ds = ImageDataset(bad_pack, crop=CROP, threads=2)
    with Loader(ds, 4, shuffle=False, workers=workers, start_method="fork") as loader:
        with pytest.raises(CorruptError) as corrupt:
            list(loader)
        assert (corrupt.value.path, corrupt.value.index, corrupt.value.key) == (bad_pack, 2, "002.jpg")

        loader.sampler.load_state_dict(loader.sampler.state_dict(epoch=1, position=1))
        batches = iter(loader)
        assert next(batches)[1].tolist() == [4, 5, 6, 7]
        with pytest.raises(DecodeError) as broken:
            next(batches)
        assert (broken.value.path, broken.value.index, broken.value.key) == (bad_pack, 9, "009.jpg")

        loader.load_state_dict(loader.sampler.state_dict(epoch=1, position=4))
        assert labels_of(loader) == [[16, 17, 18, 19], [20, 21]]
    ds.close()
    assert decoding_threads() <= before
    assert children() <= processes


@WORKERS
def test_skipping(bad_pack: str, workers: int) -> None:
    ds = ImageDataset(bad_pack, crop=CROP, on_error="skip")
    with Loader(ds, 4, shuffle=False, workers=workers, start_method="fork") as loader:
        assert labels_of(loader) == [[0, 1, 3], [4, 5, 6, 7], [8, 10, 11], [16, 17, 18, 19], [20, 21]]
        stats = loader.stats()
        assert stats.skipped == 6
        assert stats.skipped_keys == ("002.jpg", "009.jpg", "012.jpg", "013.jpg", "014.jpg", "015.jpg")
        assert (stats.batches, stats.samples) == (6, 16)
        assert labels_of(loader)[3] == [16, 17, 18, 19]


def test_a_batch_that_is_passed_over_counts_as_done(bad_pack: str) -> None:
    ds = ImageDataset(bad_pack, crop=CROP, on_error="skip")
    loader, other = Loader(ds, 4, shuffle=False), Loader(ds, 4, shuffle=False)
    batches = iter(loader)
    for _ in range(4):
        _, labels = next(batches)
    assert labels.tolist() == [16, 17, 18, 19]
    other.load_state_dict(loader.state_dict())
    assert labels_of(other) == [[20, 21]]


def test_a_rank_does_not_pass_over_batches(bad_pack: str) -> None:
    ds = ImageDataset(bad_pack, crop=CROP, on_error="skip")
    loader = Loader(ds, 4, shuffle=False, rank=1, world_size=2)  # batches 4-7, 12-15, 19-21
    with pytest.raises(DecodeError, match=r"012\.jpg"):
        list(loader)


def test_an_epoch_of_nothing_but_errors_is_an_error(tmp_path: Any) -> None:
    ds = ImageDataset(make_pack(tmp_path, 6, broken=range(6)), crop=CROP, on_error="skip")
    with pytest.raises(DecodeError, match=r"000\.jpg"):
        list(Loader(ds, 2, shuffle=False))


def test_a_batch_transform_never_sees_an_empty_batch(bad_pack: str) -> None:
    ds = ImageDataset(bad_pack, crop=CROP, on_error="skip")

    def first_label(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, labels[:1]

    def label_zero(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, labels[0]

    assert labels_of(Loader(ds, 4, shuffle=False, batch_transform=first_label)) == [[0], [4], [8], [16], [20]]
    assert labels_of(Loader(ds, 4, shuffle=False, batch_transform=label_zero)) == [0, 4, 8, 16, 20]


@WORKERS
def test_an_error_of_a_transform_is_the_users_own(pack: str, workers: int) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=fail, threads=2)
    with Loader(ds, 4, shuffle=False, workers=workers, start_method="fork") as loader:
        with pytest.raises(Unlucky, match="out of luck") as caught:
            list(loader)
        assert caught.value.code == 7
        notes = "\n".join(caught.value.__notes__)
        assert "record 0, key '000.jpg'" in notes
        assert "in fail" in notes or workers == 0
        with pytest.raises(Unlucky):  # the next epoch, with the same workers
            list(loader)


@WORKERS
def test_an_error_of_a_batch_transform(ds: ImageDataset, workers: int) -> None:
    def broken(images: Any, labels: Any) -> Any:
        raise Unlucky("no mixing", 3)

    loader = Loader(ds, 4, batch_transform=broken, workers=workers, start_method="fork")
    with loader, pytest.raises(Unlucky, match="no mixing"):
        list(loader)


def test_differing_shapes_say_what_to_do(pack: str) -> None:
    with pytest.raises(ValueError, match="crop"):
        list(Loader(ImageDataset(pack), 4))


def test_a_closed_dataset(pack: str) -> None:
    before = decoding_threads()
    ds = ImageDataset(pack, crop=CROP)
    loader = Loader(ds, 4)
    list(loader)
    ds.close()
    with pytest.raises(ValueError, match="closed"):
        list(loader)
    assert decoding_threads() <= before


def test_an_iteration_does_not_go_on_in_a_fork(ds: ImageDataset) -> None:
    loader = Loader(ds, 4)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if not child:
        try:
            next(batches)
        except RuntimeError:
            os._exit(0 if len(list(loader)) == 10 else 3)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(batches)) == 9


# What it leaves behind


def children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE}


def test_descriptors_and_threads_do_not_grow_over_epochs(ds: ImageDataset) -> None:
    loader = Loader(ds, 4)
    list(loader)
    before = open_descriptors(), decoding_threads()
    for _ in range(5):
        list(loader)
        next(iter(loader))
    # Not "the same": what tests before this one left behind may end meanwhile.
    assert open_descriptors() <= before[0]
    assert decoding_threads() <= before[1]


def test_batches_are_freed_as_they_are_dropped(ds: ImageDataset) -> None:
    loader = Loader(ds, 4)
    held = []
    for images, _ in loader:
        held.append(sys.getrefcount(images))
    assert held == [3] * 10  # ours, the tuple's, the call's
