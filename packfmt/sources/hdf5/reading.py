"""The child's part of reading HDF5: tell the layout of the files, and hand out their images."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from packfmt.errors import SourceError
from packfmt.sources.hdf5.file import open_file
from packfmt.sources.hdf5.layouts import Found, look, parse_range
from packfmt.sources.hdf5.single import SampleReader, SingleReader
from packfmt.sources.hdf5.stacks import StackReader
from packfmt.sources.isolated.child import Flush
from packfmt.sources.isolated.frames import Item

__all__ = ["start"]


class HDF5Job:
    """Reads one or several files of one layout; the request is ``HDF5Source``'s."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._files: list[tuple[str, str, str | None]] = request["files"]
        self._options: dict[str, Any] = dict(request["options"])
        text = self._options["value_range"]
        self._options["value_range"] = parse_range(text) if text else None
        self._notes: list[str] = []
        self._skipped: Counter[str] = Counter()

    def plan(self) -> dict[str, Any]:
        """Layout, columns, classes, and the count where it is known. All files must agree."""
        whole: dict[str, Any] = {}
        counts: list[int | None] = []
        for path, reader in self._readers():
            plan = reader.plan()
            counts.append(plan.pop("count"))
            if whole and (plan["layout"], plan["columns"]) != (whole["layout"], whole["columns"]):
                raise SourceError(
                    f"{path} has {_told(plan)}, but {self._files[0][0]} has {_told(whole)}; convert them one at a time"
                )
            lost = sorted({*whole.get("lost", ()), *plan.get("lost", ())})
            classes = sorted({*whole.get("classes", ()), *plan["classes"]}, key=os.fsencode)
            whole = {**(whole or plan), "classes": classes, "lost": lost}
        self._options["classes"] = whole["classes"]
        known = [count for count in counts if count is not None]
        whole["count"] = sum(known) if len(known) == len(counts) else None
        if whole["count"] == 0:
            raise SourceError("holds no images: the dataset has length 0")
        return whole

    def items(self) -> Iterator[Item | Flush]:
        """All images, file by file."""
        episodes = 0
        for number, (path, reader) in enumerate(self._readers()):
            reader.first_episode = episodes
            prefix = self._files[number][1]
            try:
                for item in reader.items():
                    yield item._replace(key=prefix + item.key) if prefix else item
            except SourceError as error:
                raise SourceError(f"{path}: {error}" if len(self._files) > 1 else str(error)) from error
            yield Flush(number)
            episodes += reader.episodes
            self._skipped.update(reader.skipped)
            self._notes += [f"{path}: {note}" if len(self._files) > 1 else note for note in reader.notes]

    def end(self) -> dict[str, Any]:
        """What was passed over, and what a person should know."""
        return {"skipped": dict(self._skipped), "notes": self._notes}

    def _readers(self) -> Iterator[tuple[str, Any]]:
        for path, _, paired in self._files:
            with ExitStack() as stack:
                try:
                    root = stack.enter_context(open_file(path, self._options["locking"]))
                    pair = stack.enter_context(open_file(paired, self._options["locking"])) if paired else None
                    yield path, self._reader(look(root, self._options), pair)
                except SourceError as error:
                    raise SourceError(f"{path}: {error}" if len(self._files) > 1 else str(error)) from error

    def _reader(self, found: Found, paired: Any) -> Any:
        if found.kind == "files":
            return SingleReader(found, self._options)
        if found.kind == "samples":
            return SampleReader(found, self._options)
        return StackReader(found, paired, self._options)


def start(request: dict[str, Any]) -> HDF5Job:
    """What ``isolated`` calls in the child."""
    return HDF5Job(request)


def _told(plan: dict[str, Any]) -> str:
    columns = ", ".join(f"{column[0]} {column[1]}{list(column[2]) or ''}" for column in plan["columns"])
    return f"{plan['layout']} with columns {columns or 'none'}"
