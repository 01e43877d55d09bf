"""The documents keep their word: their code runs, their links lead somewhere, their commands are those that exist.

Blocks of a document run in its order, Python ones in one namespace, all in one folder that holds ``images/``. Blocks of
other languages (``text``, ``json``) are shown only.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from packfmt.demo import SHAPES, draw
from packfmt.images.encode import encode_jpeg

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = ["README.md", "docs/guide.md", "docs/converting.md"]
FRAMEWORKS = ROOT / "docs" / "frameworks.md"  # whose sections are run one by one, where what they import is installed

# Lines of sh blocks that start with one of these are not run: they install things, need several processes, or are run
# by another test.
NOT_RUN = (
    "sh tools/install.sh",
    "pip install",
    "pip wheel",
    "git clone",
    "torchrun",
    "python -m tools.bench",
    "python examples/",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code: its language, its text, and the line it starts in."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1) for match in found]


def headings(path: Path) -> set[str]:
    """The anchors that a document's headings get."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def imported(blocks: list[Block]) -> set[str]:
    """The packages that Python blocks import."""
    nodes = [node for block in blocks if block.language == "python" for node in ast.walk(ast.parse(block.text))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def sections(path: Path) -> dict[str, list[Block]]:
    """Heading to the blocks below it; "" to those above the first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    titles = [(number, line[3:]) for number, line in enumerate(lines, 1) if line.startswith("## ")]
    found: dict[str, list[Block]] = {}
    for block in blocks(path):
        title = next((title for number, title in reversed(titles) if number < block.line), "")
        found.setdefault(title, []).append(block)
    return found


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with images/, five classes of eight, and a `packfmt` on the path."""
    for number in range(8 * len(SHAPES)):
        name = list(SHAPES)[number % len(SHAPES)]
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        data = encode_jpeg(draw(number % len(SHAPES), 0, number), 80)
        (tmp_path / "images" / name / f"{number:03}.jpg").write_bytes(data)
    program = tmp_path / "bin" / "packfmt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m packfmt.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads. Nothing of theirs is used in a child, which test_loader checks.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield tmp_path


def runnable(block: Block) -> str:
    """A sh block without the lines that are not run, and without their continuations."""
    kept, skipping = [], False
    for line in block.text.splitlines():
        skipping = skipping or line.startswith(NOT_RUN)
        kept.append("" if skipping else line)
        skipping = skipping and line.endswith("\\")
    return "\n".join(kept)


@pytest.mark.parametrize("name", RUN)
def test_code_blocks_run(name: str, workplace: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(ROOT / name):
        if block.language == "sh":
            done = subprocess.run(["sh", "-eu", "-c", runnable(block)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{name}, line {block.line}:\n{done.stdout}{done.stderr}"
        elif block.language == "python":
            # Empty lines before it, so that a traceback shows the document's own lines.
            code = compile("\n" * (block.line - 1) + block.text, ROOT / name, "exec", dont_inherit=True)
            exec(code, namespace)


@pytest.mark.parametrize("title", [title for title in sections(FRAMEWORKS) if title])
def test_frameworks_run(title: str, workplace: Path) -> None:
    needed = sections(FRAMEWORKS)
    used = [*needed[""], *needed[title]]
    missing = sorted(name for name in imported(used) if find_spec(name) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    for block in used:
        if block.language == "sh":
            subprocess.run(["sh", "-eu", "-c", runnable(block)], capture_output=True, check=True)
    # In a process of its own: frameworks warn, and change what is global.
    program = workplace / "program.py"
    program.write_text("\n".join(block.text for block in used if block.language == "python"), encoding="utf-8")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{FRAMEWORKS.name}, {title}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_has_a_language(path: Path) -> None:
    assert {block.language for block in blocks(path)} <= {"sh", "python", "text", "json", "mermaid"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https:", "http:", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in headings(there)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize(
    "command", ["sh tools/install.sh && .venv/bin/packfmt demo", "sh tools/install.sh dev && .venv/bin/pytest"]
)
def test_the_two_commands_are_in_the_readme(command: str) -> None:
    assert sum(block.text.strip() == command for block in blocks(ROOT / "README.md")) == 1


def test_continuous_integration_runs_the_readme_s_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pattern = re.search(r"grep --max-count=1 '(.*)' README.md", script)
    assert pattern is not None
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(pattern[1], line)] == ["sh tools/install.sh dev && .venv/bin/pytest"]


@pytest.mark.parametrize("script", ["tools/install.sh", ".ci/run"])
def test_scripts_are_well_formed_and_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    shell = "sh" if script.endswith(".sh") else "bash"
    subprocess.run([shell, "-n", ROOT / script], check=True)


def test_the_set_up_refuses_what_it_does_not_know() -> None:
    done = subprocess.run(["sh", ROOT / "tools" / "install.sh", "devel"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: sh tools/install.sh [dev | venv]\n")
