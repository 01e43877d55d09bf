"""Detection sets: COCO, Pascal VOC and YOLO annotations beside a folder of images."""

from __future__ import annotations

import os
from collections.abc import Iterator

from packfmt.sources.annotations.coco import CocoSource
from packfmt.sources.annotations.voc import ANNOTATIONS, IMAGES, VocSource
from packfmt.sources.annotations.yolo import NAME_FILES, YoloSource, parse_yolo
from packfmt.sources.inputs import is_image_name

__all__ = ["CocoSource", "VocSource", "YoloSource", "recognise"]

_HEAD = 1 << 20
_LABEL_HEAD = 4096
_LOOKED_AT = 500  # label files and folders of them; a set may begin with many images of nothing
_SETS = 8  # such as train, valid and test


def recognise(path: str | os.PathLike[str]) -> str | None:
    """ "coco" for such a JSON file, "voc" or "yolo" for such a folder, judged by their content; else None."""
    try:
        if os.path.isdir(path):
            return "voc" if _is_voc(os.fspath(path)) else "yolo" if _is_yolo(os.fspath(path)) else None
        return "coco" if _is_coco(os.fspath(path)) else None
    except (OSError, ValueError):
        return None


def _is_coco(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD)
        file.seek(max(0, os.path.getsize(path) - _HEAD))
        tail = file.read(_HEAD)
    named = [name in head or name in tail for name in (b'"images"', b'"annotations"', b'"categories"')]
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" and sum(named) >= 2 and b'"file_name"' in head + tail


def _is_voc(root: str) -> bool:
    if not os.path.isdir(os.path.join(root, IMAGES)):
        return False
    with os.scandir(os.path.join(root, ANNOTATIONS)) as found:
        return any(entry.name.lower().endswith(".xml") for entry in found)


def _is_yolo(root: str) -> bool:
    """A folder ``labels`` beside ``images``, in the root or one folder below it, with a text file of boxes in it.

    Where the root names classes as YOLO sets do, any text file of an image's name will do: all may be empty or damaged.
    """
    named = any(os.path.isfile(os.path.join(root, name)) for name in NAME_FILES)
    with os.scandir(root) as found:
        above = [root, *sorted(entry.path for entry in found if entry.is_dir(follow_symlinks=False))]
    sets = [path for path in above if all(os.path.isdir(os.path.join(path, name)) for name in ("images", "labels"))]
    return any(named or _holds_boxes(path) for folder in sets[:_SETS] for path in _label_files(folder))


def _label_files(folder: str) -> Iterator[str]:
    """Text files below ``labels`` that have the name of an image in the same place below ``images``.

    A README or a list of files beside the labels says nothing of the set, so they are passed over.
    """
    labels, images = os.path.join(folder, "labels"), os.path.join(folder, "images")
    looked_at = 0
    for place, folders, names in os.walk(labels):
        folders.sort()
        stems = _image_stems(os.path.join(images, os.path.relpath(place, labels)))
        looked_at += 1
        for name in sorted(names) if stems else ():
            path = os.path.join(place, name)
            if name.endswith(".txt") and name[:-4] in stems and os.path.isfile(path) and not os.path.islink(path):
                looked_at += 1
                yield path
            if looked_at > _LOOKED_AT:
                break
        if looked_at > _LOOKED_AT:
            break


def _image_stems(folder: str) -> set[str]:
    try:
        return {os.path.splitext(name)[0] for name in os.listdir(folder) if is_image_name(name)}
    except OSError:
        return set()


def _holds_boxes(path: str) -> bool:
    """Whether a box is read from it; one damaged or empty file (an image of nothing) does not speak for the set."""
    try:
        with open(path, "rb") as file:
            head = file.read(_LABEL_HEAD)
        return bool(parse_yolo(head[: head.rfind(b"\n") + 1] if len(head) == _LABEL_HEAD else head))
    except (OSError, ValueError):
        return False
