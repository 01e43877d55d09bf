"""From what people have to a pack, and back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from packfmt import storage
from packfmt.errors import ConvertError, DecodeError
from packfmt.packing import Progress, copy_records
from packfmt.record import Column
from packfmt.reports import Bad, PackReport
from packfmt.sources.base import BadEntry, SkipEntry, Source
from packfmt.sources.inputs import Inputs, is_image_name
from packfmt.sources.pack import PackSource
from packfmt.sources.registry import name_of, open_source, recognise
from packfmt.sources.relabel import JoinedSource, RelabelledSource
from packfmt.storage.atomic import refuse_existing
from packfmt.storage.folders import refuse_taken, temporary_folder
from packfmt.storage.leftovers import remove_leftovers

__all__ = ["convert", "describe_source"]

SHOWN = 80  # characters of a value
# Endings of what others write, under which a pack would only mislead; our own in capitals are among them.
FOREIGN = (
    *(".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".h5", ".hdf5", ".mdb", ".csv", ".tsv", ".jsonl"),
    *(".tfrecord", ".tfrecords", ".npy", ".npz", ".pt", ".pkl", ".beton", ".rec", ".hdf", ".tar", ".parquet", ".lmdb"),
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"),
)


def convert(
    src: Inputs,
    dst: str | os.PathLike[str],
    *,
    kind: str | None = None,
    threads: int | None = None,
    bad: Bad = "fail",
    decode: bool = False,
    shuffle: int | None = None,
    shard_size: int | None = None,
    backend: Literal["shard", "lmdb"] | None = None,
    force: bool = False,
    labels: str | os.PathLike[str] | None = None,
    classes_from: Inputs | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> PackReport:
    """Copy images from what is there into a pack, or from a pack into what other tools read.

    Bytes of encoded images are kept verbatim. Nothing in a source is executed, and no path in it is opened.

    Args:
        src: what to read: a path, several, or a pattern.
        dst: ``out.bin``, ``out.lmdb``, ``out-%05d.tar`` or ``out.tar`` (WebDataset), ``out.parquet`` (Hugging Face),
            or a folder (a name without suffix, or ending in "/").
        kind: what ``src`` is; None recognises it by its content.
        threads, bad, decode, shard_size, backend, force, progress: as ``pack``.
        shuffle: as ``pack``. What can be read in one order only (archives, HDF5) is first copied into a temporary pack
            beside ``dst``, which costs its size on the disk and its bytes written and read once more.
        labels: a table (CSV, TSV, JSON lines) of path, label and further columns: for a folder, the images to take;
            for other kinds, what to join by key.
        classes_from: number the classes as this pack (or source of another kind) does, and refuse others.
        options: of the source, such as ``layout="NHWC"`` for HDF5 (whose own ``labels`` is ``h5_labels`` here).

    Raises:
        SourceError: the source cannot be recognised or read, or has no such option.
        BadImagesError, ConvertError: as ``pack``; or the target cannot hold what the source has.
        FileExistsError: the target exists and ``force`` is off.
        OSError: something cannot be read or written.
    """
    target = os.fspath(dst)
    create, own = _target(target, backend, shard_size)
    remove_leftovers(Path(target))  # of whatever kind the writer was
    if not force and not os.path.isdir(target):
        refuse_existing(Path(target))  # before hours of reading, not after
    writers: list[storage.Writer] = []

    def start(path: str | os.PathLike[str], **facts: Any) -> storage.Writer:
        writers.append(create(path, force=force, **own, **facts))
        return writers[-1]

    with _open(src, kind, labels, classes_from, options) as source:
        copy = copy_records if shuffle is None or source.random_access else _copy_shuffled
        report = copy(
            source,
            target,
            where=name_of(src),
            create=start,
            threads=threads,
            bad=bad,
            decode=decode,
            shuffle=shuffle,
            progress=progress,
        )
    report.notes += getattr(writers[-1], "notes", [])
    return report


def describe_source(
    src: Inputs,
    *,
    kind: str | None = None,
    labels: str | os.PathLike[str] | None = None,
    classes_from: Inputs | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What ``convert`` would read: JSON-able facts, with nothing written.

    Where the number of records is not known without, or entries are cheap, the source is gone through once: archives
    are read to their end. Otherwise the first record is read. Nothing is looked into, so damaged images are not found.

    Args:
        src, kind, labels, classes_from, options: as ``convert``.
        progress: called now and then with entries, 0, and entries in all (None if unknown).

    Raises:
        SourceError, OSError: as ``convert``.
    """
    with _open(src, kind, labels, classes_from, options) as source:
        facts = {"source": name_of(src), **source.describe()}
        facts["columns"] = {column.name: _type_of(column) for column in source.columns}
        through = facts["records"] is None or source.random_access
        seen = _scan(source, through, progress)
        if through:
            facts["records"] = seen.images
        return {
            **facts,
            "first": seen.first,
            "passed_over": dict(source.skipped + seen.skipped),
            "bad": dict(seen.bad),
            "notes": list(source.notes),
        }


