"""Detection sets in YOLO's text files: one line "class cx cy width height" a box, in fractions of the image.

By hand, because the format's own reader is part of ultralytics' training code, which brings torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from packfmt.errors import SourceError
from packfmt.sources.annotations.boxes import Boxed, BoxSource, as_boxes
from packfmt.sources.base import BadEntry
from packfmt.sources.inputs import Probe, is_hidden, is_image_name, read_inside

__all__ = ["YoloSource", "recognise", "yaml_names"]

_MAX_TEXT = 4 << 20
NAME_FILES = ("classes.txt", "obj.names", "labels/classes.txt", "data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
_LABEL_HEAD = 4096
_LOOKED_AT = 500  # label files and folders of them; a set may begin with many images of nothing
_SETS = 8  # such as train, valid and test
_MAX_CLASS = 1_000_000
_PLAIN = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")  # a list or map without a tag of its own


def yaml_names(text: str) -> tuple[str, ...]:
    """The entry ``names`` of a data.yaml: a list of names, or a map of ``0: name`` and so on; empty for anything else.

    Nothing is constructed: names are the scalars as they are written. Names that are not as many as ``nc`` says give
    none: a name too few or too many would give all later ids the names of other classes.

    Raises:
        SourceError: PyYAML is not installed.
    """
    yaml = load_yaml()
    try:
        root = yaml.compose(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))  # the C one where it was built
    except (yaml.YAMLError, RecursionError):
        return ()
    if not isinstance(root, yaml.MappingNode):
        return ()
    entries = {key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)}
    names, count = entries.get("names"), entries.get("nc")
    if isinstance(names, yaml.SequenceNode):
        nodes = names.value
    elif isinstance(names, yaml.MappingNode):
        numbered = {key.value: value for key, value in names.value if isinstance(key, yaml.ScalarNode)}
        if len(numbered) != len(names.value):  # a number twice
            return ()
        nodes = [numbered.get(str(number)) for number in range(len(numbered))]
    else:
        return ()
    if names.tag not in _PLAIN or not all(_is_name(node, yaml) for node in nodes):
        return ()
    found = tuple(node.value for node in nodes)
    if isinstance(count, yaml.ScalarNode) and count.value.isdecimal() and int(count.value) != len(found):
        return ()
    return found


def _is_name(node: Any, yaml: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and bool(node.value or node.style)  # nothing, unquoted, is null


def load_yaml() -> Any:
    """The module yaml.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise SourceError("class names in YAML need PyYAML: pip install 'packfmt[convert]'") from error
    return yaml


def recognise(probe: Probe) -> bool:
    """Whether a folder ``labels`` beside ``images``, here or one folder below, holds a text file of boxes.

    Where the root names classes as YOLO sets do, any text file of an image's name will do: all may be empty or damaged.
    """
    if not probe.is_folder:
        return False
    named = any(os.path.isfile(os.path.join(probe.path, name)) for name in NAME_FILES)
    with os.scandir(probe.path) as found:
        above = [probe.path, *sorted(entry.path for entry in found if entry.is_dir(follow_symlinks=False))]
    sets = [path for path in above if all(os.path.isdir(os.path.join(path, name)) for name in ("images", "labels"))]
    return any(named or _holds_boxes(path) for folder in sets[:_SETS] for path in _label_files(folder))


def _label_files(folder: str) -> Iterator[str]:
    """Text files below ``labels`` that have the name of an image in the same place below ``images``.

    A README or a list of files beside the labels says nothing of the set, so they are passed over.
    """
    labels, images = os.path.join(folder, "labels"), os.path.join(folder, "images")
    looked_at = 0
    for place, folders, names in os.walk(labels):
        folders.sort()
        stems = _image_stems(os.path.join(images, os.path.relpath(place, labels)))
        looked_at += 1
        for name in sorted(names) if stems else ():
            path = os.path.join(place, name)
            if name.endswith(".txt") and name[:-4] in stems and os.path.isfile(path) and not os.path.islink(path):
                looked_at += 1
                yield path
            if looked_at > _LOOKED_AT:
                break
        if looked_at > _LOOKED_AT:
            break


def _image_stems(folder: str) -> set[str]:
    try:
        return {os.path.splitext(name)[0] for name in os.listdir(folder) if is_image_name(name)}
    except OSError:
        return set()


def _holds_boxes(path: str) -> bool:
    """Whether a box is read from it; one damaged or empty file (an image of nothing) does not speak for the set."""
    try:
        with open(path, "rb") as file:
            head = file.read(_LABEL_HEAD)
        return bool(parse_yolo(head[: head.rfind(b"\n") + 1] if len(head) == _LABEL_HEAD else head))
    except (OSError, ValueError):
        return False


