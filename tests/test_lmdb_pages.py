"""Trees of LMDB pages: the same answers as LMDB gives, and every page checked that is used."""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from packfmt.errors import CorruptError, FormatError
from packfmt.lmdb_pages import Tree, decode_head

FORMAT = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}
PAGE = 4096
Harm = Callable[[bytearray], None]


def made(path: Path, content: dict[bytes, bytes], *, delete: tuple[bytes, ...] = ()) -> bytes:
    """The data file that LMDB makes of these entries."""
    with lmdb.open(str(path), map_size=1 << 26, **FORMAT) as environment:
        with environment.begin(write=True) as txn:
            for key, value in content.items():
                txn.put(key, value)
        with environment.begin(write=True) as txn:
            for key in delete:
                txn.delete(key)
        assert environment.stat()["psize"] == PAGE
    return (path / "data.mdb").read_bytes()


def tree_of(data: bytes, **options: bool) -> Tree:
    head = decode_head(data, "file")
    return Tree(memoryview(data), "file", head.page_size, head.main, **options)


def values(data: bytes, tree: Tree) -> dict[bytes, bytes]:
    return {key: data[offset : offset + size] for key, offset, size, _ in tree.entries()}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[bytes, bytes], bytes]:
    """Keys of all lengths, values short, long and empty, a third of them deleted: half-empty pages on three levels."""
    rng = random.Random(7)
    lengths, sizes = [1, 2, 3, 8, 60, 400], [0, 1, 90, 2100, 9000]
    content = {rng.randbytes(rng.choice(lengths)): rng.randbytes(rng.choice(sizes)) for _ in range(1500)}
    dropped = tuple(rng.sample(sorted(content), 500))
    data = made(tmp_path_factory.mktemp("mixed") / "db", content, delete=dropped)
    for key in dropped:
        del content[key]
    return content, data


def test_the_entries_are_those_of_lmdb(mixed: tuple[dict[bytes, bytes], bytes]) -> None:
    content, data = mixed
    tree = tree_of(data, check_runs=True)
    assert decode_head(data, "").main.depth == 3
    assert list(values(data, tree).items()) == sorted(content.items())
    assert tree.last_key() == max(content)
    assert list(tree.problems()) == []


def test_keys_are_found_and_others_are_not(mixed: tuple[dict[bytes, bytes], bytes]) -> None:
    content, data = mixed
    tree, rng = tree_of(data), random.Random(8)
    for key, value in content.items():
        offset, size = tree.find(key) or (0, 0)
        assert data[offset : offset + size] == value
    for key in [b"", b"\0", b"\xff" * 500, *(rng.randbytes(rng.randrange(1, 9)) for _ in range(500))]:
        assert (tree.find(key) is not None) == (key in content)


def test_entries_begin_at_or_around_any_key(mixed: tuple[dict[bytes, bytes], bytes]) -> None:
    content, data = mixed
    tree, rng, keys = tree_of(data), random.Random(9), sorted(content)
    sought = [b"", b"\xff" * 500, *rng.sample(keys, 50), *(rng.randbytes(3) for _ in range(50))]
    for key in sought:
        place = bisect.bisect_left(keys, key)
        assert [entry.key for entry in itertools.islice(tree.entries(key), 9)] == keys[place : place + 9]
        around = max(bisect.bisect_right(keys, key) - 1, 0)
        assert next(tree.entries_around(key)).key == keys[around]


def test_keys_that_count_up_are_found(tmp_path: Path) -> None:
    content = {number.to_bytes(8, "big"): b"%d" % number for number in range(3000)}
    data = made(tmp_path / "db", content)
    tree = tree_of(data)
    for key, value in content.items():
        offset, size = tree.find(key) or (0, 0)
        assert data[offset : offset + size] == value
    assert tree.find((3000).to_bytes(8, "big")) is None


