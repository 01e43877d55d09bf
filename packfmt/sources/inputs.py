"""What the sources share: input files and their first bytes, untrusted paths in them, keys, class folders, notes."""

from __future__ import annotations

import itertools
import os
import re
import stat
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from packfmt.errors import SourceError
from packfmt.record import IMAGE_COLUMNS, KEY
from packfmt.storage.patterns import is_pattern, matching_files, split_pattern

__all__ = [
    "MAX_FOLDERS",
    "MAX_IMAGE_BYTES",
    "NO_CLASS",
    "CountedNotes",
    "FolderClasses",
    "Inputs",
    "Probe",
    "SeenKeys",
    "expand_inputs",
    "free_name",
    "has_images",
    "head_of",
    "inside_key",
    "is_hidden",
    "is_image_name",
    "natural",
    "read_inside",
    "resolve_inside",
    "short_names",
]

# The most bytes one image may have. Far above any photograph; it keeps a compressed bomb from filling the memory.
MAX_IMAGE_BYTES = 256 << 20
MAX_SHARDS = 1_000_000
MAX_FOLDERS = 1_000_000
_LOOKED_AT = 1000  # entries of a folder

_ODD_NAME = re.compile(r"__MACOSX|Thumbs\.db|desktop\.ini")  # wherever it stands: a quick check before the full one
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".gif", ".webp", ".bmp", ".dib", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif", ".heic"),
)
Inputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand_inputs(paths: Inputs) -> list[Path]:
    """The shard files that ``paths`` names, in order.

    Args:
        paths: a path, a brace pattern (``x-{000000..000009}.tar``, ``{a,b}.tar``), a glob pattern, or a list of them.
            A path that exists is taken as it stands, whatever characters it holds, and so is the folder in which a
            pattern begins. A glob's matches are sorted.

    Raises:
        FileNotFoundError: a named file does not exist, or a pattern matches nothing.
        SourceError: no path at all, the same file twice, or a pattern of more than a million names.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = [path for item in given for path in _expand_one(os.fspath(item))]
    if not found:
        raise SourceError("no shard was named; give at least one path")
    seen: dict[str, Path] = {}
    for path in found:
        real = os.path.realpath(path)
        if real in seen:
            raise SourceError(f"{path} and {seen[real]} are the same file; name each shard once")
        seen[real] = path
    return found


def _expand_one(text: str) -> list[Path]:
    if os.path.exists(text):
        return [Path(text)]
    folder, rest = split_pattern(text)
    names = [folder + name for name in itertools.islice(_expand_braces(rest), MAX_SHARDS + 1)]
    if len(names) > MAX_SHARDS:
        raise SourceError(f"{text}: the pattern stands for more than {MAX_SHARDS} names")
    paths: list[Path] = []
    for name in names:
        matches = [name] if os.path.exists(name) else matching_files(name) if is_pattern(name) else []
        if not matches:
            raise FileNotFoundError(2, "no such file" if name == text else f"no such file (from {text})", name)
        paths.extend(Path(match) for match in matches)
    return paths


def _expand_braces(text: str) -> Iterator[str]:
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        yield text
        return
    head, tail = text[: match.start()], text[match.end() :]
    numbers = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", match[1])
    middles: Iterable[str]
    if numbers is not None:
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        middles = (str(n).zfill(width) for n in range(int(numbers[1]), int(numbers[2]) + 1))
    elif "," in match[1]:
        middles = match[1].split(",")
    else:
        # no pattern: keep the braces, look behind them
        for rest in _expand_braces(tail):
            yield head + match[0] + rest
        return
    for middle in middles:
        yield from _expand_braces(head + middle + tail)


HEAD_BYTES = 16 << 10


def head_of(path: str | os.PathLike[str]) -> bytes:
    """The first bytes of a file, at most ``HEAD_BYTES``; none of what is not a regular file.

    Raises:
        OSError: the file cannot be read.
    """
    if not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        return file.read(HEAD_BYTES)


class Probe:
    """What a path shows before it is opened as anything: read once, and asked by the recognisers of all kinds in turn.

    Args:
        given: a path, a pattern, or several paths.

    Attributes:
        given: as given.
        path: the one path or pattern, "" where several are given.
        is_folder: whether that is a folder.
    """

    def __init__(self, given: Inputs) -> None:
        self.given = given
        self.path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else ""
        self.is_folder = bool(self.path) and os.path.isdir(self.path)

    @cached_property
    def first(self) -> str:
        """The first file that is named; "" where there is none, or it is a folder."""
        try:
            return "" if self.is_folder else os.fspath(expand_inputs(self.given)[0])
        except (OSError, SourceError, ValueError):
            return ""

    @cached_property
    def head(self) -> bytes:
        """The first bytes of that file, see ``head_of``."""
        return head_of(self.first)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Names that tell the shards apart: relative to the folder they share, "/" between parts."""
    if len({path.parent for path in paths}) == 1:
        return [path.name for path in paths]
    full = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(full)
    return [os.path.relpath(path, common).replace(os.sep, "/") for path in full]


