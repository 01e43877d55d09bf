"""A file appears under its final name whole or not at all.

Temporary file in the target's folder, write, fsync, rename, fsync the folder. The temporary file is locked while its
writer lives, so that the next writer of the same target can tell a dead writer's leftover from a living one's work.
Where a pack has several files, one of them guards the others: its lock stands for theirs.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedWriter, RawIOBase
from pathlib import Path
from typing import IO, cast

import xxhash

try:
    import fcntl
except ImportError:  # Windows: leftovers of killed writers are not told from living ones there, and stay
    fcntl = None  # type: ignore[assignment]

__all__ = ["SUFFIX", "PendingFile", "fsync_folder", "lock", "naming", "refuse_existing", "temporary_name"]

WRITE_BACK = 16 << 20  # bytes after which the disk is set to work, while more are being written
BUFFER = 1 << 20  # bytes gathered before a write: one system call for many small records
# Temporary names: PREFIX hash-of-name - random SUFFIX; of a guarded file, GUARDED and the guard's before the SUFFIX.
PREFIX, GUARDED, SUFFIX = ".packfmt-", "-of-", ".tmp"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # file systems without hard links


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if the target is there."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "exists; choose another name or force overwriting (--force)", str(path))


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give this name to errors of the system that have none: a full disk's, since a write knows a number only."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


class PendingFile:
    """A file being written that nobody sees under its final name until ``publish``.

    Args:
        path: the final name. Its folder must exist.
        force: replace an existing file when publishing; otherwise it is refused now and again then.
        guard: another pending file of the same pack, whose lock stands for this one's too: this one holds no
            descriptor once it is finished.

    Raises:
        FileExistsError: the target exists and ``force`` is off.
        OSError: the folder is missing or read-only.
    """

    def __init__(self, path: Path, *, force: bool = False, guard: PendingFile | None = None) -> None:
        self.path = path
        self.force = force
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder; name a file to write", str(path))
        if guard is None:  # a guard's leftovers and those of the files it guards go together
            _remove_leftovers(path)
        if not force:
            refuse_existing(path)
        self.temporary: Path
        own = guard.temporary.name.removeprefix(PREFIX).removesuffix(SUFFIX) if guard else ""
        self.temporary, descriptor = _create_locked(path, GUARDED + own if guard else "")
        self.stream: IO[bytes] = open(descriptor, "wb", buffering=BUFFER)  # noqa: SIM115 (closed by publish or discard)
        self._guarded = guard is not None
        self._asked = 0
        self._finished = False
        self._withdrawable = False

    @property
    def raw(self) -> RawIOBase:
        """``stream`` without its buffer, for who gathers bytes himself and does not use the other."""
        return cast(RawIOBase, cast(BufferedWriter, self.stream).raw)

    def written(self, position: int) -> None:
        """Hear how far the file has been written, and set the disk to work, so that ``finish`` has less to wait for."""
        if position - self._asked >= WRITE_BACK and hasattr(os, "posix_fadvise"):
            # Linux starts writing dirty pages that are said to be unneeded, and keeps them until they are written.
            os.posix_fadvise(self.stream.fileno(), self._asked, position - self._asked, os.POSIX_FADV_DONTNEED)
            self._asked = position

    def finish(self) -> None:
        """Write everything to the disk. Raises OSError where the disk refuses."""
        if self._finished:
            return
        with naming(self.path):
            self.stream.flush()
            os.fsync(self.stream.fileno())
            if self._guarded:
                self.stream.close()
        self._finished = True

    def resume(self, position: int) -> None:
        """Cut a finished file that is guarded off at this place, and write on there."""
        self.stream = open(self.temporary, "r+b", buffering=BUFFER)  # noqa: SIM115 (closed by publish or discard)
        self.stream.truncate(position)
        self.stream.seek(position)
        self._asked, self._finished = position, False

    def publish(self) -> None:
        """Give the finished file its final name; durable when this returns.

        Raises:
            FileExistsError: the target appeared meanwhile and ``force`` is off.
            OSError: the disk refuses; a file that replaced nothing is taken back.
        """
        self.finish()
        try:
            self._rename()
            self.stream.close()
            fsync_folder(self.path.parent)
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Take a published file back, unless it replaced another, which is gone."""
        if self._withdrawable:
            self._withdrawable = False
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def discard(self) -> None:
        """Remove the temporary file. Allowed at any time, also after ``publish``, then without effect."""
        with suppress(OSError):  # a full disk makes the last flush fail; the file goes away anyway
            self.stream.close()
        with suppress(FileNotFoundError):
            os.unlink(self.temporary)

    def _rename(self) -> None:
        """A hard link is the one portable call that refuses an existing target atomically."""
        try:
            os.link(self.temporary, self.path)
        except FileExistsError:
            if not self.force:
                refuse_existing(self.path)
                raise
            os.replace(self.temporary, self.path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            exists = os.path.lexists(self.path)  # a small window is left between this and the rename
            if exists and not self.force:
                refuse_existing(self.path)
            os.replace(self.temporary, self.path)
            self._withdrawable = not exists
        else:
            self._withdrawable = True
            os.unlink(self.temporary)


def fsync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that writes folders through
            raise
    finally:
        os.close(descriptor)


def temporary_name(path: Path, token: str) -> str:
    """A temporary name for this target, without ``SUFFIX``; all of them begin as the one with an empty token."""
    return f"{PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}-{token}"


def _create_locked(path: Path, guard: str) -> tuple[Path, int]:
    while True:
        temporary = path.parent / f"{temporary_name(path, secrets.token_hex(8))}{guard}{SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(temporary, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such folder to write to", str(path.parent)) from None
        except OSError as error:
            raise type(error)(error.errno, f"cannot write here: {error.strerror}", str(path.parent)) from None
        locked = lock(descriptor)
        if locked is None or (locked and os.path.lexists(temporary)):
            return temporary, descriptor
        os.close(descriptor)  # another writer took it for a leftover in the moment before the lock
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _remove_leftovers(path: Path) -> None:
    """Remove what killed writers of this target, or of a pack that it guards, left behind."""
    own = temporary_name(path, "")
    guarded = GUARDED + own.removeprefix(PREFIX)
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX)]
    except OSError:  # creating the file says it better
        return
    for name in names:
        if name.startswith(own) or guarded in name:
            _remove_if_dead(path.parent, name)


def _remove_if_dead(folder: Path, name: str) -> None:
    """Remove a leftover while its lock and its guard's are held, so that no writer takes it up meanwhile."""
    _, _, guard = name.removesuffix(SUFFIX).partition(GUARDED)
    with ExitStack() as held:
        for file in [name, PREFIX + guard + SUFFIX] if guard else [name]:
            try:
                descriptor = os.open(folder / file, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            except FileNotFoundError:
                continue
            except OSError:  # not ours
                return
            held.callback(os.close, descriptor)
            if not lock(descriptor):
                return
        with suppress(OSError):  # gone meanwhile, or not ours
            os.unlink(folder / name)


def lock(descriptor: int) -> bool | None:
    """Take the writer's lock: True, False where another holds it, None where the system has no such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
