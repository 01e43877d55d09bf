"""The nouns: a record, and the description of a column; which column a value needs, and whether it fits one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from packfmt.buffers import as_bytes_like

if TYPE_CHECKING:  # where it is used, it is imported: a child process that reads a foreign database starts without it
    import numpy.typing as npt

__all__ = [
    "BOXES",
    "IMAGE_COLUMNS",
    "KEY",
    "LABEL",
    "OWN_COLUMNS",
    "Column",
    "MisfitError",
    "Record",
    "empty_value",
    "exact_array",
    "fit_array",
    "infer_column",
    "misfit",
    "text_column",
]

KEY = "key"
BOXES = "boxes"  # of the objects in the image: as many rows as there are objects, which other columns follow

Kind = Literal["array", "text", "bytes"]

# Types a column may have on disk: fixed-width, little-endian, and nothing that numpy would have to unpickle.
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8")
MAX_AXES = 31  # numpy before version 2 allows 32, one of which counts the records
MAX_ROW = 2**31  # bytes; keeps every size that numpy computes for an empty array in range


@dataclass(frozen=True, slots=True)
class Column:
    """Describes one array over all records.

    Args:
        name: the column's name, a non-empty str.
        dtype: one of ``DTYPES``; any little-endian spelling numpy accepts is normalised to it.
        shape: the shape of one record's value. ``()`` is a number, ``(3,)`` a vector, ``(None, 4)`` a ragged array,
            whose first axis differs from record to record.
        kind: "array" for numbers; "text" (str, stored as UTF-8 with surrogateescape, so any file name round-trips) and
            "bytes" have dtype ``|u1`` and shape ``(None,)``.
        tentative: of a ragged array whose values may yet turn out to be all of one length: the pack then gets a column
            of that fixed shape. Not for ``boxes``, and what has one entry for each of them. While all values are empty
            lists, the next may choose the dtype and the inner shape too.

    Raises:
        ValueError: the dtype, the shape or the kind is none that a pack can hold.
    """

    name: str
    dtype: str = "<i8"
    shape: tuple[int | None, ...] = ()
    kind: Kind = "array"
    tentative: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"column name {self.name!r} must be a non-empty str")
        if self.dtype not in DTYPES:
            import numpy as np

            dtype = np.dtype(self.dtype).newbyteorder("<").str
            if dtype not in DTYPES:
                raise ValueError(f"column {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
            object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(self.shape))
        for axis, size in enumerate(self.shape):
            if not ((size is None and axis == 0) or (type(size) is int and 0 < size < MAX_ROW)):
                raise ValueError(
                    f"column {self.name!r}: shape {self.shape} must hold positive sizes; only the first may be None"
                )
        if len(self.shape) > MAX_AXES or self.row_bytes >= MAX_ROW:
            raise ValueError(
                f"column {self.name!r}: shape {self.shape} must have at most {MAX_AXES} axes and rows below 2 GiB"
            )
        if self.kind not in ("array", "text", "bytes"):
            raise ValueError(f"column {self.name!r}: kind {self.kind!r} is not 'array', 'text' or 'bytes'")
        if self.kind != "array" and (self.dtype, self.shape) != ("|u1", (None,)):
            raise ValueError(f"column {self.name!r}: kind {self.kind!r} needs dtype '|u1' and shape (None,)")

    @property
    def ragged(self) -> bool:
        """Whether records hold differing numbers of rows."""
        return bool(self.shape) and self.shape[0] is None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one stored row: of a record's value, or of one step along a ragged first axis."""
        return self.shape[1:] if self.ragged else self.shape  # type: ignore[return-value]  # only the first may be None

    @property
    def row_bytes(self) -> int:
        """Size in bytes of one stored row."""
        size = int(self.dtype[2:])
        for extent in self.row_shape:
            size *= extent
        return size

    @property
    def spec(self) -> list[Any]:
        """The column as JSON holds it: name, dtype, shape and kind."""
        return [self.name, self.dtype, list(self.shape), self.kind]

    @classmethod
    def of_spec(cls, name: str, dtype: str, shape: list[int | None], kind: Any) -> Column:
        """The column that ``spec`` describes.

        Raises:
            ValueError: it is not spelled as ``spec`` spells it, or no pack can hold such a column.
        """
        if dtype not in DTYPES or not isinstance(shape, list):
            raise ValueError(f"column {name!r:.80} of dtype {dtype!r:.40} and shape {shape!r:.80}")
        return cls(name, dtype, tuple(shape), kind)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The stored bytes of one image, with its key and its column values.

    Args:
        data: the encoded image, verbatim.
        key: the path relative to the source's root, with "/" between parts; surrogateescape for undecodable bytes.
        columns: column name to value: numbers, numpy arrays, str or bytes.

    Raises:
        TypeError: the data are not flat bytes, see ``as_bytes_like``.
    """

    data: bytes | memoryview
    key: str
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.data) is not bytes:
            try:
                as_bytes_like(self.data)
            except TypeError as error:
                raise TypeError(f"record {self.key!r}: {error}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        import numpy as np

        return (
            bytes(self.data) == bytes(other.data)
            and self.key == other.key
            and self.columns.keys() == other.columns.keys()
            and all(np.array_equal(value, other.columns[name]) for name, value in self.columns.items())
        )

    __hash__ = None  # type: ignore[assignment]


# What the index knows of each image, so that nothing has to parse it again. See images/sniff.py for the codes.
IMAGE_COLUMNS = (
    Column("width", "<u4"),
    Column("height", "<u4"),
    Column("channels", "|u1"),
    Column("format", "|u1"),
    Column("orientation", "|u1"),
    Column("flags", "|u1"),
)

LABEL = Column("label", "<i8")  # of the image, which classes count

# Every pack has these; all others are the user's.
OWN_COLUMNS = frozenset((KEY, *(column.name for column in IMAGE_COLUMNS)))


def text_column(name: str) -> Column:
    """A column of texts."""
    return Column(name, "|u1", (None,), "text")


def infer_column(name: str, value: Any) -> Column:
    """The column that holds values like ``value``.

    str and bytes become variable-length columns; a bool, int or float a number (int64 or float64); a numpy scalar keeps
    its dtype; an array or list of rank one or more becomes ragged along its first axis, but tentatively, since one
    value cannot show whether all will have its length.

    Raises:
        TypeError: no column holds such a value.
    """
    if isinstance(value, str):
        return text_column(name)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Column(name, "|u1", (None,), "bytes")
    import numpy as np

    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"column {name!r}: a value of type {type(value).__name__} cannot be stored in a column")
    if array.ndim == 0:
        return Column(name, array.dtype.str)
    if 0 in array.shape[1:]:
        raise TypeError(f"column {name!r}: an array of shape {array.shape} has an empty inner axis; declare the Column")
    return Column(name, array.dtype.str, (None, *array.shape[1:]), tentative=True)


def empty_value(column: Column) -> Any:
    """What stands for a value that is not there: no text, bytes or rows, or NaN; None where a column has nothing so."""
    if column.kind != "array":
        return "" if column.kind == "text" else b""
    if column.ragged:
        return []
    return float("nan") if column.shape == () and column.dtype[1] == "f" else None


def exact_array(column: Column, value: Any) -> npt.NDArray[Any]:
    """Numbers as an array that changes none of them: numpy makes floats of ints beyond 63 bits among others.

    Args:
        column: what the value belongs to.
        value: a number, nested lists of them, or an array.

    Raises:
        ValueError: the lists are ragged within.
    """
    import numpy as np

    array = np.asarray(value)
    if column.dtype == "<u8" and array.dtype.kind == "f" and not isinstance(value, np.ndarray):
        objects = np.asarray(value, object)
        if all(type(number) is int and 0 <= number < 1 << 64 for number in objects.ravel().tolist()):
            return objects.astype(np.uint64)
    return array


def fit_array(column: Column, value: Any) -> npt.NDArray[Any]:
    """The value as a column of numbers stores it: an array of its dtype, and of its shape but for a ragged first axis.

    Raises:
        MisfitError: its shape is another, it holds no numbers, or one that the dtype cannot hold.
    """
    import numpy as np

    try:
        array = exact_array(column, value)
        ragged, row_shape = column.ragged, column.row_shape
        if array.size == 0 and ragged:  # an empty list has lost its inner shape
            array = array.reshape(0, *row_shape)
        if array.shape[ragged:] != row_shape or array.ndim != len(column.shape):
            raise TypeError(f"its shape is {array.shape}")
        if array.size == 0 or array.dtype.str == column.dtype:
            return array.astype(column.dtype, copy=False)
        if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and column.dtype[1] != "f"):
            raise TypeError(f"its dtype is {array.dtype}")
        with np.errstate(over="raise"):
            stored = array.astype(column.dtype)
        if array.dtype.kind != "f" and not np.array_equal(stored, array):
            raise OverflowError("its numbers are out of range")
        return stored
    except (ArithmeticError, TypeError, ValueError) as error:
        raise misfit(column, value, str(error)) from error


class MisfitError(ValueError):
    """A value that its column cannot hold."""


def misfit(column: Column, value: Any, why: str) -> MisfitError:
    """The error for a value that a column cannot hold."""
    wanted = column.kind if column.kind != "array" else f"{column.dtype} of shape {column.shape}"
    return MisfitError(f"column {column.name!r}: {value!r:.80} is not {wanted}: {why}")
