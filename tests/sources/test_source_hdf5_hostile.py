"""Damaged, hostile and unsuitable HDF5 files: one clear line each; no other file is opened and nothing is run."""

from __future__ import annotations

import os
import pickle
import random
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import recogniser
from make import Bomb, decoded, encoded, pixels

from packfmt.errors import DecodeError, SourceError
from packfmt.sources.hdf5.source import HDF5Source

recognise = recogniser("hdf5")

h5py = pytest.importorskip("h5py")

STACK = np.stack([pixels(n) for n in range(6)])
SECRET = np.full((6, 8, 8, 3), 77, np.uint8)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that no conversion of another one may read: a set of images, and raw bytes."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with h5py.File(folder / "secret.h5", "w") as file:
        file["images"] = SECRET
        file["group/images"] = SECRET
    (folder / "secret.raw").write_bytes(SECRET.tobytes())
    return folder


def external_link(file: Any, secret: Path) -> None:
    file["images"] = h5py.ExternalLink(str(secret / "secret.h5"), "/images")


def external_group(file: Any, secret: Path) -> None:
    file["train"] = h5py.ExternalLink(str(secret / "secret.h5"), "/group")


def external_root(file: Any, secret: Path) -> None:
    file["train"] = h5py.ExternalLink(str(secret / "secret.h5"), "/")


def external_deep(file: Any, secret: Path) -> None:
    file.create_group("a/b")["c"] = h5py.ExternalLink(str(secret / "secret.h5"), "/group/images")


def external_relative(file: Any, secret: Path) -> None:
    file["images"] = h5py.ExternalLink("elsewhere/secret.h5", "/images")


def external_label(file: Any, secret: Path) -> None:
    file["images"] = STACK
    file["labels"] = h5py.ExternalLink(str(secret / "secret.h5"), "/images")


def external_beside_many(file: Any, secret: Path) -> None:
    for number in range(70):
        file[f"a{number:03d}"] = np.void(encoded(number))
    file["z"] = h5py.ExternalLink(str(secret / "secret.h5"), "/images")


def soft_link(file: Any, secret: Path) -> None:
    file["real"] = STACK
    file["images"] = h5py.SoftLink("/real")


def soft_through_external(file: Any, secret: Path) -> None:
    file["out"] = h5py.ExternalLink(str(secret / "secret.h5"), "/")
    file["images"] = h5py.SoftLink("/out/images")


def soft_dangling(file: Any, secret: Path) -> None:
    file["images"] = h5py.SoftLink("/nowhere")


def soft_circle(file: Any, secret: Path) -> None:
    file["images"] = h5py.SoftLink("/images")


def external_storage(file: Any, secret: Path) -> None:
    raw = (str(secret / "secret.raw"), 0, h5py.h5f.UNLIMITED)
    file.create_dataset("images", SECRET.shape, np.uint8, external=[raw])


def _virtual_name(secret: Path) -> str:
    """In names of virtual sources HDF5 replaces %b."""
    return str(secret / "secret.h5").replace("%", "%%")


def virtual(file: Any, secret: Path) -> None:
    layout = h5py.VirtualLayout(SECRET.shape, np.uint8)
    layout[:] = h5py.VirtualSource(_virtual_name(secret), "images", SECRET.shape)
    file.create_virtual_dataset("images", layout)


def virtual_unlimited(file: Any, secret: Path) -> None:
    layout = h5py.VirtualLayout(SECRET.shape, np.uint8, maxshape=(None, 8, 8, 3))
    source = h5py.VirtualSource(_virtual_name(secret), "images", SECRET.shape, maxshape=(None, 8, 8, 3))
    layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    file.create_virtual_dataset("images", layout)


def named_types_and_links(file: Any, secret: Path) -> None:
    file["type"] = np.dtype("f8")
    file["x"] = h5py.ExternalLink(str(secret / "secret.h5"), "/images")


WAYS_OUT = [
    external_link,
    external_group,
    external_root,
    external_deep,
    external_relative,
    external_label,
    external_beside_many,
    soft_link,
    soft_through_external,
    soft_dangling,
    soft_circle,
    external_storage,
    virtual,
    virtual_unlimited,
    named_types_and_links,
]


