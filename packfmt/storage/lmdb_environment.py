"""LMDB environments, read-only: looked at before LMDB trusts them, and opened once per process.

LMDB finds keys, and nothing else: where a value lies is read from its node, and its bytes from a map of our own. LMDB's
views would point into its map with nothing to keep that alive; copies cost more than checking the bytes does.

LMDB believes what its file says. So the file's head is checked here first, by hand: what passes has every page that it
counts. The pages behind are checked by LMDB, which stops most nonsense but does not promise to stop all: a file that an
enemy prepared, or that is damaged between the values, may end the process. Values carry checksums of packfmt's own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import lmdb
import numpy as np

from packfmt.errors import CorruptError, FormatError
from packfmt.storage.filebytes import FileBytes, open_bytes

__all__ = ["DATA_FILE", "Environment", "data_file", "explain", "is_environment", "open_environment", "read_meta"]

DATA_FILE = "data.mdb"
MAGIC = 0xBEEFC0DE
DATA_VERSION = 1  # of all LMDB 0.9; 1.0 has another, which 0.9 cannot read
# A page header of 16 bytes; magic, version, address, map size; the table of free pages, whose first field is the page
# size; the main table: spare, flags, depth, branch, leaf and overflow pages, entries, root; last page, transaction.
META = struct.Struct("<16xII8x8xI44xIHHQQQQQQQ")
PAGE_HEADER = 16
NODE = struct.Struct("<HHHH")  # low and high half of the value's size, flags, key size; then key, and value or page
NUMBER = struct.Struct("<Q")
BIG = 1  # the flag of a node that holds, not the value, but the number of the page where it begins
PAGE_SIZES = tuple(1 << bits for bits in range(9, 17))
SMALLEST_MAP_UNIT = 4096  # maps begin at a multiple of this
REFUSALS = (  # of the system, as LMDB passes them on
    errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOMEM,
    errno.EMFILE, errno.ENFILE,
)  # fmt: skip
PATIENCE = 1.0  # seconds to wait for an environment that another thread is just closing


@dataclass(frozen=True, slots=True)
class Meta:
    """What the head of a data file says.

    Args:
        page_size: bytes.
        entries: keys in the main table.
        flags: of the main table; 0 where a key has one value and keys are sorted as bytes.
    """

    page_size: int
    entries: int
    flags: int


def data_file(path: str) -> str:
    """The file that holds the data: ``path`` itself, or ``data.mdb`` where that is a folder."""
    return os.path.join(path, DATA_FILE) if os.path.isdir(path) else path


def is_environment(path: str) -> bool:
    """Whether this is a folder with a ``data.mdb``, or a file that starts as those do."""
    if os.path.isdir(path):
        return os.path.lexists(data_file(path))
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(20)[16:] == MAGIC.to_bytes(4, "little")


def read_meta(source: FileBytes, path: str) -> Meta:
    """Check the head of a data file.

    Raises:
        FormatError: no LMDB file, of another version or byte order, damaged, truncated or appended to.
    """
    first = source.section(0, min(META.size, source.size))
    page_size = META.unpack(first)[2] if len(first) == META.size else 0
    if page_size not in PAGE_SIZES or source.size < 2 * page_size:
        raise FormatError(f"{path}: not an LMDB data file, or its head is damaged; restore it from a copy")
    heads = [META.unpack(head) for head in (first, source.section(page_size, META.size))]
    for magic, version, page, *_ in heads:
        if magic != MAGIC or page != page_size:
            raise FormatError(f"{path}: the head is damaged; restore it from a copy")
        if version != DATA_VERSION:
            raise FormatError(f"{path}: LMDB data format {version}, packfmt knows {DATA_VERSION}; pack again")
    newest = max(heads, key=lambda head: head[-1])
    pages = newest[11] + 1
    if source.size != pages * page_size:
        raise FormatError(
            f"{path}: {source.size} bytes long, its head counts {pages} pages of {page_size}: truncated, appended to, "
            "or changed by another program; restore it from a copy"
        )
    return Meta(page_size, newest[9], newest[4])


def explain(error: lmdb.Error, path: str, doing: str) -> OSError | CorruptError:
    """The error to raise for one of LMDB's: OSError where the system refused, CorruptError for bad pages."""
    code = getattr(error, "code", 0)  # py-lmdb before version 3 gives the text alone
    code = code or next((known for known in REFUSALS if os.strerror(known) in str(error)), 0)
    if code > 0:
        return OSError(code, f"{doing}: {os.strerror(code)}", path)
    return CorruptError(f"{doing}: {error}; restore it from a copy", path=path)


class _Borrowed:
    """A cursor for the time of a ``with``.

    A class, since the generator of ``contextlib`` is kept alive by a broken-off iteration before Python 3.11.
    """

    __slots__ = ("_cursor", "_environment", "_idle", "_path")

    def __init__(self, environment: lmdb.Environment, idle: list[lmdb.Cursor], path: str) -> None:
        self._environment, self._idle, self._path = environment, idle, path

    def __enter__(self) -> lmdb.Cursor:
        try:
            self._cursor = self._idle.pop()
        except IndexError:
            self._cursor = self._new()
        return self._cursor

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.Error):
            raise explain(error, self._path, "LMDB cannot read it") from error
        self._idle.append(self._cursor)

    def _new(self) -> lmdb.Cursor:
        try:
            return self._environment.begin(buffers=True).cursor()
        except lmdb.Error as error:
            raise explain(error, self._path, "LMDB cannot read it") from error


