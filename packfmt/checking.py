"""Verify a pack: every checksum, and with ``decode`` every picture."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from packfmt import storage
from packfmt.errors import CorruptError, DecodeError
from packfmt.images.decode import decode as decode_image
from packfmt.record import IMAGE_COLUMNS
from packfmt.storage import Reader

__all__ = ["Damage", "VerifyReport", "verify"]

CHUNK = 64  # records a task decodes


@dataclass(frozen=True, slots=True)
class Damage:
    """One fault: the file, the record's index in it and its key (None where no record is meant), and what is wrong."""

    path: str
    index: int | None
    key: str | None
    message: str


@dataclass(slots=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        path: what was checked.
        records: how many there are.
        decoded: how many pictures were decoded.
        damaged: every fault found; empty means whole.
        seconds: wall time.
    """

    path: str
    records: int = 0
    decoded: int = 0
    damaged: list[Damage] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.damaged


def verify(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    decode: bool = False,
    threads: int | None = None,
    progress: Callable[[int, int, int | None], None] | None = None,
) -> VerifyReport:
    """Check every byte of a pack: checksums, order, overlaps, padding, content id.

    Args:
        path: as ``packfmt.open`` takes it.
        decode: decode every picture too, and compare its size with what the index says.
        threads: for decoding; None takes all cores.
        progress: called with records decoded, their bytes, and records in all.

    Raises:
        FormatError: not a pack, or damaged where nothing can be read at all.
        OSError: the file cannot be read.
    """
    started = time.perf_counter()
    with storage.open(path) as reader:
        report = VerifyReport(reader.path, len(reader))
        for problem in reader.problems():
            report.damaged.append(_damage(reader.path, problem))
        if decode:
            known = {(damage.path, damage.index) for damage in report.damaged if damage.index is not None}
            for damage in _decode_all(reader, threads or os.cpu_count() or 1, progress):
                if (damage.path, damage.index) not in known:
                    report.damaged.append(damage)
            report.decoded = len(reader)
    report.seconds = time.perf_counter() - started
    return report


def _damage(path: str, problem: Exception) -> Damage:
    if isinstance(problem, (CorruptError, DecodeError)):
        return Damage(problem.path or path, problem.index, problem.key, problem.message)
    return Damage(path, None, None, str(problem))


def _decode_all(
    reader: Reader, threads: int, progress: Callable[[int, int, int | None], None] | None
) -> Iterator[Damage]:
    chunks = (range(start, min(start + CHUNK, len(reader))) for start in range(0, len(reader), CHUNK))
    sizes = _stated_sizes(reader)
    done = size = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="packfmt-verify") as pool:
        pending = [pool.submit(_decode_chunk, reader, chunk, sizes) for chunk in islice(chunks, 2 * threads)]
        while pending:
            found, count, nbytes = pending.pop(0).result()
            if (chunk := next(chunks, None)) is not None:
                pending.append(pool.submit(_decode_chunk, reader, chunk, sizes))
            yield from found
            done, size = done + count, size + nbytes
            if progress is not None:
                progress(done, size, len(reader))


def _stated_sizes(reader: Reader) -> tuple[Any, Any] | None:
    """Heights and widths as the index states them; None where it does not, or the columns are damaged."""
    columns = {column.name: column for column in IMAGE_COLUMNS}
    try:
        if all(reader.columns.described.get(name) == columns[name] for name in ("height", "width")):
            return reader.columns["height"], reader.columns["width"]
    except CorruptError:  # among the problems already
        pass
    return None


def _decode_chunk(reader: Reader, chunk: range, sizes: tuple[Any, Any] | None) -> tuple[list[Damage], int, int]:
    found: list[Damage] = []
    size = 0
    for index in chunk:
        try:
            (data,) = reader.read((index,))
            size += len(data)
            height, width, _ = decode_image(data).shape
            if sizes is not None and (stated := (int(sizes[0][index]), int(sizes[1][index]))) != (height, width):
                raise DecodeError(
                    f"the pack's columns say {stated[1]}x{stated[0]} pixels, the image has {width}x{height}: packfmt "
                    "convert makes a pack with the right ones"
                )
        except CorruptError as error:
            found.append(_damage(reader.path, error))
        except DecodeError as error:
            path, local = reader.locate(index)
            found.append(Damage(path, local, reader.key(index), error.message))
    return found, len(chunk), size
