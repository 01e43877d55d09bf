"""An HDF5 file opened for reading what lies in it and nothing else: no link is followed, no plug-in searched for.

The only module that imports h5py. Only the child process imports this one.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h5py
import numpy as np

from packfmt.errors import SourceError

__all__ = ["Data", "Group", "Visited", "failure", "open_file"]

_LINKS_AT_ONCE = 1024
_MAX_DEPTH = 32
_MAX_ATTRIBUTES = 1000
_BOMB_BYTES, _BOMB_RATIO = 256 << 20, 1000  # declared beyond the first, and so many times what is stored
_CACHE_BYTES = 16 << 20  # of chunks, per dataset: label columns are read in many small steps
_KNOWN_FILTERS = {
    32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2", 307: "bzip2",
    4: "szip",
}  # fmt: skip


class Data:
    """One dataset, checked: its bytes lie in this file and its filters are there.

    Attributes:
        path: in the file, without a leading "/".
        shape, dtype: as h5py gives them.
        chunks: the chunk shape, or None.
        variable: "bytes" for rows of uint8 of differing length, "text" for variable-length strings, else "".
        matlab: whether MATLAB wrote it, which reverses the axes.
    """

    def __init__(self, identifier: Any, path: str) -> None:
        self.path = path
        _check_storage(identifier, path)
        self._dataset = h5py.Dataset(identifier)
        self.shape: tuple[int, ...] = tuple(self._dataset.shape or ())
        self.dtype: np.dtype[Any] = self._dataset.dtype
        self.chunks: tuple[int, ...] | None = self._dataset.chunks
        base = h5py.check_vlen_dtype(self.dtype)
        text = h5py.check_string_dtype(self.dtype)
        self.variable = "bytes" if base == np.uint8 else "text" if text is not None and text.length is None else ""
        self._opaque = self.dtype.kind == "V" and self.dtype.fields is None
        self.matlab = "MATLAB_class" in self._dataset.attrs
        _check_size(identifier, path, self.shape, self.dtype)

    @property
    def empty(self) -> bool:
        """Whether it is a null dataset, of no shape at all."""
        return self._dataset.shape is None

    def read(self, selection: Any) -> Any:
        """The elements that a tuple of slices selects.

        Raises:
            SourceError: they are damaged.
        """
        try:
            return self._read_opaque(selection) if self._opaque else self._dataset[selection]
        except (OSError, RuntimeError, ValueError) as error:
            rows = ", ".join(f"{part.start}:{part.stop}" for part in selection[:1] if part.stop is not None)
            raise SourceError(f"/{self.path}[{rows}]: {failure(error)}") from error

    def read_raw(self) -> bytes:
        """A scalar's bytes as stored: numpy's own fixed strings drop their trailing NULs."""
        if self.variable:
            value = self._dataset[()]
            return value.tobytes() if isinstance(value, np.ndarray) else bytes(value)
        if self._opaque:
            raw: bytes = self._read_opaque(()).tobytes()
            return raw
        out = np.empty((), self.dtype)
        self._dataset.read_direct(out)
        return out.tobytes()

    def _read_opaque(self, selection: tuple[slice, ...]) -> Any:
        """By the file's own type: h5py's has no tag, and HDF5 converts no opaque value to another tag."""
        ranges = [part.indices(extent)[:2] for part, extent in zip(selection, self.shape, strict=True)]
        count = tuple(max(0, stop - start) for start, stop in ranges)
        out = np.empty(count, self.dtype)
        if out.size:
            identifier = self._dataset.id
            place = identifier.get_space()
            if count:
                place.select_hyperslab(tuple(start for start, _ in ranges), count)
            target = h5py.h5s.create_simple(count) if count else h5py.h5s.create(h5py.h5s.SCALAR)
            identifier.read(target, place, out, identifier.get_type())
        return out


class Group:
    """One group. Its members are given in name order, those under links to elsewhere never."""

    def __init__(self, identifier: Any, path: str, file: str) -> None:
        self._identifier = identifier
        self.path = path
        self.file = file

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes that are plain numbers."""
        return dict(_attribute_numbers(h5py.AttributeManager(self)))

    @property
    def id(self) -> Any:
        """What h5py's attribute reader asks of an object."""
        return self._identifier

    def names(self) -> Iterator[str]:
        """The members' names, a thousand at a time.

        Raises:
            SourceError: a member is a soft or external link.
        """
        start = 0
        while True:
            batch: list[tuple[bytes, int]] = []

            def take(name: bytes, info: Any, batch: list[tuple[bytes, int]] = batch) -> bool | None:
                batch.append((name, info.type))
                return len(batch) >= _LINKS_AT_ONCE or None

            _, start = self._identifier.links.iterate(take, info=True, idx=start)
            for name, kind in batch:
                self._check_link(name, kind)
                yield os.fsdecode(name)
            if len(batch) < _LINKS_AT_ONCE:
                return

    def member(self, name: str) -> Group | Data | None:
        """The member under a name; None for a committed type.

        Raises:
            SourceError: it is a link, or a dataset that is not read: see ``Data``.
        """
        raw = os.fsencode(name)
        self._check_link(raw, self._identifier.links.get_info(raw).type)
        identifier = h5py.h5o.open(self._identifier, raw)
        path = f"{self.path}/{name}" if self.path else name
        if isinstance(identifier, h5py.h5g.GroupID):
            if path.count("/") >= _MAX_DEPTH:
                raise SourceError(f"/{path}: groups nest deeper than {_MAX_DEPTH}; do they hold themselves?")
            return Group(identifier, path, self.file)
        return Data(identifier, path) if isinstance(identifier, h5py.h5d.DatasetID) else None

    def members(self) -> Iterator[Group | Data]:
        """All members that are groups or datasets, in name order."""
        for name in self.names():
            found = self.member(name)
            if found is not None:
                yield found

    def find(self, path: str) -> Group | Data | None:
        """What lies at a path below, each part of it checked; None where there is nothing."""
        place: Group | Data | None = self
        for part in path.strip("/").split("/"):
            if not isinstance(place, Group) or not place._identifier.links.exists(os.fsencode(part)):
                return None
            place = place.member(part)
        return place

    def _check_link(self, name: bytes, kind: int) -> None:
        if kind == h5py.h5l.TYPE_HARD:
            return
        what = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "an external link to another file"}
        place = f"/{self.path}/{os.fsdecode(name)}".replace("//", "/")
        raise SourceError(
            f"{place} is {what.get(kind, 'a link of an unknown kind')}, and links are never followed. Name the place "
            "of the images themselves with images=, or copy the data into the file"
        )


