"""Several shards opened as one, and the manifest that says which they are."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from packfmt.bounded_json import Bounds, check_json, parse_json
from packfmt.errors import CorruptError, FormatError
from packfmt.format import HEADER, Directory, Member, canonical_json
from packfmt.record import KEY
from packfmt.storage.base import Indices, JoinedPlan, Reader, ReadPlan, Verify, as_positions
from packfmt.storage.columns import Columns, JoinedColumn
from packfmt.storage.fileio import IO, choose_io, open_bytes
from packfmt.storage.keys import hash_key, repeated
from packfmt.storage.patterns import matching_files
from packfmt.storage.shard import MappedReader, read_frame

__all__ = ["MAX_SHARDS", "Manifest", "ShardedReader", "join_ids", "make_set_id"]

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


SHARD = re.compile(r"(.+?)(?:-[0-9a-f]{8,32})?-\d{5,}\.bin", re.DOTALL)  # what packfmt calls the shards of a set
LISTED = 5  # missing ones named in a message


def max_open() -> int:
    """Shards mapped at a time: a map holds a file descriptor, and the process needs some for itself."""
    try:
        import resource
    except ImportError:  # Windows, where maps hold no descriptor
        return 512
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(4, min(512, (soft if soft > 0 else 4096) // 4))


class ShardedReader(Reader):
    """Several shards as one reader. Of many, only some are mapped at a time (``max_open``).

    Args:
        source: a manifest, a glob pattern, or a list of shards and manifests, in order. What a pattern or a list names
            of a set of shards must be the whole set, and no other set; the manifests of several sets can be listed.
        io, verify, check: as ``MappedReader``.
        content_id: refuse shards of another joint content id (used when a pickled reader is opened again).

    Raises:
        FormatError: no shards, a foreign or damaged one, a part of a set, or shards of differing columns or classes.
        FileNotFoundError: a shard, or any match of the pattern, is missing.
    """

    def __init__(
        self,
        source: str | Sequence[str],
        *,
        io: IO = "auto",
        verify: Verify = True,
        check: Literal["quick", "full"] = "quick",
        content_id: str | None = None,
    ) -> None:
        self.path = source if isinstance(source, str) else f"[{', '.join(source[:2])}{', ...' * (len(source) > 2)}]"
        self._source = _absolute(source)
        self.refuse_unknown(verify)
        self._verify: Verify = verify
        named = _find_shards(source)
        self.io = choose_io(named[0].path, io)
        paths, directory = self._read_frames(named)
        if content_id not in (None, self.content_id):
            raise FormatError(f"{self.path}: holds {self.content_id}, expected {content_id}: its shards were replaced")
        self.classes, self.metadata = directory.classes, directory.metadata
        self._shards = _OpenShards(self.path, paths, self._ids, self.io, verify)
        described = {column.name: column for column in directory.columns}
        ragged = {name for name, column in described.items() if column.ragged}
        # Not a method of our own: a circle would keep a dropped reader's files open until the collector runs.
        self.columns = Columns(described, partial(_load_column, self._shards, self._starts, ragged), described)
        self.refuse_damaged(check)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self._source, self.io, self._verify, self.content_id))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def record_bytes(self) -> float:
        return float(self._records_bytes) / max(len(self), 1)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._shards.paths)

    def locate(self, index: int) -> tuple[str, int]:
        ((shard, _, local),) = self._split((index,))
        return self._shards.paths[shard], int(local[0])

    def read(self, indices: Indices) -> list[memoryview]:
        views: list[memoryview] = [memoryview(b"")] * len(indices)
        parts = list(self._split(indices))
        copy = self.io == "mmap" and len(parts) > self._shards.max_open  # views keep their shards open
        for shard, places, local in parts:
            for place, view in zip(places.tolist(), self._shards.reader(shard).read(local), strict=True):
                views[place] = memoryview(bytes(view)) if copy else view
        return views

    def plan(self, indices: Indices) -> ReadPlan:
        parts = list(self._split(indices))
        if len(parts) > self._shards.max_open:  # a plan keeps its shards open
            return super().plan(indices)
        plans = [(places, self._shards.reader(shard).plan(local)) for shard, places, local in parts]
        return JoinedPlan(len(indices), plans)

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        out = np.empty(len(indices), np.uint64)
        for shard, places, local in self._split(indices):
            out[places] = self._shards.reader(shard).lengths(local)
        return out

    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        out = np.empty(len(indices), np.uint64)
        for shard, places, local in self._split(indices):
            out[places] = self._shards.reader(shard).offsets(local) + self._before[shard]
        return out

    def will_need(self, indices: Indices) -> None:
        for shard, _, local in self._split(indices):
            self._shards.reader(shard).will_need(local)

    def will_need_blocks(self, indices: Indices) -> None:
        for shard, _, local in self._split(indices):
            self._shards.reader(shard).will_need_blocks(local)

    def problems(self) -> Iterator[Exception]:
        for shard in range(len(self._shards.paths)):
            yield from self._shards.reader(shard).problems()
        yield from self._key_problems()

    def _key_problems(self) -> Iterator[Exception]:
        """Keys that are in several shards; those twice in one are its own problem, and those damaged cannot be read."""
        hashes: list[npt.NDArray[np.uint64]] = []
        for shard in range(len(self._shards.paths)):
            try:
                hashes.append(np.unique(np.fromiter(map(hash_key, self._raw_keys(shard)), np.uint64)))
            except CorruptError:
                return
        places: dict[bytes, int] = {}
        suspects = repeated(hashes)
        for shard, path in enumerate(self._shards.paths):
            for index, key in enumerate(self._raw_keys(shard) if suspects else ()):
                if key and hash_key(key) in suspects and (first := places.setdefault(key, shard)) != shard:
                    message = f"has the key of a record in {self._shards.paths[first]}; pack the sources again"
                    name = key.decode("utf-8", "surrogateescape")
                    yield CorruptError(message, path=path, index=index, key=name)

    def _raw_keys(self, shard: int) -> Iterator[bytes]:
        keys: Any = self._shards.reader(shard).columns[KEY]  # ragged, as ``read_frame`` has seen
        return keys.raw()  # type: ignore[no-any-return]

    def close(self) -> None:
        self._shards.close()
        self.columns.forget()

    def _split(self, indices: Indices) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """Group indices by shard: (shard, places in ``indices``, indices in the shard)."""
        positions = as_positions(indices, len(self), self.path)
        self._shards.refuse_closed()
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            yield shard, places, positions[places] - int(self._starts[shard])

    def _read_frames(self, named: Sequence[_Named]) -> tuple[list[str], Directory]:
        """Check all shards' frames against each other and sum their sizes; the paths in order, the first directory."""
        first: Directory | None = None
        frames = []
        for shard in named:
            with closing(open_bytes(shard.path, "pread" if hasattr(os, "pread") else "mmap")) as source:
                trailer, directory = read_frame(source, shard.path)
            found = (trailer.count, trailer.file_size, trailer.content_id.hex())
            if shard.stated not in (None, found):
                raise FormatError(
                    f"{shard.path}: holds {found[0]} records, {found[1]} bytes, content {found[2]}; the manifest "
                    f"{shard.manifest} says {shard.stated!r:.100}: it belongs to another pack"
                )
            first = first or directory
            if (directory.columns, directory.classes) != (first.columns, first.classes):
                raise FormatError(f"{shard.path}: its columns or classes differ from those of {named[0].path}")
            frames.append((shard, trailer, directory.member))
        if first is None:
            raise FormatError(f"{self.path}: names no shards")
        refuse_partial_sets(self.path, [(shard.path, member) for shard, _, member in frames if shard.stated is None])
        if isinstance(self._source, str) and not _is_manifest(self._source):  # by name 100000 is before 99999
            frames.sort(key=lambda frame: frame[2].number if frame[2] else 0)
        self._ids = [trailer.content_id.hex() for _, trailer, _ in frames]
        self._starts = np.cumsum([0, *(trailer.count for _, trailer, _ in frames)])
        self._before = np.cumsum([0, *(trailer.file_size for _, trailer, _ in frames)]).astype(np.uint64)
        self._records_bytes = sum(trailer.records_end - HEADER.size for _, trailer, _ in frames)
        self.content_id = join_ids(self._ids)
        return [shard.path for shard, _, _ in frames], first


