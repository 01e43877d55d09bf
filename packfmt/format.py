"""Shard layout, version 1: bytes to header, directory and trailer, and back. Pure: opens no file.

::

    header 64 | records back to back | index and columns, each 64-byte aligned | directory (JSON) | trailer 96

docs/format.md is the specification. Everything is little-endian. Each checksum is XXH3-64; a record's takes its ordinal
as seed (and XXH3 mixes the length in by itself), so that a record read at the wrong place never passes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from packfmt.bounded_json import MAX_BYTES, check_json, parse_json
from packfmt.errors import FormatError
from packfmt.record import DTYPES, Column

__all__ = ["Directory", "Layout", "Member", "Section", "Trailer", "align", "record_checksum"]

# Like PNG's: the high bit shows a 7-bit transfer, CR LF and ^Z a text-mode one.
MAGIC = b"\x89packfmt\r\n\x1a\n"
TRAILER_MAGIC = b"packend\n"
VERSION = 1
ALIGNMENT = 64  # a cache line, and enough for any SIMD load from a mapped column
HEADER = struct.Struct("<12sIQQ24sQ")  # magic, version, incompatible flags, compatible flags, zero, checksum
TRAILER = struct.Struct("<8sIIQQQQQQ16s8sQ")
INDEX = ("offset", "length", "checksum")  # one u64 each per record
MAX_DIRECTORY = MAX_BYTES

HEXADECIMAL = frozenset("0123456789abcdef")

record_checksum = xxhash.xxh3_64_intdigest  # (data, ordinal) -> int


def align(position: int) -> int:
    """The first multiple of ``ALIGNMENT`` at or after ``position``."""
    return (position + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Section:
    """A run of bytes: its place, size in bytes, and XXH3-64."""

    offset: int
    size: int
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last 96 bytes of a shard: the numbers that all else hangs from."""

    count: int
    records_end: int
    directory: Section
    file_size: int
    content_id: bytes

    def encode(self) -> bytes:
        """The trailer's 96 bytes."""
        body = TRAILER.pack(
            TRAILER_MAGIC, VERSION, 0, self.count, self.records_end, self.directory.offset, self.directory.size,
            self.directory.checksum, self.file_size, self.content_id, bytes(8), 0,
        )[:-8]  # fmt: skip
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each section stands. There is one valid layout for given sizes, so a reader can check by comparing.

    Args:
        sections: section name to its place, in file order. ``index.offset``; ``column.NAME`` for values;
            ``rows.NAME`` for the row offsets (u64, count + 1) of a ragged column.
        directory_offset: where the directory starts.
    """

    sections: dict[str, Section]
    directory_offset: int

    @classmethod
    def plan(cls, records_end: int, sizes: Mapping[str, int]) -> Layout:
        """Lay sections of these sizes (bytes) out behind the records, in the mapping's order."""
        sections = {}
        position = records_end
        for name, size in sizes.items():
            sections[name] = Section(align(position), size)
            position = sections[name].offset + size
        return cls(sections, align(position))

    def file_size(self, directory_size: int) -> int:
        """The size in bytes of the whole file."""
        return align(self.directory_offset + directory_size) + TRAILER.size


def section_sizes(count: int, columns: Sequence[Column], values_size: Mapping[str, int]) -> dict[str, int]:
    """Section name to size in bytes, in file order: the index, then columns by name, row offsets before values."""
    sizes = {f"index.{name}": 8 * count for name in INDEX}
    for column in sorted(columns, key=lambda c: c.name):
        if column.ragged:
            sizes[f"rows.{column.name}"] = 8 * (count + 1)
            sizes[f"column.{column.name}"] = values_size[column.name]
        else:
            sizes[f"column.{column.name}"] = count * column.row_bytes
    return sizes


