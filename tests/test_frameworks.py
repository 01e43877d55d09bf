"""Training frameworks over a pack: every record in its turn, on one process and on two, and after a break.

They run in processes of their own, once for all tests: what they import and warn about stays there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="frameworks need torch")

import frameworks_program  # noqa: E402  (after the skip)
from frameworks_program import BATCH, EPOCHS, STOP, TRAINING  # noqa: E402
from training_packs import make_pack  # noqa: E402

import packfmt  # noqa: E402

COUNT = 40
SECONDS = 300  # a hang is a failure

Seen = Callable[[str, int], list[dict[str, Any]]]


# Framework to the packages that it needs, and those that run in the same processes: imports take most of the time.
NEEDS = {
    "lightning": ["lightning"],
    "fabric": ["lightning"],
    "accelerate": ["accelerate"],
    "trainer": ["transformers", "accelerate"],
}
TOGETHER = [("lightning", "fabric"), ("accelerate", "trainer")]


def missing(framework: str) -> list[str]:
    return [package for package in NEEDS[framework] if find_spec(package) is None]


def installed(framework: str) -> Any:
    """A parameter that is skipped where the framework is missing."""
    reason = f"{', '.join(missing(framework))} missing: pip install -e '.[frameworks]'"
    return pytest.param(framework, marks=pytest.mark.skipif(bool(missing(framework)), reason=reason), id=framework)


def each(*frameworks: str) -> Any:
    return pytest.mark.parametrize("framework", [installed(framework) for framework in frameworks])


RANKS = pytest.mark.parametrize("ranks", [1, 2])


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pack(tmp_path_factory.mktemp("packs"), COUNT)


@pytest.fixture(scope="module")
def seen(pack: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Framework and number of ranks to what each rank saw."""

    @cache
    def launch(frameworks: tuple[str, ...], ranks: int) -> tuple[subprocess.CompletedProcess[str], Path]:
        out = tmp_path_factory.mktemp("frameworks")
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        quiet = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, *start, frameworks_program.__file__, pack, str(out), *frameworks],
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done, out

    def of(framework: str, ranks: int) -> list[dict[str, Any]]:
        (group,) = (names for names in TOGETHER if framework in names)
        done, out = launch(tuple(name for name in group if not missing(name)), ranks)
        assert done.returncode == 0, done.stderr
        return [json.loads((out / f"{rank}.json").read_text())[framework] for rank in range(ranks)]

    return of


def expected(ranks: int, epochs: int = EPOCHS) -> list[list[list[int]]]:
    """Each rank's batches, as packfmt's sampler says them."""
    samplers = [packfmt.BlockBatchSampler(TRAINING, BATCH, rank=rank, world_size=ranks) for rank in range(ranks)]
    return [[batch.tolist() for epoch in range(epochs) for batch in sampler.batches(epoch)] for sampler in samplers]


@each("lightning", "fabric", "accelerate")
@RANKS
def test_a_loader_trains_in_packfmts_order(seen: Seen, framework: str, ranks: int) -> None:
    assert [rank["train"] for rank in seen(framework, ranks)] == expected(ranks)


@each("lightning", "fabric")
@RANKS
def test_a_dataloader_with_packfmts_sampler(seen: Seen, framework: str, ranks: int) -> None:
    assert [rank["dataloader"] for rank in seen(framework, ranks)] == expected(ranks, epochs=1)


@each("lightning")
@RANKS
@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_evaluation_sees_every_record_once(seen: Seen, framework: str, ranks: int, stage: str) -> None:
    records = chain(*(chain(*rank[stage]) for rank in seen(framework, ranks)))
    assert sorted(records) == list(range(TRAINING, COUNT))


@each("lightning", "accelerate", "trainer")
@RANKS
def test_a_run_that_was_broken_off_in_an_epoch_goes_on(seen: Seen, framework: str, ranks: int) -> None:
    for rank in seen(framework, ranks):
        assert len(rank["broken"]) == STOP < TRAINING // (BATCH * ranks)
        assert rank["broken"] + rank["resumed"] == rank["train"]


@each("trainer")
@RANKS
@pytest.mark.parametrize("way", ["train", "default_collate"])
def test_the_trainer_sees_every_record_once_an_epoch(seen: Seen, framework: str, ranks: int, way: str) -> None:
    steps = TRAINING // (BATCH * ranks)
    for epoch in range(EPOCHS):
        batches = chain(*(rank[way][epoch * steps : (epoch + 1) * steps] for rank in seen(framework, ranks)))
        assert sorted(chain(*batches)) == list(range(TRAINING))


@each("trainer")
@RANKS
def test_the_trainer_evaluates_and_predicts(seen: Seen, framework: str, ranks: int) -> None:
    for rank in seen(framework, ranks):
        assert rank["loss is finite"]
        assert rank["predict"] == list(range(TRAINING, COUNT))
