"""The one copy loop: from a source to a pack, with a report."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.random import Philox

from packfmt import storage
from packfmt.describing import ClassColumn
from packfmt.errors import ConvertError, DecodeError
from packfmt.images.decode import decode as decode_image
from packfmt.images.sniff import CMYK, FORMATS, sniff
from packfmt.record import IMAGE_COLUMNS, Column, MisfitError
from packfmt.reports import Bad, BadImage, BadImagesError, PackReport
from packfmt.sources.base import BadEntry, SkipEntry, Source
from packfmt.sources.folder import FolderSource
from packfmt.storage.base import Buffer

__all__ = ["copy_records", "pack"]

Progress = Callable[[int, int, int | None], None]

CHUNK_ENTRIES = 64  # entries one task prepares: enough that handing tasks over costs nothing
CHUNK_BYTES = 1 << 20  # and the bytes it holds at most, one larger record excepted
KEPT = 16 << 20  # bytes of freed memory that the process may keep for the next records
NOTHING = dict.fromkeys((column.name for column in IMAGE_COLUMNS), 0)


class _Prepared(NamedTuple):
    """One entry, loaded and looked at. ``data`` is None for what is skipped or cannot be kept."""

    data: Buffer | None
    key: str = ""
    columns: Mapping[str, Any] = NOTHING
    skipped: str = ""
    problem: BadImage | None = None


def pack(
    images: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    threads: int | None = None,
    bad: Bad = "fail",
    decode: bool = False,
    shuffle: int | None = None,
    shard_size: int | None = None,
    backend: Literal["shard", "lmdb"] | None = None,
    force: bool = False,
    follow_links: bool = False,
    labelled: bool = True,
    progress: Progress | None = None,
) -> PackReport:
    """Pack a folder of images. Image bytes are stored verbatim; the same input gives the same pack, byte for byte.

    Args:
        images: the folder, with one sub-folder per class or flat.
        out: the pack to write.
        threads: files read and sniffed at a time; None takes the number of cores, at least 2.
        bad: what to do with zero-byte, unreadable and broken images: "fail" lists all of them and writes nothing,
            "skip" leaves them out, "keep" stores the bytes that are there.
        decode: decode every image too: what cannot be decoded is bad as well, at the price of ``verify(decode=True)``.
        shuffle: a seed; records are stored in random order. None keeps the order of paths.
        shard_size: bytes per shard; None writes one file.
        backend: "shard" or "lmdb"; None goes by the suffix of ``out``.
        force: replace what is there.
        follow_links: follow symbolic links.
        labelled: False ignores the class folders.
        progress: called now and then with records done, bytes done and records in all (None if unknown).

    Raises:
        BadImagesError: bad images, with ``bad="fail"``.
        ConvertError: there is no image in the folder.
        FileExistsError: the target exists and ``force`` is off.
        OSError: the folder cannot be read, or the target cannot be written.
    """
    options: dict[str, Any] = {} if backend is None else {"backend": backend}
    source = FolderSource(images, follow_links=follow_links, labelled=labelled)
    return copy_records(
        source,
        out,
        where=os.fspath(images),
        threads=threads,
        bad=bad,
        decode=decode,
        shuffle=shuffle,
        shard_size=shard_size,
        **options,
        force=force,
        progress=progress,
    )


def copy_records(
    source: Source,
    out: str | os.PathLike[str],
    *,
    where: str,
    threads: int | None = None,
    create: Callable[..., storage.Writer] = storage.create,
    bad: Bad = "fail",
    decode: bool = False,
    shuffle: int | None = None,
    progress: Progress | None = None,
    **create_options: Any,
) -> PackReport:
    """Copy a source's records into a new pack: threads load and sniff, this thread writes in the source's order.

    Memory holds a few chunks of ``CHUNK_BYTES`` each, or of one record where that is larger.

    Args:
        source: what to copy.
        out: the pack to write.
        where: the source's name for messages.
        threads, bad, decode, shuffle, progress: as ``pack``. ``shuffle`` needs a source of random access, and holds its
            handles in memory.
        create: makes the writer; ``packfmt.create`` or a ``Target``.
        create_options: of ``create``.
    """
    if bad not in ("fail", "skip", "keep"):
        raise ValueError(f"bad={bad!r}, allowed are 'fail', 'skip' and 'keep'")
    started = time.perf_counter()
    report = PackReport(os.fspath(out), bad=bad)
    total = source.count() if progress is not None else None
    counts = _Counts(source.columns, source.classes)
    # glibc gives freed memory back above a limit that follows the largest block ever freed, and every record would be
    # paid for in page faults. This block is never touched, so it costs nothing.
    bytes(KEPT)
    with (
        create(
            out, columns=source.columns, classes=source.classes, metadata=source.metadata, **create_options
        ) as writer,
        closing(_prepare_all(source, shuffle, threads, decode)) as items,
    ):
        for item in items:
            problem = item.problem
            data = item.data if problem is None or bad == "keep" else None
            # Past the first bad one, only the rest of them is of interest.
            if data is not None and not (bad == "fail" and report.problems):
                try:
                    writer.write(data, item.key, **item.columns)
                except MisfitError as error:  # a column cannot hold its value; nothing of the record is stored
                    problem, data = problem or BadImage(item.key, str(error)), None
            if problem is not None:
                report.problems.append(replace(problem, kept=data is not None))
            if item.skipped:
                source.skipped[item.skipped] += 1
            if data is None:
                continue
            counts.add(data, item.columns)
            if progress is not None:
                progress(counts.records, counts.bytes, total)
        if report.problems and bad == "fail":
            raise BadImagesError(where, report.problems)
        if not counts.records and report.problems:
            first = report.problems[0]
            raise ConvertError(
                f"{where}: none of {len(report.problems)} images can be stored, nothing was written; the first is "
                f"{first.key!r}: {first.reason}"
            )
        if not counts.records:
            passed = ", ".join(f"{count} {reason}" for reason, count in source.skipped.items()) or "nothing at all"
            raise ConvertError(f"{where}: no image found ({passed}); name what holds images")
    counts.fill(report)
    report.path, report.files = writer.path, writer.files
    report.content_id = writer.content_id
    report.skipped = dict(source.skipped)
    lost = [f"lost: {', '.join(source.lost)}"] if source.lost else []
    report.notes = [*source.notes, *lost, *_empty_classes(report.classes)]
    report.seconds = time.perf_counter() - started
    return report


class _Counts:
    """Sums over the records written. Numbers only, whatever their number."""

    def __init__(self, columns: Sequence[Column], classes: Sequence[str]) -> None:
        self.records = self.bytes = self.rotated = self.cmyk = self.boxes = 0
        self._classes = classes
        self._named = ClassColumn(columns, classes)
        self._labels: Counter[int] = Counter()
        self._formats: Counter[int] = Counter()

    def add(self, data: Buffer, columns: Mapping[str, Any]) -> None:
        self.records += 1
        self.bytes += memoryview(data).nbytes
        self._formats[columns["format"]] += 1
        self.rotated += columns["orientation"] > 1
        self.cmyk += bool(columns["flags"] & CMYK)
        label = columns.get(self._named.name) if self._named.name is not None else None
        if isinstance(label, int):  # the usual case, and the quick way
            self._labels[label] += 1
        elif label is not None:
            self._labels.update(self._named.numbers(label).tolist())
        boxes = columns.get("boxes")
        if boxes is not None and np.ndim(boxes):
            self.boxes += len(boxes)

    def fill(self, report: PackReport) -> None:
        report.records, report.bytes, report.rotated, report.cmyk = self.records, self.bytes, self.rotated, self.cmyk
        if self._named.name is not None:
            report.classes = {name: self._labels[label] for label, name in enumerate(self._classes)}
        report.boxes = self.boxes
        report.formats = {FORMATS[code]: count for code, count in sorted(self._formats.items())}


def _empty_classes(classes: Mapping[str, int]) -> list[str]:
    return [f"nothing is of class {name!r}; its number is kept" for name, count in classes.items() if not count]


def _ordered(source: Source, seed: int | None) -> Iterator[Any]:
    if seed is None:
        yield from source.entries()
        return
    if not source.random_access:
        raise ConvertError(f"a {source.kind} source is read in one go: convert it as it is, then shuffle the pack")
    if seed < 0:
        raise ValueError(f"shuffle={seed} must be a seed of 0 or more")
    entries = list(source.entries())
    # Sorted by raw Philox numbers, whose stream numpy guarantees; that of its own permutation may change.
    for position in np.argsort(Philox(key=seed).random_raw(len(entries)), kind="stable").tolist():
        yield entries[position]


def _prepare_all(
    source: Source, shuffle: int | None, threads: int | None, decode: bool
) -> Generator[_Prepared, None, None]:
    """Load, sniff and perhaps decode in threads, a bounded number of chunks ahead; yield in order.

    What a source loads ``inline`` and is not decoded is loaded right here, in the order it comes: that takes less time
    than a thread, and the bytes are still in the processor's cache when their checksums are taken.
    """
    workers = max(2, os.cpu_count() or 2) if threads is None else threads
    if workers < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    # In random order only what is loaded already: the rest lies anywhere on a disk that answers many requests at once.
    inline = source.inline if shuffle is None else Source.inline
    pending: deque[Future[list[_Prepared]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="packfmt-read")
    try:
        for chunk in _chunks(source, _ordered(source, shuffle)):
            if not decode and not pending and all(isinstance(entry, inline) for entry in chunk):
                yield from _prepare(source, chunk, decode)
                continue
            pending.append(pool.submit(_prepare, source, chunk, decode))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks(source: Source, entries: Iterator[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    waiting = 0
    for entry in entries:
        size = source.size(entry)
        if chunk and (len(chunk) == CHUNK_ENTRIES or waiting + size > CHUNK_BYTES):
            yield chunk
            chunk, waiting = [], 0
        chunk.append(entry)
        waiting += size
    if chunk:
        yield chunk


def _prepare(source: Source, entries: list[Any], decode: bool) -> list[_Prepared]:
    return [_prepare_one(source, entry, decode) for entry in source.fetch(entries)]


def _prepare_one(source: Source, entry: Any, decode: bool) -> _Prepared:
    try:
        record = source.load(entry)
    except SkipEntry as skip:
        return _Prepared(None, skipped=skip.reason)
    except DecodeError as error:
        return _bad_entry(entry, error.key or "?", error.message)
    except OSError as error:
        key = getattr(entry, "key", None) or str(error.filename)
        return _bad_entry(entry, key, f"cannot be read: {error.strerror or error}")
    try:
        info = sniff(record.data)
    except DecodeError as error:
        columns = {**NOTHING, **record.columns}
        return _Prepared(record.data, record.key, columns, problem=BadImage(record.key, error.message))
    problem = None
    if decode:
        try:
            decode_image(record.data)
        except DecodeError as error:
            problem = BadImage(record.key, error.message)
    columns = {**dict(zip(NOTHING, info, strict=True)), **record.columns}
    return _Prepared(record.data, record.key, columns, problem=problem)


def _bad_entry(entry: Any, key: str, reason: str) -> _Prepared:
    problem = BadImage(key, reason)
    if isinstance(entry, BadEntry) and entry.data is not None:
        return _Prepared(entry.data, key, {**NOTHING, **(entry.columns or {})}, problem=problem)
    return _Prepared(None, problem=problem)
