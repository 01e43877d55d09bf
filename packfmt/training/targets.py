"""What training is told about an image: labels, boxes, any column."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from packfmt.images.boxes import crop_boxes, turn_boxes
from packfmt.record import BOXES
from packfmt.storage.base import RecordReader
from packfmt.training.collate import collate_column, collate_targets

if TYPE_CHECKING:  # a plan knows its pipeline, and that its targets
    from packfmt.training.plan import Plan

__all__ = ["BoxFrame", "TargetForm", "TargetOptions", "Targets"]

NO_LABEL = -1
LABELS = "labels"  # of boxes

TargetForm = Literal["columns", "torchvision"]
BoxFrame = Literal["shown", "stored", "upright"]
BACK = {6: 8, 8: 6}  # the orientation that undoes one, where it is another


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What a dataset's options of these names ask of targets: see ``ImageDataset``.

    Raises:
        ValueError: an option is none of those allowed, or they do not go together.
    """

    fields: str | Sequence[str] | None
    transform: Callable[[Any], Any] | None
    form: TargetForm
    label_offset: int
    boxes: BoxFrame
    orientation: Literal["ignore", "apply"]

    def __post_init__(self) -> None:
        for name, value, allowed in (("targets", self.form, TargetForm), ("boxes", self.boxes, BoxFrame)):
            if value not in get_args(allowed):
                raise ValueError(f"{name}={value!r}, allowed are {', '.join(map(repr, get_args(allowed)))}")
        if self.label_offset and self.form != "torchvision":
            raise ValueError(f"label_offset={self.label_offset!r} goes with targets='torchvision' only")

    @property
    def names(self) -> tuple[str, ...] | None:
        """The columns asked for; None for the default."""
        asked = (self.fields,) if isinstance(self.fields, str) else self.fields
        if self.form == "torchvision":
            return tuple(dict.fromkeys((BOXES, LABELS, *(asked or ()))))
        return None if asked is None else tuple(asked)

    @property
    def turning(self) -> Literal["upright", "back"] | None:
        """How boxes are to be turned, from the image that they were drawn on to the one that is shown."""
        shown = "upright" if self.orientation == "apply" else "stored"
        return None if self.boxes in ("shown", shown) else "upright" if shown == "upright" else "back"


