"""Encoded bytes to pixels: one image, or a chunk of images straight into the slots of a batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from packfmt.buffers import as_bytes_like
from packfmt.errors import DecodeError
from packfmt.images import libjpeg, pillow
from packfmt.images.exif import oriented
from packfmt.images.geometry import Interpolation
from packfmt.images.info import MAX_PIXELS
from packfmt.images.sniff import Buffer, sniff

__all__ = ["Decoder", "Failure", "Resize", "decode", "decode_into"]

Pixels: TypeAlias = "NDArray[np.uint8]"
Failure: TypeAlias = "tuple[int, str]"
Box: TypeAlias = "Sequence[int] | Sequence[float]"

_KEEP_BYTES = 64 << 20  # of scratch memory per thread; larger images get memory of their own
_CHANNELS = {"RGB": 3, "L": 1}
_UPRIGHT = (0, 1)
_JPEG = b"\xff\xd8\xff"

_thread = threading.local()


class Resize(Protocol):
    """Fills ``out`` (H, W, C) with ``crop`` (h, w, C), resized if the sizes differ, then flipped."""

    def __call__(self, crop: Pixels, out: Pixels, flip: int, box: Box | None = None, /) -> None:
        """See ``Decoder``. ``box`` is given for a fractional box only."""


class Records(Protocol):
    """Several image files, each asked for once and in order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Buffer]: ...


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes images with one set of options. Immutable, thread-safe, picklable if ``resize`` is.

    JPEGs give Pillow's pixels unless ``fast``; all other formats are decoded by Pillow itself. Alpha is dropped, the
    first of several frames is taken, colour profiles are ignored. Images of more than 8 bits per sample are refused.

    Args:
        mode: "RGB", or "L" for gray: of a JPEG its luma as stored, which is quicker and truer than going through RGB.
        orientation: "ignore" the EXIF tag as torchvision does, or "apply" it; boxes then count in the upright picture.
            TIFFs are always upright.
        partial: decode what is there of a truncated or damaged JPEG, instead of failing.
        fast: quicker chroma upsampling and DCT for JPEG: about a tenth faster, a few levels off.
        max_pixels: larger images are refused before memory is taken for them.
        resize: ``resize(crop, out, flip)`` fills ``out`` (H, W, C) with ``crop`` (h, w, C), resized if the sizes differ
            and flipped (1 swaps left and right, 2 top and bottom); ``crop`` has positive strides and may be ``out``
            itself. For a fractional box it is ``resize(pixels, out, flip, box)``, which shows the box as it looks in
            the resized whole. Default: Pillow's antialiased bilinear.

    Raises:
        ValueError: an unknown mode or orientation policy, or no pixels allowed.
    """

    mode: Literal["RGB", "L"] = "RGB"
    orientation: Literal["ignore", "apply"] = "ignore"
    partial: bool = False
    fast: bool = False
    max_pixels: int = MAX_PIXELS
    resize: Resize = pillow.resize

    def __post_init__(self) -> None:
        if self.mode not in _CHANNELS:
            raise ValueError(f"mode {self.mode!r} is not 'RGB' or 'L'")
        if self.orientation not in ("ignore", "apply"):
            raise ValueError(f"orientation {self.orientation!r} is not 'ignore' or 'apply'")
        if self.max_pixels < 1:
            raise ValueError(f"max_pixels {self.max_pixels} must be at least 1")

    def decode(self, data: Buffer, *, box: Box | None = None, size: tuple[int, int] | None = None) -> Pixels:
        """Decode one image.

        Args:
            data: the whole file.
            box: (x0, y0, x1, y1) in source pixels; None for the whole image. Integers cut the image, the last two
                exclusive, and then resize. Floats resize the image and then cut: edges may lie inside of pixels.
            size: (height, width) to resize to; None to keep the box's own.

        Returns:
            A new array (H, W, 3), or (H, W, 1) for mode "L", uint8.

        Raises:
            DecodeError: the bytes are no image that can be decoded whole, or the box lies outside of it.
            ValueError: a box of floats, and no size.
        """
        if box is not None and any(isinstance(edge, (float, np.floating)) for edge in box):
            if size is None:
                raise ValueError(f"the box {tuple(box)} is of floats: give size=(height, width), or integers")
            box = tuple(map(float, box))
        data = as_bytes_like(data)
        tag = self._tag(data)
        whole = size is None and box is None
        pixels = self._pixels(data, _new_room) if whole else self._scratch_pixels(data)
        if whole and tag in _UPRIGHT and pixels.flags.writeable:
            return pixels
        crop = oriented(pixels, tag)
        if size is None:
            crop = _cut(crop, box)
            size, box = (crop.shape[0], crop.shape[1]), None
        else:
            _cut(crop, box)  # refuses a wrong box before memory is taken
        out = np.empty((*size, _CHANNELS[self.mode]), np.uint8)
        self._show(crop, tag, box, out, 0)
        return out

    def decode_into(
        self,
        records: Records,
        out: Pixels,
        *,
        boxes: NDArray[np.integer] | NDArray[np.floating] | None = None,
        flips: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
        orientations: NDArray[np.integer] | None = None,
    ) -> list[Failure]:
        """Decode a chunk of images into the slots of a batch.

        Crop, then resize, then flip, as torchvision does it on PIL images; boxes of floats resize before they crop.
        Most of the time is spent outside the interpreter lock. May be called from many threads at once, with different
        ``out``.

        Args:
            records: N whole files, in a list or in whatever has a length and gives them one by one.
            out: (N, H, W, C) uint8, each slot C-contiguous; C is 3, or 1 for mode "L".
            boxes: (N, 4) crops (x0, y0, x1, y1) in source pixels, integers or floats as for ``decode``; each is resized
                to the slot. Without, an image must have the slot's size: nothing is ever resized unasked.
            flips: (N,) bool, whether to swap left and right; or uint8, to which 1 stands for that and 2 for top and
                bottom.
            orientations: (N,) EXIF tags from an index, so that "apply" need not look for them in the files.

        Returns:
            (position, message) of each image that failed, in order. Its slot is filled with zeros.

        Raises:
            ValueError: ``out``, ``boxes``, ``flips`` or ``orientations`` do not fit together.
        """
        _check(len(records), out, _CHANNELS[self.mode], boxes, flips, orientations)
        corners = boxes.tolist() if boxes is not None else None
        mirrored = flips.tolist() if flips is not None else None
        tags = orientations.tolist() if orientations is not None and self.orientation == "apply" else None
        upright = self.orientation == "ignore"
        failures: list[Failure] = []
        for position, data in enumerate(records):
            slot = out[position]
            flip = 0 if mirrored is None else mirrored[position]
            try:
                if corners is None and upright and self._straight(data, slot):
                    if flip:
                        self.resize(slot, slot, flip)
                    continue
                self._fill(
                    as_bytes_like(data),
                    slot,
                    corners[position] if corners is not None else None,
                    flip,
                    tags[position] if tags is not None else None,
                )
            except DecodeError as error:
                slot[...] = 0
                failures.append((position, error.message))
        return failures

    def _straight(self, data: Buffer, slot: Pixels) -> bool:
        """Decode the usual JPEG of the slot's size into the slot: False, and an undefined slot, for all others."""
        data = as_bytes_like(data)
        if data[:3] != _JPEG or slot.shape[0] * slot.shape[1] > self.max_pixels:
            return False
        pixels = libjpeg.decode_at_once(data, self.mode, slot, fast=self.fast, max_pixels=self.max_pixels)
        return pixels is not None and pixels.shape == slot.shape

    def _fill(self, data: bytes | memoryview, slot: Pixels, box: Box | None, flip: int, tag: int | None) -> None:
        if tag is None:
            tag = self._tag(data)
        crop = oriented(self._scratch_pixels(data), tag)
        if box is None and crop.shape != slot.shape:
            raise DecodeError(
                f"the image has {crop.shape[1]}x{crop.shape[0]} pixels and its place {slot.shape[1]}x{slot.shape[0]}; "
                "choose a crop or resize to bring images of different sizes into one batch"
            )
        self._show(crop, tag, box, slot, flip)

    def _show(self, pixels: Pixels, tag: int, box: Box | None, out: Pixels, flip: int) -> None:
        """Fill ``out`` with the box of pixels that were turned by ``tag``."""
        crop = _cut(pixels, box)
        if tag not in _UPRIGHT:
            crop = np.ascontiguousarray(crop)
        if box is None or not isinstance(box[0], float):
            self.resize(crop, out, flip)
        else:
            self.resize(crop, out, flip, box)

    def _tag(self, data: bytes | memoryview) -> int:
        return sniff(data, max_pixels=self.max_pixels).orientation if self.orientation == "apply" else 0

    def _scratch_pixels(self, data: bytes | memoryview) -> Pixels:
        """All of an image as stored, in memory that the thread's next image will overwrite."""
        scratch: Pixels | None = getattr(_thread, "scratch", None)
        if scratch is not None and data[:3] == _JPEG:
            pixels = libjpeg.decode_at_once(data, self.mode, scratch, fast=self.fast, max_pixels=self.max_pixels)
            if pixels is not None:
                return pixels
        return self._pixels(data, _scratch_room)

    def _pixels(self, data: bytes | memoryview, room: libjpeg.Room) -> Pixels:
        """All of an image as stored, (H, W, C): in the array that ``room`` gives, or in one of its own."""
        if data[:3] == _JPEG:
            size = libjpeg.usual_size(data)
            if size is not None and size[0] * size[1] <= self.max_pixels:
                buffer = room(*size, _CHANNELS[self.mode])
                try:
                    return libjpeg.decode_jpeg(data, libjpeg.SPACES[self.mode], self.fast, self.fast, buffer=buffer)
                except ValueError:
                    del buffer  # unusual or damaged: looked at again, more slowly, and with no memory held twice
            result = libjpeg.read_unusual(
                data, self.mode, room, fast=self.fast, partial=self.partial, max_pixels=self.max_pixels
            )
            if result is not None:
                pixels, kind = result
                return pillow.from_cmyk(pixels, self.mode) if kind == "CMYK" else pixels
        found = sniff(data, max_pixels=self.max_pixels)
        return pillow.read(data, found, self.mode, partial=self.partial)


