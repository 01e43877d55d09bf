"""HDF5 layouts, each written as its original writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import recogniser
from make import decoded, encoded, pixels

from packfmt.errors import DecodeError, SourceError
from packfmt.record import Column
from packfmt.sources.hdf5.source import HDF5Source

recognise = recogniser("hdf5")

h5py = pytest.importorskip("h5py")

STACK = np.stack([pixels(n, 8, 10) for n in range(7)])


def write(path: Path, **datasets: Any) -> Path:
    """A file with these datasets; "__" in a name stands for "/"."""
    with h5py.File(path, "w") as file:
        for name, value in datasets.items():
            file[name.replace("__", "/")] = value
    return path


def images(source: HDF5Source) -> np.ndarray:
    return np.stack([decoded(record.data) for record in source])


def column(source: HDF5Source, name: str = "label") -> list[Any]:
    return [record.columns[name] for record in source]


def test_patch_camelyon_pairs_its_files(tmp_path: Path) -> None:
    write(tmp_path / "camelyonpatch_level_2_split_test_x.h5", x=STACK)
    write(tmp_path / "camelyonpatch_level_2_split_test_y.h5", y=np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1))
    for path in (tmp_path, tmp_path / "camelyonpatch_level_2_split_test_x.h5"):
        assert recognise(path) == "hdf5"
        with HDF5Source(path) as source:
            assert source.columns == (Column("label", "|u1"),)
            assert source.count() == 7
            np.testing.assert_array_equal(images(source), STACK)
            assert column(source) == list(range(7))


def test_galaxy10_keeps_what_lies_beside_the_images(tmp_path: Path) -> None:
    beside = {"ans": np.arange(7, dtype=np.uint8), "ra": np.linspace(0, 1, 7), "junk": [1, 2]}
    path = write(tmp_path / "g.h5", images=STACK, **beside)
    with HDF5Source(path) as source:
        assert source.columns == (Column("label", "|u1"), Column("ra", "<f8"))
        np.testing.assert_array_equal(images(source), STACK)
        assert column(source, "ra") == np.linspace(0, 1, 7).tolist()
        assert source.lost == ["junk"]


def test_3dshapes_factors_are_a_vector_and_no_class_ids(tmp_path: Path) -> None:
    factors = np.random.default_rng(1).random((7, 6))
    with h5py.File(tmp_path / "3dshapes.h5", "w") as file:
        file.create_dataset("images", data=STACK, chunks=(3, 4, 5, 1), compression="gzip")
        file["labels"] = factors
    with HDF5Source(tmp_path / "3dshapes.h5") as source:
        assert source.columns == (Column("label", "<f8", (6,)),)
        np.testing.assert_array_equal(images(source), STACK)
        assert column(source) == factors.tolist()
        assert any("not class ids" in note for note in source.notes)


@pytest.mark.parametrize("kind", ["string", "opaque"])
def test_isic_2024_has_one_scalar_per_image(tmp_path: Path, kind: str) -> None:
    data = {f"ISIC_{n:07d}": encoded(n) for n in range(4)}
    made = np.bytes_ if kind == "string" else np.void
    path = write(tmp_path / "train-image.hdf5", **{key: made(value) for key, value in data.items()})
    with HDF5Source(path) as source:
        assert {record.key: bytes(record.data) for record in source} == data
        assert source.columns == ()


def test_flowers_join_the_captions_of_the_same_image(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "flowers.hdf5", "w") as file:
        for name in ("image_1", "image_2"):
            for number in range(3):
                group = file.create_group(f"train/{name}_{number}")
                group["name"] = name
                group["img"] = np.void(encoded(int(name[-1])))
                group["embeddings"] = np.zeros(4, np.float32)
                group["class"] = "class_00077"
                group["txt"] = np.array(f"caption {number}\n", dtype=object)
    with HDF5Source(tmp_path / "flowers.hdf5") as source:
        found = list(source)
        assert [(record.key, bytes(record.data)) for record in found] == [
            ("train/image_1_0", encoded(1)),
            ("train/image_2_0", encoded(2)),
        ]
        assert found[0].columns["caption"].split() == ["caption", "0", "caption", "1", "caption", "2"]
        assert found[0].columns["class"] == "class_00077"
        assert sum(source.skipped.values()) == 4


def test_captioning_tutorial_is_nchw_rgb(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "TRAIN_IMAGES_coco.hdf5", "w") as file:
        file.attrs["captions_per_image"] = 5
        file["images"] = STACK.transpose(0, 3, 1, 2)
    with HDF5Source(tmp_path / "TRAIN_IMAGES_coco.hdf5") as source:
        np.testing.assert_array_equal(images(source), STACK)
        assert source.metadata == {"captions_per_image": 5}


def test_visual_genome_is_bgr_and_padded(tmp_path: Path) -> None:
    heights, widths = np.arange(2, 9), np.arange(10, 3, -1)
    path = write(
        tmp_path / "imdb_1024.h5",
        images=STACK.transpose(0, 3, 1, 2)[:, ::-1],
        image_heights=heights,
        image_widths=widths,
        image_ids=np.arange(7),
    )
    with HDF5Source(path) as source:
        for number, record in enumerate(source):
            np.testing.assert_array_equal(decoded(record.data), STACK[number, : heights[number], : widths[number]])
        assert column(source, "image_ids") == list(range(7))


@pytest.mark.parametrize("chunks", [None, (2,), (100,)])
def test_rows_of_differing_length(tmp_path: Path, chunks: tuple[int] | None) -> None:
    count = 130
    with h5py.File(tmp_path / "cub.h5", "w") as file:
        rows = file.create_dataset("x", (count,), h5py.vlen_dtype(np.uint8), chunks=chunks)
        for number in range(count):
            rows[number] = np.frombuffer(encoded(number), np.uint8)
        file["y"] = np.arange(count, dtype=np.int32)
    with HDF5Source(tmp_path / "cub.h5") as source:
        assert [bytes(record.data) for record in source] == [encoded(n) for n in range(count)]
        assert column(source) == list(range(count))


KINDS = ("JPEG", "PNG", "GIF", "WEBP", "BMP")


def padded(kind: str) -> tuple[list[bytes], np.ndarray]:
    files = [encoded(n, kind, height=n + 5) for n in range(4)]
    if kind == "BMP":  # bottom row first, so a black picture ends in NULs
        files[1] = files[1][:54] + bytes(len(files[1]) - 54)
    rows = np.zeros((4, max(map(len, files)) + 7), np.uint8)
    for row, file in zip(rows, files, strict=True):
        row[: len(file)] = np.frombuffer(file, np.uint8)
    return files, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["rows", "rows and lengths", "opaque", "string"])
def test_padded_rows_are_cut_where_the_image_ends(tmp_path: Path, kind: str, form: str) -> None:
    files, rows = padded(kind)
    flat = np.ascontiguousarray(rows).view(f"V{rows.shape[1]}")[:, 0]
    data = {"images": rows if form.startswith("rows") else flat if form == "opaque" else flat.view(f"S{rows.shape[1]}")}
    if form == "rows and lengths":
        data["image_lengths"] = np.array([len(file) for file in files])
    with HDF5Source(write(tmp_path / "x.h5", **data)) as source:
        assert [bytes(record.data) for record in source] == files
        assert source.columns == ()


@pytest.mark.parametrize("kind", ["WEBP", "BMP"])
def test_nuls_that_numpy_dropped_are_put_back(tmp_path: Path, kind: str) -> None:
    files, _ = padded(kind)
    whole = files[1] if kind == "BMP" else files[1][:-2] + b"\0\0"
    with HDF5Source(write(tmp_path / "x.h5", images=np.array([files[0][:30], whole], "S").astype("S"))) as source:
        assert bytes(list(source.entries())[1].data) == whole
    with HDF5Source(write(tmp_path / "y.h5", one=np.bytes_(whole))) as source:
        assert [bytes(record.data) for record in source] == [whole]


def test_a_padded_row_without_an_end_is_bad(tmp_path: Path) -> None:
    files, rows = padded("JPEG")
    rows[2, len(files[2]) - 2 :] = 0
    with HDF5Source(write(tmp_path / "x.h5", images=rows)) as source:
        handles = list(source.entries())
        assert bytes(source.load(handles[3]).data) == files[3]
        with pytest.raises(DecodeError, match="no end marker"):
            source.load(handles[2])


def episode(path: Path, compressed: bool) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["sim"] = False
        file["action"] = np.zeros((7, 14))
        file["observations/qpos"] = np.zeros((7, 14))
        for camera in ("cam_high", "cam_left"):
            if compressed:
                file.attrs["compress"] = True
                frames = [encoded(n) for n in range(7)]
                rows = np.zeros((7, max(map(len, frames))), np.uint8)
                for row, frame in zip(rows, frames, strict=True):
                    row[: len(frame)] = np.frombuffer(frame, np.uint8)
                file[f"observations/images/{camera}"] = rows
            else:
                file[f"observations/images/{camera}"] = STACK
        if compressed:
            file["compress_len"] = np.zeros((2, 7))


@pytest.mark.parametrize("compressed", [False, True])
def test_aloha_episodes(tmp_path: Path, compressed: bool) -> None:
    for number in (0, 2, 10):
        episode(tmp_path / f"episode_{number}.hdf5", compressed)
    with HDF5Source(tmp_path) as source:
        assert source.count() == 3 * 2 * 7
        assert source.metadata["cameras"] == ["cam_high", "cam_left"]
        found = list(source)
        assert [record.key for record in found[::14]] == [
            f"episode_{n}/observations/images/cam_high/000000" for n in (0, 2, 10)
        ]
        told = [tuple(record.columns[name] for name in ("episode", "camera", "frame")) for record in found]
        assert told == [(e, c, f) for e in range(3) for c in range(2) for f in range(7)]
        assert source.describe()["lost"] == ["action", *(["compress_len"] if compressed else []), "qpos"]
        if compressed:
            assert bytes(found[3].data) == encoded(3)
        else:
            np.testing.assert_array_equal(decoded(found[3].data), STACK[3])


def test_robomimic_flattens_demonstrations_in_their_order(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "demo.hdf5", "w") as file:
        for demo in (0, 1, 2, 10):
            file[f"data/demo_{demo}/obs/agentview_image"] = STACK[: demo % 3 + 1]
            file[f"data/demo_{demo}/next_obs/agentview_image"] = STACK[: demo % 3 + 1]
            file[f"data/demo_{demo}/actions"] = np.zeros((demo % 3 + 1, 7))
    with HDF5Source(tmp_path / "demo.hdf5") as source:
        assert column(source, "episode") == [0, 1, 1, 2, 2, 2, 3, 3]
        assert [record.key.split("/")[1] for record in source][-1] == "demo_10"
        assert any("next_obs" in note for note in source.notes)
        assert source.lost == ["actions"]


@pytest.mark.parametrize("form", ["bytes", "array"])
def test_a_group_per_class(tmp_path: Path, form: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name in ("dog", "cat"):
            for number in range(3):
                value = np.void(encoded(number)) if form == "bytes" else pixels(number)
                file[f"train/{name}/{number}.jpg"] = value
    with HDF5Source(tmp_path / "x.h5") as source:
        assert source.classes == ("cat", "dog")
        assert column(source) == [0, 0, 0, 1, 1, 1]
        found = list(source)
        assert found[4].key == "train/dog/1.jpg"
        expected = decoded(encoded(1)) if form == "bytes" else pixels(1)
        np.testing.assert_array_equal(decoded(found[4].data), expected)


def test_floats_need_a_range(tmp_path: Path) -> None:
    path = write(tmp_path / "c.h5", pixel_values=(STACK / 255).astype("f4").transpose(0, 3, 1, 2), labels=np.arange(7))
    with pytest.raises(SourceError, match="value_range='0,1'"):
        HDF5Source(path)
    with HDF5Source(path, value_range="0,1") as source:
        np.testing.assert_array_equal(images(source), STACK)
        assert column(source) == list(range(7))


@pytest.mark.parametrize("value", [1.5, -0.1, np.nan, np.inf])
def test_floats_outside_their_range_are_bad(tmp_path: Path, value: float) -> None:
    array = (STACK / 255).astype("f4")
    array[2, 3, 3, 1] = value
    with HDF5Source(write(tmp_path / "c.h5", images=array), value_range="0,1") as source:
        handles = list(source.entries())
        source.load(handles[1])
        with pytest.raises(DecodeError, match="outside value_range"):
            source.load(handles[2])


@pytest.mark.parametrize("dtype", ["<u2", "<i8", "?"])
def test_wider_numbers_are_never_cast_silently(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "c.h5", images=(STACK > 99).astype(dtype))
    with pytest.raises(SourceError, match="value_range"):
        HDF5Source(path)
    with HDF5Source(path, value_range="0,1") as source:
        np.testing.assert_array_equal(images(source), (STACK > 99) * np.uint8(255))


@pytest.mark.parametrize("axes", ["HWCN", "CHWN", "NCWH", "WHCN"])
def test_any_order_of_axes_can_be_told(tmp_path: Path, axes: str) -> None:
    array = STACK.transpose(["NHWC".index(letter) for letter in axes])
    with HDF5Source(write(tmp_path / "c.h5", images=array), layout=axes) as source:
        np.testing.assert_array_equal(images(source), STACK)


@pytest.mark.parametrize("shape", [(7, 3, 8, 3), (8, 10, 3, 7), (7, 8, 10), (7, 4, 4, 3)])
def test_ambiguous_axes_are_refused_with_the_option_to_give(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(SourceError, match="layout='NHWC'"):
        HDF5Source(write(tmp_path / "c.h5", images=np.zeros(shape, np.uint8)))


def test_gray_images_when_told(tmp_path: Path) -> None:
    with HDF5Source(write(tmp_path / "c.h5", images=STACK[..., 0]), layout="NHW") as source:
        np.testing.assert_array_equal(images(source), STACK[..., 0])


def test_matlab_reverses_the_axes_and_says_so(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.mat", "w", userblock_size=512) as file:
        file["images"] = STACK.transpose(0, 3, 2, 1)  # H, W, C, N in MATLAB
        file["images"].attrs["MATLAB_class"] = np.bytes_("uint8")
    with pytest.raises(SourceError, match=r"MATLAB.*layout='NCWH'"):
        HDF5Source(tmp_path / "m.mat")
    with HDF5Source(tmp_path / "m.mat", layout="NCWH") as source:
        np.testing.assert_array_equal(images(source), STACK)


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_channels(tmp_path: Path, channels: str) -> None:
    with HDF5Source(write(tmp_path / "c.h5", images=STACK), channels=channels) as source:
        np.testing.assert_array_equal(images(source), STACK if channels == "rgb" else STACK[..., ::-1])
        assert source.notes == []


def test_jpeg_only_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "c.h5", images=STACK)
    with HDF5Source(path, encode="jpeg:90") as source:
        assert all(bytes(record.data[:3]) == b"\xff\xd8\xff" for record in source)
    with pytest.raises(ValueError, match="encoding"):
        HDF5Source(path, encode="gif")


@pytest.mark.parametrize(
    ("name", "label"),
    [("x_train", "y_train"), ("train_img", "train_label"), ("train_set_x", "train_set_y"), ("data", "target")],
)
def test_labels_are_found_by_the_images_name(tmp_path: Path, name: str, label: str) -> None:
    with HDF5Source(write(tmp_path / "c.h5", **{name: STACK, label: np.arange(7)})) as source:
        assert column(source) == list(range(7))


def test_labels_by_option(tmp_path: Path) -> None:
    path = write(tmp_path / "c.h5", images=STACK, labels=np.arange(7), meta__z=np.arange(7) * 2)
    with HDF5Source(path, labels="meta/z") as source:
        assert column(source) == [0, 2, 4, 6, 8, 10, 12]
    with HDF5Source(path, labels="") as source:
        assert "label" not in [one.name for one in source.columns]
    with pytest.raises(SourceError, match="no dataset at /nowhere"):
        HDF5Source(path, labels="nowhere")


@pytest.mark.parametrize("count", [6, 8])
def test_labels_of_another_length_are_an_error(tmp_path: Path, count: int) -> None:
    with pytest.raises(SourceError, match=f"/labels has {count} labels, /images has 7 images"):
        HDF5Source(write(tmp_path / "c.h5", images=STACK, labels=np.arange(count)))


def test_float_and_text_labels(tmp_path: Path) -> None:
    with HDF5Source(write(tmp_path / "c.h5", images=STACK, labels=np.arange(7) / 2)) as source:
        assert source.columns == (Column("label", "<f8"),)
        assert column(source) == (np.arange(7) / 2).tolist()
        assert any("not class ids" in note for note in source.notes)
    with HDF5Source(write(tmp_path / "d.h5", images=STACK, labels=[f"wörd {n}" for n in range(7)])) as source:
        assert column(source) == [f"wörd {n}" for n in range(7)]
        assert not any("labels" in note for note in source.notes)


def test_several_stacks_need_a_choice(tmp_path: Path) -> None:
    path = write(tmp_path / "c.h5", train_x=STACK, train_y=np.arange(7), test_x=STACK[:3], test_y=np.arange(3))
    with pytest.raises(SourceError, match="name one with images="):
        HDF5Source(path)
    with HDF5Source(path, images="test_x") as source:
        assert column(source) == [0, 1, 2]
    with pytest.raises(SourceError, match="nothing at /other"):
        HDF5Source(path, images="/other")


def test_masks_beside_images_are_noted(tmp_path: Path) -> None:
    with HDF5Source(write(tmp_path / "c.h5", images=STACK, masks=STACK[..., :1])) as source:
        np.testing.assert_array_equal(images(source), STACK)
        assert any("/masks" in note for note in source.notes)


def test_a_second_iteration_gives_the_same(tmp_path: Path) -> None:
    with HDF5Source(write(tmp_path / "c.h5", images=STACK)) as source:
        first = [(record.key, bytes(record.data)) for record in source]
        assert [(record.key, bytes(record.data)) for record in source] == first


def test_opaque_values_with_a_tag_are_read(tmp_path: Path) -> None:
    files = [encoded(n) for n in range(3)]
    width = max(map(len, files))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        kind = h5py.h5t.create(h5py.h5t.OPAQUE, width)
        kind.set_tag(b"image/jpeg")
        data = h5py.h5d.create(file.id, b"images", kind, h5py.h5s.create_simple((3,)))
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(files, dtype=f"V{width}"), kind)
    with HDF5Source(tmp_path / "x.h5") as source:
        assert [bytes(record.data) for record in source] == files


def test_a_timeout_out_of_range_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(ValueError, match=r"x\.h5: timeout 1e\+18 must be above 0 and at most 86400 seconds"):
        HDF5Source(tmp_path / "x.h5", timeout=1e18)
