"""The class names in a data.yaml, as YOLO's tools write it."""

from __future__ import annotations

import json
import re

__all__ = ["yaml_names"]


def _scalar(excluded: str) -> re.Pattern[str]:
    """A text in quotes, or a plain one that may hold none of ``excluded``, no ": " and no " #"."""
    inside = rf"[^\s{excluded}]"
    first = rf"(?:[^\s,\[\]{{}}#&*!|>'\"%@`:?-]|-(?={inside}))"
    plain = rf"{first}(?:[^\s:#{excluded}]|:(?={inside})|(?<=\S)#|[ \t]+(?=[^\s#{excluded}]))*"
    return re.compile(rf""""(?:[^"\\\n]|\\.)*"|'(?:[^'\n]|'')*'|{plain}""")


_IN_BRACKETS = _scalar(r",\[\]{}")
_IN_LINE = _scalar("")
_GAP = re.compile(r"(?:\s|(?<=\s)#[^\n]*)*")
_END = re.compile(r"[ \t]*(?:(?<=\s)#.*)?")  # of a line
_NEXT = re.compile(r"[^\s:][^:]*:|---|\.\.\.")  # entry or document
_ITEM = re.compile(r"([ \t]*)(?:-|(?<=[ \t])(\d{1,6})[ \t]*:)(?:[ \t]+(.*))?")


class _NotUnderstood(ValueError):
    """Anything but the three forms."""


def yaml_names(text: str) -> tuple[str, ...]:
    """The entry ``names`` of a data.yaml: ``[a, b]``, a list of ``- a``, or a map of ``0: a``; else empty.

    Only these three forms, which YOLO's tools write, are understood: a YAML reader is not worth a dependency. What is
    not understood to its end gives nothing at all, and so do names that are not as many as ``nc`` says: a name too
    few or too many would give all later ids the names of other classes.
    """
    text = text.replace("\r\n", "\n")
    match = re.search(r"^names[ \t]*:(?=\s)[ \t]*", text, re.MULTILINE)
    if match is None:
        return ()
    try:
        names = _bracketed(text, match.end() + 1) if text[match.end() :][:1] == "[" else _lines(text[match.end() :])
    except _NotUnderstood:
        return ()
    count = re.search(r"^nc[ \t]*:[ \t]*(\d{1,7})\b", text, re.MULTILINE)
    return names if count is None or int(count[1]) == len(names) else ()


def _bracketed(text: str, at: int) -> tuple[str, ...]:
    names: list[str] = []
    at = _skip(_GAP, text, at)
    while text[at : at + 1] != "]":
        item = _IN_BRACKETS.match(text, at)
        if item is None:
            raise _NotUnderstood
        names.append(_value(item[0]))
        at = _skip(_GAP, text, item.end())
        if text[at : at + 1] == ",":
            at = _skip(_GAP, text, at + 1)
        elif text[at : at + 1] != "]":
            raise _NotUnderstood
    if text[_skip(_END, text, at + 1) :][:1] not in ("", "\n"):
        raise _NotUnderstood
    return tuple(names)


def _lines(text: str) -> tuple[str, ...]:
    first, *lines = text.split("\n")
    if _END.fullmatch(" " + first) is None:
        raise _NotUnderstood
    names: dict[int, str] = {}
    kinds = set()
    for line in lines:
        if _END.fullmatch(line) or line.startswith("#"):
            continue
        item = _ITEM.fullmatch(line)
        if item is None and _NEXT.match(line):
            break
        scalar = _IN_LINE.match(item[3] or "") if item is not None else None
        if item is None or scalar is None or _END.fullmatch(item[3], scalar.end()) is None:
            raise _NotUnderstood
        kinds.add((item[1], item[2] is None))
        number = len(names) if item[2] is None else int(item[2])
        if number in names or len(kinds) > 1:
            raise _NotUnderstood
        names[number] = _value(scalar[0])
    if sorted(names) != list(range(len(names))):
        raise _NotUnderstood
    return tuple(names[number] for number in range(len(names)))


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _value(scalar: str) -> str:
    if scalar[0] == "'":
        return scalar[1:-1].replace("''", "'")
    if scalar[0] != '"':
        return scalar
    try:
        return str(json.loads(scalar, strict=False))  # JSON's escapes are YAML's; YAML's further ones are refused
    except ValueError:
        raise _NotUnderstood from None
