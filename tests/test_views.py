"""Views of a dataset, options that are assigned, and the wrong ways into datasets and loaders."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make import jpeg
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from training_packs import CROP, FLIP, FORKS_BESIDE_THREADS, add_noise, damage, labels_of, make_pack, pixels_of

import packfmt
from packfmt import BlockBatchSampler, DecodeError, ImageDataset, Loader

pytestmark = pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)

OTHER = {torch.channels_last: torch.contiguous_format, torch.contiguous_format: torch.channels_last}
SMALL_WINDOW = pytest.mark.filterwarnings("ignore:batches will be one-sided:UserWarning")  # windows as tests need them


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def ds(pack: str) -> Iterator[ImageDataset]:
    with ImageDataset(pack, crop=CROP, flip=FLIP, threads=2) as dataset:
        yield dataset


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pack of three classes: 30, 10 and 5 records, in turn as long as there are some."""
    path = tmp_path_factory.mktemp("packs") / "classes.bin"
    with packfmt.open(make_pack(path.parent, 45)) as source, packfmt.create(path, classes=("a", "b", "c")) as writer:
        labels = sorted([0] * 30 + [1] * 10 + [2] * 5, key=lambda label: (label * 7) % 3)
        for record, label in zip(source, labels, strict=True):
            writer.write(record.data, f"{'abc'[label]}/{record.key}", label=label)
    return str(path)


def number(image: torch.Tensor) -> torch.Tensor:
    return image.float().mean((1, 2))


# Views


@pytest.mark.parametrize(
    ("which", "records"),
    [
        ([30, 2, 7], [30, 2, 7]),
        (np.arange(40) % 10 == 3, [3, 13, 23, 33]),
        (slice(36, None), [36, 37, 38, 39]),
        (torch.tensor([-1, 0]), [39, 0]),
        ([5, 5], [5, 5]),
        ("01?.jpg", list(range(10, 20))),
        ([], []),
    ],
)
def test_select(ds: ImageDataset, which: Any, records: list[int]) -> None:
    view = ds.select(which)
    assert len(view) == len(records)
    assert [view[place][1] for place in range(len(view))] == records
    assert view.indices.tolist() == records
    assert view.labels.tolist() == records
    assert [view.columns["key"][place] for place in range(len(view))] == [f"{record:03}.jpg" for record in records]


def test_a_record_looks_the_same_in_every_view(ds: ImageDataset) -> None:
    view = ds.select([30, 2, 7, 30])
    for dataset in (ds, view):
        dataset.set_epoch(4)
    assert torch.equal(view[[1, 2, 0]][0], ds[[2, 7, 30]][0])
    nested = view.select([2, 1])
    nested.set_epoch(4)
    ds.set_epoch(4)
    assert torch.equal(nested[[0, 1]][0], ds[[7, 2]][0])
    assert nested.indices.tolist() == [7, 2]


def test_a_view_counts_its_own_epochs(ds: ImageDataset) -> None:
    view = ds.select([1, 2])
    view.set_epoch(5)
    assert (ds.epoch, view.epoch) == (0, 5)