@dataclass(frozen=True, slots=True)
class Member:
    """A shard's place in the set it was written with.

    Args:
        set_id: 32 hexadecimal digits, the same in all shards of the set.
        number: from 0.
        count: shards of the set.
    """

    set_id: str
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class Directory:
    """The JSON part: what the sections hold, the class names, the user's metadata, and the set a shard belongs to."""

    sections: dict[str, Section]
    columns: tuple[Column, ...]
    classes: tuple[str, ...]
    metadata: dict[str, Any]
    member: Member | None = None

    def encode(self) -> bytes:
        """The directory's bytes: compact JSON with sorted keys, so that equal content gives equal bytes.

        Raises:
            ValueError: the metadata is not JSON-able, or it and the classes are more than ``check_json`` allows.
        """
        member = self.member
        own = {} if member is None else {"set": {"count": member.count, "id": member.set_id, "number": member.number}}
        try:
            raw = canonical_json(
                {
                    **own,
                    "classes": list(self.classes),
                    "columns": {
                        c.name: {"dtype": c.dtype, "kind": c.kind, "shape": list(c.shape)} for c in self.columns
                    },
                    "metadata": self.metadata,
                    "sections": {
                        name: {"checksum": f"{s.checksum:016x}", "offset": s.offset, "size": s.size}
                        for name, s in self.sections.items()
                    },
                }
            )
        except (TypeError, RecursionError) as error:
            raise ValueError(f"metadata must be JSON-able: {error}") from error
        try:
            check_json(raw)
        except ValueError as error:
            raise ValueError(f"classes and metadata are too much, store them in a column: {error}") from None
        return raw