class _OpenShards:
    """The shards of a pack, each opened when it is first needed.

    An evicted reader is not closed but dropped: another thread may be reading from it. No lock, so that a fork at any
    time is harmless: every step is one operation on a plain dict (an OrderedDict breaks when dropping a reader lets
    another thread in), and in a race a shard is at worst opened twice.
    """

    def __init__(self, path: str, paths: Sequence[str], ids: Sequence[str], io: IO, verify: Verify) -> None:
        self.paths = tuple(paths)
        self._absolute = [os.path.abspath(shard) for shard in paths]  # they are opened when the folder may have changed
        self._path = path
        self._ids = tuple(ids)
        self._io: IO = io
        self._verify: Verify = verify
        self._open: dict[int, MappedReader] = {}
        self._used: dict[int, int] = {}
        self._clock = count()
        self.max_open = max_open()
        self._closed = False

    def reader(self, shard: int) -> MappedReader:
        """The reader of one shard; the one that was used longest ago makes room for it.

        Raises:
            FormatError: the pack was replaced since it was opened.
        """
        self.refuse_closed()
        self._used[shard] = next(self._clock)
        reader = self._open.get(shard)
        if reader is None:
            path = self._absolute[shard]
            try:
                reader = MappedReader(path, io=self._io, verify=self._verify, content_id=self._ids[shard])
            except FileNotFoundError as error:  # it was there when the pack was opened
                raise FormatError(
                    f"{path}: the shard is gone since the pack was opened: it was replaced, or removed; open it again"
                ) from error
            self._open[shard] = reader
            self._make_room()
            if self._closed:  # by another thread, meanwhile
                self.close()
        return reader

    def close(self) -> None:
        """Release all files."""
        self._closed = True
        for shard in list(self._open):
            reader = self._open.pop(shard, None)
            if reader is not None:
                reader.close()

    def _make_room(self) -> None:
        shards = list(self._open)
        if len(shards) > self.max_open:
            shards.sort(key=lambda shard: self._used[shard])
            for shard in shards[: -self.max_open]:
                self._open.pop(shard, None)

    def refuse_closed(self) -> None:
        """Raise ValueError once closed."""
        if self._closed:
            raise ValueError(f"{self._path}: the reader is closed; open it again with packfmt.open")


