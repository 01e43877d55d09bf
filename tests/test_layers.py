"""The shape of the code: imports point down, outside packages have their places, modules stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "packfmt"

# From the bottom up. A module may import from layers below its own and from its own.
LAYERS = (
    {"bounded_json", "buffers", "errors", "prefetch", "record", "randomness", "version"},
    {"format", "lmdb_pages"},
    {"images"},
    {"storage"},
    {"sources"},
    {"sampling", "reports", "checking", "describing", "unpacking", "system"},
    {"packing", "converting"},
    {"training"},
    {"demo", ""},  # "" is packfmt/__init__.py, which imports what is asked of it when it is asked
    {"cli"},
)

# Outside package -> the modules that may import it; "package." stands for all of it. numpy may be anywhere.
PLACES = {
    "PIL": {"images.pillow", "training.profiling"},  # the latter as an opponent, not as a means
    "click": {"cli."},
    "defusedxml": {"sources.annotations.voc"},
    "google_crc32c": {"sources.tfrecord.framing"},
    "h5py": {"sources.hdf5.file"},
    "lmdb": {"storage.lmdb_writer"},
    "msgpack": {"sources.lmdb.msgpack"},
    "pyarrow": {"sources.parquet.source", "sources.parquet.writer"},
    "simplejpeg": {"images.libjpeg"},
    "torch": {"training."},
    "tqdm": {"cli.show"},
    "yaml": {"sources.annotations.yolo"},
    "xxhash": {"format", "storage."},
}

MOST_LINES = 600


def modules() -> dict[str, Path]:
    """Dotted name below packfmt -> file; a package has the name of its folder, packfmt itself the name ""."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, *, lazy: bool) -> Iterator[str]:
    """Full names of the modules that a module imports: at its top, or (lazy) anywhere."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively; imports here are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("packfmt.") in MODULES else str(node.module)


def own(name: str, *, lazy: bool) -> Iterator[str]:
    """Modules of packfmt that a module imports."""
    for full in imports(name, lazy=lazy):
        if full == "packfmt" or full.startswith("packfmt."):
            yield full.removeprefix("packfmt").removeprefix(".")


def layer_of(name: str) -> int:
    top = name.partition(".")[0]
    places = [number for number, layer in enumerate(LAYERS) if top in layer]
    assert places, f"packfmt.{top} has no layer yet; give it one in LAYERS"
    return places[0]


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    upward = [other for other in own(name, lazy=True) if layer_of(other) > layer_of(name)]
    assert not upward


def test_no_circles() -> None:
    graph = {name: set(own(name, lazy=False)) for name in MODULES}
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert not set(graph) - done, "these import each other in a circle"


def test_outside_packages_have_their_places() -> None:
    wrong = defaultdict(list)
    for name in MODULES:
        for full in imports(name, lazy=True):
            package = full.partition(".")[0]
            if package in sys.stdlib_module_names or package in ("packfmt", "numpy"):
                continue
            places = PLACES.get(package, set())
            if name not in places and not any(f"{name}.".startswith(place) for place in places if place[-1] == "."):
                wrong[package].append(name)
    assert not wrong


@pytest.mark.parametrize("name", MODULES)
def test_modules_stay_short(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES


def test_no_module_has_a_name_that_says_nothing() -> None:
    names = {part for name in MODULES for part in name.split(".")}
    assert not names & {"common", "helpers", "manager", "misc", "util", "utils"}


def test_the_map_names_every_module() -> None:
    """docs/architecture.md; of a folder per format its name will do."""
    named = set(re.findall(r"`([a-z_.0-9]+)`", (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")))
    formats = {"annotations", "hdf5", "isolated", "lmdb", "parquet", "tfrecord", "webdataset"}
    wanted = set()
    for name in MODULES:
        top, _, rest = name.partition(".")
        within = rest.partition(".")[0]
        wanted.add(f"{top}.{within}" if top == "sources" and within in formats else name)
    packages = {"cli", "images", "sampling", "sources", "storage", "training"}
    assert sorted(wanted - named - packages - {"", "cli.__main__"}) == []
    dotted = {name for name in named if "." in name and name.partition(".")[0] in packages}
    assert sorted(dotted - set(MODULES)) == []


def test_tools_are_not_imported() -> None:
    assert not [name for name in MODULES if any(full.partition(".")[0] == "tools" for full in imports(name, lazy=True))]


def test_the_child_that_reads_lmdb_starts_without_numpy() -> None:
    """It takes longer to import than all else there, and most layouts do without."""
    code = "import sys, packfmt.sources.lmdb.reading, packfmt.sources.isolated.child; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"
