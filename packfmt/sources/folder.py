"""A folder of images: one sub-folder per class, or flat. Reading it, and writing one file per record."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packfmt.errors import ConvertError, DecodeError, SourceError
from packfmt.images.sniff import magic
from packfmt.record import LABEL, Column, Record
from packfmt.sources.base import BadEntry, SkipEntry, Source, Target
from packfmt.sources.inputs import MAX_IMAGE_BYTES, NO_CLASS, is_hidden, is_image_name
from packfmt.storage.folders import PendingTree, is_safe_key

__all__ = ["FolderSource", "FolderWriter"]

MAGIC_BYTES = 32  # what magic() looks at

_Folders = tuple[tuple[int, int], ...]  # device and inode of a folder and those above it, where links are followed


@dataclass(frozen=True, slots=True)
class _File:
    key: str
    label: int
    size: int


class FolderSource(Source):
    """Images below a folder, in the byte order of their relative paths.

    With sub-folders, the first level names the classes, sorted, as torchvision's ImageFolder numbers them; deeper
    levels belong to their class. Without, there are no labels. Hidden files, `Thumbs.db`, `__MACOSX` and the like are
    passed over, as are files that neither are nor are named like images; all are counted. Symbolic links are passed
    over unless ``follow_links`` is on, and then never in a circle.

    Args:
        root: the folder.
        follow_links: follow symbolic links, also out of the folder.
        labelled: False ignores the class folders and stores no labels.
        classes: number the class folders by this list, that of another pack; a folder not in it is an error.

    Raises:
        NotADirectoryError, FileNotFoundError: ``root`` is not a folder.
        SourceError: a class folder is not in ``classes``.
    """

    kind = "folder"
    random_access = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        follow_links: bool = False,
        labelled: bool = True,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.root = os.fspath(root)
        self._follow = follow_links
        if not os.path.lexists(self.root):
            raise FileNotFoundError(errno.ENOENT, "no such folder of images", self.root)
        if not os.path.isdir(self.root):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder of images", self.root)
        found = self._class_folders() if labelled else ()
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise SourceError(f"{self.root}: class folders {unknown} are not among the given classes {self.classes}")
        self._labels = {name: label for label, name in enumerate(self.classes)} if found else {}
        if found:
            self.columns = (LABEL,)
        else:
            self.classes = ()

    def entries(self) -> Iterator[Any]:
        self.skipped.clear()
        for key, entry in self._walk(self.skipped):
            if isinstance(entry, BadEntry):
                yield entry
            else:
                yield from self._file(key, entry)

    def _load(self, entry: Any) -> Record:
        data = self._read(entry)
        if self._labels and entry.label < 0:
            raise DecodeError(NO_CLASS, path=self.root, key=entry.key)
        return Record(data, entry.key, {"label": entry.label} if self._labels else {})

    def size(self, entry: Any) -> int:
        return entry.size if isinstance(entry, _File) else 0

    def count(self) -> int | None:
        return sum(1 for _ in self._walk(Counter()))

    def _class_folders(self) -> tuple[str, ...]:
        with os.scandir(self.root) as found:
            names = [_text(e.name) for e in found if not is_hidden(e.name) and self._is_folder(e)]
        return tuple(sorted(names, key=_raw))

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir(follow_symlinks=self._follow)
        except OSError:  # a link to itself, say; whoever stats it will report it
            return False

    def _walk(self, skipped: Counter[str]) -> Iterator[tuple[str, os.DirEntry[str] | BadEntry]]:
        """Keys and files, depth first. No recursion: a tree may be deeper than the interpreter's stack."""
        open_folders = [self._list("", (), skipped)]
        while open_folders:
            for key, entry, above in open_folders[-1]:
                if isinstance(entry, BadEntry):
                    yield key, entry
                elif is_hidden(entry.name):
                    skipped["hidden or system file"] += 1
                elif key.endswith("/"):
                    open_folders.append(self._list(key, above, skipped))
                    break
                elif entry.is_symlink() and not self._follow:
                    skipped["symbolic link (--follow-links takes them)"] += 1
                else:
                    yield key, entry
            else:
                open_folders.pop()

    def _list(
        self, folder: str, above: _Folders, skipped: Counter[str]
    ) -> Iterator[tuple[str, os.DirEntry[str] | BadEntry, _Folders]]:
        """What is in a folder, sub-folders sorted as if their names ended in "/": the byte order of whole paths."""
        try:
            path = self._path(folder)
            if self._follow:
                status = os.stat(path)
                if (status.st_dev, status.st_ino) in above:
                    skipped["link in a circle"] += 1
                    return
                above = (*above, (status.st_dev, status.st_ino))
            with os.scandir(path) as found:
                entries = [(folder + _text(e.name) + "/" * self._is_folder(e), e) for e in found]
        except OSError as error:
            yield folder, BadEntry(folder or ".", f"cannot list the folder: {error.strerror}"), above
            return
        for key, entry in sorted(entries, key=lambda pair: _raw(pair[0])):
            yield key, entry, above

    def _file(self, key: str, entry: os.DirEntry[str]) -> Iterator[_File | BadEntry]:
        try:
            status = entry.stat(follow_symlinks=self._follow)
        except OSError as error:
            yield BadEntry(key, f"cannot be read: {error.strerror}")
            return
        if not stat.S_ISREG(status.st_mode):
            self.skipped["not a regular file"] += 1
            return
        yield _File(key, self._labels.get(key.partition("/")[0], -1) if "/" in key else -1, status.st_size)

    def _path(self, key: str) -> str:
        return os.path.join(self.root, os.fsdecode(_raw(key)))

    def _read(self, file: _File) -> bytes:
        """The whole file. Opened so that a FIFO put in its place does not block and a link is not followed."""
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if not self._follow:
            flags |= getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(self._path(file.key), flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SkipEntry("not a regular file")
            if not is_image_name(file.key) and not magic(os.read(descriptor, MAGIC_BYTES)):
                raise SkipEntry("not an image")
            if status.st_size > MAX_IMAGE_BYTES:
                raise DecodeError(
                    f"{status.st_size} bytes, allowed are {MAX_IMAGE_BYTES}", path=self.root, key=file.key
                )
            os.lseek(descriptor, 0, os.SEEK_SET)
            data = _read_all(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        if len(data) != status.st_size:
            raise DecodeError(f"changed while it was read; it had {status.st_size} bytes", path=self.root, key=file.key)
        return data


def _read_all(descriptor: int, size: int) -> bytes:
    """Up to ``size`` + 1 bytes: one more than expected shows that the file has grown."""
    data = os.read(descriptor, size + 1)
    while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
        data += more
    return data


def _text(name: str) -> str:
    """A name as keys have it, whatever the locale's encoding: UTF-8, other bytes as surrogates."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


class FolderWriter(Target):
    """Writes each record to the file its key names, in a folder that gets its name when all are there.

    A file has no place for columns. A label is kept where the key lies in the folder of its class, as it does in what
    was packed from a folder; what is lost is in ``notes``.

    Args:
        path: a folder that does not exist, or is empty.
        columns: of the records.
        classes: each becomes a folder, if need be an empty one, where labels are kept.
        metadata: ignored.
        force: allowed, and without effect: a folder that holds something is never replaced.

    Raises:
        FileExistsError: the folder holds something.
        OSError: the folder above it is missing or read-only.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        super().__init__(os.fspath(path), columns)
        self._classes = tuple(classes)
        self._misplaced = 0
        self._tree = PendingTree(self.path)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    @property
    def notes(self) -> list[str]:
        lost = sorted(self._names - {"label"})
        notes = [f"files have no place for columns: lost are {', '.join(lost)}"] if lost else []
        if self._misplaced:
            notes.append(f"{self._misplaced} labels are lost: no class folder in the key tells them")
        elif self._count and list(self._classes) != sorted(self._classes, key=_raw):
            notes.append("class folders are numbered by their names; this set counted its classes otherwise")
        return notes

    def _append(self, data: bytes | memoryview, key: str, columns: dict[str, Any]) -> None:
        values = self._own(key, columns)
        if not is_safe_key(key):
            raise ConvertError(
                f"{self.path}: the key {key!r} is not a file name inside a folder; packfmt cat writes it"
            )
        self._tree.write(key, data)
        if "label" in values and not self._tells(key, values["label"]):
            self._misplaced += 1
        self._count += 1

    def close(self) -> None:
        try:
            self._tree.publish(self._classes if self._count and not self._misplaced else ())
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        self._tree.discard()

    def _tells(self, key: str, label: Any) -> bool:
        first, slash, _ = key.partition("/")
        try:
            return bool(slash) and 0 <= label < len(self._classes) and self._classes[label] == first
        except (TypeError, ValueError):  # a text, or a list
            return False
