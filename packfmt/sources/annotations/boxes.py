"""What the sources of detection sets share: images below a root, each with its boxes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.errors import DecodeError, SourceError
from packfmt.images.sniff import sniff
from packfmt.record import Column, Record
from packfmt.sources.base import Source
from packfmt.sources.inputs import MAX_IMAGE_BYTES, CountedNotes, read_inside

__all__ = ["BOXES", "LABELS", "BoxSource", "Boxed", "as_boxes"]

BOXES = Column("boxes", "<f4", (None, 4))
LABELS = Column("labels", "<i8", (None,))

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Boxed:
    """An image that is not read yet, with its boxes.

    Args:
        key: its path relative to the root.
        boxes: (n, 4) xmin, ymin, xmax, ymax; in pixels, or in fractions of width and height where ``relative``.
        labels: (n,) class ids.
        more: further columns.
        relative: whether ``boxes`` are fractions.
    """

    key: str
    boxes: F64
    labels: npt.NDArray[np.int64]
    more: dict[str, Any] = field(default_factory=dict)
    relative: bool = False


def as_boxes(rows: list[tuple[float, float, float, float]]) -> F64:
    """The rows as an (n, 4) array.

    Raises:
        ValueError: a side is not a finite number as float32, which is what is stored.
    """
    boxes = np.array(rows, np.float64).reshape(-1, 4)
    with np.errstate(over="ignore"):
        finite = np.isfinite(boxes.astype(np.float32))
    if not finite.all():
        raise ValueError(f"a box side is {boxes[~finite][0]:g}; it must be a finite float32, so below 3.4e38")
    return boxes


class BoxSource(Source):
    """Images with boxes. Columns: ``boxes`` (n, 4) float32 xmin, ymin, xmax, ymax in pixels of the stored image, before
    any EXIF rotation, and ``labels`` (n,) int64, which count ``classes``.

    Boxes without area and boxes that reach outside their image are kept and counted in ``notes``. An image without
    annotations has no boxes and is kept. ``load`` is thread-safe.

    Args:
        root: the folder that holds the images; no path leads out of it.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    random_access = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__()
        self.root = os.fspath(root)
        if not os.path.isdir(self.root):
            raise FileNotFoundError(2, "no such folder of images", self.root)
        self.columns = (BOXES, LABELS)
        self.counted = CountedNotes(self.notes)

    def _load(self, entry: Any) -> Record:
        boxed: Boxed = entry
        try:
            data = read_inside(self.root, boxed.key, MAX_IMAGE_BYTES)
            boxes = boxed.boxes
            if boxed.relative and len(boxes):
                info = sniff(data)
                boxes = boxes * np.array([info.width, info.height] * 2)
        except FileNotFoundError as error:
            raise DecodeError("the image is missing", path=self.root, key=boxed.key) from error
        except SourceError as error:
            raise DecodeError(str(error), key=boxed.key) from error
        except DecodeError as error:
            raise DecodeError(error.message, path=self.root, key=boxed.key) from error
        columns = {"boxes": boxes.astype(np.float32), "labels": boxed.labels, **boxed.more}
        return Record(data, boxed.key, columns)

    def count_boxes(self, boxes: F64, width: float, height: float, slack: float = 0) -> None:
        """Note what is odd about the boxes of one image.

        Args:
            boxes: (n, 4), in the unit of ``width`` and ``height``.
            width: of the image; 0 where it is not known.
            height: likewise.
            slack: how far outside a box may reach unnoticed.
        """
        empty = int((boxes[:, 2:] <= boxes[:, :2]).any(axis=1).sum())
        self.counted.add("boxes have no area; kept as they are", empty)
        if width > 0 and height > 0:
            outside = (boxes < -slack).any(axis=1) | (boxes[:, 0::2] > width + slack).any(axis=1)
            outside |= (boxes[:, 1::2] > height + slack).any(axis=1)
            self.counted.add("boxes reach outside their image; kept as they are", int(outside.sum()))
        if not len(boxes):
            self.counted.add("images have no boxes; kept with none")
