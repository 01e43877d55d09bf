"""TFRecord files of ``tf.train.Example``, as TensorFlow's classification and detection tools write them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.errors import DecodeError, SourceError
from packfmt.images.sniff import magic, sniff
from packfmt.record import LABEL, Column, Record, infer_column, text_column
from packfmt.sources.base import Source
from packfmt.sources.inputs import CountedNotes, Inputs, Probe, expand_inputs, free_name, short_names
from packfmt.sources.protobuf import BYTES, FIXED32, VARINT, WireError, fields, floats, integers, signed
from packfmt.sources.tfrecord.framing import Frame, frames, is_tfrecord, read_frame

__all__ = ["Feature", "TFRecordSource", "parse_example", "recognise"]

Feature = list[memoryview] | list[int] | npt.NDArray[np.float32]
_MAX_FEATURES = 10_000


def parse_example(message: bytes | memoryview) -> dict[str, Feature]:
    """The features of an Example. Bytes and floats are views of ``message``; a feature without a list is left out.

    Raises:
        WireError: the bytes are not an Example.
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


_IMAGE_NAMES = ("image/encoded", "image", "image_raw", "jpeg", "image/jpeg", "image_bytes", "encoded", "img")
_KEY_NAMES = ("image/filename", "filename", "file_name", "image_name", "image/path")
_LABEL_NAMES = ("image/class/label", "label", "class", "image/label", "label_id", "class_id", "fine_label", "target")
_BOX = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
_BOX_LABELS = "image/object/class/label"
_FROM_IMAGE = tuple(f"image/{name}" for name in ("width", "height", "channels", "format", "colorspace"))
_PEEKED = 32
_PEEKED_BYTES = 64 << 20
_MAGIC_BYTES = 64
_LATE_NAMES = 16  # that are named one by one; a writer may name features after records


def recognise(probe: Probe) -> bool:
    """Whether the (first) file starts with a record whose length has a matching checksum."""
    return is_tfrecord(Path(probe.first), probe.head)


