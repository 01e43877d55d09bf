"""Reads the members of a tar archive in order, from a stream that is never sought.

The standard library's reader is not used because it takes a damaged header in mid-archive for the end, stops at the
first end marker whatever follows, and reads a name extension of any declared size into memory. Here each of them is
an error. Formats: POSIX ustar and pax (IEEE 1003.1), GNU long names and base-256 sizes.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

from packfmt.errors import SourceError

__all__ = ["TarMember", "TarStream", "is_tar"]

BLOCK = 512
MAX_EXTENSION = 1 << 20  # bytes of a long name or pax header
_PIECE = 1 << 20  # bytes read at a time; memory is never taken on the word of a header
_KINDS = {b"0": "file", b"\0": "file", b"7": "file", b"1": "link", b"2": "link", b"5": "folder", b"S": "sparse"}
_KINDS |= {b"3": "device", b"4": "device", b"6": "device"}
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class TarMember(NamedTuple):
    """One member's header.

    Args:
        name: the path as stored, without leading "./" and trailing "/"; surrogateescape for bytes that are no UTF-8.
        size: bytes of content that follow in the archive.
        kind: "file", "folder", "link", "device", "sparse" or "other".
    """

    name: str
    size: int
    kind: str


def is_tar(path: Path) -> bool:
    """Whether the file is a tar archive, plain or compressed, by its first header. Never raises for a foreign
    file."""
    try:
        with _open(path) as stream:
            block = stream.read(BLOCK)
    except _DAMAGE:
        return False
    return len(block) == BLOCK and any(block) and _sum_matches(block)


def _open(path: Path) -> IO[bytes]:
    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if magic.startswith(b"BZh"):
        return bz2.open(path, "rb")
    if magic == b"\xfd7zXZ\x00":
        return lzma.open(path, "rb")
    return open(path, "rb")


class TarStream:
    """The members of one archive. One thread only.

    Args:
        path: a tar file, plain or compressed with gzip, bzip2 or xz (told by its first bytes).

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = _open(path)
        plain = not isinstance(self._stream, (gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile))
        self._left = os.path.getsize(path) if plain else None
        self._unread = 0  # of the current member, its padding included
        self._content = 0  # of the current member, without it
        self._offset = 0

    def members(self) -> Iterator[TarMember]:
        """Yield the members in order; ``read`` gives the content of the last one yielded.

        Raises:
            SourceError: the archive is cut short, a header is damaged, or data follows the end marker.
        """
        extended: dict[str, str] = {}
        while True:
            if self._content:
                self._skip(self._content)
            header = self._header(self._unread)
            if not any(header):
                self._check_end()
                return
            kind = header[156:157]
            size = self._size(header)
            if kind in (b"L", b"K", b"x", b"g"):
                extended |= self._extension(kind, size)
                continue
            if "size" in extended:
                size = self._pax_size(extended["size"])
            member = TarMember(self._name(header, extended), size, self._kind(kind, header, extended))
            if kind == b"S":
                self._skip_sparse_map(header)
            self._enter(0 if member.kind in ("link", "device", "folder") else size, member.name)
            extended = {}
            yield member

    def read(self, limit: int) -> bytes:
        """The current member's content, whole where it has at most ``limit`` bytes, else its first ``limit`` bytes.

        Raises:
            SourceError: the archive ends inside it.
        """
        wanted = min(limit, self._content)
        pieces = []
        while wanted:
            piece = self._some(min(wanted, _PIECE), "a member")
            pieces.append(piece)
            wanted -= len(piece)
            self._content -= len(piece)
            self._unread -= len(piece)
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]

    def close(self) -> None:
        """Close the file. Calling it twice is allowed."""
        self._stream.close()

    def __enter__(self) -> TarStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _enter(self, size: int, name: str) -> None:
        padded = -(-size // BLOCK) * BLOCK
        if self._left is not None and size > self._left:
            raise self._error(f"member {name!r} declares {size} bytes and {self._left} are left: it is cut short")
        self._content, self._unread = size, padded

    def _extension(self, kind: bytes, size: int) -> dict[str, str]:
        if size > MAX_EXTENSION:
            raise self._error(f"a header extension of {size} bytes; at most {MAX_EXTENSION} are accepted")
        self._enter(size, "header extension")
        data = self.read(size)
        if kind == b"L":
            return {"path": _text(data.split(b"\0", 1)[0])}
        if kind in (b"K", b"g"):
            return {}  # link targets and whole-archive defaults say nothing about contents
        return self._pax(data)

    def _pax(self, data: bytes) -> dict[str, str]:
        found: dict[str, str] = {}
        while data.rstrip(b"\0"):
            digits, space, _ = data.partition(b" ")
            if not space or not digits.isdigit() or len(digits) > 8 or not len(digits) + 2 < int(digits) <= len(data):
                raise self._error("a damaged pax header")
            line, data = data[len(digits) + 1 : int(digits) - 1], data[int(digits) :]
            name, _, value = line.partition(b"=")
            found[_text(name)] = _text(value)
        return found

    def _pax_size(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            raise self._error(f"a pax header with size {text[:40]!r}")
        return int(text)

    def _name(self, header: bytes, extended: dict[str, str]) -> str:
        name = extended.get("GNU.sparse.name") or extended.get("path") if extended else None
        if name is None:
            short = header[:100].partition(b"\0")[0]
            if header[345] and header[257:263] == b"ustar\0":
                short = header[345:500].partition(b"\0")[0] + b"/" + short
            name = _text(short)
        while name.startswith("./"):
            name = name[2:].lstrip("/")
        return name.rstrip("/")

    def _kind(self, kind: bytes, header: bytes, extended: dict[str, str]) -> str:
        if kind == b"0" and not extended:
            return "file"
        if extended and any(name.startswith("GNU.sparse.") for name in extended):
            return "sparse"
        if kind == b"\0" and header[:100].split(b"\0", 1)[0].endswith(b"/"):
            return "folder"
        return _KINDS.get(kind, "other")

    def _size(self, header: bytes) -> int:
        if not _sum_matches(header):
            raise self._error("a damaged header (its checksum does not match)")
        field = header[124:136]
        if field[0] & 0x80:
            size = int.from_bytes(field[1:], "big")
            if field[0] != 0x80 or size >= 1 << 63:
                raise self._error("a header with an impossible size")
            return size
        digits = field.strip(b" \0")
        if digits.strip(b"01234567"):
            raise self._error(f"a header with size {digits!r}")
        return int(digits or b"0", 8)

    def _skip_sparse_map(self, header: bytes) -> None:
        more = header[482]
        while more:
            more = self._exact(BLOCK, "a sparse map")[504]

    def _check_end(self) -> None:
        while piece := self._some(_PIECE, "the end marker", ended=True):
            if piece.count(0) != len(piece):
                raise self._error(
                    "data after the end marker (archives joined with cat?); it would be lost. Split it, or join "
                    "with tar -A"
                )

    def _skip(self, count: int) -> None:
        while count:
            done = len(self._some(min(count, _PIECE), "a member"))
            count -= done
            self._unread -= done

    def _header(self, padding: int) -> bytes:
        """The next header, behind what is left of the member before it: one read for both."""
        data = self._some(padding + BLOCK, "a member", ended=not padding)
        while len(data) < padding:
            data += self._some(padding + BLOCK - len(data), "a member")
        self._unread = self._content = 0
        return self._exact(BLOCK, "a header", data[padding:])

    def _exact(self, count: int, what: str, data: bytes = b"") -> bytes:
        while len(data) < count:
            piece = self._some(count - len(data), what, ended=not data)
            if not piece:
                raise self._error(
                    "no end marker: the archive is cut short, or its writer did not close it. If it is known to be "
                    "whole, "
                    "append 1024 zero bytes"
                )
            data += piece
        return data

    def _some(self, count: int, what: str, *, ended: bool = False) -> bytes:
        """Between one and ``count`` bytes; none at the end of the file where ``ended`` allows it."""
        try:
            data = self._stream.read(count)
        except _DAMAGE as error:
            raise self._error(f"cannot be read on ({error}): the archive is damaged or cut short") from error
        if not data and not ended:
            raise self._error(f"the archive ends inside {what}: it is cut short")
        self._offset += len(data)
        if self._left is not None:
            self._left -= len(data)
        return data

    def _error(self, what: str) -> SourceError:
        return SourceError(f"{self.path}, at byte {self._offset}: {what}")


def _sum_matches(header: bytes) -> bool:
    digits = header[148:156].strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        return False
    # The sum counts as blanks in itself. The low half of an Adler-32 is one more than the bytes' sum, modulo 65521: ten
    # times as quick as summing in Python, and blind only to a difference of exactly that.
    total = int(digits, 8) - 8 * ord(" ") + sum(header[148:156])
    if (zlib.adler32(header) & 0xFFFF) == (total + 1) % 65521:
        return True
    # Some old writers summed signed bytes.
    return total == sum(header) - 256 * sum(byte > 127 for byte in header[:148] + header[156:])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
