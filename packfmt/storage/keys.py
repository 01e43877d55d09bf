"""Finding keys: one among all, and those that occur twice, among more keys than memory should hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from packfmt.storage.spool import Spool

__all__ = ["KeyHashes", "KeyTable", "hash_key", "refuse_same_keys", "repeated", "same_keys"]

PASS = 1 << 23  # hashes sorted at a time: 64 MiB

hash_key = xxhash.xxh3_64_intdigest  # (bytes) -> int


class KeyTable:
    """Where each of many keys is, by its hash: 16 bytes per key. Thread-safe: nothing changes after construction.

    Args:
        keys: all of them, in order.
        count: their number.
    """

    def __init__(self, keys: Iterable[bytes], count: int) -> None:
        hashes = np.fromiter(map(hash_key, keys), np.uint64, count)
        self._places = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._places]

    def places(self, key: bytes) -> list[int]:
        """Where keys of the same hash are, in order: hardly ever more than one, and that one rarely another key."""
        number = np.uint64(hash_key(key))
        start, stop = (int(np.searchsorted(self._hashes, number, side)) for side in ("left", "right"))
        found: list[int] = self._places[start:stop].tolist()
        return found


class KeyHashes:
    """A hash of every key written, spooled to disk.

    Args:
        folder: where the spool's nameless file goes.
    """

    def __init__(self, folder: Path) -> None:
        self._spool = Spool(folder)

    def append(self, key: bytes | memoryview) -> None:
        """Take note of one key."""
        self._spool.append(hash_key(key).to_bytes(8, "little"))

    def repeated(self) -> set[int]:
        """The hashes that occur more than once; sorted a slice of the hash space at a time."""
        found: set[int] = set()
        passes = self._spool.size // 8 // PASS + 1
        for turn in range(passes):
            parts = (np.frombuffer(chunk, "<u8") for chunk in self._spool.chunks())
            found |= repeated([part[part % passes == turn] for part in parts])
        return found

    def close(self) -> None:
        """Free memory and disk."""
        self._spool.close()


def repeated(parts: list[npt.NDArray[np.uint64]]) -> set[int]:
    """The numbers that occur more than once in these arrays taken together."""
    numbers = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.uint64)
    return set(numbers[1:][numbers[1:] == numbers[:-1]].tolist())


def same_keys(hashes: set[int], keys: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Compare the keys that have these hashes: (first place, place, key) of each that occurred before."""
    seen: dict[bytes, int] = {}
    if hashes:
        for index, key in enumerate(keys):
            if hash_key(key) in hashes and (first := seen.setdefault(key, index)) != index:
                yield first, index, key


def refuse_same_keys(path: str, hashes: set[int], keys: Iterable[bytes]) -> None:
    """Raise ValueError for the first key that occurs twice, among those with these hashes."""
    for first, index, key in same_keys(hashes, keys):
        raise ValueError(
            f"{path}: records {first} and {index} have the same key {key.decode('utf-8', 'surrogateescape')!r}; keys "
            "must differ, since unpack turns them into files"
        )
