"""Paths out of tables and annotation files stay inside the root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packfmt.errors import SourceError
from packfmt.sources.inputs import inside_key, read_inside, resolve_inside

ESCAPES = [
    "../secret.txt",
    "a/../../secret.txt",
    "a/b/../../../secret.txt",
    "./../secret.txt",
    "link_out/secret.txt",
    "file_link",
    "a/link_up/../secret.txt",
    "/etc/hostname",
    "",
    "a\0b",
    "\ud800.jpg",
    "..",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "x.jpg").write_bytes(b"inside")
    (tmp_path / "secret.txt").write_bytes(b"canary")
    (root / "link_out").symlink_to(tmp_path)
    (root / "file_link").symlink_to(tmp_path / "secret.txt")
    (root / "a" / "link_up").symlink_to(root)
    (root / "good_link").symlink_to(root / "a" / "x.jpg")
    return root


@pytest.mark.parametrize("relative", ESCAPES)
def test_nothing_outside_is_read(tree: Path, relative: str) -> None:
    with pytest.raises(SourceError):
        read_inside(tree, relative, 1000)


@pytest.mark.parametrize("relative", ["a/x.jpg", "./a/x.jpg", "a/b/../x.jpg", "good_link", "a/link_up/a/x.jpg"])
def test_what_lies_inside_is_read(tree: Path, relative: str) -> None:
    assert read_inside(tree, relative, 1000) == b"inside"


def test_an_absolute_path_inside_is_read_and_keyed(tree: Path) -> None:
    path = str(tree / "a" / "x.jpg")
    assert read_inside(tree, path, 1000) == b"inside"
    assert inside_key(tree, path) == "a/x.jpg"


def test_a_sibling_with_the_root_as_prefix_is_outside(tree: Path) -> None:
    sibling = tree.parent / "root2"
    sibling.mkdir()
    (sibling / "x.jpg").write_bytes(b"canary")
    with pytest.raises(SourceError, match="outside"):
        resolve_inside(tree, "../root2/x.jpg")


def test_a_link_loop_ends(tree: Path) -> None:
    (tree / "one").symlink_to(tree / "two")
    (tree / "two").symlink_to(tree / "one")
    with pytest.raises((SourceError, OSError)):
        read_inside(tree, "one", 1000)


def test_a_pipe_does_not_block(tree: Path) -> None:
    os.mkfifo(tree / "pipe.jpg")
    with pytest.raises(SourceError, match="regular"):
        read_inside(tree, "pipe.jpg", 1000)


def test_a_large_file_is_refused(tree: Path) -> None:
    with pytest.raises(SourceError, match="at most 3"):
        read_inside(tree, "a/x.jpg", 3)


def test_a_missing_file_is_told_apart(tree: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_inside(tree, "a/none.jpg", 3)


@pytest.mark.parametrize(("relative", "key"), [("./a//x.jpg", "a/x.jpg"), ("a/b/../x.jpg", "a/x.jpg"), ("ü b", "ü b")])
def test_keys_are_normalised(tree: Path, relative: str, key: str) -> None:
    assert inside_key(tree, relative) == key


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["..", ".", "", "a", "b", "link_out", "a/link_up", "/", "x.jpg"]), max_size=6))
def test_every_path_is_inside_or_refused(tree: Path, parts: list[str]) -> None:
    try:
        found = resolve_inside(tree, "/".join(parts))
    except SourceError:
        return
    assert found == tree.resolve() or tree.resolve() in found.parents
