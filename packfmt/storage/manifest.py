"""The file that says which shards make up a pack."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from packfmt.bounded_json import Bounds, check_json, parse_json
from packfmt.errors import FormatError
from packfmt.format import canonical_json

__all__ = ["MAX_SHARDS", "Manifest", "join_ids", "make_set_id"]

MANIFEST = "packfmt-manifest"
MAX_SHARDS = 20_000
BOUNDS = Bounds(8 << 20, strings=7 * MAX_SHARDS, numbers=4 * MAX_SHARDS, nodes=6 * MAX_SHARDS)  # of 6, 3 and 5
SHOWN = 300  # characters of a file's own words in a message


class Manifest:
    """What `out.json` says: each shard's file name, records, bytes and content id.

    Args:
        shards: (file name, records, bytes, content id in hexadecimal), in order.
    """

    def __init__(self, shards: Sequence[tuple[str, int, int, str]]) -> None:
        self.shards = tuple(shards)

    def encode(self) -> bytes:
        """The manifest's bytes; its own checksum is over the canonical JSON of the rest.

        Raises:
            ValueError: so many shards, or of so long names, are more than a reader takes.
        """
        rows = [{"file": f, "records": n, "bytes": b, "content_id": c} for f, n, b, c in self.shards]
        body: dict[str, Any] = {"format": MANIFEST, "version": 1, "shards": rows}
        body["checksum"] = xxhash.xxh3_64_hexdigest(canonical_json(body))
        raw = json.dumps(body, sort_keys=True, indent=1).encode("ascii") + b"\n"
        check_json(raw, BOUNDS)
        return raw

    @classmethod
    def load(cls, path: str) -> Manifest:
        """Read and check a manifest.

        Raises:
            FormatError: not a manifest, damaged, or naming a file outside its own folder.
            OSError: the file cannot be read.
        """
        with open(path, "rb") as file:
            raw = file.read(BOUNDS.size + 1)
        try:
            body = parse_json(raw, BOUNDS)
            stated = body.pop("checksum")
            if (body["format"], body["version"]) != (MANIFEST, 1):
                raise ValueError(f"format {body['format']!r} version {body['version']!r}, known is {MANIFEST!r} 1")
            if stated != xxhash.xxh3_64_hexdigest(canonical_json(body)):
                raise ValueError("it does not match its checksum")
            rows = [
                (_file_name(row["file"]), _size(row["records"]), _size(row["bytes"]), row["content_id"])
                for row in body["shards"]
            ]
            if not rows:
                raise ValueError("it names no shards")
            names = Counter(name for name, *_ in rows)
            if len(names) < len(rows):
                raise ValueError(f"it names {names.most_common(1)[0][0]!r} twice")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"[:SHOWN]
            raise FormatError(f"{path}: not a manifest of shards: {problem}") from error
        return cls(rows)


def join_ids(content_ids: Sequence[str]) -> str:
    """The content id of several shards: XXH3-128 over theirs, in hexadecimal, one after the other."""
    return xxhash.xxh3_128_hexdigest("".join(content_ids).encode("ascii"))


def make_set_id(content_ids: Sequence[str], classes: Sequence[str], metadata: Mapping[str, Any]) -> str:
    """The id of a set of shards. By content, as everything is named: the same input gives the same bytes."""
    body = {"classes": list(classes), "metadata": metadata, "shards": list(content_ids)}
    return xxhash.xxh3_128_hexdigest(canonical_json(body))


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"{name!r} is no plain file name")
    os.fsencode(name)  # a UnicodeError, which is a ValueError, for half a surrogate pair
    return name


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