def test_an_empty_database(tmp_path: Path) -> None:
    tree = tree_of(made(tmp_path / "db", {}))
    assert (tree.find(b"x"), tree.last_key(), list(tree.entries()), list(tree.problems())) == (None, b"", [], [])
    assert list(tree.entries_around(b"x")) == []


def test_databases_within_are_told(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with lmdb.open(str(path), max_dbs=2, **FORMAT) as environment:
        inner = environment.open_db(b"inner")
        with environment.begin(write=True) as txn:
            txn.put(b"plain", bytes(48))
            txn.put(b"x", b"y", db=inner)
    data = (path / "data.mdb").read_bytes()
    assert [(entry.key, entry.size, entry.named) for entry in tree_of(data).entries()] == [
        (b"inner", 48, True),
        (b"plain", 48, False),
    ]


# ---- damage


@pytest.fixture
def counting(tmp_path: Path) -> bytearray:
    """Two levels: the root, and leaves of keys that count up."""
    return bytearray(made(tmp_path / "db", {b"%05d" % number: bytes(30) for number in range(400)}))


def child(data: bytearray, slot: int) -> tuple[int, int]:
    """Where the root's node begins, and the child it names."""
    start = decode_head(data, "").main.root * PAGE
    node = start + int.from_bytes(data[start + 16 + 2 * slot :][:2], "little")
    return node, int.from_bytes(data[node : node + 4], "little")


def twice(data: bytearray) -> None:
    """The root's second child is the first once more."""
    node = child(data, 1)[0]
    data[node : node + 4] = child(data, 0)[1].to_bytes(4, "little")


def itself(data: bytearray) -> None:
    node = child(data, 1)[0]
    data[node : node + 4] = decode_head(data, "").main.root.to_bytes(4, "little")


def outside(data: bytearray) -> None:
    node = child(data, 1)[0]
    data[node : node + 4] = (1 << 30).to_bytes(4, "little")


def another_number(data: bytearray) -> None:
    data[child(data, 1)[1] * PAGE] ^= 1


def another_kind(data: bytearray) -> None:
    data[child(data, 1)[1] * PAGE + 10] = 4


def many_nodes(data: bytearray) -> None:
    start = child(data, 1)[1] * PAGE
    data[start + 12 : start + 14] = (PAGE + 2).to_bytes(2, "little")


def no_nodes(data: bytearray) -> None:
    start = child(data, 1)[1] * PAGE
    data[start + 12 : start + 14] = (16).to_bytes(2, "little")


def leaf_node(data: bytearray, slot: int) -> int:
    start = child(data, 1)[1] * PAGE
    return start + int.from_bytes(data[start + 16 + 2 * slot :][:2], "little")


def pointer_into_pointers(data: bytearray) -> None:
    start = child(data, 1)[1] * PAGE
    data[start + 16 : start + 18] = (8).to_bytes(2, "little")


def pointer_at_the_end(data: bytearray) -> None:
    start = child(data, 1)[1] * PAGE
    data[start + 16 : start + 18] = (PAGE - 4).to_bytes(2, "little")


def long_key(data: bytearray) -> None:
    data[leaf_node(data, 0) + 7] = 0xFF


def long_value(data: bytearray) -> None:
    data[leaf_node(data, 0) + 1] = 0xFF


def huge_value_elsewhere(data: bytearray) -> None:
    data[leaf_node(data, 0) + 3], data[leaf_node(data, 0) + 4] = 0x7F, 1


def unknown_kind_of_value(data: bytearray) -> None:
    data[leaf_node(data, 0) + 4] = 4


def keys_fall(data: bytearray) -> None:
    key = leaf_node(data, 0) + 8
    data[key] = ord("9")


def keys_of_the_root_fall(data: bytearray) -> None:
    data[child(data, 2)[0] + 8] = 0


HARMS: tuple[tuple[Harm, str], ...] = (
    (twice, "in two places of the tree"),
    (itself, "it says that it is page"),
    (outside, "it lies beyond the end of a file of"),
    (another_number, "it says that it is page"),
    (another_kind, "of kind 4, must be of kind 2"),
    (many_nodes, "its pointers end at 4098"),
    (no_nodes, "its pointers end at 16"),
    (pointer_into_pointers, "a node would begin at 8"),
    (pointer_at_the_end, "a node would begin at 4092"),
    (long_key, "a key of"),
    (long_value, "reaches beyond it"),
    (huge_value_elsewhere, "would begin at page"),
    (unknown_kind_of_value, "and kind 4"),
    (keys_fall, "must rise within"),
    (keys_of_the_root_fall, "out of order"),
)


@pytest.mark.parametrize(("harm", "told"), HARMS, ids=[harm.__name__ for harm, _ in HARMS])
def test_a_walk_of_all_tells_each_kind_of_damage(counting: bytearray, harm: Harm, told: str) -> None:
    assert list(tree_of(bytes(counting)).problems()) == []
    harm(counting)
    found = list(tree_of(bytes(counting)).problems())
    assert any(told in str(problem) for problem in found), found
    assert all(problem.path == "file" for problem in found)


@pytest.mark.parametrize("harm", [harm for harm, _ in HARMS])
def test_whoever_reads_on_through_damage_is_stopped(counting: bytearray, harm: Harm) -> None:
    harm(counting)
    with pytest.raises(CorruptError, match="file: page"):
        list(tree_of(bytes(counting)).entries())


def test_what_is_not_used_is_not_checked(counting: bytearray) -> None:
    first, second = child(counting, 0)[1], child(counting, 1)[1]
    counting[second * PAGE : (second + 1) * PAGE] = bytes(PAGE)
    tree = tree_of(bytes(counting))
    offset, _ = tree.find(b"00003") or (0, 0)
    assert offset // PAGE == first
    with pytest.raises(CorruptError, match=f"page {second} of LMDB"):
        tree.find(b"00150")


def test_wrong_numbers_in_the_head_are_told(counting: bytearray) -> None:
    newest = max((0, PAGE), key=lambda start: int.from_bytes(counting[start + 144 : start + 152], "little"))
    counting[newest + 120] ^= 1  # entries
    (problem,) = tree_of(bytes(counting)).problems()
    assert re.search(r"\(1, \d, 0, 400\) branches, .* its head says \(1, \d, 0, 401\)", str(problem))


@pytest.mark.parametrize("depth", [0, 1, 3, 33, 65535])
def test_another_depth_than_the_tree_has(counting: bytearray, depth: int) -> None:
    newest = max((0, PAGE), key=lambda start: int.from_bytes(counting[start + 144 : start + 152], "little"))
    counting[newest + 94 : newest + 96] = depth.to_bytes(2, "little")
    with pytest.raises(CorruptError, match="page"):
        list(tree_of(bytes(counting)).entries())


def test_the_head_of_a_long_value_is_checked_on_request(tmp_path: Path) -> None:
    data = bytearray(made(tmp_path / "db", {b"a": bytes(9000), b"b": bytes(9000)}))
    offset, _ = tree_of(bytes(data)).find(b"b") or (0, 0)
    data[offset - 16] ^= 1
    assert tree_of(bytes(data)).find(b"b") == (offset, 9000)
    with pytest.raises(CorruptError, match="a value of 3 pages must begin there"):
        tree_of(bytes(data), check_runs=True).find(b"b")


@pytest.mark.parametrize("place", [0, 10, 16, 20, 40, PAGE, PAGE + 10, PAGE + 16, PAGE + 20, PAGE + 40])
def test_a_damaged_head_is_refused(counting: bytearray, place: int) -> None:
    counting[place] ^= 0x40
    with pytest.raises(FormatError, match="file: "):
        decode_head(bytes(counting), "file")


@pytest.mark.parametrize("size", [0, 1, 151, 152, PAGE, 2 * PAGE - 1])
def test_a_stump_has_no_head(counting: bytearray, size: int) -> None:
    with pytest.raises(FormatError, match="its head is damaged"):
        decode_head(bytes(counting[:size]), "file")
