"""Several ranks see what one process sees: every sample once, in the same global batches, with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="ranks need torch")
pytest.importorskip("torch.distributed", reason="this torch has no torch.distributed")

import ranks_program  # noqa: E402  (after the skips)
from make import jpeg  # noqa: E402
from train_inputs import image_columns  # noqa: E402

import packfmt  # noqa: E402

COUNT = 21  # two global batches of 8, and one of 5
RANKS = 2
SECONDS = 120  # a hang is a failure

modes = pytest.mark.parametrize("partial", ranks_program.MODES)
packs = pytest.mark.parametrize("pack", ["made", "clothing"])


def write_pack(path: Path, images: list[bytes]) -> Path:
    """A pack whose records know their numbers."""
    with packfmt.create(path) as writer:
        for number, data in enumerate(images):
            writer.write(data, key=str(number), label=number % 3, number=number, **image_columns(data))
    return path


def small_photos(folder: Path) -> list[bytes]:
    """The first few of the clothes, in order of their names."""
    return [file.read_bytes() for file in sorted(folder.glob("clothing/test/*/*.jpg"))[:COUNT]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packs")
    found = {"made": write_pack(folder / "made.bin", [jpeg(20, 24, seed=seed) for seed in range(COUNT)])}
    if data := os.environ.get("PACKFMT_TEST_DATA"):
        found["clothing"] = write_pack(folder / "clothing.bin", small_photos(Path(data)))
    return found


@pytest.fixture(scope="module")
def seen(paths, tmp_path_factory) -> dict[str, list[dict]]:
    """Pack to what each rank saw, from one launch of all ranks."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [ranks_program.__file__, str(out), *map(str, paths.values())]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [rank[place] for rank in ranks] for place, name in enumerate(paths)}


@pytest.fixture(scope="module")
def alone(paths) -> dict[str, dict]:
    """Pack to what one process sees."""
    return {name: ranks_program.look_at(str(path), 1) for name, path in paths.items()}


@pytest.fixture
def pair(pack, seen, alone):
    """What the ranks saw, and what one process sees."""
    if pack not in seen:
        pytest.skip("PACKFMT_TEST_DATA is not set: no real images")
    return seen[pack], alone[pack]


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Global batches from the ranks' batches."""
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


@packs
class TestRanks:
    @modes
    def test_ranks_come_from_torch_distributed(self, pair, partial):
        assert [rank[partial]["rank"] for rank in pair[0]] == [[0, RANKS], [1, RANKS]]

    @modes
    def test_every_rank_has_as_many_batches(self, pair, partial):
        batches = {len(rank[partial]["batches"]) for rank in pair[0]}
        epoch = {"keep": 3, "drop": 2, "pad": 3}[partial]
        assert batches == {epoch * ranks_program.EPOCHS}
        assert {rank[partial]["length"] for rank in pair[0]} == {epoch}

    @modes
    def test_global_batches_are_those_of_one_process(self, pair, partial):
        ranks, one = pair
        assert joined([rank[partial]["batches"] for rank in ranks]) == one[partial]["batches"]

    @modes
    def test_loss_curve_is_that_of_one_process(self, pair, partial):
        ranks, one = pair
        assert ranks[0][partial]["losses"] == ranks[1][partial]["losses"]
        assert ranks[0][partial]["losses"] == pytest.approx(one[partial]["losses"], rel=1e-9)

    @modes
    def test_no_sample_comes_twice_but_to_pad(self, pair, partial):
        batches = joined([rank[partial]["batches"] for rank in pair[0]])
        epochs = [batches[: len(batches) // 2], batches[len(batches) // 2 :]]
        again = {"keep": 0, "drop": 0, "pad": 3}[partial]
        distinct = {"keep": COUNT, "drop": COUNT - 5, "pad": COUNT}[partial]
        for epoch in epochs:
            samples = list(chain(*epoch))
            assert len(set(samples)) == distinct
            assert len(samples) - distinct == again == pair[0][0][partial]["repeated"]
        assert epochs[0] != epochs[1]

    def test_a_plain_dataloader_sees_the_same(self, pair):
        ranks, one = pair
        assert joined([rank["dataloader"] for rank in ranks]) == one["dataloader"]
        assert one["dataloader"] == one["keep"]["batches"][:3]

    def test_a_last_batch_of_one_sample_leaves_no_rank_waiting(self, pair):
        assert [rank["tail"] for rank in pair[0]] == [[4, 1], [4, 1]]

    def test_a_stream_is_shared_out(self, pair):
        assert [rank["stream"]["keep"] for rank in pair[0]] == [list(range(0, COUNT, 2)), list(range(1, COUNT, 2))]
        assert [rank["stream"]["drop"] for rank in pair[0]] == [list(range(0, COUNT - 1, 2)), list(range(1, COUNT, 2))]

    def test_one_process_goes_on_from_the_state_of_two_ranks(self, pair, paths, pack):
        ranks, one = pair
        assert ranks[0]["keep"]["state"] == ranks[1]["keep"]["state"]
        dataset = ranks_program.dataset_of(str(paths[pack]))
        loader = packfmt.Loader(dataset, ranks_program.GLOBAL_BATCH, seed=2)
        loader.load_state_dict(ranks[0]["keep"]["state"])
        assert [targets["number"].tolist() for _, targets in loader] == one["keep"]["batches"][1:3]
        dataset.close()


def test_a_sampler_made_before_the_process_group_is_split_all_the_same(seen):
    ranks = [rank["early"] for rank in seen["made"]]
    assert joined(ranks) == [
        batch.tolist() for batch in packfmt.BlockBatchSampler(COUNT, ranks_program.GLOBAL_BATCH, seed=2).batches(0)
    ]


def test_spawned_workers_know_their_rank(seen):
    assert [rank["spawned"] for rank in seen["made"]] == [list(range(0, COUNT, 2)), list(range(1, COUNT, 2))]