def _attribute_numbers(found: Any) -> Iterator[tuple[str, Any]]:
    for name in itertools.islice(found, _MAX_ATTRIBUTES):
        identifier = found.get_id(name)
        if identifier.shape == () and identifier.dtype.kind in "biuf":
            yield name, found[name].item()


class Visited:
    """Groups that one walk has been in. A small file can link a group into itself, or twice at each of many levels."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def enter(self, group: Group) -> None:
        """Note a group.

        Raises:
            SourceError: the walk was there before, by another link.
        """
        address = h5py.h5o.get_info(group.id).addr
        if address in self._addresses:
            raise SourceError(f"group /{group.path} is linked twice; name the images' group or dataset with images=")
        self._addresses.add(address)


@contextmanager
def open_file(path: str, locking: bool) -> Iterator[Group]:
    """The root group of a file, opened read-only.

    Raises:
        SourceError: the file is none, damaged, or locked by another program.
    """
    try:
        with h5py.File(path, "r", locking=None if locking else False, rdcc_nbytes=_CACHE_BYTES) as file:
            yield Group(file.id, "", path)
    except BlockingIOError as error:
        raise SourceError("locked by another program; close that, or pass locking=False") from error
    except (OSError, RuntimeError, KeyError) as error:
        raise SourceError(failure(error)) from error


def failure(error: Exception) -> str:
    """One line out of HDF5's own."""
    text = str(error)
    cut = re.search(r"truncated file: eof = (\d+).*stored_eof = (\d+)", text)
    if cut is not None:
        return f"cut short: {cut[1]} of {cut[2]} bytes are there; fetch or write the file again"
    if "unable to lock file" in text.lower():
        return f"cannot be locked ({text[:200]}); close the program that writes it, or pass locking=False"
    if "filter" in text.lower() and "registered" in text.lower():
        return f"a filter is missing ({text[:200]}); install it with pip install hdf5plugin"
    match = re.search(r"\((.*)\)\s*$", text)
    return f"HDF5 cannot read it: {match[1] if match else text[:200]}; it is damaged, or was not closed by its writer"


def _check_storage(identifier: Any, path: str) -> None:
    plan = identifier.get_create_plist()
    if plan.get_layout() == h5py.h5d.VIRTUAL:
        raise SourceError(f"/{path} is a virtual dataset, whose data lie in other files; copy it to a plain dataset")
    if plan.get_layout() != h5py.h5d.CHUNKED and plan.get_external_count() > 0:
        raise SourceError(f"/{path} keeps its data in other files (external storage), which are never opened")
    for position in range(plan.get_nfilters()):
        number, _, _, name = plan.get_filter(position)
        if not h5py.h5z.filter_avail(number) and not (_load_more_filters() and h5py.h5z.filter_avail(number)):
            known = _KNOWN_FILTERS.get(number, os.fsdecode(name)[:40] or "unknown")
            raise SourceError(
                f"/{path} is compressed with filter {number} ({known}), which is not installed: pip install hdf5plugin"
            )


def _load_more_filters() -> bool:
    try:
        importlib.import_module("hdf5plugin").register()
    except (ImportError, AttributeError):
        return False
    return True


def _check_size(identifier: Any, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    declared = dtype.itemsize
    for extent in shape:
        declared *= extent
    stored = max(1, identifier.get_storage_size())
    if declared > _BOMB_BYTES and declared > _BOMB_RATIO * stored:
        raise SourceError(
            f"/{path} declares {declared} bytes (shape {shape}) but stores {stored}: over {_BOMB_RATIO} times as much, "
            "as in a file made to fill the memory. If it is right, rewrite it without compression"
        )
