"""HDF5 files of images: arrays of pixels, encoded images in rows, or one dataset per image."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.hdf5.layouts import check_layout, parse_range
from packfmt.sources.inputs import Probe, has_images, head_of, natural
from packfmt.sources.isolated.source import IsolatedSource
from packfmt.sources.values import what_is

__all__ = ["HDF5Source", "recognise"]

_MAGIC = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".hdf5.h5")
_MAX_FILES = 100_000
_MEMORY = 3 << 30  # bytes of address space for the child: a chunk of half a gigabyte, unpacked and turned
_USER_BLOCKS = (0, 512, 1024, 2048, 4096, 8192)  # where the signature may stand


def recognise(probe: Probe) -> bool:
    """Whether it is an HDF5 file, or a folder with such files, and no images, at its top.

    Tells by content; a pointer or an error page under an HDF5 name counts as one, so that opening it can say so.
    """
    place = probe.path
    if probe.is_folder:
        names = [name for name in sorted(os.listdir(place)) if name.lower().endswith(_SUFFIXES)]
        return any(_is_hdf5_file(os.path.join(place, name)) for name in names[:16]) and not has_images(place)
    named = place.lower().endswith((*_SUFFIXES, ".h5.gz", ".hdf5.gz"))
    return _is_hdf5(probe.head) or (named and what_is(probe.head).startswith(("a Git LFS", "an HTML", "gzip")))


class HDF5Source(IsolatedSource):
    """Images of one HDF5 file, or of all such files below a folder, which then must agree in layout and columns.

    The files are opened read-only in a child process; no link in them is followed and no other file opened, but for
    labels in a ``*_y.h5`` beside a ``*_x.h5``. Encoded images are kept byte for byte. Pixels become PNG, without
    loss, unless ``encode`` says otherwise. Chunked data are read chunk by chunk, in the order of the images.

    Args:
        path: the file, or a folder.
        images: the dataset or group to read, as "train/x", where the file holds several.
        labels: the dataset of labels; "" for none; None finds it by its name.
        layout: what the axes are, as "NHWC", "NCHW" or "NHW", where that can be read in more than one way; for one
            dataset per image without the N.
        value_range: what black and white are, as "0,1" or "0,255", where values are not 8-bit numbers.
        channels: "rgb" or "bgr"; None takes RGB, and says so.
        encode: "png" or "jpeg:QUALITY", for pixels.
        locking: False opens a file that another program has locked.
        timeout: seconds without a record after which reading ends with an error; at most a day.

    Raises:
        FileNotFoundError: there is no such path, or no HDF5 file in the folder.
        SourceError: h5py is not installed; no HDF5 file, or a damaged one; no images in it, or images whose place,
            axes or values have to be given; links, foreign storage, or shapes beyond all measure.
        ValueError: an option that means nothing.
    """

    kind = "hdf5"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        images: str | None = None,
        labels: str | None = None,
        layout: str | None = None,
        value_range: str | None = None,
        channels: str | None = None,
        encode: str = "png",
        locking: bool = True,
        timeout: float = 60.0,
    ) -> None:
        if channels not in (None, "rgb", "bgr"):
            raise ValueError(f"channels {channels!r} is not 'rgb' or 'bgr'")
        if value_range is not None:
            parse_range(value_range)
        if importlib.util.find_spec("h5py") is None:
            raise SourceError("reading HDF5 needs h5py: pip install 'packfmt[hdf5]'")
        root = os.fspath(path)
        files = _files(root)
        for file in files:
            _check_head(file)
        options: dict[str, Any] = {"images": images, "labels": labels, "channels": channels, "locking": locking}
        options.update(layout=check_layout(layout) if layout else None, value_range=value_range)
        many = len(files) > 1
        request = [(os.path.abspath(file), _prefix(root, file) if many else "", _labels_beside(file)) for file in files]
        super().__init__(
            "hdf5",
            {"files": request, "options": options},
            path=root,
            memory=_MEMORY,
            timeout=timeout,
            encode=encode,
        )


def _files(path: str) -> list[str]:
    """The files a path stands for, those of labels only left out, in natural order."""
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise FileNotFoundError(2, "no such file", path)
        return [path]
    found: list[str] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        wanted = [name for name in names if name.lower().endswith(_SUFFIXES) and not name.startswith(".")]
        found += [os.path.join(folder, name) for name in wanted if not _is_labels_of(name, names)]
        if len(found) > _MAX_FILES:
            raise SourceError(f"{path}: more than {_MAX_FILES} HDF5 files; convert parts of it")
    if not found:
        raise FileNotFoundError(2, f"no file named {', '.join('*' + suffix for suffix in _SUFFIXES[:3])}", path)
    return sorted(found, key=natural)


def _is_labels_of(name: str, names: list[str]) -> bool:
    match = re.fullmatch(r"(.*_)y(\.\w+)", name)
    return match is not None and f"{match[1]}x{match[2]}" in names


def _labels_beside(file: str) -> str | None:
    """The ``*_y`` file that goes with a ``*_x`` file, where it is there."""
    folder, name = os.path.split(os.path.abspath(file))
    match = re.fullmatch(r"(.*_)x(\.\w+)", name)
    beside = os.path.join(folder, f"{match[1]}y{match[2]}") if match is not None else ""
    return beside if beside and _is_hdf5(head_of(beside)) else None


def _prefix(root: str, file: str) -> str:
    """What starts the keys of one file among many: its path below the root, without its suffix."""
    return os.path.splitext(os.path.relpath(file, root))[0].replace(os.sep, "/") + "/"


def _is_hdf5_file(path: str) -> bool:
    try:
        return _is_hdf5(head_of(path))
    except OSError:  # another may be readable
        return False


def _is_hdf5(head: bytes) -> bool:
    return any(head.startswith(_MAGIC, start) for start in _USER_BLOCKS)


def _check_head(path: str) -> None:
    if not os.path.isfile(path):
        raise SourceError(f"{path}: not a regular file")
    if not _is_hdf5(head := head_of(path)):
        raise SourceError(f"{path}: not an HDF5 file but {what_is(head)}")