@pytest.mark.parametrize("index", [2, -3, [0, 2]])
def test_an_index_outside_of_a_view(ds: ImageDataset, index: Any) -> None:
    with pytest.raises(IndexError, match=r"the view of .*pack.bin has 2 records"):
        ds.select([4, 9])[index]


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        ([40], IndexError, "has 40 records, asked for 40"),
        (np.ones(39, bool), IndexError, r"has 40 records, the mask has the shape \(39,\)"),
        ([0.5], TypeError, "flat sequence of ints"),
        ("val/*", ValueError, r"no key is like 'val/\*', such as '000.jpg'"),
    ],
)
def test_what_cannot_be_selected(ds: ImageDataset, which: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ds.select(which)


def test_an_error_in_a_view_names_the_record_in_the_pack(tmp_path: Path) -> None:
    path = make_pack(tmp_path, 12, broken=[9])
    damage(path, 4)
    view = ImageDataset(path, crop=CROP, threads=1).select([2, 9, 4])
    for place, record in ((1, 9), (2, 4)):
        for read in (lambda place=place: view[place], lambda place=place: next(iter(DataLoader(view, 3)))):
            with pytest.raises((DecodeError, packfmt.CorruptError)) as caught:
                read()
            assert caught.value.path == path
        with pytest.raises((DecodeError, packfmt.CorruptError)) as caught:
            view[place]
        assert (caught.value.index, caught.value.key) == (record, f"{record:03}.jpg")


def test_statistics_of_a_view_name_records_of_the_pack(ds: ImageDataset) -> None:
    loader = Loader(ds.select([31, 32]), 2)
    list(loader)
    assert {key for _, key in loader.stats().slowest} <= {"031.jpg", "032.jpg"}


def test_a_view_pickles_as_its_indices(ds: ImageDataset) -> None:
    view = ds.select(np.arange(40)[::-1].repeat(250))
    view.labels, view.columns["key"][3]
    assert len(pickle.dumps(view)) < 10_000 + 8 * len(view)
    again = pickle.loads(pickle.dumps(view))
    assert torch.equal(again[[0, 9000]][0], view[[0, 9000]][0])


def test_views_share_threads_and_files(ds: ImageDataset) -> None:
    view = ds.select([3, 4])
    expected = view[[0, 1]][0]
    with ds.select([5]) as other:
        other[0]
    view.set_epoch(0)
    assert torch.equal(view[[0, 1]][0], expected)  # closing a view closes nothing of others
    ds.close()
    with pytest.raises(ValueError, match="closed"):
        view[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_view_through_dataloader(ds: ImageDataset, workers: int) -> None:
    view = ds.select(np.arange(20, 40))
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    shuffled = DataLoader(view, 6, shuffle=True, num_workers=workers, **options)
    assert sorted(chain(*labels_of(shuffled))) == [*range(20, 40)]
    sampler = BlockBatchSampler(view, 6, shuffle=False)
    batches = list(DataLoader(view, batch_sampler=sampler, num_workers=workers, **options))
    assert labels_of(batches) == [[*range(20, 26)], [*range(26, 32)], [*range(32, 38)], [38, 39]]
    assert pixels_of(batches) == pixels_of(Loader(view, 20, shuffle=False))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_view_through_a_loader(ds: ImageDataset, workers: int) -> None:
    view = ds.select([30, 2, 7, 11, 12])
    with Loader(view, 2, shuffle=False, workers=workers, start_method="fork") as loader:
        assert labels_of(loader) == [[30, 2], [7, 11], [12]]


@SMALL_WINDOW
def test_samplers_of_a_view_read_in_the_packs_order(ds: ImageDataset) -> None:
    backwards = ds.select(np.arange(40)[::-1])
    for dataset in (backwards, Subset(ds, range(39, -1, -1))):
        sampler = BlockBatchSampler(dataset, 8, block_size=8, window=1)
        for batch in sampler.batches(0):
            records = np.sort(39 - batch)
            assert records.tolist() == list(range(records[0], records[0] + 8))
    assert [*BlockBatchSampler(backwards, 8, shuffle=False).batch(0, 0)] == [*range(8)]


def test_a_state_of_another_view_is_refused(ds: ImageDataset) -> None:
    state = Loader(ds.select(slice(0, 20)), 4).state_dict()
    with pytest.raises(ValueError, match="indices"):
        Loader(ds.select(slice(20, 40)), 4).load_state_dict(state)


def test_samplers_know_the_columns_of_a_view(ds: ImageDataset) -> None:
    view = ds.select(np.arange(0, 40, 2))
    shapes = packfmt.BucketBatchSampler(view, 4)
    assert sorted(np.concatenate(list(shapes.batches(0))).tolist()) == list(range(20))
    clips = packfmt.SequenceSampler(view, 2, length=2, groups=view.labels // 20)
    assert {label // 20 for _, labels in Loader(view, sampler=clips) for label in labels.tolist()} == {0, 1}


def test_clips_of_a_view_have_the_keys_of_the_pack(ds: ImageDataset) -> None:
    groups = np.arange(40) // 20
    view = ds.select(np.arange(20, 40))
    whole = packfmt.SequenceSampler(ds, 1, length=20, groups=groups, shuffle=False)
    part = packfmt.SequenceSampler(view, 1, length=20, groups=groups[20:], shuffle=False)
    assert pixels_of([[*Loader(ds, sampler=whole)][1]]) == pixels_of(Loader(view, sampler=part))


@SMALL_WINDOW
def test_reading_ahead_is_left_out_of_sparse_views_only(ds: ImageDataset) -> None:
    for step, expected in ((1, True), (5, False)):
        sampler = BlockBatchSampler(ds.select(np.arange(0, 40, step)), 2, block_size=2, window=2)
        assert any(len(near) for near in sampler.read_ahead(0)) is expected


@SMALL_WINDOW
def test_reading_ahead_asks_for_the_packs_records(ds: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ds.reader, "will_need_blocks", lambda indices: asked.extend(np.asarray(indices).tolist()))
    view = ds.select(np.arange(20, 40))
    for _ in DataLoader(view, batch_sampler=BlockBatchSampler(view, 2, block_size=2, window=2)):
        pass
    assert sorted(asked) == [*range(20, 40)]


# Splits


@pytest.mark.parametrize("share", [0.9, 0.5, 0.31])
def test_a_split_leaves_nothing_out(classes: str, share: float) -> None:
    ds = ImageDataset(classes)
    train, val = ds.split(share)
    assert len(train) == round(share * 45)
    assert sorted([*train.indices, *val.indices]) == list(range(45))
    assert train.indices.tolist() == sorted(train.indices.tolist())
    assert ds.split(share)[0].indices.tolist() == train.indices.tolist()
    assert ds.split(share, seed=1)[0].indices.tolist() != train.indices.tolist()


@pytest.mark.parametrize("stratify", ["label", "array"])
def test_a_stratified_split_keeps_proportions(classes: str, stratify: str) -> None:
    ds = ImageDataset(classes)
    train, val = ds.split(0.8, seed=3, stratify=ds.labels.tolist() if stratify == "array" else stratify)
    assert np.bincount(train.labels).tolist() == [24, 8, 4]
    assert np.bincount(val.labels).tolist() == [6, 2, 1]


def test_a_split_is_known(classes: str) -> None:
    """These numbers are part of the interface: another version must not split otherwise."""
    train, _ = ImageDataset(classes).split(0.1, seed=7)
    assert train.indices.tolist() == [11, 15, 40, 44]


def test_a_split_in_three(classes: str) -> None:
    train, rest = ImageDataset(classes).split(0.8)
    val, test = rest.split(0.5)
    assert sorted([*train.indices, *val.indices, *test.indices]) == list(range(45))
    assert (len(train), len(val), len(test)) == (36, 4, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"share": 0.99}, ValueError, "leaves one part empty"),
        ({"share": 1.5}, ValueError, "leaves one part empty"),
        ({"share": "0.9"}, TypeError, "not a number between 0 and 1"),
        ({"share": 0.5, "stratify": "class"}, ValueError, "no column 'class'; there are"),
        ({"share": 0.5, "stratify": [0, 1]}, ValueError, "one for each record, 45"),
    ],
)
def test_what_cannot_be_split(classes: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ImageDataset(classes).split(**arguments)


def test_a_view_with_a_record_twice_is_not_split(ds: ImageDataset) -> None:
    with pytest.raises(ValueError, match="more than once"):
        ds.select([1, 1, 2]).split(0.5)


def test_parts_have_options_of_their_own(ds: ImageDataset) -> None:
    train, val = ds.split(0.5)
    val.crop, val.flip = packfmt.CenterCrop(12), None
    val.transform = number
    train.target_transform = str
    assert train[[0, 1]][0].shape == (2, 3, 16, 16)
    assert val[[0, 1]][0].shape == (2, 3)
    assert type(train[0][1]) is str
    assert type(val[0][1]) is int
    assert ds[0][0].shape == (3, 16, 16)


# Options that are assigned


@pytest.mark.parametrize(
    ("option", "value", "check"),
    [
        ("crop", packfmt.Resize(8), lambda sample: sample[0].shape == (3, 8, 8)),
        ("crop", None, lambda sample: sample[0].shape == (3, 20, 24)),
        ("transform", number, lambda sample: sample[0].shape == (3,)),
        ("target_transform", str, lambda sample: sample[1] == "0"),
        ("transforms", lambda image, target: (target, image), lambda sample: sample[0] == 0),
    ],
)
def test_assigning_an_option(ds: ImageDataset, option: str, value: Any, check: Callable[[Any], bool]) -> None:
    ds[0]
    setattr(ds, option, value)
    assert getattr(ds, option) is value
    assert check(ds[0])


def test_assigning_a_flip(pack: str) -> None:
    ds = ImageDataset(pack)
    plain, _ = ds[3]
    ds.flip = 1.0
    assert torch.equal(ds[3][0], plain.flip(2))
    ds.flip = None
    assert torch.equal(ds[3][0], plain)


def test_batches_decoded_ahead_are_made_anew(ds: ImageDataset) -> None:
    shapes = []
    for images, _ in DataLoader(ds, batch_sampler=BlockBatchSampler(ds, 8, shuffle=False)):
        shapes.append(tuple(images.shape[2:]))
        ds.crop = packfmt.Resize(8)
    assert shapes == [(16, 16), (8, 8), (8, 8), (8, 8), (8, 8)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_what_was_assigned_in_its_next_epoch(ds: ImageDataset, workers: int) -> None:
    with Loader(ds, 1, workers=workers, start_method="fork") as loader:  # more batches than are chosen together
        shapes = []
        for images, _ in loader:
            shapes.append(images.shape[2])
            ds.crop, ds.transform = packfmt.Resize(8), add_noise
        assert shapes == [16] * 40
        assert [images.shape[2] for images, _ in loader] == [8] * 40


def test_a_crop_that_is_assigned_brings_its_interpolation(pack: str) -> None:
    ds = ImageDataset(pack)
    ds.crop = packfmt.Resize(12, interpolation="bicubic")
    expected = Image.fromarray(ImageDataset(pack, output="numpy")[0][0]).resize((12, 12), Image.Resampling.BICUBIC)
    difference = np.abs(ds[0][0].permute(1, 2, 0).numpy().astype(int) - np.asarray(expected))
    assert difference.max() <= 3  # bilinear is off by tens on this noise


def test_draws_are_counted_from_the_option_on_that_needs_it(pack: str) -> None:
    ds = ImageDataset(pack, crop=packfmt.Resize(16))
    ds.crop = CROP
    assert not torch.equal(ds[0][0], ds[0][0])


# Transforms of image and target


def test_transforms_get_and_give_both(pack: str) -> None:
    def both(image: torch.Tensor, target: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        draw = int(packfmt.sample_rng().integers(1000))
        return image.float(), {"key": target["key"], "draw": draw, "mean": image.float().mean()}

    ds = ImageDataset(pack, crop=CROP, fields=("label", "key"), transforms=both, threads=2)
    images, targets = ds[[4, 5]]
    assert images.dtype == torch.float32
    assert targets["key"] == ["004.jpg", "005.jpg"]
    assert torch.equal(targets["mean"], images.mean((1, 2, 3)))
    for how in (Loader(ds, 2, indices=[4, 5], shuffle=False), DataLoader(ds.select([4, 5]), 2)):
        (batch,) = how
        assert batch[1]["key"] == ["004.jpg", "005.jpg"]
        assert torch.equal(batch[1]["draw"], targets["draw"])


def test_transforms_come_after_the_others(pack: str) -> None:
    ds = ImageDataset(
        pack,
        crop=CROP,
        transform=lambda image: 2,
        target_transform=lambda label: 3,
        transforms=lambda image, target: (image * 10, target * 10),
    )
    assert ds[0] == (20, 30)


def test_boxes_follow_the_crop_before_transforms_get_them(pack: str) -> None:
    seen: list[Any] = []
    fields = ["boxes", "names"]
    ds = ImageDataset(
        pack, crop=packfmt.Resize(48), fields=fields, transforms=lambda image, target: (image, seen.append(target) or 1)
    )
    assert ds[[29]][1].tolist() == [1]
    expected = ImageDataset(pack, crop=packfmt.Resize(48), fields=fields)[29][1]
    assert np.array_equal(seen[0]["boxes"], expected["boxes"])


def test_an_error_of_transforms_names_the_sample(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transforms=lambda image, target: image)
    with pytest.raises(ValueError, match="unpack") as caught:
        ds[[4]]
    assert any("record 4, key '004.jpg'" in note for note in caught.value.__notes__)


# What a loader accepts


def test_a_loader_over_some_records(ds: ImageDataset) -> None:
    assert sorted(chain(*labels_of(Loader(ds, 3, indices=[9, 1, 30, 2])))) == [1, 2, 9, 30]
    assert labels_of(Loader(ds, 3, indices=[9, 1, 30, 2], shuffle=False)) == [[9, 1, 30], [2]]


def test_a_loader_over_a_subset(ds: ImageDataset) -> None:
    subset = Subset(Subset(ds, [5, 30, -1, 8]), [3, 2, 1])
    expected = list(DataLoader(subset, 2))
    found = list(Loader(subset, 2, shuffle=False))
    assert labels_of(found) == labels_of(expected) == [[8, 39], [30]]
    assert pixels_of(found) == pixels_of(expected)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("out.bin", r"not 'out.bin' \(str\); packfmt.ImageDataset\(path, crop="),
        (Path("out.bin"), r"packfmt.ImageDataset\(path, crop="),
        (Numbers(), r"packfmt.ImageStream has batches\(batch_size\)"),
        (torch.utils.data.TensorDataset(torch.arange(3)), "torch's DataLoader takes any dataset"),
        (None, "packfmt.ImageDataset"),
    ],
)
def test_a_loader_over_something_else(dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Loader(dataset, 32)


def test_a_loader_over_packs_joined_by_torch(ds: ImageDataset) -> None:
    for dataset in (ConcatDataset([ds, ds]), Subset(ConcatDataset([ds, ds]), [1])):
        with pytest.raises(TypeError, match=r"opened as one with packfmt.ImageDataset\(\[path, path\]\)"):
            Loader(dataset, 32)


def test_a_loader_over_a_reader(pack: str) -> None:
    with packfmt.open(pack) as reader, pytest.raises(TypeError, match="makes one of a pack"):
        Loader(reader, 32)


@pytest.mark.parametrize(
    "options",
    [{"shuffle": False}, {"seed": 0}, {"partial": "drop"}, {"indices": [1]}, {"world_size": 1}, {"window": 3}],
)
def test_options_that_belong_to_the_sampler(ds: ImageDataset, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="belong to the sampler"):
        Loader(ds, sampler=BlockBatchSampler(ds, 8), **options)


def test_the_seed_of_the_dataset_is_the_loaders(pack: str) -> None:
    orders = [
        labels_of(Loader(ImageDataset(pack, crop=CROP, seed=mine), 8, **options))
        for mine, options in ((5, {}), (0, {"seed": 5}), (5, {"seed": 0}), (0, {}))
    ]
    assert orders[0] == orders[1] != orders[2] == orders[3]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, None])
def test_the_memory_format_of_batches(ds: ImageDataset, memory_format: Any, workers: int) -> None:
    expected = memory_format or torch.channels_last
    with Loader(ds, 8, memory_format=memory_format, workers=workers, start_method="fork") as loader:
        for images, _ in loader:
            assert images.is_contiguous(memory_format=expected)
            assert not images.is_contiguous(memory_format=OTHER[expected])
    with Loader(ds, 40, shuffle=False, memory_format=memory_format) as loader:
        assert pixels_of(loader) == pixels_of(Loader(ds, 40, shuffle=False))


def test_the_memory_format_is_one_of_two(ds: ImageDataset) -> None:
    with pytest.raises(ValueError, match=r"allowed are None, torch.channels_last, torch.contiguous_format"):
        Loader(ds, 8, memory_format=torch.preserve_format)


def test_what_frameworks_ask_of_a_loader(ds: ImageDataset) -> None:
    loader = Loader(ds, 8, workers=2, partial="drop", pin_memory=True)
    assert loader.batch_sampler is loader.sampler
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.pin_memory) == (8, 2, True, True)
    assert not Loader(ds, 8).drop_last