def decode(
    data: Buffer,
    *,
    box: Box | None = None,
    size: tuple[int, int] | None = None,
    mode: Literal["RGB", "L"] = "RGB",
    orientation: Literal["ignore", "apply"] = "ignore",
    partial: bool = False,
    fast: bool = False,
    max_pixels: int = MAX_PIXELS,
    interpolation: Interpolation = "bilinear",
) -> Pixels:
    """Decode one image: ``Decoder(...).decode(data, box=box, size=size)``, see there.

    Resizing is antialiased; ``interpolation`` is "bilinear" or "bicubic".

    Raises:
        DecodeError: the bytes are no image that can be decoded whole, or the box lies outside of it.
    """
    resize = pillow.resizer(interpolation)
    decoder = Decoder(mode, orientation, partial, fast, max_pixels, resize)
    return decoder.decode(data, box=box, size=size)


decode_into = Decoder().decode_into  # with the default options


def _new_room(height: int, width: int, channels: int) -> Pixels:
    return _at_odd_address(height * width * channels).reshape(height, width, channels)


def _scratch_room(height: int, width: int, channels: int) -> Pixels:
    """Memory that the thread's next image will overwrite. Fresh pages are dear: reusing them saves a tenth."""
    size = height * width * channels
    if size > _KEEP_BYTES:
        return _new_room(height, width, channels)
    scratch: Pixels | None = getattr(_thread, "scratch", None)
    if scratch is None or scratch.size < size:
        scratch = _thread.scratch = _at_odd_address(size)
    return scratch[:size].reshape(height, width, channels)


