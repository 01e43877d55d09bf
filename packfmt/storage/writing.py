"""Writing one shard file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from packfmt import format as layout
from packfmt.record import Column
from packfmt.storage.base import Buffer
from packfmt.storage.behind import WriteBehind
from packfmt.storage.filebytes import open_bytes
from packfmt.storage.keys import KeyHashes
from packfmt.storage.publish import PendingFile, PendingSet, naming
from packfmt.storage.recording import RecordingWriter
from packfmt.storage.shardfile import ShardFile, read_frame
from packfmt.storage.table import TableSpool

__all__ = ["ShardWriter"]


class ShardWriter(RecordingWriter):
    """Writes records back to back, then index, columns, directory and trailer; publishes on ``close``.

    Attributes:
        file: what is published; by the guard, where there is one.

    Args:
        path: the shard's final name.
        columns: columns whose type is not to be inferred from the records.
        classes: class names that the column ``label`` counts.
        metadata: JSON-able facts to keep.
        force: replace an existing file.
        guard: of a pack of several shards, what names them; see ``PendingFile``.
        keys, lengths: as ``RecordingWriter``.

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
        guard: PendingSet | None = None,
        keys: KeyHashes | None = None,
        lengths: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(path, columns=columns, classes=classes, metadata=metadata, keys=keys, lengths=lengths)
        self.file = PendingFile(Path(self.path), force=force, guard=guard)
        try:
            self._out = WriteBehind(self.file.raw, self.file.written)
            self._position = self._out.write(layout.encode_header())
        except BaseException:
            self.file.discard()
            raise

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def change_columns(self, columns: Sequence[Column]) -> None:
        """Write what follows the records of a finished shard anew, since later shards found its columns too narrow.

        Args:
            columns: of the same names, which hold all values of the old ones.

        Raises:
            OSError: the disk refuses. The shard cannot be published then.
        """
        self._require("finished")
        self._state = "broken"
        table = TableSpool(columns, self._folder)
        path = os.fspath(self.file.temporary)
        with naming(self.path), closing(ShardFile(path, open_bytes(path, "auto"))) as file:
            values = {column.name: file.column(column.name) for column in columns}
            for place, entry in enumerate(zip(*(file.index(name) for name in layout.INDEX), strict=True)):
                table.append(table.encode(entry, {name: array[place] for name, array in values.items()}))
        self._table = table
        with naming(self.path):
            self._resume(self._records_end)
            self._finish()
        self._state = "finished"

    def join_set(self, member: layout.Member) -> None:
        """Write into a finished shard which set it belongs to, which is known once all of its shards are finished.

        Raises:
            OSError: the disk refuses. The shard cannot be published then.
        """
        self._require("finished")
        self._state = "broken"
        path = os.fspath(self.file.temporary)
        with naming(self.path):
            with closing(open_bytes(path, "auto")) as source:
                trailer, directory = read_frame(source, path)
            plan = layout.Layout(directory.sections, trailer.directory.offset)
            self._resume(plan.directory_offset)
            self._write_frame(plan, replace(directory, member=member), trailer.content_id)
        self._state = "finished"

    def _resume(self, position: int) -> None:
        """Cut the finished shard off at this place, and write on there."""
        self.file.resume(position)
        self._out = WriteBehind(self.file.raw, self.file.written)
        self._position = position

    def rename(self, path: str) -> None:
        """Choose another final name."""
        self.path, self.file.path = path, Path(path)

    def written_keys(self) -> Iterator[bytes]:
        if len(self) and self.content_id:
            path = os.fspath(self.file.temporary)
            with closing(ShardFile(path, open_bytes(path, "auto"))) as file:
                yield from file.keys()
        else:
            yield from super().written_keys()

    def _publish(self) -> None:
        self.file.publish()

    def _discard(self) -> None:
        self._out.close()
        self.file.discard()

    def _store(self, data: Buffer) -> None:
        self._position += self._out.write(data)

    def _put(self, offset: int, chunks: Iterable[bytes]) -> None:
        for chunk in chain([bytes(offset - self._position)], chunks):
            self._position += self._out.write(chunk)

    def _complete(self) -> None:
        self._out.flush()
        self._out.close()
        self.file.finish()
