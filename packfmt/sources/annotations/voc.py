"""Detection sets in Pascal VOC's XML: ``JPEGImages/x.jpg`` with ``Annotations/x.xml``.

defusedxml parses the XML. What it means is read by hand: torchvision gives nested dicts of text, and checks nothing.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from packfmt.errors import SourceError
from packfmt.record import Column
from packfmt.sources.annotations.boxes import BOXES, F64, LABELS, Boxed, BoxSource, as_boxes
from packfmt.sources.base import BadEntry
from packfmt.sources.inputs import Probe, is_hidden, is_image_name, read_inside

__all__ = ["VocSource", "recognise"]

IMAGES, ANNOTATIONS = "JPEGImages", "Annotations"
_MAX_XML = 4 << 20
_SIDES = ("xmin", "ymin", "xmax", "ymax")


def recognise(probe: Probe) -> bool:
    """Whether a folder has images and XML files where VOC has them."""
    if not os.path.isdir(os.path.join(probe.path, IMAGES)):
        return False
    with os.scandir(os.path.join(probe.path, ANNOTATIONS)) as found:
        return any(entry.name.lower().endswith(".xml") for entry in found)


class XmlError(ValueError):
    """An annotation that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class VocAnnotation:
    """What one XML file says: boxes as written, class names, difficult flags, and the image's size (0 if unsaid)."""

    boxes: F64
    names: list[str]
    difficult: list[int]
    width: float
    height: float


class VocSource(BoxSource):
    """Images and boxes of a Pascal VOC folder.

    An image and its XML file belong together by name; what the XML says of paths is not looked at. Boxes are kept as
    written: VOC counts pixels from 1 and includes the last, so a tool that wants zero-based edges subtracts 1 from xmin
    and ymin. Classes are the names that occur, sorted, for which the XML files are read once beforehand. ``difficult``
    (n,) uint8 is a column too; pose, truncation and parts are lost.

    XML with a document type or entities is refused unparsed, since entities can expand without bound or name files.

    Args:
        root: the folder that holds ``JPEGImages`` and ``Annotations``.

    Raises:
        FileNotFoundError: a folder is missing.
        SourceError: defusedxml is not installed.
    """

    kind = "voc"

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        load_defused()  # what is missing is said now, and not once for every image
        for name in (IMAGES, ANNOTATIONS):
            if not os.path.isdir(os.path.join(self.root, name)):
                raise FileNotFoundError(2, "no such folder; a Pascal VOC set has it", os.path.join(self.root, name))
        self.columns = (BOXES, LABELS, Column("difficult", "|u1", (None,)))
        self.lost = ["parts", "pose", "truncated"]
        names: set[str] = set()
        for image in self._images():
            try:
                annotation = self._read(image)
            except (XmlError, SourceError):
                continue  # a bad entry when its turn comes
            names.update(annotation.names if annotation is not None else ())
        self.classes = tuple(sorted(names))

    def count(self) -> int | None:
        return len(self._images())

    def entries(self) -> Iterator[Boxed | BadEntry]:
        self.counted.clear()
        self.skipped.clear()
        images = self._images(counted=True)
        labels = {name: number for number, name in enumerate(self.classes)}
        stems = {os.path.splitext(image)[0] for image in images}
        for name in os.listdir(os.path.join(self.root, ANNOTATIONS)):
            if name.lower().endswith(".xml") and name[:-4] not in stems:
                self.counted.add("annotation files belong to no image and are lost")
        nothing = VocAnnotation(as_boxes([]), [], [], 0, 0)
        for image in images:
            key = f"{IMAGES}/{image}"
            try:
                annotation = self._read(image) or nothing
            except (XmlError, SourceError) as error:
                yield BadEntry(key, f"its annotation: {error}")
                continue
            self.count_boxes(annotation.boxes, annotation.width, annotation.height)
            ids = np.array([labels[name] for name in annotation.names], np.int64)
            yield Boxed(key, annotation.boxes, ids, {"difficult": np.array(annotation.difficult, np.uint8)})

    def _images(self, *, counted: bool = False) -> list[str]:
        names = []
        for name in sorted(os.listdir(os.path.join(self.root, IMAGES)), key=os.fsencode):
            if is_image_name(name) and not is_hidden(name):
                names.append(name)
            elif counted:
                self.skipped["hidden or system file" if is_hidden(name) else "not an image"] += 1
        return names

    def _read(self, image: str) -> VocAnnotation | None:
        path = f"{ANNOTATIONS}/{os.path.splitext(image)[0]}.xml"
        try:
            return parse_voc(read_inside(self.root, path, _MAX_XML))
        except FileNotFoundError:
            return None


def parse_voc(data: bytes) -> VocAnnotation:
    """Parse one annotation file.

    Raises:
        XmlError: the bytes are not a VOC annotation, or hold a document type or entity declaration.
    """
    defused = load_defused()
    try:
        tree = defused.ElementTree.fromstring(data, forbid_dtd=True)
    except defused.DefusedXmlException as error:
        raise XmlError("it declares a document type or entities, which are refused; remove the declaration") from error
    except (ET.ParseError, LookupError, ValueError) as error:  # the last two: an encoding that expat does not know
        raise XmlError(f"it is not XML that can be read ({error}); save it as UTF-8") from error
    rows, names, difficult = [], [], []
    for item in tree.iter("object"):
        name = (item.findtext("name") or "").strip()
        box = item.find("bndbox")
        if not name or box is None:
            raise XmlError("an object has no name or no bndbox")
        xmin, ymin, xmax, ymax = (_side(box, side) for side in _SIDES)
        rows.append((xmin, ymin, xmax, ymax))
        names.append(name)
        difficult.append(int((item.findtext("difficult") or "0").strip() == "1"))
    return VocAnnotation(as_boxes(rows), names, difficult, _size(tree, "width"), _size(tree, "height"))


def load_defused() -> Any:
    """The module defusedxml, with its ElementTree: entities neither expand without bound nor name files there.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import defusedxml.ElementTree
    except ImportError as error:
        raise SourceError("reading Pascal VOC needs defusedxml: pip install 'packfmt[convert]'") from error
    return defusedxml


def _side(box: ET.Element, name: str) -> float:
    text = (box.findtext(name) or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e9:
        raise XmlError(f"{name} is {text[:40]!r}, not a number")
    return value


def _size(tree: ET.Element, name: str) -> float:
    text = (tree.findtext(f"size/{name}") or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
