"""LMDB packs beyond the reader contract: what is in the file, damage, growth, killed writers, replacing, processes."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from contracts.reader import COLUMNS, rich_records, some_records

from packfmt import format as layout
from packfmt import lmdb_pages, storage
from packfmt.errors import CorruptError, FormatError, PackfmtError
from packfmt.lmdb_pages import Tree, decode_head
from packfmt.record import Record
from packfmt.storage import folders, lmdb_writer
from packfmt.storage import lmdb as lmdb_reader
from packfmt.storage.fileio import FileBytes, open_bytes

PREFIX = b"packfmt"
DATA = "data.mdb"


def write(path: Path, records: list[Record], **options: Any) -> Path:
    with storage.create(path, **options) as writer:
        for record in records:
            writer.write(record.data, record.key, **record.columns)
    return path


def entries(path: Path) -> dict[bytes, bytes]:
    """All that bare LMDB finds."""
    with lmdb.open(str(path), readonly=True, lock=False, create=False) as environment, environment.begin() as txn:
        return dict(txn.cursor())


def change(path: Path, edit: Callable[[lmdb.Transaction], None]) -> None:
    """Change entries with bare LMDB, and end the file at its last page as packfmt does."""
    with lmdb.open(str(path), lock=False, map_size=1 << 24) as environment:
        with environment.begin(write=True) as txn:
            edit(txn)
        size = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    os.truncate(path / DATA, size)


def flip(path: Path, offset: int, mask: int = 0x40) -> None:
    with open(path / DATA, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def run(code: str, *arguments: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that is soon full, small transactions, and sections of many chunks."""
    monkeypatch.setattr(lmdb_writer, "MAP_SIZE", 64 << 10)
    monkeypatch.setattr(lmdb_writer, "BATCH", 16 << 10)
    monkeypatch.setattr(lmdb_writer, "CHUNK", 100)
    monkeypatch.setattr(lmdb_reader, "CHUNK", 100)


# ---- what is in the file


def test_a_record_is_under_its_ordinal_and_nothing_but_its_bytes(tmp_path: Path) -> None:
    records = some_records(300)
    found = entries(write(tmp_path / "out.lmdb", records))
    assert [found[i.to_bytes(8, "big")] for i in range(300)] == [record.data for record in records]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("records", [[], some_records(40), rich_records()], ids=["none", "plain", "rich"])
def test_records_and_chunks_together_are_the_bytes_of_the_shard(tmp_path: Path, records: list[Record]) -> None:
    options: dict[str, Any] = {"classes": ["a"], "metadata": {"b": 1}}
    if "caption" in (records[0].columns if records else {}):
        options["columns"] = COLUMNS
    shard = write(tmp_path / "out.bin", records, **options).read_bytes()
    found = entries(write(tmp_path / "out.lmdb", records, **options))
    built = bytearray(len(shard))
    place = layout.HEADER.size
    for index, record in enumerate(records):
        built[place : place + len(record.data)] = found.pop(index.to_bytes(8, "big"))
        place += len(record.data)
    for key, value in found.items():
        start = int.from_bytes(key.removeprefix(PREFIX), "big")
        built[start : start + len(value)] = value
    assert built == shard


def test_the_content_id_is_that_of_the_shard(tmp_path: Path) -> None:
    ids = set()
    for name in ("out.bin", "out.lmdb"):
        with storage.open(write(tmp_path / name, rich_records(), columns=COLUMNS)) as reader:
            ids.add(reader.content_id)
    assert len(ids) == 1


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{i}.lmdb", some_records(200)) / DATA for i in range(2))
    assert first.read_bytes() == second.read_bytes()


def test_names_longer_than_a_key_of_lmdb(tmp_path: Path) -> None:
    name, key = "c" * 700, "k" * 5000
    with storage.open(write(tmp_path / "out.lmdb", [Record(b"x", key, {name: 7})])) as reader:
        assert (reader.key(0), reader.columns[name].tolist()) == (key, [7])


