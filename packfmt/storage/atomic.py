"""A file appears under its final name whole or not at all, and so do several that belong together.

Temporary file in the target's folder, write, fsync, rename, fsync the folder. Several files also have a journal of how
they get their names, so that the next writer can finish or take back what a dead one had begun.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedWriter, RawIOBase
from pathlib import Path
from typing import cast

from packfmt.storage.leftovers import Journal, create_file, exclusive, remove_leftovers, stamp, temporary_path

__all__ = ["PendingFile", "PendingSet", "fsync_folder", "naming", "refuse_existing"]

WRITE_BACK = 16 << 20  # bytes after which the disk is set to work, while more are being written
BUFFER = 1 << 20  # bytes gathered before a write: one system call for many small records
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
        guard: the set that this file is one of, whose lock stands for this one's too: this one holds no descriptor once
            it is finished.

    Raises:
        FileExistsError: the target exists and ``force`` is off.
        OSError: the folder is missing or read-only.
    """

    def __init__(self, path: Path, *, force: bool = False, guard: PendingSet | None = None) -> None:
        self.path = path
        self.force = force
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder; name a file to write", str(path))
        if guard is None:  # a set's leftovers go together
            remove_leftovers(path)
        if not force:
            refuse_existing(path)
        self.temporary, self.stream = create_file(path, guard.journal if guard else None, buffering=BUFFER)
        self._guard = guard
        self._asked = 0
        self._finished = False
        self._withdrawable = False
        self._kept: Path | None = None  # the file that was replaced, while this one may have to go again

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
            if self._guard is not None:
                self.stream.close()
        self._finished = True

    def resume(self, position: int) -> None:
        """Cut a finished file that is guarded off at this place, and write on there."""
        self.stream = open(self.temporary, "r+b", buffering=BUFFER)  # noqa: SIM115 (closed by finish or discard)
        self.stream.truncate(position)
        self.stream.seek(position)
        self._asked, self._finished = position, False

    def publish(self) -> None:
        """Give the finished file its final name; durable when this returns.

        Raises:
            FileExistsError: the target appeared meanwhile and ``force`` is off.
            OSError: the disk refuses; what was under the name is there again.
        """
        self.finish()
        try:
            self.take_name(replace=self.force)
            self.stream.close()
            fsync_folder(self.path.parent)
            self.confirm()
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Take the name away again; a file that was replaced gets it back, where the system could keep it."""
        if self._kept is not None:
            with suppress(FileNotFoundError):
                if stamp(self._kept) == stamp(self.path):  # it was not replaced yet
                    os.unlink(self._kept)
                else:
                    os.replace(self._kept, self.path)
            self._kept = None
        elif self._withdrawable:
            self._withdrawable = False
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def confirm(self) -> None:
        """Let go of what was replaced: the name is not to be taken away any more."""
        if self._kept is not None:
            os.unlink(self._kept)
            self._kept = None

    def discard(self) -> None:
        """Remove the temporary file. Allowed at any time, also after ``publish``, then without effect."""
        with suppress(OSError):  # a full disk makes the last flush fail; the file goes away anyway
            self.stream.close()
        with suppress(FileNotFoundError):
            os.unlink(self.temporary)

    def take_name(self, *, replace: bool) -> None:
        """Give the finished file its final name, which is not durable yet.

        A hard link is the one portable call that refuses an existing target atomically.
        """
        try:
            os.link(self.temporary, self.path)
        except FileExistsError:
            if not replace:
                refuse_existing(self.path)
                raise
            self._keep()
            os.replace(self.temporary, self.path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            exists = os.path.lexists(self.path)  # a small window is left between this and the rename
            if exists and not replace:
                refuse_existing(self.path)
            os.replace(self.temporary, self.path)
            self._withdrawable = not exists
        else:
            self._withdrawable = True
            os.unlink(self.temporary)

    def _keep(self) -> None:
        """Give what is about to be replaced a second name."""
        if self.path.is_symlink():
            return
        kept = temporary_path(self.path, self._guard.journal if self._guard else self.temporary)
        try:
            os.link(self.path, kept)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(kept)
            raise
        else:
            self._kept = kept


class PendingSet:
    """Files of one folder that get their final names together. They are made with this as their ``guard``.

    Args:
        path: the name that stands for all of them: what the next writer of the same files is given too.

    Attributes:
        journal: a temporary file, locked while this lives. Empty until ``publish``.

    Raises:
        OSError: the folder is missing or read-only, or what a dead writer had begun cannot be settled.
    """

    def __init__(self, path: Path) -> None:
        remove_leftovers(path)
        self._path = path
        self.journal, self._file = create_file(path)
        self._needed = False  # the journal: what it says is not all done

    def exclusive(self) -> AbstractContextManager[None]:
        """To be held while names are looked up that ``publish`` will give or take away, and by it."""
        return exclusive(self._path.parent)

    def publish(self, files: Sequence[PendingFile], *, replaced: Iterable[Path] = (), aside: bool = False) -> None:
        """Give finished files their names; durable when this returns.

        The last one's name decides: before, an error or the next writer takes all back; after, all old ones go.

        Args:
            files: only the last may replace a file, if it is to.
            replaced: files that go, those that are there.
            aside: they have to make room before. There is a moment then in which neither the old nor the new set is
                whole, and the last file's name is free.

        Raises:
            FileExistsError: a name is taken.
            OSError: the disk refuses. Nothing has changed then, unless it was old files that could not be removed:
                these are left to the next writer.
        """
        folder = self._path.parent
        for file in files:
            file.finish()
        names = {file.path.name for file in files}
        there = [(path, found) for path in replaced if (found := stamp(path))]
        new = [(file.path.name, found) for file in files if (found := stamp(file.temporary))]
        old = [(path.name, found) for path, found in there if not aside and path.name not in names]
        moved = [(path.name, temporary_path(path, self.journal).name) for path, _ in there if aside]
        journal = Journal(tuple(new), tuple(old), tuple(moved))
        begun = False
        try:
            self._write(journal)
            for name, temporary in moved:
                os.rename(folder / name, folder / temporary)
            for file in files[:-1]:
                file.take_name(replace=False)
            fsync_folder(folder)
            files[-1].take_name(replace=files[-1].force and not aside)
            fsync_folder(folder)
            begun = bool(there)  # to remove what nobody could bring back
            files[-1].confirm()
            journal.settle(folder)
            os.unlink(self.journal)
        except BaseException:
            if not begun:
                files[-1].withdraw()
            if not journal.decided(folder):
                journal.settle(folder)
                self._needed = False
            raise
        self._needed = False
        self.discard()

    def discard(self) -> None:
        """Remove the journal, unless the next writer needs it. Allowed at any time."""
        with suppress(OSError):  # all that matters in it is on the disk
            self._file.close()
        if not self._needed:
            with suppress(FileNotFoundError):
                os.unlink(self.journal)

    def _write(self, journal: Journal) -> None:
        with naming(self._path):
            self._file.write(journal.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        self._needed = True
        fsync_folder(self._path.parent)


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
