"""WebDataset shards and other tar archives of images, plain or compressed.

The parts that stand beside an image in a sample become columns; their values are checked.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packfmt.bounded_json import MAX_BYTES, RECORD, parse_json
from packfmt.errors import SourceError
from packfmt.images.sniff import magic
from packfmt.record import LABEL, Column, Record, infer_column, text_column
from packfmt.sources.base import BadEntry, Source
from packfmt.sources.columns import TAR_MEMBER, PackSchema, from_json
from packfmt.sources.inputs import (
    MAX_IMAGE_BYTES,
    NO_CLASS,
    CountedNotes,
    FolderClasses,
    Inputs,
    Probe,
    SeenKeys,
    expand_inputs,
    is_hidden,
    is_image_name,
)
from packfmt.sources.webdataset.stream import TarMember, TarStream, is_tar

__all__ = ["TarSource", "recognise", "schema_parts"]

MAX_PART_BYTES = 16 << 20  # of a text or JSON part
_MAX_NUMBER = 64  # bytes of a .cls part
_MAX_NPY = 64 << 20
_LIMITS = {"cls": _MAX_NUMBER, "json": MAX_PART_BYTES, "txt": MAX_PART_BYTES, "npy": _MAX_NPY}
_INTEGER = re.compile(r"[+-]?\d{1,18}")


class PartError(ValueError):
    """A part that is not what its column declares."""


def split_name(name: str) -> tuple[str, str, str]:
    """Cut a member's path as WebDataset does and as file systems do.

    Returns:
        the path up to the first dot of its last part (the sample), the path up to the last dot (the stem), and the
        extension after the sample's dot, in lower case: ``a.b/x.left.JPG`` gives ``a.b/x``, ``a.b/x.left``,
        ``left.jpg``.
    """
    folder, slash, base = name.rpartition("/")
    # A leading dot does not start an extension.
    shift = len(base) - len(base.lstrip(".")) if base[:1] == "." else 0
    first, last = base.find(".", shift), base.rfind(".")
    if first < 0:
        return name, name, ""
    front = folder + slash
    return front + base[:first], front + base[:last], base[first + 1 :].lower()


def part_limit(extension: str) -> int | None:
    """The most bytes a part of this extension may have; None for one that becomes no column."""
    return _LIMITS.get(extension.rpartition(".")[2])


def part_column(extension: str, data: bytes) -> Column | None:
    """The column for parts like this one, or None where its content fits none.

    ``.cls`` becomes ``label`` (int64) where it is an integer, else text; ``.json`` and ``.txt`` text; ``.npy`` an
    array whose first axis may differ from sample to sample.
    """
    kind = extension.rpartition(".")[2]
    if kind == "cls" and _integer(data) is not None:
        return Column("label" if extension == "cls" else extension, "<i8")
    if kind != "npy":
        return text_column(extension)
    try:
        return infer_column(extension, npy_array(data))
    except (TypeError, ValueError):
        return None


def part_value(column: Column, data: bytes) -> Any:
    """The value of a part in ``column``.

    Raises:
        PartError: the content does not fit the column.
    """
    if column.kind == "text":
        return data.decode("utf-8", "surrogateescape")
    if not column.shape and (number := _integer(data)) is not None:
        return number
    if not data.startswith(b"\x93NUMPY"):
        raise PartError(f"{data[:40]!r} is not an integer" if not column.shape else "not a .npy file")
    array = npy_array(data)
    inner = array.shape[1:] if array.ndim else ()
    expected = column.shape[1:]
    if array.dtype.str != column.dtype or array.ndim != len(column.shape) or inner != expected:
        raise PartError(f"an array {array.dtype.str} {array.shape}; the first sample has {column.dtype} {column.shape}")
    return array


def npy_array(data: bytes) -> np.ndarray[Any, Any]:
    """The array in a .npy file, little-endian. Its size is checked against the bytes there are; objects are refused.

    Raises:
        PartError: the header is damaged, the content has another size than it declares, or the type holds no plain
            numbers (an object array is a pickle: it is not loaded).
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise PartError(f".npy version {version}; 1.0 and 2.0 are read")
    except PartError:
        raise
    except Exception as error:  # numpy's header parser raises many kinds on hostile text
        raise PartError(f"a damaged .npy header ({error})") from error
    if dtype.hasobject or dtype.kind not in "biuf":
        raise PartError(f"a .npy array of type {dtype}, which holds no plain numbers; it is not loaded")
    count = 1
    for size in shape:
        if not isinstance(size, int) or size < 0:
            raise PartError(f"a .npy array of shape {shape}")
        count *= size
    content = memoryview(data)[stream.tell() :]
    if count * dtype.itemsize != len(content):
        raise PartError(f"a .npy array {dtype} {shape} needs {count * dtype.itemsize} bytes and has {len(content)}")
    flat = np.frombuffer(content, dtype).astype(dtype.newbyteorder("<"))
    return flat.reshape(shape, order="F" if fortran else "C")