@pytest.mark.parametrize("name", [b"\xff", "h\u00e4ndel".encode(), b"a\nb", b"[x]"])
def test_folders_of_any_name(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    with storage.open(write(folder / "out.lmdb", some_records(3))) as reader:
        assert bytes(reader[2].data) == some_records(3)[2].data


@pytest.mark.usefixtures("small_parts")
def test_the_map_grows_and_sections_of_many_chunks_are_joined(tmp_path: Path) -> None:
    records = [Record(bytes([i % 256]) * 20_000, f"k/{i}.jpg", {"label": i}) for i in range(60)]
    with storage.open(write(tmp_path / "out.lmdb", records), check="full") as reader:
        assert [bytes(view) for view in reader.read(range(60))] == [record.data for record in records]
        assert reader.columns["label"].tolist() == list(range(60))
        assert [reader.key(i) for i in range(60)] == [record.key for record in records]


def test_a_column_of_one_chunk_lies_over_the_file(tmp_path: Path) -> None:
    records = [Record(b"", str(i), {"label": i}) for i in range(2000)]
    with storage.open(write(tmp_path / "out.lmdb", records)) as reader:
        labels = reader.columns["label"]
        assert not labels.flags.owndata
        assert not labels.flags.writeable
        assert labels.flags.aligned


def test_the_file_ends_with_its_last_page_and_has_no_companions(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(50))
    with lmdb.open(str(path), readonly=True, lock=False) as environment:
        assert (path / DATA).stat().st_size == (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    assert os.listdir(path) == [DATA]


# ---- opening


def test_the_name_chooses_the_backend_and_the_content_the_reader(tmp_path: Path) -> None:
    records = some_records(3)
    made = {
        "a.lmdb": write(tmp_path / "a.lmdb", records),
        "b.bin": write(tmp_path / "b.bin", records, backend="lmdb"),
        "c.lmdb": write(tmp_path / "c.lmdb", records, backend="shard"),
    }
    kinds = {}
    for name, path in made.items():
        with storage.open(path) as reader:
            kinds[name] = reader.io == "lmdb"
            assert [bytes(record.data) for record in reader] == [record.data for record in records]
    assert kinds == {"a.lmdb": True, "b.bin": True, "c.lmdb": False}


@pytest.mark.parametrize("options", [{"backend": "hdf5"}, {"backend": "lmdb", "shard_size": 100}])
def test_an_impossible_backend_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="backend"):
        storage.create(tmp_path / "out.lmdb", **options)


def test_pread_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(1))
    with pytest.raises(ValueError, match="'auto' and 'mmap'"):
        storage.open(path, io="pread")


def test_an_environment_of_others_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as txn:
        txn.put(b"image-000000001", b"\xff\xd8\xff")
        txn.put(b"num-samples", b"1")
    size = 4 * os.sysconf("SC_PAGESIZE")
    os.truncate(path / DATA, size)
    with pytest.raises(FormatError, match="truncated"):
        storage.open(path)
    change(path, lambda txn: None)
    with pytest.raises(FormatError, match=r"packfmt did not write; .* packfmt convert"):
        storage.open(path)


def test_an_empty_environment_is_refused(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path / "empty")).close()
    with pytest.raises(FormatError):
        storage.open(tmp_path / "empty")


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.lmdb").mkdir()
    (tmp_path / "out.lmdb" / DATA).symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=DATA):
        storage.open(tmp_path / "out.lmdb")


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "out.lmdb").mkdir()
    os.mkfifo(tmp_path / "out.lmdb" / DATA)
    with pytest.raises(FormatError, match="not a regular file"):
        storage.open(tmp_path / "out.lmdb")


