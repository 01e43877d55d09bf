"""``tf.train.Example`` messages: a map from feature names to lists of bytes, floats or int64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packfmt.sources.protobuf import BYTES, FIXED32, VARINT, WireError, fields, floats, integers, signed

__all__ = ["Feature", "parse_example"]

Feature = list[memoryview] | list[int] | npt.NDArray[np.float32]
_MAX_FEATURES = 10_000


def parse_example(message: bytes | memoryview) -> dict[str, Feature]:
    """The features of an Example. Bytes and floats are views of ``message``; a feature without a list is left out.

    Raises:
        WireError: the bytes are no Example.
    """
    found: dict[str, Feature] = {}
    for features in _messages(message, 1):
        for entry in _messages(features, 1):
            name, feature = _entry(entry)
            if feature is not None:
                found[name] = feature
            if len(found) > _MAX_FEATURES:
                raise WireError(f"more than {_MAX_FEATURES} features")
    return found


def _messages(message: bytes | memoryview, number: int) -> list[memoryview]:
    return [
        value for at, wire, value in fields(message) if at == number and wire == BYTES and isinstance(value, memoryview)
    ]


def _entry(entry: memoryview) -> tuple[str, Feature | None]:
    names, values = _messages(entry, 1), _messages(entry, 2)
    name = bytes(names[-1]).decode("utf-8", "surrogateescape") if names else ""
    feature: Feature | None = None
    for value in values:
        for kind, wire, content in fields(value):
            if wire != BYTES or not isinstance(content, memoryview):
                raise WireError(f"feature {name!r} holds no list")
            if kind == 1:
                feature = _messages(content, 1)
            elif kind == 2:
                feature = _floats(content)
            elif kind == 3:
                feature = _integers(content)
    return name, feature


def _floats(content: memoryview) -> npt.NDArray[np.float32]:
    pieces = [
        floats(value)
        for number, wire, value in fields(content)
        if number == 1 and wire in (BYTES, FIXED32) and isinstance(value, memoryview)
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, np.float32)


def _integers(content: memoryview) -> list[int]:
    found: list[int] = []
    for number, wire, value in fields(content):
        if number != 1:
            continue
        if wire == VARINT and isinstance(value, int):
            found.append(signed(value))
        elif wire == BYTES and isinstance(value, memoryview):
            found.extend(integers(value))
    return found