# Truncated images


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pack of one whole image and the same cut in its middle."""
    path = tmp_path_factory.mktemp("packs") / "cut.bin"
    data = jpeg(64, 64, seed=1)
    with packfmt.create(path) as writer:
        for key, part in (("whole", data), ("cut", data[: len(data) // 2])):
            writer.write(part, key, label=0)
    return str(path)


def test_what_is_there_of_a_truncated_image_is_decoded(truncated: str) -> None:
    with pytest.raises(DecodeError, match="partial=True decodes what is there"):
        ImageDataset(truncated)[1]
    ds = ImageDataset(truncated, partial=True)
    images, _ = ds[[0, 1]]
    assert torch.equal(images[0, :, :8, :8], images[1, :, :8, :8])
    assert not torch.equal(images[0], images[1])
    with packfmt.open(truncated) as reader:
        stream = packfmt.ImageStream([reader[1]], partial_images=True)
        assert torch.equal(next(iter(stream))[0], images[1])


def test_a_stream_says_how_truncated_images_are_decoded() -> None:
    with pytest.raises(ValueError, match="partial_images=True"):
        packfmt.ImageStream([], partial=True)


@pytest.mark.parametrize("partial", [1, "drop"])
def test_what_partial_of_a_dataset_is_not(pack: str, partial: Any) -> None:
    with pytest.raises(ValueError, match="True or False"):
        ImageDataset(pack, partial=partial)


# Wrong ways into a dataset


@pytest.mark.parametrize("crop", [224, (224, 224), packfmt.CenterCrop, torch.nn.Identity(), "center"])
def test_what_is_no_crop(pack: str, crop: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a crop: give packfmt.RandomResizedCrop\(224\) to train, packfmt.Cen"):
        ImageDataset(pack, crop=crop)
    with pytest.raises(TypeError, match="is not a crop"):
        packfmt.ImageStream([], crop=crop)
    ds = ImageDataset(pack)
    with pytest.raises(TypeError, match="is not a crop"):
        ds.crop = crop
    assert ds.crop is None


@pytest.mark.parametrize(
    ("flip", "expected"),
    [
        (True, (packfmt.HorizontalFlip(),)),
        (False, ()),
        (0.25, (packfmt.HorizontalFlip(0.25),)),
        (1, (packfmt.HorizontalFlip(1.0),)),
        (None, ()),
        ([], ()),
        ([FLIP, packfmt.VerticalFlip()], (FLIP, packfmt.VerticalFlip())),
    ],
)
def test_ways_to_ask_for_a_flip(pack: str, flip: Any, expected: tuple[Any, ...]) -> None:
    assert ImageDataset(pack, flip=flip).flip == expected


@pytest.mark.parametrize("flip", ["horizontal", packfmt.HorizontalFlip, [FLIP, 0.5], torch.nn.Identity()])
def test_what_is_no_flip(pack: str, flip: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a flip: give packfmt.HorizontalFlip"):
        ImageDataset(pack, flip=flip)


def test_a_flip_that_is_more_than_certain(pack: str) -> None:
    with pytest.raises(ValueError, match=r"p must lie in 0..1, got 1.5"):
        ImageDataset(pack, flip=1.5)


@pytest.mark.parametrize("option", ["transform", "target_transform", "transforms"])
def test_what_cannot_be_called(pack: str, option: str) -> None:
    with pytest.raises(TypeError, match=f"{option}=3 is not a function"):
        ImageDataset(pack, **{option: 3})


def test_a_dataset_of_a_dataset(ds: ImageDataset) -> None:
    with pytest.raises(TypeError, match=r"its select\(\) and split\(\)"):
        ImageDataset(ds)


def test_names_that_torchvision_has(classes: str) -> None:
    ds = ImageDataset(classes)
    assert ds.class_to_idx == {"a": 0, "b": 1, "c": 2}
    assert ds.targets.tolist() == ds.labels.tolist()
    assert ds.select("b/*").targets.tolist() == [1] * 10