def _load_column(shards: _OpenShards, starts: npt.NDArray[np.int64], ragged: set[str], name: str) -> Any:
    """Numbers are copied into one array; values of differing length are fetched from their shard when asked for."""
    if name in ragged:
        return JoinedColumn(lambda shard: shards.reader(shard).columns[name], starts)
    first = shards.reader(0).columns[name]
    joined = np.empty((starts[-1], *first.shape[1:]), first.dtype)
    for shard, start in enumerate(starts[:-1].tolist()):  # one by one: a column in hand keeps its shard open
        joined[start : starts[shard + 1]] = shards.reader(shard).columns[name]
    joined.setflags(write=False)  # as a column that lies over its file
    return joined


@dataclass(frozen=True, slots=True)
class _Named:
    """A shard to be opened, and what the manifest that names it says it holds: records, bytes, content id."""

    path: str
    manifest: str = ""
    stated: tuple[int, int, str] | None = None


def _find_shards(source: str | Sequence[str]) -> list[_Named]:
    if not isinstance(source, str):
        if not source:
            raise FormatError("an empty list names no shards; give at least one")
        return [shard for path in source for shard in (_of_manifest(path) if _is_manifest(path) else [_Named(path)])]
    if _is_manifest(source):
        return _of_manifest(source)
    matches = matching_files(source)
    if not matches:
        raise FileNotFoundError(f"{source}: no file matches the pattern")
    return list(map(_Named, matches))


def _is_manifest(path: str) -> bool:
    return path.endswith(".json")


def _of_manifest(path: str) -> list[_Named]:
    return [
        _Named(os.fspath(Path(path).parent / name), path, (records, size, content_id))
        for name, records, size, content_id in Manifest.load(path).shards
    ]


def refuse_partial_sets(source: str, shards: Sequence[tuple[str, Member | None]]) -> None:
    """Raise FormatError unless these shards are one whole set, or none of them was written as part of a set.

    Args:
        source: what named them, for messages.
        shards: path, and the place in its set; None for a shard that is of no set.
    """
    sets: dict[tuple[str, int] | None, tuple[str, Member | None]] = {}
    for path, member in shards:
        sets.setdefault((member.set_id, member.count) if member else None, (path, member))
    if len(sets) > 1:
        (one, first), (other, second) = list(sets.values())[:2]
        raise FormatError(
            f"{source}: not the shards of one pack: {one} is {_described(first)}, {other} is {_described(second)}. "
            f"{_advice([one, other])}"
        )
    numbered: dict[int, str] = {}
    for path, member in shards:
        if member is None:
            return
        if member.number in numbered:
            raise FormatError(f"{path}: the same shard of its set as {numbered[member.number]}; name one of them")
        numbered[member.number] = path
    for path, member in shards[:1]:
        if member is not None and len(numbered) < member.count:
            missing = list(islice((number for number in range(member.count) if number not in numbered), LISTED + 1))
            shown = ", ".join([f"{number:05d}" for number in missing[:LISTED]] + ["..."] * (len(missing) > LISTED))
            raise FormatError(
                f"{source}: {len(numbered)} of {member.count} shards of a set, which {path} belongs to; missing are "
                f"{shown}. Restore them; a shard opened alone is read without the others"
            )


def _described(member: Member | None) -> str:
    return f"number {member.number:05d} of {member.count} in set {member.set_id[:8]}" if member else "in no set"


def _advice(paths: Sequence[str]) -> str:
    """How to open what belongs together: by the manifests that there are, or else by the shards of one set alone."""
    bases = {SHARD.fullmatch(path) for path in paths} - {None}
    manifests = sorted({f"{base[1]}.json" for base in bases if base and os.path.isfile(f"{base[1]}.json")})
    if not manifests:
        return "Name the shards of one set only"
    return f"Open {' or '.join(manifests)}, which names those that belong together; a list of manifests joins packs"


def _absolute(source: str | Sequence[str]) -> str | tuple[str, ...]:
    if not isinstance(source, str):
        return tuple(os.path.abspath(path) for path in source)
    return os.path.join(os.getcwd(), source)


def _reopen(source: str | tuple[str, ...], io: IO, verify: Verify, content_id: str) -> ShardedReader:
    return ShardedReader(source, io=io, verify=verify, content_id=content_id)
