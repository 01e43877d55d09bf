"""packfmt's datasets and samplers under torch's own DataLoader."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)
from training_packs import (
    CROP,
    FLIP,
    FORKS_BESIDE_THREADS,
    Unlucky,
    add_noise,
    double,
    fail,
    labels_of,
    make_pack,
    pixels_of,
    process_of,
)

import packfmt
from packfmt import BlockBatchSampler, CenterCrop, DecodeError, ImageDataset, Resize
from packfmt.record import Column

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def ds(pack: str) -> Iterator[ImageDataset]:
    with ImageDataset(pack, crop=CROP, flip=FLIP, threads=2) as dataset:
        yield dataset


class Counted(ImageDataset):
    """Counts the batches begun."""

    begun = 0

    def start(self, *arguments: Any, **options: Any) -> Any:
        self.begun += 1
        return super().start(*arguments, **options)


# Processes


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_give_what_the_main_process_gives(pack: str, method: str) -> None:
    ds = ImageDataset(pack, crop=CROP, flip=FLIP, transform=add_noise, threads=2)
    ds[[0, 1]]  # threads and file are in use before the workers start
    alone = DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 8))
    workers = DataLoader(
        ds,
        batch_sampler=BlockBatchSampler(ds, 8),
        num_workers=2 if method == "fork" else 1,
        multiprocessing_context=method,
        persistent_workers=True,
        prefetch_factor=3,
    )
    for _ in range(2):
        expected, found = list(alone), list(workers)
        assert labels_of(expected) == labels_of(found)
        assert pixels_of(expected) == pixels_of(found)


def test_the_samplers_epoch_reaches_persistent_workers(ds: ImageDataset) -> None:
    sampler = BlockBatchSampler(ds, 8)
    loader = DataLoader(
        ds, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    )
    seen = []
    for epoch in (0, 4, 0):
        sampler.set_epoch(epoch)
        seen.append(pixels_of(loader))
    ds.set_epoch(4)
    assert seen[0] == seen[2] != seen[1]
    assert seen[1] == pixels_of([ds[list(range(40))]])


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
@pytest.mark.parametrize("own_sampler", [False, True], ids=["torch's sampler", "a sampler over a Subset"])
def test_an_epoch_without_indices_that_carry_it(ds: ImageDataset, method: str | None, own_sampler: bool) -> None:
    subset = Subset(ds, list(range(20)))
    options: dict[str, Any] = {"batch_size": 8}
    if own_sampler:
        options = {"batch_sampler": BlockBatchSampler(subset, 8, shuffle=False)}
    if method is not None:
        options |= {"num_workers": 1, "multiprocessing_context": method, "persistent_workers": True}
    loader = DataLoader(subset, **options)
    seen = []
    for epoch in (0, 1, 0):
        (options["batch_sampler"] if own_sampler else ds).set_epoch(epoch)
        seen.append(torch.cat([images for images, _ in loader]))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    ds.set_epoch(1)
    assert torch.equal(seen[1], ds[list(range(20))][0])


def test_a_copy_of_a_dataset_has_an_epoch_of_its_own(ds: ImageDataset) -> None:
    ds.set_epoch(3)
    for other in (copy.deepcopy(ds), pickle.loads(pickle.dumps(ds))):
        assert other.epoch == 3
        other.set_epoch(4)
        assert ds.epoch == 3


def test_workers_decode_and_the_main_process_does_not(pack: str) -> None:
    ds = Counted(pack, crop=CROP, transform=process_of)
    loader = DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 8), num_workers=2, multiprocessing_context="fork")
    processes = {int(process) for images, _ in loader for process in images}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert ds.begun == 0


def test_batches_begun_before_a_fork_are_made_anew_in_it(ds: ImageDataset) -> None:
    sampler = BlockBatchSampler(ds, 8)
    next(iter(DataLoader(ds, batch_sampler=sampler)))  # leaves the next two under way, in threads that a fork lacks
    sampler.set_epoch(0)
    assert ds._ahead._begun
    loader = DataLoader(ds, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork", timeout=20)
    assert len(list(loader)) == 5


def test_an_error_that_torch_carries_over_names_the_record(tmp_path: Any) -> None:
    ds = ImageDataset(make_pack(tmp_path, 8, broken=[5]), crop=CROP)
    try:
        list(DataLoader(ds, batch_size=8))
    except DecodeError:
        carried = pickle.loads(pickle.dumps(ExceptionWrapper(where="in a worker")))  # as its workers do
    with pytest.raises(DecodeError, match=r"pack\.bin, record 5, key '005\.jpg'"):
        carried.reraise()


def test_an_error_of_a_transform_is_the_users_own(pack: str) -> None:
    with pytest.raises(Unlucky, match="out of luck"):
        list(DataLoader(ImageDataset(pack, crop=CROP, transform=fail), batch_size=4))


# Look-ahead


def test_announced_batches_are_decoded_while_the_loop_works(pack: str) -> None:
    ds = Counted(pack, crop=CROP, prefetch=2)
    for taken, _ in enumerate(DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 4)), 1):
        assert ds.begun == min(taken + 2, 10)
    assert ds.begun == 10  # none twice, none in vain


def test_announced_draws_are_decoded_while_the_loop_works(pack: str) -> None:
    ds = Counted(pack, crop=CROP, prefetch=2)
    sampler = BlockBatchSampler(ds, 4, indices=[1, 2, 3] * 8)
    for taken, _ in enumerate(DataLoader(ds, batch_sampler=sampler), 1):
        assert ds.begun == min(taken + 2, 6)


def test_no_look_ahead(pack: str) -> None:
    ds = Counted(pack, crop=CROP, prefetch=0)
    for taken, _ in enumerate(DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 4)), 1):
        assert ds.begun == taken


def test_shuffled_batches_hold_the_samples_that_were_asked_for(ds: ImageDataset) -> None:
    sampler = BlockBatchSampler(ds, 6, seed=9)
    for epoch in range(2):
        expected = [batch.tolist() for batch in BlockBatchSampler(ds, 6, seed=9).batches(epoch)]
        found = list(DataLoader(ds, batch_sampler=sampler))
        assert labels_of(found) == expected
        ds.set_epoch(epoch)
        for images, labels in found:
            assert torch.equal(images, ds[labels][0])


def test_two_loaders_take_turns(ds: ImageDataset) -> None:
    first = DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 8, seed=1))
    second = DataLoader(ds, batch_size=8)
    expected = labels_of(DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 8, seed=1)))
    pairs = list(zip(first, second, strict=True))
    assert labels_of(pair[0] for pair in pairs) == expected
    assert labels_of(pair[1] for pair in pairs) == [list(range(i, i + 8)) for i in range(0, 40, 8)]


# Collation


def test_torchs_collation_copies_nothing(ds: ImageDataset) -> None:
    samples = ds.__getitems__([3, 1, 2])
    images, labels = default_collate(samples)
    assert images.data_ptr() == samples[0][0].data_ptr()
    assert images.shape == (3, 3, 16, 16)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [3, 1, 2]


@pytest.mark.parametrize("output", ["tensor", "numpy"])
@pytest.mark.parametrize("fields", ["label", "score", ["label", "key"], None, "names"])
def test_batches_and_samples_collate_alike(pack: str, output: Any, fields: Any) -> None:
    ds = ImageDataset(pack, crop=CROP, output=output, fields=fields)
    indices = [2, 5, 8]  # as many boxes each
    batch = default_collate(ds.__getitems__(indices))
    ds.set_epoch(0)  # the first draws again
    one_by_one = default_collate([ds[i] for i in indices])
    assert torch.equal(batch[0], one_by_one[0])
    if fields == "names":  # ragged: a list, whatever the lengths in this batch
        assert torch.equal(torch.stack(batch[1]), one_by_one[1])
    else:
        assert repr(batch[1]) == repr(one_by_one[1])
        assert getattr(batch[1], "dtype", None) == getattr(one_by_one[1], "dtype", None)


def test_a_collation_of_ones_own_gets_samples(ds: ImageDataset) -> None:
    def collate(samples: Any) -> Any:
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels)

    ours = list(DataLoader(ds, batch_size=8))
    ds.set_epoch(0)  # the first draws again
    theirs = list(DataLoader(ds, batch_size=8, collate_fn=collate))
    assert pixels_of(ours) == pixels_of(theirs)


def collated_by(change: Callable[[Any], Any], ds: ImageDataset) -> Any:
    """The first batch of a DataLoader whose collate_fn changes the list and gives it to torch's own."""

    def collate(samples: Any) -> Any:
        return default_collate(change(samples))

    return next(iter(DataLoader(ds, batch_size=6, collate_fn=collate)))


