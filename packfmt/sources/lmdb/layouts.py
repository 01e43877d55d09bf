"""Layouts of image databases whose values are the image files themselves, distinguished by their keys."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from packfmt.errors import DecodeError, SourceError
from packfmt.images.sniff import sniff
from packfmt.record import Column, text_column
from packfmt.sources.isolated.frames import Item
from packfmt.sources.lmdb.table import Table, key_text

__all__ = [
    "META_KEYS",
    "ImagesByKey",
    "Layout",
    "Progressive",
    "TextRecognition",
    "numbered",
    "plain_int",
]


# Keys under which writers keep facts about the whole set.
META_KEYS = frozenset([b"__keys__", b"__len__", b"num-samples", b"num_samples", b"length", b"keys", b"total_number"])


class Layout(ABC):
    """One way to keep images in a database.

    Attributes:
        name: what a person calls it.
        columns: what each record has.
        lost: names of what the first records hold and no column keeps.
        notes: complete once the items are through; likewise ``skipped``.
        verbatim: whether every value is an image file as it stands.
        side_texts: whether texts may lie beside the images, to be passed over.
    """

    name = ""
    verbatim = False
    side_texts = False

    def __init__(self, table: Table) -> None:
        self.table = table
        self.columns: list[Column] = []
        self.lost: list[str] = []
        self.notes: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.found = 0

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """The records in order; the buffers are views of the file."""

    def located(self) -> bool:
        """Whether the parent can read the values where they lie in the file."""
        entry = self.table.last()
        return entry is not None and self.table.offset(entry[1]) is not None

    def count(self) -> int | None:
        """The number of records where it is known."""
        return None

    def item(self, key: bytes, value: memoryview, columns: tuple[Any, ...] | None = None) -> Item:
        """The item of a value that is an image file, or should be: whether it is one is for the copy loop to tell."""
        return Item(key_text(key), value, columns, offset=self.table.offset(value))

    def note_count(self, key: bytes, stated: int | None, meaning: str) -> None:
        """Compare a stated count with what was found; the keys are right."""
        if self.table.get(key) is None:
            self.notes.append(
                f"{key.decode()} is missing, as after an interrupted writer; the {self.found} records there were read"
            )
        elif stated != self.found:
            said = "is not a number" if stated is None else f"says {stated}"
            self.notes.append(f"{key.decode()} {said}, but there are {self.found} {meaning}; the keys were trusted")


def plain_int(value: memoryview | None) -> int | None:
    """A count kept as ASCII digits, or None."""
    text = bytes(value[:32]) if value is not None else b""
    return int(text) if re.fullmatch(rb"\s*\d{1,18}\s*", text) else None


def numbered(table: Table) -> Iterator[tuple[bytes, memoryview]]:
    """Entries under numbers as keys, in the numbers' order, which is the order they were written in.

    Keys of other forms, and numbers beyond a gap wider than the set, come last, in key order. ``META_KEYS`` are left
    out.
    """
    limit = table.entries
    found = 0
    for number in range(limit):
        key = b"%d" % number
        if (value := table.get(key)) is not None:
            found += 1
            yield key, value
    if found + sum(table.get(key) is not None for key in META_KEYS) < limit:
        for key, value in table.scan():
            if key not in META_KEYS and not _was_numbered(key, limit):
                yield key, value


def _was_numbered(key: bytes, limit: int) -> bool:
    return re.fullmatch(rb"0|[1-9]\d{0,17}", key) is not None and int(key) < limit


class TextRecognition(Layout):
    """``image-%09d`` with ``label-%09d``; with ``image_hr-`` and ``image_lr-`` it is TextZoom: one of these is read."""

    verbatim = True

    def __init__(self, table: Table, prefix: bytes) -> None:
        super().__init__(table)
        self._prefix = prefix
        self.name = "text recognition" if prefix == b"image-" else "TextZoom"
        first = table.first(prefix)
        labelled = first is not None and table.get(b"label-" + first[0][len(prefix) :]) is not None
        self._labelled = labelled or (table.first(b"label-") or (b"", b""))[0].startswith(b"label-")
        if self._labelled:
            self.columns.append(text_column("label"))

    def count(self) -> int | None:
        """The stated number, where the number of entries bears it out."""
        stated = plain_int(self.table.get(b"num-samples"))
        kinds = 1 + self._labelled + (self.name == "TextZoom")
        return stated if stated is not None and stated * kinds + 1 == self.table.entries else None

    def items(self) -> Iterator[Item]:
        """Images in key order, each with its label."""
        labels = undecodable = 0
        for key, value in self.table.scan(self._prefix):
            if not key.startswith(self._prefix):
                break
            self.found += 1
            if not self._labelled:
                yield self.item(key, value)
                continue
            label = self.table.get(b"label-" + key[len(self._prefix) :])
            if label is None:
                yield Item(key_text(key), value, ("",), fault="has no label in the database")
                continue
            labels += 1
            text = bytes(label).decode("utf-8", "surrogateescape")
            undecodable += not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text)
            yield self.item(key, value, (text,))
        if undecodable:
            self.notes.append(f"{undecodable} labels are not UTF-8; their bytes are kept as they are")
        self.note_count(b"num-samples", plain_int(self.table.get(b"num-samples")), "images")
        self._note_rest(labels)

    def _note_rest(self, labels: int) -> None:
        known = self.found + labels + (self.table.get(b"num-samples") is not None)
        if self.name == "TextZoom":
            other = b"image_lr-" if self._prefix == b"image_hr-" else b"image_hr-"
            self.notes.append(
                f"each sample has two images; {self._prefix.decode()}* was read. Convert again with which="
                f"{other[6:8].decode()!r} for {other.decode()}*"
            )
        elif self.table.entries > known:
            self.notes.append(f"{self.table.entries - known} entries belong to no image and were not read")


class Progressive(Layout):
    """``<resolution>-<number>`` with ``length``: StyleGAN2 and diffusion autoencoders. One resolution is read."""

    name = "images by resolution"
    verbatim = True
    KEY = re.compile(rb"([1-9]\d{0,5})-(\d{5,})")

    @classmethod
    def fits(cls, table: Table, sample: Sequence[tuple[bytes, memoryview]]) -> bool:
        """Whether keys are resolutions and numbers, not clips and frames or dates.

        The count shows it. Where its writer was stopped before that, all keys have to look so, and an image has that
        size.
        """
        matches = [(cls.KEY.fullmatch(key), value) for key, value in sample]
        sized = [(int(match[1]), shape) for match, value in matches if match and (shape := shape_of(value))]
        if table.get(b"length") is not None:
            return bool(sized)
        return len(sized) == len(matches) and any(size in shape[:2] for size, shape in sized)

    def __init__(self, table: Table, resolution: int | None) -> None:
        super().__init__(table)
        sizes = self._sizes = list(self._resolutions())
        self._resolution = max(sizes) if resolution is None else resolution
        if self._resolution not in sizes:
            raise SourceError(
                f"no images of resolution {resolution}; choose one of {', '.join(map(str, sorted(sizes)))}"
            )
        if len(sizes) > 1:
            others = ", ".join(str(size) for size in sorted(sizes) if size != self._resolution)
            self.notes.append(f"resolution {self._resolution} was read; {others} are there too")

    def _resolutions(self) -> Iterator[int]:
        start = b"0"
        while (entry := self.table.first(start)) is not None and entry[0] < b":":
            match = self.KEY.fullmatch(entry[0])
            if match is None:
                start = entry[0] + b"\0"
                continue
            yield int(match[1])
            start = match[1] + b"."  # the character after "-"

    def items(self) -> Iterator[Item]:
        """Images of the one resolution, in key order."""
        prefix = b"%d-" % self._resolution
        for key, value in self.table.scan(prefix):
            if not key.startswith(prefix):
                break
            self.found += 1
            yield self.item(key, value)
        self.note_count(b"length", plain_int(self.table.get(b"length")), f"images of resolution {self._resolution}")
        self._note_rest()

    def _note_rest(self) -> None:
        others = 0
        for size in set(self._sizes) - {self._resolution}:
            for key, _ in self.table.scan(b"%d-" % size):
                if not key.startswith(b"%d-" % size):
                    break
                others += 1
        rest = self.table.entries - self.found - others - sum(self.table.get(key) is not None for key in META_KEYS)
        if rest > 0:
            self.notes.append(f"{rest} entries belong to no resolution and were not read")


class ImagesByKey(Layout):
    """Any key, image files as values: BasicSR (with ``meta_info.txt``), LSUN, imaginaire, NVAE."""

    verbatim = True
    side_texts = True

    def __init__(self, table: Table, keys: list[bytes]) -> None:
        super().__init__(table)
        self._meta = os.path.join(table.folder, "meta_info.txt")
        self._numbered = bool(keys) and all(re.fullmatch(rb"0|[1-9]\d{0,17}", key) for key in keys)
        if os.path.isfile(self._meta):
            self.name = "BasicSR"
        elif all(re.fullmatch(rb"[0-9a-f]{40}", key) for key in keys):
            self.name = "LSUN"
        elif any(b"/" in key for key in keys):
            self.name = "images by path"
        else:
            self.name = "images by number" if self._numbered else "images by key"

    def items(self) -> Iterator[Item]:
        """All values, in the numbers' or the keys' order."""
        stated = stated_sizes(self._meta, self.notes) if self.name == "BasicSR" else {}
        differing: list[str] = []
        for key, value in numbered(self.table) if self._numbered else self.table.scan():
            if key in META_KEYS:
                continue
            item = self.item(key, value)
            self.found += 1
            if stated and differs(stated.pop(item.key, None), shape_of(value)):
                differing.append(item.key)
            yield item
        self._note_meta(differing, stated)

    def _note_meta(self, differing: list[str], left: dict[str, tuple[int, int, int]]) -> None:
        if differing:
            self.notes.append(f"{len(differing)} images differ from meta_info.txt in size, first {differing[0]!r}")
        if left:
            self.notes.append(f"{len(left)} images of meta_info.txt are not there, first {next(iter(left))!r}")


_MAX_META_INFO = 1_000_000  # lines of a meta_info.txt that are checked


def differs(stated: tuple[int, int, int] | None, seen: tuple[int, int, int] | None) -> bool:
    return stated is not None and seen is not None and stated != seen


def shape_of(value: memoryview) -> tuple[int, int, int] | None:
    """(height, width, channels) as an image's header says, or None where it is damaged."""
    try:
        info = sniff(value)
    except DecodeError:
        return None
    return info.height, info.width, info.channels


def stated_sizes(path: str, notes: list[str]) -> dict[str, tuple[int, int, int]]:
    """The sizes that a meta_info.txt states, by key: lines as ``name.png (720,1280,3) 1``."""
    sizes: dict[str, tuple[int, int, int]] = {}
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(4096), b""):
            match = re.fullmatch(rb"(.+)\s\((\d{1,9}),\s?(\d{1,9})(?:,\s?(\d))?\)\s\S+\s*", line)
            if match is None:
                continue
            if len(sizes) >= _MAX_META_INFO:
                notes.append(f"only the first {_MAX_META_INFO} lines of meta_info.txt were compared")
                break
            name = key_text(os.path.splitext(match[1])[0])
            sizes[name] = (int(match[2]), int(match[3]), int(match[4] or 1))
    return sizes
