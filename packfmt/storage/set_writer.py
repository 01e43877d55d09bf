"""Writing several shards as one pack."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from packfmt.errors import FormatError
from packfmt.format import Member
from packfmt.record import Column
from packfmt.storage.atomic import PendingFile, PendingSet
from packfmt.storage.base import Writer
from packfmt.storage.keys import KeyHashes, refuse_same_keys
from packfmt.storage.shard_set import MAX_SHARDS, Manifest, join_ids, make_set_id
from packfmt.storage.shard_writer import ShardWriter

__all__ = ["ShardedWriter"]


class ShardedWriter(Writer):
    """Writes ``out-00000.bin``, ``out-00001.bin``, ... and last the manifest ``out.json``.

    Finished shards wait under temporary names until all are, so that a killed writer leaves nothing that looks like a
    pack. Memory and open files do not grow with the number of shards. Where such names are taken by the pack that is
    being replaced, the new shards are called by the set's id too, ``out-1a2b3c4d-00000.bin``: both packs are whole side
    by side, the manifest's change is the one from the old pack to the new, and the old shards go after it.

    Args:
        path: the manifest's name, ``out.json`` (``out.bin`` and ``out`` mean the same).
        shard_size: a shard takes records until it holds at least one and the next would pass this many bytes.
        columns, classes, metadata, force: as ``ShardWriter``. Replacing a pack also removes its shards.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shard_size: int,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        if shard_size < 1:
            raise ValueError(f"shard_size {shard_size} must be at least 1 byte")
        base = Path(path)
        self._base = base.with_suffix("") if base.suffix in (".bin", ".json") else base
        self.path = os.fspath(self._base) + ".json"
        self._shard_size = shard_size
        self._options: dict[str, Any] = {"columns": columns, "classes": classes, "metadata": metadata, "force": force}
        self._shards: list[ShardWriter] = []
        self._force = force
        self._closed = False
        self.content_id = self._set_id = ""
        with ExitStack() as undo:
            self._keys = KeyHashes(base.parent)
            undo.callback(self._keys.close)
            self._set = PendingSet(Path(self.path))
            undo.callback(self._set.discard)
            self._manifest = PendingFile(Path(self.path), force=force, guard=self._set)
            undo.callback(self._manifest.discard)
            self._start_shard()
            undo.pop_all()

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    @property
    def files(self) -> tuple[str, ...]:
        return (*(shard.path for shard in self._shards), self.path)

    def _append(self, data: bytes | memoryview, key: str, columns: dict[str, Any]) -> None:
        shard = self._shards[-1]
        if len(shard) and shard.data_size + len(data) > self._shard_size:
            columns_so_far = shard.columns  # tentative ones with them, which finishing settles
            shard.finish()
            shard = self._start_shard(columns=columns_so_far, lengths=shard.lengths)
        shard.write(data, key, **columns)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._finish()
            with self._set.exclusive():
                replaced = self._replaced_shards()
                self._name_shards()
                rows = [(Path(each.path).name, len(each), each.file_size, each.content_id) for each in self._shards]
                self._manifest.stream.write(Manifest(rows).encode())
                self._set.publish([*(shard.file for shard in self._shards), self._manifest], replaced=replaced)
        except BaseException:
            self.discard()
            raise
        self._closed = True
        self.content_id = join_ids([shard.content_id for shard in self._shards])

    def discard(self) -> None:
        if not self._closed:
            for shard in self._shards:
                shard.discard()
            self._manifest.discard()
            self._set.discard()
            self._keys.close()

    def _finish(self) -> None:
        if len(self._shards) > 1 and not len(self._shards[-1]):  # its only record was refused
            self._shards.pop().discard()
        self._shards[-1].finish()
        columns = self._shards[-1].columns  # which fit all records
        for shard in self._shards[:-1]:
            if shard.columns != columns:
                shard.change_columns(columns)
        refuse_same_keys(
            self.path, self._keys.repeated(), (key for shard in self._shards for key in shard.written_keys())
        )
        self._keys.close()
        self._set_id = make_set_id([shard.content_id for shard in self._shards], *self._shards[0].facts)
        for number, shard in enumerate(self._shards):
            shard.join_set(Member(self._set_id, number, len(self._shards)))

    def _name_shards(self) -> None:
        """Where a pack may be replaced, find names that are free: by content, as the same input gives the same."""
        if not self._force:
            return
        for digits in (0, 8, 16, 32):
            for number, shard in enumerate(self._shards):
                shard.rename(self._shard_name(number, self._set_id[:digits]))
            if not any(os.path.lexists(shard.path) for shard in self._shards):
                return

    def _replaced_shards(self) -> list[Path]:
        """The shards of the pack that is about to be replaced; none where there is none, or it cannot be read."""
        try:
            manifest = Manifest.load(self.path)
        except (FormatError, OSError):
            return []
        ours = re.compile(re.escape(self._base.name) + r"(-[0-9a-f]{8,32})?-\d{5,}\.bin")
        return [self._base.with_name(name) for name, *_ in manifest.shards if ours.fullmatch(name)]

    def _shard_name(self, number: int, of: str = "") -> str:
        return f"{self._base}-{of}{'-' * bool(of)}{number:05d}.bin"

    def _start_shard(self, **going_on: Any) -> ShardWriter:
        if len(self._shards) == MAX_SHARDS:
            raise ValueError(
                f"{self.path}: more than {MAX_SHARDS:,} shards; give a shard_size above {self._shard_size:,} bytes"
            )
        options = {**self._options, **going_on}
        path = self._shard_name(len(self._shards))
        self._shards.append(ShardWriter(path, guard=self._set, keys=self._keys, **options))
        return self._shards[-1]
