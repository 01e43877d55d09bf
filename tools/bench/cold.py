"""Reading a pack larger than 2 GiB from a cold page cache: block order and full shuffle, beside the disk's own rate.

    python -m tools.bench.cold FOLDER [--gigabytes 2.5] [--bytes 106000] [--window BLOCKS] [--rounds 3]

Needs root to drop the page cache, or a file system that honours POSIX_FADV_DONTNEED. "One by one" leaves out what makes
blocks of an order: that whole ones are read ahead. Where a disk's operations are limited, as those of rented disks are,
that is what counts. Linux can limit those of any disk, for a process in a control group of its own:
``blkio.throttle.read_iops_device`` and ``read_bps_device``, or ``io.max``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path

import numpy as np

import packfmt
from packfmt.sampling import BlockBatchSampler
from packfmt.sampling.order import NONE
from tools.bench.photos import jpegs
from tools.bench.timing import machine, seconds, verdict

BATCH = 64


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--bytes", type=int, default=106_000, help="of a record, on average")
    parser.add_argument("--window", type=int, help="blocks, instead of the default")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"cold-{options.bytes}.bin"
    if not path.exists():
        make(path, int(options.gigabytes * 2**30), options.bytes)
    size = path.stat().st_size
    print(machine())
    print(f"{size / 2**30:.2f} GiB, cold page cache")
    contenders: dict[str, Callable[[], int]] = {
        "sequential pread of 4 MiB": lambda: read_whole(path),
        "block order, batches of 64": lambda: read_blocks(path, options.window),
        "block order, records one by one": lambda: read_blocks(path, options.window, ahead=False),
        "full shuffle, sorted batches asked ahead": lambda: read_shuffled(path),
        "full shuffle, plain np.memmap (a tenth)": lambda: read_plain(path),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, function in contenders.items():
            drop_cache(path)
            done = 0

            def run(function: Callable[[], int] = function) -> None:
                nonlocal done
                done = function()

            spent = seconds(run)
            rates[name].append(done / spent / 1e6)
    for name, values in rates.items():
        print(f"  {name:<44} {statistics.median(values):>8,.0f} MB/s  ({min(values):,.0f} to {max(values):,.0f})")
    pairs = list(zip(*rates.values(), strict=True))
    verdict("block order / sequential", statistics.median(b / s for s, b, *_ in pairs), 0.9, at_most=False)
    verdict("block order / plain memmap shuffle", statistics.median(b / p for _, b, *_, p in pairs), 10, at_most=False)


def make(path: Path, size: int, record: int) -> None:
    """A pack of photos of about so many bytes each."""
    side = max(16, round((record * 5) ** 0.5))
    images = jpegs(record, side * 7 // 8, side)
    mean = sum(map(len, images)) / len(images)
    with packfmt.create(path) as writer:
        for number in range(int(size / mean)):
            writer.write(images[number % len(images)], key=f"{number:06d}.jpg")


def drop_cache(path: Path) -> None:
    """Forget the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if os.geteuid() == 0:
        subprocess.run(["sh", "-c", "sync; echo 1 > /proc/sys/vm/drop_caches"], check=False, capture_output=True)


def read_whole(path: Path) -> int:
    """The disk's own rate."""
    done = 0
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(4 << 20)
        while count := file.readinto(buffer):
            done += count
    return done


def read_batches(reader: packfmt.Reader, batches: Iterable[np.ndarray], near: Iterable[np.ndarray]) -> int:
    """Read every batch, checksums on; the next two are asked for ahead, and what is near, as the loader does."""
    done = 0
    waiting: list[np.ndarray] = []
    for batch, others in zip(batches, near, strict=False):
        reader.will_need(batch)
        if len(others):
            reader.will_need_blocks(others)
        waiting.append(batch)
        if len(waiting) > 2:
            done += sum(map(len, reader.read(waiting.pop(0))))
    for batch in waiting:
        done += sum(map(len, reader.read(batch)))
    return done


def read_blocks(path: Path, window: int | None, *, ahead: bool = True) -> int:
    """An epoch in block order."""
    with packfmt.open(path) as reader:
        sampler = BlockBatchSampler(reader, BATCH, window=window)
        done = read_batches(reader, sampler.batches(0), sampler.read_ahead(0) if ahead else repeat(NONE))
        if done != int(reader.lengths(np.arange(len(reader))).sum()):
            raise SystemExit("the epoch did not read every record once")
    return done


def read_shuffled(path: Path) -> int:
    """An epoch in full random order, batches sorted and asked for ahead."""
    with packfmt.open(path) as reader:
        order = np.random.default_rng(0).permutation(len(reader))
        return read_batches(reader, (order[i : i + BATCH] for i in range(0, len(order), BATCH)), repeat(NONE))


def read_plain(path: Path) -> int:
    """A tenth of the records, one by one in random order through a plain map."""
    with packfmt.open(path) as reader:
        order = np.random.default_rng(0).permutation(len(reader))[: len(reader) // 10]
        offsets, lengths = reader.offsets(order).tolist(), reader.lengths(order).tolist()
    data = np.memmap(path, np.uint8, mode="r")
    return sum(len(data[o : o + n].tobytes()) for o, n in zip(offsets, lengths, strict=True))


if __name__ == "__main__":
    main()
