"""Every benchmark runs, on a few small images, so that none has rotted when it is needed; figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.photos import jpegs

ROOT = Path(__file__).parents[1]

# A folder in the arguments is the test's own.
RUNS = {
    "accuracy": ["--epochs", "1", "--seeds", "1", "--size", "32"],
    "cold": ["FOLDER", "--gigabytes", "0.005", "--bytes", "10000", "--rounds", "1"],
    "convert": ["FOLDER", "--count", "40", "--rounds", "1"],
    "damage": ["--photos", "8"],
    "decode": ["--count", "32", "--rounds", "1"],
    "random_access": ["FOLDER", "--count", "40", "--rounds", "1"],
    "sampling": ["--records", "100000", "--batch-size", "64"],
    "small": ["--sizes", "64", "--rounds", "1", "--times", "1"],
    "stats_overhead": ["--records", "128", "--side", "32", "--rounds", "1"],
    "storage": ["FOLDER", "--count", "40", "--rounds", "1", "--large", "1000"],
    "training": ["--rounds", "1", "--batches", "2", "--processes", "1", "--epochs", "3"],
}
WITH_TORCH = {"accuracy", "decode", "small", "stats_overhead", "training"}
NO_BENCHMARK = {"__init__", "photos", "timing"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated photos that lie as the real ones do, which PACKFMT_TEST_DATA names elsewhere."""
    root = tmp_path_factory.mktemp("data")
    images = jpegs(8_000, 200, 160, 24)
    for part in ("train", "test", "validation"):
        for number in range(288 if part == "train" else 24):
            path = root / "clothing" / part / f"class{number % 3}" / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(images[number % len(images)])
    return root


def test_none_is_left_out() -> None:
    found = {path.stem for path in (ROOT / "tools" / "bench").glob("*.py")}
    assert found - NO_BENCHMARK == set(RUNS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.torch] if name in WITH_TORCH else []) for name in RUNS]
)
def test_it_runs(name: str, photos: Path, tmp_path: Path) -> None:
    arguments = [str(tmp_path) if argument == "FOLDER" else argument for argument in RUNS[name]]
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:packfmt", "-m", f"tools.bench.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PACKFMT_TEST_DATA": str(photos)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cores" in done.stdout  # the line on the machine, with which each of them begins
