"""Datasets: samples, batches, targets, pixels, damaged records, processes."""

from __future__ import annotations

import gc
import pickle
import random
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make import exif, jpeg, oriented_jpeg, picture, pillow_pixels, png, real_images, saved, with_segment
from PIL import Image
from training_packs import (
    CROP,
    FLIP,
    FORKS_BESIDE_THREADS,
    NO_IMAGE,
    Unlucky,
    add_noise,
    damage,
    fail,
    in_fork,
    make_pack,
)

import packfmt
from packfmt import CorruptError, DecodeError, FormatError, ImageDataset, MMapImageDataset
from packfmt.images.boxes import turn_boxes
from packfmt.images.info import ImageInfo
from packfmt.images.libjpeg import FLAT
from packfmt.images.sniff import sniff
from packfmt.randomness import sample_keys
from packfmt.record import Column
from packfmt.storage import recording
from packfmt.storage.readahead import ReadAhead
from packfmt.training.batch import MAX_CHUNK, PIECES, BatchJob
from packfmt.training.prefetch import PrefetchQueue


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def ds(pack: str) -> ImageDataset:
    return ImageDataset(pack, crop=CROP, flip=FLIP, threads=2)


def packed(folder: Path, *images: bytes, columns: Any = (), **values: Any) -> str:
    path = folder / "own.bin"
    with packfmt.create(path, columns=columns) as writer:
        for number, data in enumerate(images):
            writer.write(data, f"{number}", **values)
    return str(path)


# Samples and batches


def test_a_sample_is_a_tensor_and_a_label(ds: ImageDataset) -> None:
    image, label = ds[7]
    assert image.shape == (3, 16, 16)
    assert image.dtype == torch.uint8
    assert label == 7
    assert type(label) is int


def test_a_batch_equals_its_samples(ds: ImageDataset) -> None:
    indices = [30, 2, 2, 17, 9]
    images, labels = ds[indices]
    assert labels.tolist() == indices
    assert labels.dtype == torch.int64
    ds.set_epoch(0)  # the first draws again
    for image, index in zip(images, indices, strict=True):
        assert torch.equal(image, ds[index][0])


def test_a_batch_is_one_channels_last_tensor(ds: ImageDataset) -> None:
    images, _ = ds[list(range(9))]
    assert images.shape == (9, 3, 16, 16)
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_pixels_are_owned_and_writable(ds: ImageDataset) -> None:
    before, _ = ds[[3, 4]]
    ds.set_epoch(0)  # the first draws again
    changed, _ = ds[[3, 4]]
    changed.zero_()
    ds.set_epoch(0)
    one, _ = ds[3]
    one.zero_()
    ds.set_epoch(0)
    again, _ = ds[[3, 4]]
    assert torch.equal(again, before)


@pytest.mark.parametrize("index", [-1, np.int64(39), torch.tensor(39), np.array(39)])
def test_kinds_of_index(ds: ImageDataset, index: Any) -> None:
    assert ds[index][1] == 39


@pytest.mark.parametrize(
    "indices", [[0, -1], np.array([0, 39]), torch.tensor([0, 39]), (0, 39), [torch.tensor(0), torch.tensor(39)]]
)
def test_kinds_of_indices(ds: ImageDataset, indices: Any) -> None:
    assert ds[indices][1].tolist() == [0, 39]
    assert [label for _, label in ds.__getitems__(indices)] == [0, 39]


def test_a_batch_of_one_and_a_slice(ds: ImageDataset) -> None:
    assert ds[torch.tensor([5])][1].tolist() == [5]
    assert ds[36:][1].tolist() == [36, 37, 38, 39]
    assert ds[10:4:-3][1].tolist() == [10, 7]


def test_no_indices(ds: ImageDataset, pack: str) -> None:
    images, labels = ds[[]]
    assert images.shape == (0, 3, 16, 16)
    assert labels.shape == (0,)
    assert ImageDataset(pack)[[]][0].shape == (0, 3, 0, 0)


@pytest.mark.parametrize("index", [40, -41, [0, 40], [-41]])
def test_an_index_outside_names_the_pack(ds: ImageDataset, index: Any) -> None:
    with pytest.raises(IndexError, match=r"pack.bin has 40 records, asked for"):
        ds[index]


@pytest.mark.parametrize("index", [[True, False], [0.5], "3", [[1, 2]], None])
def test_what_is_no_index_is_refused(ds: ImageDataset, index: Any) -> None:
    with pytest.raises(TypeError, match="a flat sequence of ints"):
        ds[index]


def test_a_dataset_can_be_gone_through(tmp_path: Path) -> None:
    ds = ImageDataset(make_pack(tmp_path, 5, broken=[3]), crop=CROP, on_error="skip")
    with pytest.raises(DecodeError):  # and does not end there as if it were over
        for _ in ds:
            pass


def test_output_numpy(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, output="numpy")
    image, _ = ds[1]
    assert type(image) is np.ndarray
    assert image.shape == (16, 16, 3)
    ds.set_epoch(0)  # the first draws again
    images, _ = ds[[1, 2]]
    assert type(images) is np.ndarray
    assert np.array_equal(images[0], image)


def test_output_pil(pack: str) -> None:
    image, _ = ImageDataset(pack, crop=CROP, output="pil")[1]
    expected, _ = ImageDataset(pack, crop=CROP, output="numpy")[1]
    assert isinstance(image, Image.Image)
    assert np.array_equal(np.asarray(image), expected)


def test_gray(pack: str) -> None:
    ds = ImageDataset(pack, crop=packfmt.CenterCrop(16), mode="L")
    assert ds[0][0].shape == (1, 16, 16)
    assert ds[[0, 1]][0].shape == (2, 1, 16, 16)
    with packfmt.open(pack) as reader:
        expected = pillow_pixels(bytes(reader[0].data), "L")[2:18, 4:20, 0]
    image, _ = ImageDataset(pack, crop=packfmt.CenterCrop(16), mode="L", output="pil")[0]
    assert image.mode == "L"
    assert np.array_equal(np.asarray(image), expected)


def test_without_a_crop_images_keep_their_sizes(pack: str) -> None:
    ds = ImageDataset(pack)
    assert ds[8][0].shape == (3, 23, 25)
    with pytest.raises(ValueError, match="differing shapes"):
        ds[[0, 1]]


