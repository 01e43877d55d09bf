"""Caffe's ``Datum`` message: an image, encoded or as raw pixels, with its label.

Its fields: 1 channels, 2 height, 3 width, 4 data, 5 label, 6 float_data, 7 encoded.
"""

from __future__ import annotations

from packfmt.sources.protobuf import BYTES, WireError, fields
from packfmt.sources.values import ValueFault, image_kind

__all__ = ["Datum", "bgr_planes_to_rgb", "read_datum"]

_MAX_FIELDS = 100_000  # unpacked float_data has one field per number


class Datum:
    """The message's fields; numbers that are not there are 0."""

    __slots__ = ("channels", "data", "encoded", "floats", "height", "label", "width")

    def __init__(self) -> None:
        self.channels = self.height = self.width = self.label = 0
        self.data: memoryview | bytes = b""
        self.floats = self.encoded = False


def read_datum(message: bytes | memoryview) -> Datum:
    """Parse one message; ``data`` is a view of it. Thread-safe.

    Raises:
        ValueFault: the bytes are no Datum.
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
                raise ValueFault(f"no Datum: field {field} of wire type {wire}")
    except WireError as error:
        raise ValueFault(f"no Datum: {error}") from error
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
        raise ValueFault("no Datum: no pixels")
    if not datum.encoded and image_kind(datum.data) is not None:
        pixels = datum.channels * datum.height * datum.width
        datum.encoded = pixels != len(datum.data)  # some writers forget the flag
    return datum


def _set_number(datum: Datum, field: int, number: int) -> None:
    if field in (1, 2, 3):
        if not 0 < number <= 1 << 20:
            raise ValueFault(f"no Datum: a size of {number}")
        setattr(datum, ("channels", "height", "width")[field - 1], number)
    elif field == 5:
        low = number & 0xFFFF_FFFF
        datum.label = low - (1 << 32) if low >> 31 else low
    elif field == 7:
        datum.encoded = bool(number)
    else:
        raise ValueFault(f"no Datum: number in field {field}")
