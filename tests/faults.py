"""I/O calls that fail on purpose: the Nth of those that concern files below one folder. Processes that end early."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from packfmt.storage import folders

CALLS = ("open", "fsync", "link", "replace", "rename", "unlink", "close")
OF_LEFTOVERS = ("open", "mkdir", "rename", "unlink")  # closing a lock's descriptor writes nothing
OF_FOLDERS = ("rename", "fsync")


class FailingCalls:
    """Counts calls of ``os`` functions and of writes to files, and makes the ``nth`` (from 1) fail with ``code``.

    Attributes:
        made: the calls so far, by name.
        nth: which one fails; 0 for none.
        late: it fails when it has done its work, as where a signal comes.
        quick: leave out what takes time: what fsync does, and writes of a part.
    """

    def __init__(self, nth: int = 0, code: int = errno.EIO, *, late: bool = False, quick: bool = False) -> None:
        self.nth = nth
        self.code = code
        self.late = late
        self.quick = quick
        self.made: list[str] = []
        self.active = True

    def call(self, name: str) -> None:
        if self.active:
            self.made.append(name)
            if len(self.made) == self.nth:
                self.fail()

    def fail(self) -> None:
        """What happens at the nth call."""
        raise OSError(self.code, os.strerror(self.code))

    def part(self, data: bytes) -> bytes:
        """What one call writes of this: short writes are allowed."""
        return data if self.quick else data[: max(1, len(data) // 2)]

    @property
    def failed(self) -> bool:
        return len(self.made) >= self.nth > 0


@contextlib.contextmanager
def failing(calls: FailingCalls) -> Iterator[FailingCalls]:
    """Let the calls with which ``packfmt.storage`` writes and names files go through ``calls``."""

    def through(name: str) -> Any:
        real = getattr(os, name)

        def counted(*args: Any, **options: Any) -> Any:
            if name == "close":  # a failing close has closed, as on Linux
                real(*args, **options)
                return calls.call(name)
            if name == "fsync" and calls.quick:
                return calls.call(name)
            if calls.late:
                result = real(*args, **options)
                calls.call(name)
                return result
            calls.call(name)
            return real(*args, **options)

        return counted

    real_open, real_temporary = open, tempfile.TemporaryFile

    def open_file(*args: Any, **options: Any) -> Any:
        options.pop("buffering", None)
        buffer = 1 << 20 if calls.quick else 64
        return io.BufferedWriter(_FailingFile(real_open(*args, buffering=0, **options), calls), buffer)

    def temporary(*args: Any, **options: Any) -> Any:
        calls.call("temporary")
        return _FailingFile(real_temporary(*args, **options), calls)

    def writev(descriptor: int, pieces: Any) -> int:
        calls.call("write")
        return os.write(descriptor, calls.part(b"".join(pieces)))

    real_exchange = folders._exchange

    def exchange(one: Path, other: Path) -> bool:
        calls.call("exchange")
        return real_exchange(one, other)

    with (
        mock.patch("packfmt.storage.shard_writer.PORTION", 1 << 20 if calls.quick else 64),
        mock.patch("packfmt.storage.shard_writer.os", _Module(os, {"writev": writev})),
        mock.patch("packfmt.storage.atomic.os", _Module(os, {name: through(name) for name in CALLS})),
        mock.patch("packfmt.storage.atomic.open", open_file, create=True),
        mock.patch("packfmt.storage.leftovers.os", _Module(os, {name: through(name) for name in OF_LEFTOVERS})),
        mock.patch("packfmt.storage.leftovers.open", open_file, create=True),
        mock.patch("packfmt.storage.folders._exchange", exchange),
        mock.patch("packfmt.storage.folders.os", _Module(os, {name: through(name) for name in OF_FOLDERS})),
        mock.patch("packfmt.storage.spool.tempfile", _Module(tempfile, {"TemporaryFile": temporary})),
    ):
        yield calls


class _Module:
    """A module with some functions replaced, for one importer alone."""

    def __init__(self, real: Any, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _FailingFile(io.RawIOBase):
    def __init__(self, file: Any, calls: FailingCalls) -> None:
        self._file = file
        self._calls = calls

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def seek(self, *args: int) -> int:
        return self._file.seek(*args)

    def truncate(self, size: int | None = None) -> int:
        self._calls.call("truncate")
        return self._file.truncate(size)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)

    def write(self, data: Any) -> int:
        self._calls.call("write")
        return self._file.write(self._calls.part(bytes(data)))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            super().close()
            self._calls.call("close file")


def below(folder: Path) -> list[str]:
    """Names of all files in a folder, sorted."""
    return sorted(path.name for path in folder.rglob("*"))


def in_child(work: Callable[[], object]) -> int:
    """Start work in a forked process, which ends with the errno of an OSError, or 0. Returns its id."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            work()
            code = 0
        except OSError as error:
            code = error.errno or 71
        finally:
            os._exit(code)
    return child


def outcome(child: int) -> int:
    """The exit code of a child, or the number of the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