def is_image_name(key: str) -> bool:
    """Whether the name ends as image files do; what the bytes are is for the sniffer to say."""
    return key.lower().endswith(IMAGE_SUFFIXES)


def is_hidden(key: str) -> bool:
    """Whether a part of the path is hidden, or one of the files and folders that file managers leave behind."""
    if key[:1] != "." and "/." not in key and not _ODD_NAME.search(key):
        return False
    parts = [part for part in key.split("/") if part not in ("", ".", "..")]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts) or (
        bool(parts) and parts[-1] in ("Thumbs.db", "desktop.ini")
    )


def has_images(folder: str | os.PathLike[str]) -> bool:
    """Whether image files are among the first entries of a folder, not below it."""
    with os.scandir(folder) as entries:
        return any(is_image_name(e.name) and not is_hidden(e.name) for e in itertools.islice(entries, _LOOKED_AT))


def free_name(name: str, taken: Iterable[str]) -> str:
    """``name``, or one made from it where the pack itself or ``taken`` has that name already."""
    reserved = {column.name for column in IMAGE_COLUMNS} | {KEY, *taken}
    free = name
    while free in reserved:
        free = f"source_{free}"
    return free


class SeenKeys:
    """Remembers which keys came before and where, in 32 to 64 bytes a key whatever its length. One thread only.

    An open-addressing table of 64-bit hashes. Two different keys share a hash with odds of about 3 in 10,000 at a
    hundred million keys; they would be reported as duplicates, never merged.
    """

    def __init__(self) -> None:
        self._hashes = array("Q", bytes(8 << 10))
        self._places = array("q", bytes(8 << 10))
        self._used = 0

    def add(self, key: str, place: int) -> int | None:
        """Remember ``key`` at ``place``; return the place of its earlier namesake, or None for a new key."""
        if 2 * self._used >= len(self._hashes):
            self._grow()
        value = hash(key) & 0xFFFF_FFFF_FFFF_FFFF or 1
        slot = self._slot(value)
        if self._hashes[slot]:
            return self._places[slot]
        self._hashes[slot] = value
        self._places[slot] = place
        self._used += 1
        return None

    def _slot(self, value: int) -> int:
        hashes = self._hashes
        mask = len(hashes) - 1
        slot = value & mask
        while hashes[slot] and hashes[slot] != value:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        hashes, places = self._hashes, self._places
        self._hashes, self._places = array("Q", bytes(16 * len(hashes))), array("q", bytes(16 * len(hashes)))
        for value, place in zip(hashes, places, strict=True):
            if value:
                slot = self._slot(value)
                self._hashes[slot], self._places[slot] = value, place


class CountedNotes:
    """Lines of a source's ``notes`` that count something. Thread-safe.

    Args:
        notes: the list to keep up to date; each kind of note is one line of it.
    """

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._lines: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, text: str, count: int = 1) -> None:
        """Count ``count`` more of ``text``; the line reads "<total> <text>"."""
        if not count:
            return
        with self._lock:
            place, total = self._lines.get(text, (len(self._notes), 0))
            self._lines[text] = (place, total + count)
            line = f"{total + count} {text}"
            if place == len(self._notes):
                self._notes.append(line)
            else:
                self._notes[place] = line

    def clear(self) -> None:
        """Forget all lines, for another iteration; notes written by other hands stay."""
        with self._lock:
            places = {place for place, _ in self._lines.values()}
            self._notes[:] = [line for place, line in enumerate(self._notes) if place not in places]
            self._lines.clear()


def _as_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


NO_CLASS = "lies beside the class folders and has no class"