class YoloSource(BoxSource):
    """Images and boxes of a YOLO folder.

    An image's labels are in the file of its name in ``labels`` where the path has ``images`` (``train/images/x.jpg`` or
    ``images/train/x.jpg``), else beside it. Boxes become pixels of the stored image. A line of more than five numbers
    is a polygon (its bounding box is kept) or, with six, has a confidence (lost); both are noted. Class names come
    from classes.txt, obj.names or data.yaml in the root; paths in these files are not followed.

    Args:
        root: the folder that holds images and labels.

    Raises:
        FileNotFoundError: there is no such folder.
        SourceError: the file of class names cannot be read.
    """

    kind = "yolo"

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.classes = self._read_classes()

    def entries(self) -> Iterator[Boxed | BadEntry]:
        self.counted.clear()
        self.skipped.clear()
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted((name for name in folders if not is_hidden(name)), key=os.fsencode)
            here = os.path.relpath(folder, self.root).replace(os.sep, "/")
            prefix = "" if here == "." else here + "/"
            images = [name for name in sorted(files, key=os.fsencode) if is_image_name(name) and not is_hidden(name)]
            for name in images:
                yield self._entry(prefix + name)
            self._count_orphans(prefix, {os.path.splitext(name)[0] for name in images})

    def _entry(self, key: str) -> Boxed | BadEntry:
        lines: list[list[float]] = []
        try:
            lines = parse_yolo(read_inside(self.root, _label_path(key), _MAX_TEXT))
        except FileNotFoundError:
            pass  # an image without boxes
        except (SourceError, ValueError) as error:
            return BadEntry(key, f"its labels: {error}")
        too_high = [int(line[0]) for line in lines if self.classes and line[0] >= len(self.classes)]
        if too_high:
            return BadEntry(key, f"its labels: class {too_high[0]} of {len(self.classes)} named classes (from 0)")
        rows = [_corners(line) for line in lines]
        self.counted.add("polygons were reduced to their bounding boxes", sum(len(line) > 6 for line in lines))
        self.counted.add("confidences beside boxes are lost", sum(len(line) == 6 for line in lines))
        boxes = as_boxes(rows)
        self.count_boxes(boxes, 1, 1, slack=1e-6)  # six written digits may sum to a hair above 1
        return Boxed(key, boxes, np.array([int(line[0]) for line in lines], np.int64), relative=True)

    def _count_orphans(self, prefix: str, stems: set[str]) -> None:
        place = os.path.dirname(os.path.join(self.root, _label_path(prefix + "x.jpg")))
        try:
            names = os.listdir(place)
        except OSError:
            return
        if stems:
            orphans = [name for name in names if name.endswith(".txt") and name[:-4] not in stems | {"classes"}]
            self.counted.add("label files belong to no image and are lost", len(orphans))

    def _read_classes(self) -> tuple[str, ...]:
        for name in NAME_FILES:
            try:
                text = read_inside(self.root, name, _MAX_TEXT).decode("utf-8-sig")
            except FileNotFoundError:
                continue
            except UnicodeDecodeError as error:
                raise SourceError(f"{os.path.join(self.root, name)} is not UTF-8 ({error.reason})") from error
            if name.endswith(("yaml", "yml")):
                names = yaml_names(text)
                if not names:
                    what = "has no list of names that was understood and is as long as nc says"
                    self.notes.append(f"{name} {what}; classes have numbers only")
                return names
            return tuple(line.strip() for line in text.splitlines() if line.strip())
        return ()


def parse_yolo(data: bytes) -> list[list[float]]:
    """The lines of a label file: class, then fractions: centre and size, or a polygon's points.

    Raises:
        ValueError: a line is none of these; the message has its number.
    """
    lines = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        cells = line.split()
        if not cells:
            continue
        try:
            values = [float(cell) for cell in cells]
        except ValueError:
            raise ValueError(f"line {number} holds {line[:60]!r}, not numbers") from None
        if not all(abs(value) < 1e6 for value in values) or not 0 <= values[0] < _MAX_CLASS or values[0] % 1:
            raise ValueError(f"line {number}: {line[:60]!r} does not start with a class id, or holds no fractions")
        if len(values) not in (5, 6) and (len(values) < 7 or len(values) % 2 == 0):
            raise ValueError(f"line {number} holds {len(values)} numbers; a box has 5, a polygon an odd number from 7")
        lines.append(values)
    return lines


def _label_path(key: str) -> str:
    parts = key.split("/")
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return os.path.splitext("/".join(parts))[0] + ".txt"


def _corners(line: list[float]) -> tuple[float, float, float, float]:
    if len(line) > 6:
        xs, ys = line[1::2], line[2::2]
        return min(xs), min(ys), max(xs), max(ys)
    x, y, width, height = line[1:5]
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2
