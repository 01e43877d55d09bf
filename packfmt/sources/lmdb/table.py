"""One table of a foreign LMDB environment, read-only, in key order, from pages that are checked as they are used."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

from packfmt.errors import CorruptError, FormatError, SourceError
from packfmt.lmdb_pages import DATABASE, Database, Tree, decode_database, decode_head

__all__ = ["Entry", "Table", "key_text", "open_tables"]


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``, whose layout is part of its stable interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0  # PyBUF_SIMPLE: contiguous bytes
_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def address_of(buffer: bytes | memoryview) -> int:
    """The address of the first byte. It means something only while the buffer's owner lives.

    Asked without numpy: importing that takes longer than the rest of a child's start.

    Raises:
        BufferError: the buffer is not contiguous.
    """
    found = _Buffer()
    _get(buffer, ctypes.byref(found), _SIMPLE)
    address: int = found.buf or 0
    _release(ctypes.byref(found))
    return address


_MAX_DATABASES = 1024
_COUNT = 20  # bytes that a count beside them is shorter than
_FLAGS = {2: "reversekey", 4: "dupsort", 8: "integerkey", 16: "dupfixed", 32: "integerdup", 64: "reversedup"}

Entry = tuple[bytes, memoryview]


def key_text(key: bytes) -> str:
    """A key as str; bytes that are not UTF-8 survive as surrogates."""
    return key.decode("utf-8", "surrogateescape")


class Table:
    """The entries of one database of an environment.

    Values are views of the mapped file.

    Attributes:
        entries: how many there are, as the file says.
        folder: where the environment's data file lies.
        name: of the database; empty for the unnamed one.

    Raises:
        SourceError: here and by every method: a page that is used is damaged.
    """

    def __init__(self, data: memoryview, page_size: int, database: Database, path: str, name: str) -> None:
        odd = [word for flag, word in _FLAGS.items() if database.flags & flag]
        if odd:
            raise SourceError(f"database {name!r} has the flags {', '.join(odd)}, which no image layout uses")
        self.path = path
        self.folder = os.path.dirname(path)
        self.name = name
        self.entries = database.entries
        self._data = data
        self._begin = address_of(data)
        with _REFUSED:
            self._tree = Tree(data, path, page_size, database, check_runs=True)

    def get(self, key: bytes) -> memoryview | None:
        """The value under a key, or None."""
        with _REFUSED:
            place = self._tree.find(key)
        return None if place is None else self._data[place[0] : place[0] + place[1]]

    def offset(self, value: memoryview) -> int | None:
        """Where in the file a value, or a part of one, lies; None where it is a copy, whose bytes have to be sent."""
        start = address_of(value) - self._begin
        return start if len(value) and 0 <= start <= len(self._data) - len(value) else None

    def scan(self, start: bytes = b"") -> Iterator[Entry]:
        """Entries from the first key not below ``start``, in key order."""
        with _REFUSED:
            for key, offset, size, _ in self._tree.entries(start):
                yield key, self._data[offset : offset + size]

    def first(self, start: bytes = b"") -> Entry | None:
        """The first entry whose key is not below ``start``."""
        return next(self.scan(start), None)

    def last(self) -> Entry | None:
        """The entry with the greatest key."""
        with _REFUSED:
            key = self._tree.last_key()
        return self.first(key) if key else None

    def databases(self) -> dict[str, Database]:
        """The named databases, by their names, where this one holds but those and counts; else none."""
        named: dict[str, Database] = {}
        with _REFUSED:
            for key, offset, size, is_database in self._tree.entries():
                if is_database and size == DATABASE.size and len(named) < _MAX_DATABASES:
                    named[os.fsdecode(key)] = decode_database(self._data[offset : offset + size])
                elif size >= _COUNT or not bytes(self._data[offset : offset + size]).strip().isdigit():
                    return {}
        return named

    def database(self, name: str) -> Database:
        """A named database.

        Raises:
            SourceError: there is none.
        """
        with _REFUSED:
            key, offset, size, is_database = next(self._tree.entries(os.fsencode(name)), (b"", 0, 0, False))
        if key != os.fsencode(name) or not is_database or size != DATABASE.size:
            raise SourceError(f"no database named {name!r} in it")
        return decode_database(self._data[offset : offset + size])


def open_tables(path: str, database: str | None) -> list[Table]:
    """Open an environment by its data file, read-only.

    Args:
        path: the data file.
        database: the named database to read, or None for the unnamed one; where that one only lists named databases,
            for all of those.

    Raises:
        SourceError: damaged, no such database, or one of a kind no image layout uses.
    """
    data = _mapped(path)
    try:
        head = decode_head(data, path)
    except FormatError as error:
        raise SourceError(str(error).removeprefix(f"{path}: ")) from error
    main = Table(data, head.page_size, head.main, path, "")
    if database:
        chosen = {database: main.database(database)}
    else:
        chosen = main.databases() if database is None else {}
    return [Table(data, head.page_size, found, path, name) for name, found in chosen.items()] or [main]


def _mapped(path: str) -> memoryview:
    """The whole file. The map goes with the last view."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class _Refused:
    """A ``with`` that turns the error of a damaged file into one of the source, which names the path itself."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CorruptError):
            raise SourceError(error.message) from error


_REFUSED = _Refused()
