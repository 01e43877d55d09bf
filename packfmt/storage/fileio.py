"""The bytes of one file, through a memory map or through pread."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Literal, Protocol

from packfmt.errors import CorruptError, FormatError

__all__ = ["FileBytes", "choose_io", "open_bytes", "runs"]

IO = Literal["auto", "mmap", "pread"]

# Kinds of file system where a map turns a network fault into SIGBUS and every page into a round trip.
REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "glusterfs", "afs", "gpfs", "beegfs", "virtiofs")
GAP = 64 << 10  # bytes between two ranges that are cheaper to read than to skip
DEVICES = "/sys/dev/block"
DEFAULT_STEP = 128 << 10  # Linux's own, for file systems without a disk that could be asked
RUN = 4 << 20  # bytes one pread may take


class FileBytes(Protocol):
    """Random access to a file that is not changed while open. Thread-safe: no seek position, no lock."""

    size: int
    any_order: bool  # whether ``slices`` takes ranges as they come

    def slices(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Read-only views of these ranges, in ascending order of offset unless ``any_order``."""

    def section(self, offset: int, size: int) -> memoryview:
        """A read-only view of one long range."""

    def will_need(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Start reading these ascending ranges into the page cache."""

    def forget(self, offset: int, size: int) -> None:
        """Drop a range from resident memory; its bytes stay reachable."""

    def check_size(self) -> None:
        """Raise CorruptError if the file no longer has the size it was opened with."""

    def close(self) -> None:
        """Release the file. Views that are still referenced stay valid, and a read in another thread ends well."""


def open_bytes(path: str, io: IO) -> FileBytes:
    """Open a file for reading with "mmap" or "pread"; "auto" takes what ``choose_io`` says.

    The path is looked up once: whoever replaces the file meanwhile, what is read is all old or all new.

    Raises:
        FormatError: not a regular file.
        OSError: the file cannot be opened.
    """
    io = choose_io(path, io)
    descriptor = _Descriptor(path)
    status = os.fstat(descriptor.number)
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: not a regular file; name a packfmt shard")
    if io == "pread" or not status.st_size:  # there is no map of nothing
        return _PreadBytes(path, descriptor, status.st_size)
    return _MapBytes(path, descriptor, status.st_size)


def choose_io(path: str, io: IO) -> Literal["mmap", "pread"]:
    """What "auto" means for a path: "pread" on network and FUSE file systems, else "mmap".

    Raises:
        ValueError: ``io`` is none of "auto", "mmap", "pread".
    """
    if io not in ("auto", "mmap", "pread"):
        raise ValueError(f"io={io!r}, allowed are 'auto', 'mmap' and 'pread'")
    if io != "auto":
        return io
    unmappable = not hasattr(mmap.mmap, "madvise") or _file_system(path).startswith(REMOTE)
    return "pread" if unmappable and hasattr(os, "pread") else "mmap"


def _file_system(path: str) -> str:
    """The type of the file system that holds ``path``, "" where the system does not tell."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            table = [line.split(" ")[1:3] for line in mounts]
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = "", ""
    for point, name in table:
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, name
    return kind


class _Descriptor:
    """An open file, closed when the last reference goes.

    A thread that reads holds a reference, so ``close`` in another thread cannot hand the number to another file
    under its hands.
    """

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = -1
        # Non-blocking, so that a FIFO is refused instead of waited for; regular files do not care.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        self.number = os.open(path, flags)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class _MapBytes:
    """The whole file mapped read-only. One descriptor, held by the map."""

    any_order = True

    def __init__(self, path: str, descriptor: _Descriptor, size: int) -> None:
        self._path = path
        self.size = size
        self._step = _step(descriptor)
        self._map: mmap.mmap | None = mmap.mmap(descriptor.number, size, access=mmap.ACCESS_READ)
        self._view: memoryview | None = memoryview(self._map)
        with suppress(OSError, AttributeError):
            # Read-ahead around a random record reads what nobody asked for; will_need says what is wanted.
            self._map.madvise(mmap.MADV_RANDOM)

    def slices(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        view = self._open()
        return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def section(self, offset: int, size: int) -> memoryview:
        return self._open()[offset : offset + size]

    def will_need(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        if hasattr(mmap, "MADV_WILLNEED"):
            with suppress(ValueError):  # closed meanwhile by another thread: nothing is needed any more
                begin = partial(self._mapped().madvise, mmap.MADV_WILLNEED)
                _begin_reading(begin, offsets, sizes, self._step)

    def forget(self, offset: int, size: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED") and size:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapped().madvise(mmap.MADV_DONTNEED, start, offset + size - start)

    def check_size(self) -> None:
        _check_size(self._mapped().size(), self.size, self._path)

    def close(self) -> None:
        # Not mmap.close: it would take the descriptor from a thread that asks for the size, and its number may be
        # another file's by then. The map goes with the last reference: ours now, a view's or a thread's later.
        self._map = self._view = None

    def _mapped(self) -> mmap.mmap:
        mapped = self._map
        if mapped is None:
            raise _closed(self._path)
        return mapped

    def _open(self) -> memoryview:
        view = self._view
        if view is None:
            raise _closed(self._path)
        return view


class _PreadBytes:
    """Reads with pread into memory of our own: no SIGBUS, no page faults, works where maps do not."""

    any_order = False

    def __init__(self, path: str, descriptor: _Descriptor, size: int) -> None:
        self._path = path
        self._descriptor: _Descriptor | None = descriptor
        self.size = size
        self._step = _step(descriptor)

    def slices(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        views: list[memoryview] = []
        for first, last in runs(offsets, sizes):
            start = offsets[first]
            stop = max(offsets[i] + sizes[i] for i in range(first, last))
            run = self.section(start, stop - start)
            views += [run[offsets[i] - start : offsets[i] - start + sizes[i]] for i in range(first, last)]
        return views

    def section(self, offset: int, size: int) -> memoryview:
        descriptor = self._open()
        data = os.pread(descriptor.number, size, offset)
        if len(data) == size:
            return memoryview(data)
        parts = [data]  # interrupted, or over the 2 GiB that one call reads
        while size > (done := sum(map(len, parts))):
            parts.append(os.pread(descriptor.number, size - done, offset + done))
            if not parts[-1]:
                raise CorruptError(f"ends at {offset + done}, wanted bytes up to {offset + size}", path=self._path)
        return memoryview(b"".join(parts))

    def will_need(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        if hasattr(os, "posix_fadvise"):
            descriptor = self._open()
            _begin_reading(
                lambda start, size: os.posix_fadvise(descriptor.number, start, size, os.POSIX_FADV_WILLNEED),
                offsets,
                sizes,
                self._step,
            )

    def forget(self, offset: int, size: int) -> None:
        """Nothing stays resident here."""

    def check_size(self) -> None:
        descriptor = self._open()  # held until the call is over: another thread may close
        _check_size(os.fstat(descriptor.number).st_size, self.size, self._path)

    def close(self) -> None:
        self._descriptor = None

    def _open(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            raise _closed(self._path)
        return descriptor


def _begin_reading(begin: Callable[[int, int], None], offsets: Sequence[int], sizes: Sequence[int], step: int) -> None:
    """Call ``begin(start, size)`` for ascending ranges, at most ``step`` bytes at a time."""
    for first, last in runs(offsets, sizes):
        start = offsets[first] // mmap.PAGESIZE * mmap.PAGESIZE
        stop = offsets[last - 1] + sizes[last - 1]
        while start < stop:
            begin(start, min(step, stop - start))
            start += step


def _step(descriptor: _Descriptor) -> int:
    return _begun_at_once(os.fstat(descriptor.number).st_dev) if hasattr(os, "major") else DEFAULT_STEP


@cache
def _begun_at_once(device: int) -> int:
    """Bytes that Linux begins to read when it is told what will be needed; it forgets what is beyond them."""
    disk = f"{DEVICES}/{os.major(device)}:{os.minor(device)}"
    found = []
    for queue in (f"{disk}/queue", f"{disk}/../queue"):  # of a disk, of the disk that a partition is on
        for name in ("read_ahead_kb", "max_sectors_kb"):
            with suppress(OSError, ValueError), open(f"{queue}/{name}", encoding="ascii") as file:
                found.append(int(file.read()) << 10)
    return max(found, default=0) // mmap.PAGESIZE * mmap.PAGESIZE or DEFAULT_STEP  # steps begin at pages


def runs(offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Group ascending ranges: (first, last + 1) of those that lie closer than GAP and together take at most RUN."""
    found: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(offsets)):
        end = offsets[i - 1] + sizes[i - 1]
        if offsets[i] - end > GAP or offsets[i] + sizes[i] - offsets[first] > RUN:
            found.append((first, i))
            first = i
    if len(offsets):
        found.append((first, len(offsets)))
    return found


def _check_size(found: int, opened: int, path: str) -> None:
    if found != opened:
        raise CorruptError(
            f"the file is now {found} bytes long, was {opened} when opened: somebody changed it in place; "
            "restore it and open it again",
            path=path,
        )


def _closed(path: str) -> ValueError:
    return ValueError(f"{path}: the reader is closed; open it again with packfmt.open")