def open_files(path: Path) -> int:
    """How many descriptors of this process are of one file."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("this system does not list a process's descriptors")
    return sum(os.path.realpath(entry) == str(path.resolve()) for entry in folder.iterdir())


def test_opening_looks_at_a_few_pages_whatever_the_number_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = {count: write(tmp_path / f"{count}.lmdb", some_records(count)) for count in (100, 10_000)}
    looked: list[int] = []
    nodes = lmdb_pages._Pages.nodes

    def counted(pages: lmdb_pages._Pages, number: int, kind: int) -> int:
        looked.append(number)
        return nodes(pages, number, kind)

    monkeypatch.setattr(lmdb_pages._Pages, "nodes", counted)
    for path in packs.values():
        looked.clear()
        storage.open(path).close()
        assert len(set(looked)) < 12


def test_a_pack_is_read_whatever_the_path(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(3))
    (tmp_path / "link").symlink_to(path)
    with storage.open(path) as one, storage.open(tmp_path / "link") as two, storage.open(path / DATA) as three:
        assert {bytes(reader[1].data) for reader in (one, two, three)} == {some_records(3)[1].data}


def test_readers_by_the_hundred_take_a_descriptor_each(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(3))
    readers = [storage.open(path) for _ in range(300)]
    assert {bytes(reader[2].data) for reader in readers} == {some_records(3)[2].data}
    assert open_files(path / DATA) <= 300
    for reader in readers:
        reader.close()
    assert open_files(path / DATA) == 0


def test_a_dropped_reader_lets_go_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(3))
    reader = storage.open(path)
    reader.read([0])
    del reader
    assert open_files(path / DATA) == 0


def test_others_may_have_the_file_open_in_this_process(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(3))
    with lmdb.open(str(path), readonly=True, lock=False) as theirs, storage.open(path) as ours:
        assert bytes(ours[1].data) == some_records(3)[1].data
        assert theirs.stat()["entries"] > 3


def test_the_library_is_not_used_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "out.lmdb", some_records(3))
    monkeypatch.delattr(lmdb, "open")
    monkeypatch.delattr(lmdb, "Environment")
    with storage.open(path, check="full") as reader:
        assert [bytes(record.data) for record in reader] == [record.data for record in some_records(3)]


# ---- damage


def places(path: Path) -> dict[bytes, tuple[int, int]]:
    """Offset and size of every value."""
    data = memoryview((path / DATA).read_bytes())
    head = decode_head(data, str(path))
    return {key: (start, size) for key, start, size, _ in Tree(data, str(path), head.page_size, head.main).entries()}


def is_record(key: bytes) -> bool:
    return not key.startswith(PREFIX)


def test_every_flipped_byte_of_a_record_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", [Record(b"a" * 40, "x"), Record(b"b" * 5000, "y"), Record(b"", "z")])
    for key, (offset, size) in places(path).items():
        for byte in range(offset, offset + size, 1 if size < 100 else 97) if is_record(key) else ():
            flip(path, byte)
            with storage.open(path) as reader, pytest.raises(CorruptError) as caught:
                reader.read([0, 1, 2])
            assert (caught.value.index, caught.value.key) == (key[-1], "xyz"[key[-1]])
            flip(path, byte)
    with storage.open(path) as reader:
        assert list(reader.problems()) == []


def test_flipped_bytes_of_index_columns_and_directory_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", rich_records(), columns=COLUMNS)
    for key, (offset, size) in places(path).items():
        for byte in range(offset, offset + size, 5) if not is_record(key) else ():
            flip(path, byte)
            with pytest.raises(PackfmtError):
                storage.open(path, check="full").close()
            flip(path, byte)
    storage.open(path, check="full").close()


def test_a_damaged_column_is_an_error_when_it_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", [Record(b"", str(i), {"label": i}) for i in range(600)])
    with storage.open(path) as reader:
        section = reader._file.directory.sections["column.label"]  # type: ignore[attr-defined]
    flip(path, places(path)[PREFIX + section.offset.to_bytes(8, "big")][0] + 8)
    with storage.open(path) as reader:
        assert reader.key(1) == "1"
        with pytest.raises(CorruptError, match="column 'label' does not match its checksum"):
            reader.columns["label"]


def test_swapped_records_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", [Record(b"first", "x"), Record(b"later", "y")])

    def swap(txn: lmdb.Transaction) -> None:
        txn.put(bytes(8), b"later")
        txn.put(bytes(7) + b"\1", b"first")

    change(path, swap)
    with storage.open(path) as reader:
        for index in range(2):
            with pytest.raises(CorruptError):
                reader.read([index])


@pytest.mark.parametrize("edit", ["delete", "add", "exchange"])
def test_missing_and_foreign_entries_are_found(tmp_path: Path, edit: str) -> None:
    path = write(tmp_path / "out.lmdb", some_records(5))

    def spoil(txn: lmdb.Transaction) -> None:
        if edit in ("delete", "exchange"):
            txn.delete((3).to_bytes(8, "big"))
        if edit in ("add", "exchange"):
            txn.put((9).to_bytes(8, "big"), b"foreign")

    change(path, spoil)
    if edit != "exchange":
        with pytest.raises(FormatError, match="entries, must hold 5 records"):
            storage.open(path)
        return
    with storage.open(path) as reader:
        assert bytes(reader[2].data) == some_records(5)[2].data
        with pytest.raises(CorruptError, match=r"record 3, key 'k/00003.jpg': is missing"):
            reader.read([2, 3])
        assert any("is missing" in str(problem) for problem in reader.problems())


def test_a_missing_chunk_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(5))
    chunk = sorted(key for key in entries(path) if key.startswith(PREFIX))[3]

    def spoil(txn: lmdb.Transaction) -> None:
        txn.delete(chunk)
        txn.put(chunk[:-1] + bytes([chunk[-1] + 1]), b"")

    change(path, spoil)
    with pytest.raises(PackfmtError):
        storage.open(path, check="full")


@pytest.mark.parametrize("change_of_size", [-4096, -1, 1, 4096])
def test_another_size_is_refused(tmp_path: Path, change_of_size: int) -> None:
    path = write(tmp_path / "out.lmdb", some_records(50))
    size = (path / DATA).stat().st_size
    os.truncate(path / DATA, size + change_of_size)
    with pytest.raises(FormatError, match=rf"{size + change_of_size} bytes long, its head counts"):
        storage.open(path)


@pytest.mark.parametrize("size", [0, 1, 20, 151, 152, 4095, 4096, 4200])
def test_a_stump_is_refused(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "out.lmdb", some_records(50))
    os.truncate(path / DATA, size)
    with pytest.raises(FormatError):
        storage.open(path)


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "out.lmdb", some_records(50))
    with storage.open(path) as reader:
        reader.read([0])
        os.truncate(path / DATA, 8192)
        with pytest.raises(CorruptError, match="somebody changed it in place"):
            reader.read([1])


def test_any_damage_to_the_head_is_refused_or_harmless(tmp_path: Path) -> None:
    """In a process of its own, whose end by a signal would show."""
    path = write(tmp_path / "out.lmdb", some_records(20))
    code = """
        import sys
        from packfmt import storage
        from packfmt.errors import PackfmtError
        path, refused, harmless = sys.argv[1], 0, 0
        good = open(path + "/data.mdb", "rb").read()
        with storage.open(path) as reader:
            page = reader._file.bytes.head.page_size
            right = [bytes(record.data) for record in reader]
        for start in (0, page):
            for offset in range(start, start + 160):
                for mask in (1, 0x80):
                    with open(path + "/data.mdb", "r+b") as file:
                        file.seek(offset)
                        file.write(bytes([good[offset] ^ mask]))
                    try:
                        with storage.open(path, check="full") as reader:
                            assert [bytes(record.data) for record in reader] == right
                        harmless += 1
                    except (PackfmtError, OSError):
                        refused += 1
                    with open(path + "/data.mdb", "r+b") as file:
                        file.seek(offset)
                        file.write(good[offset:offset + 1])
        print(refused, harmless)
    """
    result = run(code, path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split()[0]) > 60


def test_damage_to_the_tree_is_refused_or_harmless(tmp_path: Path) -> None:
    """In a process of its own, as above."""
    path = write(tmp_path / "out.lmdb", some_records(200))
    code = """
        import random, sys
        from packfmt import storage
        from packfmt.errors import PackfmtError
        path, rng, refused, harmless = sys.argv[1] + "/data.mdb", random.Random(3), 0, 0
        good = open(path, "rb").read()
        with storage.open(sys.argv[1]) as reader:
            size = reader._file.bytes.head.page_size
            right = [bytes(record.data) for record in reader]
        branch_or_leaf = [
            page for page in range(2, len(good) // size)
            if int.from_bytes(good[page * size:][:8], "little") == page and good[page * size + 10] in (1, 2)
        ]
        for _ in range(150):
            with open(path, "r+b") as file:
                for place in [rng.choice(branch_or_leaf) * size + rng.randrange(size) for _ in range(3)]:
                    file.seek(place)
                    file.write(rng.randbytes(1))
            try:
                with storage.open(sys.argv[1], check="full") as reader:
                    assert [bytes(record.data) for record in reader] == right
                harmless += 1
            except (PackfmtError, OSError):
                refused += 1
            with open(path, "r+b") as file:
                file.write(good)
        print(refused, harmless)
    """
    result = run(code, path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split()[0]) > 50


def test_numbers_that_would_take_all_memory_are_refused(tmp_path: Path) -> None:
    """A directory and trailer with right checksums that claim a billion records."""
    path = write(tmp_path / "out.lmdb", some_records(2))
    count = 10**9
    with storage.open(path) as reader:
        columns = reader._file.directory.columns  # type: ignore[attr-defined]
    sizes = layout.section_sizes(count, columns, {"key": 8})
    plan = layout.Layout.plan(layout.HEADER.size, sizes)
    raw = layout.Directory(plan.sections, columns, (), {}).encode()
    directory = layout.Section(plan.directory_offset, len(raw), layout.xxhash.xxh3_64_intdigest(raw))
    size = plan.file_size(len(raw))
    trailer = layout.Trailer(count, layout.HEADER.size, directory, size, bytes(16)).encode()

    def spoil(txn: lmdb.Transaction) -> None:
        for key in [key for key, _ in txn.cursor() if key.startswith(PREFIX)][1:]:
            txn.delete(key)
        txn.put(PREFIX + plan.directory_offset.to_bytes(8, "big"), raw)
        txn.put(PREFIX + (size - layout.TRAILER.size).to_bytes(8, "big"), trailer)

    change(path, spoil)
    with pytest.raises(FormatError, match="must hold 1000000000 records"):
        storage.open(path)


# ---- writing


def test_nothing_appears_before_close(tmp_path: Path) -> None:
    writer = storage.create(tmp_path / "out.lmdb")
    writer.write(b"x", "x")
    assert not (tmp_path / "out.lmdb").exists()
    writer.close()
    assert os.listdir(tmp_path) == ["out.lmdb"]


@pytest.mark.parametrize("leave", ["discard", "error", "duplicate"])
def test_a_writer_that_gives_up_leaves_nothing(tmp_path: Path, leave: str) -> None:
    writer = storage.create(tmp_path / "out.lmdb")
    writer.write(b"x", "x")
    if leave == "discard":
        writer.discard()
    elif leave == "error":
        with pytest.raises(RuntimeError), writer:
            raise RuntimeError
    else:
        writer.write(b"y", "x")
        with pytest.raises(ValueError, match="same key"):
            writer.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), lmdb.MemoryError("full")], ids=["Ctrl-C", "LMDB's own"])
def test_a_writer_that_fails_to_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(lmdb, "open", fail)
    with pytest.raises((KeyboardInterrupt, CorruptError)):
        storage.create(tmp_path / "out.lmdb")
    assert os.listdir(tmp_path) == []


KILLED = """
    import os, signal, sys
    from packfmt import storage
    from packfmt.storage import lmdb_writer
    lmdb_writer.BATCH = 1 << 14
    writer = storage.create(sys.argv[1])
    for i in range(200):
        writer.write(bytes(1000), str(i))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "out.lmdb"
    assert run(KILLED, path).returncode == -9
    assert len(leftovers(tmp_path)) == 1
    assert not path.exists()
    write(path, some_records(3))
    assert os.listdir(tmp_path) == ["out.lmdb"]


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.lmdb"
    slow = storage.create(path)
    slow.write(b"slow", "x")
    write(path, [Record(b"quick", "x")])
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(FileExistsError):
        slow.close()
    assert os.listdir(tmp_path) == ["out.lmdb"]
    with storage.open(path) as reader:
        assert bytes(reader[0].data) == b"quick"


@pytest.mark.parametrize("limit", [4096, 100_000, 1_500_000])
def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(tmp_path: Path, limit: int) -> None:
    code = """
        import errno, os, resource, sys
        from packfmt import storage
        from packfmt.storage import lmdb_writer
        lmdb_writer.BATCH = 1 << 16
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
        try:
            with storage.create(sys.argv[1]) as writer:
                for i in range(2000):
                    writer.write(bytes(1000), str(i))
        except OSError as error:
            print(type(error).__module__, errno.errorcode[error.errno], error.filename)
    """
    path = tmp_path / "out.lmdb"
    result = run(code, path, limit)
    assert result.stdout in [f"builtins {code} {path}\n" for code in ("EFBIG", "ENOSPC", "EIO")], result
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("free", "expected"), [(0, "ENOSPC"), (1 << 20, "EIO")])
def test_a_short_write_is_a_full_disk_where_the_disk_is_full(tmp_path: Path, free: int, expected: str) -> None:
    code = """
        import errno, os, resource, sys, types
        from packfmt import storage
        free = types.SimpleNamespace(f_bavail=int(sys.argv[2]), f_frsize=4096)
        os.statvfs = lambda path: free
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with storage.create(sys.argv[1]) as writer:
                writer.write(bytes(1 << 20), "key")
        except OSError as error:
            print(errno.errorcode[error.errno], error.filename)
    """
    path = tmp_path / "out.lmdb"
    assert run(code, path, free).stdout == f"{expected} {path}\n"


