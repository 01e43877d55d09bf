"""What an order costs: time and memory until the first batch, time per batch, and how good the order is.

    python tools/bench/sampling.py [--records 100000000] [--batch-size 256]

Each start is measured in a process of its own, since memory once used stays with a process. Every result is
checked before its time is printed: no record comes twice, and a batch found directly is the one reached from the batch
before it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from itertools import islice

import numpy as np

from packfmt.sampling import BlockBatchSampler, BucketBatchSampler, SampleIndex
from tools.bench.timing import machine


def peak_mib() -> float:
    """Most memory this process ever had resident, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def start(records: int, batch_size: int, part: float) -> dict[str, float]:
    """Build a sampler and get the batch that lies ``part`` of the epoch in."""
    before = peak_mib()
    began = time.perf_counter()
    sampler = BlockBatchSampler(records, batch_size)
    position = int(part * (len(sampler) - 1))
    batch = next(sampler.batches(0, position))
    seconds = time.perf_counter() - began
    if len(np.unique(batch)) != min(batch_size, records - position * batch_size):
        raise SystemExit("a batch holds a record twice")
    memory = peak_mib() - before
    if position and next(islice(BlockBatchSampler(records, batch_size).batches(0, position - 1), 1, 2)).tolist() != (
        batch.tolist()
    ):
        raise SystemExit("a batch found directly differs from the one reached by walking")
    return {"seconds": seconds, "mib": memory}


def in_new_process(records: int, batch_size: int, part: float) -> dict[str, float]:
    """``start`` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tools.bench.sampling",
        "--records",
        str(records),
        "--batch-size",
        str(batch_size),
        "--start",
        str(part),
    ]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def per_batch(records: int, batch_size: int, count: int) -> tuple[float, float]:
    """Seconds per batch as arrays, and as lists with the epoch, over ``count`` batches."""
    sampler = BlockBatchSampler(records, batch_size)
    count = min(count, len(sampler))
    sampler.batch(0, 0)  # the start is measured elsewhere
    began = time.perf_counter()
    seen = np.concatenate(list(islice(sampler.batches(0), count)))
    arrays = (time.perf_counter() - began) / count
    if len(np.unique(seen)) != len(seen):
        raise SystemExit("an epoch holds a record twice")
    sampler.set_epoch(0)
    began = time.perf_counter()
    for _ in islice(sampler, count):
        pass
    return arrays, (time.perf_counter() - began) / count


def pickling(batch_size: int, epoch_in: str) -> float:
    """Seconds to pickle and unpickle a batch whose epoch is carried by no index, by the first or by all."""
    numbers = np.random.default_rng(0).integers(10**7, size=batch_size).tolist()
    carriers = {"no": 0, "first": 1, "all": batch_size}[epoch_in]
    batch = [SampleIndex(number, 3) for number in numbers[:carriers]] + numbers[carriers:]
    if [getattr(index, "epoch", None) for index in pickle.loads(pickle.dumps(batch))][:carriers] != [3] * carriers:
        raise SystemExit("an epoch was lost")
    began = time.perf_counter()
    for _ in range(200):
        pickle.loads(pickle.dumps(batch))
    return (time.perf_counter() - began) / 200


def report(records: int, batch_size: int) -> None:
    """Print everything."""
    print(machine())
    print(f"BlockBatchSampler({records:,}, {batch_size}), default block and window")
    for part, name in ((0.0, "first batch"), (0.5, "batch in the middle"), (1.0, "last batch")):
        found = in_new_process(records, batch_size, part)
        print(f"  {name:20} {found['seconds']:8.3f} s {found['mib']:8.1f} MiB more resident than before")
    arrays, lists = per_batch(records, batch_size, 2000)
    print(f"  per batch            {arrays * 1e6:8.1f} µs as array, {lists * 1e6:.1f} µs as list with the epoch")
    for epoch_in in ("no", "first", "all"):
        seconds = pickling(batch_size, epoch_in)
        print(
            f"  pickled and back     {seconds * 1e6:8.1f} µs with the epoch in {epoch_in} index"
            + "es" * (epoch_in == "all")
        )
    sizes = (np.random.default_rng(0).integers(200, 600, 1_000_000), np.full(1_000_000, 400))
    began = time.perf_counter()
    bucketed = BucketBatchSampler(sizes, batch_size)
    bucketed.batch(0, 0)
    print(f"BucketBatchSampler of 1,000,000: first batch after {time.perf_counter() - began:.3f} s")
    print("1,281,167 records of 110 kB sorted into 1000 classes, blocks of 19:  window, mixing, run in records")
    labels = np.arange(1_281_167) * 1000 // 1_281_167
    for window in (1, 16, 64, 256, 1024, 2048):
        quality = BlockBatchSampler(len(labels), batch_size, block_size=19, window=window).quality(labels)
        print(f"  {window:6} {quality.mixing:8.3f} {quality.run_records:8.1f}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start is not None:
        print(json.dumps(start(options.records, options.batch_size, options.start)))
    else:
        report(options.records, options.batch_size)


if __name__ == "__main__":
    main()
