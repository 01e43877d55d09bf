"""The members of a tar that matter, on their way to being records."""

from __future__ import annotations

from dataclasses import dataclass, field

from packfmt.sources.webdataset.parts import split_name

__all__ = ["Image", "Part", "plain_extension"]


@dataclass(slots=True)
class Image:
    """An image, and the parts that are its own.

    Args:
        key: the member's name.
        sample: the name up to the first dot of its last part.
        stem: the name up to its last dot.
        data: the bytes.
        reason: why it cannot be read, or None.
        parts: extension to content; a str says why the part was not read.
    """

    key: str
    sample: str
    stem: str
    data: bytes | memoryview
    reason: str | None
    parts: dict[str, bytes | str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, data: bytes | memoryview, reason: str | None) -> Image:
        """The image that is the member of this name."""
        sample, stem, _ = split_name(name)
        return cls(name, sample, stem, data, reason)

    @property
    def size(self) -> int:
        """Bytes held."""
        return len(self.data)


@dataclass(slots=True)
class Part:
    """What stands beside an image.

    Args:
        stem, sample: as of an image.
        extension: after the sample's first dot.
        content: the bytes, or why they were not read.
    """

    stem: str
    sample: str
    extension: str
    content: bytes | str

    @property
    def own_name(self) -> str:
        """The part's name where it belongs to the image of its stem alone."""
        return self.extension.rpartition(".")[2]

    @property
    def size(self) -> int:
        """Bytes held."""
        return len(self.content)


def plain_extension(extension: str) -> str:
    """The last piece of an extension, or "other": so that odd names make no endless list of notes."""
    last = extension.rpartition(".")[2]
    return last if last.isalnum() and not last.isdigit() and len(last) <= 8 else "other"