class _Seen:
    """What going through the entries showed."""

    def __init__(self) -> None:
        self.images = 0
        self.first: dict[str, Any] = {}
        self.bad: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()


def _scan(source: Source, through: bool, progress: Progress | None) -> _Seen:
    """Go through the entries, or to the first image only. What may prove not to be an image is loaded, little else."""
    seen = _Seen()
    unsure = source.kind in ("folder", "zip")
    total = source.count() if progress is not None else None
    for number, entry in enumerate(source.entries(), 1):
        name = str(getattr(entry, "key", None) or getattr(entry, "filename", ""))
        try:
            if not seen.first or isinstance(entry, BadEntry) or (unsure and not is_image_name(name)):
                record = source.load(entry)
                seen.first = seen.first or {"key": record.key} | {n: _shown(v) for n, v in record.columns.items()}
            seen.images += 1
        except SkipEntry as skip:
            seen.skipped[skip.reason] += 1
        except DecodeError as error:
            seen.bad[error.message] += 1
        except OSError as error:
            seen.bad[f"cannot be read: {error.strerror or error}"] += 1
        if progress is not None:
            progress(number, 0, total)
        if seen.first and not through:
            break
    return seen


def _type_of(column: Column) -> str:
    shape = f" {list(column.shape)}".replace("None", "n") if column.shape else ""
    return f"{column.dtype.lstrip('<|')}{shape}" if column.kind == "array" else column.kind


def _shown(value: Any) -> str:
    text = str(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _open(src: Inputs, kind: str | None, labels: Any, classes_from: Inputs | None, options: dict[str, Any]) -> Source:
    if "h5_labels" in options:
        options["labels"] = options.pop("h5_labels")
    if labels is None:
        source = open_source(src, kind, **options)
    elif (kind or recognise(src)) == "folder":
        source = open_source(labels, "table", root=src, **options)
    else:
        columns = {name: options.pop(name, None) for name in ("key_column", "label_column")}
        source = open_source(src, kind, **options)
        try:
            source = JoinedSource(source, open_source(labels, "table", **columns), os.fspath(labels))
        except BaseException:
            source.close()
            raise
    if classes_from is None:
        return source
    try:
        with open_source(classes_from) as other:
            return RelabelledSource(source, other.classes, name_of(classes_from))
    except BaseException:
        source.close()
        raise


def _copy_shuffled(
    source: Source,
    target: str,
    *,
    create: Callable[..., storage.Writer],
    shuffle: int | None,
    bad: Bad,
    decode: bool,
    **options: Any,
) -> PackReport:
    """Copy a source that can be read in one order only, by way of a temporary pack beside the target."""
    with temporary_folder(Path(target)) as folder:
        pack = folder / "in-order.bin"
        first = copy_records(source, pack, bad=bad, decode=decode, **options)
        with PackSource(pack) as ordered:
            if os.name == "posix":
                pack.unlink()  # what is open stays readable, and goes away with the process whatever happens
            options["where"] = os.fspath(pack)
            done = copy_records(ordered, target, create=create, shuffle=shuffle, bad="keep", **options)
    done.bad, done.problems, done.skipped, done.notes = bad, first.problems, first.skipped, first.notes
    done.seconds += first.seconds
    return done


def _target(
    target: str, backend: Literal["shard", "lmdb"] | None, shard_size: int | None
) -> tuple[Callable[..., storage.Writer], dict[str, Any]]:
    """What makes the writer, and its options besides those that every writer has.

    Raises:
        ConvertError: an option that this target does not have, or a name that belongs to another format.
        OSError: no tree can get this name.
    """
    name = target.rstrip("/")
    sizes = {} if shard_size is None else {"shard_size": shard_size}
    if backend is not None or name.endswith(".lmdb"):
        return storage.create, ({"backend": backend} if backend else {}) | sizes
    if target.endswith(".tar"):
        from packfmt.sources.webdataset.writer import TarWriter

        return TarWriter, sizes
    if target.endswith(".parquet"):
        from packfmt.sources.parquet.writer import ParquetWriter

        return ParquetWriter, _none(sizes, target)
    if target.endswith("/") or os.path.isdir(target) or not (Path(target).suffix or sizes):
        from packfmt.sources.folder import FolderWriter

        refuse_taken(target)  # before all reading
        return FolderWriter, _none(sizes, target)
    if target.lower().endswith(FOREIGN):
        raise ConvertError(
            f"{target}: packfmt writes no such format, but out.bin, out.lmdb, out-%05d.tar, out.parquet and folders"
        )
    return storage.create, sizes


def _none(sizes: dict[str, Any], target: str) -> dict[str, Any]:
    if sizes:
        raise ConvertError(f"{target}: only packs (out.bin) and tars (out-%05d.tar) are split into shards")
    return {}