class FolderClasses:
    """Labels from folder names, as in ``cat/1.jpg``: the first level at which the paths part into several folders.

    An archive may hold a tree from any level up. (A folder on the disk is named where its classes are: there, the first
    level names them, as torchvision's ImageFolder has it.) Images above that level have no class. Names are sorted by
    their bytes, as ``FolderSource`` sorts them.

    Args:
        parents: the folders that hold images, "/" between parts, "" for the top.
        folders: further folders (empty classes), which count where they stand on that level.

    Attributes:
        names: the class names, sorted; empty where the folders give no classes.
    """

    def __init__(self, parents: Iterable[str], folders: Iterable[str] = ()) -> None:
        images = [self._parts(parent) for parent in set(parents)]
        others = [self._parts(folder) for folder in set(folders)]
        self.level = 0
        self.names: tuple[str, ...] = ()
        for level in range(max(map(len, images), default=0)):
            deep = [parts for parts in images if len(parts) > level]
            prefix = deep[0][:level]
            names = {parts[level] for parts in deep}
            if len(names) > 1:
                names |= {parts[level] for parts in others if len(parts) > level and parts[:level] == prefix}
                self.level, self.names = level, tuple(sorted(names, key=_as_bytes))
                break
        self._ids = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def of_members(cls, members: Iterable[tuple[str, bool]], where: object) -> FolderClasses:
        """The classes of an archive.

        Args:
            members: path of each, and whether it is a folder.
            where: what holds them, for messages.

        Raises:
            SourceError: there are more folders than ``MAX_FOLDERS``.
        """
        parents: set[str] = set()
        folders: set[str] = set()
        for name, is_folder in members:
            if is_hidden(name):
                continue
            if is_folder:
                folders.add(name)
            elif is_image_name(name):
                parents.add(name.rpartition("/")[0])
            if len(parents) + len(folders) > MAX_FOLDERS:
                raise SourceError(f"{where}: more than {MAX_FOLDERS} folders")
        return cls(parents, folders)

    @staticmethod
    def _parts(path: str) -> list[str]:
        return [part for part in path.split("/") if part not in ("", ".")]

    def label(self, key: str) -> int | None:
        """The class id of the image ``key``, or None where its folder is not a class."""
        parts = self._parts(key)[:-1]
        return self._ids.get(parts[self.level]) if len(parts) > self.level else None


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which ``demo_2`` comes before ``demo_10``."""
    parts = re.split(r"(\d{1,18})", text)
    return [(0, int(part), part) if part.isascii() and part.isdigit() else (1, 0, part) for part in parts]


def resolve_inside(root: str | os.PathLike[str], relative: str) -> Path:
    """The real path of ``relative`` under ``root``, symbolic links followed.

    An absolute path is accepted where it lies inside ``root``. The file need not exist. Thread-safe.

    Raises:
        SourceError: the path is empty, no file name can hold it, or it leaves ``root`` (by "..", by an absolute
            path, or by a symbolic link).
    """
    _check_text(relative)
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, relative))
    if not _is_inside(real, real_root):
        raise SourceError(
            f"{relative!r} leads outside {os.fspath(root)}; only files inside it are read. Copy the file there, or "
            "give a "
            "root folder that holds all of them"
        )
    return Path(real)


def inside_key(root: str | os.PathLike[str], relative: str) -> str:
    """The key of ``relative``: its path below ``root`` with "/" between parts, "." and ".." folded away.

    The path is taken as written: a symbolic link keeps its own name. Looks at no file.

    Raises:
        SourceError: the path is empty, no file name can hold it, or it is written as lying outside ``root``.
    """
    _check_text(relative)
    base = os.path.abspath(root)
    full = os.path.normpath(os.path.join(base, relative))
    if not _is_inside(full, base):
        base = os.path.realpath(root)
        full = os.path.normpath(os.path.join(base, relative))
    if full == base or not _is_inside(full, base):
        raise SourceError(f"{relative!r} is not inside {os.fspath(root)}; only files inside it are read")
    return os.path.relpath(full, base).replace(os.sep, "/")


def read_inside(root: str | os.PathLike[str], relative: str, limit: int) -> bytes:
    """The bytes of the regular file ``relative`` inside ``root``, at most ``limit`` of them. Thread-safe.

    Raises:
        SourceError: the path leaves ``root``, is not a regular file (a pipe would block for ever), or is larger than
        ``limit``. OSError: the file is missing or unreadable.
    """
    path = resolve_inside(root, relative)
    # O_NONBLOCK: opening a pipe that took the file's place must not wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise SourceError(f"{path} is not a regular file; only regular files are read")
        if facts.st_size > limit:
            raise SourceError(f"{path} has {facts.st_size} bytes; at most {limit} are read")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SourceError(f"{path} grew beyond {limit} bytes while it was read")
    return data


def _check_text(relative: str) -> None:
    if not relative:
        raise SourceError("an empty path names no file")
    try:
        encoded = os.fsencode(relative)
    except UnicodeEncodeError:
        raise SourceError(f"{relative!r} holds characters that no file name can hold") from None
    if b"\0" in encoded:
        raise SourceError(f"{relative!r} holds a NUL, which no file name can hold")


def _is_inside(path: str, root: str) -> bool:
    try:
        return os.path.commonpath([path, root]) == root
    except ValueError:  # different drives
        return False