def _integer(data: bytes) -> int | None:
    text = data.decode("ascii", "replace").strip()
    return int(text) if _INTEGER.fullmatch(text) else None


def schema_parts(schema: PackSchema) -> dict[str, Column]:
    """The parts in which packfmt keeps these columns: an integer ``label`` as ``.cls``, all else in one ``.json``."""
    parts = {}
    for column in filter(_is_cls, schema.columns):
        parts["cls"] = column
    if len(parts) < len(schema.columns):
        parts["json"] = text_column("json")
    return parts


def schema_values(schema: PackSchema, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that packfmt kept in these parts.

    Args:
        schema: what the columns are.
        parts: column of ``schema_parts`` to value; one that was not read is missing.

    Raises:
        ValueError: a part is missing or does not fit.
    """
    try:
        body = parse_json(parts.get("json", "{}").encode(), RECORD)
    except (ValueError, RecursionError) as error:
        raise PartError(f"not JSON ({error})") from error
    values = {"label": parts["label"]} if "label" in parts else {}
    for column in schema.columns:
        if not _is_cls(column):
            if not isinstance(body, dict) or column.name not in body:
                raise PartError(f"column {column.name!r} is missing")
            values[column.name] = from_json(column, body[column.name])
    return values


def _is_cls(column: Column) -> bool:
    return column.name == "label" and column.shape == () and column.dtype[1] in "iu"


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
        """Bytes in memory."""
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
        """Bytes in memory."""
        return len(self.content)


def plain_extension(extension: str) -> str:
    """The last piece of an extension, or "other": so that odd names make no endless list of notes."""
    last = extension.rpartition(".")[2]
    return last if last.isalnum() and not last.isdigit() and len(last) <= 8 else "other"


_MAX_MEMBERS = 10_000  # members of one sample
_PEEKED = 256  # members looked at to learn what a sample holds
_MAGIC_BYTES = 64


def recognise(probe: Probe) -> bool:
    """Whether the (first) file is a tar archive, plain or compressed, by its first header."""
    return is_tar(probe.first, probe.head)


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

    Shards that packfmt wrote begin with a member that tells columns, classes and metadata (``PackSchema``); there,
    every other member that is neither label nor JSON is an image.

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
        self._schema: PackSchema | None = None
        self._declared = False
        self._lost: list[str] = []  # counted in ``notes`` too, so not in ``lost``
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
                            "one, or convert the shards one by one"
                            if earlier != number
                            else f"{path} holds {image.key!r} twice; keys must differ. Repack the archive"
                        )
                    yield self._finish(image)

    def _images(self, stream: TarStream) -> Iterator[Image]:
        """The images of one archive with their parts; an image waits only while parts may still come."""
        waiting: list[Image | Part] = []
        size = 0
        for item in self._items(stream):
            if waiting and waiting[0].sample != item.sample:
                yield from self._close_sample(waiting)
                waiting, size = [], 0
            elif waiting and waiting[-1].stem != item.stem:
                ready = self._complete(waiting)
                yield from ready
                if ready:
                    waiting = [kept for kept in waiting if kept.stem != ready[0].stem]
                    size = sum(kept.size for kept in waiting)
            waiting.append(item)
            size += item.size
            if size > 2 * MAX_IMAGE_BYTES or len(waiting) > _MAX_MEMBERS:
                raise SourceError(
                    f"{stream.path}: sample {item.sample!r} has over {len(waiting) - 1} members or {size} bytes; "
                    f"at most {_MAX_MEMBERS} and {2 * MAX_IMAGE_BYTES} are kept in memory"
                )
        yield from self._close_sample(waiting)

    def _complete(self, waiting: Sequence[Image | Part]) -> list[Image]:
        """The images of the last stem, where that stem alone gives them every declared part."""
        stem = waiting[-1].stem
        members = [item for item in waiting if item.stem == stem]
        parts = {item.own_name: item for item in members if isinstance(item, Part)}
        if not self._parts.keys() <= parts.keys():
            return []
        images = [item for item in members if isinstance(item, Image)]
        if images:
            self._attach(images, list(parts.values()))
        return images

    def _close_sample(self, waiting: Sequence[Image | Part]) -> list[Image]:
        images = [item for item in waiting if isinstance(item, Image)]
        parts = [item for item in waiting if isinstance(item, Part)]
        if len(images) > 1 and parts:
            self._counted.add("samples hold several images; each image is a record of its own")
        if not images and parts:
            self._counted.add("samples hold no image; their parts are lost")
        self._attach(images, parts)
        return images

    def _attach(self, images: Sequence[Image], parts: Sequence[Part]) -> None:
        stems = {image.stem for image in images}
        for part in parts:
            own = part.stem in stems
            name = part.own_name if own else part.extension
            if name not in self._parts and images:
                self._counted.add(f"parts .{plain_extension(name)} are lost")
            for image in images:
                if not own or image.stem == part.stem:
                    image.parts.setdefault(name, part.content)

    def _items(self, stream: TarStream) -> Iterator[Image | Part]:
        """Members that matter, read."""
        for member in stream.members():
            if member.kind == "folder":
                continue
            if member.name == TAR_MEMBER and member.kind == "file":
                self._take_schema(stream, member)
            elif self._schema is None and is_hidden(member.name):
                self.skipped["hidden or system file"] += 1
            elif member.kind != "file":
                if is_image_name(member.name):
                    yield Image.of(member.name, b"", f"a {member.kind}, which has no content of its own")
                else:
                    self.skipped[f"a {member.kind}"] += 1
            else:
                item = self._item(stream, member)
                if item is not None:
                    yield item

    def _item(self, stream: TarStream, member: TarMember) -> Image | Part | None:
        sample, stem, extension = split_name(member.name)
        limit = part_limit(extension)
        if self._schema is not None and extension.rpartition(".")[2] not in self._parts:
            return Image(member.name, sample, stem, *self._read_image(stream, member, b""))
        if limit is not None:
            if member.size > limit:
                return Part(stem, sample, extension, f"{member.size} bytes; at most {limit} are read")
            return Part(stem, sample, extension, bytes(stream.read(limit)))
        if is_image_name(member.name):
            return Image(member.name, sample, stem, *self._read_image(stream, member, b""))
        head = bytes(stream.read(_MAGIC_BYTES))
        if not magic(head):
            if extension:
                self._counted.add(f"parts .{plain_extension(extension)} are lost")
            else:
                self.skipped["not an image"] += 1
            return None
        return Image(member.name, sample, stem, *self._read_image(stream, member, head))

    def _read_image(self, stream: TarStream, member: TarMember, head: bytes) -> tuple[bytes | memoryview, str | None]:
        """A member's bytes, of which ``head`` is read already; or why they are not read."""
        if member.size > MAX_IMAGE_BYTES:
            return b"", f"{member.size} bytes; at most {MAX_IMAGE_BYTES} are read"
        rest = stream.read(MAX_IMAGE_BYTES)
        return b"".join((head, rest)) if head else rest, None

    def _take_schema(self, stream: TarStream, member: TarMember) -> None:
        """Read what packfmt noted in a shard, and let no shard contradict the first."""
        if member.size > MAX_BYTES:
            raise SourceError(f"{stream.path}: its {TAR_MEMBER} has {member.size} bytes; at most {MAX_BYTES} are read")
        schema = PackSchema.decode(bytes(stream.read(MAX_BYTES)), f"{stream.path}, member {TAR_MEMBER}")
        if not self._declared:
            self._schema, self._parts = schema, schema_parts(schema)
        elif self._schema is None or (schema.columns, schema.classes) != (self._schema.columns, self._schema.classes):
            raise SourceError(
                f"{stream.path}: its {TAR_MEMBER} tells other columns or classes than the first shard, or stands "
                "behind images; convert such shards one by one"
            )

    def _finish(self, image: Image) -> Record | BadEntry:
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
        if self._schema is not None:
            try:
                columns = schema_values(self._schema, columns)
            except ValueError as error:
                reason, columns = reason or f"part .json: {error}", {}
        if self._folders is not None:
            label = self._folders.label(image.key)
            if label is None:
                reason = reason or NO_CLASS
            else:
                columns["label"] = label
        if reason is None:
            return Record(image.data, image.key, columns)
        return self.bad_entry(image.key, reason, image.data, columns)

    def _declare(self) -> None:
        """Learn the columns from the first sample that holds an image."""
        first = self._first_sample()
        images = [item for item in first if isinstance(item, Image)]
        parts = [item for item in first if isinstance(item, Part)]
        if not images:
            raise SourceError(f"{self._paths[0]}: no image in the first {_PEEKED} members; nothing to take from it")
        self._declared = True
        if (schema := self._schema) is not None:
            self.columns, self.classes, self.metadata = schema.columns, schema.classes, dict(schema.metadata)
            return
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

    def _first_sample(self) -> list[Image | Part]:
        sample: list[Image | Part] = []
        with TarStream(self._paths[0]) as stream:
            for number, item in enumerate(self._items(stream)):
                if sample and sample[0].sample != item.sample:
                    if any(isinstance(kept, Image) for kept in sample):
                        break
                    sample = []
                if number >= _PEEKED:
                    # A stem that is cut in two would show parts without their image.
                    return [kept for kept in sample if kept.stem != item.stem]
                sample.append(item)
        return sample

    def _read_folders(self) -> None:
        classes = FolderClasses.of_members(self._members(), self._paths[0])
        if classes.names:
            self._folders, self.classes, self.columns = classes, classes.names, (LABEL,)

    def _members(self) -> Iterator[tuple[str, bool]]:
        for path in self._paths:
            with TarStream(path) as stream:
                yield from ((member.name, member.kind == "folder") for member in stream.members())
