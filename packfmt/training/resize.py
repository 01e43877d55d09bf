"""Resizing with torch's uint8 kernel, straight into the slot of a batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["resize"]

Pixels = npt.NDArray[np.uint8]

# The kernel behind ``interpolate(mode="bilinear", antialias=True)``, called with a place for its result:
# ``interpolate`` allocates one, and copying it over took a third of the time outside the decoder.
_kernel = torch.ops.aten._upsample_bilinear2d_aa.out


def resize(crop: Pixels, out: Pixels, flip: bool) -> None:
    """Fill ``out`` (H, W, C) with ``crop`` (h, w, C): antialiased bilinear if the sizes differ, mirrored if ``flip``.

    Thread-safe. ``crop`` has positive strides and may be ``out`` itself.
    """
    if crop.shape == out.shape:
        if flip:
            out[...] = crop[:, ::-1].copy() if np.may_share_memory(crop, out) else crop[:, ::-1]
        elif crop is not out:
            out[...] = crop
        return
    source = torch.from_numpy(crop).permute(2, 0, 1).unsqueeze(0)
    target = torch.from_numpy(out).permute(2, 0, 1).unsqueeze(0)
    _kernel(source, list(out.shape[:2]), False, None, None, out=target)
    if flip:
        out[...] = out[:, ::-1].copy()
