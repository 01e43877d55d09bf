"""LMDB data files of format 1 (that of LMDB 0.9), parsed from their bytes: the head, and trees of pages.

LMDB believes what its file says: a damaged page ends the process by an assertion or a fault, or hands out another
value. No other library reads the format. So reading is done here, each page checked before it is used: that it is the
page it is asked for, of the kind its place in the tree wants, and that its nodes, keys and values lie inside page and
file. Nothing is read before it is needed, so opening and finding cost the same for any number of entries.

Pure: opens no file. Without numpy, which would take longer to import than a small database to read.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from packfmt.errors import CorruptError, FormatError

__all__ = ["DATABASE", "MAGIC", "Database", "Entry", "Head", "Tree", "decode_database", "decode_head"]

MAGIC = 0xBEEFC0DE
VERSION = 1  # LMDB 1.0 writes another
PAGE_SIZES = tuple(1 << bits for bits in range(9, 17))
DATABASE = struct.Struct("<4xHHQQQQQ")  # flags, depth, branch, leaf and overflow pages, entries, root
# A page's number and flags; magic, version, address, map size; the database of free pages, whose first field is the
# page size; the main database, as above; last page, transaction.
META = struct.Struct("<Q2xH4xII8x8xI44x48sQQ")
PAGE = struct.Struct("<Q2xHHH")  # number, flags, end of the pointers, start of the nodes
POINTER = struct.Struct("<H")  # the pointers that follow, one for each node, count from the start of the page
NODE = struct.Struct("<HHHH")  # size or child in two halves, flags or the child's last bits, key size; then the key
NUMBER = struct.Struct("<Q")
BRANCH, LEAF, OVERFLOW, META_PAGE = 1, 2, 4, 8  # kinds of pages
BIG, NAMED = 1, 2  # of nodes: the value is the number of the first of its own pages; or a database of its own
NONE = (1 << 64) - 1  # the root of an empty tree
FIRST = 2  # page behind the two heads
DEEPEST = 32  # that LMDB walks
BRANCHES = 1024  # decoded branch pages that are kept: 4 to 16 MB, which find 10 to 30 million long values

LEAVES = 16  # whose keys are kept

Place = tuple[int, int]  # offset and size in the file, bytes


@dataclass(frozen=True, slots=True)
class Database:
    """What the file says of one tree of keys.

    Args:
        flags: 0 where a key has one value and keys are sorted as bytes.
        depth: levels of pages; 0 where it is empty.
        branches, leaves, overflows: pages of each kind.
        entries: keys.
        root: the page to begin at.
    """

    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of a data file says.

    Args:
        page_size: bytes.
        pages: in the file, these of the head included.
        main: the database that all start from.
    """

    page_size: int
    pages: int
    main: Database


class Entry(NamedTuple):
    """A key, the place of its value in the file, and whether that is a database of its own."""

    key: bytes
    offset: int
    size: int
    named: bool


def decode_database(data: bytes | memoryview) -> Database:
    """The 48 bytes that describe a database."""
    return Database(*DATABASE.unpack(data))


def decode_head(data: bytes | memoryview, path: str) -> Head:
    """Check the head of a data file: of its two, the one of the newest transaction.

    Raises:
        FormatError: no LMDB file, of another version or byte order, or damaged.
    """
    page_size = META.unpack_from(data)[4] if len(data) >= META.size else 0
    if page_size not in PAGE_SIZES or len(data) < FIRST * page_size:
        raise FormatError(f"{path}: not an LMDB data file, or its head is damaged; restore it from a copy")
    heads = [META.unpack_from(data, number * page_size) for number in range(FIRST)]
    for number, (own, flags, magic, version, size, *_) in enumerate(heads):
        if (own, flags, magic, size) != (number, META_PAGE, MAGIC, page_size):
            raise FormatError(f"{path}: the head is damaged; restore it from a copy")
        if version != VERSION:
            raise FormatError(f"{path}: LMDB data format {version}, packfmt reads {VERSION}; write it with LMDB 0.9")
    newest = max(heads, key=lambda head: head[-1])
    return Head(page_size, newest[-2] + 1, decode_database(newest[-3]))


