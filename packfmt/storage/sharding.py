"""Writing several shards as one pack."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packfmt.record import Column
from packfmt.storage.base import Buffer, Writer
from packfmt.storage.manifest import Manifest, join_ids
from packfmt.storage.publish import PendingFile, refuse_existing
from packfmt.storage.writing import ShardWriter

__all__ = ["ShardedWriter"]


class ShardedWriter(Writer):
    """Writes ``out-00000.bin``, ``out-00001.bin``, ... and last the manifest ``out.json``.

    Args:
        path: the manifest's name, ``out.json`` (``out.bin`` and ``out`` mean the same).
        shard_size: a shard takes records until it holds at least one and the next would pass this many bytes.
        columns, classes, metadata, force: as ``ShardWriter``.
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
        if not force:
            refuse_existing(Path(self.path))
        self._shard_size = shard_size
        self._force = force
        self._options: dict[str, Any] = {"columns": columns, "classes": classes, "metadata": metadata}
        self._shards: list[ShardWriter] = []
        self._start_shard()
        self._manifest: PendingFile | None = None
        self.content_id = ""

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    @property
    def files(self) -> tuple[str, ...]:
        return (*(shard.path for shard in self._shards), self.path)

    def write(self, data: Buffer, key: str, **columns: Any) -> None:
        shard = self._shards[-1]
        if len(shard) and shard.data_size + memoryview(data).nbytes > self._shard_size:
            shard.finish()
            shard = self._start_shard()
        shard.write(data, key, **columns)

    def close(self) -> None:
        try:
            self._shards[-1].finish()
            rows = [(Path(s.path).name, len(s), s.file_size, s.content_id) for s in self._shards]
            self._manifest = PendingFile(Path(self.path), force=self._force)
            self._manifest.stream.write(Manifest(rows).encode())
            for shard in self._shards:
                shard.publish()
            self._manifest.publish()
            self.content_id = join_ids([shard.content_id for shard in self._shards])
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        for shard in self._shards:
            shard.discard()
        if self._manifest is not None:
            self._manifest.discard()

    def _start_shard(self) -> ShardWriter:
        options = dict(self._options)
        if self._shards:
            options["columns"] = self._shards[0].columns
        path = f"{self._base}-{len(self._shards):05d}.bin"
        self._shards.append(ShardWriter(path, force=self._force, **options))
        return self._shards[-1]