def test_images_of_one_size_need_no_crop(tmp_path: Path) -> None:
    ds = ImageDataset(make_pack(tmp_path, 4, same_size=True), flip=packfmt.HorizontalFlip(1), output="numpy")
    images, _ = ds[[0, 1]]
    expected = pillow_pixels(jpeg(24, 20, seed=1))
    assert np.array_equal(images[1], expected[:, ::-1])


def test_a_flip_without_a_crop(pack: str) -> None:
    flipped, _ = ImageDataset(pack, flip=packfmt.HorizontalFlip(1))[3]
    plain, _ = ImageDataset(pack)[3]
    assert torch.equal(flipped, plain.flip(2))


# Pixels


def test_crop_and_flip_are_decode_crop_resize_flip(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, flip=FLIP, seed=3, output="numpy")
    ds.set_epoch(2)
    indices = np.arange(20)
    keys = sample_keys(3, 2, indices)
    images, _ = ds[indices]
    with packfmt.open(pack) as reader:
        for index, flip in zip(indices, FLIP.flips(keys), strict=True):
            source = pillow_pixels(bytes(reader[index].data))
            height, width = source.shape[:2]
            box = CROP.boxes([height], [width], keys[index : index + 1])[0]
            cut = Image.fromarray(source[box[1] : box[3], box[0] : box[2]])
            expected = np.asarray(cut.resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
            assert np.abs(images[index] - (expected[:, ::-1] if flip else expected)).max() <= 1
    assert FLIP.flips(keys).any()
    assert not FLIP.flips(keys).all()


def test_flips_of_both_kinds(pack: str) -> None:
    plain, _ = ImageDataset(pack, crop=CROP)[3]
    down, across = packfmt.VerticalFlip(1), packfmt.HorizontalFlip(1)
    for flips, axes in (((down,), (1,)), ((across, down), (1, 2))):
        flipped, _ = ImageDataset(pack, crop=CROP, flip=flips)[3]
        assert torch.equal(flipped, plain.flip(axes))
    alone, _ = ImageDataset(pack, flip=packfmt.VerticalFlip(1))[3]
    assert torch.equal(alone, ImageDataset(pack)[3][0].flip(1))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_crop_says_how_to_resize(pack: str, interpolation: Any) -> None:
    crops = [
        packfmt.RandomResizedCrop(16, (1, 1), (1.2, 1.2), interpolation=interpolation),
        packfmt.Resize(16, interpolation=interpolation),
        packfmt.CenterCrop(16, resize=18, interpolation=interpolation),
    ]
    source = pillow_pixels(jpeg(20, 24))
    for crop in crops:
        image, _ = ImageDataset(pack, crop=crop, output="numpy")[0]
        box = crop.boxes([20], [24], sample_keys(0, 0, [0]))[0].tolist()
        expected = Image.fromarray(source).resize((16, 16), Image.Resampling[interpolation.upper()], box)
        assert np.abs(image.astype(int) - np.asarray(expected)).max() <= 2


def test_the_centre_of_photographs_is_that_of_the_resized_one(tmp_path: Path) -> None:
    """Of every shape: enlarged, very long, very high. torchvision's ImageNet pipeline is the reference."""
    paths = sorted((real_images() / "clothing" / "validation").rglob("*.jpg"))[::60]
    photos = [pillow_pixels(path.read_bytes()) for path in paths]
    photos += [photos[0][:100, :90], photos[1][:, :50], photos[2][100:140], photos[2][100:107]]
    path = packed(tmp_path, *(saved(photo, "PNG") for photo in photos), label=0)
    shown, _ = ImageDataset(path, crop=packfmt.CenterCrop(224, resize=256), output="numpy")[:]
    for photo, image in zip(photos, shown, strict=True):
        height, width = photo.shape[:2]
        short = min(height, width)
        whole = int(256 * width / short), int(256 * height / short)
        left, top = (round((side - 224) / 2.0) for side in whole)
        resized = Image.fromarray(photo).resize(whole, Image.Resampling.BILINEAR)
        expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
        assert np.abs(image - expected).max() <= 1


def test_the_shorter_side_alone_leaves_images_of_several_sizes(pack: str) -> None:
    options = {"crop": packfmt.Resize(shorter=16), "flip": packfmt.VerticalFlip(1), "fields": "boxes"}
    ds = ImageDataset(pack, output="numpy", **options)
    for index in range(3):
        image, boxes = ds[index]
        source = Image.fromarray(pillow_pixels(jpeg(20 + index, 24 + index, seed=index)))
        expected = np.asarray(source.resize((int(16 * (24 + index) / (20 + index)), 16), Image.Resampling.BILINEAR))
        assert np.abs(image - expected[::-1].astype(int)).max() <= 1
    assert np.allclose(boxes[0], [0, 0, image.shape[1] / 2, 16], atol=1e-4)
    tensors = ImageDataset(pack, crop=packfmt.Resize(shorter=16))
    images, _ = next(iter(packfmt.Loader(tensors, 8, shuffle=False, collate="pad")))
    assert images.shape == (8, 3, 16, max(int(16 * (24 + i % 7) / (20 + i % 5)) for i in range(8)))
    with pytest.raises(ValueError, match="differing shapes"):
        tensors[[0, 4]]


def test_the_shorter_side_of_images_alike_makes_one_array(tmp_path: Path) -> None:
    ds = ImageDataset(make_pack(tmp_path, 4, same_size=True), crop=packfmt.Resize(shorter=10))
    assert ds[:][0].shape == (4, 3, 12, 10)


def test_formats_that_pillow_decodes(tmp_path: Path) -> None:
    path = packed(tmp_path, png(), saved(picture(), "WEBP", lossless=True), png("L"), label=0)
    ds = ImageDataset(path, crop=packfmt.Resize(16), flip=packfmt.HorizontalFlip(1), output="numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, about pixels that must not be written to
        images, _ = ds[[0, 1, 2]]
    expected = Image.fromarray(picture()).resize((16, 16), Image.Resampling.BILINEAR)
    assert np.abs(images[0].astype(int) - np.asarray(expected)[:, ::-1]).max() <= 1
    assert np.array_equal(images[0], images[1])


@pytest.mark.parametrize("tag", range(1, 9))
def test_orientation(tmp_path: Path, tag: int) -> None:
    data = oriented_jpeg(tag)
    path = packed(tmp_path, data, label=0)
    for policy, upright in (("ignore", False), ("apply", True)):
        expected = pillow_pixels(data, upright=upright)
        whole, _ = ImageDataset(path, orientation=policy, output="numpy")[0]
        assert np.array_equal(whole, expected)
        crop = packfmt.RandomCrop((30, 20))
        cropped, _ = ImageDataset(path, crop=crop, orientation=policy, output="numpy")[0]
        height, width = expected.shape[:2]
        x0, y0, x1, y1 = crop.boxes([height], [width], sample_keys(0, 0, [0]))[0]
        assert np.array_equal(cropped, expected[y0:y1, x0:x1])


def test_boxes_count_in_the_upright_picture_where_orientation_is_applied(tmp_path: Path) -> None:
    # 48 x 40 pixels (height x width) as stored, 40 x 48 upright
    path = packed(tmp_path, oriented_jpeg(6), boxes=np.array([[30, 10, 48, 40]], np.float32))
    for policy, expected in (("apply", [[15, 5, 24, 20]]), ("ignore", [[18, 5, 24, 20]])):
        ds = ImageDataset(path, crop=packfmt.Resize((20, 24)), orientation=policy, fields="boxes")
        wanted = torch.tensor(expected) if policy == "apply" else torch.tensor([[18.0, 10 * 20 / 48, 24, 40 * 20 / 48]])
        assert torch.allclose(torch.as_tensor(ds[0][1]), wanted.float())


@pytest.mark.parametrize("rows", [None, 2], ids=["ragged", "fixed"])
@pytest.mark.parametrize("policy", ["apply", "ignore"])
@pytest.mark.parametrize("drawn", ["stored", "upright"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_boxes_are_turned_where_another_image_is_shown_than_they_were_drawn_on(
    tmp_path: Path, tag: int, drawn: Any, policy: Any, rows: int | None
) -> None:
    stored = [[30.0, 10, 38, 44], [0, 1, 2, 3]]  # of 48 x 40 pixels (height x width)
    height, width = (48, 40) if tag < 5 else (40, 48)
    upright = turn_boxes(stored, tag, (height, width))
    given = np.array(stored if drawn == "stored" else upright, np.float32)
    path = packed(tmp_path, oriented_jpeg(tag), columns=[Column("boxes", "<f4", (rows, 4))], boxes=given)
    options: dict[str, Any] = {"orientation": policy, "boxes": drawn, "fields": "boxes"}
    expected, size = (upright, (width, height)) if policy == "apply" else (stored, (40, 48))
    assert np.array_equal(ImageDataset(path, **options)[0][1], expected)
    cropped = ImageDataset(path, crop=packfmt.Resize(24), **options)[0][1]
    assert np.allclose(cropped, expected * (24 / np.array(size * 2)), atol=1e-4)


# Targets


def detection(folder: Path, count: int = 6) -> str:
    """A pack whose record i has i % 3 boxes, the first its left half, with labels, scores of boxes, and an area."""
    path = folder / "detection.bin"
    columns = [Column("boxes", "<f4", (None, 4)), Column("labels", "<i4", (None,)), Column("scores", "<f4", (None,))]
    with packfmt.create(path, columns=columns) as writer:
        for i in range(count):
            height, width = 20 + i, 24
            boxes = np.array([[0, 0, width / 2, height], [width - 4, 0, width, 4]], np.float32)[: i % 3]
            more = {"labels": np.arange(i % 3), "scores": np.full(i % 3, 0.5, np.float32)}
            writer.write(jpeg(height, width, seed=i), f"{i}.jpg", boxes=boxes, area=i / 2, name=f"n{i}", **more)
    return str(path)


@pytest.mark.parametrize("crop", [None, packfmt.Resize(48), packfmt.Resize(shorter=30)], ids=repr)
def test_torchvision_targets_are_a_list_of_dicts_of_tensors(tmp_path: Path, crop: Any) -> None:
    ds = ImageDataset(detection(tmp_path), targets="torchvision", label_offset=1, crop=crop, threads=2)
    with packfmt.Loader(ds, 4, shuffle=False, collate="list") as loader:
        (images, targets), _ = loader
    assert [type(images), type(targets), len(images), len(targets)] == [list, list, 4, 4]
    for index, (image, target) in enumerate(zip(images, targets, strict=True)):
        assert list(target) == ["boxes", "labels", "image_id"]
        assert [(value.dtype, tuple(value.shape)) for value in target.values()] == [
            (torch.float32, (index % 3, 4)),
            (torch.int64, (index % 3,)),
            (torch.int64, ()),
        ]
        assert target["labels"].tolist() == list(range(1, 1 + index % 3))
        assert target["image_id"].item() == index
        height, width = image.shape[1:]
        assert np.allclose(target["boxes"][:1], torch.tensor([[0, 0, width / 2, height]])[: index % 3], atol=1e-4)
        single = ds[index][1]
        assert all(torch.equal(single[name], target[name]) for name in target)


def test_torchvision_targets_hold_further_fields_and_lose_boxes_together(tmp_path: Path) -> None:
    fields = ("area", "scores", "name")
    seen: list[Any] = []
    ds = ImageDataset(
        detection(tmp_path),
        targets="torchvision",
        fields=fields,
        crop=packfmt.CenterCrop(16),
        target_transform=lambda target: seen.append(target) or target["labels"].tolist(),
    )
    assert ds[[2, 3]][1] == [[0], []]
    assert {name: value if isinstance(value, str) else value.tolist() for name, value in seen[0].items()} == {
        "boxes": [[0, 0, 8, 16]],
        "labels": [0],
        "area": 1.0,
        "scores": [0.5],
        "name": "n2",
        "image_id": 2,
    }


def test_torchvision_targets_have_no_box_without_area(tmp_path: Path) -> None:
    """The models refuse them."""
    path = packed(tmp_path, jpeg(20, 24), boxes=np.float32([[3, 3, 3, 9], [20, 0, 99, 9]]), labels=[5, 6])
    target = ImageDataset(path, targets="torchvision")[0][1]
    assert target["boxes"].tolist() == [[20, 0, 24, 9]]
    assert target["labels"].tolist() == [6]


def test_torchvision_targets_lose_labels_of_a_fixed_number_too(tmp_path: Path) -> None:
    columns = [Column("boxes", "<f4", (None, 4)), Column("labels", "<i8", (2,))]
    boxes = np.float32([[0, 0, 1, 1], [10, 10, 30, 30]])
    path = packed(tmp_path, jpeg(), columns=columns, boxes=boxes, labels=[4, 5])
    assert ImageDataset(path, targets="torchvision", crop=packfmt.CenterCrop(16))[0][1]["labels"].tolist() == [5]


def test_torchvision_targets_with_a_dataloader(tmp_path: Path) -> None:
    ds = ImageDataset(detection(tmp_path), targets="torchvision", crop=packfmt.Resize(32), threads=1)
    images, targets = next(iter(torch.utils.data.DataLoader(ds, 4)))
    assert images.shape == (4, 3, 32, 32)
    assert [len(target["boxes"]) for target in targets] == [0, 1, 2, 0]
    pairs = next(iter(torch.utils.data.DataLoader(ds, 4, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))))
    assert [target["image_id"].item() for target in pairs[1]] == [0, 1, 2, 3]


def test_torchvision_targets_need_boxes_with_labels(tmp_path: Path) -> None:
    path = packed(tmp_path, jpeg(), label=0)
    with pytest.raises(ValueError, match=r"no columns \['boxes', 'labels'\]; .*targets='torchvision' needs boxes and"):
        ImageDataset(path, targets="torchvision")


def test_torchvision_targets_need_a_label_for_each_box(tmp_path: Path) -> None:
    columns = [Column("labels", "<i8", (None,))]
    path = packed(tmp_path, jpeg(), columns=columns, boxes=np.float32([[0, 0, 5, 5]]), labels=[1, 2, 3])
    with pytest.raises(ValueError, match=r"record 0, key '0.*': 1 boxes are left and 3 labels"):
        ImageDataset(path, targets="torchvision")[0]


def test_fields(pack: str) -> None:
    assert ImageDataset(pack, crop=CROP, fields="score")[3][1] == 1.5
    target = ImageDataset(pack, crop=CROP, fields=["label", "key"])[3][1]
    assert target == {"label": 3, "key": "003.jpg"}
    _, targets = ImageDataset(pack, crop=CROP, fields=["label", "key"])[[3, 4]]
    assert targets["label"].tolist() == [3, 4]
    assert targets["key"] == ["003.jpg", "004.jpg"]


def test_no_fields(pack: str) -> None:
    assert ImageDataset(pack, crop=CROP, fields=())[0][1] == {}
    assert ImageDataset(pack, crop=CROP, fields=())[[0, 1]][1] == {}


def test_an_unknown_field_names_those_there_are(pack: str) -> None:
    with pytest.raises(ValueError, match=r"pack.bin: no columns \['labels'\]; there are .*label"):
        ImageDataset(pack, fields=["labels"])


def test_a_pack_without_labels(tmp_path: Path) -> None:
    ds = ImageDataset(packed(tmp_path, jpeg(), jpeg()))
    assert ds.labels is None
    assert ds[1][1] == -1
    assert ds[[0, 1]][1].tolist() == [-1, -1]


def test_target_transform(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, target_transform=lambda label: label % 3)
    assert ds[5][1] == 2
    assert ds[[5, 6]][1].tolist() == [2, 0]


def test_targets_are_the_users_own(pack: str) -> None:
    ds = ImageDataset(pack, crop=packfmt.Resize(16), fields=["label", "boxes", "names"])
    _, targets = ds[[1, 2]]
    targets["label"][:] = 0
    targets["names"][1][:] = 9
    sample = ds[2][1]
    sample["names"][:] = 9
    assert ds[2][1]["label"] == 2
    assert ds[2][1]["names"].tolist() == [0, 1]


def test_a_column_of_fixed_shape_is_no_list_for_each_box(tmp_path: Path) -> None:
    boxes = np.array([[0, 0, 6, 6], [34, 34, 40, 40]], np.float32)
    columns = [Column("boxes", "<f4", (None, 4)), Column("labels", "<i8", (None,)), Column("size", "<i8", (2,))]
    values = {"boxes": boxes, "labels": np.array([1, 2]), "size": np.array([40, 40])}
    path = packed(tmp_path, *[jpeg(40, 40)] * 6, columns=columns, **values)
    ds = ImageDataset(path, fields=("boxes", "labels", "size"), crop=packfmt.RandomCrop(16))
    single = [ds[index][1] for index in range(6)]
    ds.set_epoch(0)  # the first draws again
    batch = ds[list(range(6))][1]
    assert {len(target["boxes"]) for target in single} <= {0, 1}
    assert [target["size"].tolist() for target in single] == batch["size"].tolist() == [[40, 40]] * 6
    assert [target["labels"].tolist() for target in single] == [labels.tolist() for labels in batch["labels"]]


def test_boxes_follow_crop_and_flip_and_vanish_with_their_names(pack: str) -> None:
    # Record 29 is 24 x 25 (height x width): its boxes are the left half, and the top right pixel.
    fields = ["boxes", "names"]
    whole = ImageDataset(pack, crop=packfmt.Resize(48), fields=fields)[29][1]
    assert np.allclose(whole["boxes"], [[0, 0, 24, 48], [48 - 48 / 25, 0, 48, 2]], atol=1e-4)
    assert whole["names"].tolist() == [0, 1]

    flipped = ImageDataset(pack, crop=packfmt.Resize(48), flip=packfmt.HorizontalFlip(1), fields=fields)[29][1]
    assert np.allclose(flipped["boxes"][0], [24, 0, 48, 48], atol=1e-4)

    centre = ImageDataset(pack, crop=packfmt.CenterCrop(16), fields=fields)
    assert centre[29][1]["names"].tolist() == [0]
    _, targets = centre[[28, 29]]
    assert [names.tolist() for names in targets["names"]] == [[0], [0]]
    assert [len(boxes) for boxes in targets["boxes"]] == [1, 1]

    uncropped = ImageDataset(pack, flip=packfmt.HorizontalFlip(1), fields=fields)[29][1]
    assert np.allclose(uncropped["boxes"], [[12.5, 0, 25, 24], [0, 0, 1, 1]])


def test_boxes_of_fixed_number_may_vanish_too(tmp_path: Path) -> None:
    columns = [Column("boxes", "<f4", (2, 4)), Column("names", "<i4", (2,))]
    boxes = np.array([[0, 0, 1, 1], [10, 10, 30, 30]], np.float32)
    path = packed(tmp_path, jpeg(), jpeg(), columns=columns, boxes=boxes, names=np.array([4, 5], np.int32))
    ds = ImageDataset(path, crop=packfmt.CenterCrop(16), fields=["boxes", "names"])
    assert ds[0][1]["names"].tolist() == [5]
    assert [names.tolist() for names in ds[[0, 1]][1]["names"]] == [[5], [5]]


# Transforms


@pytest.mark.parametrize(("output", "kind"), [("tensor", torch.Tensor), ("numpy", np.ndarray), ("pil", Image.Image)])
def test_a_transform_gets_the_output_form(pack: str, output: Any, kind: type) -> None:
    seen = []
    ds = ImageDataset(pack, crop=CROP, output=output, transform=lambda image: seen.append(image) or 5)
    assert ds[0][0] == 5
    assert ds[[0, 1]][0].tolist() == [5, 5]
    assert all(isinstance(image, kind) for image in seen)
    assert len(seen) == 3


def test_transformed_tensors_are_stacked(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=lambda image: image.float() / 255)
    images, _ = ds[[0, 1]]
    assert images.dtype == torch.float32
    ds.set_epoch(0)  # the first draws again
    assert torch.equal(images[1], ds[1][0])


def test_an_error_of_a_transform_names_the_sample(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, transform=fail)
    for read in (lambda: ds[4], lambda: ds[[4, 5]], lambda: ds.__getitems__([4, 5])):
        with pytest.raises(Unlucky) as caught:
            read()
        assert caught.value.code == 7
        assert any("record 4, key '004.jpg'" in note for note in caught.value.__notes__)


def test_a_transform_may_read_the_dataset_itself(pack: str) -> None:
    plain = ImageDataset(pack, crop=CROP, threads=2)
    seen = ImageDataset(pack, crop=CROP, threads=2, transform=lambda image: image // 2 + plain[[0, 1, 2]][0][1] // 2)
    inner = ImageDataset.__new__(ImageDataset)
    inner.__dict__.update(seen.__dict__)
    inner._pool = plain._pool  # the same threads: those that wait must not wait for themselves
    assert inner[list(range(12))][0].shape == (12, 3, 16, 16)


def test_global_randomness_is_left_alone(pack: str) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    ds = ImageDataset(pack, crop=CROP, flip=FLIP, transform=add_noise)
    ds[3], ds[[4, 5]]
    list(packfmt.Loader(ds, 10))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


# Damaged records


@pytest.fixture(scope="module")
def bad_pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Records 3 and 5 are no images, a byte of record 4 is changed."""
    path = make_pack(tmp_path_factory.mktemp("packs"), 8, broken=[3, 5])
    damage(path, 4)
    return path


@pytest.mark.parametrize(("index", "error"), [(3, DecodeError), (4, CorruptError)])
def test_an_error_names_path_index_and_key(bad_pack: str, index: int, error: type[Any]) -> None:
    ds = ImageDataset(bad_pack, crop=CROP)
    for read in (lambda: ds[index], lambda: ds[[0, 1, index]], lambda: ds.__getitems__([0, index, 1])):
        with pytest.raises(error) as caught:
            read()
        assert (caught.value.path, caught.value.index, caught.value.key) == (bad_pack, index, f"00{index}.jpg")


@pytest.mark.parametrize("in_memory", [False, True])
def test_skipping_makes_batches_smaller(bad_pack: str, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadAhead, "everything_cached", lambda self: in_memory)  # records are read in two ways
    ds = ImageDataset(bad_pack, crop=CROP, on_error="skip")
    images, labels = ds[list(range(8))]
    assert labels.tolist() == [0, 1, 2, 6, 7]
    ds.set_epoch(0)  # the first draws again
    assert torch.equal(images[3], ds[6][0])
    assert ds.skipped == 3
    job = ds.start(range(8), 0)
    assert {place: type(error) for place, error in job.wait().items()} == {
        3: DecodeError, 4: CorruptError, 5: DecodeError
    }  # fmt: skip


def test_skipping_without_a_common_size(bad_pack: str) -> None:
    samples = ImageDataset(bad_pack, on_error="skip").__getitems__(list(range(8)))
    assert [label for _, label in samples] == [0, 1, 2, 6, 7]


def test_where_nothing_is_left_the_error_is_raised(bad_pack: str) -> None:
    ds = ImageDataset(bad_pack, crop=CROP, on_error="skip")
    for read in (lambda: ds[3], lambda: ds[[3, 5]], lambda: ds.__getitems__([3, 5])):
        with pytest.raises(DecodeError, match=r"003\.jpg"):
            read()


def test_a_broken_image_without_a_size_fits_every_crop(bad_pack: str) -> None:
    ds = ImageDataset(bad_pack, crop=packfmt.RandomCrop(16), on_error="skip")
    assert ds[[2, 3, 6]][1].tolist() == [2, 6]


def test_an_image_too_small_for_the_crop_is_named(pack: str) -> None:
    with pytest.raises(ValueError, match="RandomCrop needs images") as caught:
        ImageDataset(pack, crop=packfmt.RandomCrop(22))[[4, 3, 2, 1]]
    assert caught.value.__notes__ == ["it is record 1, key '001.jpg'"]


@pytest.mark.parametrize("crop", [packfmt.RandomCrop(22), packfmt.CenterCrop(22)], ids=["random", "center"])
def test_an_image_too_small_for_the_crop_is_skipped_when_asked(pack: str, crop: Any) -> None:
    fitting = ImageDataset(pack, crop=crop)[[2, 3, 4]]
    ds = ImageDataset(pack, crop=crop, on_error="skip")
    images, labels = ds[[4, 3, 2, 1]]
    assert labels.tolist() == [4, 3, 2]
    assert torch.equal(images, fitting[0].flip(0))
    assert ds.skipped == 1
    with packfmt.Loader(ds, batch_size=5, shuffle=False) as loader:
        assert {len(images) for images, _ in loader} == {3}
        assert loader.stats().skipped_keys[:2] == ("000.jpg", "001.jpg")


def test_what_a_crop_refuses_for_another_reason_is_not_skipped(pack: str) -> None:
    class Odd(packfmt.CenterCrop):
        def boxes(self, heights: Any, widths: Any, keys: Any) -> Any:
            if (np.asarray(heights) == 23).any():
                raise ValueError("23 rows")
            return super().boxes(heights, widths, keys)

    with pytest.raises(ValueError, match="23 rows") as caught:
        ImageDataset(pack, crop=Odd(20), on_error="skip")[[4, 3, 2, 1]]
    assert caught.value.__notes__ == ["it is record 3, key '003.jpg'"]


def test_a_skipped_record_does_not_keep_its_batch_alive(bad_pack: str) -> None:
    ds = ImageDataset(bad_pack, crop=CROP, on_error="skip", threads=1)
    gc.disable()
    try:
        job = ds.start([2, 4, 5], 0)
        assert list(job.wait()) == [1, 2]
        gone = weakref.ref(job)
        del job
        ds[[0, 1]]  # by now the thread has let go of it too
        assert gone() is None
    finally:
        gc.enable()


def test_unverified_reads_see_damage_only_where_it_cannot_be_decoded(tmp_path: Path) -> None:
    path = make_pack(tmp_path, 1)
    with packfmt.open(path) as reader:
        start = int(reader.offsets([0])[0])
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(NO_IMAGE)
    with pytest.raises(CorruptError):
        ImageDataset(path, crop=CROP)[0]
    with pytest.raises(DecodeError):
        ImageDataset(path, crop=CROP, verify=False)[0]


# Objects


def test_a_pickled_dataset_is_small_and_gives_the_same(tmp_path: Path) -> None:
    ds = ImageDataset(make_pack(tmp_path, 300), crop=CROP, flip=FLIP, transform=add_noise, threads=2, seed=4)
    ds.set_epoch(5)
    expected, _ = ds[[3, 200]]
    data = pickle.dumps(ds)
    assert len(data) < 10_000
    copy = pickle.loads(data)
    assert (copy.epoch, copy.threads) == (5, 2)
    assert torch.equal(copy[[3, 200]][0], expected)


def test_opening_makes_no_object_per_record(tmp_path: Path) -> None:
    def objects(count: int) -> int:
        path = make_pack(tmp_path, count, same_size=True, name=f"{count}.bin")
        gc.collect()
        before = len(gc.get_objects())
        ds = ImageDataset(path, crop=CROP)
        ds[[0, 1]], ds.labels
        gc.collect()
        return len(gc.get_objects()) - before

    objects(2)  # what is made once per process
    assert abs(objects(400) - objects(4)) < 100


def test_a_subclass_that_overrides_getitem_is_heard(pack: str) -> None:
    class Shifted(ImageDataset):
        def __getitem__(self, index: Any) -> Any:
            image, label = super().__getitem__(index)
            return image, label + 1000

    ds = Shifted(pack, crop=CROP)
    assert [label for _, label in ds.__getitems__([0, 1])] == [1000, 1001]
    with pytest.raises(TypeError, match="Shifted overrides __getitem__"):
        packfmt.Loader(ds, 4)


def test_handed_out_arrays_are_plain(ds: ImageDataset) -> None:
    assert type(ds.labels) is np.ndarray
    assert ds.labels.tolist() == list(range(40))
    assert ds.classes == ()


def test_a_closed_dataset_cannot_be_read(pack: str) -> None:
    with ImageDataset(pack, crop=CROP) as ds:
        ds[[0, 1]]
    ds.close()
    for index in (0, [0, 1]):
        with pytest.raises(ValueError, match="closed"):
            ds[index]


def test_wrong_kind_of_pack(pack: str) -> None:
    assert len(MMapImageDataset(pack)) == 40
    with pytest.raises(FormatError, match="MMapImageDataset"):
        packfmt.LMDBImageDataset(pack)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "'raise' and 'skip'"),
        ({"output": "pillow"}, "'tensor', 'numpy', 'pil'"),
        ({"mode": "CMYK"}, "'RGB' or 'L'"),
        ({"orientation": "upright"}, "'ignore' or 'apply'"),
        ({"targets": "coco"}, "targets='coco', allowed are 'columns', 'torchvision'"),
        ({"boxes": "turned"}, "boxes='turned', allowed are 'shown', 'stored', 'upright'"),
        ({"label_offset": 1}, "label_offset=1 goes with targets='torchvision' only"),
        ({"threads": 0}, "at least 1"),
        ({"prefetch": -1}, "not be negative"),
    ],
)
def test_options_are_checked(pack: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageDataset(pack, **options)


# Look-ahead


class _Job:
    def __init__(self, indices: Any) -> None:
        self.indices = indices.tolist()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class _Begun(list[_Job]):
    def __call__(self, indices: Any, epoch: int, draws: Any) -> Any:
        self.append(_Job(indices))
        return self[-1]


def _batches(*numbers: int) -> list[Any]:
    return [np.array([number]) for number in numbers]


class _WatchedCrop:
    """Notes the threads that plan."""

    size = CROP.size

    def __init__(self) -> None:
        self.threads: list[str] = []

    def boxes(self, *arguments: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return CROP.boxes(*arguments)


def test_a_batch_is_planned_once_and_by_a_decoding_thread(pack: str) -> None:
    crop = _WatchedCrop()
    with ImageDataset(pack, crop=crop, threads=3) as ds:
        ds.finish(ds.start(range(40), 0))
    assert len(crop.threads) == 1
    assert crop.threads[0].startswith("packfmt-decode")


def test_a_cancelled_batch_ends_with_the_chunk_in_hand(pack: str) -> None:
    seen, begun, gate = [], threading.Event(), threading.Event()

    def wait(image: Any) -> Any:
        seen.append(image)
        begun.set()
        gate.wait()
        return image

    finished: list[Any] = []
    with ImageDataset(pack, crop=CROP, transform=wait, threads=1) as ds:
        job = ds.start(range(40), 0, then=finished.append)
        begun.wait()
        job.cancel()
        gate.set()
    assert len(seen) == 40 // PIECES
    assert finished == []
    with pytest.raises(CancelledError):
        job.wait()


def test_a_batch_is_shared_out_more_finely_where_no_other_waits(pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    work = BatchJob._work

    def watched(self: BatchJob, plan: Any, start: int, stop: int) -> None:
        sizes.append(stop - start)
        work(self, plan, start, stop)

    begun, gate = threading.Event(), threading.Event()

    def wait(image: Any) -> Any:
        begun.set()
        gate.wait()
        return image

    monkeypatch.setattr(BatchJob, "_work", watched)
    with ImageDataset(pack, crop=CROP, transform=wait, threads=1) as ds:
        jobs = [ds.start([0], 0)]
        begun.wait()
        jobs += [ds.start(range(40), 0), ds.start(range(33), 0)]
        gate.set()
        for job in jobs:
            assert not job.wait()
    assert sizes == [1, MAX_CHUNK, 40 - MAX_CHUNK, 9, 9, 9, 6]


def test_a_batch_in_hand_keeps_no_threads(pack: str) -> None:
    ds = ImageDataset(pack, crop=CROP, threads=2)
    samples = ds.finish(ds.start(range(8), 0))
    pool = weakref.ref(ds._pool)
    del ds
    gc.collect()
    assert pool() is None
    assert len(samples) == 8


def test_nothing_holds_a_batch_that_was_dropped(pack: str) -> None:
    with ImageDataset(pack, crop=CROP, threads=2) as ds:
        job = ds.start(range(40), 0)
        ds.finish(job)
        dropped = weakref.ref(job)
        gc.disable()  # a circle would wait for it, and the batch's memory with it
        try:
            del job
            ds._pool.close()
            assert dropped() is None
        finally:
            gc.enable()


def test_announced_batches_are_begun_with_the_one_before_them() -> None:
    ahead, begun = PrefetchQueue(), _Begun()
    for batch in _batches(0, 1, 2):
        ahead.announce(0, batch, 2)
    assert begun == []
    assert ahead.take(0, np.array([0]), begun, 2).indices == [0]
    assert [job.indices for job in begun] == [[0], [1], [2]]
    assert ahead.take(0, np.array([1]), begun, 2) is begun[1]
    assert len(begun) == 3


def test_what_is_asked_for_out_of_turn_is_made_all_the_same() -> None:
    ahead, begun = PrefetchQueue(), _Begun()
    for batch in _batches(0, 1, 2):
        ahead.announce(0, batch, 2)
    ahead.take(0, np.array([0]), begun, 2)
    assert ahead.take(0, np.array([7]), begun, 2).indices == [7]
    assert [job.cancelled for job in begun] == [False, True, True, False]


def test_batches_that_the_loop_left_out_are_cancelled() -> None:
    ahead, begun = PrefetchQueue(), _Begun()
    for batch in _batches(0, 1, 2):
        ahead.announce(0, batch, 2)
    ahead.take(0, np.array([0]), begun, 2)
    assert ahead.take(0, np.array([2]), begun, 2) is begun[2]
    assert [job.cancelled for job in begun] == [False, True, False]


def test_the_same_batch_of_another_epoch_is_another() -> None:
    ahead, begun = PrefetchQueue(), _Begun()
    for batch in _batches(0, 1):
        ahead.announce(0, batch, 1)
    ahead.take(0, np.array([0]), begun, 1)
    assert ahead.take(1, np.array([1]), begun, 1) is begun[2]


@pytest.mark.filterwarnings(FORKS_BESIDE_THREADS)
def test_a_fork_forgets_what_its_parents_threads_work_on() -> None:
    ahead, begun = PrefetchQueue(), _Begun()
    for batch in _batches(0, 1):
        ahead.announce(0, batch, 1)
    ahead.take(0, np.array([0]), begun, 1)

    def made_anew() -> bool:
        job = ahead.take(0, np.array([1]), begun, 1)
        return job is begun[2]

    with ahead._lock:
        assert in_fork(made_anew) == 0
    assert ahead.take(0, np.array([1]), begun, 1) is begun[1]


def test_announcements_that_nobody_asks_for_are_forgotten() -> None:
    ahead, begun = PrefetchQueue(), _Begun()
    for batch in _batches(*range(100)):
        ahead.announce(0, batch, 2)
    assert len(ahead._announced) == 3
    ahead.clear()
    ahead.take(0, np.array([98]), begun, 2)
    assert len(begun) == 1


# ---- columns that say something else than the images


def lying_pack(
    folder: Path, monkeypatch: pytest.MonkeyPatch, images: list[bytes], sizes: list[tuple[int, int] | None]
) -> str:
    """A pack whose checksums are right, and its columns ``height`` and ``width`` as given where they are."""
    said = iter(sizes)

    def look(data: bytes) -> ImageInfo:
        found, size = sniff(data), next(said)
        return found if size is None else found._replace(height=size[0], width=size[1])

    with monkeypatch.context() as patch:
        patch.setattr(recording, "sniff", look)
        return packed(folder, *images)


@pytest.mark.parametrize("crop", [None, packfmt.Resize(shorter=224)], ids=["whole", "resized"])
@pytest.mark.parametrize(
    "size", [(30_000, 30_000), (100_000, 100_000), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (1000, 1000)], ids=str
)
def test_memory_does_not_follow_columns_that_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], crop: Any
) -> None:
    path = lying_pack(tmp_path, monkeypatch, [jpeg(20, 24), jpeg(20, 24, seed=1)], [size, None])
    message = rf"columns say {size[1]}x{size[0]} pixels, the image's header 24x20: packfmt convert"
    with ImageDataset(path, crop=crop) as ds:
        for ask in (lambda: ds[0], lambda: ds[[0, 1]], lambda: list(packfmt.Loader(ds, batch_size=1, shuffle=False))):
            with pytest.raises(DecodeError, match=message) as caught:
                ask()
            assert (caught.value.path, caught.value.index, caught.value.key) == (path, 0, "0")
    with ImageDataset(path, crop=crop, on_error="skip") as ds:
        images, _ = ds[[0, 1, 1]]
        assert images.shape == ((2, 3, 20, 24) if crop is None else (2, 3, 224, 268))


def test_all_records_may_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [jpeg(20, 24, seed=number) for number in range(3)]
    path = lying_pack(tmp_path, monkeypatch, images, [(30_000, 30_000)] * 3)
    with ImageDataset(path, on_error="skip") as ds:
        for ask in (lambda: ds[[0, 1, 2]], lambda: list(packfmt.Loader(ds, batch_size=3, shuffle=False))):
            with pytest.raises(DecodeError, match="columns say 30000x30000") as caught:
                ask()
            assert caught.value.index == 0


def test_an_image_of_one_pixel_does_not_pass_where_the_columns_say_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lying_pack(tmp_path, monkeypatch, [saved(picture(1, 1), "PNG")], [(30_000, 30_000)])
    with ImageDataset(path) as ds, pytest.raises(DecodeError, match="columns say 30000x30000"):
        ds[0]


def test_a_header_that_says_as_much_as_the_columns_is_refused_by_its_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(jpeg(20, 24))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (30_000).to_bytes(2, "big") * 2
    path = lying_pack(tmp_path, monkeypatch, [bytes(data)], [(30_000, 30_000)])
    with ImageDataset(path) as ds, pytest.raises(DecodeError, match="more than max_pixels"):
        ds[0]


def test_a_resize_that_would_make_too_many_pixels_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path, saved(picture(1, 4000), "PNG"))
    message = r"4000x1 pixels would come out as 2000000x500, more than .* or Resize with max_size"
    with ImageDataset(path, crop=packfmt.Resize(shorter=500)) as ds, pytest.raises(DecodeError, match=message):
        ds[0]
    with ImageDataset(path, crop=packfmt.Resize(shorter=500, max_size=600)) as ds:
        assert ds[0][0].shape == (3, 1, 600)


def test_large_and_flat_images_are_decoded(tmp_path: Path) -> None:
    data = saved(Image.new("1", (2100, 2100), 1), "PNG")
    assert len(data) * FLAT < 2100 * 2100
    path = packed(tmp_path, data)
    with ImageDataset(path) as ds:
        assert torch.equal(ds[0][0], torch.full((3, 2100, 2100), 255, dtype=torch.uint8))


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
def test_a_large_turned_image_agrees_with_its_columns(tmp_path: Path, orientation: Any) -> None:
    path = packed(tmp_path, with_segment(jpeg(2100, 2000), 0xE1, b"Exif\0\0" + exif(6)))
    with ImageDataset(path, orientation=orientation) as ds:
        assert ds[0][0].shape == ((3, 2000, 2100) if orientation == "apply" else (3, 2100, 2000))


def test_a_damaged_record_whose_size_is_doubted_is_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lying_pack(tmp_path, monkeypatch, [jpeg(20, 24)], [(30_000, 30_000)])
    damage(path, 0)
    with ImageDataset(path) as ds, pytest.raises(CorruptError, match="do not match their checksum"):
        ds[0]


@pytest.mark.parametrize("size", [(20, 25), (21, 24), (19, 24), (1, 1)], ids=str)
def test_an_image_of_nearly_the_size_that_the_columns_say_is_refused_in_any_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    images = [jpeg(20, 24), jpeg(20, 24, seed=1), jpeg(18, 22)]
    path = lying_pack(tmp_path, monkeypatch, images, [size, None, None])
    with ImageDataset(path) as ds:
        loader = packfmt.Loader(ds, batch_size=3, shuffle=False, collate="list")
        for ask in (lambda: ds[0], lambda: list(loader)):
            with pytest.raises(DecodeError, match=r"24x20") as caught:
                ask()
            assert caught.value.index == 0


def test_equal_images_that_are_decoded_one_by_one_are_stacked_channels_last(tmp_path: Path) -> None:
    data = saved(Image.new("1", (900, 1000), 1), "PNG")  # so flat that no array is made for all beforehand
    assert len(data) * FLAT < 900 * 1000
    with ImageDataset(packed(tmp_path, data, data)) as ds:
        images, _ = ds[[0, 1]]
    assert images.shape == (2, 3, 1000, 900)
    assert images.is_contiguous(memory_format=torch.channels_last)


LYING_PROGRAM = """
import resource, sys
import packfmt

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def batches(path):
    failed = 0
    for crop in (None, packfmt.Resize(shorter=16)):
        with packfmt.ImageDataset(path, crop=crop, threads=1) as ds:
            for index in range(len(ds)):
                try:
                    ds[[index] * 16]
                except packfmt.DecodeError:
                    failed += 1
    return failed

batches(sys.argv[1])  # everything that is imported
before = peak()
print(batches(sys.argv[2]), peak() - before)
"""


def test_memory_is_no_more_than_one_header_says_where_headers_lie_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("resource")
    good = packed(tmp_path, jpeg(20, 24))
    data = bytearray(jpeg(20, 24))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (8000).to_bytes(2, "big") * 2
    sizes = [(8000, 8000), (30_000, 30_000), (100_000, 100_000), (8000, 8000)]
    (tmp_path / "lying").mkdir()
    images = [bytes(data), bytes(data), bytes(data), jpeg(20, 24)]
    path = lying_pack(tmp_path / "lying", monkeypatch, images, sizes)
    run = subprocess.run([sys.executable, "-c", LYING_PROGRAM, good, path], check=True, capture_output=True, text=True)
    failed, mebibytes = map(int, run.stdout.split())
    assert failed == 2 * len(sizes)
    assert mebibytes < 250  # one picture of 8000 x 8000 takes 183, sixteen 3000


def test_verify_compares_sizes_where_it_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [None, (30_000, 30_000), (24, 20), (0, 0)]
    images = [jpeg(20, 24, seed=number) for number in range(4)]
    path = lying_pack(tmp_path, monkeypatch, images, sizes)
    assert packfmt.verify(path).ok
    found = packfmt.verify(path, decode=True).damaged
    assert [(damage.path, damage.index, damage.key) for damage in found] == [(path, at, str(at)) for at in (1, 2, 3)]
    assert "columns say 30000x30000 pixels, the image has 24x20: packfmt convert" in found[0].message
    packfmt.convert(path, tmp_path / "again.bin")
    assert packfmt.verify(tmp_path / "again.bin", decode=True).ok


@pytest.mark.parametrize("orientation", [1, 6])
def test_verify_finds_nothing_in_images_that_are_turned(tmp_path: Path, orientation: int) -> None:
    turned = [with_segment(jpeg(20, 24), 0xE1, b"Exif\0\0" + exif(orientation)), saved(picture(20, 24), "TIFF")]
    assert packfmt.verify(packed(tmp_path, *turned), decode=True).ok