class Tree:
    """The entries of one database, in key order. Thread-safe.

    Args:
        data: the whole file.
        path: for errors.
        page_size: bytes.
        database: what the file says of it; its flags are for the caller to check.
        check_runs: look at the head of a long value's first page when its place is asked for. That reads the page.

    Raises:
        CorruptError: here and by every method: a page that is used is damaged.
    """

    def __init__(
        self, data: memoryview, path: str, page_size: int, database: Database, *, check_runs: bool = False
    ) -> None:
        self._pages = _Pages(data, path, page_size, check_runs=check_runs)
        self._database = database
        self._root, self._depth = database.root, database.depth
        if self._depth > DEEPEST or (self._depth == 0) != (self._root == NONE):
            raise self._pages.damaged(self._root, f"as the root of {self._depth} levels of at most {DEEPEST}")
        self._branch = lru_cache(BRANCHES)(self._pages.branch)
        self._keys = lru_cache(LEAVES)(self._pages.keys)
        self._searched = NONE  # the leaf in which a key was looked for last

    def find(self, key: bytes) -> Place | None:
        """The place of a key's value; None where there is none."""
        if not self._depth:
            return None
        pages, number, least = self._pages, self._root, b""
        for _ in range(self._depth - 1):
            keys, children = self._branch(number)
            child = bisect_right(keys, key, 1) - 1
            number, least = children[child], keys[child] or least
        count = pages.nodes(number, LEAF)
        slot = int.from_bytes(key, "big") - int.from_bytes(least, "big")  # there, where keys count up as packfmt's do
        if 0 <= slot < count:
            begin, end, size, flags = pages.node(number, count, slot)
            if pages.data[begin:end] == key:
                return pages.value(number, end, size, flags)
        if number == self._searched:  # keys are asked for in about their order: it pays to have the leaf's
            slot = bisect_left(self._keys(number), key)
        else:
            slot = pages.search(number, count, key)
        self._searched = number
        if slot == count:
            return None
        begin, end, size, flags = pages.node(number, count, slot)
        return pages.value(number, end, size, flags) if pages.data[begin:end] == key else None

    def last_key(self) -> bytes:
        """The greatest key; b"" where there are none."""
        return self._last_key_below(self._root, 1) if self._depth else b""

    def entries(self, start: bytes = b"") -> Iterator[Entry]:
        """Entries from the first key not below ``start``."""
        if not self._depth:
            return
        pages = self._pages
        path, number = self._descend(start)
        count = pages.nodes(number, LEAF)
        slot, last = pages.search(number, count, start), b""
        while True:
            for entry in pages.entries(number, count, slot):
                if entry.key <= last:  # as in a circle of pages too
                    raise pages.damaged(number, f"keys out of order at {entry.key[:80]!r}")
                last = entry.key
                yield entry
            while path and path[-1][1] + 1 == len(path[-1][0]):
                path.pop()
            if not path:
                return
            children, child = path.pop()
            path.append((children, child + 1))
            number = children[child + 1]
            while len(path) < self._depth - 1:
                children = self._branch(number)[1]
                path.append((children, 0))
                number = children[0]
            count, slot = pages.nodes(number, LEAF), 0

    def entries_around(self, key: bytes) -> Iterator[Entry]:
        """Entries from the last key not above ``key``; where there is none, from the first of all."""
        if not self._depth:
            return
        pages = self._pages
        path, number = self._descend(key)
        count = pages.nodes(number, LEAF)
        slot = pages.search(number, count, key)
        if slot == count or pages.key(number, count, slot) != key:
            key = pages.key(number, count, slot - 1) if slot else self._last_key_before(path)
        yield from self.entries(key)

    def problems(self) -> Iterator[CorruptError]:
        """Walk the whole tree: yield what is damaged, in the wrong place, or there twice.

        Reads all branch and leaf pages, none of those that long values have for themselves. Memory: a byte per page.
        """
        counted = _Counted(self._pages)
        found = False
        for problem in counted.below(self._root, self._depth, b"", None) if self._depth else ():
            found = True
            yield problem
        said = self._database
        stated = (said.branches, said.leaves, said.overflows, said.entries)
        if not found and counted.all() != stated:
            message = f"{counted.all()} branches, leaves, pages of values and entries are there, its head says {stated}"
            yield CorruptError(f"{message}; restore the file from a copy", path=self._pages.path)

    def _descend(self, key: bytes) -> tuple[list[tuple[Sequence[int], int]], int]:
        """The way to the leaf where a key would be: each branch's children and the one chosen, and the leaf."""
        path: list[tuple[Sequence[int], int]] = []
        number = self._root
        for _ in range(self._depth - 1):
            keys, children = self._branch(number)
            child = bisect_right(keys, key, 1) - 1
            path.append((children, child))
            number = children[child]
        return path, number

    def _last_key_below(self, number: int, level: int) -> bytes:
        """The greatest key below a page of a level; they count from 1 at the root."""
        for _ in range(level, self._depth):
            number = self._branch(number)[1][-1]
        count = self._pages.nodes(number, LEAF)
        return self._pages.key(number, count, count - 1)

    def _last_key_before(self, path: list[tuple[Sequence[int], int]]) -> bytes:
        """The greatest key of the leaves before the one that a path leads to; b"" where it is the first."""
        while path and not path[-1][1]:
            path.pop()
        if not path:
            return b""
        children, child = path[-1]
        return self._last_key_below(children[child - 1], len(path) + 1)


