"""A folder of files, one per record."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from packfmt.errors import ConvertError
from packfmt.record import Column
from packfmt.targets.base import Target
from packfmt.unpacking import PendingTree, is_safe_key

__all__ = ["FolderWriter"]


class FolderWriter(Target):
    """Writes each record to the file its key names, in a folder that gets its name when all are there.

    A file has no place for columns. A label is kept where the key lies in the folder of its class, as it does in what
    was packed from a folder; what is lost is in ``notes``.

    Args:
        path: a folder that does not exist, or is empty.
        columns: of the records.
        classes: each becomes a folder, if need be an empty one, where labels are kept.
        metadata: ignored.
        force: allowed, and without effect: a folder that holds something is never replaced.

    Raises:
        FileExistsError: the folder holds something.
        OSError: the folder above it is missing or read-only.
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
        super().__init__(os.fspath(path), columns)
        self._classes = tuple(classes)
        self._misplaced = 0
        self._tree = PendingTree(self.path)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    @property
    def notes(self) -> list[str]:
        lost = sorted(self._names - {"label"})
        notes = [f"files have no place for columns: lost are {', '.join(lost)}"] if lost else []
        if self._misplaced:
            notes.append(f"{self._misplaced} labels are lost: no class folder in the key tells them")
        elif self._count and list(self._classes) != sorted(self._classes, key=_raw):
            notes.append("class folders are numbered by their names; this set counted its classes otherwise")
        return notes

    def _append(self, data: bytes | memoryview, key: str, columns: dict[str, Any]) -> None:
        values = self._own(key, columns)
        if not is_safe_key(key):
            raise ConvertError(f"{self.path}: the key {key!r} is no file name inside a folder; packfmt cat writes it")
        self._tree.write(key, data)
        if "label" in values and not self._tells(key, values["label"]):
            self._misplaced += 1
        self._count += 1

    def close(self) -> None:
        try:
            self._tree.publish(self._classes if self._count and not self._misplaced else ())
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        self._tree.discard()

    def _tells(self, key: str, label: Any) -> bool:
        first, slash, _ = key.partition("/")
        try:
            return bool(slash) and 0 <= label < len(self._classes) and self._classes[label] == first
        except (TypeError, ValueError):  # a text, or a list
            return False


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