def _at_odd_address(size: int) -> Pixels:
    """New memory. libjpeg-turbo writes a row that begins at a multiple of 32 bytes past the processor's cache, and
    whoever works on it next waits for the memory; from an odd address hardly a row of any width begins at one.
    Decoding and resizing photos of 400 x 533 takes 7 to 14 per cent less time, by where they had been put before.
    """
    return np.empty(size + 1, np.uint8)[1:]  # an allocator's own addresses are even


def _cut(pixels: Pixels, box: Box | None) -> Pixels:
    """The pixels in a box of integers; all for one of floats."""
    if box is None:
        return pixels
    x0, y0, x1, y1 = box
    height, width = pixels.shape[:2]
    if not (0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height):
        raise DecodeError(f"the box ({x0}, {y0}, {x1}, {y1}) is empty or leaves the image of {width}x{height} pixels")
    return pixels if isinstance(x0, float) else pixels[y0:y1, x0:x1]


def _check(
    count: int,
    out: Pixels,
    channels: int,
    boxes: NDArray[np.integer] | NDArray[np.floating] | None,
    flips: NDArray[np.bool_] | NDArray[np.uint8] | None,
    orientations: NDArray[np.integer] | None,
) -> None:
    if out.ndim != 4 or len(out) != count or out.shape[3] != channels or out.dtype != np.uint8:
        raise ValueError(f"out is {out.dtype} {out.shape}; needed is uint8 ({count}, H, W, {channels})")
    if count and not (out[0].flags.c_contiguous and out.flags.writeable):
        raise ValueError("out must be writable and each of its slots C-contiguous")
    if boxes is not None and (boxes.shape != (count, 4) or boxes.dtype.kind not in "iuf"):
        raise ValueError(f"boxes is {boxes.dtype} {boxes.shape}; needed is an integer or float array ({count}, 4)")
    if flips is not None and (flips.shape != (count,) or flips.dtype not in (np.bool_, np.uint8)):
        raise ValueError(f"flips is {flips.dtype} {flips.shape}; needed is a bool or uint8 array ({count},)")
    if orientations is not None and (orientations.shape != (count,) or orientations.dtype.kind not in "iu"):
        raise ValueError(f"orientations is {orientations.dtype} {orientations.shape}; needed are integers ({count},)")
