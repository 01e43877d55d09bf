"""Where the images are in an HDF5 file: stacks in one dataset, or one dataset each; and what lies beside them.

h5py reads the arrays. Which of them are images, with which axes and labels, no standard says and no library knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packfmt.errors import SourceError
from packfmt.record import OWN_COLUMNS, Column, text_column
from packfmt.sources.hdf5.file import Data, Group, Visited
from packfmt.sources.inputs import natural
from packfmt.sources.values import ValueFault, image_kind

__all__ = [
    "NEXT",
    "Contents",
    "SideColumn",
    "Stack",
    "check_layout",
    "column_values",
    "find_columns",
    "find_images",
    "image_axes",
    "parse_range",
    "sizes_of",
    "to_pixels",
]

CHANNELS = (1, 3, 4)
_LEAST_SIDE = 5  # an axis of fewer elements may be channels as well as pixels


def check_layout(text: str) -> str:
    """A user's layout: each of H and W once, N and C at most once.

    Raises:
        ValueError: another letter, or one missing or twice.
    """
    letters = text.upper()
    if len(set(letters)) != len(letters) or not {"H", "W"} <= set(letters) <= set("NHWC"):
        raise ValueError(f"layout {text!r} is none of the letters N, H, W and C, each once, as 'NHWC', 'NCHW' or 'NHW'")
    return letters


def parse_range(text: str) -> tuple[float, float]:
    """A user's value range, as "0,1" or "0,255".

    Raises:
        ValueError: not two numbers, the first the smaller.
    """
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"value_range {text!r} is not two numbers, as '0,1' or '0,255'") from None
    if not -1e30 < low < high < 1e30:
        raise ValueError(f"value_range {text!r} needs a lower number first")
    return low, high


def infer_axes(shape: tuple[int, ...]) -> str | None:
    """The layout of an array of rank 4 that can be nothing else, or None."""
    if len(shape) != 4:
        return None
    last = shape[3] in CHANNELS and min(shape[1:3]) >= _LEAST_SIDE
    second = shape[1] in CHANNELS and min(shape[2:4]) >= _LEAST_SIDE
    return "NHWC" if last else "NCHW" if second else None


def infer_image_axes(shape: tuple[int, ...]) -> str | None:
    """The same for one image of rank 3."""
    axes = infer_axes((0, *shape))
    return axes[1:] if axes else None


def to_pixels(
    image: np.ndarray[Any, Any], axes: str, value_range: tuple[float, float] | None, bgr: bool
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One image as (H, W, C) uint8, C order, RGB.

    Args:
        image: any numbers; its axes are those of ``axes`` without N.
        axes: the letters H, W and perhaps C, in the array's order.
        value_range: what 0 and 255 stand for; None where the values are 8-bit pixels already.
        bgr: whether the first channel is blue.

    Raises:
        ValueFault: a value outside the range, or a number of channels that no image has.
    """
    pixels = image.transpose([axes.index(letter) for letter in ("HWC" if "C" in axes else "HW")])
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    if pixels.shape[2] not in CHANNELS:
        raise ValueFault(f"{pixels.shape[2]} channels; 1, 3 and 4 are read")
    if value_range is not None:
        low, high = value_range
        scaled = pixels.astype(np.float64)
        if not (scaled.size and scaled.min() >= low and scaled.max() <= high):  # false for NaN too
            found = f"{scaled.min()} to {scaled.max()}" if scaled.size else "none"
            raise ValueFault(f"values {found} are outside value_range {low:g},{high:g}")
        pixels = np.rint((scaled - low) * (255.0 / (high - low))).astype(np.uint8)
    if bgr and pixels.shape[2] >= 3:
        pixels = pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]
    return np.ascontiguousarray(pixels)


