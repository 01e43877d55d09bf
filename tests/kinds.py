"""One small source of every kind, with the same three images in each, for the tests of converting."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

from make import example, frame, jpeg

import packfmt
from packfmt.sources.inputs import Inputs, Probe
from packfmt.sources.registry import KINDS

IMAGES = [jpeg(20 + number, 24, seed=number) for number in range(3)]
LABELS = [0, 1, 1]
CLASSES = ("cat", "dog")
NAMES = [f"{CLASSES[label]}/{number}.jpg" for number, label in enumerate(LABELS)]
BROKEN = IMAGES[1][:30]  # its start and no more


def recogniser(*names: str) -> Callable[[Inputs], str | None]:
    """A function that says which of these kinds of source a path is, or None."""
    return lambda path: next((name for name in names if KINDS[name].fits(Probe(path))), None)


Make = Callable[[Path, Sequence[bytes]], Path]


def pack(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    return _packed(folder / "made.bin", images)


def pack_in_lmdb(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    return _packed(folder / "made-pack.lmdb", images)


def pack_in_shards(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    return _packed(folder / "made.json", images, shard_size=1)


def _packed(path: Path, images: Sequence[bytes], **options: int) -> Path:
    with packfmt.create(path, classes=CLASSES, **options) as writer:
        for name, label, data in zip(NAMES, LABELS, images, strict=True):
            writer.write(data, name, label=label)
    return path


def folder(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    for name, data in zip(NAMES, images, strict=True):
        _put(folder / "made-folder" / name, data)
    return folder / "made-folder"


def tar(folder: Path, images: Sequence[bytes] = IMAGES, mode: str = "w") -> Path:
    path = folder / "made.tar"
    with tarfile.open(path, mode) as archive:
        for number, (label, data) in enumerate(zip(LABELS, images, strict=True)):
            for suffix, content in ((".jpg", data), (".cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:03d}{suffix}")
                member.size = len(content)
                archive.addfile(member, BytesIO(content))
    return path


def compressed_tar(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    return tar(folder, images, "w:gz")


def zipped(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    with zipfile.ZipFile(folder / "made.zip", "w") as archive:
        for name, data in zip(NAMES, images, strict=True):
            archive.writestr(name, data)
    return folder / "made.zip"


def tfrecord(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    examples = [
        example(image__encoded=data, image__filename=name.encode(), image__class__label=label)
        for name, label, data in zip(NAMES, LABELS, images, strict=True)
    ]
    return _put(folder / "made.tfrecord", b"".join(map(frame, examples)))


def parquet(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    import pyarrow
    import pyarrow.parquet

    features = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    rows = [{"bytes": data, "path": name} for name, data in zip(NAMES, images, strict=True)]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"image": pyarrow.array(rows, kind), "label": LABELS})
    told = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(told), folder / "made.parquet")
    return folder / "made.parquet"


def hdf5(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    import h5py
    import numpy as np

    with h5py.File(folder / "made.h5", "w") as file:
        rows = file.create_dataset("x", (len(images),), h5py.vlen_dtype(np.uint8))
        for number, data in enumerate(images):
            rows[number] = np.frombuffer(data, np.uint8)
        file["y"] = np.array(LABELS)
    return folder / "made.h5"


def lmdb(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    from make import write_lmdb

    entries = [(b"num-samples", b"3")]
    for number, (label, data) in enumerate(zip(LABELS, images, strict=True), 1):
        entries += [(b"image-%09d" % number, data), (b"label-%09d" % number, CLASSES[label].encode())]
    return write_lmdb(folder / "made-foreign.lmdb", entries)


def coco(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    for name, data in zip(NAMES, images, strict=True):
        _put(folder / "made-coco" / name, data)
    content = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(NAMES)],
        "categories": [{"id": 5 + number, "name": name} for number, name in enumerate(CLASSES)],
        "annotations": [
            {"id": number, "image_id": number, "category_id": 5 + label, "bbox": [1, 2, 3, 4]}
            for number, label in enumerate(LABELS)
        ],
    }
    return _put(folder / "made-coco" / "instances.json", json.dumps(content).encode())


def voc(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    for number, (label, data) in enumerate(zip(LABELS, images, strict=True)):
        _put(folder / "made-voc" / "JPEGImages" / f"{number}.jpg", data)
        box = "<xmin>1</xmin><ymin>2</ymin><xmax>4</xmax><ymax>6</ymax>"
        thing = f"<object><name>{CLASSES[label]}</name><bndbox>{box}</bndbox></object>"
        _put(folder / "made-voc" / "Annotations" / f"{number}.xml", f"<annotation>{thing}</annotation>".encode())
    return folder / "made-voc"


def yolo(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    root = folder / "made-yolo"
    for number, (label, data) in enumerate(zip(LABELS, images, strict=True)):
        _put(root / "images" / f"{number}.jpg", data)
        _put(root / "labels" / f"{number}.txt", b"%d 0.5 0.5 0.5 0.5\n" % label)
    _put(root / "classes.txt", "\n".join(CLASSES).encode())
    return root


def table(folder: Path, images: Sequence[bytes] = IMAGES) -> Path:
    for name, data in zip(NAMES, images, strict=True):
        _put(folder / "made-table" / "files" / name, data)
    lines = [f"files/{name},{CLASSES[label]}" for name, label in zip(NAMES, LABELS, strict=True)]
    return _put(folder / "made-table" / "list.csv", "\n".join(["path,label", *lines]).encode())


def _put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# name of the case -> (kind, maker)
MADE: dict[str, tuple[str, Make]] = {
    "pack": ("pack", pack),
    "pack in lmdb": ("pack", pack_in_lmdb),
    "pack in shards": ("pack", pack_in_shards),
    "hdf5": ("hdf5", hdf5),
    "parquet": ("parquet", parquet),
    "tfrecord": ("tfrecord", tfrecord),
    "zip": ("zip", zipped),
    "tar": ("tar", tar),
    "compressed tar": ("tar", compressed_tar),
    "lmdb": ("lmdb", lmdb),
    "coco": ("coco", coco),
    "voc": ("voc", voc),
    "yolo": ("yolo", yolo),
    "table": ("table", table),
    "folder": ("folder", folder),
}
BOXED = ("coco", "voc", "yolo")