def canonical_json(value: Any) -> bytes:
    """Compact ASCII JSON with sorted keys. Raises ValueError for NaN and infinities, TypeError for other types."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def content_parts(columns: Sequence[Column]) -> Iterator[bytes | str]:
    """What the content id hashes, in order: bytes as they are, str as the bytes of the section of that name."""
    yield "index.checksum"
    for column in sorted(columns, key=lambda c: c.name):
        yield canonical_json([column.name, column.kind, column.dtype, list(column.shape)])
        if column.ragged:
            yield f"rows.{column.name}"
        yield f"column.{column.name}"


def encode_header() -> bytes:
    """The 64 bytes every version 1 shard starts with."""
    body = HEADER.pack(MAGIC, VERSION, 0, 0, bytes(24), 0)[:-8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def check_header(raw: bytes, path: str) -> None:
    """Check a file's first 64 bytes.

    Raises:
        FormatError: no pack, mangled in transfer, a newer version, an unknown incompatible feature, or damaged.
    """
    if raw[:12] != MAGIC:
        if raw[1:8] == MAGIC[1:8]:
            _refuse(path, "the signature is damaged as by a text-mode transfer; copy the file again in binary mode")
        _refuse(path, f"not a packfmt shard: it starts with {bytes(raw[:12])!r}, expected {MAGIC!r}")
    if len(raw) < HEADER.size:
        _refuse(path, f"truncated: {len(raw)} bytes where the header alone takes {HEADER.size}")
    _, version, incompatible, _, zero, checksum = HEADER.unpack(raw)
    damaged = checksum != xxhash.xxh3_64_intdigest(raw[:-8])
    if damaged and version == VERSION:
        _refuse(path, "the header does not match its checksum; restore the file from a copy")
    if version != VERSION:
        _refuse(path, f"format version {version}; this packfmt reads version {VERSION}. Update packfmt or pack again")
    if incompatible:
        _refuse(path, f"needs unknown features (flags {incompatible:#x}); this packfmt knows none. Update packfmt")
    if zero != bytes(24):
        _refuse(path, "the header's reserved bytes are not zero; no writer of this version makes such a file")


def decode_trailer(raw: bytes, file_size: int, path: str) -> Trailer:
    """Read the trailer from a file's last 96 bytes.

    Raises:
        FormatError: truncated, appended to, damaged, or with numbers that do not add up.
    """
    if len(raw) < TRAILER.size or raw[:8] != TRAILER_MAGIC:
        _refuse(path, "no trailer at its end: the file is truncated or has bytes appended; restore it from a copy")
    _, version, zero, count, records_end, offset, size, checksum, stated, content_id, spare, own = TRAILER.unpack(raw)
    if own != xxhash.xxh3_64_intdigest(raw[:-8]):
        _refuse(path, "the trailer does not match its checksum; restore the file from a copy")
    if version != VERSION or zero or spare != bytes(8):
        _refuse(path, f"the trailer is of version {version}, the header of version {VERSION}")
    if stated != file_size:
        _refuse(path, f"{file_size} bytes long, its trailer says {stated}: truncated or appended to")
    if size > MAX_DIRECTORY:
        _refuse(path, f"the directory takes {size:,} bytes; allowed are {MAX_DIRECTORY:,}")
    if not HEADER.size <= records_end <= offset <= file_size - TRAILER.size:
        _refuse(path, f"records end at {records_end} and the directory takes {size} bytes at {offset}: out of range")
    if not count and records_end != HEADER.size:
        _refuse(path, f"{records_end - HEADER.size} bytes of records, but no record")
    if align(offset + size) + TRAILER.size != file_size:
        _refuse(path, f"the directory ({size} bytes at {offset}) does not reach the trailer at {file_size - 96}")
    return Trailer(count, records_end, Section(offset, size, checksum), stated, content_id)


def decode_directory(raw: bytes, trailer: Trailer, path: str) -> Directory:
    """Read the directory and check that its sections are the one valid layout for their sizes.

    Raises:
        FormatError: damaged, not the specification's JSON, or sections that overlap, leave holes or leave the file.
    """
    if xxhash.xxh3_64_intdigest(raw) != trailer.directory.checksum:
        _refuse(path, "the directory does not match its checksum; restore the file from a copy")
    try:
        value = parse_json(
            raw, encoding="ascii", object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite
        )
        columns = tuple(_column(name, c) for name, c in value["columns"].items())
        sections = {
            name: Section(_natural(s["offset"]), _natural(s["size"]), _hexadecimal(s["checksum"]))
            for name, s in value["sections"].items()
        }
        classes, metadata = value["classes"], value["metadata"]
        member = _member(value["set"]) if "set" in value else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _refuse(path, f"the directory is not as the specification says: {type(error).__name__}: {error}")
    named = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if not named or not isinstance(metadata, dict):
        _refuse(path, "the directory's classes must be a list of strings and its metadata an object")
    _check_sections(sections, columns, trailer, path)
    return Directory(sections, columns, tuple(classes), metadata, member)


def _check_sections(sections: dict[str, Section], columns: Sequence[Column], trailer: Trailer, path: str) -> None:
    values = {}
    for column in columns:
        if column.ragged:
            section = sections.get(f"column.{column.name}")
            if section is None or section.size % column.row_bytes:
                _refuse(path, f"column {column.name!r} is missing or no whole number of {column.row_bytes}-byte rows")
            values[column.name] = section.size
    sizes = section_sizes(trailer.count, columns, values)
    plan = Layout.plan(trailer.records_end, sizes)
    for name, planned in plan.sections.items():
        found = sections.get(name)
        if found is None or (found.offset, found.size) != (planned.offset, planned.size):
            _refuse(path, f"section {name!r} is {found}, must be {planned.size} bytes at {planned.offset}")
    if len(sections) != len(sizes):
        _refuse(path, f"sections of no column: {sorted(set(sections) - set(sizes))}")
    if plan.directory_offset != trailer.directory.offset:
        _refuse(path, f"directory at {trailer.directory.offset}, must be at {plan.directory_offset}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is given twice")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text} is not a finite float64")
    return value


def _column(name: str, value: dict[str, Any]) -> Column:
    # Column itself is lenient with what a person may write; a file has one spelling.
    if value["dtype"] not in DTYPES or not isinstance(value["shape"], list):
        raise ValueError(f"column {name!r} has dtype {value['dtype']!r} and shape {value['shape']!r}")
    return Column(name, value["dtype"], tuple(value["shape"]), value["kind"])


def _member(value: dict[str, Any]) -> Member:
    set_id, number, count = value["id"], _natural(value["number"]), _natural(value["count"])
    if not isinstance(set_id, str) or len(set_id) != 32 or not set(set_id) <= HEXADECIMAL:
        raise ValueError(f"{set_id!r} is not the id of a set: 32 hexadecimal digits")
    if number >= count:
        raise ValueError(f"number {number} of {count} in its set")
    return Member(set_id, number, count)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is not a size")
    return value


def _hexadecimal(value: Any) -> int:
    if not isinstance(value, str) or len(value) != 16 or not set(value) <= HEXADECIMAL:
        raise ValueError(f"{value!r} is not a checksum of 16 hexadecimal digits")
    return int(value, 16)


def _refuse(path: str, problem: str) -> NoReturn:
    raise FormatError(f"{path}: {problem[:500]}")  # what a file holds must not flood a terminal