_IMAGE_NAMES = frozenset(["images", "image", "imgs", "img", "x", "data", "pixel_values", "frames"])
_FIRST_MEMBERS = 64  # of a group that are looked at before it counts as one dataset per image
_MAX_DATASETS = 10_000
_ALOHA = re.compile(r"(?:.*/)?observations/images/[^/]+")
_ROBOMIMIC = re.compile(r"(?:.*/)?data/demo[^/]*/obs/[^/]*(?:image|rgb)[^/]*")
NEXT = re.compile(r"(?:.*/)?data/demo[^/]*/next_obs/.*")


@dataclass(slots=True)
class Stack:
    """Many images in one dataset.

    Args:
        data: the dataset.
        axes: its layout for pixels, as "NHWC"; "" for encoded images, one per row.
        group: the group it lies in.
    """

    data: Data
    axes: str
    group: Group

    @property
    def length(self) -> int:
        """The number of images."""
        return self.data.shape[self.axes.index("N") if self.axes else 0]


@dataclass(slots=True)
class Contents:
    """Where the images of a file are, and what else is in it.

    Args:
        kind: "stack", "robot", "files", "samples" (groups with one ``img`` each).
        name: what a person calls it.
        root: the file's root; for "files" and "samples" the group below which every dataset is an image.
        stacks: for "stack" and "robot".
        notes: for the report.
        rest: paths of the datasets that were not taken for images.
    """

    kind: str
    name: str
    root: Group
    stacks: list[Stack] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)


def find_images(root: Group, options: dict[str, Any]) -> Contents:
    """Find the images of a file.

    Raises:
        SourceError: none, several sets of them with no way to tell which is meant, or axes that nothing shows.
    """
    if options["images"]:
        return _named(root, options)
    found = _per_image(root, options)
    if found is not None:
        return found
    others: list[Data] = []
    stacks: list[Stack] = []
    unsure: list[SourceError] = []
    for group, data in _datasets(root):
        try:
            stack = _stack(group, data, options)
        except SourceError as error:
            unsure.append(error)
            others.append(data)
            continue
        if stack is not None:
            stacks.append(stack)
        else:
            others.append(data)
    rest = [data.path for data in others]
    robot = _robot(root, stacks)
    if robot is not None:
        robot.rest = rest
        return robot
    if not stacks:
        raise unsure[0] if unsure else _nothing(root, others)
    return Contents("stack", "array of images", root, [_the_one(stacks)], notes=_left_out(stacks), rest=rest)


def _named(root: Group, options: dict[str, Any]) -> Contents:
    place = root.find(options["images"])
    if place is None:
        raise SourceError(f"nothing at /{options['images'].strip('/')}, which images= names")
    if isinstance(place, Group):
        found = _per_image(place, options)
        return found if found is not None else find_images(place, {**options, "images": None})
    parent = place.path.rpartition("/")[0]
    group = root.find(parent) if parent else root
    stack = _stack(group, place, {**options, "named": True}) if isinstance(group, Group) else None
    if stack is None:
        raise SourceError(f"/{place.path} (shape {place.shape}, {place.dtype}) holds neither pixels nor image files")
    return Contents("stack", "array of images", root, [stack])


def _datasets(root: Group) -> Iterator[tuple[Group, Data]]:
    """Every dataset below a group, with the group it lies in."""
    waiting = [root]
    count = 0
    visited = Visited()
    while waiting:
        group = waiting.pop()
        visited.enter(group)
        below = []
        for member in group.members():
            if isinstance(member, Group):
                below.append(member)
                continue
            count += 1
            if count > _MAX_DATASETS:
                raise SourceError(f"more than {_MAX_DATASETS} datasets; name the images' dataset or group with images=")
            yield group, member
        waiting += reversed(below)


def first_bytes(data: Data, position: int = 0) -> memoryview:
    """The start of an image, where a dataset's rows are encoded images; else whatever lies there."""
    if data.empty or not math.prod(data.shape):
        return memoryview(b"")
    if data.shape == ():
        return memoryview(data.read_raw()) if data.variable or data.dtype.kind in "SV" else memoryview(b"")
    row = data.read((slice(position, position + 1), *(slice(0, 64) for _ in data.shape[1:])))
    if data.variable:
        value = row.reshape(-1)[0]
        return memoryview(value.tobytes() if isinstance(value, np.ndarray) else bytes(value))
    return memoryview(np.ascontiguousarray(row).tobytes())


