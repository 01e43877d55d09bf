"""Layout version 1, without files: golden bytes, every flipped bit, hostile directories whose checksums are right.

The hostile files are also given to tools/read_pack.py, which was written from docs/format.md alone and must agree.
"""

from __future__ import annotations

import json
import math
import runpy
import struct
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from packfmt import format as layout
from packfmt.bounded_json import PACK
from packfmt.errors import FormatError
from packfmt.format import Directory, Layout, Member, Section, Trailer
from packfmt.record import Column

ORACLE = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "read_pack.py"))

# Where things stand, as docs/format.md says.
HEADER_FIELDS = {"version": (12, "<I"), "incompatible": (16, "<Q"), "compatible": (24, "<Q"), "reserved": (32, "<Q")}
HEADER_CHECKSUM = 56
TRAILER_SIZE, TRAILER_CHECKSUM = 96, 88
TRAILER_FIELDS = {
    "version": (8, "<I"),
    "zero": (12, "<I"),
    "count": (16, "<Q"),
    "records_end": (24, "<Q"),
    "directory_offset": (32, "<Q"),
    "directory_size": (40, "<Q"),
    "directory_checksum": (48, "<Q"),
    "file_size": (56, "<Q"),
    "reserved": (80, "<Q"),
}

RECORDS = (b"first", b"", b"the third record")
KEYS = ("a", "b/\udcff", "c")
KEY = Column("key", "|u1", (None,), "text")
BOXES = Column("boxes", "<f4", (None, 4))
LABEL = Column("label")


def u64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def build_shard() -> bytes:
    """Three records with a number, a text and a ragged column, put together from format.py's pieces."""
    offsets, position = [], 64
    for record in RECORDS:
        offsets.append(position)
        position += len(record)
    raw_keys = [key.encode("utf-8", "surrogateescape") for key in KEYS]
    contents = {
        "index.offset": u64s(*offsets),
        "index.length": u64s(*map(len, RECORDS)),
        "index.checksum": u64s(*(layout.record_checksum(r, i) for i, r in enumerate(RECORDS))),
        "rows.boxes": u64s(0, 2, 2, 3),
        "column.boxes": struct.pack("<12f", *range(12)),
        "rows.key": u64s(0, 1, 4, 5),
        "column.key": b"".join(raw_keys),
        "column.label": struct.pack("<3q", 0, -1, 1),
    }
    columns = (BOXES, KEY, LABEL)
    sizes = layout.section_sizes(3, columns, {"boxes": 48, "key": 5})
    assert list(sizes) == list(contents)
    plan = Layout.plan(position, sizes)
    sections = {n: Section(s.offset, s.size, xxhash.xxh3_64_intdigest(contents[n])) for n, s in plan.sections.items()}
    raw = Directory(sections, columns, ("cat", "dog"), {"made": "by hand"}).encode()
    file = bytearray(plan.file_size(len(raw)))
    file[:64] = layout.encode_header()
    file[64:position] = b"".join(RECORDS)
    for name, section in sections.items():
        file[section.offset : section.offset + section.size] = contents[name]
    file[plan.directory_offset : plan.directory_offset + len(raw)] = raw
    parts = layout.content_parts(columns)
    identity = xxhash.xxh3_128_digest(b"".join(contents[p] if isinstance(p, str) else p for p in parts))
    directory = Section(plan.directory_offset, len(raw), xxhash.xxh3_64_intdigest(raw))
    file[-96:] = Trailer(3, position, directory, len(file), identity).encode()
    return bytes(file)


SHARD = build_shard()
(DIRECTORY_AT, DIRECTORY_SIZE) = struct.unpack_from("<QQ", SHARD, len(SHARD) - 96 + 32)
DIRECTORY: dict[str, Any] = json.loads(SHARD[DIRECTORY_AT : DIRECTORY_AT + DIRECTORY_SIZE])


def open_frame(raw: bytes) -> Directory:
    """What opening a file does with its bytes."""
    layout.check_header(raw[:64], "x.bin")
    trailer = layout.decode_trailer(raw[-TRAILER_SIZE:], len(raw), "x.bin")
    start = trailer.directory.offset
    return layout.decode_directory(raw[start : start + trailer.directory.size], trailer, "x.bin")


