"""WebDataset tar shards."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packfmt.errors import ConvertError
from packfmt.record import OWN_COLUMNS, Column
from packfmt.storage.base import Buffer, Writer
from packfmt.storage.publish import PendingFile

__all__ = ["TarWriter"]

SHARD_SIZE = 1 << 30


class TarWriter(Writer):
    """Writes each record as the member its key names, ``label`` as ``.cls`` and other columns as ``.json`` beside it.

    Deterministic: no times, no owners. Class names are not kept: WebDataset has no place for them.

    Args:
        path: ``out-%05d.tar`` for several shards, or a name without ``%`` for one.
        shard_size: bytes of images per shard.
        columns: of the records; those of raw bytes cannot be stored.
        classes: ignored.
        metadata: ignored.
        force: replace existing files.

    Raises:
        FileExistsError: a shard exists and ``force`` is off.
        ConvertError: a column of raw bytes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shard_size: int | None = None,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Any = None,
        force: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self.content_id = ""
        if shard_size is not None and "%" not in self.path:
            raise ConvertError(f"{self.path}: several shards need a number in their name, as in out-%05d.tar")
        self._shard_size = (shard_size or SHARD_SIZE) if "%" in self.path else None
        self._force = force
        unfit = [column.name for column in columns if column.kind == "bytes"]
        if unfit:
            raise ConvertError(f"{self.path}: columns of raw bytes have no place in a tar's JSON: {', '.join(unfit)}")
        self._pending: list[PendingFile] = []
        self._held = 0
        self._count = 0
        self._stem = ""
        self._start_shard()

    def __len__(self) -> int:
        return self._count

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(file.path) for file in self._pending)

    def write(self, data: Buffer, /, key: str, **columns: Any) -> None:
        size = memoryview(data).nbytes
        if self._shard_size is not None and self._held and self._held + size > self._shard_size:
            self._tar.close()
            self._pending[-1].finish()
            self._start_shard()
        folder, slash, name = key.rpartition("/")
        stem = folder + slash + (name.rpartition(".")[0] or name)
        rest = {n: _plain(value) for n, value in columns.items() if n not in OWN_COLUMNS and n != "label"}
        if stem == self._stem and (rest or "label" in columns):
            raise ConvertError(f"{self.path}: {key!r} and the image before it share the name {stem!r}: rename one")
        self._stem = stem
        self._add(key, data)
        if "label" in columns:
            self._add(f"{stem}.cls", str(int(columns["label"])).encode())
        if rest:
            self._add(f"{stem}.json", json.dumps(rest, sort_keys=True).encode())
        self._held += size
        self._count += 1

    def close(self) -> None:
        try:
            self._tar.close()
            for file in self._pending:
                file.finish()
            for file in self._pending:
                file.publish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        for file in self._pending:
            file.withdraw()
            file.discard()

    def _start_shard(self) -> None:
        name = self.path % len(self._pending) if "%" in self.path else self.path
        self._pending.append(PendingFile(Path(name), force=self._force))
        # PAX names hold any bytes and any length.
        self._tar = tarfile.open(fileobj=self._pending[-1].stream, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._held = 0

    def _add(self, name: str, data: Buffer) -> None:
        member = tarfile.TarInfo(name)
        member.size = memoryview(data).nbytes
        self._tar.addfile(member, io.BytesIO(data))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
