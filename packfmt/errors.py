"""The errors packfmt raises on its own account.

::

    PackfmtError
    ├── FormatError (also a ValueError)   not a pack, unknown version, sizes that do not add up
    ├── CorruptError                      bytes that do not match their checksum
    ├── DecodeError                       a record that is no decodable image
    ├── SourceError                       a source that cannot be read as asked
    └── ConvertError                      a conversion that cannot go on

The rest are builtins: ``IndexError``, ``FileNotFoundError``, ``FileExistsError``, ``OSError``, and ``ValueError`` or
``TypeError`` for arguments. Messages name the path, what was found, what was allowed, and what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ConvertError", "CorruptError", "DecodeError", "FormatError", "PackfmtError", "SourceError"]


class PackfmtError(Exception):
    """Base of all packfmt errors. Picklable, so that it crosses process borders whole."""


class FormatError(PackfmtError, ValueError):
    """The file is no pack, is of an unknown version, or its sizes do not add up."""


class _RecordError(PackfmtError):
    """An error about one record of one file.

    Args:
        message: what is wrong, without the place.
        path: the file, or None where none is known.
        index: the record's position in the file, or None.
        key: the record's key, or None.
    """

    def __init__(
        self, message: str, *, path: str | None = None, index: int | None = None, key: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.index = index
        self.key = key

    def __str__(self) -> str:
        place = [self.path] if self.path is not None else []
        if self.index is not None:
            place.append(f"record {self.index}")
        if self.key is not None:
            place.append(f"key {self.key!r}")
        return f"{', '.join(place)}: {self.message}" if place else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.path, self.index, self.key))


class CorruptError(_RecordError):
    """Bytes do not match their checksum, or an index entry points outside its file."""


class DecodeError(_RecordError):
    """A record's bytes are no image that the decoder accepts."""


class SourceError(PackfmtError):
    """A source cannot be read as asked: unknown layout, missing file, unusable option."""


class ConvertError(PackfmtError):
    """A conversion cannot go on."""


def _rebuild(
    kind: type[_RecordError], message: str, path: str | None, index: int | None, key: str | None
) -> _RecordError:
    return kind(message, path=path, index=index, key=key)
