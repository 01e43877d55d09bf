"""Detection sets: COCO, Pascal VOC and YOLO annotations beside a folder of images."""

from __future__ import annotations

import os

from packfmt.sources.coco import CocoSource
from packfmt.sources.voc import ANNOTATIONS, IMAGES, VocSource
from packfmt.sources.yolo import YoloSource, parse_yolo

__all__ = ["CocoSource", "VocSource", "YoloSource", "recognise"]

_HEAD = 1 << 20
_LOOKED_AT = 8  # label files


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
    """A folder ``labels`` beside or within ``images``, with text files of boxes in it."""
    places = [os.path.join(root, "labels")]
    with os.scandir(root) as found:
        places += [os.path.join(entry.path, "labels") for entry in found if entry.is_dir(follow_symlinks=False)]
    return any(_has_boxes(place) for place in places[:_LOOKED_AT])


def _has_boxes(place: str) -> bool:
    if not os.path.isdir(place) or not os.path.isdir(os.path.join(os.path.dirname(place), "images")):
        return False
    looked_at = 0
    for folder, _, names in os.walk(place):
        for name in sorted(names)[:_LOOKED_AT]:
            looked_at += 1
            full = os.path.join(folder, name)
            if looked_at > _LOOKED_AT or not name.endswith(".txt") or name == "classes.txt" or os.path.islink(full):
                continue
            if not os.path.isfile(full):
                continue
            with open(full, "rb") as file:
                head = file.read(4096)
            try:
                if parse_yolo(head[: head.rfind(b"\n") + 1] if len(head) == 4096 else head):
                    return True
            except ValueError:
                return False
        if looked_at > _LOOKED_AT:
            return False
    return False
