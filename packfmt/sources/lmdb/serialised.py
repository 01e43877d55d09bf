"""Layouts of image databases whose values are serialised objects or raw pixels. Nothing is unpickled."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packfmt.errors import SourceError
from packfmt.record import LABEL, text_column
from packfmt.sources.columns import allowed, fits, is_storable, label_column, plain, shown, stand_in
from packfmt.sources.isolated.frames import Item
from packfmt.sources.lmdb.layouts import META_KEYS, Layout, numbered, plain_int
from packfmt.sources.lmdb.msgpack import MsgpackError, read_msgpack
from packfmt.sources.lmdb.pickles import PickleError, read_pickle
from packfmt.sources.lmdb.table import Entry, Table, key_text
from packfmt.sources.protobuf import BYTES, WireError, fields
from packfmt.sources.values import Array, Sample, ValueFault, image_kind, numbers, opaque_names, sample_of

__all__ = ["CaffeDatum", "Carved", "RawSquares", "Serialised", "read_datum"]

_MAX_FIELDS = 100_000  # unpacked float_data has one field per number


@dataclass(slots=True)
class Datum:
    """Caffe's message of an image, encoded or as raw pixels, with its label. Numbers that are not there are 0.

    Its fields: 1 channels, 2 height, 3 width, 4 data, 5 label, 6 float_data, 7 encoded.
    """

    channels: int = 0
    height: int = 0
    width: int = 0
    label: int = 0
    data: memoryview | bytes = b""
    floats: bool = False
    encoded: bool = False


def read_datum(message: bytes | memoryview) -> Datum:
    """Parse one message; ``data`` is a view of it. Thread-safe.

    Raises:
        ValueFault: the bytes are not a Datum.
    """
    datum = Datum()
    try:
        for count, (field, wire, value) in enumerate(fields(message)):
            if isinstance(value, int):
                _set_number(datum, field, value)
            elif wire == BYTES and field == 4:
                datum.data = value
            elif field == 6 and count < _MAX_FIELDS:
                datum.floats = True
            else:
                raise ValueFault(f"not a Datum: field {field} of wire type {wire}")
    except WireError as error:
        raise ValueFault(f"not a Datum: {error}") from error
    return _checked(datum)


def bgr_planes_to_rgb(datum: Datum) -> tuple[bytes, tuple[int, int, int]]:
    """Raw pixels as (height, width, channels) RGB: Caffe keeps planes, blue first.

    Raises:
        ValueFault: the sizes do not add up, or there are neither one nor three channels.
    """
    shape = (datum.channels, datum.height, datum.width)
    if datum.channels not in (1, 3):
        raise ValueFault(f"a Datum of {datum.channels} channels; 1 and 3 are read")
    if datum.channels * datum.height * datum.width != len(datum.data):
        raise ValueFault(f"a Datum of shape {shape} with {len(datum.data)} bytes of pixels")
    import numpy as np  # here: reading a layout without raw pixels starts without it

    planes = np.frombuffer(datum.data, np.uint8).reshape(shape)
    return planes[::-1].transpose(1, 2, 0).tobytes(), (datum.height, datum.width, datum.channels)


def _checked(datum: Datum) -> Datum:
    if not datum.floats and not len(datum.data):
        raise ValueFault("not a Datum: no pixels")
    if not datum.encoded and image_kind(datum.data) is not None:
        pixels = datum.channels * datum.height * datum.width
        datum.encoded = pixels != len(datum.data)  # some writers forget the flag
    return datum


def _set_number(datum: Datum, field: int, number: int) -> None:
    if field in (1, 2, 3):
        if not 0 < number <= 1 << 20:
            raise ValueFault(f"not a Datum: a size of {number}")
        setattr(datum, ("channels", "height", "width")[field - 1], number)
    elif field == 5:
        low = number & 0xFFFF_FFFF
        datum.label = low - (1 << 32) if low >> 31 else low
    elif field == 7:
        datum.encoded = bool(number)
    else:
        raise ValueFault(f"not a Datum: number in field {field}")


_PROBES = 16
_TEXT_ENCODING = {"pickle": "latin-1", "msgpack": "utf-8"}  # how Python 2's bytes, or the old raw type, became text
_MAX_LOST = 32  # names of lost fields that are counted apart


def read_value(kind: str, value: bytes | memoryview) -> Any:
    """The plain values in a pickle or a MessagePack message.

    Raises:
        ValueFault: it is damaged.
    """
    try:
        return read_pickle(bytes(value)) if kind == "pickle" else read_msgpack(value)
    except (PickleError, MsgpackError) as error:
        raise ValueFault(str(error)) from error


class Serialised(Layout):
    """(image, label) as a pickle or a MessagePack message: folder2lmdb and its copies, TableMaster, tensorpack."""

    def __init__(self, table: Table, kind: str, probes: list[Entry]) -> None:
        super().__init__(table)
        self._kind = kind
        self._padded = all(re.fullmatch(rb"\d{8,}", key) for key, _ in probes)
        samples = [sample for _, value in probes[:_PROBES] if (sample := self._try(value)) is not None]
        if not samples:
            raise self._refusal(probes)
        self.name = f"tensorpack {kind}" if self._padded else f"folder2lmdb {kind}"
        self._named = all(sample.names for sample in samples)
        self._label = label_column([sample.label for sample in samples])
        self._set_columns()
        self.lost = list(dict.fromkeys(name or "further parts" for sample in samples for name in self._lost_of(sample)))

    def _set_columns(self) -> None:
        if self._label is not None:
            self.columns.append(self._label)
        if self._named:
            self.name = f"TableMaster {self._kind}"
            self.columns.append(text_column("name"))
        if self._label is None:
            self.notes.append("the values hold no label that can be read; only the images are kept")

    def _sample(self, value: bytes | memoryview) -> Sample:
        return sample_of(read_value(self._kind, value), _TEXT_ENCODING[self._kind])

    def _try(self, value: memoryview) -> Sample | None:
        try:
            return self._sample(value)
        except ValueFault:
            return None

    def _refusal(self, probes: list[Entry]) -> SourceError:
        reason, names = "", ""
        try:
            whole = read_value(self._kind, probes[0][1])
            names = ", ".join(dict.fromkeys(opaque_names(whole)))
            sample_of(whole, _TEXT_ENCODING[self._kind])
        except ValueFault as fault:
            reason = str(fault)
        if "PIL." in names:
            return SourceError(
                "the values are pickled PIL images: reading them would run code. Where the database is your own, "
                "unpickle it there, save each image to a file, and pack the folder"
            )
        if "CodeRow" in names:
            return SourceError("the values are pickled VQ-VAE-2 code rows, not images; pack the images they came from")
        made = f"; they name code ({names}), which is never run" if names else ""
        return SourceError(f"the {self._kind} values hold no image ({reason}){made}")

    def count(self) -> int | None:
        """The entries that are not facts about the whole set."""
        return self.table.entries - sum(self.table.get(key) is not None for key in META_KEYS)

    def items(self) -> Iterator[Item]:
        """Records in the numbers' order."""
        named: set[str] = set()
        lost: Counter[str] = Counter()
        for key, value in self.table.scan() if self._padded else numbered(self.table):
            if key in META_KEYS:
                continue
            self.found += 1
            try:
                whole = bytes(value)
                sample = self._sample(whole)
                named.update(sample.opaque[:8] if len(named) < 32 else ())
                row, fault = self._row(sample)
                if fault is not None:
                    yield Item(key_text(key), sample.image, row, fault=fault)
                    continue
                # A view into the value itself, where the image lies there in one piece, need not be sent.
                start = whole.find(sample.image)
                image = value[start : start + len(sample.image)] if start >= 0 else memoryview(sample.image)
                item = Item(key_text(key), image, row, offset=self.table.offset(image) if start >= 0 else None)
                names = self._lost_of(sample)
                lost.update(name if name in lost or len(lost) < _MAX_LOST else "" for name in names)
                yield item
            except ValueFault as fault:
                yield Item(key_text(key), value, fault=str(fault))
        if named:
            self.notes.append(f"values name code, which was not run and is not kept: {', '.join(sorted(named))[:500]}")
        self.notes.extend(f"not kept: {_quoted(name)} of {count} records" for name, count in lost.items())
        self._note_index()

    def _row(self, sample: Sample) -> tuple[tuple[Any, ...], str | None]:
        """The columns' values, and what is wrong with one of them; it is then a stand-in, for ``--bad keep``."""
        row: list[Any] = []
        fault = None
        if self._label is not None:
            label = plain(sample.label) if self._label.shape == () else sample.label
            if label is None:
                fault = "has no label that can be read"
            elif not fits(label, self._label):
                fault = f"label {shown(label)} is not {allowed(self._label)}, as the first ones are"
            label = stand_in(self._label) if fault else label
            row.append(numbers(label).tolist() if isinstance(label, Array) else label)
        if self._named:
            name = sample.names[0].part if sample.names else ""
            if not is_storable(name):
                fault, name = f"name {shown(name)} is not a text that can be written as UTF-8", ""
            row.append(name)
        return tuple(row), fault

    def _lost_of(self, sample: Sample) -> list[str]:
        """The names of a sample's fields that have no column, each once."""
        texts = [name for name, _ in (sample.names[1:] if self._named else sample.names)]
        label = ["label"] if self._label is None and sample.label is not None else []
        return list(dict.fromkeys([*label, *texts, *sample.lost]))

    def _note_index(self) -> None:
        key = b"__keys__" if self._padded else b"__len__"
        value = self.table.get(key)
        stated: Any = self.found
        if value is not None:
            try:
                stated = read_value(self._kind, value)
                stated = len(stated) if isinstance(stated, list) else stated
            except ValueFault:
                stated = plain_int(value)
        self.note_count(key, stated if isinstance(stated, int) else None, "records")


