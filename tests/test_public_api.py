"""What is public: one list, whose names are there, are documented, and cost nothing until they are used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import packfmt

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "h5py", "pyarrow", "PIL", "numpy", "lmdb", "click")
SECONDS = 2.0  # for an import that should take a hundredth of it; for machines under load

NAMES = [name for name in packfmt.__all__ if not name.startswith("_")]


@pytest.fixture(scope="module")
def documents() -> str:
    return "".join((ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "docs/guide.md"))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there(name: str) -> None:
    value = getattr(packfmt, name)
    assert value.__name__ == name
    assert value.__module__.startswith("packfmt.")


@pytest.mark.parametrize("name", NAMES)
def test_each_name_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(packfmt, name))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_documented(name: str, documents: str) -> None:
    assert re.search(rf"\bpackfmt\.{name}\b|`{name}\b", documents), f"neither README.md nor docs/guide.md has {name}"


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md"])
def test_documents_name_only_what_is_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    used = set(re.findall(r"\bpackfmt\.(\w+)", code))
    modules = {path.stem for path in (ROOT / "packfmt").iterdir()}
    assert not used - set(packfmt.__all__) - modules


def test_the_list_is_sorted_and_has_no_name_twice() -> None:
    assert sorted(set(NAMES)) == NAMES


def test_dir_shows_the_list() -> None:
    assert set(packfmt.__all__) <= set(dir(packfmt))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        packfmt.nothing  # noqa: B018


def test_the_version_is_the_package_s() -> None:
    from importlib.metadata import version

    assert packfmt.__version__ == version("packfmt")


def test_the_changelog_knows_the_version() -> None:
    assert f"## {packfmt.__version__}" in (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_importing_loads_nothing_heavy() -> None:
    loaded = run(f"import sys, packfmt; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_reading_and_packing_load_neither_torch_nor_h5py_nor_pyarrow() -> None:
    code = "import sys, packfmt; packfmt.open, packfmt.pack, packfmt.verify, packfmt.unpack, packfmt.BlockBatchSampler"
    loaded = run(f"{code}; print([name for name in ('torch', 'h5py', 'pyarrow') if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_command_line_loads_no_torch() -> None:
    code = "import sys, packfmt.cli; packfmt.cli.group.get_command(None, 'pack'); print('torch' in sys.modules)"
    assert run(code).strip() == "False"


def test_importing_is_fast() -> None:
    code = "import time; t = time.perf_counter(); import packfmt; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(2)) < SECONDS
