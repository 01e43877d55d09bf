"""Accelerate deals samples out over the ranks by itself: none is lost, and none comes twice but to fill up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed; test_sampling_ranks has what stands for it")

import accelerate_program as program
from make import jpeg

import packfmt

COUNT = 203
RANKS = 2
SECONDS = 300  # a hang is a failure


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    out = tmp_path_factory.mktemp("ranks")
    with packfmt.create(out / "pack.bin") as writer:
        for number in range(COUNT):
            writer.write(jpeg(12, 12, seed=number), key=str(number), label=number)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [program.__file__, str(out), str(out / "pack.bin")]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


def epochs(seen: list[dict[str, Any]], name: str) -> list[list[int]]:
    """The samples of all ranks, epoch by epoch."""
    return [
        [number for rank in seen for batch in rank[name][epoch] for number in batch]
        for epoch in range(program.EPOCHS)
    ]  # fmt: skip


@pytest.mark.parametrize("split", program.SPLITS)
def test_a_sampler_gives_every_sample(seen: list[dict[str, Any]], split: str) -> None:
    full = program.BATCH * RANKS
    for samples in epochs(seen, f"sampler, {split}"):
        assert set(samples) == set(range(COUNT))
        assert len(samples) == COUNT if split == "uneven" else len(samples) <= -(-COUNT // full) * full
    for rank in seen:
        length = rank[f"length, {split}"][1]
        assert [len(batches) for batches in rank[f"sampler, {split}"]] == [length] * program.EPOCHS


@pytest.mark.parametrize("workers", program.WORKERS)
@pytest.mark.parametrize("split", ["default", "no dispatch"])
def test_a_stream_gives_every_sample(seen: list[dict[str, Any]], split: str, workers: str) -> None:
    full = program.BATCH * RANKS * max(1, program.WORKERS[workers].get("num_workers", 1))
    for samples in epochs(seen, f"stream, {split}, {workers}"):
        assert set(samples) == set(range(COUNT))
        assert len(samples) <= -(-COUNT // full) * full


def test_epochs_differ(seen: list[dict[str, Any]]) -> None:
    first, second = epochs(seen, "sampler, default")
    assert first != second


def test_ranks_that_are_given_are_split_twice_with_a_warning(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert [message.split(" ")[0] for message in rank["warnings"]] == ["BatchSamplerShard"]


def test_a_loader_that_is_not_prepared_is_split_by_its_sampler(seen: list[dict[str, Any]]) -> None:
    for samples in epochs(seen, "not prepared"):
        assert sorted(samples) == list(range(COUNT))
