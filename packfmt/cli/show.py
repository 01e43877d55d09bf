"""What the verbs print with: tables, sizes, progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

import click

__all__ = ["parse_size", "print_json", "print_table", "progress_bar", "readable_size"]

UNITS = ("B", "KB", "MB", "GB", "TB")
LOG_SECONDS = 10.0  # between two lines where there is no terminal


def readable_size(count: float) -> str:
    """Bytes as a person reads them: "12.3 MB" (powers of 1000)."""
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


class Size(click.ParamType[int]):
    """A number of bytes: 500000, 512MB (powers of 1000), 1GiB (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


def parse_size(text: str) -> int:
    """Bytes from "500000", "512MB" or "1GiB".

    Raises:
        ValueError: it is none of those, or not positive.
    """
    number = text.strip().lower().removesuffix("b")
    factor = 1
    for power, letter in enumerate("kmgt", start=1):
        for suffix, base in ((letter + "i", 1024), (letter, 1000)):
            if factor == 1 and number.endswith(suffix):
                number, factor = number.removesuffix(suffix), base**power
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"{text!r} is no size; write bytes, or for example 512MB or 1GiB")
    return size


def print_json(value: Any) -> None:
    """One JSON object on standard output. Undecodable bytes in file names stay as escapes."""
    click.echo(json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, indent=1))


def print_table(rows: Sequence[tuple[str, Any]]) -> None:
    """Name and value in two columns; empty values are left out. Mappings and lists take a line per item."""
    rows = [row for row in rows if row[1] not in (None, "", [], {}, ())]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        for line in _lines(value):
            click.echo(f"{name:<{width}}  {line}".encode("utf-8", "backslashreplace").decode())
            name = ""


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        width = max(len(str(key)) for key in value)
        yield from (f"{key!s:<{width}}  {item}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from map(str, value)
    else:
        yield str(value)


@contextmanager
def progress_bar(verb: str, *, shown: bool = True) -> Iterator[Any]:
    """Gives a function to call with (records, bytes, total): a bar on a terminal, a line now and then in a log."""
    if not shown:
        yield None
    elif sys.stderr.isatty():
        bar = _Bar(verb)
        try:
            yield bar
        finally:
            bar.close()
    else:
        yield _Log(verb)


class _Bar:
    def __init__(self, verb: str) -> None:
        from tqdm import tqdm  # here, since importing it takes longer than most commands

        self._bar = tqdm(desc=verb, unit=" images", unit_scale=True, file=sys.stderr, mininterval=0.2)
        self._started = time.perf_counter()

    def __call__(self, records: int, size: int, total: int | None) -> None:
        self._bar.total = total
        if self._bar.update(records - self._bar.n):
            rate = size / max(time.perf_counter() - self._started, 1e-9)
            self._bar.set_postfix_str(f"{readable_size(rate)}/s", refresh=False)

    def close(self) -> None:
        self._bar.close()


class _Log:
    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._started = self._last = time.perf_counter()

    def __call__(self, records: int, size: int, total: int | None) -> None:
        now = time.perf_counter()
        if now - self._last < LOG_SECONDS:
            return
        self._last = now
        seconds = now - self._started
        left = f" of {total}, about {seconds / max(records, 1) * (total - records):.0f} s left" if total else ""
        click.echo(f"{self._verb}: {records} images{left}, {readable_size(size / seconds)}/s", err=True)
