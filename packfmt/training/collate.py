"""Samples to batches: one tensor, a list, or one padded tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

__all__ = ["Collate", "collate_column", "collate_images", "collate_targets", "pad_images", "to_tensor"]

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
    if collate == "pad" or not images:
        return pad_images(images)
    shapes = {tuple(image.shape) for image in images if hasattr(image, "shape")}
    if len(shapes) > 1:
        raise ValueError(
            f"images of differing shapes {sorted(shapes)[:4]} cannot be stacked: give the dataset a crop, or the "
            "loader collate='list' or 'pad'"
        )
    if images and isinstance(images[0], np.ndarray):
        return np.stack(images)
    if all(isinstance(image, torch.Tensor) and image.dim() == 3 for image in images):
        last = [image.permute(1, 2, 0) for image in images]
        if all(image.is_contiguous() for image in last):  # as decoded: in the memory format of images in one array
            return default_collate(last).permute(0, 3, 1, 2)
    return default_collate(list(images))


def pad_images(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """(N, C, H, W), zeros where an image is smaller than the largest; channels-last."""
    if not all(isinstance(image, torch.Tensor) for image in images):
        raise TypeError("collate='pad' pads tensors; use output='tensor', or collate='list'")
    kinds = {(image.dtype, image.dim()) for image in images}
    if len(kinds) > 1 or any(dim != 3 for _, dim in kinds):
        found = ", ".join(sorted(f"{dtype} of {dim} axes" for dtype, dim in kinds))
        raise TypeError(f"collate='pad' needs images (C, H, W) of one dtype, got {found}; use collate='list'")
    channels = max((image.shape[0] for image in images), default=3)
    height = max((image.shape[1] for image in images), default=0)
    width = max((image.shape[2] for image in images), default=0)
    like = images[0] if images else torch.empty(0, dtype=torch.uint8, device="cpu")
    out = like.new_zeros((len(images), height, width, channels)).permute(0, 3, 1, 2)
    for slot, image in zip(out, images, strict=True):
        slot[:, : image.shape[1], : image.shape[2]] = image
    return out


def collate_column(values: npt.NDArray[Any] | Sequence[Any]) -> Any:
    """One column of a batch: numbers and arrays of one shape as a tensor; ragged arrays, str and bytes as a list.

    Whole numbers become int64, as torch's default_collate makes of samples that are taken one by one.

    Raises:
        ValueError: an unsigned number is too large for that.
    """
    if isinstance(values, np.ndarray):
        whole = values.ndim == 1 and values.dtype.kind in "iu"
        if whole and values.dtype.itemsize == 8 and values.dtype.kind == "u" and (values >> np.uint64(63)).any():
            raise ValueError(
                f"{values.max()} does not fit into torch's int64: keep such numbers as text or bytes, or leave their "
                "column out of fields"
            )
        return torch.from_numpy(values.astype(np.int64, copy=False) if whole else values)
    if all(isinstance(value, np.ndarray) for value in values):
        return [_owned(value) for value in values]  # also where they happen to be of one length
    return collate_targets(values)


def collate_targets(values: Sequence[Any]) -> Any:
    """Targets that a user's transform made: as torch's default_collate, but what does not fit together is a list."""
    first = values[0] if values else None
    if first is None:
        return list(values)
    if all(isinstance(value, (bool, int, float, np.number)) for value in values):
        return default_collate(list(values))
    if all(isinstance(value, (torch.Tensor, np.ndarray)) for value in values):
        tensors = [_owned(value) for value in values]
        alike = len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        return torch.stack(tensors) if alike else tensors
    if isinstance(first, Mapping) and all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values):
        return {name: collate_targets([value[name] for value in values]) for name in first}
    if isinstance(first, (tuple, list)) and all(isinstance(v, (tuple, list)) and len(v) == len(first) for v in values):
        return [collate_targets(parts) for parts in zip(*values, strict=True)]
    return list(values)


def _owned(value: Any) -> Any:
    """Arrays as tensors over memory of their own."""
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
