"""WebDataset tar shards."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from packfmt.errors import ConvertError
from packfmt.record import Column
from packfmt.sources.base import Target
from packfmt.sources.columns import TAR_MEMBER, PackSchema, to_json
from packfmt.sources.webdataset.source import schema_parts
from packfmt.storage.atomic import PendingFile, PendingSet, naming, refuse_existing
from packfmt.storage.base import Buffer
from packfmt.storage.folders import is_safe_key

__all__ = ["TarWriter"]

SHARD_SIZE = 1 << 30
NUMBER = re.compile(r"[^%]*%(0[1-9])?d[^%]*")


class TarWriter(Target):
    """Writes each record as the member its key names, an integer ``label`` as ``.cls`` and all else as ``.json``.

    Each shard begins with the member ``__packfmt__``: the columns' types, the class names and the metadata, for which
    WebDataset has no place and which its readers pass over. The same records give the same bytes: no times, no owners.

    Args:
        path: ``out-%05d.tar`` for several shards, or a name without ``%`` for one.
        shard_size: bytes of images per shard; None takes 1 GiB where the name has a number.
        columns: of the records.
        classes, metadata: kept in ``__packfmt__``.
        force: replace existing files, those of further shards included. Nothing tells tars of two sets apart, so the
            old ones go before the new ones have their names, and come back if those do not.

    Raises:
        FileExistsError: a shard exists and ``force`` is off.
        ConvertError: the name fits no shards.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shard_size: int | None = None,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        super().__init__(os.fspath(path), columns)
        self._parent, self._name = os.path.split(self.path)  # a % in a folder's name is one of its characters
        self._several = "%" in self._name
        if self._several and not NUMBER.fullmatch(self._name):
            raise ConvertError(f"{self.path}: shards need one number in their name, as in out-%05d.tar")
        if shard_size is not None and not self._several:
            raise ConvertError(f"{self.path}: several shards need a number in their name, as in out-%05d.tar")
        self._shard_size = shard_size or SHARD_SIZE
        self._force = force
        facts = PackSchema(self.columns, tuple(classes), metadata or {})
        self._facts, self._cls = facts.encode(), "cls" in schema_parts(facts)
        self._in_json = [c for c in self.columns if not (self._cls and c.name == "label")]
        self._pending: list[PendingFile] = []
        self._stem = ""
        self._parts: dict[str, bytes] = {}
        self._set = PendingSet(Path(self.path)) if self._several else None
        try:
            self._start_shard()
        except BaseException:
            self.discard()
            raise

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(file.path) for file in self._pending)

    def _append(self, data: bytes | memoryview, key: str, columns: dict[str, Any]) -> None:
        values = self._own(key, columns)
        stem = self._check_key(key)
        parts = self._make_parts(values)
        size = len(data)
        if self._several and self._held and self._held + size > self._shard_size:
            with naming(self._pending[-1].path):
                self._tar.close()
            self._pending[-1].finish()
            self._start_shard()
        self._add(key, data)
        if stem != self._stem:  # 1.jpg and 1.png are one sample of WebDataset, whose parts belong to both
            for suffix, content in parts.items():
                self._add(stem + suffix, content)
        elif parts != self._parts:
            raise ConvertError(
                f"{self.path}: {key!r} and the image before it share the name {stem!r}, but not their labels: "
                "WebDataset would mix them up; rename one"
            )
        self._stem, self._parts = stem, parts
        self._held += size
        self._count += 1

    def close(self) -> None:
        try:
            with naming(self._pending[-1].path):
                self._tar.close()
            if self._set is None:
                self._pending[0].publish()
            else:
                self._publish(self._set)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        for file in self._pending:
            file.discard()
        if self._set is not None:
            self._set.discard()

    def _publish(self, pending: PendingSet) -> None:
        """Name the shards, the first one last: nobody takes a set without it for a whole one."""
        first, *others = self._pending
        for file in self._pending:
            file.finish()
        with pending.exclusive():
            there = self._shards_there()
            if there and not self._force:
                refuse_existing(there[0])
            pending.publish([*others, first], replaced=there, aside=True)

    def _check_key(self, key: str) -> str:
        """The key without its suffix.

        Raises:
            ConvertError: the key would be taken for something else, or leads out of the folder it is unpacked into.
        """
        folder, slash, name = key.rpartition("/")
        lower = name.lower()
        if not is_safe_key(key):
            raise ConvertError(f"{self.path}: the key {key!r} is not a file name inside a folder; rename the record")
        if lower.endswith((".cls", ".json")) or key == TAR_MEMBER:
            raise ConvertError(f"{self.path}: the image {key!r} would be taken for a label or JSON; rename it")
        if "." not in name[1:]:
            self._odd["names have no suffix; WebDataset passes over them"] += 1
        elif name.count(".") > 1:
            self._odd["names hold several dots; WebDataset cuts them at the first"] += 1
        return folder + slash + (name.rpartition(".")[0] or name)

    def _make_parts(self, values: dict[str, Any]) -> dict[str, bytes]:
        parts: dict[str, bytes] = {}
        if self._cls:
            parts[".cls"] = str(int(values["label"])).encode()
        if self._in_json:
            rest = {column.name: to_json(column, values[column.name]) for column in self._in_json}
            parts[".json"] = json.dumps(rest, sort_keys=True).encode("ascii")
        return parts

    def _shards_there(self) -> list[Path]:
        """Shards that have these names, and those that follow them; they would pass for some of this set."""
        found = [Path(path) for number in range(len(self._pending)) if os.path.lexists(path := self._shard(number))]
        further = takewhile(os.path.lexists, map(self._shard, count(len(self._pending))))
        return [*found, *map(Path, further)]

    def _shard(self, number: int) -> str:
        return os.path.join(self._parent, self._name % number)

    def _start_shard(self) -> None:
        name = self._shard(len(self._pending)) if self._several else self.path
        self._pending.append(PendingFile(Path(name), force=self._force, guard=self._set))
        # PAX names hold any bytes and any length.
        self._tar = tarfile.open(  # noqa: SIM115 (closed by close)
            fileobj=self._pending[-1].stream, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8"
        )
        self._held = 0
        self._stem = ""  # a sample lies in one shard
        self._add(TAR_MEMBER, self._facts)

    def _add(self, name: str, data: Buffer) -> None:
        member = tarfile.TarInfo(name)
        member.size = memoryview(data).nbytes
        with naming(self._pending[-1].path):
            self._tar.addfile(member, io.BytesIO(data))
