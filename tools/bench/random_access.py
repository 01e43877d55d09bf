"""Reading images one by one in random order, copied out: HDF5, LMDB, plain files, a memory map, and the pack.

    python -m tools.bench.random_access FOLDER [--count 4000] [--rounds 7]

FOLDER is on the disk to measure; about seven times the images' bytes are written there. Everything is warm. Two sets:
JPEGs of about 110 KB, and pixels of 96 x 96 x 3 as HDF5 files usually hold them, in chunks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np

import packfmt
from tools.bench.photos import jpegs, photo
from tools.bench.timing import in_turn, machine, ratio, report

SIDE = 96
CHUNK = 16  # images in a chunk of an HDF5 array

Reader = Callable[[int], bytes]


def main() -> None:
    """Run both sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(machine())
    print(f"load averages {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    distinct = jpegs(110_000, 640, 800)
    photos = [distinct[number % len(distinct)] for number in range(options.count)]
    bench(f"{options.count} JPEGs of 110 KB", options.folder / f"jpegs-{options.count}", photos, options.rounds, vlen)
    pixels = [photo(seed, SIDE, SIDE).tobytes() for seed in range(64)]
    arrays = [pixels[number % len(pixels)] for number in range(options.count)]
    title = f"{options.count} arrays of {SIDE} x {SIDE} x 3"
    bench(title, options.folder / f"arrays-{options.count}", arrays, options.rounds, chunked)


def bench(
    title: str, folder: Path, records: list[bytes], rounds: int, make: Callable[[Path, list[bytes]], dict[str, Reader]]
) -> None:
    """Read all records once in one random order, each copied out, by every means; the bytes are compared before."""
    folder.mkdir(exist_ok=True)
    contenders = make(folder, records) | everywhere(folder, records)
    order = np.random.default_rng(0).permutation(len(records)).tolist()
    for name, read in contenders.items():
        if any(read(number) != records[number] for number in order):
            raise SystemExit(f"{name} does not read what was written")

    def all_of(read: Reader) -> Callable[[], None]:
        def run() -> None:
            for number in order:
                read(number)

        return run

    times = in_turn({name: all_of(read) for name, read in contenders.items()}, rounds)
    report(f"{title}, one by one in random order, warm, copied out", times, len(records), "/s")
    ours = "packfmt, checksums"
    for name in contenders:
        if name != ours:
            print(f"  {ours} is {1 / ratio(times, ours, name):.2f} times as fast as {name}")


def vlen(folder: Path, records: list[bytes]) -> dict[str, Reader]:
    """HDF5 with one row of bytes per image, whole and in chunks."""
    found: dict[str, Reader] = {}
    for name, chunks in (("HDF5 vlen bytes", None), (f"HDF5 vlen bytes, chunks of {CHUNK}", (CHUNK,))):
        path = folder / f"vlen-{'whole' if chunks is None else 'chunked'}.h5"
        if not path.exists():
            with h5py.File(path, "w") as file:
                rows = file.create_dataset("x", (len(records),), h5py.vlen_dtype(np.uint8), chunks=chunks)
                for number, data in enumerate(records):
                    rows[number] = np.frombuffer(data, np.uint8)
        dataset = h5py.File(path, "r")["x"]
        found[name] = partial(_row, dataset)
    return found


def _row(dataset: Any, number: int) -> bytes:
    return bytes(dataset[number].tobytes())


def chunked(folder: Path, records: list[bytes]) -> dict[str, Reader]:
    """HDF5 with one array of pixels: contiguous, in chunks of one image and of several, and compressed."""
    layouts: dict[str, dict[str, Any]] = {
        "HDF5 array, contiguous": {},
        "HDF5 array, chunks of 1": {"chunks": (1, SIDE, SIDE, 3)},
        f"HDF5 array, chunks of {CHUNK}": {"chunks": (CHUNK, SIDE, SIDE, 3)},
        f"HDF5 array, chunks of {CHUNK}, gzip": {"chunks": (CHUNK, SIDE, SIDE, 3), "compression": "gzip"},
    }
    found: dict[str, Reader] = {}
    pixels = np.frombuffer(b"".join(records), np.uint8).reshape(-1, SIDE, SIDE, 3)
    for place, (name, options) in enumerate(layouts.items()):
        path = folder / f"array-{place}.h5"
        if not path.exists():
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=pixels, **options)
        dataset = h5py.File(path, "r")["x"]
        found[name] = partial(_row, dataset)
    return found


def everywhere(folder: Path, records: list[bytes]) -> dict[str, Reader]:
    """Files, LMDB, one file under a memory map, and the pack with and without checksums."""
    tree = folder / "files"
    tree.mkdir(exist_ok=True)
    names = [os.fspath(tree / f"{number:06d}") for number in range(len(records))]
    for name, data in zip(names, records, strict=True):
        if not os.path.exists(name):
            Path(name).write_bytes(data)
    if not (folder / "foreign.lmdb").exists():
        with lmdb.open(str(folder / "foreign.lmdb"), map_size=1 << 36) as made, made.begin(write=True) as write:
            for number, data in enumerate(records):
                write.put(number.to_bytes(8, "big"), data)
    for pack in ("pack.bin", "pack.lmdb"):
        if not (folder / pack).exists():
            with packfmt.create(folder / pack) as writer:
                for number, data in enumerate(records):
                    writer.write(data, f"{number:06d}")
    environment = lmdb.open(str(folder / "foreign.lmdb"), readonly=True, lock=False, readahead=False)
    transaction = environment.begin(buffers=True)
    reader, unchecked = packfmt.open(folder / "pack.bin"), packfmt.open(folder / "pack.bin", verify=False)
    in_lmdb = packfmt.open(folder / "pack.lmdb")
    flat = np.memmap(folder / "pack.bin", mode="r")
    starts = reader.offsets(np.arange(len(records))).tolist()
    sizes = [len(data) for data in records]

    def from_file(number: int) -> bytes:
        with open(names[number], "rb", buffering=0) as file:
            return file.read()

    return {
        "files": from_file,
        "LMDB": lambda number: bytes(transaction.get(number.to_bytes(8, "big"), b"")),
        "np.memmap": lambda number: flat[starts[number] : starts[number] + sizes[number]].tobytes(),
        "packfmt, checksums": lambda number: reader.read((number,))[0].tobytes(),
        "packfmt, no checksums": lambda number: unchecked.read((number,))[0].tobytes(),
        "packfmt in LMDB, checksums": lambda number: in_lmdb.read((number,))[0].tobytes(),
    }


if __name__ == "__main__":
    main()
