"""What happens to the boxes of a target when its image is turned upright, cropped, resized and flipped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packfmt.images.exif import MIRRORED, TRANSPOSED, UPSIDE_DOWN

__all__ = ["crop_boxes", "turn_boxes"]


def turn_boxes(boxes: npt.ArrayLike, orientation: int, size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Carry boxes along as an EXIF orientation turns their image.

    Args:
        boxes: (M, 4) numbers (x0, y0, x1, y1), pixels of the image as stored.
        orientation: 0 to 8; 0 and 1 change nothing. To carry boxes back, 6 stands for 8, 8 for 6, the others for
            themselves.
        size: (height, width) of the turned image.

    Returns:
        (M, 4) float32, in the turned image.
    """
    corners = np.array(boxes, dtype=np.float64).reshape(-1, 2, 2)
    if orientation in TRANSPOSED:
        corners = corners[..., ::-1]
    for axis, swaps in ((0, MIRRORED), (1, UPSIDE_DOWN)):
        if orientation in swaps:
            corners[..., axis] = size[1 - axis] - corners[:, ::-1, axis]
    return corners.reshape(-1, 4).astype(np.float32)


def crop_boxes(
    boxes: npt.ArrayLike, crop_box: npt.ArrayLike, size: tuple[int, int], flip: npt.ArrayLike = False
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Carry a target's boxes through the crop, the resize and the flip of its image.

    The boxes are cut at the crop's edges. Nothing is dropped here, so that boxes and labels keep their places: use
    ``boxes[keep]`` and ``labels[keep]``. For a whole batch, give all boxes one below the other, with their image's crop
    and flip repeated for each.

    Args:
        boxes: (M, 4) numbers (x0, y0, x1, y1), source pixels.
        crop_box: (4,), or (M, 4) for one each: a row of ``Crop.boxes``.
        size: the crop's output (height, width).
        flip: bool or code, or (M,): how the image was flipped after the crop. 1 (True) swapped left and right, 2 top
            and bottom, 3 both.

    Returns:
        (M, 4) float32, boxes in output pixels, and (M,) bool, False where no area is left (or a coordinate is NaN).

    Raises:
        ValueError: a shape is not as above, or a crop is empty.
    """
    source = np.asarray(boxes, dtype=np.float64)
    if source.size == 0:
        source = source.reshape(0, 4)  # an empty list has no second axis
    crop, mirror = np.asarray(crop_box, dtype=np.float64), np.asarray(flip, dtype=np.uint8)
    if source.shape[1:] != (4,) or crop.shape not in ((4,), source.shape) or mirror.shape not in ((), source.shape[:1]):
        shapes = f"{source.shape}, {crop.shape} and {mirror.shape}"
        raise ValueError(f"boxes must have shape (M, 4), crop_box (4,) or (M, 4), flip () or (M,); got {shapes}")
    start, stop = crop[..., None, :2], crop[..., None, 2:]
    if not (stop > start).all():
        raise ValueError(f"crop_box must have x1 > x0 and y1 > y0, got {crop.tolist()}")
    corners = np.clip(source.reshape(-1, 2, 2), start, stop)
    corners = (corners - start) * np.array(size[::-1]) / (stop - start)
    for axis, code, length in ((0, 1, size[1]), (1, 2, size[0])):
        swapped = (mirror & code != 0)[..., None]
        corners[..., axis] = np.where(swapped, length - corners[:, ::-1, axis], corners[..., axis])
    moved = corners.reshape(-1, 4).astype(np.float32)
    return moved, (moved[:, 2] > moved[:, 0]) & (moved[:, 3] > moved[:, 1])
