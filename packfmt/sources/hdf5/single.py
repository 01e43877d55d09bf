"""Images from files that keep one dataset per image, or one group per image with a text beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from packfmt.sources.hdf5.file import Data, Group, Visited
from packfmt.sources.hdf5.layouts import Found, image_axes, to_pixels
from packfmt.sources.hdf5.stacks import check_values, cut_padding, cut_string
from packfmt.sources.inputs import FolderClasses, natural
from packfmt.sources.isolated.frames import Item
from packfmt.sources.values import ValueFault

__all__ = ["SampleReader", "SingleReader"]

_TEXTS = {"txt": "caption", "class": "class", "name": "name"}
_LABEL: tuple[str, str, tuple[int | None, ...], str] = ("label", "<i8", (), "array")


class SingleReader:
    """Every dataset is an image; the groups are the classes, where there are several."""

    def __init__(self, found: Found, options: dict[str, Any]) -> None:
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
        columns = [_LABEL] if names else []
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

    def __init__(self, found: Found, options: dict[str, Any]) -> None:
        self.notes = list(found.notes)
        self.skipped: Counter[str] = Counter()
        self.first_episode = self.episodes = 0
        self._options = options
        self._root = found.root
        first = next(_samples(found.root, Visited()), None)
        self._texts = [name for name in _TEXTS if first is not None and isinstance(first.find(name), Data)]

    def plan(self) -> dict[str, Any]:
        """What the source needs to know beforehand."""
        columns = [(_TEXTS[name], "|u1", (None,), "text") for name in self._texts]
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
        return Item(group.path, fault="img is no image", columns=columns) if item is None else item

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
