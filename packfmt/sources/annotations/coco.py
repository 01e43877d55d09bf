"""Detection sets in COCO's JSON (cocodataset.org/#format-data).

By hand, because pycocotools takes what the file says as it is; here each entry is checked, and a bad one costs one
image.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from packfmt.errors import SourceError
from packfmt.record import Column
from packfmt.sources.annotations.boxes import BOXES, LABELS, Boxed, BoxSource, as_boxes
from packfmt.sources.base import BadEntry
from packfmt.sources.inputs import Probe, SeenKeys, inside_key, resolve_inside

__all__ = ["CocoSource", "recognise"]

_ISCROWD = Column("iscrowd", "|u1", (None,))
_PEEKED_BYTES = 1 << 20  # at the start, and at the end
_KNOWN = {"id", "image_id", "category_id", "bbox", "iscrowd", "area"}

_PIECE = 1 << 20  # bytes read at a time
_BYTES_PER_BRACKET = 8  # the shortest annotation has 25
_FEW = 10_000


def recognise(probe: Probe) -> bool:
    """Whether a JSON file names the parts of a COCO set near its start or its end."""
    if probe.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{":
        return False
    with open(probe.first, "rb") as file:
        text = file.read(_PEEKED_BYTES)
        file.seek(max(0, os.path.getsize(probe.first) - _PEEKED_BYTES))
        text += file.read(_PEEKED_BYTES)
    return (
        sum(name in text for name in (b'"images"', b'"annotations"', b'"categories"')) >= 2 and b'"file_name"' in text
    )


class CocoSource(BoxSource):
    """Images and boxes of a COCO annotation file.

    Classes are the categories in the order of their ids, and ``labels`` counts them from 0; the ids are in
    ``metadata["category_ids"]``. ``bbox`` (x, y, width, height) becomes xmin, ymin, xmax, ymax. ``iscrowd`` (n,) uint8
    is a column where an annotation has it. Other fields, segmentations among them, are in ``describe()["lost"]``.
    An image whose annotations are damaged is a bad entry; annotations of an image that is not listed are noted.

    Memory: the annotation file is parsed whole, at five to ten times its size.

    Args:
        annotations: the JSON file.
        root: the folder that ``file_name`` is relative to; None to look for the first image beside the file, in
            ``images``, and in a folder named after the split (``instances_val2017.json`` and ``val2017``).

    Raises:
        FileNotFoundError: there is no such file or folder.
        SourceError: it is not a COCO file, or lists an image id or file name twice.
    """

    kind = "coco"

    def __init__(self, annotations: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> None:
        self._path = os.fspath(annotations)
        content = self._parse()
        self._images: list[dict[str, Any]] = content["images"]
        super().__init__(root if root is not None else self._find_root())
        self._read_categories(content["categories"])
        self._read_annotations(content["annotations"])
        self._check_images()

    def count(self) -> int | None:
        return len(self._images)

    def entries(self) -> Iterator[Boxed | BadEntry]:
        self.counted.clear()
        self.counted.add("annotations belong to no listed image and are lost", self._orphans)
        for image in self._images:
            name = image["file_name"]
            try:
                key = inside_key(self.root, name)
                boxed = self._boxed(key, self._of_image.get(image["id"], []))
            except (SourceError, ValueError, TypeError, KeyError) as error:
                yield BadEntry(name, f"image id {image['id']}: {error}")
                continue
            self.count_boxes(boxed.boxes, _number(image.get("width")), _number(image.get("height")))
            yield boxed

    def _boxed(self, key: str, annotations: list[dict[str, Any]]) -> Boxed:
        rows, labels, crowds = [], [], []
        for annotation in annotations:
            bbox = annotation.get("bbox")
            if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
                what = f"bbox is {str(bbox)[:80]}, not four finite numbers"
                raise ValueError(f"annotation {annotation.get('id')}: {what}")
            if (category := annotation.get("category_id")) not in self._labels:
                raise ValueError(f"annotation {annotation.get('id')}: no category has id {category!r}")
            crowd = annotation.get("iscrowd", 0)
            if crowd not in (0, 1):
                raise ValueError(f"annotation {annotation.get('id')}: iscrowd is {crowd!r}, not 0 or 1")
            x, y, width, height = map(float, bbox)
            rows.append((x, y, x + width, y + height))
            labels.append(self._labels[category])
            crowds.append(crowd)
        more = {"iscrowd": np.array(crowds, np.uint8)} if _ISCROWD in self.columns else {}
        return Boxed(key, as_boxes(rows), np.array(labels, np.int64), more)

    def _parse(self) -> dict[str, Any]:
        try:
            self._refuse_mostly_brackets()
            with open(self._path, encoding="utf-8-sig") as file:
                content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{self._path} is not JSON ({error})") from error
        for name in ("images", "annotations", "categories"):
            items = content.get(name) if isinstance(content, dict) else None
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise SourceError(f"{self._path} is not a COCO file: it has no list of objects {name!r}")
        for image in content["images"]:
            if not isinstance(image.get("file_name"), str) or not isinstance(image.get("id"), (int, str)):
                raise SourceError(f"{self._path}: an image has no file_name or id: {str(image)[:200]}")
        found: dict[str, Any] = content
        return found

    def _refuse_mostly_brackets(self) -> None:
        """Such files may have any size, and take several times it when parsed; one of ``[],[],`` takes 25 times it."""
        size = brackets = 0
        with open(self._path, "rb") as file:
            while piece := file.read(_PIECE):
                size += len(piece)
                brackets += piece.count(b"[") + piece.count(b"{")
                if brackets > _FEW + size // _BYTES_PER_BRACKET:
                    raise ValueError(f"{brackets:,} lists and objects in {size:,} bytes; annotations have far fewer")

    def _find_root(self) -> str:
        folder = os.path.dirname(os.path.abspath(self._path))
        above = os.path.dirname(folder)
        split = os.path.splitext(os.path.basename(self._path))[0].rpartition("_")[2]
        places = [folder, os.path.join(folder, "images")]
        for base in (above, os.path.join(above, "images")):
            places += [os.path.join(base, split), base]
        if not self._images:
            return folder
        first = self._images[0]["file_name"]
        for place in places:
            try:
                if os.path.isdir(place) and resolve_inside(place, first).is_file():
                    return place
            except SourceError:
                continue
        raise SourceError(f"{self._path}: its image {first!r} is in none of {', '.join(places)}; give the root folder")

    def _read_categories(self, categories: list[dict[str, Any]]) -> None:
        names: dict[int, str] = {}
        for category in categories:
            number, name = category.get("id"), category.get("name")
            if not isinstance(number, int) or not isinstance(name, str) or number in names:
                raise SourceError(f"{self._path}: a category without its own id and name: {str(category)[:200]}")
            names[number] = name
        ids = sorted(names)
        self.classes = tuple(names[number] for number in ids)
        self.metadata["category_ids"] = ids
        self._labels = {number: label for label, number in enumerate(ids)}

    def _read_annotations(self, annotations: list[dict[str, Any]]) -> None:
        listed = {image["id"] for image in self._images}
        self._of_image: dict[int | str, list[dict[str, Any]]] = {}
        self._orphans = 0
        fields: Counter[str] = Counter()
        for annotation in annotations:
            image = annotation.get("image_id")
            fields.update(annotation.keys())
            if not isinstance(image, (int, str)) or image not in listed:
                self._orphans += 1
                continue
            for name in annotation.keys() - _KNOWN:
                del annotation[name]
            self._of_image.setdefault(image, []).append(annotation)
        self.lost = sorted(fields.keys() - _KNOWN)
        self.columns = (BOXES, LABELS, _ISCROWD) if "iscrowd" in fields else (BOXES, LABELS)

    def _check_images(self) -> None:
        ids: set[int | str] = set()
        seen = SeenKeys()
        for place, image in enumerate(self._images):
            if image["id"] in ids:
                raise SourceError(f"{self._path}: two images have the id {image['id']!r}")
            ids.add(image["id"])
            try:
                earlier = seen.add(inside_key(self.root, image["file_name"]), place)
            except SourceError:
                continue  # a bad entry when its turn comes
            if earlier is not None:
                raise SourceError(
                    f"{self._path}: images {self._images[earlier]['id']!r} and {image['id']!r} are both "
                    f"{image['file_name']!r}; keys must differ"
                )


def _is_number(value: Any) -> bool:
    """Whether it is a number that float() takes: JSON's integers have no end."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0