def test_a_map_that_finds_no_room_in_memory_is_an_error_of_the_system(tmp_path: Path) -> None:
    code = """
        import errno, os, re, resource, sys
        from packfmt import storage
        from packfmt.storage import lmdb_writer
        lmdb_writer.MAP_SIZE = lmdb_writer.BATCH = 1 << 20
        with storage.create(sys.argv[1] + "-first.lmdb") as writer:  # all modules are loaded
            writer.write(b"", "key")
        used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        lmdb_writer.MAP_SIZE = 16 << 20
        try:
            with storage.create(sys.argv[1]) as writer:
                for i in range(100):
                    writer.write(bytes(1 << 20), str(i))
        except OSError as error:
            print(errno.errorcode[error.errno], error.filename)
    """
    path = tmp_path / "out.lmdb"
    result = run(code, path)
    assert result.stdout == f"ENOMEM {path}\n", result
    assert os.listdir(tmp_path) == ["out.lmdb-first.lmdb"]


def test_memory_does_not_grow_with_the_records(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from packfmt import storage
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with storage.create(sys.argv[1]) as writer:
            for i in range(6000):
                if i == 1500:
                    before = peak()
                writer.write(i.to_bytes(4, "little") * 5000, str(i))
        print(peak() - before)
    """
    result = run(code, tmp_path / "out.lmdb")
    assert float(result.stdout) < 30, result.stderr  # of 120 MB


# ---- replacing


def replaceable(path: Path, kind: str) -> None:
    if kind == "environment":
        write(path, some_records(2))
    elif kind == "shard":
        write(path, some_records(2), backend="shard")
    elif kind == "empty folder":
        path.mkdir()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "rename"])
@pytest.mark.parametrize("kind", ["nothing", "environment", "shard", "empty folder"])
def test_force_replaces(tmp_path: Path, kind: str, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    path = tmp_path / "out.lmdb"
    replaceable(path, kind)
    write(path, [Record(b"new", "x")], force=True)
    assert os.listdir(tmp_path) == ["out.lmdb"]
    with storage.open(path) as reader:
        assert bytes(reader[0].data) == b"new"


@pytest.mark.parametrize("kind", ["environment", "shard", "empty folder"])
def test_without_force_what_is_there_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.lmdb"
    replaceable(path, kind)
    with pytest.raises(FileExistsError):
        storage.create(path)
    assert os.listdir(tmp_path) == ["out.lmdb"]


def test_force_never_replaces_a_folder_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "photos.lmdb"
    path.mkdir()
    (path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"holds 'holiday\.jpg'"):
        storage.create(path, force=True)
    assert (path / "holiday.jpg").read_bytes() == b"precious"


def test_other_files_that_appear_meanwhile_stay(tmp_path: Path) -> None:
    path = tmp_path / "photos.lmdb"
    writer = storage.create(path, force=True)
    path.mkdir()
    (path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        writer.close()
    assert (path / "holiday.jpg").read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["photos.lmdb"]


def test_readers_of_the_old_pack_keep_it_while_new_ones_see_the_new(tmp_path: Path) -> None:
    old, new = some_records(60, seed=1), some_records(60, seed=2)
    path = write(tmp_path / "out.lmdb", old)
    with storage.open(path) as before:
        before.read([0])
        write(path, new, force=True)
        with storage.open(path) as after:
            assert [bytes(view) for view in after.read(range(60))] == [record.data for record in new]
            assert [bytes(view) for view in before.read(range(60))] == [record.data for record in old]
            assert [before.key(i) for i in range(60)] == [record.key for record in old]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_pack_replaced_while_it_is_opened_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    old, new = some_records(60, seed=1), some_records(60, seed=2)
    path = write(tmp_path / "out.lmdb", old)

    def replacing(name: str, io: Any) -> FileBytes:
        opened = open_bytes(name, io) if late else None
        write(path, new, force=True)
        return opened or open_bytes(name, io)

    monkeypatch.setattr(lmdb_reader, "open_bytes", replacing)
    with storage.open(path, check="full") as reader:
        assert [bytes(view) for view in reader.read(range(60))] == [record.data for record in (old if late else new)]


# ---- processes and limits


FORKS = """
    import gc, os, signal, sys, threading
    from packfmt import storage
    reader, done = storage.open(sys.argv[1]), threading.Event()
    def work():
        while not done.is_set():
            reader.read(range(64))
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    states = []
    for _ in range(int(sys.argv[2])):
        child = os.fork()
        if not child:
            signal.alarm(10)
            break
        states.append(os.waitpid(child, 0)[1])
"""


def test_forked_children_read_while_the_parents_threads_do(tmp_path: Path) -> None:
    """A child that closed what it inherits would wait for the parent's threads, which it does not have."""
    path = write(tmp_path / "out.lmdb", [Record(bytes([i]), str(i)) for i in range(64)])
    code = """
    if not child:
        assert [bytes(view)[0] for view in reader.read(range(64))] == list(range(64))
        reader.close()
        del reader
        gc.collect()
        with storage.open(sys.argv[1]) as again:
            assert bytes(again[5].data)[0] == 5
        os._exit(0)
    done.set()
    print(states)
    """
    result = run(FORKS + code, path, 8)
    assert result.stdout.strip() == str([0] * 8), result.stderr[-2000:]


def test_a_forked_child_can_be_torn_down(tmp_path: Path) -> None:
    """An ordinary end of a program drops everything, environments included."""
    path = write(tmp_path / "out.lmdb", [Record(bytes([i]), str(i)) for i in range(64)])
    code = """
    if child:
        done.set()
        print(states)
    """
    result = run(FORKS + code, path, 4)
    assert result.stdout.strip() == str([0] * 4), result.stderr[-2000:]


def test_views_live_on_when_everything_else_is_gone(tmp_path: Path) -> None:
    records = some_records(64)
    path = write(tmp_path / "out.lmdb", records)
    for _ in range(20):
        reader = storage.open(path)
        views, labels = reader.read(range(64)), reader.columns["label"]
        reader.close()
        del reader
        gc.collect()
        shutil.copytree(path, tmp_path / "copy")
        shutil.rmtree(path)
        assert [bytes(view) for view in views] == [record.data for record in records]
        assert labels.tolist() == list(range(64))
        os.rename(tmp_path / "copy", path)


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    for i in range(12):
        write(tmp_path / f"{i}.lmdb", some_records(5, seed=i))
    code = """
        import resource, sys
        from packfmt import storage
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        readers = [storage.open(f"{sys.argv[1]}/{i}.lmdb") for i in range(12)]
        print(sum(len(list(reader)) for reader in readers))
    """
    assert run(code, tmp_path).stdout == "60\n"


def test_offsets_rise_and_lengths_are_exact(tmp_path: Path) -> None:
    records = some_records(100)
    with storage.open(write(tmp_path / "out.lmdb", records)) as reader:
        assert reader.lengths(range(100)).tolist() == [len(record.data) for record in records]
        assert (np.diff(reader.offsets(range(100)).astype(np.int64)) >= 0).all()