class Environment:
    """An open environment. Thread-safe. Closed when the last reference goes, so never under a thread that reads: not
    even in a forked child, where LMDB would wait for ever for the threads that read in the parent.

    Opened without locks: what packfmt publishes is never changed in place, so there is no writer to be kept from
    anything. Without locks nothing in it belongs to a process, and a forked child goes on with what it inherited.

    Args:
        path: the folder, or the file where that stands alone.

    Attributes:
        bytes: the data file.
        meta: what its head says.

    Raises:
        FormatError: see ``read_meta``.
        OSError: the file cannot be opened.
        lmdb.Error: LMDB cannot open it. The methods raise what ``explain`` makes of LMDB's errors.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.bytes = open_bytes(data_file(path), "mmap")
        self.meta = read_meta(self.bytes, data_file(path))
        self._environment = lmdb.open(
            os.fsencode(path),  # as str it would have to be UTF-8
            subdir=os.path.isdir(path),
            map_size=self.bytes.size,
            readonly=True,
            create=False,
            lock=False,
            readahead=False,  # it sees the tree, which is small; for the values, will_need says what is wanted
            max_spare_txns=0,
        )
        self._idle: list[lmdb.Cursor] = []  # one serves one thread at a time
        self._base = 0  # where LMDB's map begins

    def places(self, keys: Iterable[bytes]) -> list[tuple[int, int] | None]:
        """Offset and size in bytes of each key's value in the data file; None where there is none."""
        whole = self._whole()
        with self._cursor() as cursor:
            seek, current = cursor.set_key, cursor.key
            return [self._place(current(), whole) if seek(key) else None for key in keys]

    def last_key(self) -> bytes:
        """The greatest key; b"" where there are none."""
        with self._cursor() as cursor:
            return bytes(cursor.key()) if cursor.last() else b""

    def entries_from(self, key: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
        """Keys and the places of their values, in order, from the last key up to ``key``, or the first of all."""
        whole = self._whole()
        with self._cursor() as cursor:
            found = cursor.set_range(key)
            if not found:
                found = cursor.last()
            elif cursor.key() != key:
                found = cursor.prev() or cursor.first()
            while found:
                yield bytes(cursor.key()), self._place(cursor.key(), whole)
                found = cursor.next()

    def _whole(self) -> memoryview:
        return self.bytes.section(0, self.bytes.size)

    def _cursor(self) -> _Borrowed:
        return _Borrowed(self._environment, self._idle, self._path)

    def _place(self, key: bytes | memoryview, whole: memoryview) -> tuple[int, int]:
        """The place of the value whose key lies here in LMDB's map."""
        if not len(key):
            raise CorruptError("an empty key, which LMDB does not allow; restore it from a copy", path=self._path)
        address = np.frombuffer(key, np.uint8).__array_interface__["data"][0]
        start = address - (self._base or self._find_base(address, key))
        if not NODE.size <= start <= len(whole) - len(key):
            raise CorruptError(f"a key lies at {start}, outside the file; restore it from a copy", path=self._path)
        low, high, flags, _ = NODE.unpack_from(whole, start - NODE.size)
        start, size = start + len(key), low + (high << 16)
        if flags == BIG and start + NUMBER.size <= len(whole):
            start = NUMBER.unpack_from(whole, start)[0] * self.meta.page_size + PAGE_HEADER
        if flags not in (0, BIG) or start + size > len(whole):
            raise CorruptError(f"a value lies at {start}, outside the file; restore it from a copy", path=self._path)
        return start, size

    def _find_base(self, address: int, key: bytes | memoryview) -> int:
        """Where LMDB's map begins: the page that holds this key begins with its own number."""
        unit, page_size = SMALLEST_MAP_UNIT, self.meta.page_size
        for page in range(address // unit * unit, address - page_size, -unit):
            header = ctypes.string_at(page, PAGE_HEADER)
            offset = page_size * int.from_bytes(header[:8], "little")
            place = offset + address - page
            if self.bytes.section(offset, PAGE_HEADER) == header and self.bytes.section(place, len(key)) == key:
                self._base = page - offset
                return self._base
        raise CorruptError("a page is not where its number says; restore the file from a copy", path=self._path)


_lock = threading.Lock()
_open: weakref.WeakValueDictionary[tuple[int, int], Environment] = weakref.WeakValueDictionary()


def open_environment(path: str) -> Environment:
    """Open an environment, or share the one that is open: LMDB allows a file to be opened once per process.

    Raises:
        FormatError: the file's head is damaged, see ``read_meta``.
        CorruptError: LMDB refuses the file.
        OSError: the system refuses, or code other than packfmt has the file open in this process.
    """
    give_up = time.monotonic() + PATIENCE
    with _lock:
        while True:
            identity = _identity(path)
            shared = _open.get(identity)
            if shared is not None:
                return shared
            try:
                environment = Environment(path)
            except lmdb.Error as error:
                if "already open" not in str(error):
                    raise explain(error, path, "LMDB cannot open it") from error
                if time.monotonic() > give_up:
                    message = "is open in this process already, and not by packfmt; close that lmdb.Environment first"
                    raise OSError(errno.EBUSY, message, path) from error
                time.sleep(0.01)
                continue
            if _identity(path) == identity:  # nobody replaced the file between our look and LMDB's
                _open[identity] = environment
                return environment
            del environment


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(data_file(path))
    return status.st_dev, status.st_ino


def _renew_lock() -> None:
    """In a forked child: no thread is there any more that could release the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