class Targets:
    """Makes targets from columns. Thread-safe, picklable.

    Args:
        reader: whose columns.
        options: which of them, and in what form.

    Raises:
        ValueError: there is no such column.
    """

    def __init__(self, reader: RecordReader, options: TargetOptions) -> None:
        self._reader = reader
        names = options.names
        self._names = names or ()
        self._several = names is not None and not isinstance(options.fields, str)
        self.transform = options.transform
        self._label_offset = options.label_offset
        self._torchvision = options.form == "torchvision"
        self._turning = options.turning if BOXES in self._names else None
        if names is None and "label" in reader.columns:
            self._names = ("label",)
        unknown = [name for name in self._names if name not in reader.columns]
        if unknown:
            needed = f"; targets='torchvision' needs {BOXES} and {LABELS}" if self._torchvision else ""
            raise ValueError(f"{reader.path}: no columns {unknown}; there are {', '.join(reader.columns)}{needed}")

    @property
    def listed(self) -> bool:
        """Whether the targets of a batch are a list of those of its samples."""
        return self._torchvision

    def with_transform(self, transform: Callable[[Any], Any] | None) -> Targets:
        """The same targets, with another function called with each."""
        other = copy.copy(self)
        other.transform = transform
        return other

    def of_batch(self, plan: Plan, positions: Sequence[int]) -> Any:
        """Targets of these places in a batch, collated: (n,) tensors for numbers, lists for what differs in length."""
        if self.transform is not None or self._torchvision or plan.targets is not None:
            return self.of_samples(plan, positions)[1]()
        return self._collated(self._columns(plan, positions), len(positions))

    def of_samples(self, plan: Plan, positions: Sequence[int]) -> tuple[list[Any], Callable[[], Any]]:
        """The targets of these places one by one, each a number, array, str or bytes, a dict of them, or what a
        transform made of it; and what gives them collated as ``of_batch`` does, with changes made in them."""
        if plan.targets is None:
            return self.from_columns(plan, positions)
        return self._with_collation([plan.targets[position] for position in positions])

    def from_columns(self, plan: Plan, positions: Sequence[int]) -> tuple[list[Any], Callable[[], Any]]:
        """``of_samples`` before ``transforms`` of an image and its target."""
        columns = self._columns(plan, positions)
        for name, column in columns.items():
            if isinstance(column, list):  # maybe of views of the file
                columns[name] = [value.copy() if isinstance(value, np.ndarray) else value for value in column]
        values = [_plain(column) for column in columns.values()]
        targets: list[Any]
        if self._several:
            rows = zip(*values, strict=True) if values else [()] * len(positions)
            targets = [dict(zip(columns, row, strict=True)) for row in rows]
        else:
            targets = values[0] if values else [NO_LABEL] * len(positions)
        if self._torchvision:
            indices = plan.indices[np.asarray(positions, np.int64)].tolist()
            targets = list(map(self._as_torchvision, targets, indices))
        elif self.transform is None:
            return targets, partial(self._collated, columns, len(positions))
        return self._with_collation(targets if self.transform is None else list(map(self.transform, targets)))

    def _with_collation(self, targets: list[Any]) -> tuple[list[Any], Callable[[], Any]]:
        return targets, partial(list if self._torchvision else collate_targets, targets)

    def _columns(self, plan: Plan, positions: Sequence[int]) -> dict[str, Any]:
        columns = {name: self._values(name, plan, positions) for name in self._names}
        if BOXES in columns:
            self._move_boxes(columns, plan, positions)
        return columns

    def _collated(self, columns: dict[str, Any], count: int) -> Any:
        if self._several:
            return {name: collate_column(column) for name, column in columns.items()}
        return collate_column(columns[self._names[0]] if columns else np.full(count, NO_LABEL, np.int64))

    def _values(self, name: str, plan: Plan, positions: Sequence[int]) -> Any:
        indices = plan.indices
        if len(positions) != len(indices):
            indices = indices[np.asarray(positions, dtype=np.int64)]
        # An index array makes numpy copy: targets are the user's own, writable, and no view of the file.
        return self._reader.columns[name][indices]

    def _as_torchvision(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        """What torchvision's detection models take, and other columns as they are, numbers as tensors."""
        boxes = np.asarray(row[BOXES], np.float32).reshape(-1, 4)
        labels = np.asarray(row[LABELS]).astype(np.int64) + self._label_offset
        if labels.shape != boxes.shape[:1]:
            raise ValueError(
                f"{self._reader.path}: record {index}, key {self._reader.key(index)!r}: {len(boxes)} boxes are left "
                f"and {labels.size} {LABELS}; targets='torchvision' needs one for each"
            )
        others = {
            name: value if isinstance(value, (str, bytes)) else torch.as_tensor(value) for name, value in row.items()
        }
        target = {BOXES: torch.from_numpy(boxes), LABELS: torch.from_numpy(labels), "image_id": torch.tensor(index)}
        return {**others, **target}

    def _move_boxes(self, values: dict[str, Any], plan: Plan, positions: Sequence[int]) -> None:
        """Carry boxes through turn, crop and flip, and drop with a vanished box what other ragged columns say of it."""
        if self._turning:
            self._turn_boxes(values, plan, positions)
        if plan.boxes is None and plan.flips is None and not self._torchvision:
            return
        count = len(values[BOXES][0]) if positions and isinstance(values[BOXES], np.ndarray) else None
        for name, value in values.items():  # what has one length in the pack has none any more
            counted = (count is not None and value.shape[1:2] == (count,)) if isinstance(value, np.ndarray) else False
            if counted or (self._torchvision and name == LABELS):
                values[name] = list(value)
        ragged = [name for name, value in values.items() if isinstance(value, list)]
        for place, position in enumerate(positions):
            whole = (0, 0, plan.widths[position], plan.heights[position])
            crop = whole if plan.boxes is None else plan.boxes[position]
            flip = 0 if plan.flips is None else plan.flips[position]
            moved, keep = crop_boxes(values[BOXES][place], crop, plan.size(position), flip)
            values[BOXES][place] = moved[keep]
            for name in ragged:
                if name != BOXES:
                    values[name][place] = _left(values[name][place], keep)

    def _turn_boxes(self, values: dict[str, Any], plan: Plan, positions: Sequence[int]) -> None:
        """Carry boxes from the image that they were drawn on to the one that is shown."""
        tags = self._values("orientation", plan, positions)
        if isinstance(values[BOXES], np.ndarray):  # as crops make of them, whatever they were
            values[BOXES] = values[BOXES].astype(np.float32)
        for place, position in enumerate(positions):
            tag = int(tags[place])
            tag = BACK.get(tag, tag) if self._turning == "back" else tag
            size = int(plan.heights[position]), int(plan.widths[position])
            values[BOXES][place] = turn_boxes(values[BOXES][place], tag, size)


def _plain(column: Any) -> list[Any]:
    """The values of a column: numbers as Python's own, arrays as parts of it.

    Floats of less than 64 bits keep their type, which torch's collation would otherwise make 64 bits of.
    """
    if not isinstance(column, np.ndarray):
        return [value if _is_narrow(value) or not isinstance(value, np.generic) else value.item() for value in column]
    return list(column) if _is_narrow(column) or column.ndim > 1 else column.tolist()


def _is_narrow(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "f" and value.dtype.itemsize < 8


def _left(value: Any, keep: npt.NDArray[np.bool_]) -> Any:
    """The entries of the boxes that are left, where a value has one for each box; else the value."""
    if isinstance(value, list) and len(value) == len(keep):
        return [entry for entry, stays in zip(value, keep.tolist(), strict=True) if stays]
    if getattr(value, "ndim", 0) and len(value) == len(keep):  # an array, or a stream's tensor
        return value[keep]
    return value
