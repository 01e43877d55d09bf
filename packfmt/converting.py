"""From what people have to a pack, and back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

from packfmt import storage
from packfmt.errors import ConvertError
from packfmt.packing import Progress, copy_records
from packfmt.record import OWN_COLUMNS
from packfmt.reports import Bad, PackReport
from packfmt.sources.base import Source
from packfmt.sources.inputs import Inputs
from packfmt.sources.registry import open_source, recognise
from packfmt.sources.relabel import JoinedSource, RelabelledSource
from packfmt.unpacking import unpack

__all__ = ["convert", "describe_source"]


def convert(
    src: Inputs,
    dst: str | os.PathLike[str],
    *,
    kind: str | None = None,
    threads: int | None = None,
    bad: Bad = "fail",
    shuffle: int | None = None,
    shard_size: int | None = None,
    backend: Literal["shard", "lmdb"] | None = None,
    force: bool = False,
    labels: str | os.PathLike[str] | None = None,
    classes_from: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> PackReport:
    """Copy images from what is there into a pack, or from a pack into what other tools read.

    Bytes of encoded images are kept verbatim. Nothing in a source is executed, and no path in it is opened.

    Args:
        src: what to read: a path, several, or a pattern.
        dst: ``out.bin``, ``out.lmdb``, ``out-%05d.tar`` or ``out.tar`` (WebDataset), ``out.parquet`` (Hugging Face);
            from a pack, a folder (a name without suffix, or ending in "/").
        kind: what ``src`` is; None recognises it by its content.
        threads, bad, shuffle, shard_size, backend, force, progress: as ``pack``.
        labels: a table (CSV, TSV, JSON lines) of path, label and further columns: for a folder, the images to take;
            for other kinds, what to join by key.
        classes_from: number the classes as this pack does, and refuse others.
        options: of the source, such as ``layout="NHWC"`` for HDF5 (whose own ``labels`` is ``h5_labels`` here).

    Raises:
        SourceError: the source cannot be recognised or read, or has no such option.
        BadImagesError, ConvertError: as ``pack``.
        FileExistsError: the target exists and ``force`` is off.
        OSError: something cannot be read or written.
    """
    target = os.fspath(dst)
    if _is_folder(target):
        return _to_folder(src, target, kind, progress)
    with _open(src, kind, labels, classes_from, options) as source:
        create, extra = _target(target, backend)
        if shard_size is not None:
            extra["shard_size"] = shard_size
        return copy_records(
            source,
            dst,
            where=_name(src),
            create=create,
            threads=threads,
            bad=bad,
            shuffle=shuffle,
            force=force,
            progress=progress,
            **extra,
        )


def describe_source(
    src: Inputs,
    *,
    kind: str | None = None,
    labels: str | os.PathLike[str] | None = None,
    classes_from: str | os.PathLike[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What ``convert`` would read: JSON-able facts, with nothing written.

    Args:
        src, kind, labels, classes_from, options: as ``convert``.

    Raises:
        SourceError, OSError: as ``convert``.
    """
    with _open(src, kind, labels, classes_from, options) as source:
        return {"source": _name(src), **source.describe(), "notes": list(source.notes)}


def _open(src: Inputs, kind: str | None, labels: Any, classes_from: Any, options: dict[str, Any]) -> Source:
    if "h5_labels" in options:
        options["labels"] = options.pop("h5_labels")
    if labels is None:
        source = open_source(src, kind, **options)
    elif (kind or recognise(src)) == "folder":
        source = open_source(labels, "table", root=src, **options)
    else:
        columns = {name: options.pop(name, None) for name in ("key_column", "label_column")}
        source = open_source(src, kind, **options)
        source = JoinedSource(source, open_source(labels, "table", **columns), os.fspath(labels))
    if classes_from is None:
        return source
    with storage.open(classes_from) as other:
        return RelabelledSource(source, other.classes, os.fspath(classes_from))


def _target(target: str, backend: Literal["shard", "lmdb"] | None) -> tuple[Any, dict[str, Any]]:
    """What makes the writer, and its options besides those that every writer has."""
    if target.endswith(".parquet"):
        from packfmt.targets.parquet import ParquetWriter

        return ParquetWriter, {}
    if target.endswith(".tar"):
        from packfmt.targets.tar import TarWriter

        return TarWriter, {}
    return storage.create, {"backend": backend} if backend else {}


def _is_folder(target: str) -> bool:
    return target.endswith("/") or os.path.isdir(target) or not Path(target).suffix


def _to_folder(src: Inputs, target: str, kind: str | None, progress: Progress | None) -> PackReport:
    started = time.perf_counter()
    if (kind or recognise(src)) != "pack":
        raise ConvertError(f"{_name(src)}: only a pack can be unpacked into a folder; convert it to a pack first")
    done = unpack(src, target, progress=progress)
    with storage.open(src) as reader:
        lost = [name for name in reader.columns if name not in OWN_COLUMNS and name != "label"]
    notes = [f"columns that files cannot hold: {', '.join(lost)}"] if lost else []
    seconds = time.perf_counter() - started
    return PackReport(done.path, records=done.records, bytes=done.bytes, notes=notes, seconds=seconds)


def _name(path: Inputs) -> str:
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else ", ".join(os.fspath(p) for p in path)
