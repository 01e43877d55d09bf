"""Several shards opened as one, and written as one."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from packfmt.errors import FormatError
from packfmt.format import canonical_json
from packfmt.record import Column
from packfmt.storage.base import Buffer, Indices, Reader, Writer
from packfmt.storage.columns import Columns, JoinedColumn
from packfmt.storage.filebytes import IO, choose_io
from packfmt.storage.mapped import MappedReader, read_frame
from packfmt.storage.publish import PendingFile, refuse_existing
from packfmt.storage.writing import ShardWriter

__all__ = ["Manifest", "ShardedReader", "ShardedWriter"]

MANIFEST = "packfmt-manifest"
MAX_MANIFEST = 64 << 20


def max_open() -> int:
    """Shards mapped at a time: a map holds a file descriptor, and the process needs some for itself."""
    try:
        import resource
    except ImportError:  # Windows, where maps hold no descriptor
        return 512
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(4, min(512, (soft if soft > 0 else 4096) // 4))


class Manifest:
    """What `out.json` says: each shard's file name, records, bytes and content id.

    Args:
        shards: (file name, records, bytes, content id in hexadecimal), in order.
    """

    def __init__(self, shards: Sequence[tuple[str, int, int, str]]) -> None:
        self.shards = tuple(shards)

    def encode(self) -> bytes:
        """The manifest's bytes; its own checksum is over the canonical JSON of the rest."""
        rows = [{"file": f, "records": n, "bytes": b, "content_id": c} for f, n, b, c in self.shards]
        body: dict[str, Any] = {"format": MANIFEST, "version": 1, "shards": rows}
        body["checksum"] = xxhash.xxh3_64_hexdigest(canonical_json(body))
        return json.dumps(body, sort_keys=True, indent=1).encode("ascii") + b"\n"

    @classmethod
    def load(cls, path: str) -> Manifest:
        """Read and check a manifest.

        Raises:
            FormatError: not a manifest, damaged, or naming a file outside its own folder.
            OSError: the file cannot be read.
        """
        with open(path, "rb") as file:
            raw = file.read(MAX_MANIFEST + 1)
        try:
            if len(raw) > MAX_MANIFEST:
                raise ValueError(f"larger than {MAX_MANIFEST} bytes")
            body = json.loads(raw)
            stated = body.pop("checksum")
            if (body["format"], body["version"]) != (MANIFEST, 1):
                raise ValueError(f"format {body['format']!r} version {body['version']!r}, known is {MANIFEST!r} 1")
            if stated != xxhash.xxh3_64_hexdigest(canonical_json(body)):
                raise ValueError("it does not match its checksum")
            rows = [(r["file"], int(r["records"]), int(r["bytes"]), r["content_id"]) for r in body["shards"]]
            for name, *_ in rows:
                if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
                    raise ValueError(f"{name!r} is no plain file name")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"{path}: not a manifest of shards: {type(error).__name__}: {error}") from error
        return cls(rows)


