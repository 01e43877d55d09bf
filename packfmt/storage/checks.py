"""Checking every byte of a shard."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from packfmt import format as layout
from packfmt.errors import CorruptError, FormatError, PackfmtError
from packfmt.record import KEY
from packfmt.storage.columns import RaggedColumn
from packfmt.storage.keys import hash_key, repeated, same_keys
from packfmt.storage.shardfile import ShardFile

__all__ = ["shard_problems"]

CHUNK = 256  # records read at a time
CHUNK_BYTES = 32 << 20  # unless they take more than this
ROWS = 1 << 20  # row offsets compared at a time


def shard_problems(file: ShardFile) -> Iterator[PackfmtError]:
    """Yield each fault found (CorruptError, FormatError); nothing yielded means the shard is whole.

    Memory: 16 bytes per record while the keys are compared, else constant.
    """
    for name in layout.INDEX:
        yield from file.section_problems(f"index.{name}")
    yield from _record_problems(file)
    for name in file.described:
        broken = [*file.column_problems(name), *_row_problems(file, name)]
        yield from broken or (_key_problems(file) if name == KEY else ())
    yield from _padding_problems(file)
    if _content_id(file) != file.trailer.content_id:
        yield CorruptError("the content id does not match records and columns", path=file.path)


def _record_problems(file: ShardFile) -> Iterator[PackfmtError]:
    count, last = file.trailer.count, file.trailer.records_end
    end = layout.HEADER.size
    for start in range(0, count, CHUNK):
        chunk = np.arange(start, min(start + CHUNK, count))
        begin = end
        offsets, lengths = file.index("offset")[chunk].tolist(), file.index("length")[chunk].tolist()
        for index, offset, length in zip(chunk.tolist(), offsets, lengths, strict=True):
            if offset != end:
                yield file.corrupt(index, f"starts at {offset}, must start at {end}: overlap or hole")
            end = offset + length
        yield from _read_problems(file, chunk, sum(lengths))
        begin, stop = min(begin, last), min(end, last)
        file.bytes.forget(begin, max(stop - begin, 0))
    if end != last:
        yield FormatError(f"{file.path}: records end at {end}, the trailer says {last}")


def _read_problems(file: ShardFile, chunk: np.ndarray, size: int) -> Iterator[PackfmtError]:
    if size <= CHUNK_BYTES:
        try:
            file.read(chunk, verify=True)
            return
        except CorruptError:
            pass  # one by one, then, to find each of them
    for index in chunk:
        try:
            file.read(index[None], verify=True)
        except CorruptError as error:
            yield error


def _row_problems(file: ShardFile, name: str) -> Iterator[PackfmtError]:
    """Row offsets of a ragged column that do not cover its values in order."""
    column = file.unchecked_column(name)
    if not isinstance(column, RaggedColumn):
        return
    rows, total = column.rows, len(column.values)
    parts = (rows[start : start + ROWS + 1] for start in range(0, len(rows), ROWS))
    if rows[0] != 0 or rows[-1] != total or any((part[1:] < part[:-1]).any() for part in parts):
        message = f"the row offsets of column {name!r} must rise from 0 to {total}; pack the source again"
        yield CorruptError(message, path=file.path)


def _key_problems(file: ShardFile) -> Iterator[PackfmtError]:
    """Keys that are empty or there twice."""
    hashes = np.fromiter(map(hash_key, file.keys()), np.uint64, file.trailer.count)
    for first, index, key in same_keys(repeated([hashes]), file.keys()):
        if key:
            yield file.corrupt(index, f"has the same key as record {first}; pack the source again")
    for index in np.flatnonzero(hashes == hash_key(b"")).tolist():
        yield file.corrupt(index, "has an empty key; pack the source again")


def _padding_problems(file: ShardFile) -> Iterator[PackfmtError]:
    end = file.trailer.records_end
    sections = [*file.directory.sections.values(), file.trailer.directory]
    places = sorted((section.offset, section.size) for section in sections)
    for start, size in [*places, (file.trailer.file_size - layout.TRAILER.size, 0)]:
        if any(file.bytes.section(end, start - end)):
            yield CorruptError(f"the padding at {end} is not zero", path=file.path)
        end = start + size


def _content_id(file: ShardFile) -> bytes:
    digest = xxhash.xxh3_128()
    for part in layout.content_parts(file.directory.columns):
        if isinstance(part, str):
            file.hash_section(file.directory.sections[part], digest)
        else:
            digest.update(part)
    result: bytes = digest.digest()
    return result
