"""LMDB databases of images as other projects write them. packfmt's own are read by ``packfmt.open``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.inputs import Probe, head_of, is_hidden, is_image_name
from packfmt.sources.isolated.source import IsolatedSource
from packfmt.sources.values import what_is

__all__ = ["LMDBSource", "recognise"]

# The first page is a meta page: a page header, then this number. The header is 16 bytes where pointers have 64 bits,
# 24 in LMDB 1.0.
_MAGIC = (0xBEEFC0DE).to_bytes(4, "little")
_HEADER, _NARROW_HEADER, _NEW_HEADER = 16, 12, 24
_DATA_FILE = "data.mdb"
_SUFFIXES = (".mdb", ".lmdb")
_MAX_ENVIRONMENTS = 10_000
_MEMORY = 1 << 30  # bytes of address space for the child, besides mapped files


def recognise(probe: Probe) -> bool:
    """Whether it is an LMDB data file, or a folder with one at any depth.

    Tells by content; a pointer or an error page under an LMDB name counts as one, so that opening it can say so.

    Raises:
        SourceError: image files lie beside the environments, so that either could be meant.
    """
    found = _data_files(probe.path, limit=1)
    if not found:
        return False
    head = head_of(found[0]) if probe.is_folder else probe.head
    named = os.path.basename(found[0]) == _DATA_FILE or found[0].endswith(_SUFFIXES)
    stranger = named and what_is(head).startswith(("a Git LFS", "an HTML", "gzip"))
    places = (_HEADER, _NARROW_HEADER, _NEW_HEADER)
    if not any(head.startswith(_MAGIC, place) for place in places) and not stranger:
        return False
    several = probe.is_folder and not os.path.isfile(os.path.join(probe.path, _DATA_FILE))
    if several and (image := _image_beside(probe.path)) is not None:
        raise SourceError(
            f"{probe.path}: holds both LMDB ({found[0]}) and image files ({image}); --from lmdb reads the one, "
            "--from folder the others"
        )
    return True


class LMDBSource(IsolatedSource):
    """Images of one or many LMDB environments, in any of the layouts that keys and first bytes distinguish.

    The environments are opened read-only, without locks, in a child process; no value is unpickled and no key is used
    as a path. Values that are image files are kept byte for byte.

    Args:
        path: an environment's folder, its data file, or a folder of such folders, whose relative paths then start the
            keys. All of them must have one layout.
        which: of TextZoom's two images per sample, "hr" or "lr".
        resolution: of a database that keeps several (StyleGAN2), the one to read; default the largest.
        raw_rgb: read values that are not image files as square raw RGB pixels (NVAE).
        carve: cut JPEGs out of ``pyarrow.serialize`` values; labels are lost.
        database: the named database to read; default all of them, where there are any.
        encode: "png" or "jpeg:QUALITY", for raw pixels.
        timeout: seconds without a record after which reading ends with an error; at most a day.

    Raises:
        FileNotFoundError: there is no such path, or no environment in it.
        SourceError: no LMDB file, an empty or damaged one, or a layout that holds no images or cannot be read safely.
    """

    kind = "lmdb"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        which: str = "hr",
        resolution: int | None = None,
        raw_rgb: bool = False,
        carve: bool = False,
        database: str | None = None,
        encode: str = "png",
        timeout: float = 60.0,
    ) -> None:
        if which not in ("hr", "lr"):
            raise ValueError(f"which {which!r} is not 'hr' or 'lr'")
        root = os.fspath(path)
        self._said: list[str] = []
        passed: list[str] = []
        files = _data_files(root, limit=_MAX_ENVIRONMENTS + 1, passed=passed)
        if not files:
            raise FileNotFoundError(2, f"no LMDB environment (a folder with {_DATA_FILE}, or a data file)", root)
        if len(files) > _MAX_ENVIRONMENTS:
            raise SourceError(f"{root}: more than {_MAX_ENVIRONMENTS} LMDB environments; convert parts of it")
        for file in files:
            _check_head(file)
        options: dict[str, Any] = {"which": which, "resolution": resolution, "raw_rgb": raw_rgb}
        options.update(carve=carve, database=database)
        environments = [(os.path.abspath(file), _prefix(root, file, len(files))) for file in files]
        super().__init__(
            "lmdb",
            {"environments": environments, "options": options},
            path=root,
            # Two files at most are mapped: one that is read, and the one before until its last view goes.
            memory=_MEMORY + 2 * max(os.path.getsize(file) for file in files),
            timeout=timeout,
            encode=encode,
            files=[file for file, _ in environments],
            check=carve,
        )
        if passed:
            said = "linked folders, or environments below another, were passed over; convert them one by one"
            self._said.append(f"{len(passed)} {said}, first {passed[0]}")
            self.notes += self._said

    def _finish(self, end: dict[str, Any]) -> None:
        super()._finish(end)
        self.notes += self._said


def _data_files(path: str, limit: int, passed: list[str] | None = None) -> list[str]:
    """The data files that a path stands for, at most ``limit``, sorted by their folders.

    Args:
        path: a data file, or a folder.
        limit: how many.
        passed: takes the folders and environments that are there and are passed over.

    Raises:
        OSError: a folder cannot be listed.
    """
    if not os.path.isdir(path):
        return [path] if os.path.isfile(path) else []
    found: list[str] = []
    for folder, folders, names in os.walk(path, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if passed is not None:
            passed += [inner for name in folders if os.path.islink(inner := os.path.join(folder, name))]
        here = _environments(folder, names)
        if folder == path and here and _DATA_FILE in names:
            if passed is not None:
                passed += _data_files_below(path, folders)
            return here
        found += here
        if len(found) >= limit:
            break
    return found[:limit]


def _environments(folder: str, names: list[str]) -> list[str]:
    lone = sorted(name for name in names if name.endswith(_SUFFIXES) and not name.startswith((".", "lock.mdb")))
    chosen = [_DATA_FILE] if _DATA_FILE in names else lone
    return [file for name in chosen if os.path.isfile(file := os.path.join(folder, name))]


def _data_files_below(path: str, folders: list[str]) -> list[str]:
    return [file for name in folders for file in _data_files(os.path.join(path, name), _MAX_ENVIRONMENTS)]


def _refuse(error: OSError) -> None:
    raise error


def _image_beside(root: str) -> str | None:
    """The first image file below a folder that is in no environment's own folder."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if _DATA_FILE not in names:
            for name in sorted(names):
                if is_image_name(name) and not is_hidden(name):
                    return os.path.join(folder, name)
    return None