class ShardedReader(Reader):
    """Several shards as one reader. Of many, only some are mapped at a time (``max_open``).

    Args:
        paths: the shard files, in order.
        path: what was opened, for messages.
        expected: the manifest, where there is one: each shard must be the one it names.
        io, verify, check: as ``MappedReader``.

    Raises:
        FormatError: no shards, a foreign or damaged one, or shards of differing columns or classes.
        FileNotFoundError: a shard is missing.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        path: str,
        expected: Manifest | None = None,
        io: IO = "auto",
        verify: bool = True,
        check: str = "quick",
        content_id: str | None = None,
    ) -> None:
        if not paths:
            raise FormatError(f"{path}: names no shards")
        self.path = path
        self._paths = tuple(paths)
        self._expected = expected
        self._options: dict[str, Any] = {"io": io, "verify": verify}
        self.io = choose_io(paths[0], io)
        frames = [read_frame(shard) for shard in paths]
        self._ids = [trailer.content_id.hex() for trailer, _ in frames]
        self.content_id = join_ids(self._ids)
        if content_id not in (None, self.content_id):
            raise FormatError(f"{path}: holds {self.content_id}, expected {content_id}: its shards were replaced")
        self._refuse_foreign([(t.count, t.file_size) for t, _ in frames])
        first = frames[0][1]
        for shard, (_, directory) in zip(paths, frames, strict=True):
            if (directory.columns, directory.classes) != (first.columns, first.classes):
                raise FormatError(f"{shard}: its columns or classes differ from those of {paths[0]}")
        self.classes, self.metadata = first.classes, first.metadata
        self._starts = np.cumsum([0] + [trailer.count for trailer, _ in frames])
        self._sizes = np.array([trailer.file_size for trailer, _ in frames])
        self._data_bytes = sum(trailer.records_end for trailer, _ in frames)
        self.columns = Columns(tuple(column.name for column in first.columns), self._load_column)
        self._open: OrderedDict[int, MappedReader] = OrderedDict()
        self._max_open = max_open()
        self._closed = False
        if check == "full":
            for problem in self.problems():
                raise problem

    def __reduce__(self) -> tuple[Any, ...]:
        paths = tuple(os.path.abspath(path) for path in self._paths)
        return (_reopen, (paths, self.path, self._options["io"], self._options["verify"], self.content_id))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def record_bytes(self) -> float:
        return self._data_bytes / max(len(self), 1)

    @property
    def files(self) -> tuple[str, ...]:
        return self._paths

    def locate(self, index: int) -> tuple[str, int]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._paths[shard], index - int(self._starts[shard])

    def read(self, indices: Indices) -> list[memoryview]:
        views: list[memoryview] = [memoryview(b"")] * len(indices)
        for shard, places, local in self._split(indices):
            for place, view in zip(places.tolist(), self._shard(shard).read(local), strict=True):
                views[place] = view
        return views

    def lengths(self, indices: Indices) -> npt.NDArray[np.uint64]:
        out = np.empty(len(indices), np.uint64)
        for shard, places, local in self._split(indices):
            out[places] = self._shard(shard).lengths(local)
        return out

    def offsets(self, indices: Indices) -> npt.NDArray[np.uint64]:
        out = np.empty(len(indices), np.uint64)
        before = np.concatenate([[0], np.cumsum(self._sizes)])
        for shard, places, local in self._split(indices):
            out[places] = self._shard(shard).offsets(local) + np.uint64(before[shard])
        return out

    def will_need(self, indices: Indices) -> None:
        for shard, _, local in self._split(indices):
            self._shard(shard).will_need(local)

    def problems(self) -> Iterator[Exception]:
        for shard in range(len(self._paths)):
            yield from self._shard(shard).problems()

    def close(self) -> None:
        self._closed = True
        while self._open:
            self._open.popitem()[1].close()

    def _split(self, indices: Indices) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """Group indices by shard: (shard, places in ``indices``, indices in the shard)."""
        positions = np.asarray(indices, dtype=np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"{self.path} has {len(self)} records, asked for {positions.min()} to {positions.max()}")
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            yield shard, places, positions[places] - int(self._starts[shard])

    def _shard(self, shard: int) -> MappedReader:
        """The reader of one shard, opened when needed; the one that is open longest makes room.

        An evicted reader is not closed but dropped: another thread may be reading from it.
        """
        if self._closed:
            raise ValueError(f"{self.path}: the reader is closed; open it again with packfmt.open")
        reader = self._open.get(shard)
        if reader is None:
            reader = MappedReader(self._paths[shard], content_id=self._ids[shard], **self._options)
            self._open[shard] = reader
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
        return reader

    def _load_column(self, name: str) -> Any:
        """Numbers are copied into one array; values of differing length are fetched from their shard when asked for."""
        if isinstance(self._shard(0).columns[name], np.ndarray):
            return np.concatenate([self._shard(shard).columns[name] for shard in range(len(self._paths))])
        return JoinedColumn(lambda shard: self._shard(shard).columns[name], self._starts)

    def _refuse_foreign(self, found: Sequence[tuple[int, int]]) -> None:
        if self._expected is None:
            return
        for path, (_, records, size, content_id), (count, file_size), own in zip(
            self._paths, self._expected.shards, found, self._ids, strict=True
        ):
            if (records, size, content_id) != (count, file_size, own):
                raise FormatError(
                    f"{path}: holds {count} records, {file_size} bytes, content {own}; the manifest {self.path} says "
                    f"{records}, {size}, {content_id}: it belongs to another pack"
                )


class ShardedWriter(Writer):
    """Writes ``out-00000.bin``, ``out-00001.bin``, ... and last the manifest ``out.json``.

    Args:
        path: the manifest's name, ``out.json`` (``out.bin`` and ``out`` mean the same).
        shard_size: a shard takes records until it holds at least one and the next would pass this many bytes.
        columns, classes, metadata, force: as ``ShardWriter``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shard_size: int,
        columns: Sequence[Column] = (),
        classes: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        if shard_size < 1:
            raise ValueError(f"shard_size {shard_size} must be at least 1 byte")
        base = Path(path)
        self._base = base.with_suffix("") if base.suffix in (".bin", ".json") else base
        self.path = os.fspath(self._base) + ".json"
        if not force:
            refuse_existing(Path(self.path))
        self._shard_size = shard_size
        self._force = force
        self._options: dict[str, Any] = {"columns": columns, "classes": classes, "metadata": metadata}
        self._shards: list[ShardWriter] = []
        self._start_shard()
        self._manifest: PendingFile | None = None
        self.content_id = ""

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    @property
    def files(self) -> tuple[str, ...]:
        return (*(shard.path for shard in self._shards), self.path)

    def write(self, data: Buffer, key: str, **columns: Any) -> None:
        shard = self._shards[-1]
        if len(shard) and shard.data_size + memoryview(data).nbytes > self._shard_size:
            shard.finish()
            shard = self._start_shard()
        shard.write(data, key, **columns)

    def close(self) -> None:
        try:
            self._shards[-1].finish()
            rows = [(Path(s.path).name, len(s), s.file_size, s.content_id) for s in self._shards]
            self._manifest = PendingFile(Path(self.path), force=self._force)
            self._manifest.stream.write(Manifest(rows).encode())
            for shard in self._shards:
                shard.publish()
            self._manifest.publish()
            self.content_id = join_ids([shard.content_id for shard in self._shards])
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        for shard in self._shards:
            shard.discard()
        if self._manifest is not None:
            self._manifest.discard()

    def _start_shard(self) -> ShardWriter:
        options = dict(self._options)
        if self._shards:
            options["columns"] = self._shards[0].columns
        path = f"{self._base}-{len(self._shards):05d}.bin"
        self._shards.append(ShardWriter(path, force=self._force, **options))
        return self._shards[-1]


def join_ids(content_ids: Sequence[str]) -> str:
    """The content id of several shards: XXH3-128 over theirs, in hexadecimal, one after the other."""
    return xxhash.xxh3_128_hexdigest("".join(content_ids).encode("ascii"))


def _reopen(paths: tuple[str, ...], path: str, io: IO, verify: bool, content_id: str) -> ShardedReader:
    return ShardedReader(paths, path=path, io=io, verify=verify, content_id=content_id)
