"""A folder of images: one sub-folder per class, or flat."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packfmt.errors import DecodeError, SourceError
from packfmt.images.sniff import magic
from packfmt.record import Column, Record
from packfmt.sources.base import BadEntry, SkipEntry, Source
from packfmt.sources.inputs import is_hidden, is_image_name

__all__ = ["FolderSource"]

MAGIC_BYTES = 32  # what magic() looks at


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
        NotADirectoryError, FileNotFoundError: ``root`` is no folder.
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
        if not os.path.isdir(self.root):
            kind = NotADirectoryError if os.path.lexists(self.root) else FileNotFoundError
            raise kind(errno.ENOTDIR, "not a folder of images", self.root)
        found = self._class_folders() if labelled else ()
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise SourceError(f"{self.root}: class folders {unknown} are not among the given classes {self.classes}")
        self._labels = {name: label for label, name in enumerate(self.classes)} if found else {}
        if found:
            self.columns = (Column("label", "<i8"),)
        else:
            self.classes = ()

    def entries(self) -> Iterator[Any]:
        for found in self._walk("", count=False):
            if isinstance(found, _File) and self._labels and found.label < 0:
                yield BadEntry(found.key, "lies beside the class folders and has no class")
            else:
                yield found

    def load(self, entry: Any) -> Record:
        if isinstance(entry, BadEntry):
            raise DecodeError(entry.reason, path=self.root, key=entry.key)
        data = self._read(entry)
        return Record(data, entry.key, {"label": entry.label} if self._labels else {})

    def size(self, entry: Any) -> int:
        return entry.size if isinstance(entry, _File) else 0

    def count(self) -> int | None:
        return sum(1 for _ in self._walk("", count=True))

    def _class_folders(self) -> tuple[str, ...]:
        with os.scandir(self.root) as found:
            names = [e.name for e in found if not is_hidden(e.name) and self._is_folder(e)]
        return tuple(sorted(names, key=os.fsencode))

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        return entry.is_dir(follow_symlinks=self._follow)

    def _walk(self, prefix: str, *, count: bool, above: tuple[tuple[int, int], ...] = ()) -> Iterator[_File | BadEntry]:
        """Depth first, folders sorted as if their names ended in "/": the byte order of whole paths."""
        folder = os.path.join(self.root, prefix)
        try:
            if self._follow:
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in above:
                    self._skip("link in a circle", count)
                    return
                above = (*above, (status.st_dev, status.st_ino))
            with os.scandir(folder) as found:
                entries = [(os.fsencode(e.name) + (b"/" if self._is_folder(e) else b""), e) for e in found]
        except OSError as error:
            yield BadEntry(prefix or ".", f"cannot list the folder: {error.strerror}")
            return
        for sort_key, entry in sorted(entries, key=lambda pair: pair[0]):
            key = prefix + entry.name
            if is_hidden(entry.name):
                self._skip("hidden or system file", count)
            elif sort_key.endswith(b"/"):
                yield from self._walk(key + "/", count=count, above=above)
            elif entry.is_symlink() and not self._follow:
                self._skip("symbolic link (--follow-links takes them)", count)
            elif count:
                yield _File(key, 0, 0)
            else:
                yield from self._file(key, entry)

    def _file(self, key: str, entry: os.DirEntry[str]) -> Iterator[_File | BadEntry]:
        try:
            status = entry.stat(follow_symlinks=self._follow)
        except OSError as error:
            yield BadEntry(key, f"cannot be read: {error.strerror}")
            return
        if not stat.S_ISREG(status.st_mode):
            self._skip("not a regular file", False)
            return
        yield _File(key, self._labels.get(key.partition("/")[0], -1) if "/" in key else -1, status.st_size)

    def _skip(self, reason: str, count: bool) -> None:
        if not count:
            self.skipped[reason] += 1

    def _read(self, file: _File) -> bytes:
        """The whole file. Opened so that a FIFO put in its place does not block and a link is not followed."""
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if not self._follow:
            flags |= getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(os.path.join(self.root, file.key), flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SkipEntry("not a regular file")
            if not is_image_name(file.key) and not magic(os.pread(descriptor, MAGIC_BYTES, 0)):
                raise SkipEntry("not an image")
            data = _read_all(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        if len(data) != status.st_size:
            raise DecodeError(
                f"changed while it was read: {len(data)} bytes, was {status.st_size}", path=self.root, key=file.key
            )
        return data


def _read_all(descriptor: int, size: int) -> bytes:
    """Up to ``size`` + 1 bytes: one more than expected shows that the file has grown."""
    data = os.read(descriptor, size + 1)
    while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
        data += more
    return data