def _prefix(root: str, file: str, count: int) -> str:
    """What starts the keys of one environment among many: its path below the root."""
    if count == 1:
        return ""
    place = Path(file).parent if os.path.basename(file) == _DATA_FILE else Path(file)
    return place.relative_to(root).as_posix() + "/"


def _check_head(path: str) -> None:
    head = head_of(path)
    if head[_HEADER : _HEADER + 4] == _MAGIC:
        return
    if head[_NARROW_HEADER : _NARROW_HEADER + 4] == _MAGIC:
        raise SourceError(
            f"{path}: an LMDB file of a 32-bit program, which 64-bit ones cannot read; copy it there with mdb_dump and "
            "load it here with mdb_load"
        )
    if head.startswith(_MAGIC, _NEW_HEADER):
        raise SourceError(
            f"{path}: an LMDB file of LMDB 1.0, packfmt reads those of 0.9; mdb_dump it with 1.0, mdb_load it with 0.9"
        )
    if _MAGIC[::-1] in (head[_HEADER : _HEADER + 4], head[_NARROW_HEADER : _NARROW_HEADER + 4]):
        raise SourceError(f"{path}: an LMDB file of a big-endian machine; mdb_dump it there and mdb_load it here")
    raise SourceError(f"{path}: not an LMDB data file but {what_is(head)}")