def _stack(group: Group, data: Data, options: dict[str, Any]) -> Stack | None:
    """The dataset as a stack of images, or None where it is none."""
    if data.empty or not data.shape:
        return None
    rank = len(data.shape)
    rows = data.variable or data.dtype.kind in "SV" or (rank == 2 and data.dtype == np.uint8)
    if rows and rank <= 2 and (rank == 1 or data.shape[1] > 8) and _holds_files(data):
        if data.variable == "text":
            raise SourceError(
                f"/{data.path} keeps images in variable-length strings, which end at the first zero byte: the images "
                "were cut when they were written. Write them again as arrays of uint8"
            )
        return Stack(data, "", group)
    if data.dtype.kind not in "buif" or rank < 3:
        return None
    axes = _axes(data, options)
    return Stack(data, axes, group) if axes else None


def _holds_files(data: Data) -> bool:
    """Whether one of the first rows is an image file: the very first may be damaged."""
    return any(image_kind(first_bytes(data, position)) for position in range(min(4, data.shape[0])))


def _axes(data: Data, options: dict[str, Any]) -> str | None:
    """The layout of an array of pixels; None where it does not look like images."""
    given = options["layout"]
    name = data.path.rpartition("/")[2].lower()
    if given and len(given) == len(data.shape) and "N" in given:
        return str(given) if "C" not in given or data.shape[given.index("C")] in CHANNELS else None
    axes = infer_axes(data.shape)
    called = name in _IMAGE_NAMES or options.get("named")
    maybe = axes or (called and len(data.shape) in (3, 4))
    if data.matlab and maybe:
        raise SourceError(
            f"/{data.path} (shape {data.shape}) was written by MATLAB, which reverses the axes: say which they are, as "
            "layout='NCWH'"
        )
    if axes is None and maybe and (len(data.shape) == 4 or not infer_image_axes(data.shape)):
        raise SourceError(
            f"/{data.path} (shape {data.shape}) may be images, but its axes can be read in more than one way: say "
            "which they are, as layout='NHWC', 'NCHW', or 'NHW' for gray images"
        )
    return axes


def image_axes(data: Data, layout: str | None) -> str | None:
    """The layout of a dataset that is one image of pixels, or None."""
    given = (layout or "").replace("N", "")
    if given and len(given) == len(data.shape):
        return given
    return infer_image_axes(data.shape) if data.dtype.kind in "buif" else None


def _per_image(root: Group, options: dict[str, Any]) -> Contents | None:
    """One dataset per image, as the first members down the first groups tell."""
    group, depth = root, 0
    while depth < 4:
        members = []
        for member in group.members():
            members.append(member)
            if len(members) >= _FIRST_MEMBERS:
                break
        data = [member for member in members if isinstance(member, Data)]
        groups = [member for member in members if isinstance(member, Group)]
        if any(member.path.rpartition("/")[2] == "img" and _is_one(member, options) for member in data):
            return Contents("samples", "groups with one image each", root=root)
        ones = [_is_one(member, options) for member in data]
        if data and all(ones):
            return Contents("files", "one dataset per image", root=root)
        if data or not groups:
            return None
        group, depth = groups[0], depth + 1
    return None


def _is_one(data: Data, options: dict[str, Any]) -> bool:
    if data.empty:
        return False
    if len(data.shape) < 2:
        whole = data.shape == () or data.dtype == np.uint8
        return whole and image_kind(first_bytes_of_one(data)) is not None
    return image_axes(data, options["layout"]) is not None and "N" not in (options["layout"] or "")


def first_bytes_of_one(data: Data) -> memoryview:
    """The start of an encoded image that is a whole dataset: a scalar, or a row of bytes."""
    if data.shape == ():
        return first_bytes(data)
    return memoryview(np.ascontiguousarray(data.read((slice(0, 64),))).tobytes())


