"""examples/train.py: trains, goes on after a break as if there had been none, and runs under torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="the example trains")

from train_inputs import coloured_pack  # noqa: E402  (after the skip)

import packfmt  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train.py"
EPOCHS = 2
SECONDS = 120  # a hang is a failure


class Killed(Exception):
    """Stands for whatever ends a run."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads inside torch cost more than so small a model takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    """48 images: 6 steps of 8."""
    return coloured_pack(tmp_path_factory.mktemp("pack") / "train.bin", 48)


def options(pack: Path, checkpoint: Path, *more: str) -> list[str]:
    size = ["--size", "16", "--batch-size", "8", "--epochs", str(EPOCHS), "--threads", "2", "--save-every", "2"]
    return [str(pack), "--checkpoint", str(checkpoint), *size, *more]


@pytest.fixture(scope="module")
def whole(train, pack, tmp_path_factory) -> Path:
    """The last checkpoint of a run without a break, and beside it what it printed."""
    checkpoint = tmp_path_factory.mktemp("whole") / "whole.pt"
    with redirect_stdout(StringIO()) as printed:
        train.main(options(pack, checkpoint))
    checkpoint.with_suffix(".txt").write_text(printed.getvalue())
    return checkpoint


def load(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"train loss ([\d.]+)", output)]


def test_it_learns_and_reports_every_epoch(train, pack, tmp_path, capsys):
    train.main(options(pack, tmp_path / "run.pt", "--val", str(pack), "--epochs", "6"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {epoch}" for epoch in range(1, 7)]
    assert losses("\n".join(lines))[-1] < losses("\n".join(lines))[0]
    assert float(lines[-1].split()[-1]) > 0.9  # three colours are easy
    assert load(tmp_path / "run.pt")["loader"]["epoch"] == 6


@pytest.mark.parametrize("saves", [1, 2, 3, 5], ids=["step 2", "step 4", "step 6", "step 8"])
def test_a_resumed_run_ends_as_one_without_a_break(train, pack, whole, tmp_path, monkeypatch, capsys, saves):
    checkpoint = tmp_path / "broken.pt"
    save, left = train.Run.save, [saves]

    def save_and_die(run: object, path: str) -> None:
        save(run, path)
        left[0] -= 1
        if not left[0]:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(train.Run, "save", save_and_die)
        with pytest.raises(Killed):
            train.main(options(pack, checkpoint))
    assert not same(load(checkpoint), load(whole))
    capsys.readouterr()
    train.main(options(pack, checkpoint, "--resume"))
    assert same(load(checkpoint), load(whole))
    assert whole.with_suffix(".txt").read_text().endswith(capsys.readouterr().out)


def test_resuming_without_a_checkpoint_says_so_and_starts(train, pack, whole, tmp_path, capsys):
    train.main(options(pack, tmp_path / "new.pt", "--resume"))
    assert "no " + str(tmp_path / "new.pt") in capsys.readouterr().out
    assert same(load(tmp_path / "new.pt"), load(whole))


def test_resuming_a_finished_run_changes_nothing(train, pack, whole, capsys):
    before = whole.read_bytes()
    train.main(options(pack, whole, "--resume"))
    assert whole.read_bytes() == before
    assert "epoch" not in capsys.readouterr().out


def test_a_batch_that_the_pack_cannot_fill(train, pack, tmp_path, capsys):
    with pytest.raises(SystemExit, match="images, which fill no batch of 5000 for each of 1 processes"):
        train.main([*options(pack, tmp_path / "run.pt"), "--batch-size", "5000"])
    assert "loss" not in capsys.readouterr().out


def test_profile_prints_a_table(train, pack, tmp_path, capsys):
    train.main(options(pack, tmp_path / "run.pt", "--profile"))
    output = capsys.readouterr().out
    for word in ("read", "decode", "transform", "collate", "transfer", "wait", "consume", "slowest", "-bound"):
        assert word in output


def test_two_ranks_train_as_one_process_with_their_batches_together(pack, train, tmp_path, capsys):
    arguments = options(pack, tmp_path / "ranks.pt", "--val", str(pack), "--batch-size", "4")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    train.main(options(pack, tmp_path / "one.pt", "--val", str(pack)))
    alone = capsys.readouterr().out
    assert len(losses(done.stdout)) == EPOCHS
    assert losses(done.stdout) == pytest.approx(losses(alone), abs=2e-3)
    assert load(tmp_path / "ranks.pt")["loader"] == load(tmp_path / "one.pt")["loader"]


def test_a_validation_pack_of_other_classes_is_refused(train, pack, tmp_path):
    with packfmt.create(tmp_path / "other.bin", classes=("cat",)) as writer, packfmt.open(pack) as reader:
        for record in reader:
            writer.write(record.data, key=record.key, **{**record.columns, "label": 0})
            break
    with pytest.raises(SystemExit, match="cat"):
        train.main(options(pack, tmp_path / "run.pt", "--val", str(tmp_path / "other.bin")))
