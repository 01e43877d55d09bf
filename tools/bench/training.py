"""Training input on real photos: Loader against image files, against bare decoding, under a busy loop, over epochs.

    PACKFMT_TEST_DATA=... python -m tools.bench.training [--only files bare busy memory plain] [--rounds 5]

Needs ``clothing/train`` below PACKFMT_TEST_DATA. Everything is warm in the page cache. Parts:

files   Loader against a dataset of files (Pillow opens, converts, resizes with antialiasing, flips) in DataLoader with
        0, 2 and 4 workers, of which the best counts. Same crops, same flips, same order.
bare    Loader against threads that do nothing but decode and resize the same crops into an array, bytes in memory: a
        loop of simplejpeg's and torch's calls, and one of packfmt's own decoder. In several processes one after the
        other.
busy    A loop of pure Python that takes as long for each batch as one core takes to decode it. Between them the loop
        and the decoder keep two cores busy all the time, if neither has to wait for the interpreter lock. 100 % is a
        core's rate of decoding, measured alone while another core runs such a loop.
memory  Resident memory after the second and after the last of some epochs.
plain   A plain DataLoader with packfmt's dataset and sampler against Loader.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import packfmt
from packfmt.images.decode import Decoder
from packfmt.randomness import sample_keys
from packfmt.training.resize import resize
from tools.bench.timing import in_turn, machine, ratio, report, verdict

SIZE = 224
BATCH = 64
BLOCK, WINDOW = 16, 128  # said here, since they would depend on what a dataset knows of its records
CHUNK = 8
SEED = 0
ALIKE = 2.0  # levels that Pillow's pixels may differ by on the average: it looks a little beyond a crop's edge
CROP = packfmt.RandomResizedCrop(SIZE)
FLIP = packfmt.HorizontalFlip()
PARTS = ("files", "bare", "busy", "memory", "plain")


class Files(Dataset[Any]):
    """Image files as an ImageFolder reads them, with the crops and flips that packfmt chooses."""

    def __init__(self, pack: str, root: Path) -> None:
        with packfmt.open(pack) as reader:
            columns = reader.columns
            self.paths = [str(root / key) for key in columns["key"]]
            self.labels = np.array(columns["label"]).tolist()
            self.heights, self.widths = np.array(columns["height"]), np.array(columns["width"])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        keys = sample_keys(SEED, getattr(index, "epoch", 0), [int(index)])
        (box,) = CROP.boxes(self.heights[index : index + 1], self.widths[index : index + 1], keys).tolist()
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if FLIP.flips(keys)[0]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.asarray(image).copy())
        return pixels.permute(2, 0, 1).contiguous(), self.labels[index]


class Epochs:
    """The same batches for every contender: the first epoch of a sampler, over and over."""

    def __init__(self, dataset: packfmt.ImageDataset, batches: int) -> None:
        count = min(batches * BATCH, len(dataset) // BATCH * BATCH)
        self.indices = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
        self.samples = count
        self.dataset = dataset

    def sampler(self, dataset: Any = None) -> packfmt.BlockBatchSampler:
        return packfmt.BlockBatchSampler(
            dataset or self.dataset, BATCH, seed=SEED, indices=self.indices, block_size=BLOCK, window=WINDOW
        )

    def order(self) -> np.ndarray:
        return np.concatenate(list(self.sampler().batches(0)))

    def loader(self, **options: Any) -> packfmt.Loader:
        return packfmt.Loader(self.dataset, sampler=self.sampler(), **options)

    def over(self, loader: Any, each: Callable[[Any], None] = lambda images: None) -> Callable[[], None]:
        """Something that goes through the first epoch of a Loader or of a DataLoader with its sampler."""
        goer = loader if isinstance(loader, packfmt.Loader) else loader.batch_sampler

        def go() -> None:
            goer.set_epoch(0)
            samples = 0
            for images, _ in loader:
                each(images)
                samples += len(images)
            if samples != self.samples:
                raise SystemExit(f"{samples} samples came instead of {self.samples}")

        return go


def first_images(loader: Any) -> torch.Tensor:
    """The first batch of the first epoch."""
    (loader if isinstance(loader, packfmt.Loader) else loader.batch_sampler).set_epoch(0)
    for images, _ in loader:
        return images
    raise SystemExit("no batch came")


def against_files(epochs: Epochs, pack: str, root: Path, rounds: int) -> None:
    """Part ``files``."""
    loader = epochs.loader()
    wanted = first_images(loader).float()
    contenders = {"Loader": epochs.over(loader)}
    files = Files(pack, root)
    for workers in (0, 2, 4):
        other = DataLoader(
            files, batch_sampler=epochs.sampler(files), num_workers=workers, persistent_workers=workers > 0
        )
        apart = float((first_images(other).float() - wanted).abs().mean())
        if apart > ALIKE:
            raise SystemExit(f"files give other images: {apart:.2f} levels apart on the average")
        contenders[f"files, Pillow, {workers} workers"] = epochs.over(other)
    times = in_turn(contenders, rounds)
    report("Loader against files", times, epochs.samples, "images/s")
    best = min(list(times)[1:], key=lambda name: statistics.median(times[name]))
    verdict(f"{best} / Loader", ratio(times, best, "Loader"), 1.7, at_most=False)


class Bare:
    """Threads that decode chunk after chunk into arrays that lie ready, from bytes in memory: packfmt's decoder."""

    def __init__(self, epochs: Epochs, threads: int) -> None:
        reader = epochs.dataset.reader
        order = epochs.order()
        keys = sample_keys(SEED, 0, order)
        heights, widths = (reader.columns[name][order].astype(np.int64) for name in ("height", "width"))
        self.boxes, self.flips = CROP.boxes(heights, widths, keys), FLIP.flips(keys)
        self.records = [bytes(record) for record in reader.read(order)]
        self.out = np.zeros((len(order), SIZE, SIZE, 3), np.uint8)
        self.decoder = Decoder(resize=resize)
        self.threads = threads

    def __call__(self) -> None:
        starts = itertools.count(0, CHUNK)

        def work() -> None:
            torch.set_num_threads(1)
            for start in starts:
                if start >= len(self.records):
                    break
                self.decode(slice(start, start + CHUNK))

        team = [threading.Thread(target=work) for _ in range(self.threads)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()

    def decode(self, part: slice) -> None:
        self.decoder.decode_into(self.records[part], self.out[part], boxes=self.boxes[part], flips=self.flips[part])


class ByHand(Bare):
    """The same without packfmt: simplejpeg into memory of the thread's own, torch's kernel into the array."""

    def __init__(self, epochs: Epochs, threads: int) -> None:
        super().__init__(epochs, threads)
        self.most = max(height * width * 3 for height, width, *_ in map(simplejpeg.decode_jpeg_header, self.records))
        self.own = threading.local()

    def decode(self, part: slice) -> None:
        if not hasattr(self.own, "memory"):
            self.own.memory = np.empty(self.most, np.uint8)
        boxes, flips = self.boxes[part].tolist(), self.flips[part].tolist()
        for record, out, (x0, y0, x1, y1), flip in zip(self.records[part], self.out[part], boxes, flips, strict=True):
            pixels = simplejpeg.decode_jpeg(record, buffer=self.own.memory)
            crop = torch.from_numpy(np.ascontiguousarray(pixels[y0:y1, x0:x1]).transpose(2, 0, 1)[None])
            place = torch.from_numpy(out)
            torch._C._nn._upsample_bilinear2d_aa(  # type: ignore[call-arg] # its stub lacks out=
                crop, [SIZE, SIZE], False, None, None, out=place.permute(2, 0, 1)[None]
            )
            if flip:
                place.copy_(torch.flip(place, (1,)))


BARE = {"simplejpeg and torch": ByHand, "packfmt's decoder": Bare}


def bare_times(epochs: Epochs, rounds: int, connection: Any) -> None:
    """In a child: the contenders in turn."""
    bare = {name: kind(epochs, epochs.dataset.threads) for name, kind in BARE.items()}
    loader = epochs.loader()
    for record in epochs.dataset.reader:
        bytes(record.data)
    loader.set_epoch(0)
    got = torch.cat([images for images, _ in loader]).permute(0, 2, 3, 1)
    for name, loop in bare.items():
        loop()
        if not np.array_equal(got.numpy(), loop.out):
            raise SystemExit(f"Loader and {name} made different pixels")
    del got
    connection.send(in_turn({**bare, "Loader": epochs.over(loader)}, rounds))


def against_bare(epochs: Epochs, rounds: int, processes: int) -> None:
    """Part ``bare``. In several processes, since where a process's memory happens to lie is worth up to 3 per cent to
    either contender, for as long as it runs."""
    context = mp.get_context("spawn")
    times: dict[str, list[float]] = {name: [] for name in (*BARE, "Loader")}
    ratios: dict[str, list[float]] = {name: [] for name in BARE}
    for _ in range(processes):
        ours, theirs = context.Pipe()
        child = context.Process(target=bare_times, args=(epochs, rounds, theirs))
        child.start()
        theirs.close()
        found = ours.recv()
        child.join()
        for name in BARE:
            ratios[name].append(ratio(found, "Loader", name))
        for name in times:
            times[name] += found[name]
    report("Loader against bare decoding", times, epochs.samples, "images/s")
    for name, values in ratios.items():
        print(f"  Loader / {name} in each process: " + " ".join(f"{value:.3f}" for value in sorted(values)))
        print(f"  Loader / {name}, median of processes: {statistics.median(values):.2f}")
    # Of the two it is the one with the Loader's own decoder that shows what the Loader adds.
    verdict("overhead", statistics.median(ratios["packfmt's decoder"]), 1.05, at_most=True)


def spin(seconds: float) -> int:
    """Pure Python that never lets go of the interpreter lock by itself."""
    end = time.perf_counter() + seconds
    turns = 0
    while time.perf_counter() < end:
        turns += 1
    return turns


def decode_alone(epochs: Epochs, connection: Any) -> None:
    """In a child: a core's decoding, each time that the parent asks."""
    bare = Bare(epochs, 1)
    bare()
    while connection.recv():
        began = time.perf_counter()
        bare()
        connection.send(time.perf_counter() - began)


def busy_epoch(epochs: Epochs, loader: packfmt.Loader, per_batch: float) -> float:
    """Seconds from the first batch, with nothing to do before it, to the end of the work on the last one."""
    began: list[float] = []

    def each(images: torch.Tensor) -> None:
        began.append(time.perf_counter())
        spin(per_batch)

    epochs.over(loader, each)()
    return time.perf_counter() - began[0]


def under_a_busy_loop(epochs: Epochs, rounds: int) -> None:
    """Part ``busy``."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=decode_alone, args=(epochs, theirs), daemon=True)
    child.start()
    single = packfmt.ImageDataset(epochs.dataset.reader, crop=CROP, flip=FLIP, threads=1, seed=SEED)
    contenders = Epochs(single, 1)
    contenders.indices, contenders.samples = epochs.indices, epochs.samples
    loaders = {workers: contenders.loader(workers=workers) for workers in (0, 1)}
    one, other = (first_images(loader) for loader in loaders.values())
    if not torch.equal(one, other):
        raise SystemExit("a worker process made other pixels")
    share: dict[int, list[float]] = {0: [], 1: []}
    for number in range(rounds + 1):
        ours.send(True)
        while not ours.poll():
            spin(0.002)
        alone = ours.recv()
        per_batch = alone / (epochs.samples / BATCH)
        for workers, loader in loaders.items():
            took = busy_epoch(contenders, loader, per_batch)
            if number:  # the first round warms up
                share[workers].append(alone / took)
    ours.send(False)
    child.join()
    for loader in loaders.values():
        loader.close()
    print("\nA loop that holds the interpreter lock: share of what two cores allow")
    for workers, values in share.items():
        print(f"  workers={workers}  {statistics.median(values):.2f}  ({min(values):.2f} to {max(values):.2f})")
    verdict("share with workers=1", statistics.median(share[1]), 0.85, at_most=False)


def resident() -> float:
    """Memory of this process and its children that is no page of a file, in MB; once each where it is shared."""
    own = psutil.Process()
    return sum(process.memory_full_info().uss for process in [own, *own.children(recursive=True)]) / 1e6


def memory_over_epochs(epochs: Epochs, count: int) -> None:
    """Part ``memory``."""
    print("\nMemory over epochs, MB without the pages of the pack")
    for workers in (0, 1):
        with epochs.loader(workers=workers) as loader:
            go = epochs.over(loader)
            sizes = []
            for _ in range(count):
                go()
                sizes.append(resident())
        print(f"  workers={workers}  " + " ".join(f"{size:.0f}" for size in sizes))
        verdict(f"last / second of {count} epochs", sizes[-1] / sizes[1], 1.05, at_most=True)


def against_plain(epochs: Epochs, rounds: int) -> None:
    """Part ``plain``."""
    loader = epochs.loader()
    plain = DataLoader(epochs.dataset, batch_sampler=epochs.sampler())
    if not torch.equal(first_images(plain), first_images(loader)):
        raise SystemExit("DataLoader and Loader made different pixels")
    times = in_turn({"Loader": epochs.over(loader), "DataLoader": epochs.over(plain)}, rounds)
    report("A plain DataLoader with packfmt's dataset and sampler", times, epochs.samples, "images/s")
    print(f"  DataLoader / Loader: {ratio(times, 'DataLoader', 'Loader'):.2f}")


def run(options: argparse.Namespace, root: Path, pack: str) -> None:
    """The parts that were asked for."""
    dataset = packfmt.ImageDataset(pack, crop=CROP, flip=FLIP, threads=options.threads, seed=SEED)
    epochs = Epochs(dataset, options.batches)
    print(machine())
    print(
        f"{len(dataset)} photos of {dataset.reader.record_bytes / 1000:.0f} kB, {epochs.samples} per epoch, crops of "
        f"{SIZE}, batches of {BATCH}, {options.threads} threads"
    )
    for record in dataset.reader:  # the files are read by their own first round
        bytes(record.data)
    if "files" in options.only:
        against_files(epochs, pack, root, options.rounds)
    if "bare" in options.only:
        against_bare(epochs, options.rounds, options.processes)
    if "busy" in options.only:
        under_a_busy_loop(epochs, options.rounds)
    if "memory" in options.only:
        memory_over_epochs(epochs, options.epochs)
    if "plain" in options.only:
        against_plain(epochs, options.rounds)
    dataset.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=24, help="of an epoch")
    parser.add_argument("--processes", type=int, default=6, help="of the part on bare decoding")
    parser.add_argument("--epochs", type=int, default=20, help="of the part on memory")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*worker processes in total.*", category=UserWarning)
    root = Path(os.environ["PACKFMT_TEST_DATA"]) / "clothing" / "train"
    with tempfile.TemporaryDirectory() as folder:
        pack = str(Path(folder) / "train.bin")
        packfmt.pack(root, pack, bad="skip")
        run(options, root, pack)


if __name__ == "__main__":
    main()