class TFRecordSource(Source):
    """Images in TFRecord files, plain or compressed with gzip or zlib.

    What each feature becomes is decided by the first 32 records of the first file. The image is the bytes feature
    with an image in it; ``image/filename`` and the like are the key (else the file's name and the record's number);
    ``image/class/label`` and the like are ``label``, kept as written; ``image/object/bbox/*`` are ``boxes``
    (float32 xmin, ymin, xmax, ymax in pixels of the stored image, from fractions of its size) and
    ``image/object/class/label`` is ``labels``. Further numbers become columns (ragged where a record holds not
    exactly one), single strings text columns. What is left is named in ``describe()["lost"]``; a feature that only
    later records have is lost too, and counted in ``notes``.

    ``load`` is thread-safe, and checks the CRC-32C of what it reads. Memory: one record.

    Args:
        paths: a file, a brace or glob pattern, or a list of them.
        image: the feature that holds the image, or None to find it.
        label: the int64 feature that is the class id, or None to find it.
        key: the bytes feature that is the key, or None to find it; "" numbers the records.

    Raises:
        FileNotFoundError: a file is missing.
        SourceError: no such feature; a file is none of TFRecords, is cut short, or has a damaged length.
    """

    kind = "tfrecord"

    def __init__(
        self, paths: Inputs, *, image: str | None = None, label: str | None = None, key: str | None = None
    ) -> None:
        super().__init__()
        self._paths = expand_inputs(paths)
        self._names = dict(zip(self._paths, short_names(self._paths), strict=True))
        self._counted = CountedNotes(self.notes)
        self._features: dict[str, Column] = {}
        self._late: set[str] = set()
        examples = self._peek()
        if examples:
            self._image = self._find_image(examples, image)
            self._label = self._find(examples, label, _LABEL_NAMES, "label", _is_integer)
            self._key = None if key == "" else self._find(examples, key, _KEY_NAMES, "key", _is_text)
            self._declare(examples)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"shards": len(self._paths)}

    def entries(self) -> Iterator[Frame]:
        self._counted.clear()
        self._late.clear()
        for path in self._paths:
            yield from frames(path)

    def _load(self, entry: Any) -> Record:
        frame: Frame = entry
        key = f"{self._names[frame.path]}/{frame.number:08d}"
        try:
            data = read_frame(frame)
            example = parse_example(data)
            if self._key is not None and (name := _text(example.get(self._key))):
                key = name
            image = self._image_of(example)
            values = self._values(example, image)
            self._count_late(example)
            return Record(image, key, values)
        except (WireError, _FeatureError) as error:
            raise DecodeError(str(error), path=str(frame.path), index=frame.number, key=key) from error
        except DecodeError as error:
            raise DecodeError(error.message, path=str(frame.path), index=frame.number, key=key) from error

    def size(self, entry: Any) -> int:
        return entry.length if isinstance(entry, Frame) else 0

    def _peek(self) -> list[dict[str, Feature]]:
        """The first records that are whole; views of them stay valid as long as the list."""
        found: list[dict[str, Feature]] = []
        size = 0
        for frame in itertools.islice(itertools.chain.from_iterable(map(frames, self._paths)), _PEEKED):
            size += frame.length
            if found and size > _PEEKED_BYTES:
                break
            try:
                found.append(parse_example(read_frame(frame)))
            except (DecodeError, WireError):
                continue  # reported when it is loaded
        if not found and size:
            raise SourceError(
                f"{self._paths[0]}: none of the first records is a tf.train.Example; other messages are not read"
            )
        return found

    def _find_image(self, examples: list[dict[str, Feature]], asked: str | None) -> str:
        present = sorted({name for example in examples for name in example})
        candidates = [asked] if asked is not None else [*_IMAGE_NAMES, *present]
        for name in candidates:
            if any(_is_image(example.get(name)) for example in examples):
                return name
        what = f"feature {asked!r} holds no image" if asked is not None else "no feature holds an encoded image"
        raise SourceError(f"{self._paths[0]}: {what}; features are {', '.join(present) or 'none'}. Name it with image=")

    def _find(
        self, examples: list[dict[str, Feature]], asked: str | None, names: tuple[str, ...], what: str, fits: Any
    ) -> str | None:
        for name in names if asked is None else (asked,):
            features = [example[name] for example in examples if name in example]
            if features and all(len(feature) == 1 and fits(feature) for feature in features):
                return name
        if asked is None:
            return None
        present = sorted({name for example in examples for name in example})
        raise SourceError(
            f"{self._paths[0]}: feature {asked!r} cannot be the {what}: it is missing or holds not exactly one "
            "fitting "
            f"value; features are {', '.join(present)}"
        )

    def _declare(self, examples: list[dict[str, Feature]]) -> None:
        columns: dict[str, Column] = {}
        if self._label is not None:
            columns["label"] = self._features[self._label] = LABEL
        present = sorted({name for example in examples for name in example})
        self._boxes = all(side in present for side in _BOX)
        if self._boxes:
            columns["boxes"] = Column("boxes", "<f4", (None, 4))
        if _BOX_LABELS in present:
            columns["labels"] = self._features[_BOX_LABELS] = Column("labels", "<i8", (None,))
        used = {self._image, self._label, self._key, *_FROM_IMAGE}
        for feature in present:
            if feature in used or feature == _BOX_LABELS or (self._boxes and feature in _BOX):
                continue
            name = free_name(feature.removeprefix("image/").replace("/", "_") or "unnamed", columns)
            column = _column(name, [example.get(feature) for example in examples])
            if column is None:
                self.lost.append(feature)
            else:
                columns[name] = self._features[feature] = column
        self._known = used | set(present)
        self._peeked = len(examples)
        self.columns = tuple(columns.values())

    def _image_of(self, example: Mapping[str, Feature]) -> bytes:
        feature = example.get(self._image)
        if not isinstance(feature, list) or len(feature) != 1 or not isinstance(feature[0], memoryview):
            raise _FeatureError(f"feature {self._image!r} does not hold one image")
        return bytes(feature[0])

    def _values(self, example: Mapping[str, Feature], image: bytes) -> dict[str, Any]:
        values = {column.name: _value(name, column, example.get(name)) for name, column in self._features.items()}
        if self._boxes:
            values["boxes"] = boxes = self._pixel_boxes(example, image)
            if "labels" in values and len(values["labels"]) != len(boxes):
                raise _FeatureError(f"{len(boxes)} boxes and {len(values['labels'])} labels of boxes")
        return values

    def _count_late(self, example: Mapping[str, Feature]) -> None:
        """Note what this record holds and none of the first did: columns cannot be added once a pack is begun."""
        late = [name for name in example.keys() - self._known if len(example[name])]
        for name in sorted(late):
            if name in self._late or len(self._late) < _LATE_NAMES:
                self._late.add(name)
                what = f"have feature {name[:80]!r}, which the first {self._peeked} had not; it is lost"
                self._counted.add(f"records {what}")
        if any(name not in self._late for name in late):
            self._counted.add(f"records have further features which the first {self._peeked} had not; they are lost")

    def _pixel_boxes(self, example: Mapping[str, Feature], image: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
        sides = [np.asarray(example.get(side, ()), np.float32) for side in _BOX]
        if len({side.shape for side in sides}) != 1 or sides[0].ndim != 1:
            raise _FeatureError(f"box sides of differing lengths: {[len(side) for side in sides]}")
        fractions = np.stack(sides, axis=1)
        if not np.isfinite(fractions).all():
            raise _FeatureError("a box side is not a number")
        info = sniff(image)
        with np.errstate(over="ignore"):
            pixels: np.ndarray[Any, np.dtype[np.float32]] = fractions * np.array([info.width, info.height] * 2, "<f4")
        if not np.isfinite(pixels).all():
            raise _FeatureError(f"a box side is {np.abs(fractions).max():g} of the image; its pixels are not float32")
        outside = int(((fractions < 0) | (fractions > 1)).any(axis=1).sum())
        self._counted.add("boxes reach outside their image; kept as they are", outside)
        empty = int((fractions[:, 2:] <= fractions[:, :2]).any(axis=1).sum())
        self._counted.add("boxes have no area; kept as they are", empty)
        return pixels


class _FeatureError(ValueError):
    """A record whose features differ from what its columns need."""


def _is_integer(feature: Feature) -> bool:
    return isinstance(feature, list) and all(isinstance(value, int) for value in feature)


def _is_float(feature: Feature) -> bool:
    return isinstance(feature, np.ndarray)


def _is_text(feature: Feature) -> bool:
    return isinstance(feature, list) and all(isinstance(value, memoryview) for value in feature)


def _is_image(feature: Feature | None) -> bool:
    return (
        isinstance(feature, list)
        and len(feature) == 1
        and isinstance(feature[0], memoryview)
        and bool(magic(bytes(feature[0][:_MAGIC_BYTES])))
    )


def _text(feature: Feature | None) -> str:
    if not isinstance(feature, list) or len(feature) != 1 or not isinstance(feature[0], memoryview):
        return ""
    return bytes(feature[0]).decode("utf-8", "surrogateescape")


def _column(name: str, seen: list[Feature | None]) -> Column | None:
    """The column for a feature, from its values in several records; None where it is lost."""
    present = [feature for feature in seen if feature is not None and len(feature)]
    single = len(present) == len(seen) and all(len(feature) == 1 for feature in present)
    if not present:
        return None
    if all(map(_is_float, present)):
        return Column(name, "<f4", () if single else (None,), tentative=not single)
    if all(_is_integer(feature) for feature in present):
        return Column(name, "<i8", () if single else (None,), tentative=not single)
    if not all(_is_text(feature) and len(feature) == 1 and not _is_image(feature) for feature in present):
        return None
    try:
        for feature in present:
            bytes(feature[0]).decode("utf-8")
    except UnicodeDecodeError:
        return infer_column(name, b"")
    return text_column(name)


def _value(name: str, column: Column, feature: Feature | None) -> Any:
    if column.kind != "array":
        if feature is not None and not (_is_text(feature) and len(feature) <= 1):
            raise _FeatureError(f"feature {name!r} holds not one string")
        return _text(feature) if column.kind == "text" else bytes(feature[0]) if feature else b""
    fits = _is_integer if column.dtype == "<i8" else _is_float
    if feature is not None and len(feature) and not fits(feature):
        raise _FeatureError(f"feature {name!r} holds values of another type than in the first records")
    values = np.asarray(feature if feature is not None else (), column.dtype)
    if column.ragged:
        return values
    if len(values) != 1:
        raise _FeatureError(f"feature {name!r} holds {len(values)} values where one was expected")
    return values[0]
