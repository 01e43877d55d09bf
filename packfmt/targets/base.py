"""What the targets share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from packfmt.errors import ConvertError
from packfmt.record import OWN_COLUMNS, Column
from packfmt.storage.base import Writer

__all__ = ["Target"]


class Target(Writer):
    """A writer of a format that is no pack. Columns must be declared, and there is no content id.

    Args:
        path: what is written.
        columns: of the records; those that every pack has are told by the images and left out.
    """

    def __init__(self, path: str, columns: Sequence[Column]) -> None:
        self.path = path
        self.content_id = ""
        self.columns = tuple(column for column in columns if column.name not in OWN_COLUMNS)
        self._names = frozenset(column.name for column in self.columns)
        self._count = 0
        self._odd: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    @property
    def notes(self) -> list[str]:
        """What a person should know of the records written so far."""
        return [f"{count} {what}" for what, count in self._odd.items()]

    def _own(self, key: str, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns that are declared, all of them.

        Raises:
            ConvertError: one is missing or was not declared.
        """
        given = {name: value for name, value in columns.items() if name not in OWN_COLUMNS}
        if given.keys() != self._names:
            raise ConvertError(f"{self.path}: {key!r} has columns {sorted(given)}, declared are {sorted(self._names)}")
        return given