@pytest.mark.parametrize("make", WAYS_OUT, ids=lambda make: make.__name__)
def test_no_other_file_is_ever_read(tmp_path: Path, secret: Path, make: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        make(file, secret)
    with pytest.raises(SourceError, match=r"link|other files") as error:
        list(HDF5Source(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["images", "labels"])
@pytest.mark.parametrize("path", ["out/images", "out/group/images", "soft/images", "/out/../images", "deep/out/images"])
def test_no_option_leads_through_a_link(tmp_path: Path, secret: Path, option: str, path: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["in/images"] = STACK
        file["out"] = h5py.ExternalLink(str(secret / "secret.h5"), "/")
        file["soft"] = h5py.SoftLink("/out")
        file.create_group("deep")["out"] = h5py.ExternalLink(str(secret / "secret.h5"), "/")
    options = {"images": "in/images", option: path}
    with pytest.raises(SourceError, match="link"):
        list(HDF5Source(tmp_path / "x.h5", **options))


def test_links_elsewhere_do_not_hinder_a_named_place(tmp_path: Path, secret: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["in/images"] = STACK
        file["out"] = h5py.ExternalLink(str(secret / "secret.h5"), "/")
    with HDF5Source(tmp_path / "x.h5", images="in/images") as source:
        np.testing.assert_array_equal(np.stack([decoded(record.data) for record in source]), STACK)


def test_a_shape_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", (2_000_000, 64, 64, 3), np.uint8, chunks=(64, 64, 64, 3), compression="gzip")
    with pytest.raises(SourceError, match="declares 24576000000 bytes"):
        HDF5Source(tmp_path / "x.h5")


def test_a_chunk_beyond_the_memory_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packfmt.sources.hdf5.source._MEMORY", 500 << 20)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        shape = (70, 1024, 1024, 3)
        data = file.create_dataset("images", shape, np.uint8, chunks=shape, compression="gzip", compression_opts=1)
        data[:1] = 1
    with pytest.raises(SourceError):
        list(HDF5Source(tmp_path / "x.h5"))


@pytest.mark.parametrize("number", [32001, 32015, 300])
def test_a_missing_filter_is_named(tmp_path: Path, number: int) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=STACK, chunks=(2, 8, 8, 3), compression="lzf")
    data = path.read_bytes()
    place = data.index((32000).to_bytes(2, "little") + b"\x08\x00")  # the filter's number, then its name's length
    path.write_bytes(data[:place] + number.to_bytes(2, "little") + data[place + 2 :])
    with pytest.raises(SourceError, match=rf"filter {number} .*pip install hdf5plugin"):
        HDF5Source(path)


def test_a_group_that_holds_itself_ends(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        inner = file.create_group("a/b")
        inner["a"] = file["a"]
        file["a/x"] = np.arange(3)
    with pytest.raises(SourceError, match="linked twice"):
        HDF5Source(tmp_path / "x.h5")


def test_a_web_of_groups_does_not_multiply(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("g0")
        for _ in range(27):
            inner = group.create_group("a")
            group["b"] = inner
            group = inner
        group["0.jpg"] = np.void(encoded(1))
    with pytest.raises(SourceError, match="linked twice"):
        list(HDF5Source(tmp_path / "x.h5"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>404", "HTML"),
        (b"\x1f\x8b\x08" + bytes(50), "gunzip"),
        (b"", "empty"),
    ],
    ids=["lfs", "html", "gzip", "empty"],
)
def test_files_that_are_no_hdf5_are_told(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=f"{re.escape(str(path))}: not an HDF5 file but.*{told}"):
        HDF5Source(path)
    assert recognise(path) == ("hdf5" if content else None)


def test_recognise_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(encoded(1))
    assert [recognise(path) for path in (tmp_path, tmp_path / "x.jpg", tmp_path / "absent")] == [None] * 3


@pytest.mark.parametrize(
    ("datasets", "told"),
    [
        ({}, "no datasets at all"),
        ({"a": np.arange(5), "b": np.zeros((5, 4))}, "no dataset looks like images"),
        ({"images": np.zeros((0, 8, 8, 3), np.uint8)}, "no images: the dataset has length 0"),
        ({"features": np.zeros((5, 512, 7, 7), np.float32)}, "no dataset looks like images"),
        ({"images": h5py.Empty("u1")}, "no dataset"),
        ({"x": np.array(["a", "b"], dtype=object)}, "no dataset looks like images"),
    ],
)
def test_files_without_images_are_refused(tmp_path: Path, datasets: dict[str, Any], told: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, value in datasets.items():
            file[name] = value
    with pytest.raises(SourceError, match=told):
        HDF5Source(tmp_path / "x.h5")


def test_images_in_variable_length_strings_are_told_to_be_lost(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = file.create_dataset("images", (3,), h5py.string_dtype("ascii"))
        for number in range(3):
            rows[number] = encoded(number, "PNG").split(b"\0")[0]
    with pytest.raises(SourceError, match="end at the first zero byte"):
        HDF5Source(tmp_path / "x.h5")


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["images"] = np.concatenate([STACK] * 200)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(SourceError, match=f"{re.escape(str(path))}: cut short: {size // 2} of {size} bytes"):
        list(HDF5Source(path))


def test_flipped_bytes_end_in_records_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=STACK, chunks=(2, 8, 8, 3), compression="gzip")
        file["labels"] = np.arange(6)
    whole = path.read_bytes()
    draw = random.Random(3)
    for _ in range(12):
        broken = bytearray(whole)
        for _ in range(6):
            broken[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(broken)
        with suppress(SourceError, DecodeError), HDF5Source(path, timeout=20) as source:
            for handle in source.entries():
                source.load(handle)


def test_a_damaged_chunk_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("images", data=STACK, chunks=(2, 8, 8, 3), fletcher32=True)
        place = data.id.get_chunk_info(1).byte_offset
    broken = bytearray(path.read_bytes())
    broken[place + 5] ^= 1
    path.write_bytes(broken)
    with pytest.raises(SourceError, match=rf"{re.escape(str(path))}: /images\[0:6\]"):
        list(HDF5Source(path))


def test_pickled_objects_run_nothing(tmp_path: Path) -> None:
    """Twelve bombs, as PyTables' object arrays keep them, alone and beside images."""
    canary = tmp_path / "canary"
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("x", (13,), h5py.vlen_dtype(np.uint8))
        rows[0] = np.frombuffer(encoded(0), np.uint8)
        for number in range(12):
            rows[number + 1] = np.frombuffer(pickle.dumps(Bomb(canary), number % 6), np.uint8)
        rows.attrs["PSEUDOATOM"] = np.bytes_("object")
        rows.attrs["CLASS"] = np.void(pickle.dumps(Bomb(canary)))
        file.attrs["bomb"] = np.void(pickle.dumps(Bomb(canary)))
    with HDF5Source(path) as source:
        assert bytes(next(iter(source)).data) == encoded(0)
    assert not canary.exists()


def test_opaque_values_tagged_as_python_objects_stay_bytes(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickled = pickle.dumps(Bomb(canary))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        kind = h5py.h5t.create(h5py.h5t.OPAQUE, len(pickled))
        kind.set_tag(b"PYTHON:OBJECT")
        space = h5py.h5s.create_simple((3,))
        data = h5py.h5d.create(file.id, b"images", kind, space)
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([pickled] * 3, dtype=f"V{len(pickled)}"), kind)
    with pytest.raises(SourceError, match="no dataset looks like images"):
        HDF5Source(tmp_path / "x.h5")
    assert not canary.exists()


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"pip install 'packfmt\[hdf5\]'"):
        HDF5Source(tmp_path / "x.h5")


class CountingData:
    """A dataset that counts how often each of its chunks is read."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.reads: Counter[tuple[int, ...]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def read(self, selection: Any) -> Any:
        chunks = self._data.chunks
        ranges = []
        for part, extent, chunk in zip(selection, self._data.shape, chunks, strict=True):
            start, stop, _ = part.indices(extent)
            ranges.append(range(start // chunk, -(-stop // chunk)))
        for place in np.ndindex(*(len(one) for one in ranges)):
            self.reads[tuple(one[i] for one, i in zip(ranges, place, strict=True))] += 1
        return self._data.read(selection)


@pytest.mark.parametrize("axes", ["NHWC", "HWCN"])
@pytest.mark.parametrize("rows", [1, 7, 300, 5000])
def test_each_chunk_is_read_once_and_in_order(tmp_path: Path, axes: str, rows: int) -> None:
    from packfmt.sources.hdf5.file import open_file
    from packfmt.sources.hdf5.layouts import find_images
    from packfmt.sources.hdf5.reading import StackReader

    order = ["NHWC".index(letter) for letter in axes]
    array = np.resize(STACK, (2000, 8, 8, 3)).transpose(order)
    chunks = tuple((min(rows, 2000), 4, 8, 1)[place] for place in order)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=array, chunks=chunks, compression="gzip", compression_opts=1)
    options = {"images": None, "labels": None, "layout": axes, "value_range": None, "channels": None}
    with open_file(str(tmp_path / "x.h5"), True) as root:
        found = find_images(root, options)
        counting = CountingData(found.stacks[0].data)
        found.stacks[0].data = counting  # type: ignore[assignment]
        assert sum(1 for _ in StackReader(found, None, options).items()) == 2000
    assert set(counting.reads.values()) == {1}
    assert len(counting.reads) == np.prod([-(-n // c) for n, c in zip(array.shape, chunks, strict=True)])


def test_a_locked_file_says_how_to_open_it(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["images"] = STACK
    with path.open("r+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="locking=False"):
            HDF5Source(path)
        with HDF5Source(path, locking=False) as source:
            assert sum(1 for _ in source) == 6
