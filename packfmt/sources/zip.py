"""Zip archives of images: class folders or flat, read as a folder would be."""

from __future__ import annotations

import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from packfmt.errors import DecodeError, SourceError
from packfmt.images.sniff import magic
from packfmt.record import LABEL, Record
from packfmt.sources.base import SkipEntry, Source
from packfmt.sources.inputs import MAX_IMAGE_BYTES, NO_CLASS, FolderClasses, Probe, SeenKeys, is_hidden, is_image_name

__all__ = ["ZipSource", "recognise"]

# Images hardly compress; deflate itself ends at 1,032 to 1. Small members may be anything: they cost little.
MAX_RATIO = 200
_FREE_BYTES = 1 << 20
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, OSError, RuntimeError)


def recognise(probe: Probe) -> bool:
    """Whether the file starts as a zip archive does and ends in its directory."""
    return probe.head.startswith(b"PK") and zipfile.is_zipfile(probe.first)


class ZipSource(Source):
    """Images in a zip archive.

    Names are keys only: none is opened or created as a path. Class folders (``cat/1.jpg``, and ``cat\\1.jpg`` where no
    name holds a slash) give ``label``. Hidden members, ``__MACOSX`` and files that are not images are passed over and
    counted. A member that is encrypted, fails its CRC-32, or unpacks to more than 256 MiB or more than 200 times its
    packed size is a bad entry.

    ``load`` is thread-safe. Memory: the archive's directory, about half a KiB a member, as the standard library
    reads it.

    Args:
        path: the archive.

    Raises:
        FileNotFoundError: there is no such file.
        SourceError: it is not a zip archive, is cut short, or holds two members of one name.
    """

    kind = "zip"
    random_access = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = os.fspath(path)
        try:
            self._archive = zipfile.ZipFile(self._path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise SourceError(
                f"{self._path} is not a whole zip archive ({error}); its directory stands at the end, so a cut file "
                "has none"
            ) from error
        self._backslashes = self._parted_by_backslashes()
        self._members = [member for member in self._archive.infolist() if not self._key(member).endswith("/")]
        self._check_names()
        keys = map(self._key, self._archive.infolist())
        self._folders = FolderClasses.of_members(((key.rstrip("/"), key.endswith("/")) for key in keys), self._path)
        self.classes = self._folders.names
        if self.classes:
            self.columns = (LABEL,)

    def entries(self) -> Iterator[zipfile.ZipInfo]:
        self.skipped.clear()
        for member in self._members:
            if is_hidden(self._key(member)):
                self.skipped["hidden or system file"] += 1
            else:
                yield member

    def _load(self, entry: Any) -> Record:
        member: zipfile.ZipInfo = entry
        key = self._key(member)
        self._refuse(member, key)
        data = self._read(member, key)
        if not is_image_name(key) and not magic(data):
            raise SkipEntry("not an image")
        if not self.classes:
            return Record(data, key)
        label = self._folders.label(key)
        if label is None:
            raise DecodeError(NO_CLASS, path=self._path, key=key)
        return Record(data, key, {"label": label})

    def size(self, entry: Any) -> int:
        return min(entry.file_size, MAX_IMAGE_BYTES) if isinstance(entry, zipfile.ZipInfo) else 0

    def close(self) -> None:
        self._archive.close()

    def _key(self, member: zipfile.ZipInfo) -> str:
        name = _name(member)
        return name.replace("\\", "/") if self._backslashes else name

    def _parted_by_backslashes(self) -> bool:
        """Whether backslashes stand for "/", as old .NET programs wrote them, and a note where there are any."""
        names = [_name(member) for member in self._archive.infolist()]
        count = sum("\\" in name for name in names)
        parted = count > 0 and not any("/" in name for name in names) and all(map(_can_part, names))
        if count:
            taken = "read as / between folders" if parted else "kept as part of the name"
            self.notes.append(f"{count} members have backslashes in their names; they are {taken}")
        return parted

    def _check_names(self) -> None:
        seen = SeenKeys()
        for key in map(self._key, self._members):
            if seen.add(key, 0) is not None:
                raise SourceError(f"{self._path} holds two members named {key!r}; keys must differ. Repack the archive")

    def _refuse(self, member: zipfile.ZipInfo, key: str) -> None:
        reason = None
        if member.flag_bits & 1:
            reason = "encrypted; unpack the archive with its password first"
        elif member.file_size > MAX_IMAGE_BYTES:
            reason = f"{member.file_size} bytes unpacked; at most {MAX_IMAGE_BYTES} are read"
        elif member.file_size > max(_FREE_BYTES, MAX_RATIO * member.compress_size):
            reason = (
                f"unpacks {member.compress_size} bytes to {member.file_size}; more than {MAX_RATIO} times is refused"
            )
        if reason is not None:
            raise DecodeError(reason, path=self._path, key=key)

    def _read(self, member: zipfile.ZipInfo, key: str) -> bytes:
        try:
            with self._archive.open(member) as stream:
                data = stream.read(member.file_size)
                stream.read(1)  # reaching the end is what checks the CRC
        except _DAMAGE as error:
            raise DecodeError(f"cannot be unpacked: {error}", path=self._path, key=key) from error
        if len(data) != member.file_size:
            raise DecodeError(f"{len(data)} bytes; the directory says {member.file_size}", path=self._path, key=key)
        return data


def _name(member: zipfile.ZipInfo) -> str:
    """The member's name: that of a Unicode path field that belongs to it, else the stored one.

    Without the UTF-8 flag the stored one is taken as the bytes it is, which are UTF-8 in most archives. Not
    ``filename``: from Python 3.13 on that is the field's name already.
    """
    flagged = member.flag_bits & 0x800
    stored = member.orig_filename.encode("utf-8" if flagged else "cp437", "surrogateescape")
    name = _unicode_path(member.extra, zlib.crc32(stored)) or stored.decode("utf-8", "surrogateescape")
    return name.partition("\0")[0]


def _unicode_path(extra: bytes, crc: int) -> str | None:
    """The name that a field 0x7075 holds for the stored name of this CRC-32; None where there is none, or damaged."""
    found = None
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == 0x7075 and len(field) == size > 5 and struct.unpack_from("<BL", field) == (1, crc):
            with suppress(UnicodeDecodeError):
                found = field[5:].decode("utf-8")
    return found


def _can_part(name: str) -> bool:
    """Whether backslashes in a name can be taken for "/" without making it lead elsewhere."""
    parts = name.removesuffix("\\").split("\\")
    return ":" not in name and not any(part in ("", ".", "..") for part in parts)
