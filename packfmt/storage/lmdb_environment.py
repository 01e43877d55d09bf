"""LMDB environments, read-only: looked at before LMDB trusts them, and opened once per process.

LMDB believes what its file says. So the file's head is checked here first, by hand: what passes has every page that it
counts. The pages behind are checked by LMDB, which stops most nonsense but does not promise to stop all: a file that an
enemy prepared, or that is damaged between the values, may end the process. Values carry checksums of packfmt's own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lmdb

from packfmt.errors import CorruptError, FormatError

__all__ = ["DATA_FILE", "Environment", "data_file", "explain", "is_environment", "open_environment", "read_meta"]

DATA_FILE = "data.mdb"
MAGIC = 0xBEEFC0DE
DATA_VERSION = 1  # of all LMDB 0.9; 1.0 has another, which 0.9 cannot read
# A page header of 16 bytes; magic, version, address, map size; the table of free pages, whose first field is the page
# size; the main table: spare, flags, depth, branch, leaf and overflow pages, entries, root; last page, transaction.
META = struct.Struct("<16xII8x8xI44xIHHQQQQQQQ")
PAGE_SIZES = tuple(1 << bits for bits in range(9, 17))
PATIENCE = 1.0  # seconds to wait for an environment that another thread is just closing


@dataclass(frozen=True, slots=True)
class Meta:
    """What the head of a data file says.

    Args:
        entries: keys in the main table.
        flags: of the main table; 0 where a key has one value and keys are sorted as bytes.
        file_size: bytes.
        identity: device and inode.
    """

    entries: int
    flags: int
    file_size: int
    identity: tuple[int, int]


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


def read_meta(descriptor: int, path: str) -> Meta:
    """Check the head of an open data file.

    Raises:
        FormatError: no LMDB file, of another version or byte order, damaged, truncated or appended to.
        OSError: it cannot be read.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: not a regular file; name an LMDB environment")
    first = _read_head(descriptor, 0)
    page_size = META.unpack(first)[2] if len(first) == META.size else 0
    if page_size not in PAGE_SIZES:
        raise FormatError(f"{path}: not an LMDB data file, or its head is damaged; restore it from a copy")
    second = _read_head(descriptor, page_size)
    heads = [META.unpack(raw) for raw in (first, second) if len(raw) == META.size]
    for magic, version, page, *_ in heads:
        if magic != MAGIC or page != page_size or len(heads) != 2:
            raise FormatError(f"{path}: the head is damaged; restore it from a copy")
        if version != DATA_VERSION:
            raise FormatError(f"{path}: LMDB data format {version}, packfmt knows {DATA_VERSION}; pack again")
    newest = max(heads, key=lambda head: head[-1])
    pages = newest[11] + 1
    if status.st_size != pages * page_size:
        raise FormatError(
            f"{path}: {status.st_size} bytes long, its head counts {pages} pages of {page_size}: truncated, appended "
            "to, or changed by another program; restore it from a copy"
        )
    return Meta(newest[9], newest[4], status.st_size, (status.st_dev, status.st_ino))


def _read_head(descriptor: int, offset: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)  # Windows has no pread
    return os.read(descriptor, META.size)


def explain(error: lmdb.Error, path: str, doing: str) -> OSError | CorruptError:
    """The error to raise for one of LMDB's: OSError where the system refused, CorruptError for bad pages."""
    known = {lmdb.DiskError: errno.ENOSPC, lmdb.ReadonlyError: errno.EACCES, lmdb.MemoryError: errno.ENOMEM}
    code = getattr(error, "code", 0) or known.get(type(error), 0)  # before version 3 the class alone tells
    if code > 0:
        return OSError(code, f"{doing}: {os.strerror(code)}", path)
    return CorruptError(f"{doing}: {error}; restore it from a copy", path=path)


class Environment:
    """An open environment. Thread-safe. Closed when the last reference goes, so never under a thread that reads.

    Opened without locks: what packfmt publishes is never changed in place, so there is no writer to be kept from
    anything. Without locks nothing in it belongs to a process, and a forked child goes on with what it inherited.

    Args:
        path: the folder, or the file where that stands alone.

    Raises:
        FormatError: see ``read_meta``.
        OSError: the file cannot be opened.
        lmdb.Error: LMDB cannot open it.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        # Non-blocking, so that a FIFO is refused instead of waited for; regular files do not care.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(data_file(path), flags)
        self.meta = read_meta(self._descriptor, data_file(path))
        self._environment = lmdb.open(
            path,
            subdir=os.path.isdir(path),
            map_size=self.meta.file_size,
            readonly=True,
            create=False,
            lock=False,
            readahead=False,
            max_spare_txns=0,
        )
        self._idle: list[lmdb.Transaction] = []  # one serves one thread at a time

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def get(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """A copy of each key's value; None where there is none.

        LMDB's own views would point into its map with nothing to keep that alive.
        """
        try:
            transaction = self._idle.pop()
        except IndexError:
            transaction = self._environment.begin()
        get = transaction.get
        values: list[Any] = [get(key) for key in keys]
        self._idle.append(transaction)
        return values

    def last_key(self) -> bytes:
        """The greatest key; b"" where there are none."""
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            key: bytes = cursor.key() if cursor.last() else b""
            return key

    def entries_from(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and copies of their values, in order, from the last that does not lie behind ``key``."""
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            found = cursor.set_range(key)
            if not found:
                found = cursor.last()
            elif cursor.key() != key:
                found = cursor.prev()
            while found:
                yield cursor.item()
                found = cursor.next()

    def size(self) -> int:
        """The size of the open file in bytes."""
        return os.fstat(self._descriptor).st_size

    def keep_forever(self) -> None:
        """Never close the environment in this process."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._environment))


_lock = threading.Lock()
_open: weakref.WeakValueDictionary[tuple[int, int], Environment] = weakref.WeakValueDictionary()
_inherited: list[Environment] = []


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
            shared = _open.get(_identity(path))
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
            if _identity(path) == environment.meta.identity:  # nobody replaced the file between our look and LMDB's
                _open[environment.meta.identity] = environment
                return environment


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(data_file(path))
    return status.st_dev, status.st_ino


def _keep_inherited() -> None:
    """In a forked child: keep what was open.

    Closing it waits for all threads that read at the moment of the fork, and those do not exist here.
    """
    global _lock
    _lock = threading.Lock()
    for environment in tuple(_open.values()):
        environment.keep_forever()
        _inherited.append(environment)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_inherited)
