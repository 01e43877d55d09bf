"""What ``test_lmdb_damage`` runs in a process of its own: each kind of damage to each page of a pack in LMDB.

    python tests/lmdb_damage_program.py PACK DAMAGED

PACK is whole. DAMAGED is a folder to write damaged copies into. Prints for each kind of damage, as a line of JSON, how
often each way of reading gave what is stored, how often an error that names the file, and each case in which it did
anything else.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import packfmt
from packfmt.cli import group
from packfmt.errors import CorruptError, FormatError, PackfmtError

Harm = Callable[[bytes, int, int, random.Random], bytes]  # whole file, page size, page
FEW = 4  # of a page's bytes that are changed


def put(data: bytes, size: int, page: int, content: bytes) -> bytes:
    return data[: page * size] + content + data[(page + 1) * size :]


def page_of(data: bytes, size: int, page: int) -> bytes:
    return data[page * size : (page + 1) * size]


def zeroed(data: bytes, size: int, page: int, rng: random.Random) -> bytes:
    return put(data, size, page, bytes(size))


def doubled(data: bytes, size: int, page: int, rng: random.Random) -> bytes:
    return put(data, size, page, page_of(data, size, other(data, size, page, rng)))


def swapped(data: bytes, size: int, page: int, rng: random.Random) -> bytes:
    second = other(data, size, page, rng)
    return put(put(data, size, page, page_of(data, size, second)), size, second, page_of(data, size, page))


def other(data: bytes, size: int, page: int, rng: random.Random) -> int:
    """Another page, by turns any or one of the same kind, which is harder to tell apart."""
    pages = [number for number in range(len(data) // size) if number != page]
    alike = [number for number in pages if page_of(data, size, number)[10] == page_of(data, size, page)[10]]
    return rng.choice(alike if page % 2 and alike else pages)


def noise(data: bytes, size: int, page: int, rng: random.Random) -> bytes:
    return put(data, size, page, rng.randbytes(size))


def few_bytes(data: bytes, size: int, page: int, rng: random.Random) -> bytes:
    """A few bytes, half of them where a page says what it holds."""
    content = bytearray(page_of(data, size, page))
    for place in [*rng.sample(range(size), FEW // 2), *rng.sample(range(40), FEW // 2)]:
        content[place] ^= 1 << rng.randrange(8)
    return put(data, size, page, bytes(content))


def cut(data: bytes, size: int, page: int, rng: random.Random) -> bytes:
    return data[: page * size + (rng.randrange(size) if page % 2 else 0)]


def scattered(data: bytes, size: int, page: int, rng: random.Random) -> bytes:
    """Bytes all over the file, one by one."""
    content = bytearray(data)
    for _ in range(rng.randrange(1, 30)):
        content[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(content)


HARMS: dict[str, Harm] = {harm.__name__: harm for harm in (zeroed, doubled, swapped, noise, few_bytes, cut, scattered)}


class Watch:
    """Reads damaged copies of a pack in every way, and counts what comes of it."""

    def __init__(self, pack: str, damaged: Path) -> None:
        self.path = damaged
        self.right: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        with packfmt.open(pack) as reader:
            self.records = [(bytes(record.data), record.key, int(record.columns["label"])) for record in reader]
            self.content_id = reader.content_id
        self.pixels = np.stack([image.numpy() for image, _ in packfmt.ImageDataset(pack)])
        self.labels = [label for *_, label in self.records]

    def case(self, case: str) -> None:
        """All ways of reading the damaged copy that lies there now."""
        damage = (CorruptError, FormatError)
        self.count(case, self.read, damage)
        self.count(case, self.train, damage)
        self.count(case, self.info, damage)
        self.count(case, self.verify, PackfmtError)
        self.count(case, self.convert, PackfmtError)

    def count(self, case: str, way: Callable[[], None], errors: type[Exception] | tuple[type[Exception], ...]) -> None:
        try:
            way()
            self.right[way.__name__] += 1
        except Exception as error:  # whatever else it is, that is what the test looks for
            if isinstance(error, errors) and str(self.path) in str(error):
                self.errors[way.__name__] += 1
            else:
                self.wrong.append(f"{case}, {way.__name__}: {type(error).__name__}: {error}")

    def read(self) -> None:
        """Every record by itself, all that are whole in spite of those that are not."""
        first = None
        with packfmt.open(self.path) as reader:
            assert len(reader) == len(self.records)
            for index, expected in enumerate(self.records):
                try:
                    record = reader[index]
                    assert (bytes(record.data), record.key, int(record.columns["label"])) == expected
                except CorruptError as error:
                    first = first or error
        if first is not None:
            raise first

    def train(self) -> None:
        """Whole batches, each record of them or an error."""
        dataset = packfmt.LMDBImageDataset(self.path, threads=1)
        for start in range(0, len(dataset), 32):
            batch = range(start, min(start + 32, len(dataset)))
            images, labels = dataset[list(batch)]
            assert np.array_equal(images.numpy(), self.pixels[batch.start : batch.stop])
            assert labels.tolist() == self.labels[batch.start : batch.stop]

    def info(self) -> None:
        assert self.content_id in self.run("info")

    def verify(self) -> None:
        """It passes only what reads right."""
        self.run("verify")
        self.read()

    def convert(self) -> None:
        out = self.path.with_name("out.bin")
        self.run("convert", str(out), "--force")
        with packfmt.open(out) as reader:
            assert reader.content_id == self.content_id

    def run(self, verb: str, *arguments: str) -> str:
        """What a command prints; where it exits with 1, that is raised."""
        result = CliRunner().invoke(group, [verb, str(self.path), *arguments])
        if isinstance(result.exception, SystemExit):
            raise PackfmtError(result.output)
        if result.exception is not None:
            raise result.exception
        return result.output


def page_size_of(data: bytes) -> int:
    return int.from_bytes(data[40:44], "little")


def cases(data: bytes, harm: Harm, seed: int) -> Iterator[tuple[int, bytes]]:
    rng = random.Random(seed)
    size = page_size_of(data)
    for page in range(len(data) // size):
        yield page, harm(data, size, page, rng)


def main(pack: str, folder: str) -> None:
    data = (Path(pack) / "data.mdb").read_bytes()
    for name, harm in HARMS.items():
        damaged = Path(folder) / f"{name}.lmdb"
        damaged.mkdir()
        watch = Watch(pack, damaged)
        for page, content in cases(data, harm, seed=len(name)):
            (damaged / "data.mdb").write_bytes(content)
            watch.case(f"page {page} {name}")
        line = {"harm": name, "right": watch.right, "errors": watch.errors, "wrong": watch.wrong}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
