"""Converting a WebDataset tar and an LMDB to a pack, against `cp` of the same bytes and their checksums.

    python -m tools.bench.convert FOLDER [--count 4000] [--rounds 7]

FOLDER is on the disk to measure; about four times the photos' bytes lie there. `packfmt convert` waits for the disk and
`cp` does not. Equal work is compared twice: both waiting (`cp` and `sync`), and neither (`convert` with the system's
calls for it taken away, which no user can do). The unequal pair is shown as well, beside what the disk alone takes:
the same number of zeros, written and synced. Removing the files of the run before is not timed.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import tarfile
from pathlib import Path
from unittest.mock import patch

import lmdb
import xxhash

import packfmt
from tools.bench.photos import jpegs
from tools.bench.timing import in_turn, machine, ratio, report, verdict


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(machine())
    print(f"load averages {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    images = jpegs(110_000, 640, 800)
    for name, make in (("tar", make_tar), ("LMDB", make_lmdb)):
        source = make(options.folder, images, options.count)
        bench(name, source, [images[i % len(images)] for i in range(options.count)], options.rounds)


def make_tar(folder: Path, images: list[bytes], count: int) -> Path:
    """A WebDataset shard: an image and its class per sample."""
    path = folder / f"photos-{count}.tar"
    if not path.exists():
        with tarfile.open(path, "w") as archive:
            for number in range(count):
                for suffix, data in ((".jpg", images[number % len(images)]), (".cls", b"%d" % (number % 10))):
                    member = tarfile.TarInfo(f"{number:06d}{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return path


def make_lmdb(folder: Path, images: list[bytes], count: int) -> Path:
    """A text recognition database: an image and its text per sample."""
    path = folder / f"photos-{count}.lmdb"
    if not path.exists():
        with lmdb.open(str(path), map_size=1 << 36) as environment, environment.begin(write=True) as write:
            for number in range(count):
                write.put(b"image-%09d" % (number + 1), images[number % len(images)])
                write.put(b"label-%09d" % (number + 1), b"word %d" % number)
            write.put(b"num-samples", b"%d" % count)
    return path


def bench(name: str, source: Path, expected: list[bytes], rounds: int) -> None:
    """Convert one source, and copy its file, in turn; each time to a name that is free."""
    data = source / "data.mdb" if source.is_dir() else source
    out, copy = source.parent / "converted.bin", source.parent / "copied"
    total = sum(map(len, expected))

    def convert() -> None:
        packfmt.convert(source, out)

    def convert_unsynced() -> None:
        with patch.object(os, "fsync", idle), patch.object(os, "posix_fadvise", idle):
            convert()

    def copy_and_check() -> None:
        subprocess.run(["cp", str(data), str(copy)], check=True)
        checksums(copy, expected)

    def copy_synced_and_check() -> None:
        subprocess.run(["cp", str(data), str(copy)], check=True)
        subprocess.run(["sync", str(copy)], check=True)
        checksums(copy, expected)

    def zeros() -> None:
        with open(copy, "wb", buffering=0) as file:
            for _ in range(total >> 20):
                file.write(bytes(1 << 20))
            os.fsync(file.fileno())

    def clean() -> None:
        out.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        os.sync()

    clean()
    convert()
    with packfmt.open(out, check="full") as reader:
        if [bytes(record.data) for record in reader] != expected:
            raise SystemExit(f"converting the {name} changed bytes")
    contenders = {
        "packfmt convert": convert,
        "cp and sync, then XXH3 of each record": copy_synced_and_check,
        "packfmt convert, not waiting for the disk": convert_unsynced,
        "cp, then XXH3 of each record": copy_and_check,
        "zeros, written and synced": zeros,
    }
    times = in_turn(contenders, rounds, before=clean)
    report(f"convert a {name} of {len(expected)} photos, {total / 1e6:.0f} MB, warm", times, total / 1e6, "MB/s")
    ours, synced, unsynced, plain, disk = contenders
    verdict("both wait for the disk: convert / cp, sync and checksums", ratio(times, ours, synced), 1.5, at_most=True)
    verdict("neither waits: convert / cp and checksums", ratio(times, unsynced, plain), 1.5, at_most=True)
    print(f"  only convert waits: convert / cp and checksums: {ratio(times, ours, plain):.2f}")
    print(f"  the disk alone / cp and checksums: {ratio(times, disk, plain):.2f}")
    clean()


def idle(*args: object) -> None:
    """Stand in for a system call."""


def checksums(path: Path, records: list[bytes]) -> None:
    """XXH3 of as many bytes as the records have, record by record, read back from the copy."""
    with open(path, "rb") as file:
        for record in records:
            xxhash.xxh3_64_intdigest(file.read(len(record)))


if __name__ == "__main__":
    main()
