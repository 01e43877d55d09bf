"""Decoding small JPEGs into a batch array on two threads, beside a Pillow loop on two threads.

    python -m tools.bench.decode [--count 4096] [--rounds 9]

Two Pillow loops: one that ends with the pixels in the batch array (equal work), and one as a Dataset has it, with a
tensor per image and a stack per batch.
"""

from __future__ import annotations

import argparse
import io
import threading
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from packfmt.images.decode import Decoder
from tools.bench.photos import jpegs
from tools.bench.timing import in_turn, machine, ratio, report, verdict

THREADS = 2
BATCH = 64
CHUNK = 32
SIDE = 64


def on_threads(work: Callable[[int], None], tasks: int) -> None:
    """Run ``work(0)`` to ``work(tasks - 1)`` on the threads, each taking every second one."""

    def run(first: int) -> None:
        for task in range(first, tasks, THREADS):
            work(task)

    team = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = jpegs(2000, SIDE, SIDE)
    records = [images[number % len(images)] for number in range(options.count)]
    decoder = Decoder()
    out = np.zeros((options.count, SIDE, SIDE, 3), np.uint8)
    other = np.zeros_like(out)

    def ours(task: int) -> None:
        part = slice(task * CHUNK, (task + 1) * CHUNK)
        failures = decoder.decode_into(records[part], out[part])
        if failures:
            raise SystemExit(f"not decoded: {failures}")

    def pillow(task: int) -> None:
        for position in range(task * CHUNK, min((task + 1) * CHUNK, options.count)):
            with Image.open(io.BytesIO(records[position])) as image:
                other[position] = np.asarray(image.convert("RGB"))

    def pillow_tensors(task: int) -> None:
        samples = []
        for record in records[task * BATCH : (task + 1) * BATCH]:
            with Image.open(io.BytesIO(record)) as image:
                samples.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous())
        torch.stack(samples)

    chunks, batches = -(-options.count // CHUNK), -(-options.count // BATCH)
    on_threads(ours, chunks)
    on_threads(pillow, chunks)
    if not np.array_equal(out, other):
        raise SystemExit("the contenders made different pixels")
    times = in_turn(
        {
            "packfmt into a batch array": lambda: on_threads(ours, chunks),
            "Pillow into a batch array": lambda: on_threads(pillow, chunks),
            "Pillow, tensors, stack": lambda: on_threads(pillow_tensors, batches),
        },
        options.rounds,
    )
    print(machine())
    size = np.mean([len(image) for image in images])
    report(f"{options.count} JPEGs, {SIDE} x {SIDE}, {size:.0f} bytes, {THREADS} threads", times, options.count, "/s")
    for name in ("Pillow into a batch array", "Pillow, tensors, stack"):
        verdict(f"packfmt / {name} (speed)", ratio(times, name, "packfmt into a batch array"), 6, at_most=False)


if __name__ == "__main__":
    main()
