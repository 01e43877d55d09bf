"""One table of a foreign LMDB environment, read-only, in key order, with checks that LMDB itself does not make."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.lmdb.address import address_of

__all__ = ["Entry", "Table", "failures", "key_text", "open_tables"]

_MAX_DATABASES = 1024
_DATABASE_RECORD = 48  # bytes of the record under which LMDB keeps a named database

Entry = tuple[bytes, memoryview]


def key_text(key: bytes) -> str:
    """A key as str; bytes that are no UTF-8 survive as surrogates."""
    return key.decode("utf-8", "surrogateescape")


class Table:
    """The entries of one database of an environment, within one read transaction.

    Values are views of the mapped file, valid until the environment is closed.

    Attributes:
        entries: how many there are, as the file says.
        folder: where the environment's data file lies.
        name: of the database; empty for the unnamed one.
    """

    def __init__(self, transaction: Any, database: Any, path: str, name: str, base: int | None) -> None:
        self._base = base
        self._proven = False
        self._transaction = transaction
        self._database = database
        self._size = os.path.getsize(path)
        self.path = path
        self.folder = os.path.dirname(path)
        self.name = name
        self.entries: int = transaction.stat(database)["entries"]

    def get(self, key: bytes) -> memoryview | None:
        """The value under a key, or None."""
        value = self._transaction.get(key, db=self._database)
        return None if value is None else self._checked(memoryview(value))

    def offset(self, value: memoryview) -> int | None:
        """Where in the file a value lies; None where that cannot be told, and its bytes have to be sent."""
        if self._base is None or not len(value):
            return None
        start = address_of(value) - self._base
        if not 0 <= start <= self._size - len(value):
            return None
        if not self._proven:
            self._proven = self._same(start, value)
            self._base = self._base if self._proven else None
        return start if self._proven else None

    def _same(self, start: int, value: memoryview) -> bool:
        """Whether the file has the value's bytes at that offset."""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(min(len(value), 4096)) == value[:4096]

    def scan(self, start: bytes = b"") -> Iterator[Entry]:
        """Entries from the first key not below ``start``, in key order.

        Raises:
            SourceError: keys out of order, which a loop in a damaged tree shows as.
        """
        last = b""
        with self._transaction.cursor(db=self._database) as cursor:
            if not (cursor.set_range(start) if start else cursor.first()):
                return
            for raw, value in cursor.iternext():
                key = bytes(raw)
                if key <= last:
                    raise SourceError(f"keys out of order at {key[:80]!r}: the tree of pages is damaged")
                last = key
                yield key, self._checked(value)

    def first(self, start: bytes = b"") -> Entry | None:
        """The first entry whose key is not below ``start``."""
        return next(self.scan(start), None)

    def last(self) -> Entry | None:
        """The entry with the greatest key."""
        with self._transaction.cursor(db=self._database) as cursor:
            return (bytes(cursor.key()), self._checked(cursor.value())) if cursor.last() else None

    def _checked(self, value: memoryview) -> memoryview:
        if len(value) > self._size:
            raise SourceError(f"a value of {len(value)} bytes in a file of {self._size}: the page is damaged")
        return value


def failures() -> tuple[type[Exception], ...]:
    """The errors that reading a damaged environment may raise."""
    import lmdb

    return (lmdb.Error, SourceError, OSError)


@contextmanager
def open_tables(path: str, database: str | None) -> Iterator[list[Table]]:
    """Open an environment by its data file: read-only, without locks, with read-ahead.

    Args:
        path: the data file.
        database: the named database to read, or None for the unnamed one; where that one only lists named databases,
            for all of those.

    Raises:
        SourceError: no such database, or one of a kind no image layout uses.
    """
    import lmdb  # in the child only: the parent never maps a foreign file

    try:
        with lmdb.open(
            path, subdir=False, readonly=True, lock=False, readahead=True, create=False, max_dbs=_MAX_DATABASES
        ) as environment:
            names = [database] if database is not None else _named(environment, lmdb.Error)
            handles = [(name, _open_database(environment, name, lmdb.Error)) for name in names]
            with environment.begin(buffers=True) as transaction:
                for name, handle in handles:
                    _check_flags(handle.flags(transaction), name)
                base = _base(path)
                yield [Table(transaction, handle, path, name, base) for name, handle in handles]
    except lmdb.Error as error:
        raise SourceError(f"LMDB cannot read it ({error}): it is damaged, or its writer was stopped") from error


def _base(path: str) -> int | None:
    """The address the file is mapped at, whole; None on systems that do not tell."""
    real = os.path.realpath(path)
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            found = [line for line in maps if line.rstrip("\n").endswith(" " + real)]
    except OSError:
        return None
    match = re.match(r"([0-9a-f]+)-[0-9a-f]+ \S+ 0+ ", found[0]) if len(found) == 1 else None
    return int(match[1], 16) if match is not None else None


def _named(environment: Any, failure: type[Exception]) -> list[str]:
    """The names of all named databases where the unnamed one holds but counts beside; else the unnamed one alone."""
    names: list[str] = []
    with environment.begin(buffers=True) as transaction, transaction.cursor() as cursor:
        for key, value in cursor.iternext():
            if len(value) < 20 and bytes(value).strip().isdigit():
                continue
            if len(value) != _DATABASE_RECORD or len(names) >= _MAX_DATABASES:
                return [""]
            names.append(os.fsdecode(bytes(key)))
    try:
        for name in names:
            environment.open_db(os.fsencode(name), create=False)
    except failure:  # ordinary values that happen to have that length
        return [""]
    return names or [""]


def _open_database(environment: Any, name: str, failure: type[Exception]) -> Any:
    try:
        return environment.open_db(os.fsencode(name) or None, create=False)
    except failure as error:
        raise SourceError(f"no database named {name!r} in it ({error})") from error


def _check_flags(flags: dict[str, bool], name: str) -> None:
    odd = [flag for flag, is_set in flags.items() if is_set]  # py-lmdb spells integerkey and integer_key, as it is old
    if odd:
        raise SourceError(f"database {name!r} has the flags {', '.join(odd)}, which no image layout uses")
