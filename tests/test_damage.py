"""Damaged and changed packs: the error at the documented time, and never a wrong byte.

Every flipped bit of records, index, columns and padding is in test_read_pack.py, of header, directory and trailer in
test_format.py; here are files cut, lengthened, swapped, replaced and torn, through the reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from contracts.reader import COLUMNS, rich_records, some_records

from packfmt import storage
from packfmt.errors import CorruptError, FormatError, PackfmtError
from packfmt.record import Record

IO = pytest.mark.parametrize("io", ["mmap", "pread"])


def write(path: Path, records: list[Record], **options: Any) -> Path:
    with storage.create(path, **options) as writer:
        for record in records:
            writer.write(record.data, record.key, **record.columns)
    return Path(writer.path)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write(tmp_path / "pack.bin", some_records(8))


def read_all(path: Path, io: Any = "auto") -> list[tuple[bytes, str, int]]:
    with storage.open(path, io=io) as reader:
        return [(bytes(r.data), r.key, int(r.columns["label"])) for r in reader]


# ---- cut and lengthened


def test_every_truncation_is_refused_at_open(tmp_path: Path) -> None:
    whole = write(tmp_path / "pack.bin", rich_records(), columns=COLUMNS).read_bytes()
    path = tmp_path / "cut.bin"
    path.write_bytes(whole)
    descriptor = os.open(path, os.O_RDWR)
    opened = []
    for size in range(len(whole) - 1, -1, -1):
        os.truncate(descriptor, size)
        with contextlib.suppress(FormatError):
            storage.open(path, io="pread").close()
            opened.append(size)
    os.close(descriptor)
    assert opened == []


@IO
@pytest.mark.parametrize("extra", [b"\0", b"\n", bytes(63), bytes(64), bytes(96), bytes(4096), b"\xff" * 100])
def test_appended_bytes_are_refused_at_open(pack: Path, io: Any, extra: bytes) -> None:
    with pack.open("ab") as file:
        file.write(extra)
    with pytest.raises(FormatError, match="truncated or has bytes appended"):
        storage.open(pack, io=io)


def test_an_appended_trailer_is_refused_at_open(pack: Path) -> None:
    with pack.open("ab") as file:
        file.write(pack.read_bytes()[-96:])
    with pytest.raises(FormatError, match="its trailer says"):
        storage.open(pack)


def test_a_pack_twice_in_one_file_is_refused_at_open(pack: Path) -> None:
    pack.write_bytes(pack.read_bytes() * 2)
    with pytest.raises(FormatError):
        storage.open(pack)


# ---- larger damage


@IO
def test_two_records_of_one_length_swapped_are_both_refused(tmp_path: Path, io: Any) -> None:
    path = write(tmp_path / "pack.bin", [Record(b"a" * 50, "a"), Record(b"b" * 50, "b"), Record(b"c", "c")])
    raw = path.read_bytes()
    path.write_bytes(raw[:64] + raw[114:164] + raw[64:114] + raw[164:])
    with storage.open(path, io=io) as reader:
        for index, key in enumerate("ab"):
            with pytest.raises(CorruptError, match="do not match their checksum") as caught:
                reader[index]
            assert (caught.value.index, caught.value.key) == (index, key)
        assert bytes(reader[2].data) == b"c"


@pytest.mark.parametrize("seed", range(4))
def test_bursts_and_lost_sectors_never_give_wrong_bytes(pack: Path, seed: int) -> None:
    rng = random.Random(seed)
    expected = read_all(pack)
    raw = pack.read_bytes()
    for _ in range(60):
        torn = bytearray(raw)
        start = rng.randrange(len(raw))
        size = rng.choice([1, 2, 4, 512, 4096])
        kind = rng.choice(["noise", "zero", "copy"])
        if kind == "noise":
            torn[start : start + size] = rng.randbytes(len(torn[start : start + size]))
        elif kind == "zero":
            torn[start : start + size] = bytes(len(torn[start : start + size]))
        else:
            other = rng.randrange(len(raw))
            piece = raw[other : other + len(torn[start : start + size])]
            torn[start : start + len(piece)] = piece
        pack.write_bytes(torn)
        with contextlib.suppress(PackfmtError):
            assert read_all(pack) == expected, f"seed {seed}: {kind} of {size} bytes at {start}"


def test_a_damaged_column_hurts_nothing_but_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "pack.bin", rich_records(), columns=COLUMNS)
    damage(path, "column.label")
    with storage.open(path) as reader:
        assert [bytes(r.data) for r in reader] == [r.data for r in rich_records()]
        assert reader.key(1) == "1.jpg"
        assert reader.columns["small"].tolist() == [65535, 65534, 65533]
        assert "label" in reader.columns
        for _ in range(2):
            with pytest.raises(CorruptError, match="column 'label' does not match its checksum") as caught:
                reader.columns["label"]
        assert caught.value.path == str(path)


def test_damaged_keys_do_not_hide_a_damaged_record(tmp_path: Path) -> None:
    path = write(tmp_path / "pack.bin", some_records(3))
    damage(path, "column.key")
    damage(path, 70)
    with storage.open(path) as reader, pytest.raises(CorruptError) as caught:
        reader[0]
    assert (caught.value.index, caught.value.key) == (0, None)


def test_a_full_check_at_open_refuses_what_a_quick_one_cannot_see(pack: Path) -> None:
    damage(pack, 70)
    storage.open(pack).close()
    with pytest.raises(CorruptError, match=r"record 0, key 'k/00000\.jpg'"):
        storage.open(pack, check="full")


def test_without_verifying_a_damaged_record_is_handed_out_as_it_is(pack: Path) -> None:
    damage(pack, 70)
    with storage.open(pack, verify=False) as reader:
        assert bytes(reader[0].data) != some_records(1)[0].data
        assert bytes(reader[1].data) == some_records(2)[1].data
        assert [p.index for p in reader.problems()] == [0]


def damage(path: Path, place: str | int) -> None:
    """Flip all bits of the first byte of a section, or of the byte at an offset."""
    raw = bytearray(path.read_bytes())
    if isinstance(place, str):
        at, size = struct.unpack_from("<QQ", raw, len(raw) - 64)
        place = json.loads(raw[at : at + size])["sections"][place]["offset"]
    raw[place] ^= 0xFF
    path.write_bytes(raw)


# ---- sets of shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write(tmp_path / "out", some_records(30), shard_size=9000)


def test_a_missing_shard_is_an_error_at_open(shards: Path) -> None:
    shards.with_name("out-00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"out-00001\.bin"):
        storage.open(shards)


def test_a_foreign_shard_is_an_error_at_open(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "out", some_records(30, seed=1), shard_size=9000)
    os.replace(tmp_path / "other" / "out-00001.bin", shards.with_name("out-00001.bin"))
    with pytest.raises(FormatError, match=r"out-00001\.bin: .* belongs to another pack"):
        storage.open(shards)


def test_swapped_shards_are_an_error_at_open(shards: Path, tmp_path: Path) -> None:
    first, second = shards.with_name("out-00000.bin"), shards.with_name("out-00001.bin")
    os.rename(first, tmp_path / "between")
    os.rename(second, first)
    os.rename(tmp_path / "between", second)
    with pytest.raises(FormatError, match=r"out-00000\.bin: .* belongs to another pack"):
        storage.open(shards)


def test_a_damaged_shard_is_an_error_at_open(shards: Path) -> None:
    with shards.with_name("out-00002.bin").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(FormatError, match=r"out-00002\.bin: the trailer does not match its checksum"):
        storage.open(shards)


def test_a_damaged_record_names_its_shard_and_its_index_there(shards: Path) -> None:
    with storage.open(shards) as reader:
        path, local = reader.locate(20)
        with storage.open(path) as alone:
            damage(Path(path), int(alone.offsets([local])[0]))
        with pytest.raises(CorruptError) as caught:
            reader[20]
        assert (caught.value.path, caught.value.index, caught.value.key) == (path, local, "k/00020.jpg")


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_refused_or_harmless(shards: Path) -> None:
    raw = shards.read_bytes()
    expected = read_all(shards)
    for place in range(len(raw)):
        torn = bytearray(raw)
        torn[place] ^= 1 << place % 8
        shards.write_bytes(torn)
        with contextlib.suppress(FormatError, FileNotFoundError):
            assert read_all(shards) == expected, place  # white space, or an escape in another case


def test_a_manifest_whose_shards_changed_their_order_is_refused(shards: Path) -> None:
    body = json.loads(shards.read_bytes())
    body["shards"].reverse()
    shards.write_text(json.dumps(body))
    with pytest.raises(FormatError, match="it does not match its checksum"):
        storage.open(shards)


def test_every_truncation_of_a_manifest_is_refused(shards: Path) -> None:
    raw = shards.read_bytes()
    for size in range(len(raw) - 2):  # the last two bytes are "}" and a line end, which JSON does not need
        shards.write_bytes(raw[:size])
        with pytest.raises(FormatError, match="not a manifest of shards"):
            storage.open(shards)


def sealed(change: dict[str, Any] | None = None, **row: Any) -> bytes:
    """A manifest with a right checksum."""
    body = {"format": "packfmt-manifest", "version": 1, "shards": [{"file": "a.bin", "records": 1, "bytes": 1} | row]}
    body["shards"][0].setdefault("content_id", "0" * 32)
    body |= change or {}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps(body | {"checksum": xxhash.xxh3_64_hexdigest(text.encode())}).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' * 5000,
        sealed({"version": 2}),
        sealed({"version": "1"}),
        sealed({"format": "other"}),
        sealed({"shards": {}}),
        sealed({"shards": []}),
        sealed({"shards": [1]}),
        sealed({"shards": None}),
        *(sealed(file=name) for name in ["", ".", "..", "../a.bin", "/etc/passwd", "a/b", "a\\b", "a\0", 3, None]),
        *(sealed(records=count) for count in [-1, 1.0, "1", True, None, 10**400]),
        sealed(bytes=-1),
        sealed(file="half of a pair \ud800.bin"),
        sealed({"shards": [{"file": "a.bin", "records": 1, "bytes": 1, "content_id": ""}] * 2}),
        b'{"a": [' + b"[]," * 2_000_000 + b"[]]}",
        b'{"a": [' + b'"",' * 1_000_000 + b'""]}',
        b" " * (9 << 20),
    ],
    ids=lambda raw: repr(raw[-60:]),
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(raw)
    with pytest.raises((FormatError, FileNotFoundError)) as caught:
        storage.open(path)
    assert "a.bin" in str(caught.value) or "not a manifest of shards" in str(caught.value)
    assert len(str(caught.value)) < 1000


# ---- changed while open


@IO
@pytest.mark.parametrize("change", [-1, 1, -4000, 4096])
def test_a_file_that_changes_its_size_while_open_is_an_error(pack: Path, io: Any, change: int) -> None:
    with storage.open(pack, io=io) as reader:
        assert reader[0].key == "k/00000.jpg"
        os.truncate(pack, pack.stat().st_size + change)
        uses = [lambda: reader[0], lambda: reader.columns["label"], lambda: reader.key(0), lambda: reader.lengths([0])]
        for use in uses:
            with pytest.raises(CorruptError, match="somebody changed it in place") as caught:
                use()
            assert caught.value.path == str(pack)


TRUNCATED = """
import os, sys
from packfmt import storage
from packfmt.errors import CorruptError
path, io = sys.argv[1:]
size = os.path.getsize(path)
with storage.open(path, io=io) as reader:
    for round in range(200):
        os.truncate(path, size * (round % 50) // 50)
        try:
            reader.key(round % 8) if round % 2 else reader.read([round % 8, 0])
        except CorruptError:
            continue
        raise SystemExit("read from a truncated file")
"""


@IO
def test_a_file_truncated_between_reads_is_an_error_and_no_crash(pack: Path, io: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(pack), io], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("call", ["fstat", "pread", "posix_fadvise"])
def test_a_descriptor_stays_open_while_the_system_is_called(
    pack: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    reader, real, calls = storage.open(pack, io="pread"), getattr(os, call), []

    def closed_meanwhile(*arguments: Any) -> Any:
        calls.append(arguments)
        reader.close()
        return real(*arguments)

    monkeypatch.setattr(os, call, closed_meanwhile)
    with contextlib.suppress(ValueError):  # it is closed by then; but nothing else than that
        reader.will_need([0, 7])
        reader.read([0, 7])
    assert calls


@IO
def test_a_file_written_over_while_open_gives_right_bytes_or_an_error(pack: Path, io: Any) -> None:
    expected = some_records(8)
    with storage.open(pack, io=io) as reader:
        raw = pack.read_bytes()
        with pack.open("r+b") as file:
            file.write(bytes(len(raw)))
        for index in range(8):
            with contextlib.suppress(CorruptError):
                assert bytes(reader[index].data) == expected[index].data


@IO
def test_readers_see_all_old_or_all_new_while_a_file_is_replaced(tmp_path: Path, io: Any) -> None:
    path = tmp_path / "pack.bin"
    versions = [write(tmp_path / f"{v}.bin", some_records(6, seed=v)).read_bytes() for v in range(2)]
    allowed = [[(r.data, r.key, r.columns["label"]) for r in some_records(6, seed=v)] for v in range(2)]
    path.write_bytes(versions[0])
    done = threading.Event()
    wrong: list[Any] = []

    def read() -> None:
        while not done.is_set():
            try:
                found = read_all(path, io)
            except Exception as error:
                wrong.append(error)
                return
            if found not in allowed:
                wrong.append(found)

    threads = [threading.Thread(target=read) for _ in range(4)]
    with short_turns():
        for thread in threads:
            thread.start()
        for round in range(100):
            (tmp_path / "next").write_bytes(versions[round % 2])
            os.replace(tmp_path / "next", path)
        done.set()
        for thread in threads:
            thread.join(30)
    assert wrong == []


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Let threads take turns often, so that they meet in the middle of things."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_a_shard_replaced_before_it_was_first_read_is_refused(shards: Path, tmp_path: Path) -> None:
    with storage.open(shards) as reader:
        write(tmp_path / "new.bin", some_records(3, seed=9))
        os.replace(tmp_path / "new.bin", shards.with_name("out-00001.bin"))
        path, _ = reader.locate(len(reader) - 1)
        assert bytes(reader[0].data) == some_records(1)[0].data
        with pytest.raises(FormatError, match=r"out-00001\.bin: .* the file was replaced"):
            reader.read(range(30))
        assert path.endswith(".bin")