class _Pages:
    """The pages of a file, each checked when it is used. Refers to no tree, whose cache refers to this."""

    __slots__ = ("check_runs", "count", "data", "page_size", "path")

    def __init__(self, data: memoryview, path: str, page_size: int, *, check_runs: bool) -> None:
        self.data, self.path, self.page_size, self.check_runs = data, path, page_size, check_runs
        self.count = len(data) // page_size

    def damaged(self, number: int, what: str) -> CorruptError:
        """The error for a page."""
        return CorruptError(f"page {number} of LMDB is damaged: {what}; restore the file from a copy", path=self.path)

    def nodes(self, number: int, kind: int) -> int:
        """Check the head of a branch or a leaf; how many nodes it has."""
        if not FIRST <= number < self.count:
            raise self.damaged(number, f"it lies beyond the end of a file of {self.count} pages")
        own, found, lower, upper = PAGE.unpack_from(self.data, number * self.page_size)
        if own != number or found != kind:
            raise self.damaged(number, f"it says that it is page {own} of kind {found}, must be of kind {kind}")
        if not PAGE.size < lower <= upper <= self.page_size or lower % POINTER.size:
            raise self.damaged(number, f"its pointers end at {lower}, its nodes begin at {upper}")
        return (lower - PAGE.size) // POINTER.size  # type: ignore[no-any-return]

    def branch(self, number: int) -> tuple[list[bytes], Sequence[int]]:
        """The least key of each child, of which the first means nothing, and the children."""
        keys, children = [], array("Q")
        count = self.nodes(number, BRANCH)
        for slot in range(count):
            begin, end, child, top = self.node(number, count, slot)
            keys.append(bytes(self.data[begin:end]))
            children.append(child | top << 32)
        if not _rise(keys[1:]):
            raise self.damaged(number, "its keys are out of order")
        return keys, children

    def node(self, number: int, count: int, slot: int) -> tuple[int, int, int, int]:
        """One of the ``count`` nodes of a page: where in the file its key begins and ends, and what else it says.

        In a leaf that is the size of the value and flags; in a branch a child's number, and the bits beyond 32.
        """
        start, data = number * self.page_size, self.data
        (pointer,) = POINTER.unpack_from(data, start + PAGE.size + slot * POINTER.size)
        if not PAGE.size + count * POINTER.size <= pointer <= self.page_size - NODE.size:
            raise self.damaged(number, f"a node would begin at {pointer}")
        low, high, flags, length = NODE.unpack_from(data, start + pointer)
        begin = start + pointer + NODE.size
        if begin + length > start + self.page_size:
            raise self.damaged(number, f"a key of {length} bytes reaches beyond it")
        return begin, begin + length, low | high << 16, flags

    def value(self, number: int, begin: int, size: int, flags: int) -> Place:
        """The place of a value, of which a leaf's node says size and flags, and more at ``begin``."""
        end = (number + 1) * self.page_size
        if flags == BIG and begin + NUMBER.size <= end:
            (first,) = NUMBER.unpack_from(self.data, begin)
            pages = self.run(size)
            if not FIRST <= first <= self.count - pages:
                raise self.damaged(number, f"{size} bytes would begin at page {first} of {self.count}")
            begin = first * self.page_size + PAGE.size
            if self.check_runs:
                own, kind, low, high = PAGE.unpack_from(self.data, first * self.page_size)
                if (own, kind, low | high << 16) != (first, OVERFLOW, pages):
                    raise self.damaged(first, f"a value of {pages} pages must begin there")
        elif flags not in (0, NAMED) or begin + size > end:
            raise self.damaged(number, f"a value of {size} bytes and kind {flags} reaches beyond it")
        return begin, size

    def run(self, size: int) -> int:
        """How many pages a value takes that has pages of its own."""
        return -(-(PAGE.size + size) // self.page_size)

    def key(self, number: int, count: int, slot: int) -> bytes:
        """The key of a node."""
        begin, end, *_ = self.node(number, count, slot)
        return bytes(self.data[begin:end])

    def search(self, number: int, count: int, key: bytes) -> int:
        """The first node of a leaf whose key is not below ``key``; ``count`` where there is none."""
        return bisect_left(range(count), key, key=lambda slot: self.key(number, count, slot))

    def entries(self, number: int, count: int, slot: int) -> Iterator[Entry]:
        """The entries of a leaf from a node on. As ``node`` and ``value`` have them, but without a call for each."""
        data, start = self.data, number * self.page_size
        stop = start + self.page_size
        first, last = start + PAGE.size + count * POINTER.size, stop - NODE.size
        for place, pointer in enumerate(struct.unpack_from(f"<{count}H", data, start + PAGE.size)[slot:], slot):
            if not first <= start + pointer <= last:
                self.node(number, count, place)  # says what is wrong
            low, high, flags, length = NODE.unpack_from(data, start + pointer)
            begin = start + pointer + NODE.size
            end, size = begin + length, low | high << 16
            if end > stop:
                self.node(number, count, place)
            offset = end
            if flags or end + size > stop:
                offset, size = self.value(number, end, size, flags)
            yield Entry(bytes(data[begin:end]), offset, size, flags == NAMED)

    def keys(self, number: int) -> list[bytes]:
        """All keys of a leaf."""
        count = self.nodes(number, LEAF)
        return [self.key(number, count, slot) for slot in range(count)]


class _Counted:
    """A walk through all pages of a tree that counts them."""

    def __init__(self, pages: _Pages) -> None:
        self._pages = pages
        self._seen = bytearray(pages.count)
        self._branches = self._leaves = self._runs = self._entries = 0

    def all(self) -> tuple[int, int, int, int]:
        """Branches, leaves, pages of long values, entries."""
        return self._branches, self._leaves, self._runs, self._entries

    def below(self, number: int, levels: int, least: bytes, end: bytes | None) -> Iterator[CorruptError]:
        """Damage of a page and of those below it, whose keys must be at least ``least`` and below ``end``."""
        pages = self._pages
        entries: list[Entry] = []
        children: Sequence[int] = ()
        try:
            if levels == 1:
                entries += pages.entries(number, pages.nodes(number, LEAF), 0)
                keys = [entry.key for entry in entries]
            else:
                keys, children = pages.branch(number)
                keys = [least, *keys[1:]]
            self._visit(number, 1)
            if keys[0] < least or (end is not None and keys[-1] >= end) or not _rise(keys):
                raise pages.damaged(number, f"its keys, {keys[0]!r:.80} to {keys[-1]!r:.80}, must rise within its part")
            for entry in entries:
                first = entry.offset // pages.page_size
                if entry.size and first != number:
                    self._visit(first, pages.run(entry.size))
                    self._runs += pages.run(entry.size)
        except CorruptError as error:
            yield error
            return
        self._branches += levels > 1
        self._leaves += levels == 1
        self._entries += len(entries)
        for place, child in enumerate(children):
            following = keys[place + 1] if place + 1 < len(keys) else end
            yield from self.below(child, levels - 1, keys[place], following)

    def _visit(self, number: int, pages: int) -> None:
        """Note that pages were come by; each must be once."""
        if self._seen.find(1, number, number + pages) >= 0:
            raise self._pages.damaged(number, "it is in two places of the tree")
        self._seen[number : number + pages] = b"\1" * pages


def _rise(keys: list[bytes]) -> bool:
    return all(map(bytes.__lt__, keys, keys[1:]))