def _robot(root: Group, stacks: list[Stack]) -> Contents | None:
    aloha = [stack for stack in stacks if _ALOHA.fullmatch(stack.data.path)]
    demos = [stack for stack in stacks if _ROBOMIMIC.fullmatch(stack.data.path)]
    chosen, name = (aloha, "ALOHA episode") if aloha else (demos, "robomimic demonstrations")
    if not chosen:
        return None
    chosen.sort(key=lambda stack: natural(stack.data.path))
    left = [stack.data.path for stack in stacks if stack not in chosen]
    again = sum(NEXT.fullmatch(path) is not None for path in left)
    notes = [f"{again} datasets under next_obs repeat the frames and were not read"] if again else []
    if len(left) > again:
        notes.append(f"{len(left) - again} further arrays of images were not read")
    return Contents("robot", name, root, chosen, notes)


def _the_one(stacks: list[Stack]) -> Stack:
    if len(stacks) == 1:
        return stacks[0]
    named = [stack for stack in stacks if stack.data.path.rpartition("/")[2].lower() in _IMAGE_NAMES]
    if len(named) == 1:
        return named[0]
    names = ", ".join("/" + stack.data.path for stack in stacks[:8])
    raise SourceError(f"several datasets hold images ({names}): name one with images=")


def _left_out(stacks: list[Stack]) -> list[str]:
    one = _the_one(stacks)
    names = ", ".join("/" + stack.data.path for stack in stacks[:8] if stack is not one)
    return [f"/{one.data.path} was read; {names} also look like images"] if names else []


def _nothing(root: Group, others: list[Data]) -> SourceError:
    if not others:
        return SourceError("holds no datasets at all")
    listed = ", ".join(f"/{data.path} {data.shape} {data.dtype}" for data in others[:6])
    return SourceError(f"no dataset looks like images; there is {listed}. Name one with images=, its axes with layout=")


_LABEL_NAMES = ("label", "labels", "y", "ans", "target", "targets", "class", "classes", "class_id", "class_ids")
_IMAGE_PARTS = ("x", "images", "image", "imgs", "img", "data")
_LABEL_PARTS = ("y", "labels", "label", "targets", "target", "ans", "classes", "class")
_LENGTHS = re.compile(r"(.*_)?(lengths?|lens?|nbytes|sizes?)")
_MAX_ROW = 4096  # numbers of one record's column


@dataclass(frozen=True, slots=True)
class SideColumn:
    """A dataset with one row per image.

    Args:
        data: the dataset.
        column: what it becomes.
    """

    data: Data
    column: Column


def find_columns(
    stack: Stack, root: Group, labels: str | None, paired: Group | None, notes: list[str]
) -> list[SideColumn]:
    """The columns that belong to a stack: its label, and whatever else in its group has one row per image.

    Args:
        stack: the images.
        root: of the file.
        labels: the path of the labels' dataset; "" for none at all; None to find them by name.
        paired: the root of a second file that holds the labels, or None.
        notes: gets a line for each thing a person should know.

    Raises:
        SourceError: the labels are not as many as the images, or are of a kind no column holds.
    """
    columns: list[SideColumn] = []
    label = None
    if labels != "":
        label = _named_label(root, labels) if labels else _label(stack, paired)
    if label is not None:
        columns.append(SideColumn(label, _label_spec(label, stack, notes)))
    taken = {label.path if label is not None else "", stack.data.path}
    for data in _members(stack.group):
        spec = _spec(data, data.path.rpartition("/")[2], stack.length)
        if data.path in taken or spec is None or (not stack.axes and _LENGTHS.fullmatch(spec.name)):
            continue
        columns.append(SideColumn(data, spec))
    return columns


