"""MixUp and CutMix: batch transforms whose randomness is keyed by (seed, epoch, batch).

A batch transform is called as ``transform(images, labels, rng)`` with the generator of the batch
(``packfmt.randomness.batch_rng``), so that a batch is mixed in the same way by any number of threads and after a
resume. To choose between the two per batch, draw from the same generator::

    def mix(images, labels, rng):
        return (mixup if rng.random() < 0.5 else cutmix)(images, labels, rng)

torchvision's ``v2.MixUp`` and ``v2.CutMix`` mix in the same way and return the same shapes, but are called as
``transform(images, labels)``, the former with floats only, and draw from torch's global generator: what they do depends
on everything else that draws from it, and a resume does not restore it. This keys one of them by the batch and leaves
the global generator alone, where a single thread draws from it (``threads=1``), since the generator is one for all
threads of a process::

    def keyed(images, labels, rng):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**63)))
            return v2_mixup(images.float().div_(255), labels)

Both mix sample i with sample i - 1 (the first with the last). Images are never changed in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

__all__ = ["CutMix", "MixUp"]

_CHUNK_BYTES = 2**20  # floats of one step of MixUp on uint8; with 4 MiB it takes five times as long


@dataclass(frozen=True, slots=True)
class MixUp:
    """Blends each image and label with its neighbour's: ``lam * own + (1 - lam) * other``, lam ~ Beta(alpha, alpha).

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2017; one lam for the batch and the pairing are
    torchvision's. Thread-safe, picklable, and a pure function of its arguments and the generator's state.

    Args:
        alpha: > 0; the smaller, the nearer lam is to 0 or 1.
        num_classes: number of classes, the width of the soft labels.
    """

    alpha: float = 0.2
    num_classes: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _check_options(self, self.alpha, self.num_classes)

    def __call__(self, images: Tensor, labels: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Mix one batch.

        Args:
            images: (N, C, H, W) uint8 or floating point, any memory format and device.
            labels: (N,) integers below ``num_classes``, or (N, num_classes) floating-point soft labels.
            rng: the batch's generator.

        Returns:
            New images of the same shape, dtype and memory format (uint8 rounded to nearest), and (N, num_classes)
            float32 labels.

        Raises:
            ValueError: a shape or a label is not as above.
            TypeError: a dtype is not as above.
        """
        _check_images(images)
        soft = _soft_labels(labels, len(images), self.num_classes)
        lam = float(rng.beta(self.alpha, self.alpha))
        return _blend(images, lam), torch.lerp(soft.roll(1, 0), soft, lam)


@dataclass(frozen=True, slots=True)
class CutMix:
    """Replaces one rectangle of each image by its neighbour's pixels, and as much of its label.

    The rectangle has sides of sqrt(1 - lam) of the image's, lam ~ Beta(alpha, alpha), around a uniformly drawn centre,
    cut at the image's edges; the labels are weighted by the pixels really replaced. Source: Yun et al., "CutMix:
    Regularization Strategy to Train Strong Classifiers with Localizable Features", 2019; one rectangle for the batch
    and the pairing are torchvision's.
    Thread-safe, picklable, and a pure function of its arguments and the generator's state.

    Args:
        alpha: > 0; 1 draws the share uniformly.
        num_classes: number of classes, the width of the soft labels.
    """

    alpha: float = 1.0
    num_classes: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _check_options(self, self.alpha, self.num_classes)

    def __call__(self, images: Tensor, labels: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Mix one batch; arguments, result and errors as of ``MixUp``."""
        _check_images(images)
        soft = _soft_labels(labels, len(images), self.num_classes)
        height, width = images.shape[2:]
        rows, columns = _rectangle(height, width, float(rng.beta(self.alpha, self.alpha)), rng)
        mixed = images.clone()
        mixed[:, :, rows, columns] = images[:, :, rows, columns].roll(1, 0)
        replaced = (rows.stop - rows.start) * (columns.stop - columns.start)
        return mixed, torch.lerp(soft.roll(1, 0), soft, 1 - replaced / (height * width))


def _rectangle(height: int, width: int, lam: float, rng: np.random.Generator) -> tuple[slice, slice]:
    """Rows and columns that CutMix replaces."""
    column, row = int(rng.integers(width)), int(rng.integers(height))
    half = 0.5 * math.sqrt(1 - lam)
    half_rows, half_columns = int(half * height), int(half * width)
    return (
        slice(max(row - half_rows, 0), min(row + half_rows, height)),
        slice(max(column - half_columns, 0), min(column + half_columns, width)),
    )


def _blend(images: Tensor, lam: float) -> Tensor:
    """``lam`` of each image and the rest of the one before it."""
    mixed = torch.empty_like(images)  # keeps the memory format
    step = len(images)
    if images.dtype == torch.uint8:  # uint8 has no lerp, and floats of the whole batch would take eight times its size
        step = max(1, _CHUNK_BYTES // max(1, 4 * images[:1].numel()))
    for start, stop in _spans(len(images), step):
        own = images[start:stop]
        other = images[start - 1 : stop - 1] if start else images[-1:]
        if images.dtype == torch.uint8:
            mixed[start:stop] = torch.lerp(other.float(), own.float(), lam).round_()
        else:
            torch.lerp(other, own, lam, out=mixed[start:stop])
    return mixed


def _spans(count: int, step: int) -> list[tuple[int, int]]:
    """Spans that cover ``count`` samples; the first is of one sample, since its neighbour is the last."""
    if not count:
        return []
    return [(0, 1), *((start, min(start + step, count)) for start in range(1, count, step))]


def _soft_labels(labels: Tensor, count: int, num_classes: int) -> Tensor:
    if labels.shape[:1] != (count,) or labels.shape[1:] not in ((), (num_classes,)):
        raise ValueError(f"labels must have shape ({count},) or ({count}, {num_classes}), got {tuple(labels.shape)}")
    if labels.ndim == 2:
        if not labels.is_floating_point():
            raise TypeError(f"soft labels must be floating point, got {labels.dtype}")
        return labels.to(torch.float32)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels of shape (N,) must be integers, got {labels.dtype}")
    wrong = (labels < 0) | (labels >= num_classes)
    if bool(wrong.any()):
        raise ValueError(f"label {int(labels[wrong][0])} is outside 0..{num_classes - 1}; num_classes is {num_classes}")
    return torch.nn.functional.one_hot(labels.long(), num_classes).to(torch.float32)


def _check_images(images: Tensor) -> None:
    if images.ndim != 4:
        raise ValueError(f"images must have shape (N, C, H, W), got {tuple(images.shape)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be uint8 or floating point, got {images.dtype}")


def _check_options(owner: object, alpha: float, num_classes: int) -> None:
    if not 0 < alpha < math.inf:
        raise ValueError(f"{type(owner).__name__}: alpha must be a finite number above 0, got {alpha!r}")
    if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 1:
        raise ValueError(f"{type(owner).__name__}: num_classes must be an int of at least 1, got {num_classes!r}")
