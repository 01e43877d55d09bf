"""Which kinds of source there are, how one is recognised, and how one is opened."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.base import Source
from packfmt.sources.inputs import Inputs, Probe, head_of
from packfmt.sources.values import image_kind, what_is

__all__ = ["KINDS", "Kind", "name_of", "open_source", "recognise"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of source.

    Args:
        name: as ``--from`` takes it.
        module: of packfmt.sources, with ``recognise(probe) -> bool``, but for the folder, which is what is left.
        source: the class in it.
        what: one line for a person.
        several: whether several paths are one set of this kind.
    """

    name: str
    module: str
    source: str
    what: str
    several: bool = False

    def load(self) -> type[Source]:
        """The source's class."""
        found: type[Source] = getattr(import_module(f"packfmt.sources.{self.module}"), self.source)
        return found

    def fits(self, probe: Probe) -> bool:
        """Whether a path is of this kind, by its content.

        Raises:
            SourceError: it is, or may be, and something must be said about it.
        """
        if self.name == "folder" or not (self.several or os.path.exists(probe.path)):
            return False
        try:
            return bool(import_module(f"packfmt.sources.{self.module}").recognise(probe))
        except (OSError, ValueError):  # not to be read, or no path at all
            return False

    def options(self) -> dict[str, inspect.Parameter]:
        """The options the source takes, besides its path."""
        parameters = list(inspect.signature(self.load()).parameters.values())
        return {parameter.name: parameter for parameter in parameters[1:]}


# In the order in which they are tried: kinds with a signature first, then those that only their contents show.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("pack", "pack", "PackSource", "a packfmt shard, several, a manifest, or a pack in LMDB", several=True),
        Kind(
            "tar",
            "webdataset.source",
            "TarSource",
            "WebDataset tar shards and other tars, also compressed",
            several=True,
        ),
        Kind("zip", "zip", "ZipSource", "zip archive of images, flat or with class folders"),
        Kind(
            "parquet", "parquet.source", "ParquetSource", "Parquet: Hugging Face images, binary columns", several=True
        ),
        Kind("tfrecord", "tfrecord.source", "TFRecordSource", "TFRecord of tf.train.Example", several=True),
        Kind("hdf5", "hdf5.source", "HDF5Source", "HDF5: arrays, encoded bytes, groups per class, episodes"),
        Kind(
            "lmdb", "lmdb.source", "LMDBSource", "LMDB: text recognition, BasicSR, Caffe, LSUN, folder2lmdb and others"
        ),
        Kind("coco", "annotations.coco", "CocoSource", "COCO JSON annotations with their images"),
        Kind("voc", "annotations.voc", "VocSource", "Pascal VOC: JPEGImages/ and Annotations/"),
        Kind("yolo", "annotations.yolo", "YoloSource", "YOLO text labels beside images"),
        Kind("table", "table", "TableSource", "CSV, TSV or JSON lines of path, label and further columns"),
        Kind("folder", "folder", "FolderSource", "a folder of images, flat or with class folders"),
    )
}


def recognise(path: Inputs) -> str:
    """The kind of a source, by its content.

    Raises:
        FileNotFoundError: there is nothing at the path.
        SourceError: it is nothing that packfmt can convert, a table with a damaged line, or a folder of images beside
            LMDB.
    """
    probe = Probe(path)
    fault: SourceError | None = None
    for kind in KINDS.values():
        try:
            if kind.fits(probe):
                return kind.name
        except SourceError as error:
            fault = error  # only raised below: an empty file or a web page is not a damaged table
    if probe.is_folder and fault is None:
        return "folder"
    what = ""
    for one in [path] if isinstance(path, (str, os.PathLike)) else path:
        if not os.path.lexists(one):
            raise FileNotFoundError(2, "no such file or folder", os.fspath(one))
        what = _what(probe.head if one is path else head_of(one)) if os.path.isfile(one) else ""
        if what.startswith(("an empty file", "a Git LFS", "an HTML")):  # it only stands where the data should be
            raise SourceError(f"{os.fspath(one)}: {what}; there is nothing to convert in it. Fetch the file again")
    if fault is not None:
        raise fault
    kinds = ", ".join(name for name, kind in KINDS.items() if probe.path or kind.several)
    raise SourceError(
        f"{name_of(path)}: not recognised as any of {kinds}; packfmt convert --list describes them, --from names one"
        + (f". The file is {what}" if what and probe.path else "")
    )


def _what(head: bytes) -> str:
    image = image_kind(head)
    return f"one image ({image}); name its folder" if image else what_is(head) if head else "an empty file"


def open_source(path: Inputs, kind: str | None = None, **options: Any) -> Source:
    """Open a source.

    Args:
        path: what to read; several paths or a pattern for kinds of several shards.
        kind: a name in ``KINDS``; None recognises it.
        options: of that kind, as its class takes them; those that are None are left out.

    Raises:
        SourceError: unknown kind, an option it does not have, or whatever the source finds wrong.
        FileNotFoundError: there is nothing at the path.
    """
    name = kind or recognise(path)
    if name not in KINDS:
        raise SourceError(f"unknown kind {name!r}; there are {', '.join(KINDS)}")
    if not (KINDS[name].several or isinstance(path, (str, os.PathLike))):
        raise SourceError(f"{name_of(path)}: a {name} source is one path; convert them one at a time")
    given = {option: value for option, value in options.items() if value is not None}
    known = KINDS[name].options()
    foreign = sorted(set(given) - set(known))
    if foreign:
        takes = ", ".join(known) or "no options"
        raise SourceError(f"{name_of(path)}: a {name} source takes no {', '.join(foreign)}; it takes {takes}")
    make: Any = KINDS[name].load()
    source: Source = make(path, **given)
    return source


def name_of(path: Inputs) -> str:
    """A source's name, for messages."""
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else ", ".join(os.fspath(p) for p in path)