def _quoted(name: str) -> str:
    return repr(name[:60]) if name else "further parts"


class Carved(Layout):
    """``pyarrow.serialize`` values, whose reader pyarrow dropped: the JPEG is cut out between its markers."""

    name = "pyarrow.serialize, carved"

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.notes.append("images were carved from pyarrow.serialize values and decoded to check them; labels are lost")

    def items(self) -> Iterator[Item]:
        """What lies between the first start and the last end marker of each value."""
        for key, value in numbered(self.table):
            if key in META_KEYS:
                continue
            data = bytes(value)
            start, end = data.find(b"\xff\xd8\xff"), data.rfind(b"\xff\xd9")
            if 0 <= start < end:
                yield Item(key_text(key), memoryview(data)[start : end + 2])
            else:
                yield Item(key_text(key), value, fault="no JPEG to carve out of it")


class CaffeDatum(Layout):
    """Caffe's ``Datum``: an encoded image, or raw pixels that become PNG."""

    name = "Caffe Datum"

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.columns.append(LABEL)

    def count(self) -> int | None:
        """One record per entry, but for the counts that some writers keep."""
        return self.table.entries - sum(self.table.get(key) is not None for key in META_KEYS)

    def items(self) -> Iterator[Item]:
        """Records in key order, which starts with the number."""
        raw = 0
        for key, value in self.table.scan():
            if key in META_KEYS:
                continue
            try:
                datum = read_datum(value)
                if datum.floats:
                    raise ValueFault("a Datum of floats, not an image")
                if datum.encoded:
                    yield self.item(key, memoryview(datum.data), (datum.label,))
                    continue
                pixels, shape = bgr_planes_to_rgb(datum)
                raw += 1
                yield Item(key_text(key), pixels, (datum.label,), shape)
            except ValueFault as fault:
                yield Item(key_text(key), value, fault=str(fault))
        if raw:
            self.notes.append(f"{raw} images were raw BGR planes; they are stored as RGB")


class RawSquares(Layout):
    """NVAE: numbers as keys, raw square RGB pixels as values. Nothing in the file says so, so it must be asked for."""

    name = "raw RGB squares"

    def items(self) -> Iterator[Item]:
        """Records in the numbers' order."""
        for key, value in numbered(self.table):
            if key in META_KEYS:
                continue
            side = square_side(len(value))
            if image_kind(value) is not None:
                yield self.item(key, value)
            elif side is None:
                yield Item(key_text(key), value, fault=f"{len(value)} bytes are not a square of RGB pixels")
            else:
                yield Item(key_text(key), value, shape=(side, side, 3))


def square_side(size: int) -> int | None:
    """The side of a square RGB image of ``size`` raw bytes, or None."""
    side = math.isqrt(size // 3)
    return side if side > 0 and side * side * 3 == size else None
