"""Values of foreign serialisations that are no plain numbers, texts or lists."""

from __future__ import annotations

from typing import Any

__all__ = ["Array", "Opaque"]


class Array:
    """A numpy array as it stands in the bytes: nothing is checked against ``data`` yet.

    Args:
        dtype: numpy's name of the element type, as "<i8".
        shape: the sizes, C order.
        data: the elements' bytes.
    """

    __slots__ = ("data", "dtype", "shape")

    # By hand, as below: importing ``dataclasses`` takes a fifth of the time in which a child starts.
    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data


class Opaque:
    """A value that only running code could make.

    Args:
        name: what would be imported: "module name".
        arguments: what it would be called with, or None where it is not called.
        state: what would be set on it, or None.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any = None, state: Any = None) -> None:
        self.name = name
        self.arguments = arguments
        self.state = state
