"""What the demo draws and measures: the same images every time, and no time before the results agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packfmt import storage
from packfmt.demo import IMAGES, PACK, SHAPES, draw, pack_stages, training_stages
from packfmt.errors import PackfmtError

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

COUNT = 20


def test_a_picture_depends_on_its_arguments_only() -> None:
    assert np.array_equal(draw(1, 0, 5), draw(1, 0, 5))
    assert len({draw(*arguments).tobytes() for arguments in ((1, 0, 5), (1, 0, 6), (1, 1, 5), (2, 0, 5))}) == 4


@pytest.mark.parametrize("label", range(len(SHAPES)))
def test_every_class_has_a_picture(label: int) -> None:
    picture = draw(label, 0, 0)
    assert (picture.shape, picture.dtype) == ((256, 256, 3), np.uint8)
    assert picture.std() > 20


def test_the_same_images_every_time(tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert [stage.name for stage in pack_stages(tmp_path / name, COUNT)] == ["draw", "pack", "verify"]
    first, second = (storage.open(tmp_path / name / PACK) for name in ("first", "second"))
    assert first.content_id == second.content_id
    assert (len(first), first.classes) == (COUNT, tuple(SHAPES))


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(FileExistsError, match="not an empty folder"):
        list(pack_stages(tmp_path, COUNT))


@pytest.mark.torch
def test_files_and_pack_do_the_same_work(tmp_path: Path) -> None:
    list(pack_stages(tmp_path, COUNT))
    stages = list(training_stages(tmp_path))
    assert all(stage.seconds > 0 and stage.plain is not None and stage.plain > 0 for stage in stages)


@pytest.mark.torch
def test_no_time_is_given_where_the_two_disagree(tmp_path: Path) -> None:
    list(pack_stages(tmp_path / "other", COUNT, seed=1))
    list(pack_stages(tmp_path / "demo", COUNT))
    (tmp_path / "demo" / IMAGES).rename(tmp_path / "gone")
    (tmp_path / "other" / IMAGES).rename(tmp_path / "demo" / IMAGES)
    with pytest.raises(PackfmtError, match="differ by"):
        list(training_stages(tmp_path / "demo"))
