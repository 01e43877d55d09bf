"""What a sampler asks of the thing it samples: how many records, how large, which labels.

Everything but the length is optional and looked for on the object and on its ``reader``.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.errors import CorruptError
from packfmt.sampling.ranks import Indices, whole_number

__all__ = [
    "check_indices",
    "column_of",
    "digest",
    "labels_of",
    "length_of",
    "places_of",
    "readahead_of",
    "record_bytes_of",
    "tell_epoch",
]


def length_of(source: Sized | int) -> int:
    """The number of records of a dataset, or of a length given as a number.

    Raises:
        TypeError: ``source`` is neither.
        ValueError: the number is negative.
    """
    if isinstance(source, Sized):
        return len(source)
    return whole_number("the length", source, 0)


def column_of(source: object, name: str) -> Any:
    """The column ``name`` of a dataset, of its reader or of a reader itself; None where there is none."""
    for holder in (source, getattr(source, "reader", None)):
        columns = getattr(holder, "columns", None)
        if isinstance(columns, Mapping) and name in columns:
            return columns[name]
    return None


def labels_of(source: object) -> npt.NDArray[Any] | None:
    """One label per record, from ``source.labels`` or the column ``label``; None where there is none of that shape."""
    labels = getattr(source, "labels", None)
    if labels is None:
        labels = column_of(source, "label")
    if not (isinstance(labels, list) or hasattr(labels, "__array__")):
        return None
    array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "biuUS" or len(array) != length_of(source):  # type: ignore[arg-type]
        return None
    return array


def record_bytes_of(source: object) -> float | None:
    """The mean size of a record in bytes where the object or its reader tells it."""
    for holder in (source, getattr(source, "reader", None)):
        size = getattr(holder, "record_bytes", None)
        if isinstance(size, (int, float, np.number)) and size > 0:
            return float(size)
    return None


def places_of(source: object) -> Indices | None:
    """Where the records of a view or of torch's ``Subset`` lie in the whole, (n,): its ``indices``.

    None where it has none, as the whole itself, or none of that shape.
    """
    if not isinstance(source, Sized) or getattr(source, "indices", None) is None:
        return None
    places = np.asarray(source.indices)  # type: ignore[attr-defined]
    if places.shape != (len(source),) or places.dtype.kind not in "iu":
        return None
    whole = places_of(getattr(source, "dataset", None))
    return places.astype(np.int64, copy=False) if whole is None else whole[places]


def readahead_of(source: object) -> Callable[[Indices], None]:
    """Begins the reading of blocks, where the object or its reader can do that and numbers records as the object does.

    What is wrong with a record is said where it is read.
    """
    for holder in (source, getattr(source, "reader", None)):
        ask = getattr(holder, "will_need_blocks", None)
        if ask and isinstance(holder, Sized) and isinstance(source, Sized) and len(holder) == len(source):
            return partial(_asked, ask)
    return _nothing


def _asked(ask: Callable[[Indices], None], indices: Indices) -> None:
    if len(indices):
        with suppress(CorruptError, IndexError, OSError, ValueError):
            ask(indices)


def _nothing(indices: Indices) -> None:
    """Nobody to ask."""


def check_indices(indices: npt.ArrayLike, count: int) -> Indices:
    """A subset as (k,) int64.

    Raises:
        IndexError: an index is outside 0 to count - 1.
        TypeError: the indices are no integers.
        ValueError: they are not one-dimensional.
    """
    array = np.asarray(indices)
    if array.ndim != 1:
        raise ValueError(f"indices must have shape (k,), got {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind == "b":
        raise TypeError("indices must be integers, got booleans; pass np.flatnonzero(mask)")
    if array.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got dtype {array.dtype}")
    for extreme in (array.min(), array.max()):
        if not 0 <= extreme < count:
            position = int(np.argmax(array == extreme))
            raise IndexError(f"indices[{position}] is {extreme}; there are {count} records, 0..{count - 1}")
    return array.astype(np.int64)


def digest(array: npt.NDArray[Any]) -> int:
    """A number that tells arrays apart, the same on every machine; no defence against intent."""
    if sys.byteorder == "big":
        array = array.astype(array.dtype.newbyteorder("<"))
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def tell_epoch(source: object, epoch: int) -> None:
    """Call ``set_epoch`` of a dataset, or of those that a ``Subset`` or ``ConcatDataset`` is of.

    Their indices may come without the epoch that a sampler gave them.
    """
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
        return
    several = getattr(source, "datasets", ())
    inner = several.values() if isinstance(several, Mapping) else several if isinstance(several, Sequence) else ()
    for dataset in (getattr(source, "dataset", None), *inner):
        if dataset is not None:
            tell_epoch(dataset, epoch)
