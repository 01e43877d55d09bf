"""What training is told about an image: labels, boxes, any column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.images.boxes import crop_boxes
from packfmt.storage import Reader
from packfmt.training.collate import collate_column, collate_targets
from packfmt.training.plan import BatchPlan

__all__ = ["BOXES", "Targets"]

BOXES = "boxes"
NO_LABEL = -1


class Targets:
    """Makes targets from columns. Thread-safe, picklable.

    Args:
        reader: whose columns.
        fields: a column name, several, or None for ``label``.
        transform: called with each target, or None.

    Raises:
        ValueError: there is no such column.
    """

    def __init__(
        self, reader: Reader, fields: str | Sequence[str] | None, transform: Callable[[Any], Any] | None
    ) -> None:
        self._reader = reader
        self._names = (fields,) if isinstance(fields, str) else tuple(fields or ())
        self._several = fields is not None and not isinstance(fields, str)
        self._transform = transform
        if fields is None and "label" in reader.columns:
            self._names = ("label",)
        unknown = [name for name in self._names if name not in reader.columns]
        if unknown:
            raise ValueError(f"{reader.path}: no columns {unknown}; there are {', '.join(reader.columns)}")

    def of_batch(self, plan: BatchPlan, positions: Sequence[int]) -> Any:
        """Targets of these places in a batch, collated: (n,) tensors for numbers, lists for what differs in length."""
        if self._transform is not None:
            return collate_targets([self.of_sample(plan, position) for position in positions])
        if not self._names and not self._several:
            return collate_column(np.full(len(positions), NO_LABEL, np.int64))
        values = {name: self._values(name, plan, positions) for name in self._names}
        if BOXES in values:
            self._move_boxes(values, plan, positions)
        collated = {name: collate_column(value) for name, value in values.items()}
        return collated if self._several else collated[self._names[0]]

    def of_sample(self, plan: BatchPlan, position: int) -> Any:
        """The target of one place in a batch: a number, array, str or bytes, or a dict of them."""
        values = {name: self._values(name, plan, [position]) for name in self._names}
        if BOXES in values:
            self._move_boxes(values, plan, [position])
        row = {name: _plain(value[0]) for name, value in values.items()}
        target = row if self._several else row[self._names[0]] if self._names else NO_LABEL
        return target if self._transform is None else self._transform(target)

    def _values(self, name: str, plan: BatchPlan, positions: Sequence[int]) -> Any:
        indices = plan.choices.indices
        if len(positions) != len(indices):
            indices = indices[np.asarray(positions, dtype=np.int64)]
        # An index array makes numpy copy: targets are the user's own, writable, and no view of the file.
        return self._reader.columns[name][indices]

    def _move_boxes(self, values: dict[str, Any], plan: BatchPlan, positions: Sequence[int]) -> None:
        """Carry boxes through crop and flip, and drop with a vanished box what other ragged columns say of it."""
        choices = plan.choices
        if choices.boxes is None and choices.flips is None:
            return
        count = len(values[BOXES][0]) if positions and isinstance(values[BOXES], np.ndarray) else None
        for name, value in values.items():  # what has one length in the pack has none any more
            if count is not None and isinstance(value, np.ndarray) and value.shape[1:2] == (count,):
                values[name] = list(value)
        ragged = [name for name, value in values.items() if isinstance(value, list)]
        for place, position in enumerate(positions):
            whole = (0, 0, choices.widths[position], choices.heights[position])
            crop = whole if choices.boxes is None else choices.boxes[position]
            flip = 0 if choices.flips is None else choices.flips[position]
            moved, keep = crop_boxes(values[BOXES][place], crop, plan.size(position), flip)
            values[BOXES][place] = moved[keep]
            for name in ragged:
                if name != BOXES:
                    values[name][place] = _left(values[name][place], keep)


def _plain(value: Any) -> Any:
    """Numbers as Python's own, arrays as copies the user may write to.

    Floats of less than 64 bits keep their type, which torch's collation would otherwise make 64 bits of.
    """
    if isinstance(value, np.generic):
        return value if value.dtype.kind == "f" and value.itemsize < 8 else value.item()
    return value.copy() if isinstance(value, np.ndarray) else value


def _left(value: Any, keep: npt.NDArray[np.bool_]) -> Any:
    """The entries of the boxes that are left, where a value has one for each box; else the value."""
    if isinstance(value, list) and len(value) == len(keep):
        return [entry for entry, stays in zip(value, keep.tolist(), strict=True) if stays]
    if getattr(value, "ndim", 0) and len(value) == len(keep):  # an array, or a stream's tensor
        return value[keep]
    return value