def sealed_header(**fields: int) -> bytes:
    """The shard with these header fields and a right header checksum."""
    raw = bytearray(SHARD)
    for name, value in fields.items():
        struct.pack_into(HEADER_FIELDS[name][1], raw, HEADER_FIELDS[name][0], value)
    struct.pack_into("<Q", raw, HEADER_CHECKSUM, xxhash.xxh3_64_intdigest(bytes(raw[:56])))
    return bytes(raw)


def sealed_trailer(raw: bytes, **fields: int) -> bytes:
    """The file with these trailer fields and a right trailer checksum."""
    trailer = bytearray(raw[-TRAILER_SIZE:])
    for name, value in fields.items():
        struct.pack_into(TRAILER_FIELDS[name][1], trailer, TRAILER_FIELDS[name][0], value)
    struct.pack_into("<Q", trailer, TRAILER_CHECKSUM, xxhash.xxh3_64_intdigest(bytes(trailer[:TRAILER_CHECKSUM])))
    return raw[:-TRAILER_SIZE] + bytes(trailer)


def sealed_directory(directory: bytes, **fields: int) -> bytes:
    """The shard with another directory, and every checksum and size right."""
    padding = bytes(layout.align(DIRECTORY_AT + len(directory)) - DIRECTORY_AT - len(directory))
    raw = SHARD[:DIRECTORY_AT] + directory + padding + SHARD[-TRAILER_SIZE:]
    sealed = {
        "directory_size": len(directory),
        "directory_checksum": xxhash.xxh3_64_intdigest(directory),
        "file_size": len(raw),
    }
    return sealed_trailer(raw, **{**sealed, **fields})


def changed(change: Callable[[dict[str, Any]], Any], **fields: int) -> bytes:
    """The shard with a changed directory, and every checksum and size right."""
    directory = deepcopy(DIRECTORY)
    change(directory)
    return sealed_directory(json.dumps(directory).encode(), **fields)


# ---- golden bytes ----


def test_header_bytes() -> None:
    assert layout.encode_header() == bytes.fromhex(
        "89 7061636b666d74 0d0a 1a 0a 01000000 0000000000000000 0000000000000000"
        "000000000000000000000000000000000000000000000000 4b0d14c62900cd5b"
    )


def test_trailer_bytes() -> None:
    trailer = Trailer(2, 70, Section(640, 900, 0x1122334455667788), 1696, bytes(range(16)))
    assert trailer.encode() == bytes.fromhex(
        "7061636b656e640a 01000000 00000000 0200000000000000 4600000000000000 8002000000000000 8403000000000000"
        "8877665544332211 a006000000000000 000102030405060708090a0b0c0d0e0f 0000000000000000 e8913d5e91d82202"
    )


def test_directory_bytes() -> None:
    directory = Directory({"index.offset": Section(64, 8, 0xAB)}, (Column("l"),), ("é",), {"b": 1, "a": [1.5, None]})
    assert directory.encode() == (
        b'{"classes":["\\u00e9"],"columns":{"l":{"dtype":"<i8","kind":"array","shape":[]}},'
        b'"metadata":{"a":[1.5,null],"b":1},'
        b'"sections":{"index.offset":{"checksum":"00000000000000ab","offset":64,"size":8}}}'
    )


def test_the_place_in_a_set_comes_back() -> None:
    member = Member("0123456789abcdef" * 2, 2, 3)
    raw = sealed_directory(json.dumps({**DIRECTORY, "set": {"count": 3, "id": member.set_id, "number": 2}}).encode())
    assert open_frame(raw).member == member
    written = Directory({}, (), (), {}, member).encode()
    assert written.endswith(b'"set":{"count":3,"id":"0123456789abcdef0123456789abcdef","number":2}}')
    assert open_frame(SHARD).member is None


def test_the_record_checksum_is_seeded_with_the_ordinal() -> None:
    assert layout.record_checksum(b"abc", 1) == xxhash.xxh3_64_intdigest(b"abc", seed=1)
    assert layout.record_checksum(b"abc", 0) != layout.record_checksum(b"abc", 1)


# ---- layout ----


@pytest.mark.parametrize(("position", "aligned"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (2**32, 2**32)])
def test_align(position: int, aligned: int) -> None:
    assert layout.align(position) == aligned


