"""Images from stacks: arrays of pixels or rows of encoded images, read chunk by chunk in the order they are stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from packfmt.errors import SourceError
from packfmt.sources.hdf5.columns import SideColumn, column_values, find_columns, sizes_of
from packfmt.sources.hdf5.file import Data, Group
from packfmt.sources.hdf5.layouts import NEXT, Found, Stack, to_pixels
from packfmt.sources.isolated.frames import Item
from packfmt.sources.values import ValueFault, image_kind

__all__ = ["StackReader", "check_values", "cut_padding", "cut_string", "restore_nuls", "slabs"]

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
_ROBOT_COLUMNS = [("episode", "<i8", (), "array"), ("frame", "<i8", (), "array"), ("camera", "<i8", (), "array")]


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

    def __init__(self, found: Found, paired: Group | None, options: dict[str, Any]) -> None:
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
        columns = _ROBOT_COLUMNS if self._robot else [column.spec for column in self._columns]
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
                    told = tuple(None if numbers is None else numbers[place] for numbers in size_rows)
                    yield self._item(stack, start + place, row, columns, told)
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

    def _item(self, stack: Stack, position: int, row: Any, columns: tuple[Any, ...], told: tuple[Any, ...]) -> Item:
        key = f"{stack.data.path}/{position:06d}"
        length, height, width = told
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
            told = "BGR, as in Visual Genome's files" if self._bgr else "RGB; where they are BGR, pass channels='bgr'"
            self.notes.append(f"the file does not name its channels: they were taken as {told}")
        if self._options["value_range"] is not None:
            self.notes.append("values were scaled to 0..255 and rounded")

    def _lost(self) -> list[str]:
        """Datasets that are not read. All episodes have the same ones, told by their names."""
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
            f"/{data.path} holds {data.dtype}, no 8-bit pixels: say what black and white are, as value_range='0,1' or "
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
