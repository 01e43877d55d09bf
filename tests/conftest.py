"""Fixtures that several tests share. Being here, it also puts this folder on the path: ``import make`` works."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from make import jpeg, png

pytest.register_assert_rewrite("contracts.reader")

# The same examples every time, however slow the machine is.
settings.register_profile("packfmt", deadline=None, derandomize=True)
settings.load_profile("packfmt")

# Without torch, which not every Python has, the rest runs: tools/install.sh test-matrix asks for that.
TORCH = find_spec("torch") is not None
IMPORTS_TORCH = re.compile(r"^(from|import) (torch|packfmt\.training|training_packs)\b", re.MULTILINE)
collect_ignore = (
    []
    if TORCH
    else [
        str(path.relative_to(Path(__file__).parent))
        for path in Path(__file__).parent.rglob("test_*.py")
        if IMPORTS_TORCH.search(path.read_text("utf-8"))
    ]
)


def pytest_report_header() -> list[str]:
    return [] if TORCH else [f"torch is not installed: {len(collect_ignore)} files that need it are left out"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not TORCH:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))


def pytest_configure() -> None:
    """Let Ctrl-C through: a shell has what it starts in the background ignore it, and so would what the tests start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Take back the command line's handler of SIGTERM, which what other tests fork would inherit."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real images that PACKFMT_TEST_DATA names."""
    folder = os.environ.get("PACKFMT_TEST_DATA")
    if not folder:
        pytest.skip("PACKFMT_TEST_DATA is not set: no real images")
    return Path(folder)


@pytest.fixture(scope="session")
def pictures() -> list[bytes]:
    """Six small JPEGs, each different."""
    return [jpeg(20 + i, 24, seed=i) for i in range(6)]


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Mapping[str | bytes, bytes]], Path]:
    """A function that makes a folder of these files (path to content; a path that ends in "/" is an empty folder)."""

    def make(files: Mapping[str | bytes, bytes]) -> Path:
        root = tmp_path / "images"
        root.mkdir(exist_ok=True)
        for name, content in files.items():
            path = Path(os.fsdecode(os.path.join(os.fsencode(root), os.fsencode(name))))
            if os.fsencode(name).endswith(b"/"):
                path.mkdir(parents=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return root

    return make


@pytest.fixture
def tree(plant: Callable[[Mapping[str, bytes]], Path], pictures: list[bytes]) -> Path:
    """Two classes of two images each, one of them a PNG named .jpg; ``expected_tree`` is what a pack of it holds."""
    return plant(tree_files(pictures))


@pytest.fixture
def expected_tree(pictures: list[bytes]) -> dict[str, bytes]:
    """Key to content of ``tree``, in order."""
    return dict(sorted(tree_files(pictures).items()))


def tree_files(pictures: list[bytes]) -> dict[str, bytes]:
    return {"dog/1.jpg": pictures[0], "dog/2.JPEG": pictures[1], "cat/a b.jpg": png(), "cat/0.jpg": pictures[2]}