def sizes_of(stack: Stack) -> tuple[Data | None, Data | None, Data | None]:
    """(lengths of padded rows, heights, widths of padded pixels): datasets of one number per image, or None each."""
    numbers = {data.path.rpartition("/")[2]: data for data in _members(stack.group) if _one_number(data, stack.length)}
    own = stack.data.path.rpartition("/")[2]
    lengths = [name for name in numbers if _LENGTHS.fullmatch(name)]
    exact = [name for name in lengths if name.startswith((own + "_", own.rstrip("s") + "_"))] or lengths
    if stack.axes:
        return None, numbers.get("image_heights"), numbers.get("image_widths")
    return (numbers[exact[0]] if len(exact) == 1 else None), None, None


def column_values(column: SideColumn, start: int, stop: int) -> list[Any]:
    """JSON-able values of some rows."""
    rows = column.data.read((slice(start, stop), *(slice(None) for _ in column.data.shape[1:])))
    if column.column.kind == "text":
        return [_text(value) for value in rows.reshape(-1)]
    flat = rows.reshape(stop - start, -1)
    values: list[Any] = flat.tolist()
    return values if column.column.shape else [row[0] for row in values]


def _text(value: Any) -> str:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
    return raw.decode("utf-8", "surrogateescape")


def _members(group: Group) -> list[Data]:
    found = []
    for member in group.members():
        if isinstance(member, Data) and not member.empty:
            found.append(member)
        if len(found) >= 1000:
            break
    return found


def _one_number(data: Data, length: int) -> bool:
    return data.dtype.kind in "iu" and data.shape[:1] == (length,) and math.prod(data.shape) == length


def _named_label(root: Group, path: str) -> Data:
    found = root.find(path)
    if not isinstance(found, Data):
        raise SourceError(f"no dataset at /{path.strip('/')}, which h5_labels= names")
    return found


def _label(stack: Stack, paired: Group | None) -> Data | None:
    """The labels by their names: the images' own name with the part for images exchanged, then the usual ones."""
    members = {data.path.rpartition("/")[2]: data for data in _members(paired if paired is not None else stack.group)}
    own = stack.data.path.rpartition("/")[2]
    parts = re.split(r"([_\-.])", own)
    for position, part in enumerate(parts):
        if part.lower() in _IMAGE_PARTS and len(parts) > 1:
            for other in _LABEL_PARTS:
                name = "".join([*parts[:position], other, *parts[position + 1 :]])
                if name in members:
                    return members[name]
    lowered = {name.lower(): data for name, data in members.items() if name != own}
    for name in _LABEL_NAMES:
        if name in lowered:
            return lowered[name]
    if paired is not None:
        raise SourceError(f"{paired.file}: no dataset of labels in it; it holds {', '.join(members) or 'nothing'}")
    return None


def _label_spec(data: Data, stack: Stack, notes: list[str]) -> Column:
    rows = data.shape[0] if data.shape else 0
    if rows != stack.length:
        raise SourceError(
            f"/{data.path} has {rows} labels, /{stack.data.path} has {stack.length} images; name the right labels with "
            "h5_labels=, or pass h5_labels='' for none"
        )
    spec = _spec(data, "label", stack.length)
    if spec is None:
        raise SourceError(f"/{data.path} (shape {data.shape}, {data.dtype}) is of a kind that no column holds")
    if data.dtype.kind == "f":
        notes.append(f"/{data.path} is {data.dtype}, not class ids: kept as a column of floats")
    elif spec.shape and spec.kind == "array":
        notes.append(f"/{data.path} has {spec.shape[0]} numbers per image: kept as a vector")
    return spec


def _spec(data: Data, name: str, length: int) -> Column | None:
    """The column for a dataset with one row per image, or None where no column holds it."""
    if not data.shape or data.shape[0] != length or data.variable == "bytes":
        return None
    name = f"{name}_" if name in OWN_COLUMNS else name
    if data.variable == "text" or (data.dtype.kind == "S" and len(data.shape) == 1):
        return text_column(name) if len(data.shape) == 1 else None
    width = math.prod(data.shape[1:])
    if data.dtype.kind not in "buif" or data.dtype.itemsize > 8 or not 0 < width <= _MAX_ROW:
        return None
    return Column(name, data.dtype.str, () if width == 1 else (width,))