def test_a_collation_of_ones_own_gets_a_list(ds: ImageDataset) -> None:
    def collate(samples: Any) -> Any:
        assert isinstance(samples, list)
        assert all(isinstance(sample, tuple) and len(sample) == 2 for sample in samples)
        assert [label for _, label in samples[1:3] + samples[:1]] == [1, 2, 0]
        assert [label for _, label in list(samples[:1]) + samples] == [0, 0, 1, 2, 3, 4, 5]
        assert sorted(samples, key=lambda sample: -sample[1])[0] is samples[5]
        return samples

    samples = next(iter(DataLoader(ds, batch_size=6, collate_fn=collate)))
    assert samples[3][0].shape == (3, 16, 16)


def test_a_list_comes_out_of_a_worker(ds: ImageDataset) -> None:
    loader = DataLoader(ds, batch_size=6, collate_fn=list, num_workers=1, multiprocessing_context="fork")
    assert [label for _, label in next(iter(loader))] == [0, 1, 2, 3, 4, 5]
    loader = DataLoader(ds, batch_size=6, collate_fn=as_it_is, num_workers=1, multiprocessing_context="fork")
    assert [label for _, label in next(iter(loader))] == [0, 1, 2, 3, 4, 5]


def as_it_is(samples: Any) -> Any:
    return samples


