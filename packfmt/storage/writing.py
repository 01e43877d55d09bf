"""Writing one shard file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packfmt import format as layout
from packfmt.record import Column
from packfmt.storage.base import Buffer
from packfmt.storage.publish import PendingFile
from packfmt.storage.recording import RecordingWriter

__all__ = ["ShardWriter"]


class ShardWriter(RecordingWriter):
    """Writes records back to back, then index, columns, directory and trailer; publishes on ``close``.

    Args:
        path: the shard's final name.
        columns: columns whose type is not to be inferred from the first record.
        classes: class names that the column ``label`` counts.
        metadata: JSON-able facts to keep.
        force: replace an existing file.

    Raises:
        FileExistsError: the target exists and ``force`` is off.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        super().__init__(path, columns=columns, classes=classes, metadata=metadata)
        self._file = PendingFile(Path(self.path), force=force)
        self._position = self._file.stream.write(layout.encode_header())

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def publish(self) -> None:
        self._file.publish()
        self._close_spools()

    def discard(self) -> None:
        self._file.discard()
        self._close_spools()

    def _store(self, data: Buffer) -> None:
        self._position += self._file.stream.write(data)

    def _put(self, offset: int, chunks: Iterable[bytes]) -> None:
        for chunk in (bytes(offset - self._position), *chunks):
            self._position += self._file.stream.write(chunk)

    def _complete(self) -> None:
        self._file.finish()
