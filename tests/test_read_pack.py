"""Two readers, written apart, agree: packfmt.storage and tools/read_pack.py, which follows docs/format.md alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import runpy
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from packfmt.errors import CorruptError, FormatError, PackfmtError
from packfmt.record import DTYPES, Column
from packfmt.storage import create
from packfmt.storage import open as open_pack
from packfmt.storage.shard_set import Manifest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "read_pack.py"
ORACLE = runpy.run_path(str(TOOL))
IMAGE_NAMES = ("width", "height", "channels", "format", "orientation", "flags")


def gif(red: int) -> bytes:
    """An image of one pixel in 35 bytes."""
    head, rest = "474946383961 0100 0100 800000", "0000 ffffff 2c 0000 0000 0100 0100 00 02 02 4401 00 3b"
    return bytes.fromhex(f"{head} {red:02x} {rest}")


def write_example(path: Path) -> None:
    """The pack that docs/format.md shows."""
    columns = (Column("label"), Column("boxes", "<f4", (None, 4)))
    with create(path, columns=columns, classes=("cat", "dog"), metadata={"source": "example"}) as writer:
        writer.write(gif(0x10), key="cat/1.gif", label=0, boxes=[[0.25, 0.25, 0.5, 0.5]])
        writer.write(b"", key="dog/\udcff.gif", label=1, boxes=[])
        writer.write(gif(0x20), key="dog/2.gif", label=1, boxes=[[0, 0, 1, 1], [0.5, 0, 1, 1]])


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "example.bin"
    write_example(path)
    return path


def read_with_packfmt(path: Path) -> dict[str, Any]:
    """What packfmt reads, in the shape in which the other reader returns it."""
    with open_pack(path, check="full") as reader:
        columns = {}
        for name, column in reader.columns.items():
            values = column.tolist() if isinstance(column, np.ndarray) else list(column)
            columns[name] = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
        return {
            "count": len(reader),
            "records": [bytes(record.data) for record in reader],
            "columns": columns,
            "classes": list(reader.classes),
            "metadata": reader.metadata,
            "content_id": reader.content_id,
        }


def assert_readers_agree(path: Path) -> dict[str, Any]:
    by_packfmt = read_with_packfmt(path)
    by_oracle = ORACLE["read_pack"](path)
    assert repr(by_packfmt) == repr({name: by_oracle[name] for name in by_packfmt})  # repr: NaN equals NaN
    return by_packfmt


# ---- both read the same ----


def test_the_example(example: Path) -> None:
    pack = assert_readers_agree(example)
    assert pack["records"] == [gif(0x10), b"", gif(0x20)]
    assert pack["columns"]["key"] == ["cat/1.gif", "dog/\udcff.gif", "dog/2.gif"]
    assert pack["columns"]["boxes"] == [[[0.25, 0.25, 0.5, 0.5]], [], [[0, 0, 1, 1], [0.5, 0, 1, 1]]]
    assert pack["columns"]["label"] == [0, 1, 1]
    assert pack["columns"]["width"] == [1, 0, 1]


def test_an_empty_pack(tmp_path: Path) -> None:
    with create(tmp_path / "empty.bin", columns=(Column("boxes", "<f4", (None, 4)), Column("mask", "|b1", (2, 3)))):
        pass
    pack = assert_readers_agree(tmp_path / "empty.bin")
    assert pack["count"] == 0
    assert set(pack["columns"]) == {"key", "boxes", "mask", *IMAGE_NAMES}


def test_records_longer_than_a_hash_block(tmp_path: Path) -> None:
    with create(tmp_path / "long.bin") as writer:
        for size in (240, 241, 1024, 1025, 5000):
            writer.write(random.Random(size).randbytes(size), key=str(size))
    assert_readers_agree(tmp_path / "long.bin")


def test_shards_of_a_set(tmp_path: Path) -> None:
    with create(tmp_path / "out.json", shard_size=40) as writer:
        for red in range(3):
            writer.write(gif(red), key=f"{red}.gif")
    members = []
    for number in range(3):
        path = tmp_path / f"out-{number:05d}.bin"
        assert_readers_agree(path)
        members.append(ORACLE["read_pack"](path)["set"])
    assert [(member["number"], member["count"]) for member in members] == [(0, 3), (1, 3), (2, 3)]
    assert len({member["id"] for member in members}) == 1
    assert f"shard 2 of 3, counted from 0, of the set {members[0]['id']}\n" in run_tool(path).stdout


def values_of(column: Column) -> st.SearchStrategy[Any]:
    if column.kind == "text":
        return st.binary(max_size=5).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
    if column.kind == "bytes":
        return st.binary(max_size=5)
    dtype = np.dtype(column.dtype)
    item = st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)
    if dtype == np.bool_:
        item = st.sampled_from([b"\0", b"\1"])
    rows = st.integers(0, 3) if column.ragged else st.just(0)

    def shaped(rows: int) -> st.SearchStrategy[Any]:
        shape = (rows, *column.row_shape) if column.ragged else column.row_shape
        size = int(np.prod(shape, dtype=int))
        return st.lists(item, min_size=size, max_size=size).map(
            lambda items: np.frombuffer(b"".join(items), dtype).reshape(shape)
        )

    return rows.flatmap(shaped)


COLUMNS = (
    *(Column(f"one {dtype}", dtype) for dtype in DTYPES),
    Column("vector", "<i2", (3,)),
    Column("matrix", "<f8", (2, 1)),
    Column("\u65e5\u672c", "<u2", (None,)),
    Column("boxes", "<f4", (None, 4)),
    Column("cubes", "|i1", (None, 2, 2)),
    Column("caption", "|u1", (None,), "text"),
    Column("extra", "|u1", (None,), "bytes"),
)


@st.composite
def packs(draw: st.DrawFn) -> tuple[Any, ...]:
    """Columns; records as (data, key, values); classes; metadata."""
    columns = tuple(draw(st.lists(st.sampled_from(COLUMNS), unique=True, max_size=4)))
    keys = draw(st.lists(st.binary(min_size=1, max_size=6), unique=True, max_size=5))
    records = [
        (
            draw(st.binary(max_size=300)),
            key.decode("utf-8", "surrogateescape"),
            {column.name: draw(values_of(column)) for column in columns},
        )
        for key in keys
    ]
    metadata = draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2))
    return columns, records, draw(st.lists(st.text(max_size=3), max_size=3)), metadata


@given(packs())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_pack(pack: Any) -> None:
    columns, records, classes, metadata = pack
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.bin"
        with create(path, columns=columns, classes=classes, metadata=metadata) as writer:
            for data, key, values in records:
                writer.write(data, key=key, **values)
        read = assert_readers_agree(path)
        assert read["records"] == [data for data, _, _ in records]
        assert read["columns"]["key"] == [key for _, key, _ in records]
        assert (read["classes"], read["metadata"]) == (classes, metadata)
        for column in columns:
            given_values = [values[column.name] for _, _, values in records]
            plain = [value.tolist() if isinstance(value, np.ndarray) else value for value in given_values]
            assert repr(read["columns"][column.name]) == repr(plain)


def test_real_images(tmp_path: Path) -> None:
    data = os.environ.get("PACKFMT_TEST_DATA")
    if not data:
        pytest.skip("PACKFMT_TEST_DATA is not set: no real images")
    images = sorted(path for path in Path(data).rglob("*.jpg") if path.stat().st_size < 40_000)[:10]
    with create(tmp_path / "real.bin") as writer:
        for image in images:
            writer.write(image.read_bytes(), key=image.relative_to(data).as_posix())
    assert assert_readers_agree(tmp_path / "real.bin")["records"] == [image.read_bytes() for image in images]


# ---- the document ----


def dumped_bytes(block: str) -> bytes:
    """The bytes of a dump: numbered lines of hexadecimal, zeros where nothing is shown."""
    file = bytearray()
    for line in block.splitlines():
        if match := re.match(r"([0-9a-f]{6})  ((?:[0-9a-f]{2} )*[0-9a-f]{2}) ", line):
            file += bytes(int(match[1], 16) - len(file)) + bytes.fromhex(match[2])
    return bytes(file)


def test_the_documents_dump_is_what_the_writer_writes(example: Path) -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- dump: begin -->\n```text\n(.*?)```\n<!-- dump: end -->", text, re.DOTALL)
    assert block is not None
    assert dumped_bytes(block[1]) == example.read_bytes()
    parts = ORACLE["read_pack"](example)["parts"]
    assert block[1] == ORACLE["hex_dump"](example.read_bytes(), parts) + "\n"


def test_the_documents_hashes() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\d+)` \| `(\d+)` \| `([0-9a-f]{16})` \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    for length, seed, digest in rows:
        assert xxhash.xxh3_64_hexdigest(bytes(i % 251 for i in range(int(length))), int(seed)) == digest


def test_the_documents_manifest_is_what_packfmt_reads(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    examples = [block for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if "packfmt-manifest" in block]
    (tmp_path / "out.json").write_text(examples[0], encoding="ascii")
    assert Manifest.load(str(tmp_path / "out.json")).shards == (
        ("out-00000.bin", 123456, 2**30, "00112233445566778899aabbccddeeff"),
    )


# ---- the command ----


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # -I -S: no site-packages, so that it proves to need the standard library alone
    command = [sys.executable, "-I", "-S", str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_lists_a_pack(example: Path) -> None:
    done = run_tool(example)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("0 'cat/1.gif' 35 bytes\n1 'dog/\\udcff.gif' 0 bytes\n2 'dog/2.gif' 35 bytes\n")


def test_the_command_as_json(example: Path) -> None:
    found = json.loads(run_tool(example, "--json").stdout)
    assert found["columns"]["label"] == [0, 1, 1]
    assert [record["size"] for record in found["records"]] == [35, 0, 35]


def test_the_command_refuses_in_one_line(tmp_path: Path, example: Path) -> None:
    (tmp_path / "cut.bin").write_bytes(example.read_bytes()[:-1])
    done = run_tool(tmp_path / "cut.bin")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'cut.bin'}: no trailer: truncated or appended to\n"


# ---- damage ----


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """The file with one bit changed, and back."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, bit // 8)
        os.pwrite(descriptor, bytes([byte[0] ^ 1 << bit % 8]), bit // 8)
        yield
        os.pwrite(descriptor, byte, bit // 8)
    finally:
        os.close(descriptor)


def bits(path: Path, prefix: str) -> list[int]:
    """All bits of the parts whose name starts so."""
    parts = ORACLE["read_pack"](path)["parts"]
    return [bit for name, at, size in parts if name.startswith(prefix) for bit in range(8 * at, 8 * (at + size))]


def padding_bytes(path: Path) -> list[int]:
    parts = ORACLE["read_pack"](path)["parts"]
    used = {byte for _, at, size in parts for byte in range(at, at + size)}
    return [byte for byte in range(path.stat().st_size) if byte not in used]


@pytest.fixture
def victim(example: Path, tmp_path: Path) -> Path:
    path = tmp_path / "victim.bin"
    path.write_bytes(example.read_bytes())
    return path


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("prefix", ["record", "index"])
def test_no_flipped_bit_of_records_and_index_gives_wrong_bytes(victim: Path, prefix: str, io: str) -> None:
    read = set()
    for bit in bits(victim, prefix):
        with flipped(victim, bit), open_pack(victim, io=io) as reader:
            try:
                views = reader.read(range(3))
            except CorruptError:
                continue
            assert views == [gif(0x10), b"", gif(0x20)]
        read.add(bit // 8)
    # Wherever the offset of the record of 0 bytes points, its bytes are right.
    assert read <= {bits(victim, "index.offset")[64] // 8}


def test_a_flipped_bit_of_a_record_hurts_that_record_alone(victim: Path) -> None:
    first = 8 * 64
    with flipped(victim, first), open_pack(victim) as reader:
        assert [bytes(view) for view in reader.read((1, 2))] == [b"", gif(0x20)]
        with pytest.raises(CorruptError) as caught:
            reader.read((2, 0))
    assert (caught.value.path, caught.value.index, caught.value.key) == (str(victim), 0, "cat/1.gif")


@pytest.mark.parametrize("prefix", ["rows", "column"])
def test_every_flipped_bit_of_a_column_is_found_at_its_first_use(victim: Path, prefix: str) -> None:
    missed = []
    for name, at, size in ORACLE["read_pack"](victim)["parts"]:
        if not name.startswith(prefix + "."):
            continue
        for bit in range(8 * at, 8 * (at + size)):
            with flipped(victim, bit), open_pack(victim) as reader:
                try:
                    reader.columns[name.partition(".")[2]]
                except CorruptError:
                    continue
            missed.append((name, bit))
    assert missed == []


def test_every_flipped_byte_of_padding_is_found_by_verify(victim: Path) -> None:
    missed = []
    for byte in padding_bytes(victim):
        with flipped(victim, 8 * byte + byte % 8), open_pack(victim) as reader:
            if not any(isinstance(problem, CorruptError) for problem in reader.problems()):
                missed.append(byte)
    assert missed == []


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_verify_names_the_damage_and_goes_on(victim: Path, io: str) -> None:
    missed = []
    for name, at, size in ORACLE["read_pack"](victim)["parts"][1:-2]:
        for bit in {8 * at, 8 * at + 7, 8 * (at + size) - 1} if size else ():
            with flipped(victim, bit), open_pack(victim, io=io) as reader:
                if not all(isinstance(problem, PackfmtError) for problem in list(reader.problems()) or [None]):
                    missed.append((name, bit))
    assert missed == []


def test_the_other_reader_finds_every_flipped_byte(victim: Path) -> None:
    missed = []
    for byte in range(victim.stat().st_size):
        with flipped(victim, 8 * byte + byte % 8):
            try:
                ORACLE["read_pack"](victim)
            except ORACLE["PackError"]:
                continue
        missed.append(byte)
    assert missed == []


# ---- hostile contents: every checksum is right, and so is the content id ----


def reseal(path: Path, **sections: bytes) -> None:
    """Replace sections (``index_offset`` is ``index.offset``) by others of their size, and set all checksums right."""
    raw = bytearray(path.read_bytes())
    directory_at, directory_size = struct.unpack_from("<QQ", raw, len(raw) - 64)
    directory = json.loads(raw[directory_at : directory_at + directory_size])
    for name, content in sections.items():
        section = directory["sections"][name.replace("_", ".")]
        assert len(content) == section["size"]
        raw[section["offset"] : section["offset"] + len(content)] = content
        section["checksum"] = xxhash.xxh3_64_hexdigest(content)
    text = json.dumps(directory, sort_keys=True, separators=(",", ":")).encode()
    assert len(text) == directory_size
    raw[directory_at : directory_at + directory_size] = text
    struct.pack_into("<Q", raw, len(raw) - 48, xxhash.xxh3_64_intdigest(text))
    places = {name: (s["offset"], s["size"], 0) for name, s in directory["sections"].items()}
    raw[-32:-16] = xxhash.xxh3_128_digest(ORACLE["content"](bytes(raw), directory["columns"], places))
    struct.pack_into("<Q", raw, len(raw) - 8, xxhash.xxh3_64_intdigest(bytes(raw[-96:-8])))
    path.write_bytes(raw)


def u64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def sums(*records: bytes) -> bytes:
    return u64s(*(xxhash.xxh3_64_intdigest(record, i) for i, record in enumerate(records)))


A, B = gif(0x10), gif(0x20)
HOSTILE = {
    "records overlap": {
        "index_offset": u64s(64, 64, 99),
        "index_length": u64s(35, 35, 35),
        "index_checksum": sums(A, A, B),
    },
    "records swapped": {"index_offset": u64s(99, 99, 64), "index_checksum": sums(B, b"", A)},
    "hole between records": {"index_length": u64s(30, 0, 35), "index_checksum": sums(A[:30], b"", B)},
    "hole before the first": {
        "index_offset": u64s(65, 99, 99),
        "index_length": u64s(34, 0, 35),
        "index_checksum": sums(A[1:], b"", B),
    },
    "hole after the last": {"index_length": u64s(35, 0, 34), "index_checksum": sums(A, b"", B[:34])},
    "record in the header": {
        "index_offset": u64s(0, 99, 99),
        "index_length": u64s(0, 0, 35),
        "index_checksum": sums(b"", b"", B),
    },
    "record past the records": {"index_length": u64s(35, 0, 36)},
    "record at 2^63": {"index_offset": u64s(2**63, 99, 99)},
    "record at 2^64 - 1": {"index_offset": u64s(64, 2**64 - 1, 99)},
    "length 2^63": {"index_length": u64s(2**63, 0, 35)},
    "length wraps to 35": {"index_offset": u64s(2**64 - 35, 99, 99), "index_length": u64s(134, 0, 35)},
    "rows go back": {"rows_boxes": u64s(0, 2, 1, 3)},
    "rows start late": {"rows_boxes": u64s(1, 1, 1, 3)},
    "rows end early": {"rows_boxes": u64s(0, 1, 1, 2)},
    "rows past the values": {"rows_boxes": u64s(0, 1, 1, 4)},
    "rows at 2^63": {"rows_boxes": u64s(0, 2**63, 2**63, 3)},
    "rows at 2^64 - 1": {"rows_boxes": u64s(0, 2**64 - 1, 2**64 - 1, 3)},
    "key of 2^63 bytes": {"rows_key": u64s(0, 2**63, 2**63 + 1, 27)},
    "a key empty": {"rows_key": u64s(0, 0, 18, 27)},
    "keys the same": {"column_key": b"dog/2.gif" * 3},
}


@pytest.fixture
def hostile(request: pytest.FixtureRequest, victim: Path) -> Path:
    reseal(victim, **HOSTILE[request.param])
    return victim


def test_resealing_alone_changes_nothing(victim: Path, example: Path) -> None:
    reseal(victim)
    assert victim.read_bytes() == example.read_bytes()


@pytest.mark.parametrize("hostile", HOSTILE, indirect=True)
def test_the_other_reader_refuses_hostile_contents(hostile: Path) -> None:
    with pytest.raises(ORACLE["PackError"]):
        ORACLE["read_pack"](hostile)


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("hostile", HOSTILE, indirect=True)
def test_hostile_contents_raise_only_our_errors_when_read(hostile: Path, io: str) -> None:
    with open_pack(hostile, io=io) as reader:
        for index in range(3):
            with contextlib.suppress(CorruptError):
                reader.read((index,))
            for name in ("boxes", "key"):
                with contextlib.suppress(CorruptError):
                    reader.columns[name][index]
        with contextlib.suppress(CorruptError):
            reader.will_need(range(3))


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("hostile", HOSTILE, indirect=True)
def test_verify_finds_hostile_contents(hostile: Path, io: str) -> None:
    with open_pack(hostile, io=io) as reader:
        problems = list(reader.problems())
    assert problems
    assert all(isinstance(problem, (CorruptError, FormatError)) for problem in problems)


def test_a_pack_without_keys_is_refused(victim: Path) -> None:
    raw = victim.read_bytes()
    directory_at, directory_size = struct.unpack_from("<QQ", raw, len(raw) - 64)
    text = raw[directory_at : directory_at + directory_size].replace(b'"key":', b'"kex":')
    text = text.replace(b"rows.key", b"rows.kex").replace(b"column.key", b"column.kex")
    trailer = bytearray(raw[-96:])
    struct.pack_into("<Q", trailer, 48, xxhash.xxh3_64_intdigest(text))
    struct.pack_into("<Q", trailer, 88, xxhash.xxh3_64_intdigest(bytes(trailer[:88])))
    victim.write_bytes(raw[:directory_at] + text + raw[directory_at + directory_size : -96] + trailer)
    with pytest.raises(FormatError, match="no text column 'key'"):
        open_pack(victim)
    with pytest.raises(ORACLE["PackError"], match="no column 'key'"):
        ORACLE["read_pack"](victim)