def dropped(samples: Any) -> Any:
    del samples[1:4]
    return samples


def turned(samples: Any) -> Any:
    samples.reverse()
    return samples


def replaced(samples: Any) -> Any:
    samples[0] = samples[5]
    return samples


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        (dropped, [0, 4, 5]),
        (turned, [5, 4, 3, 2, 1, 0]),
        (replaced, [5, 1, 2, 3, 4, 5]),
        (lambda samples: samples[2:4], [2, 3]),
        (lambda samples: samples + samples[:1], [0, 1, 2, 3, 4, 5, 0]),
        (lambda samples: [sample for sample in samples if sample[1] % 2], [1, 3, 5]),
    ],
)
@pytest.mark.parametrize("sample", ["tuple", "dict"])
def test_what_a_collation_changes_in_the_list_is_in_the_batch(
    pack: str, sample: Any, change: Callable[[Any], Any], labels: list[int]
) -> None:
    def as_pairs(samples: Any) -> Any:  # the changes above are written for tuples
        return [tuple(one.values()) for one in samples] if sample == "dict" else samples

    ds = ImageDataset(pack, crop=packfmt.Resize(16), sample=sample)
    images, found = collated_by(lambda samples: change(as_pairs(samples)), ds)
    assert found.tolist() == labels
    assert torch.equal(images, ImageDataset(pack, crop=packfmt.Resize(16))[labels][0])


def test_what_a_collation_changes_in_samples_is_in_the_batch(pack: str) -> None:
    def change(samples: Any) -> Any:
        for image, target in samples:
            image.zero_()
            target["label"] += 100
            target["boxes"][:] = 7
        return samples

    ds = ImageDataset(pack, crop=packfmt.Resize(16), fields=("label", "boxes"))
    images, targets = collated_by(lambda samples: change(samples[2:3]), ds)
    assert not images.any()
    assert targets["label"].tolist() == [102]
    assert targets["boxes"].tolist() == [[[7, 7, 7, 7]] * 2]


