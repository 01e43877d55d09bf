"""WebDataset shards and other tar archives of images, plain or compressed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from packfmt.errors import SourceError
from packfmt.images.sniff import magic
from packfmt.record import Column, Record
from packfmt.sources.base import BadEntry, Source
from packfmt.sources.inputs import (
    MAX_FOLDERS,
    MAX_IMAGE_BYTES,
    CountedNotes,
    FolderClasses,
    Inputs,
    SeenKeys,
    expand_inputs,
    is_hidden,
    is_image_name,
)
from packfmt.sources.tarparts import part_column, part_limit, part_value, split_name
from packfmt.sources.tarstream import TarMember, TarStream, is_tar

__all__ = ["TarSource", "recognise"]

_MAX_HELD = 10_000  # members of one sample
_PEEKED = 256  # members looked at to learn what a sample holds
_MAGIC_BYTES = 64


def recognise(path: str | os.PathLike[str]) -> str | None:
    """ "tar" where ``path`` (a file or a pattern) names a tar archive, judged by its first header; else None."""
    try:
        return "tar" if is_tar(expand_inputs(path)[0]) else None
    except (OSError, SourceError, ValueError):
        return None


@dataclass(slots=True)
class _Image:
    key: str
    sample: str
    stem: str
    data: bytes
    reason: str | None  # why it cannot be read
    parts: dict[str, bytes | str] = field(default_factory=dict)  # a str says why the part was not read


@dataclass(slots=True)
class _Part:
    stem: str
    sample: str
    extension: str  # after the sample's first dot
    content: bytes | str


class TarSource(Source):
    """Images in tar shards, with what stands beside them.

    Members that share their path up to the first dot of the file name are one sample, as in WebDataset. Each image
    of a sample is a record under its own full path, so nothing merges, whatever dots the names hold. A part with the
    image's own stem (``x.1.json`` for ``x.1.jpg``) belongs to that image alone; any other part to every image of the
    sample.

    Columns are those of the first sample: ``.cls`` is ``label``, ``.json``, ``.txt`` and ``.npy`` keep their
    extension as name. A later sample that lacks one is a bad entry; parts with other extensions are counted in
    ``notes`` and lost, and nothing is unpickled. Without parts, labels come from class folders (``cat/1.jpg``), for
    which the headers of all shards are read once beforehand.

    Memory: one sample, and up to 64 bytes a record to find duplicate names.

    Args:
        paths: a tar file, a brace or glob pattern, or a list of them.

    Raises:
        FileNotFoundError: a shard is missing.
        SourceError: a shard is damaged or cut short, or no image is in the first one; later, two images of one name.
    """

    kind = "tar"

    def __init__(self, paths: Inputs) -> None:
        super().__init__()
        self._paths = expand_inputs(paths)
        self._folders: FolderClasses | None = None
        self._counted = CountedNotes(self.notes)
        self._parts: dict[str, Column] = {}
        self._lost: list[str] = []
        self._declare()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"shards": len(self._paths), "lost": self._lost}

    def entries(self) -> Iterator[Record | BadEntry]:
        self.skipped.clear()
        self._counted.clear()
        seen = SeenKeys()
        for number, path in enumerate(self._paths):
            with TarStream(path) as stream:
                for image in self._images(stream):
                    earlier = seen.add(image.key, number)
                    if earlier is not None:
                        raise SourceError(
                            f"{self._paths[earlier]} and {path} both hold {image.key!r}; keys must differ. Rename "
                            "one, or "
                            "convert the shards one by one"
                            if earlier != number
                            else f"{path} holds {image.key!r} twice; keys must differ. Repack the archive"
                        )
                    yield self._finish(image)

    def _images(self, stream: TarStream) -> Iterator[_Image]:
        """The images of one archive with their parts; an image is held only while parts may still come."""
        held: list[_Image | _Part] = []
        size = 0
        for item in self._items(stream):
            if held and held[0].sample != item.sample:
                yield from self._close_sample(held)
                held, size = [], 0
            elif held and held[-1].stem != item.stem:
                ready = self._complete(held)
                yield from ready
                if ready:
                    held = [kept for kept in held if kept.stem != ready[0].stem]
                    size = sum(_size(kept) for kept in held)
            held.append(item)
            size += _size(item)
            if size > 2 * MAX_IMAGE_BYTES or len(held) > _MAX_HELD:
                raise SourceError(
                    f"{stream.path}: sample {item.sample!r} has over {len(held) - 1} members or {size} bytes; "
                    f"at most {_MAX_HELD} and {2 * MAX_IMAGE_BYTES} are held"
                )
        yield from self._close_sample(held)

    def _complete(self, held: Sequence[_Image | _Part]) -> list[_Image]:
        """The images of the last stem, where that stem alone gives them every declared part."""
        stem = held[-1].stem
        members = [item for item in held if item.stem == stem]
        parts = {_own_name(item): item for item in members if isinstance(item, _Part)}
        if not self._parts.keys() <= parts.keys():
            return []
        images = [item for item in members if isinstance(item, _Image)]
        if images:
            self._attach(images, list(parts.values()))
        return images

    def _close_sample(self, held: Sequence[_Image | _Part]) -> list[_Image]:
        images = [item for item in held if isinstance(item, _Image)]
        parts = [item for item in held if isinstance(item, _Part)]
        if len(images) > 1 and parts:
            self._counted.add("samples hold several images; each image is a record of its own")
        if not images and parts:
            self._counted.add("samples hold no image; their parts are lost")
        self._attach(images, parts)
        return images

    def _attach(self, images: Sequence[_Image], parts: Sequence[_Part]) -> None:
        stems = {image.stem for image in images}
        for part in parts:
            own = part.stem in stems
            name = _own_name(part) if own else part.extension
            if name not in self._parts and images:
                self._counted.add(f"parts .{_plain(name)} are lost")
            for image in images:
                if not own or image.stem == part.stem:
                    image.parts.setdefault(name, part.content)

    def _items(self, stream: TarStream) -> Iterator[_Image | _Part]:
        """Members that matter, read."""
        for member in stream.members():
            if member.kind == "folder":
                continue
            if is_hidden(member.name):
                self.skipped["hidden or system file"] += 1
            elif member.kind != "file":
                if is_image_name(member.name):
                    yield _image(member, b"", f"a {member.kind}, which has no content of its own in the archive")
                else:
                    self.skipped[f"a {member.kind}"] += 1
            else:
                item = self._item(stream, member)
                if item is not None:
                    yield item

    def _item(self, stream: TarStream, member: TarMember) -> _Image | _Part | None:
        sample, stem, extension = split_name(member.name)
        limit = part_limit(extension)
        if limit is not None:
            if member.size > limit:
                return _Part(stem, sample, extension, f"{member.size} bytes; at most {limit} are read")
            return _Part(stem, sample, extension, stream.read(limit))
        head = stream.read(_MAGIC_BYTES)
        known = bool(magic(head))
        if not known and not is_image_name(member.name):
            if extension:
                self._counted.add(f"parts .{_plain(extension)} are lost")
            else:
                self.skipped["not an image"] += 1
            return None
        if member.size > MAX_IMAGE_BYTES:
            return _image(member, b"", f"{member.size} bytes; at most {MAX_IMAGE_BYTES} are read")
        return _image(member, head + stream.read(MAX_IMAGE_BYTES), None)

    def _finish(self, image: _Image) -> Record | BadEntry:
        columns: dict[str, Any] = {}
        reason = image.reason
        for name, column in self._parts.items():
            content = image.parts.get(name)
            try:
                if not isinstance(content, bytes):
                    raise ValueError(content or "missing, though the first sample has it")
                columns[column.name] = part_value(column, content)
            except ValueError as error:
                reason = reason or f"part .{name}: {error}"
        if self._folders is not None:
            label = self._folders.label(image.key)
            if label is None:
                reason = reason or "lies beside the class folders and has no class"
            else:
                columns["label"] = label
        if reason is None:
            return Record(image.data, image.key, columns)
        if len(columns) < len(self.columns):  # no pack can hold it without them
            return BadEntry(image.key, reason)
        return BadEntry(image.key, reason, image.data or None, columns)

    def _declare(self) -> None:
        """Learn the columns from the first sample that holds an image."""
        first = self._first_sample()
        images = [item for item in first if isinstance(item, _Image)]
        parts = [item for item in first if isinstance(item, _Part)]
        if not images:
            raise SourceError(f"{self._paths[0]}: no image in the first {_PEEKED} members; nothing to take from it")
        self._attach(images, parts)
        for name, content in images[0].parts.items():
            column = part_column(name, content) if isinstance(content, bytes) else None
            if column is not None:
                self._parts[name] = column
            else:
                self._lost.append(name)
        self.columns = tuple(self._parts.values())
        self._counted.clear()
        self.skipped.clear()
        if not self._parts and "/" in images[0].key:
            self._read_folders()

    def _first_sample(self) -> list[_Image | _Part]:
        sample: list[_Image | _Part] = []
        with TarStream(self._paths[0]) as stream:
            for number, item in enumerate(self._items(stream)):
                if sample and sample[0].sample != item.sample:
                    if any(isinstance(kept, _Image) for kept in sample):
                        break
                    sample = []
                if number >= _PEEKED:
                    # A stem that is cut in two would show parts without their image.
                    return [kept for kept in sample if kept.stem != item.stem]
                sample.append(item)
        return sample

    def _read_folders(self) -> None:
        images: set[str] = set()
        folders: set[str] = set()
        for path in self._paths:
            with TarStream(path) as stream:
                for member in stream.members():
                    if is_hidden(member.name):
                        continue
                    if member.kind == "folder":
                        folders.add(member.name)
                    elif is_image_name(member.name):
                        images.add(member.name.rpartition("/")[0])
                    if len(images) + len(folders) > MAX_FOLDERS:
                        raise SourceError(f"{path}: more than {MAX_FOLDERS} folders")
        classes = FolderClasses(images, folders)
        if classes.names:
            self._folders, self.classes, self.columns = classes, classes.names, (Column("label", "<i8"),)


def _image(member: TarMember, data: bytes, reason: str | None) -> _Image:
    sample, stem, _ = split_name(member.name)
    return _Image(member.name, sample, stem, data, reason)


def _own_name(part: _Part) -> str:
    return part.extension.rpartition(".")[2]


def _size(item: _Image | _Part) -> int:
    return len(item.data if isinstance(item, _Image) else item.content)


def _plain(extension: str) -> str:
    """The last piece of an extension, or "other": so that odd names make no endless list of notes."""
    last = extension.rpartition(".")[2]
    return last if last.isalnum() and not last.isdigit() and len(last) <= 8 else "other"
