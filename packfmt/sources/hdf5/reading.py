"""The child's part of reading HDF5: tell the layout of the files, and hand out their images.

Images come from stacks (arrays of pixels, or rows of encoded images), which are read chunk by chunk in the order they
are stored; from files that keep one dataset per image; or from groups of one image each with a text beside it.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from packfmt.errors import SourceError
from packfmt.record import LABEL, Column, text_column
from packfmt.sources.hdf5.file import Data, Group, Visited, open_file
from packfmt.sources.hdf5.layouts import (
    NEXT,
    Contents,
    SideColumn,
    Stack,
    column_values,
    find_columns,
    find_images,
    image_axes,
    parse_range,
    sizes_of,
    to_pixels,
)
from packfmt.sources.inputs import FolderClasses, natural
from packfmt.sources.isolated.child import Flush, Job, total
from packfmt.sources.isolated.frames import Item
from packfmt.sources.values import ValueFault, image_kind

__all__ = ["StackReader", "start"]

_MAX_RESTORED = 16 << 20  # bytes of NULs that are put back
_ENDS = {"jpeg": b"\xff\xd9", "png": b"IEND\xae\x42\x60\x82", "gif": b"\x3b"}


def cut_padding(row: memoryview, length: int | None = None) -> memoryview:
    """The image at the start of a padded row.

    Args:
        row: the whole row.
        length: the image's length as another dataset states it, or None.

    Raises:
        ValueFault: the length is beyond the row, or no end of an image precedes the padding.
    """
    if length is not None:
        if not 0 < length <= len(row):
            raise ValueFault(f"a length of {length} bytes in a row of {len(row)}")
        return row[:length]
    kind = image_kind(row)
    stated = _stated_length(row, kind)
    if stated is not None:
        if stated > len(row):
            raise ValueFault(f"its header says {stated} bytes, the row has {len(row)}")
        return row[:stated]
    data = bytes(row)
    end = _ENDS.get(kind or "")
    used = len(data.rstrip(b"\0"))
    if end is None:
        return row[:used] if kind is None else row
    if data.endswith(end, 0, used):
        return row[:used]
    place = data.rfind(end)
    if place < 0:
        raise ValueFault("has no end marker before the padding: cut short")
    return row[:used]  # bytes follow the marker: they are not padding, and kept


def cut_string(row: memoryview) -> memoryview | bytes:
    """The image in a fixed string, as ``cut_padding``; its last NULs may be missing, which numpy takes for padding.

    Raises:
        ValueFault: as ``cut_padding`` and ``restore_nuls``.
    """
    stated = _stated_length(row, image_kind(row))
    return restore_nuls(bytes(row)) if stated is not None and stated > len(row) else cut_padding(row)


def restore_nuls(data: bytes) -> bytes:
    """The image with the trailing NULs that numpy's fixed strings drop, where its header states a greater length.

    Raises:
        ValueFault: far too much is missing for that.
    """
    stated = _stated_length(memoryview(data), image_kind(data))
    if stated is None or stated <= len(data):
        return data
    if stated - len(data) > _MAX_RESTORED:
        raise ValueFault(f"cut short: its header says {stated} bytes, there are {len(data)}")
    return data + bytes(stated - len(data))


def _stated_length(data: memoryview, kind: str | None) -> int | None:
    """The whole length that a WebP's or a BMP's header states, or None for other formats."""
    if kind == "webp":
        return int.from_bytes(data[4:8], "little") + 8
    if kind == "bmp":
        return int.from_bytes(data[2:6], "little") or None
    return None


_AIM = 8 << 20  # bytes of one read, where chunks leave the choice
_LIMIT = 512 << 20  # bytes of one read that a single chunk may ask for
_VARIABLE_ROWS = 64
_ROBOT_COLUMNS = [Column(name, "<i8") for name in ("episode", "frame", "camera")]


def slabs(length: int, chunk: int | None, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of reads that together cover ``length`` rows, each chunk of rows in exactly one of them.

    Only where one row of chunks is beyond half a gigabyte is it cut, and its chunks are read more than once.
    """
    step = max(1, _AIM // max(1, row_bytes))
    if chunk is not None:
        step = max(1, step // chunk) * chunk
        step = min(step, max(1, _LIMIT // max(1, row_bytes)))
    for start in range(0, length, step):
        yield start, min(length, start + step)


class StackReader:
    """Hands out the images of one file's stacks.

    Attributes:
        notes, skipped: as of a source.
        first_episode: the number of the first episode, set before ``items``.
        episodes: how many there were.
    """

    def __init__(self, found: Contents, paired: Group | None, options: dict[str, Any]) -> None:
        self.notes = list(found.notes)
        self.skipped: Counter[str] = Counter()
        self.first_episode = 0
        self.episodes = 0
        self._found = found
        self._options = options
        self._robot = found.kind == "robot"
        self._columns: list[SideColumn] = []
        if not self._robot:
            self._columns = find_columns(found.stacks[0], found.root, options["labels"], paired, self.notes)
        for stack in found.stacks:
            check_values(stack.data, stack.axes, options["value_range"])
        self._sizes = [sizes_of(stack) if not self._robot else (None, None, None) for stack in found.stacks]
        self._bgr = options["channels"] == "bgr" or (options["channels"] is None and self._genome())
        self._note_channels()

    def plan(self) -> dict[str, Any]:
        """What the source needs to know beforehand."""
        columns = [c.spec for c in (_ROBOT_COLUMNS if self._robot else [side.column for side in self._columns])]
        metadata = {"cameras": self._cameras()} if self._robot else self._attributes()
        return {
            "layout": self._found.name,
            "columns": columns,
            "classes": [],
            "count": sum(stack.length for stack in self._found.stacks),
            "metadata": metadata,
            "lost": self._lost(),
        }

    def items(self) -> Iterator[Item]:
        """All images, stack by stack."""
        cameras = self._cameras()
        groups: dict[str, int] = {}
        for stack, sizes in zip(self._found.stacks, self._sizes, strict=True):
            episode = groups.setdefault(stack.group.path, self.first_episode + len(groups))
            camera = cameras.index(stack.data.path.rpartition("/")[2]) if self._robot else 0
            for start, rows in self._read(stack):
                values = [column_values(column, start, start + len(rows)) for column in self._columns]
                size_rows = [None if data is None else _numbers(data, start, start + len(rows)) for data in sizes]
                for place, row in enumerate(rows):
                    columns = tuple(value[place] for value in values)
                    if self._robot:
                        columns = (episode, start + place, camera)
                    stated = tuple(None if numbers is None else numbers[place] for numbers in size_rows)
                    yield self._item(stack, start + place, row, columns, stated)
        self.episodes = len(groups)

    def _read(self, stack: Stack) -> Iterator[tuple[int, Any]]:
        """(first position, rows): for pixels an array with the axis N first, else a list of buffers."""
        data, axis = stack.data, stack.axes.index("N") if stack.axes else 0
        chunk = data.chunks[axis] if data.chunks is not None else None
        if data.variable:
            chunk = chunk if chunk is not None and chunk <= 4 * _VARIABLE_ROWS else None
            row_bytes = _AIM // _VARIABLE_ROWS
        else:
            row_bytes = data.dtype.itemsize * math.prod(data.shape[:axis] + data.shape[axis + 1 :])
        for start, stop in slabs(stack.length, chunk, row_bytes):
            rows = data.read(tuple(slice(start, stop) if a == axis else slice(None) for a in range(len(data.shape))))
            yield start, np.moveaxis(rows, axis, 0) if stack.axes else _buffers(rows, data)

    def _item(self, stack: Stack, position: int, row: Any, columns: tuple[Any, ...], stated: tuple[Any, ...]) -> Item:
        key = f"{stack.data.path}/{position:06d}"
        length, height, width = stated
        try:
            if not stack.axes:
                return Item(key, self._encoded(stack.data, row, length), columns)
            pixels = to_pixels(row, stack.axes.replace("N", ""), self._options["value_range"], self._bgr)
            if height is not None and width is not None:
                if not (0 < height <= pixels.shape[0] and 0 < width <= pixels.shape[1]):
                    raise ValueFault(f"a size of {width}x{height} in an array of {pixels.shape[1]}x{pixels.shape[0]}")
                pixels = np.ascontiguousarray(pixels[:height, :width])
            high, wide, channels = pixels.shape
            return Item(key, pixels.data.cast("B"), columns, (high, wide, channels))
        except ValueFault as fault:
            return Item(key, fault=str(fault), columns=columns)

    def _encoded(self, data: Data, row: Any, length: int | None) -> Any:
        if data.variable:
            return row
        return cut_string(row) if data.dtype.kind == "S" and length is None else cut_padding(row, length)

    def _genome(self) -> bool:
        """Visual Genome's scene graph file, whose pixels are BGR, is known by the sizes beside its images."""
        return not self._robot and self._sizes[0][1] is not None and self._found.stacks[0].axes == "NCHW"

    def _note_channels(self) -> None:
        data, axes = self._found.stacks[0].data, self._found.stacks[0].axes
        colour = axes and "C" in axes and data.shape[axes.index("C")] >= 3
        if colour and self._options["channels"] is None:
            taken = "BGR, as in Visual Genome's files" if self._bgr else "RGB; where they are BGR, pass channels='bgr'"
            self.notes.append(f"the file does not name its channels: they were taken as {taken}")
        if self._options["value_range"] is not None:
            self.notes.append("values were scaled to 0..255 and rounded")

    def _lost(self) -> list[str]:
        """Datasets that are not read. All episodes have the same ones, by their names."""
        if self._robot:
            return sorted({path.rpartition("/")[2] for path in self._found.rest if not NEXT.fullmatch(path)})
        sizes = [data.path for data in self._sizes[0] if data is not None]
        return sorted({*self._found.rest} - {column.data.path for column in self._columns} - {*sizes})

    def _cameras(self) -> list[str]:
        return sorted({stack.data.path.rpartition("/")[2] for stack in self._found.stacks})

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in self._found.stacks[0].group.attributes.items() if value == value}


def check_values(data: Data, axes: str, value_range: Any) -> None:
    if axes and data.dtype != np.uint8 and value_range is None:
        raise SourceError(
            f"/{data.path} holds {data.dtype}, not 8-bit pixels: say what black and white are, as value_range='0,1' or "
            "'0,255'. Values normalised by a mean cannot be turned back; use the images they came from"
        )


def _numbers(data: Data, start: int, stop: int) -> list[int]:
    rows: list[int] = data.read((slice(start, stop), *(slice(None) for _ in data.shape[1:]))).reshape(-1).tolist()
    return rows


def _buffers(rows: Any, data: Data) -> list[Any]:
    """The rows as buffers; fixed strings and opaque values with all their bytes, trailing NULs too."""
    if data.variable:
        return [np.ascontiguousarray(row) if isinstance(row, np.ndarray) else bytes(row) for row in rows]
    width = data.dtype.itemsize * (data.shape[1] if len(data.shape) == 2 else 1)
    flat = memoryview(np.ascontiguousarray(rows).tobytes())
    return [flat[place * width : (place + 1) * width] for place in range(len(rows))]


_TEXTS = {"txt": "caption", "class": "class", "name": "name"}


class SingleReader:
    """Every dataset is an image; the groups are the classes, where there are several."""

    def __init__(self, found: Contents, options: dict[str, Any]) -> None:
        self.notes = list(found.notes)
        self.skipped: Counter[str] = Counter()
        self.first_episode = self.episodes = 0
        self._name = found.name
        self._options = options
        self._root = found.root
        parents = set(_parents(found.root, Visited())) if found.root is not None else set()
        self._classes = FolderClasses(parents)
        known = options.get("classes")
        self._ids = {name: place for place, name in enumerate(known if known is not None else self._classes.names)}

    def plan(self) -> dict[str, Any]:
        """What the source needs to know beforehand."""
        names = self._classes.names
        columns = [LABEL.spec] if names else []
        return {"layout": self._name, "columns": columns, "classes": list(names), "count": None, "metadata": {}}

    def items(self) -> Iterator[Item]:
        """All images, in name order, groups after the datasets beside them."""
        for data in _walk(self._root, Visited()):
            columns = self._label(data.path)
            if columns == (-1,):
                yield Item(data.path, fault="lies beside the class groups and has no class", columns=columns)
                continue
            try:
                item = image_of(data, data.path, columns, self._options)
            except ValueFault as fault:
                yield Item(data.path, fault=str(fault), columns=columns)
                continue
            if item is None:
                self.skipped["not an image"] += 1
            else:
                yield item

    def _label(self, path: str) -> tuple[int, ...] | None:
        if not self._classes.names:
            return None
        number = self._classes.label(path)
        return (-1,) if number is None else (self._ids[self._classes.names[number]],)


class SampleReader:
    """Groups with an image named ``img`` and texts beside it, as text-to-image sets; repeats of an image are joined."""

    def __init__(self, found: Contents, options: dict[str, Any]) -> None:
        self.notes = list(found.notes)
        self.skipped: Counter[str] = Counter()
        self.first_episode = self.episodes = 0
        self._options = options
        self._root = found.root
        first = next(_samples(found.root, Visited()), None)
        self._texts = [name for name in _TEXTS if first is not None and isinstance(first.find(name), Data)]

    def plan(self) -> dict[str, Any]:
        """What the source needs to know beforehand."""
        columns = [text_column(_TEXTS[name]).spec for name in self._texts]
        layout = "groups with one image each"
        return {"layout": layout, "columns": columns, "classes": [], "count": None, "metadata": {}}

    def items(self) -> Iterator[Item]:
        """One record for each run of groups whose names differ in their last number and whose images are the same."""
        waiting: Item | None = None
        joined = 0
        for group in _samples(self._root, Visited()):
            item = self._sample(group)
            if waiting is not None and _same(waiting, item):
                waiting = waiting._replace(columns=self._join(waiting.columns or (), item.columns or ()))
                joined += 1
                continue
            if waiting is not None:
                yield waiting
            waiting = item
        if waiting is not None:
            yield waiting
        if joined:
            self.skipped["repeat of the image before it; its text was added to that one's"] += joined

    def _sample(self, group: Group) -> Item:
        columns = tuple(_text(group.find(name)) for name in self._texts)
        image = group.find("img")
        try:
            item = image_of(image, group.path, columns, self._options) if isinstance(image, Data) else None
        except ValueFault as fault:
            return Item(group.path, fault=str(fault), columns=columns)
        return Item(group.path, fault="img is not an image", columns=columns) if item is None else item

    def _join(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            f"{one}\n{other}" if name == "txt" else one
            for name, one, other in zip(self._texts, first, second, strict=True)
        )


def image_of(data: Data, key: str, columns: tuple[Any, ...] | None, options: dict[str, Any]) -> Item | None:
    """The image that a whole dataset is, or None where it is none.

    Raises:
        ValueFault: it is a damaged one.
    """
    if data.empty:
        return None
    if data.shape == ():
        if not (data.variable or data.dtype.kind in "SV"):
            return None
        raw = data.read_raw()
        return Item(key, _unpadded(raw, data), columns)
    if len(data.shape) == 1:
        if data.dtype.str != "|u1":
            return None
        return Item(key, memoryview(data.read((slice(None),)).tobytes()), columns)
    axes = image_axes(data, options["layout"])
    if axes is None:
        return None
    check_values(data, axes, options["value_range"])
    pixels = to_pixels(
        data.read(tuple(slice(None) for _ in data.shape)), axes, options["value_range"], options["channels"] == "bgr"
    )
    height, width, channels = pixels.shape
    return Item(key, pixels.data.cast("B"), columns, (height, width, channels))


def _unpadded(raw: bytes, data: Data) -> Any:
    if data.variable:
        return raw
    return cut_string(memoryview(raw)) if data.dtype.kind == "S" else cut_padding(memoryview(raw))


def _same(one: Item, other: Item) -> bool:
    same_name = re.sub(r"_\d+$", "", one.key) == re.sub(r"_\d+$", "", other.key)
    return same_name and one.fault is None and other.fault is None and bytes(one.data) == bytes(other.data)


def _text(data: Any) -> str:
    if not isinstance(data, Data) or data.empty or data.shape not in ((), (1,)):
        return ""
    value = data.read(()) if data.shape == () else data.read((slice(None),)).reshape(-1)[0]
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
    return raw.decode("utf-8", "surrogateescape")


def _walk(group: Group | None, visited: Visited) -> Iterator[Data]:
    """All datasets below a group: its own, then those of its groups in natural order."""
    if group is None:
        return
    visited.enter(group)
    below = []
    for member in group.members():
        if isinstance(member, Data):
            yield member
        else:
            below.append(member.path.rpartition("/")[2])
    for name in sorted(below, key=natural):
        inner = group.member(name)
        if isinstance(inner, Group):
            yield from _walk(inner, visited)


def _samples(group: Group | None, visited: Visited) -> Iterator[Group]:
    """All groups below one that hold an ``img``, in name order."""
    if group is None:
        return
    visited.enter(group)
    for member in group.members():
        if isinstance(member, Group):
            if isinstance(member.find("img"), Data):
                yield member
            else:
                yield from _samples(member, visited)


def _parents(group: Group, visited: Visited) -> Iterator[str]:
    """The groups that hold datasets, by the first member of each: a group holds either datasets or groups."""
    visited.enter(group)
    for name in group.names():
        member = group.member(name)
        if isinstance(member, Group):
            yield from _parents(member, visited)
        else:
            yield group.path
            return


class HDF5Job(Job):
    """Reads one or several files of one layout; the request is ``HDF5Source``'s."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request["files"], request["options"])
        text = self.options["value_range"]
        self.options["value_range"] = parse_range(text) if text else None

    def plan(self) -> dict[str, Any]:
        """Layout, columns, classes, and the count where it is known. All files must agree."""
        whole: dict[str, Any] = {}
        counts: list[int | None] = []
        for path, reader in self._readers():
            plan = reader.plan()
            counts.append(plan.pop("count"))
            if whole and (plan["layout"], plan["columns"]) != (whole["layout"], whole["columns"]):
                raise SourceError(
                    f"{path} has {_describe(plan)}, but {self.files[0][0]} has {_describe(whole)}; convert them one "
                    "at a time"
                )
            lost = sorted({*whole.get("lost", ()), *plan.get("lost", ())})
            classes = sorted({*whole.get("classes", ()), *plan["classes"]}, key=os.fsencode)
            whole = {**(whole or plan), "classes": classes, "lost": lost}
        self.options["classes"] = whole["classes"]
        whole["count"] = total(counts)
        if whole["count"] == 0:
            raise SourceError("holds no images: the dataset has length 0")
        return whole

    def items(self) -> Iterator[Item | Flush]:
        """All images, file by file."""
        episodes = 0
        for number, (path, reader) in enumerate(self._readers()):
            reader.first_episode = episodes
            prefix = self.files[number][1]
            try:
                for item in reader.items():
                    yield item._replace(key=prefix + item.key) if prefix else item
            except SourceError as error:
                raise SourceError(self.of_one(path, error)) from error
            yield Flush(number)
            episodes += reader.episodes
            self.add_up(path, reader.skipped, reader.notes)

    def _readers(self) -> Iterator[tuple[str, Any]]:
        for path, _, paired in self.files:
            with ExitStack() as stack:
                try:
                    root = stack.enter_context(open_file(path, self.options["locking"]))
                    pair = stack.enter_context(open_file(paired, self.options["locking"])) if paired else None
                    yield path, self._reader(find_images(root, self.options), pair)
                except SourceError as error:
                    raise SourceError(self.of_one(path, error)) from error

    def _reader(self, found: Contents, paired: Any) -> Any:
        if found.kind == "files":
            return SingleReader(found, self.options)
        if found.kind == "samples":
            return SampleReader(found, self.options)
        return StackReader(found, paired, self.options)


def start(request: dict[str, Any]) -> HDF5Job:
    """What ``isolated`` calls in the child."""
    return HDF5Job(request)


def _describe(plan: dict[str, Any]) -> str:
    columns = ", ".join(f"{column[0]} {column[1]}{list(column[2]) or ''}" for column in plan["columns"])
    return f"{plan['layout']} with columns {columns or 'none'}"