def test_what_a_collation_changes_within_arrays_is_in_the_batch(pack: str) -> None:
    def change(samples: Any) -> Any:
        for image, target in samples:
            image.zero_()
            target["boxes"][:] = 7
        return samples

    ds = ImageDataset(pack, crop=packfmt.Resize(16), fields=("label", "boxes"))
    images, targets = collated_by(change, ds)
    assert not images.any()
    assert [boxes.tolist() for boxes in targets["boxes"]] == [[[7, 7, 7, 7]] * (number % 3) for number in range(6)]


# Samples as dicts


def test_a_sample_as_a_dict(pack: str) -> None:
    plain, named = (ImageDataset(pack, crop=packfmt.Resize(16), sample=form) for form in ("tuple", "dict"))
    assert named[3].keys() == {"pixel_values", "labels"}
    assert torch.equal(named[3]["pixel_values"], plain[3][0])
    assert named[3]["labels"] == 3
    batch = named[[3, 1]]
    assert torch.equal(batch["pixel_values"], plain[[3, 1]][0])
    assert batch["labels"].tolist() == [3, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_as_dicts(pack: str, workers: int) -> None:
    ds = ImageDataset(pack, crop=packfmt.Resize(16), sample="dict", threads=2)
    expected = ImageDataset(pack, crop=packfmt.Resize(16))[list(range(8))]
    with packfmt.Loader(ds, 8, shuffle=False, batch_transform=double, workers=workers, start_method="fork") as loader:
        batch = next(iter(loader))
    assert type(batch) is dict
    assert torch.equal(batch["pixel_values"], expected[0])
    assert batch["labels"].tolist() == [2 * label for label in range(8)]


def test_torchs_collation_of_dicts_copies_nothing(pack: str) -> None:
    samples = ImageDataset(pack, crop=CROP, sample="dict").__getitems__([3, 1, 2])
    batch = default_collate(samples)
    assert type(batch) is dict
    assert batch["pixel_values"].data_ptr() == samples[0]["pixel_values"].data_ptr()
    assert batch["labels"].tolist() == [3, 1, 2]


def test_what_a_collation_changes_in_a_dict_is_in_the_batch(pack: str) -> None:
    def change(samples: Any) -> Any:
        for sample in samples:
            sample["labels"] += 100
        samples[0]["more"] = 1
        return samples

    batch = default_collate(change(ImageDataset(pack, crop=CROP, sample="dict").__getitems__([3])))
    assert batch["labels"].tolist() == [103]
    assert batch["more"].tolist() == [1]


def test_a_target_that_is_a_dict_lies_beside_the_image(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, sample="dict", fields=("label", "key"))
    assert ds[3].keys() == {"pixel_values", "label", "key"}
    for batch in (ds[[3, 4]], default_collate(ds.__getitems__([3, 4])), *packfmt.Loader(ds, 2, indices=[3, 4])):
        assert batch.keys() == {"pixel_values", "label", "key"}
        assert sorted(batch["key"]) == ["003.jpg", "004.jpg"]


def test_targets_that_are_lists_stay_together_in_a_dict(pack: str, tmp_path: Path) -> None:
    path = tmp_path / "boxes.bin"
    with packfmt.open(pack) as source, packfmt.create(path, columns=[Column("boxes", "<f4", (None, 4))]) as writer:
        for record in source:
            boxes = record.columns["boxes"]
            writer.write(record.data, record.key, boxes=boxes, labels=np.zeros(len(boxes), np.int64))
    ds = ImageDataset(path, crop=CROP, targets="torchvision", sample="dict")
    assert ds[2].keys() == {"pixel_values", "labels"}
    assert ds[2]["labels"].keys() == {"boxes", "labels", "image_id"}
    assert [target["image_id"].item() for target in ds[[2, 3]]["labels"]] == [2, 3]


def test_samples_that_are_neither_tuples_nor_dicts(pack: str) -> None:
    with pytest.raises(ValueError, match="sample='list', allowed are 'tuple' and 'dict'"):
        ImageDataset(pack, sample="list")


def test_without_batches(ds: ImageDataset) -> None:
    image, label = next(iter(DataLoader(ds, batch_size=None)))
    assert image.shape == (3, 16, 16)
    assert label == 0
    batches = DataLoader(ds, batch_size=None, sampler=BlockBatchSampler(ds, 8, shuffle=False))
    assert labels_of(batches)[1] == list(range(8, 16))


def test_a_transform_that_makes_floats(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=lambda image: image.float().div(255).sub(0.5))
    images, _ = next(iter(DataLoader(ds, batch_size=4)))
    assert images.shape == (4, 3, 16, 16)
    assert images.dtype == torch.float32


def test_pil_images_go_through_a_transform(pack: str) -> None:
    ds = ImageDataset(pack, output="pil", transform=lambda image: torch.from_numpy(np.array(image.resize((8, 8)))))
    images, _ = next(iter(DataLoader(ds, batch_size=4)))
    assert images.shape == (4, 8, 8, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")  # torch's
def test_pinning_without_cuda(ds: ImageDataset) -> None:
    assert len(list(DataLoader(ds, batch_size=8, pin_memory=True))) == 5


# Samplers and wrappers of torch


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["sequential", "random", "weighted", "distributed", "batched"])
def test_torchs_samplers(ds: ImageDataset, kind: str, workers: int) -> None:
    generator = torch.Generator().manual_seed(3)
    samplers: dict[str, Any] = {
        "sequential": lambda: SequentialSampler(ds),
        "random": lambda: RandomSampler(ds, generator=generator),
        "weighted": lambda: WeightedRandomSampler(torch.arange(40.0), 24, generator=generator),
        "distributed": lambda: DistributedSampler(ds, 2, 1, shuffle=True),
        "batched": lambda: BatchSampler(SequentialSampler(ds), 7, drop_last=True),
    }
    if kind == "weighted":
        workers = min(workers, 1)  # two may swap the draws of a record
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options["multiprocessing_context"] = "fork"
    if kind == "batched":
        loader = DataLoader(ds, batch_sampler=samplers[kind](), **options)
    else:
        loader = DataLoader(ds, sampler=samplers[kind](), batch_size=7, **options)
    found = list(loader)
    count = {"weighted": 24, "distributed": 20, "batched": 35}.get(kind, 40)
    assert sum(len(labels) for _, labels in found) == count
    ds.set_epoch(0)  # the first draws again
    for images, labels in found:
        assert torch.equal(images, ds[labels][0])


def test_both_ways_through_a_subset_are_equal(ds: ImageDataset) -> None:
    class OneByOne(Subset[Any]):
        """A subset as it was before torch gave it ``__getitems__``."""

        __getitems__ = None  # type: ignore[assignment]

    for indices in ([5, 30, -1], torch.tensor([5, 30, -1]), np.array([5, 30, -1])):
        ds.set_epoch(0)  # the first draws again
        at_once = list(DataLoader(Subset(ds, indices), batch_size=2))
        ds.set_epoch(0)
        one_by_one = list(DataLoader(OneByOne(ds, indices), batch_size=2))
        assert labels_of(at_once) == labels_of(one_by_one) == [[5, 30], [39]]
        assert pixels_of(at_once) == pixels_of(one_by_one)


def test_concatenated_datasets(ds: ImageDataset, tmp_path: Any) -> None:
    both = ConcatDataset([ds, ImageDataset(make_pack(tmp_path, 8), crop=CROP)])
    found = labels_of(DataLoader(both, batch_size=16))
    assert found == [list(range(16)), list(range(16, 32)), [*range(32, 40), *range(8)]]


def test_a_dataset_around_it_knows_the_epoch(ds: ImageDataset) -> None:
    class Around(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(ds)

        def __getitem__(self, index: int) -> Any:
            image, label = ds[index]
            return {"image": image, "label": label}

    sampler = BlockBatchSampler(ds, 8)
    sampler.set_epoch(3)
    found = [(batch["image"], batch["label"]) for batch in DataLoader(Around(), batch_sampler=sampler)]
    ds.set_epoch(3)
    assert pixels_of(found) == pixels_of([ds[list(range(40))]])


# Epochs of samplers that know nothing of epochs


WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent workers": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "persistent spawned workers": {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
}


class Mapped(torch.utils.data.Dataset[Any]):
    """Gives the records of a dataset in the opposite order."""

    def __init__(self, inner: ImageDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[int(len(self) - 1 - index)]


@pytest.fixture
def noisy(pack: str) -> Iterator[ImageDataset]:
    """Samples that differ wherever their keys do; small crops may be alike by chance."""
    with ImageDataset(pack, crop=CROP, flip=FLIP, transform=add_noise, seed=3, threads=1) as dataset:
        yield dataset


def epochs_of(loader: Any, count: int) -> list[dict[int, bytes]]:
    return [pixels_of(loader) for _ in range(count)]


def all_differ(epochs: list[dict[int, bytes]]) -> bool:
    return all(len({epoch[label] for epoch in epochs}) == len(epochs) for label in epochs[0])


@pytest.mark.parametrize("workers", WORKERS)
def test_every_epoch_of_a_foreign_sampler_has_new_crops(noisy: ImageDataset, pack: str, workers: str) -> None:
    epochs = epochs_of(DataLoader(noisy, batch_size=8, shuffle=True, **WORKERS[workers]), 3)
    assert all_differ(epochs)
    alone = ImageDataset(pack, crop=CROP, flip=FLIP, transform=add_noise, seed=3, threads=1)
    assert epochs == epochs_of(DataLoader(alone, batch_size=5), 3)  # whatever the order, the batches and the workers


def test_the_first_draws_are_those_of_the_epoch(noisy: ImageDataset) -> None:
    loader = DataLoader(noisy, batch_size=8, shuffle=True)
    own = DataLoader(noisy, batch_sampler=BlockBatchSampler(noisy, 8))
    first, second = epochs_of(own, 2)
    for epoch, expected in ((0, first), (1, second), (0, first)):
        noisy.set_epoch(epoch)
        assert pixels_of(loader) == expected
        assert pixels_of(loader) not in (first, second)


def test_an_epoch_of_less_than_all_has_new_crops_too(noisy: ImageDataset) -> None:
    loader = DataLoader(noisy, batch_size=7, drop_last=True)
    first, second = epochs_of(loader, 2)
    for label in first.keys() & second.keys():
        assert first[label] != second[label]
    broken_off = next(iter(loader))
    assert all(pixels not in (first[label], second[label]) for label, pixels in pixels_of([broken_off]).items())


@pytest.mark.parametrize("workers", [0, 1])  # two may give one number to two draws of the same moment
def test_draws_with_replacement_differ_within_an_epoch(noisy: ImageDataset, workers: int) -> None:
    sampler = WeightedRandomSampler([1.0, 3.0], 60, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(Subset(noisy, [4, 9]), batch_size=8, sampler=sampler, num_workers=workers)
    seen = [image.numpy().tobytes() for images, _ in loader for image in images]
    assert len(seen) == 60
    assert len(set(seen)) == 60


@pytest.mark.parametrize("workers", ["no workers", "persistent workers"])
@pytest.mark.parametrize("around", ["concatenated", "mapped", "subset of mapped"])
def test_wrappers_get_new_crops_in_every_epoch(noisy: ImageDataset, around: str, workers: str) -> None:
    wrapped: Any = {
        "concatenated": lambda: ConcatDataset([Subset(noisy, range(20)), Subset(noisy, range(20, 40))]),
        "mapped": lambda: Mapped(noisy),
        "subset of mapped": lambda: Subset(Mapped(noisy), range(40)),
    }[around]()
    for options in ({"batch_size": 8, "shuffle": True}, {"batch_sampler": BlockBatchSampler(wrapped, 8)}):
        assert all_differ(epochs_of(DataLoader(wrapped, **options, **WORKERS[workers]), 3))


def test_our_samplers_epochs_are_exact_over_concatenated_datasets(pack: str) -> None:
    def halves() -> list[ImageDataset]:
        return [ImageDataset(pack, crop=CROP, flip=FLIP, seed=seed) for seed in (1, 2)]

    both = ConcatDataset(halves())
    sampler = BlockBatchSampler(both, 8, shuffle=False)
    for epoch in (5, 0, 2):
        sampler.set_epoch(epoch)
        found = torch.cat([images for images, _ in DataLoader(both, batch_sampler=sampler)])
        alone = halves()
        for ds in alone:
            ds.set_epoch(epoch)
        assert torch.equal(found, torch.cat([ds[list(range(40))][0] for ds in alone]))


def test_our_samplers_epochs_are_exact_where_indices_are_shifted(noisy: ImageDataset) -> None:
    class Later(torch.utils.data.Dataset[Any]):
        """All records but the first ten."""

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            return noisy[index + 10]

    sampler = BlockBatchSampler(Later(), 8)  # type: ignore[arg-type]
    sampler.set_epoch(5)
    found = pixels_of(DataLoader(Later(), batch_sampler=sampler))
    noisy.set_epoch(5)
    assert found == pixels_of([noisy[list(range(10, 40))]])


def test_our_samplers_epochs_are_exact_over_concatenated_subsets(noisy: ImageDataset) -> None:
    both = ConcatDataset([Subset(noisy, range(20)), Subset(noisy, range(20, 40))])
    sampler = BlockBatchSampler(both, 8)
    for epoch in (5, 0, 2):
        sampler.set_epoch(epoch)
        found = pixels_of(DataLoader(both, batch_sampler=sampler))
        noisy.set_epoch(epoch)
        assert found == pixels_of([noisy[list(range(40))]])


def test_what_needs_no_random_numbers_counts_nothing(pack: str) -> None:
    for crop in (None, CenterCrop(8), Resize(8)):
        assert ImageDataset(pack, crop=crop)._draws is None


@pytest.mark.parametrize("workers", ["fork", "spawn"])
def test_workers_of_ranks_started_from_one_process_count_for_their_rank(noisy: ImageDataset, workers: str) -> None:
    context = multiprocessing.get_context("fork")
    parent, child = context.Pipe()
    process = context.Process(target=only_load, args=(noisy, workers, child))
    process.start()
    first, second, again = parent.recv()
    process.join()
    assert all_differ([first, second])
    assert again == first
    assert not noisy._draws._counts.any()


def only_load(ds: ImageDataset, method: str, connection: Any) -> None:
    """Draw in workers alone."""
    loader = DataLoader(ds, batch_size=8, num_workers=1, multiprocessing_context=method, persistent_workers=True)
    epochs = epochs_of(loader, 2)
    ds.set_epoch(0)
    epochs += epochs_of(loader, 1)
    ds.close()
    connection.send(epochs)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_started_from_one_process_do_not_share_what_they_count(noisy: ImageDataset, method: str) -> None:
    noisy[0]
    context = multiprocessing.get_context(method)
    parent, child = context.Pipe()
    noisy.set_epoch(3)
    process = context.Process(target=act_as_a_rank, args=(noisy, child))
    process.start()
    seen = parent.recv()
    process.join()
    assert seen[0] == pixels_of([noisy[[0, 1]]])
    assert noisy.epoch == 3
    noisy.set_epoch(3)
    loader = DataLoader(noisy, batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert all_differ([*epochs_of(loader, 2)])
    assert not {seen[0][0], seen[0][1]} & {seen[1][0], seen[1][1], seen[2][0], seen[2][1]}


def act_as_a_rank(ds: ImageDataset, connection: Any) -> None:
    """Draw here, then in workers, and set another epoch."""
    seen = [pixels_of([ds[[0, 1]]])]
    loader = DataLoader(ds, batch_size=8, num_workers=1, multiprocessing_context="fork")
    seen += epochs_of(loader, 2)
    ds.set_epoch(9)
    ds.close()
    connection.send(seen)
