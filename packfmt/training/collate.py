"""Samples to batches: one tensor, a list, or one padded tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

__all__ = ["Collate", "collate_images", "collate_targets", "pad_images", "to_tensor"]

Collate = Literal["stack", "list", "pad"]


def to_tensor(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """(H, W, C) pixels as a (C, H, W) uint8 tensor over the same memory."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


def collate_images(images: Sequence[Any], collate: Collate) -> Any:
    """Images of single samples to the images of a batch.

    Args:
        images: tensors (C, H, W), numpy arrays, PIL images, or whatever a transform returned.
        collate: "stack" needs equal shapes; "list" keeps them as they are; "pad" puts tensors into the top left corner
            of one tensor of zeros as large as the largest.

    Raises:
        ValueError: "stack" with differing shapes.
        TypeError: "pad" with something else than tensors.
    """
    if collate == "list":
        return list(images)
    if collate == "pad":
        return pad_images(images)
    shapes = {tuple(image.shape) for image in images if hasattr(image, "shape")}
    if len(shapes) > 1:
        raise ValueError(
            f"images of differing shapes {sorted(shapes)[:4]} cannot be stacked: give the dataset a crop, or the "
            "loader collate='list' or 'pad'"
        )
    if images and isinstance(images[0], np.ndarray):
        return np.stack(images)
    return default_collate(list(images))


def pad_images(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """(N, C, H, W), zeros where an image is smaller than the largest; channels-last."""
    if not all(isinstance(image, torch.Tensor) for image in images):
        raise TypeError("collate='pad' pads tensors; use output='tensor', or collate='list'")
    channels = max((image.shape[0] for image in images), default=3)
    height = max((image.shape[1] for image in images), default=0)
    width = max((image.shape[2] for image in images), default=0)
    dtype = images[0].dtype if images else torch.uint8
    out = torch.zeros((len(images), height, width, channels), dtype=dtype).permute(0, 3, 1, 2)
    for slot, image in zip(out, images, strict=True):
        slot[:, : image.shape[1], : image.shape[2]] = image
    return out


def collate_targets(values: Any) -> Any:
    """Targets of a batch: numbers as one tensor, vectors as one tensor, the rest as lists; a mapping by its items."""
    if isinstance(values, Mapping):
        return {name: collate_targets(value) for name, value in values.items()}
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    values = list(values)
    if values and all(isinstance(value, (bool, int, float, np.number)) for value in values):
        return torch.as_tensor(values)
    if values and all(isinstance(value, torch.Tensor) for value in values) and len({v.shape for v in values}) == 1:
        return torch.stack(values)
    return [torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value for value in values]
