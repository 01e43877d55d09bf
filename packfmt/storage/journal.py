"""What is about to happen to several final names, written down before, so that it can be settled if the writer dies."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Stamp", "stamp"]

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