def test_plan_beyond_4_gib() -> None:
    plan = Layout.plan(2**32 + 5, {"a": 2**33 + 1, "b": 0, "c": 8})
    assert [(s.offset, s.size) for s in plan.sections.values()] == [
        (2**32 + 64, 2**33 + 1),
        (2**32 + 2**33 + 128, 0),
        (2**32 + 2**33 + 128, 8),
    ]
    assert plan.directory_offset == 2**32 + 2**33 + 192
    assert plan.file_size(1) == 2**32 + 2**33 + 256 + 96


def test_a_good_shard_decodes_to_what_was_encoded() -> None:
    directory = open_frame(SHARD)
    assert directory.columns == (BOXES, KEY, LABEL)
    assert directory.classes == ("cat", "dog")
    assert directory.metadata == {"made": "by hand"}
    assert {n: (s.offset, s.size) for n, s in directory.sections.items()} == {
        n: (s["offset"], s["size"]) for n, s in DIRECTORY["sections"].items()
    }


def test_the_second_reader_reads_the_good_shard(tmp_path: Path) -> None:
    (tmp_path / "good.bin").write_bytes(SHARD)
    pack = ORACLE["read_pack"](tmp_path / "good.bin")
    assert pack["records"] == list(RECORDS)
    assert pack["columns"] == {
        "boxes": [[[0, 1, 2, 3], [4, 5, 6, 7]], [], [[8, 9, 10, 11]]],
        "key": list(KEYS),
        "label": [0, -1, 1],
    }


@pytest.mark.parametrize("metadata", [{"x": math.nan}, {"x": math.inf}, {"x": b"bytes"}, {"x": {1, 2}}])
def test_metadata_that_json_cannot_hold_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"JSON"):
        Directory({}, (), (), metadata).encode()


def test_metadata_that_contains_itself_is_refused() -> None:
    metadata: dict[str, Any] = {}
    metadata["self"] = metadata
    with pytest.raises(ValueError, match="Circular"):
        Directory({}, (), (), metadata).encode()


