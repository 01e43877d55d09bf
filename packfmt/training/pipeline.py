"""How the samples of a dataset are made: what its user asked for, checked, and the same for every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from packfmt.images.decode import Decoder
from packfmt.images.geometry import CenterCrop, Crop, Flip, HorizontalFlip, Interpolation, Resize
from packfmt.images.pillow import to_pil
from packfmt.storage.base import RecordReader
from packfmt.training.collate import to_tensor
from packfmt.training.resize import resizer
from packfmt.training.targets import TargetOptions, Targets

__all__ = ["Form", "Output", "Pipeline", "make_pipeline"]

Pixels = npt.NDArray[np.uint8]
Output = Literal["tensor", "numpy", "pil"]
Form = Literal["tuple", "dict"]

CROPS = (
    "packfmt.RandomResizedCrop(224) to train, packfmt.CenterCrop(224, resize=256) to evaluate, packfmt.RandomCrop(224) "
    "or packfmt.Resize(224)"
)

_PRESENT: dict[str, Callable[[Pixels], Any]] = {
    "tensor": to_tensor,
    "numpy": np.asarray,
    "pil": to_pil,
}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How samples are made: what stays the same for all batches of a dataset. Thread-safe."""

    reader: RecordReader
    decoder: Decoder
    crop: Crop | None
    flips: tuple[Flip, ...]
    transform: Callable[[Any], Any] | None
    transforms: Callable[[Any, Any], Any] | None  # of an image and its target
    targets: Targets
    output: Output
    sample: Form
    on_error: Literal["raise", "skip"]

    def present(self, pixels: Pixels) -> Any:
        """Pixels (H, W, C) in the form that the transform and the user see."""
        return _PRESENT[self.output](pixels)

    @property
    def transforming(self) -> bool:
        """Whether images change after decoding."""
        return self.transform is not None or self.transforms is not None

    @property
    def random(self) -> bool:
        """Whether a sample may look different when it is drawn again."""
        fixed = self.crop is None or isinstance(self.crop, (CenterCrop, Resize))
        return bool(self.flips) or self.transforming or not fixed

    def changed(self, **options: Any) -> Pipeline:
        """The same but for some of the options that a dataset lets its user assign, by their names there.

        Raises:
            TypeError, ValueError: as ``make_pipeline``.
        """
        parts: dict[str, Any] = {}
        for name, value in options.items():
            if name == "crop":
                parts["crop"] = as_crop(value)
                parts["decoder"] = replace(self.decoder, resize=resizer(interpolation_of(value)))
            elif name == "flip":
                parts["flips"] = as_flips(value)
            elif name == "target_transform":
                parts["targets"] = self.targets.with_transform(as_transform(name, value))
            else:
                parts[name] = as_transform(name, value)
        return replace(self, **parts)


def make_pipeline(
    reader: RecordReader,
    *,
    crop: Crop | None,
    flip: Flip | Sequence[Flip] | float | None,
    transform: Callable[[Any], Any] | None,
    transforms: Callable[[Any, Any], Any] | None,
    targets: TargetOptions,
    output: Output,
    sample: Form,
    mode: Literal["RGB", "L"],
    orientation: Literal["ignore", "apply"],
    partial: bool,
    fast: bool,
    on_error: Literal["raise", "skip"],
) -> Pipeline:
    """A pipeline from a dataset's options, which it describes.

    Raises:
        TypeError: a crop, a flip or a transform is none.
        ValueError: an option is not one of those allowed, or the reader has no column of that name.
    """
    for name, value, allowed in (
        ("output", output, tuple(_PRESENT)),
        ("sample", sample, ("tuple", "dict")),
        ("on_error", on_error, ("raise", "skip")),
    ):
        if value not in allowed:
            names = (" and " if len(allowed) == 2 else ", ").join(map(repr, allowed))
            raise ValueError(f"{name}={value!r}, allowed are {names}")
    if not isinstance(partial, bool):
        raise ValueError(f"partial={partial!r}: whether truncated images are decoded is True or False")
    pipeline = Pipeline(
        reader,
        Decoder(mode=mode, orientation=orientation, partial=partial, fast=fast),
        None,
        (),
        None,
        None,
        Targets(reader, targets),
        output,
        sample,
        on_error,
    )
    return pipeline.changed(
        crop=crop, flip=flip, transform=transform, target_transform=targets.transform, transforms=transforms
    )


def as_crop(crop: object) -> Crop | None:
    """A dataset's option ``crop``.

    Raises:
        TypeError: it is no crop.
    """
    if crop is None or (isinstance(crop, Crop) and not isinstance(crop, type)):
        return crop
    raise TypeError(f"crop={crop!r} is not a crop: give {CROPS}. What works on a decoded image is a transform=")


def as_flips(flip: object) -> tuple[Flip, ...]:
    """A dataset's option ``flip``: one, several, or None. A number is the probability of a ``HorizontalFlip``.

    Raises:
        TypeError: it is none of these.
        ValueError: the probability is outside 0 to 1.
    """
    if flip is None or isinstance(flip, (bool, np.bool_)):
        return (HorizontalFlip(),) if flip else ()
    if isinstance(flip, (int, float, np.number)):
        return (HorizontalFlip(float(flip)),)
    several = tuple(flip) if isinstance(flip, (list, tuple)) else (flip,)
    for one in several:
        if isinstance(one, type) or not callable(getattr(one, "flips", None)):
            raise TypeError(
                f"flip={flip!r} is not a flip: give packfmt.HorizontalFlip(), packfmt.VerticalFlip(), a list of both, "
                "or the probability of a horizontal one"
            )
    return cast("tuple[Flip, ...]", several)


def as_transform(name: str, transform: Any) -> Any:
    """One of a dataset's options that are called, or None.

    Raises:
        TypeError: it cannot be called.
    """
    if transform is not None and not callable(transform):
        raise TypeError(f"{name}={transform!r} is not a function, nor an object that can be called, nor None")
    return transform


def interpolation_of(crop: Crop | None) -> Interpolation:
    """How a crop resizes."""
    return getattr(crop, "interpolation", "bilinear")
