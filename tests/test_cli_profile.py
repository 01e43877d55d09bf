"""`packfmt profile` says where loading time goes, as a table and as JSON."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch", reason="profiling needs torch")

from click.testing import CliRunner
from train_inputs import coloured_pack

import packfmt
from packfmt.cli.profile import print_profile
from packfmt.cli.profile import profile as verb
from packfmt.training.profiling import Profile, profile

# Python 3.12 warns of forks in a process with threads; torch's own are always there.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> str:
    return str(coloured_pack(tmp_path_factory.mktemp("pack") / "small.bin", 20))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(verb, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def facts(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json"))


@pytest.mark.parametrize("workers", ["0", "1"])
def test_it_takes_as_many_batches_as_asked_over_several_epochs(pack, workers):
    found = facts(pack, "--batch-size", "8", "--crop", "16", "--batches", "7", "--workers", workers, "--threads", "1")
    assert found["batches"] == 7
    assert found["samples"] == 20 + 20 + 8
    assert found["threads"] == 1


def test_the_table_names_stages_verdict_and_slowest_samples(pack):
    output = run(pack, "--batch-size", "4", "--crop", "16", "--batches", "5")
    for word in ("images/s", "read", "decode", "transform", "collate", "waited", "batches ready", "verdict", "advice"):
        assert word in output
    assert ".jpg" in output[output.index("slowest") :]


def test_a_step_takes_the_time_it_was_given(pack):
    found = facts(pack, "--batch-size", "2", "--crop", "8", "--batches", "4", "--consume-ms", "20")
    assert found["consume"] >= 3 * 0.020  # nothing is asked for after the last batch
    assert found["seconds"] >= 4 * 0.020


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"read": 8.0, "decode": 1.0, "wait": 5.0}, "disk-bound"),
        ({"read": 1.0, "decode": 8.0, "wait": 5.0}, "decode-bound"),
        ({"read": 1.0, "decode": 2.0, "transform": 8.0, "wait": 5.0}, "transform-bound"),
        ({"read": 1.0, "decode": 8.0, "wait": 0.1, "consume": 5.0}, "consumer-bound"),
    ],
)
def test_the_table_tells_what_limits(capsys, times, verdict):
    print_profile(Profile(5.0, packfmt.LoaderStats(batches=10, samples=100, threads=2, depth=0.5, **times)))
    table = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert table["verdict"] == verdict
    assert table["rate"] == "20 images/s with 2 threads"
    assert table["advice"]


def test_images_keep_their_sizes_without_a_crop(pack):
    assert facts(pack, "--crop", "0", "--batches", "1", "--batch-size", "20")["samples"] == 20


def test_shards_are_profiled_as_one_pack(pack, tmp_path):
    other = str(coloured_pack(tmp_path / "other.bin", 10))
    assert facts(pack, other, "--crop", "8", "--batch-size", "30", "--batches", "1")["samples"] == 30


def test_a_pack_without_records_has_nothing_to_profile(tmp_path):
    dataset = packfmt.MMapImageDataset(coloured_pack(tmp_path / "none.bin", 0))
    with pytest.raises(ValueError, match=r"none\.bin.*no batch"):
        profile(packfmt.Loader(dataset, 4), 1)
    dataset.close()


def test_a_missing_torch_is_one_line_that_says_what_to_install(pack, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("packfmt.training.")]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(verb, [pack])
    assert result.exit_code == 1
    assert "pip install 'packfmt[torch]'" in result.output
