"""Temporary names beside a target, and what killed writers left under them.

Whatever is under a temporary name is locked while its writer lives, so that the next writer of the same target can tell
a dead writer's leftover from a living one's work. Where a writer has several files, one of them guards the others: its
lock stands for theirs, and it is the journal of how they get their names: what is about to happen to several final
names is written down before, so that it can be settled if the writer dies.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import xxhash

__all__ = [
    "Journal",
    "Stamp",
    "create_file",
    "create_folder",
    "exclusive",
    "remove",
    "remove_leftovers",
    "stamp",
    "temporary_path",
]

HEAD = b'{"packfmt-journal": 1, '
MAX_JOURNAL = 256 << 20

Stamp = tuple[int, int]


def stamp(path: Path) -> Stamp | None:
    """What tells a file from another that may have its name: number and size, which renaming leaves as they are."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size


@dataclass(frozen=True, slots=True)
class Journal:
    """How files of one folder get their names together. The last of the new ones decides whether all did.

    Args:
        new: final name, and the file that gets it.
        old: name and file, which goes once the new ones have their names.
        aside: name, and the temporary name under which its file waits until then: to go too, or to come back.
    """

    new: tuple[tuple[str, Stamp], ...]
    old: tuple[tuple[str, Stamp], ...] = ()
    aside: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """The journal's bytes."""
        return HEAD + json.dumps(asdict(self)).encode("ascii")[1:]

    @classmethod
    def read(cls, descriptor: int) -> Journal | None:
        """The journal in a file. None where there is none, or its writer died in the middle: then nothing was named.

        That of another user is not followed: who can write a file here need not be one who may remove others.
        """
        found = os.fstat(descriptor)
        ours = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
        if not stat.S_ISREG(found.st_mode) or not ours or not len(HEAD) < found.st_size <= MAX_JOURNAL:
            return None
        os.lseek(descriptor, 0, os.SEEK_SET)
        if os.read(descriptor, len(HEAD)) != HEAD:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            rest = file.read()
        try:
            body = json.loads(b"{" + rest)
            new, old = (tuple((_name(n), _stamp(s)) for n, s in body[part]) for part in ("new", "old"))
            aside = tuple((_name(n), _name(t)) for n, t in body["aside"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return cls(new, old, aside) if new else None

    def decided(self, folder: Path) -> bool:
        """Whether the last of the new files has its name, and all others with it."""
        name, file = self.new[-1]
        return stamp(folder / name) == file

    def settle(self, folder: Path) -> None:
        """Finish what was begun, or take it back. Called again without harm.

        Raises:
            OSError: the system refuses.
        """
        decided = self.decided(folder)
        for name, file in self.old if decided else reversed(self.new):
            if stamp(folder / name) == file:
                os.unlink(folder / name)
        for name, temporary in reversed(self.aside):
            if decided:
                with suppress(FileNotFoundError):
                    os.unlink(folder / temporary)
            elif os.path.lexists(folder / temporary) and not os.path.lexists(folder / name):
                os.rename(folder / temporary, folder / name)


def _name(value: Any) -> str:
    if not isinstance(value, str) or value in ("", ".", "..") or set(value) & set("/\\\0"):
        raise ValueError(f"{value!r} is no plain file name")
    return value


def _stamp(value: Any) -> Stamp:
    number, size = value
    return int(number), int(size)


try:
    import fcntl
except ImportError:  # Windows: leftovers of killed writers are not told from living ones there, and stay
    fcntl = None  # type: ignore[assignment]

Descriptor = TypeVar("Descriptor", int, int | None)  # of a new file, or of a folder, where there may be none


# Temporary names: PREFIX hash-of-name - random SUFFIX; of a guarded file, GUARDED and the guard's before the SUFFIX.
PREFIX, GUARDED, SUFFIX = ".packfmt-", "-of-", ".tmp"


def temporary_path(path: Path, guard: Path | None = None) -> Path:
    """A new temporary name beside this target; of a guarded file, one that says which guard to look at."""
    own = GUARDED + guard.name.removeprefix(PREFIX).removesuffix(SUFFIX) if guard else ""
    return path.with_name(f"{_start(path)}{secrets.token_hex(8)}{own}{SUFFIX}")


def create_file(path: Path, guard: Path | None = None, *, buffering: int = -1) -> tuple[Path, IO[bytes]]:
    """Create a locked file under a temporary name. Returns the name, and the file to be written."""
    temporary, descriptor = _create(path, guard, _new_file)
    try:
        return temporary, open(descriptor, "wb", buffering=buffering)
    except BaseException:
        _drop(temporary, descriptor)
        raise


def create_folder(path: Path) -> tuple[Path, int | None]:
    """Create a locked folder under a temporary name. Returns the name and a descriptor, None where there are none."""
    return _create(path, None, _new_folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder and all in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers of this target left behind, and settle what they had begun to name.

    Raises:
        OSError: what one of them had begun cannot be settled.
    """
    own = _start(path)
    guarded = GUARDED + own.removeprefix(PREFIX)
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX)]
    except OSError:  # creating the file says it better
        return
    names = [name for name in names if name.startswith(own) or guarded in name]
    for name in sorted(names, key=lambda name: GUARDED in name):  # journals first: they say what the rest is for
        _remove_if_dead(path.parent, name)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process names several files in this folder, and keep others from it meanwhile.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = _open_folder(folder)
    try:
        if descriptor is not None:
            lock(descriptor, wait=True)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Take the writer's lock: True, False where another holds it, None where the system has no such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _start(path: Path) -> str:
    """How the temporary names of a target begin."""
    return f"{PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}-"


def _create(path: Path, guard: Path | None, make: Callable[[Path], Descriptor]) -> tuple[Path, Descriptor]:
    while True:
        temporary = temporary_path(path, guard)
        descriptor: Descriptor | None = None
        try:
            descriptor = make(temporary)
            locked = None if descriptor is None else lock(descriptor)
            if locked is None or (locked and os.path.lexists(temporary)):
                return temporary, descriptor
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such folder to write to", str(path.parent)) from None
        except OSError as error:
            raise type(error)(error.errno, f"cannot write here: {error.strerror}", str(path.parent)) from None
        except BaseException:  # a signal, which may come when the call has done its work
            _drop(temporary, descriptor)
            raise
        _drop(temporary, descriptor)  # another writer took it for a leftover in the moment before the lock


def _drop(temporary: Path, descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):  # closed already
            os.close(descriptor)
    remove(temporary)


def _new_file(temporary: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(temporary, flags | getattr(os, "O_CLOEXEC", 0), 0o666)


def _new_folder(temporary: Path) -> int | None:
    os.mkdir(temporary)
    return _open_folder(temporary)


def _open_folder(path: Path) -> int | None:
    """A descriptor of a folder; None where the system has no such descriptors, or gives none."""
    if not hasattr(os, "O_DIRECTORY"):
        return None
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None


def _remove_if_dead(folder: Path, name: str) -> None:
    """Remove a leftover while its lock and its guard's are held, so that no writer takes it up meanwhile."""
    _, _, guard = name.removesuffix(SUFFIX).partition(GUARDED)
    with ExitStack() as held:
        descriptor = None
        for file in [PREFIX + guard + SUFFIX, name] if guard else [name]:
            try:
                descriptor = _open_leftover(folder / file)
            except FileNotFoundError:
                continue
            except OSError:  # not ours
                return
            held.callback(os.close, descriptor)
            if not lock(descriptor):
                return
        journal = None if guard or descriptor is None else Journal.read(descriptor)
        if journal is not None:
            held.enter_context(exclusive(folder))
            journal.settle(folder)
        with suppress(OSError):  # gone meanwhile, or not ours
            remove(folder / name)


def _open_leftover(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except IsADirectoryError:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