@pytest.mark.parametrize(
    ("classes", "metadata"),
    [
        (("x" * 1000,) * (PACK.size // 1000), {}),
        (("",) * (PACK.strings + 1), {}),
        ((), {"numbers": [1] * (PACK.numbers + 2)}),
        ((), {"lists": [[]] * PACK.nodes}),
        ((), {"members": dict.fromkeys(map(str, range(PACK.nodes)))}),
        ((), {"deep": reduce(lambda value, _: [value], range(PACK.depth), None)}),
    ],
    ids=["bytes", "strings", "numbers", "lists", "members", "depth"],
)
def test_a_directory_that_no_reader_takes_is_refused_when_written(
    classes: tuple[str, ...], metadata: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="store them in a column"):
        Directory({}, (), classes, metadata).encode()


def test_what_is_counted_stands_outside_of_strings() -> None:
    text = '[{,:"\\\\\\' * PACK.numbers  # with quotes and backslashes, which JSON escapes
    text = text[: PACK.size // 4]
    metadata = {"text": text, "list": [[text[:7], 1.5, {"a": -1}]]}
    assert open_frame(changed(replace("metadata", metadata))).metadata == metadata


def test_a_million_class_names_are_read_as_written() -> None:
    names = [f"class name {number}" for number in range(1_000_000)]
    metadata = {"frequencies": list(range(1_000_000))}
    assert open_frame(changed(lambda d: d.update(classes=names))).classes == tuple(names)
    assert open_frame(changed(lambda d: d.update(metadata=metadata))).metadata == metadata


# ---- damage ----


def flipped(raw: bytes, bit: int) -> bytes:
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        pytest.param(0, 64, id="header"),
        pytest.param(DIRECTORY_AT, DIRECTORY_AT + DIRECTORY_SIZE, id="directory"),
        pytest.param(len(SHARD) - 96, len(SHARD), id="trailer"),
    ],
)
def test_every_flipped_bit_is_found_at_open(start: int, stop: int) -> None:
    missed = []
    for bit in range(8 * start, 8 * stop):
        try:
            open_frame(flipped(SHARD, bit))
        except FormatError:
            continue
        missed.append(bit)
    assert missed == []


def test_every_truncation_is_found_at_open() -> None:
    for length in range(len(SHARD)):
        with pytest.raises(FormatError):
            open_frame(SHARD[:length])


@pytest.mark.parametrize("extra", [b"\0", b"\n", bytes(64), bytes(96), SHARD, SHARD[-96:]], ids=len)
def test_bytes_after_the_end_are_found_at_open(extra: bytes) -> None:
    with pytest.raises(FormatError, match="appended"):
        open_frame(SHARD + extra)


def test_a_hole_cut_from_the_middle_is_found_at_open() -> None:
    with pytest.raises(FormatError, match=f"{len(SHARD) - 64} bytes long, its trailer says {len(SHARD)}"):
        open_frame(SHARD[:64] + SHARD[128:])


@pytest.mark.parametrize(
    "mangle",
    [
        pytest.param(lambda raw: raw.replace(b"\r\n", b"\n"), id="CRLF to LF"),
        pytest.param(lambda raw: raw.replace(b"\n", b"\r\n"), id="LF to CRLF"),
        pytest.param(lambda raw: raw.replace(b"\r", b"\n"), id="CR to LF"),
        pytest.param(lambda raw: bytes(byte & 0x7F for byte in raw), id="7 bits"),
        pytest.param(lambda raw: raw[: raw.index(b"\x1a")] + bytes(64), id="cut at ^Z"),
    ],
)
def test_a_text_mode_transfer_is_named(mangle: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FormatError, match="text-mode transfer; copy the file again in binary mode"):
        open_frame(mangle(SHARD))


@pytest.mark.parametrize("raw", [b"", b"\x89", b"\xff\xd8\xff\xe0", b"PK\x03\x04" * 100, bytes(1000)], ids=len)
def test_other_files_are_no_shards(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"^x\.bin: not a packfmt shard: it starts with"):
        open_frame(raw)


# ---- versions and flags ----


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_refused(version: int) -> None:
    with pytest.raises(FormatError, match=f"format version {version}; this packfmt reads version 1"):
        open_frame(sealed_header(version=version))


def test_another_version_in_the_trailer_is_refused() -> None:
    with pytest.raises(FormatError, match="the trailer is of version 2"):
        open_frame(sealed_trailer(SHARD, version=2))


def test_unknown_incompatible_features_are_refused() -> None:
    with pytest.raises(FormatError, match="flags 0x8000000000000001"):
        open_frame(sealed_header(incompatible=2**63 + 1))


def test_unknown_compatible_features_are_ignored() -> None:
    assert open_frame(sealed_header(compatible=2**63 + 1)) == open_frame(SHARD)


def test_unknown_members_of_the_directory_are_ignored() -> None:
    assert open_frame(changed(lambda d: d.update(extension=[1]))) == open_frame(SHARD)


# ---- hostile files: every checksum is right ----


def section(name: str, **values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d["sections"][name].update(values)


def column(name: str, **values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d["columns"][name].update(values)


def drop(part: str, name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d[part].pop(name)


def put(part: str, name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d[part].update({name: value})


def replace(part: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d.update({part: value})


def remove(part: str) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d.pop(part)


def swap(first: str, second: str) -> Callable[[dict[str, Any]], Any]:
    def change(d: dict[str, Any]) -> None:
        sections = d["sections"]
        sections[first], sections[second] = sections[second], sections[first]

    return change


def plausible(count: int) -> Callable[[dict[str, Any]], Any]:
    """Sections laid out validly for a count that the file cannot hold."""

    def change(d: dict[str, Any]) -> None:
        sizes = layout.section_sizes(count, (BOXES, KEY, LABEL), {"boxes": 48, "key": 5})
        for name, planned in Layout.plan(64 + sum(map(len, RECORDS)), sizes).sections.items():
            d["sections"][name] = {"checksum": "0" * 16, "offset": planned.offset, "size": planned.size}

    return change


def plausible_values(size: int) -> Callable[[dict[str, Any]], Any]:
    """A ragged column whose size the file cannot hold, with all after it moved accordingly."""

    def change(d: dict[str, Any]) -> None:
        sizes = layout.section_sizes(3, (BOXES, KEY, LABEL), {"boxes": size, "key": 5})
        for name, planned in Layout.plan(64 + sum(map(len, RECORDS)), sizes).sections.items():
            d["sections"][name].update(offset=planned.offset, size=planned.size)

    return change


def moved(name: str, by: int) -> Callable[[dict[str, Any]], Any]:
    return section(name, offset=DIRECTORY["sections"][name]["offset"] + by)


def text(old: str, new: str) -> bytes:
    """The shard with one spot of the directory's text replaced."""
    raw = json.dumps(DIRECTORY).encode()
    assert raw.count(old.encode()) >= 1
    return sealed_directory(raw.replace(old.encode(), new.encode("utf-8", "surrogatepass"), 1))


EMPTY = {"checksum": "0" * 16, "offset": 64, "size": 0}

HOSTILE: dict[str, bytes] = {
    # places
    "section overlaps the records": changed(section("index.offset", offset=64)),
    "section overlaps the header": changed(section("index.offset", offset=0)),
    "section overlaps the one before": changed(moved("index.length", -64)),
    "two sections at one place": changed(section("index.length", offset=128)),
    "hole before a section": changed(moved("column.label", 64)),
    "unaligned section": changed(moved("column.label", 1)),
    "section in the directory": changed(section("column.label", offset=DIRECTORY_AT)),
    "section in the trailer": changed(section("column.label", offset=len(SHARD) - 96)),
    "section past the end": changed(section("column.label", offset=len(SHARD) + 64)),
    "section at 2^63": changed(section("column.label", offset=2**63)),
    "section at 2^64 - 64": changed(section("column.label", offset=2**64 - 64)),
    "section at 2^64": changed(section("column.label", offset=2**64)),
    "sections swapped": changed(swap("index.offset", "index.length")),
    "columns in another order": changed(swap("column.boxes", "column.key")),
    # sizes
    "index too short": changed(section("index.checksum", size=16)),
    "index too long": changed(section("index.checksum", size=32)),
    "size 2^63": changed(section("column.key", size=2**63)),
    "size 2^64 - 1": changed(section("column.key", size=2**64 - 1)),
    "size 0": changed(section("column.label", size=0)),
    "no whole number of rows": changed(section("column.boxes", size=47)),
    "row offsets for other records": changed(section("rows.key", size=24)),
    "negative size": changed(section("column.key", size=-5)),
    "negative offset": changed(section("column.key", offset=-64)),
    "size with 4000 digits": changed(section("column.key", size=10**4000)),
    "row offsets with 4000 digits": changed(section("column.boxes", size=16 * 10**4000)),
    "values of 2^62 bytes, rest moved": changed(plausible_values(2**62)),
    "values of 4299 digits, rest moved": changed(plausible_values(16 * 10**4297)),
    "offset as float": changed(section("column.label", offset=float(DIRECTORY["sections"]["column.label"]["offset"]))),
    "offset as string": changed(section("column.label", offset=str(DIRECTORY["sections"]["column.label"]["offset"]))),
    "offset as bool": changed(section("column.label", offset=True)),
    "offset null": changed(section("column.label", offset=None)),
    "size as list": changed(section("column.label", size=[24])),
    # counts
    "count 2^63": sealed_trailer(SHARD, count=2**63),
    "count 2^64 - 1": sealed_trailer(SHARD, count=2**64 - 1),
    "count 2^61, 8 times it wraps to 0": sealed_trailer(SHARD, count=2**61),
    "count 2^40, sections laid out for it": changed(plausible(2**40), count=2**40),
    "count 2^63, sections laid out for it": changed(plausible(2**63 - 1), count=2**63 - 1),
    "count one less": sealed_trailer(SHARD, count=2),
    "count 0 with records": sealed_trailer(SHARD, count=0),
    "count 0, sections laid out for it": changed(plausible(0), count=0),
    # trailer
    "records end in the header": sealed_trailer(SHARD, records_end=63),
    "records end after the index": sealed_trailer(SHARD, records_end=DIRECTORY_AT + 64),
    "records end at 2^64 - 1": sealed_trailer(SHARD, records_end=2**64 - 1),
    "directory at 0": sealed_trailer(SHARD, directory_offset=0),
    "directory past the end": sealed_trailer(SHARD, directory_offset=len(SHARD)),
    "directory at 2^64 - 64": sealed_trailer(SHARD, directory_offset=2**64 - 64),
    "directory of 0 bytes": sealed_trailer(SHARD, directory_size=0),
    "directory of 2^64 - 1 bytes": sealed_trailer(SHARD, directory_size=2**64 - 1),
    "directory of 65 MiB": sealed_trailer(SHARD, directory_size=65 << 20),
    "file size 0": sealed_trailer(SHARD, file_size=0),
    "file size 2^64 - 1": sealed_trailer(SHARD, file_size=2**64 - 1),
    "trailer's zero field set": sealed_trailer(SHARD, zero=1),
    "trailer's reserved field set": sealed_trailer(SHARD, reserved=1),
    "header's reserved field set": sealed_header(reserved=1),
    # what sections there are
    "no index": changed(drop("sections", "index.offset")),
    "no checksums": changed(drop("sections", "index.checksum")),
    "no row offsets": changed(drop("sections", "rows.key")),
    "no values": changed(drop("sections", "column.key")),
    "no values for numbers": changed(drop("sections", "column.label")),
    "no sections": changed(replace("sections", {})),
    "section of an unknown column": changed(put("sections", "column.x", EMPTY)),
    "unknown index array": changed(put("sections", "index.extra", {**EMPTY, "size": 24})),
    "row offsets of a fixed column": changed(put("sections", "rows.label", DIRECTORY["sections"]["rows.key"])),
    "column without sections": changed(put("columns", "new", {"dtype": "<i8", "kind": "array", "shape": []})),
    "column that collides with the index": changed(put("columns", "index.offset", DIRECTORY["columns"]["label"])),
    "sections of a dropped column": changed(drop("columns", "label")),
    # columns
    "object dtype": changed(column("label", dtype="|O")),
    "void dtype": changed(column("label", dtype="|V8")),
    "string dtype": changed(column("label", dtype="<U2")),
    "structured dtype": changed(column("label", dtype=[["a", "<i8"]])),
    "comma dtype": changed(column("label", dtype="i4,i4")),
    "sub-array dtype": changed(column("label", dtype="(2,)<i4")),
    "date dtype": changed(column("label", dtype="<M8[s]")),
    "complex dtype": changed(column("label", dtype="<c8")),
    "big-endian dtype": changed(column("label", dtype=">i8")),
    "native dtype": changed(column("label", dtype="=i8")),
    "dtype by another name": changed(column("label", dtype="int64")),
    "dtype of 2^31 bytes": changed(column("label", dtype="V2147483647")),
    "dtype null": changed(column("label", dtype=None)),
    "dtype a number": changed(column("label", dtype=8)),
    "dtype an object": changed(column("label", dtype={"names": ["a"], "formats": ["O"]})),
    "dtype missing": changed(lambda d: d["columns"]["label"].pop("dtype")),
    "shape zero": changed(column("label", shape=[0])),
    "shape negative": changed(column("label", shape=[-1])),
    "shape huge": changed(column("label", shape=[2**31])),
    "shape 2^64": changed(column("label", shape=[2**64])),
    "shape with a huge product": changed(column("label", shape=[2**30, 2**30, 2**30])),
    "shape with 4000 axes": changed(column("label", shape=[1] * 4000)),
    "shape with 32 axes": changed(column("label", shape=[1] * 32)),
    "shape with inner null": changed(column("label", shape=[1, None])),
    "shape with bool": changed(column("label", shape=[True])),
    "shape with float": changed(column("label", shape=[1.0])),
    "shape a string": changed(column("label", shape="")),
    "shape an object": changed(column("label", shape={})),
    "shape a number": changed(column("label", shape=1)),
    "shape null": changed(column("label", shape=None)),
    "shape missing": changed(lambda d: d["columns"]["label"].pop("shape")),
    "kind unknown": changed(column("key", kind="image")),
    "kind null": changed(column("key", kind=None)),
    "kind a list": changed(column("key", kind=["text"])),
    "kind missing": changed(lambda d: d["columns"]["key"].pop("kind")),
    "text of numbers": changed(column("label", kind="text")),
    "text of two axes": changed(column("boxes", kind="text")),
    "column name empty": changed(lambda d: d["columns"].update({"": d["columns"].pop("label")})),
    "column a list": changed(put("columns", "label", ["<i8", [], "array"])),
    "column null": changed(put("columns", "label", None)),
    "columns a list": changed(replace("columns", [])),
    "columns missing": changed(remove("columns")),
    # checksums
    "checksum short": changed(section("column.label", checksum="0" * 15)),
    "checksum long": changed(section("column.label", checksum="0" * 17)),
    "checksum upper case": changed(section("column.label", checksum="A" * 16)),
    "checksum with sign": changed(section("column.label", checksum="+" + "0" * 15)),
    "checksum with underscores": changed(section("column.label", checksum="0_0_0_0_0_0_0_00")),
    "checksum in other digits": changed(section("column.label", checksum="\u0660" * 16)),
    "checksum a number": changed(section("column.label", checksum=5)),
    "checksum missing": changed(lambda d: d["sections"]["column.label"].pop("checksum")),
    # classes, metadata, sections
    "classes a string": changed(replace("classes", "ab")),
    "classes an object": changed(replace("classes", {"a": 0})),
    "classes of numbers": changed(replace("classes", [1, 2])),
    "classes null": changed(replace("classes", None)),
    "classes missing": changed(remove("classes")),
    "metadata a list": changed(replace("metadata", [])),
    "metadata a string": changed(replace("metadata", "x")),
    "metadata null": changed(replace("metadata", None)),
    "metadata missing": changed(remove("metadata")),
    "sections a list": changed(replace("sections", [])),
    "sections missing": changed(remove("sections")),
    **{
        f"the set is {value!r:.60}": changed(replace("set", value))
        for value in (
            None,
            [],
            {},
            "x",
            {"id": "0" * 32, "number": 0},
            {"id": "0" * 32, "count": 1},
            {"number": 0, "count": 1},
            {"id": "0" * 31, "number": 0, "count": 1},
            {"id": "A" * 32, "number": 0, "count": 1},
            {"id": 0, "number": 0, "count": 1},
            {"id": "0" * 32, "number": 1, "count": 1},
            {"id": "0" * 32, "number": -1, "count": 1},
            {"id": "0" * 32, "number": 0.0, "count": 1},
            {"id": "0" * 32, "number": 0, "count": 2**64},
        )
    },
    # JSON
    "not JSON": sealed_directory(b"pickle"),
    "empty": sealed_directory(b""),
    "a list": sealed_directory(b"[]"),
    "a number": sealed_directory(b"1"),
    "null": sealed_directory(b"null"),
    "a string": sealed_directory(b'"classes"'),
    "cut off": sealed_directory(json.dumps(DIRECTORY).encode()[:-1]),
    "two values": sealed_directory(json.dumps(DIRECTORY).encode() + b"{}"),
    "byte order mark": sealed_directory(b"\xef\xbb\xbf" + json.dumps(DIRECTORY).encode()),
    "UTF-16": sealed_directory(json.dumps(DIRECTORY).encode("utf-16")),
    "not ASCII": text("by hand", "by h\u00e4nd"),
    "raw surrogate": text("by hand", "\udcff"),
    "NaN": text('"by hand"', "NaN"),
    "Infinity": text('"by hand"', "Infinity"),
    "-Infinity": text('"by hand"', "-Infinity"),
    "float beyond float64": text('"by hand"', "1e999"),
    "NaN as size": text('"size": 24', '"size": NaN'),
    "number of 5000 digits": text('"by hand"', "1" * 5000),
    "a name twice": text('"made": "by hand"', '"made": 1, "made": 2'),
    "a section twice": text('"index.offset": {', '"index.offset": {}, "index.offset": {'),
    "a column twice": text('"label": {"d', '"label": {"dtype": "<i8", "shape": [], "kind": "array"}, "label": {"d'),
    "an escaped name twice": text('"made": "by hand"', '"made": 1, "\\u006dade": 2'),
    "a top name twice": text('{"classes": [', '{"classes": [], "classes": ['),
    "nested lists": text('"by hand"', "[" * 100_000 + "]" * 100_000),
    "nested objects": text('"by hand"', '{"a":' * 100_000 + "1" + "}" * 100_000),
    "nested offset": text('"size": 24', '"size": ' + "[" * 500 + "]" * 500),
    "too many strings": text('"by hand"', '["' + '","' * PACK.strings + '"]'),
    "too many numbers": text('"by hand"', "[" + "1," * PACK.numbers + "1, 1]"),
    "too many numbers behind texts": text('"by hand"', "[" + '"" ,' * PACK.numbers + '"" , ""]'),
    "too many lists": text('"by hand"', "[" + "[]," * PACK.nodes + "[]]"),
    "too many objects": text('"by hand"', "[" + "{}," * PACK.nodes + "{}]"),
    "too many members": text('"by hand"', json.dumps(dict.fromkeys(map(str, range(PACK.nodes))))),
    "nested too deep": text('"by hand"', "[" * PACK.depth + "]" * PACK.depth),
    "NUL after": sealed_directory(json.dumps(DIRECTORY).encode() + b"\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"^x\.bin: ") as caught:
        open_frame(HOSTILE[name])
    assert len(str(caught.value)) < 600
    str(caught.value).encode("utf-8")  # printable, whatever the file says


@pytest.mark.parametrize("name", HOSTILE)
def test_the_second_reader_refuses_it_too(name: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.bin").write_bytes(HOSTILE[name])
    with pytest.raises(ORACLE["PackError"]):
        ORACLE["read_pack"](tmp_path / "hostile.bin")


def test_refusing_takes_memory_by_the_file_and_not_by_its_numbers() -> None:
    numbers = [raw for raw in HOSTILE.values() if len(raw) < 20_000]
    tracemalloc.start()
    try:
        for raw in numbers:
            with pytest.raises(FormatError):
                open_frame(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(numbers) > 100
    assert peak < 2 << 20


def test_refusing_takes_memory_by_the_size_of_the_directory() -> None:
    raw = text('"by hand"', "[" + "[]," * (2 << 20) + "[]]")  # 140 MiB when parsed
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="lists, objects and members"):
            open_frame(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(raw)


SPOTS: list[tuple[str, ...]] = [
    ("classes",), ("columns",), ("metadata",), ("sections",), ("columns", "label"), ("columns", "key"),
    *(("columns", name, part) for name in ("boxes", "key", "label") for part in ("dtype", "kind", "shape")),
    *(("sections", name) for name in DIRECTORY["sections"]),
    *(("sections", name, part) for name in DIRECTORY["sections"] for part in ("checksum", "offset", "size")),
]  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from([0, 8, 16, 24, 32, 48, 64, 128, 192, len(SHARD), "<i8", "|u1", "<f4", "text", "bytes", "array"])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.tuples(st.sampled_from(SPOTS), VALUES), min_size=1, max_size=3), st.just(3) | st.integers(0, 2**63))
@settings(max_examples=400, derandomize=True, deadline=None)
def test_any_directory_is_refused_or_stays_in_the_file(spots: list[tuple[tuple[str, ...], Any]], count: int) -> None:
    directory = deepcopy(DIRECTORY)
    for path, value in spots:
        place = directory
        for step in path[:-1]:
            place = place.get(step) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[path[-1]] = value
    try:
        found = open_frame(sealed_directory(json.dumps(directory).encode(), count=count))
    except FormatError:
        return
    ends = [64 + sum(map(len, RECORDS))]
    for place in sorted(found.sections.values(), key=lambda s: (s.offset, s.size)):
        assert place.offset == layout.align(ends[-1])
        ends.append(place.offset + place.size)
    assert layout.align(ends[-1]) == DIRECTORY_AT


NAMES = st.text(min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.lists(NAMES), st.dictionaries(st.text(), JSON), st.sets(NAMES, max_size=4), st.integers(0, 1000))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_directories_round_trip(classes: list[str], metadata: dict[str, Any], names: set[str], count: int) -> None:
    columns = tuple(Column(name, "<f4", (None, 2) if i % 2 else (3,)) for i, name in enumerate(sorted(names)))
    records_end = 64 + count
    sizes = layout.section_sizes(count, columns, {c.name: 8 * count for c in columns if c.ragged})
    plan = Layout.plan(records_end, sizes)
    written = Directory(plan.sections, columns, tuple(classes), metadata)
    raw = written.encode()
    trailer = Trailer(
        count, records_end, Section(plan.directory_offset, len(raw), xxhash.xxh3_64_intdigest(raw)),
        plan.file_size(len(raw)), bytes(16),
    )  # fmt: skip
    assert layout.decode_trailer(trailer.encode(), trailer.file_size, "x.bin") == trailer
    assert layout.decode_directory(raw, trailer, "x.bin") == written
