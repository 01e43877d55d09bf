"""Packing, opening and reading, against tar, LMDB and pread. Ratios in one run.

    python -m tools.bench.storage FOLDER [--count 4000] [--rounds 7]

FOLDER is on the disk to measure; about three times the photos' bytes are written there.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import xxhash

import packfmt
from packfmt import format as layout
from packfmt.format import Directory, Layout, Section, Trailer, record_checksum
from packfmt.record import Column
from tools.bench.photos import jpegs, write_tree
from tools.bench.timing import in_turn, machine, ratio, report, seconds, verdict

LARGE = 10_000_000


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", type=int, default=LARGE)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(machine())
    bench_pack(options.folder, options.count, options.rounds)
    bench_open(options.folder, options.large)
    bench_read(options.folder, options.rounds)


def bench_pack(folder: Path, count: int, rounds: int) -> None:
    """`packfmt pack` beside `tar cf`, as whole processes on warm files; with and without waiting for the disk."""
    tree = folder / f"photos-{count}"  # another number of photos has a tree of its own
    total = write_tree(tree, count)
    pack, tar = folder / "photos.bin", folder / "photos.tar"
    command = [sys.executable, "-m", "packfmt.cli", "pack", str(tree), str(pack), "--force"]

    def run_pack() -> None:
        subprocess.run(command, check=True, capture_output=True)

    def run_tar() -> None:
        subprocess.run(["tar", "cf", str(tar), "-C", str(tree), "."], check=True)

    def run_tar_synced() -> None:
        run_tar()
        subprocess.run(["sync", str(tar)], check=True)

    run_pack()
    with packfmt.open(pack, check="full") as reader:
        if len(reader) != count or sum(len(record.data) for record in reader) != total:
            raise SystemExit("the pack does not hold what was packed")
    times = in_turn({"packfmt pack (durable)": run_pack, "tar cf": run_tar, "tar cf, sync": run_tar_synced}, rounds)
    report(f"pack {count} photos, {total / 1e6:.0f} MB", times, total / 1e6, "MB/s")
    verdict("pack / tar cf", ratio(times, "packfmt pack (durable)", "tar cf"), 1.3, at_most=True)
    verdict("pack / tar cf and sync", ratio(times, "packfmt pack (durable)", "tar cf, sync"), 1.3, at_most=True)


def make_large(path: Path, count: int) -> None:
    """A pack of ``count`` records of 8 bytes, laid out with numpy, since writing them one by one takes minutes."""
    keys = np.char.zfill(np.arange(count).astype("S8"), 8)
    offsets = layout.HEADER.size + 8 * np.arange(count, dtype="<u8")
    lengths = np.full(count, 8, "<u8")
    sums = np.fromiter((record_checksum(key, i) for i, key in enumerate(keys.tolist())), "<u8", count)
    columns = {
        "label": (Column("label", "<i8"), (np.arange(count) % 1000).astype("<i8")),
        "width": (Column("width", "<u4"), np.full(count, 64, "<u4")),
        "height": (Column("height", "<u4"), np.full(count, 64, "<u4")),
        **{n: (Column(n, "|u1"), np.ones(count, "u1")) for n in ("channels", "format", "orientation", "flags")},
        "key": (Column("key", "|u1", (None,), "text"), keys),
    }
    arrays = {"index.offset": offsets, "index.length": lengths, "index.checksum": sums}
    for name in sorted(columns):
        if name == "key":
            arrays["rows.key"] = (8 * np.arange(count + 1)).astype("<u8")
        arrays[f"column.{name}"] = columns[name][1]
    end = layout.HEADER.size + 8 * count
    plan = Layout.plan(end, {name: array.nbytes for name, array in arrays.items()})
    sections = {
        name: Section(section.offset, section.size, xxhash.xxh3_64_intdigest(arrays[name].data))
        for name, section in plan.sections.items()
    }
    described = tuple(column for column, _ in columns.values())
    identity = xxhash.xxh3_128()
    for part in layout.content_parts(described):
        identity.update(arrays[part].data if isinstance(part, str) else part)
    raw = Directory(sections, described, (), {}).encode()
    size = plan.file_size(len(raw))
    directory = Section(plan.directory_offset, len(raw), xxhash.xxh3_64_intdigest(raw))
    with open(path, "wb") as file:
        file.write(layout.encode_header())
        file.write(keys.tobytes())
        for name, section in sections.items():
            file.seek(section.offset)
            file.write(arrays[name].tobytes())
        file.seek(plan.directory_offset)
        file.write(raw)
        file.seek(size - layout.TRAILER.size)
        file.write(Trailer(count, end, directory, size, identity.digest()).encode())


PROBE = """
import sys, time
import packfmt, packfmt.storage
def peak():  # getrusage would count what the parent held when it forked
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
started = time.perf_counter()
reader = packfmt.open(sys.argv[1])
data = reader[len(reader) // 2].data
spent = time.perf_counter() - started
after = peak()
print(len(reader), bytes(data).decode(), spent, before, after)
"""


def bench_open(folder: Path, count: int) -> None:
    """Open a large pack and read one record, in a fresh process."""
    path = folder / f"large-{count}.bin"
    if not path.exists():
        make_large(path, count)
    rows = []
    for _ in range(5):
        run = subprocess.run([sys.executable, "-c", PROBE, str(path)], check=True, capture_output=True, text=True)
        found, data, *measured = run.stdout.split()
        if int(found) != count or int(data) != count // 2:
            raise SystemExit("the wrong record was read")
        rows.append((float(measured[0]), int(measured[1]) / 1024, int(measured[2]) / 1024))
    spent, before, after = (float(np.median([row[i] for row in rows])) for i in range(3))
    print(f"\nopen a pack of {count:,} records ({path.stat().st_size / 1e9:.2f} GB) and read one")
    verdict("seconds", spent, 0.1, at_most=True)
    verdict("resident MB of the whole process", after, 60, at_most=True)
    print(f"  of which before opening: {before:.1f} MB")


def bench_read(folder: Path, rounds: int) -> None:
    """Records of 110 KB in random order, warm: views and copies, beside LMDB and pread."""
    images = jpegs(110_000, 640, 800)
    count = 4000
    pack, env_path = folder / "reads.bin", folder / "reads.lmdb"
    with packfmt.create(pack, force=True) as writer:
        for i in range(count):
            writer.write(images[i % len(images)], key=f"{i}")
    if not env_path.exists():
        with lmdb.open(str(env_path), map_size=1 << 30) as env, env.begin(write=True) as txn:
            for i in range(count):
                txn.put(i.to_bytes(8, "big"), images[i % len(images)])
    reader, unchecked, by_pread = packfmt.open(pack), packfmt.open(pack, verify=False), packfmt.open(pack, io="pread")
    once = packfmt.open(pack, verify="once")
    offsets = reader.offsets(np.arange(count)).tolist()
    lengths = reader.lengths(np.arange(count)).tolist()
    descriptor = os.open(pack, os.O_RDONLY)
    env = lmdb.open(str(env_path), readonly=True, lock=False, readahead=False)
    order = np.random.default_rng(0).permutation(count)
    batches = [order[i : i + 64] for i in range(0, count, 64)]

    def ours() -> None:
        for batch in batches:
            reader.read(batch)

    def ours_unchecked() -> None:
        for batch in batches:
            unchecked.read(batch)

    def ours_once() -> None:
        for batch in batches:
            once.read(batch)

    def ours_copied() -> None:
        for batch in batches:
            for view in reader.read(batch):
                view.tobytes()

    def ours_pread() -> None:
        for batch in batches:
            by_pread.read(batch)

    def lmdb_views() -> None:
        with env.begin(buffers=True) as txn:
            for batch in batches:
                [txn.get(i.to_bytes(8, "big")) for i in batch.tolist()]

    def lmdb_views_hashed() -> None:
        with env.begin(buffers=True) as txn:
            for batch in batches:
                for i in batch.tolist():
                    record_checksum(txn.get(i.to_bytes(8, "big"), b""), i)

    def pread_batches() -> None:
        for batch in batches:
            [os.pread(descriptor, lengths[i], offsets[i]) for i in batch.tolist()]

    def pread_loop() -> None:
        for batch in batches:
            for i in batch.tolist():
                os.pread(descriptor, lengths[i], offsets[i])

    expected = [images[int(i) % len(images)] for i in order[:64]]
    with env.begin(buffers=True) as views:
        found = [bytes(views.get(int(i).to_bytes(8, "big"), b"")) for i in order[:64]]
        same = [bytes(v) for v in reader.read(order[:64])] == expected == found
    if not same or os.pread(descriptor, lengths[3], offsets[3]) != images[3]:
        raise SystemExit("the contenders do not read the same bytes")
    times = in_turn(
        {
            "packfmt read, checksums, views": ours,
            "packfmt read, verify='once', views": ours_once,
            "packfmt read, no checksums, views": ours_unchecked,
            "LMDB buffers=True, views not touched": lmdb_views,
            "LMDB buffers=True, views hashed by hand": lmdb_views_hashed,
            "packfmt read, checksums, copied out": ours_copied,
            "packfmt io=pread, checksums": ours_pread,
            "os.pread loop": pread_loop,
            "os.pread loop that keeps a batch": pread_batches,
        },
        rounds,
        warm_up=6,  # until the reader has stopped asking for read-ahead
    )
    title = f"{count} records of {np.mean(lengths) / 1000:.0f} KB in random order, batches of 64, warm"
    report(title, times, count, "/s")
    verdict(
        "checksummed views, packfmt / LMDB (speed, equal work)",
        1 / ratio(times, "packfmt read, checksums, views", "LMDB buffers=True, views hashed by hand"),
        1.0,
        at_most=False,
    )
    verdict(
        "untouched views, packfmt / LMDB (speed, equal work)",
        1 / ratio(times, "packfmt read, no checksums, views", "LMDB buffers=True, views not touched"),
        1.0,
        at_most=False,
    )
    verdict(
        "checked when first read, packfmt / LMDB untouched (speed)",
        1 / ratio(times, "packfmt read, verify='once', views", "LMDB buffers=True, views not touched"),
        1.0,
        at_most=False,
    )
    verdict(
        "checked at every read, packfmt / LMDB untouched (speed, unequal work)",
        1 / ratio(times, "packfmt read, checksums, views", "LMDB buffers=True, views not touched"),
        1.0,
        at_most=False,
    )
    verdict(
        "copied out of the map, packfmt with checksums / pread (speed)",
        1 / ratio(times, "packfmt read, checksums, copied out", "os.pread loop"),
        0.9,
        at_most=False,
    )
    verdict(
        "copied out by pread, packfmt with checksums / pread (speed)",
        1 / ratio(times, "packfmt io=pread, checksums", "os.pread loop"),
        0.9,
        at_most=False,
    )
    verdict(
        "copied out by pread, packfmt with checksums / pread of a batch (speed)",
        1 / ratio(times, "packfmt io=pread, checksums", "os.pread loop that keeps a batch"),
        0.9,
        at_most=False,
    )
    spent = seconds(ours) - seconds(ours_unchecked)
    decode = seconds(lambda: [packfmt.decode(image) for image in images]) / len(images)
    verdict("checksum time / decode time", spent / count / decode, 0.05, at_most=True)
    print(f"  peak resident memory of this run: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
