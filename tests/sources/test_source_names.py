"""Naming shards, telling keys apart, counting notes, class folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfmt.errors import SourceError
from packfmt.sources.inputs import (
    CountedNotes,
    FolderClasses,
    SeenKeys,
    expand_inputs,
    free_name,
    is_hidden,
    short_names,
)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_numbered_range_keeps_its_zeros(tmp_path: Path) -> None:
    touch(tmp_path, "x-008.tar", "x-009.tar", "x-010.tar", "x-011.tar")
    assert names(expand_inputs(tmp_path / "x-{008..010}.tar")) == ["x-008.tar", "x-009.tar", "x-010.tar"]


def test_lists_in_braces_and_two_patterns(tmp_path: Path) -> None:
    touch(tmp_path, "a-1", "a-2", "b-1", "b-2")
    assert names(expand_inputs(str(tmp_path / "{b,a}-{1..2}"))) == ["b-1", "b-2", "a-1", "a-2"]


def test_a_glob_is_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b.tar", "a.tar")
    assert names(expand_inputs(tmp_path / "*.tar")) == ["a.tar", "b.tar"]


def test_an_existing_name_is_no_pattern(tmp_path: Path) -> None:
    touch(tmp_path, "x{1,2}[3].tar")
    assert names(expand_inputs(tmp_path / "x{1,2}[3].tar")) == ["x{1,2}[3].tar"]


@pytest.mark.parametrize("folder", ["[1]", "a*", "{a,b}", "{0..1}", "{0}"])
def test_an_existing_folder_is_no_pattern(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    touch(tmp_path / folder, "x-0.tar", "x-1.tar")
    for pattern in ("*.tar", "x-[01].tar", "x-{0..1}.tar"):
        assert names(expand_inputs(tmp_path / folder / pattern)) == ["x-0.tar", "x-1.tar"]
    with pytest.raises(FileNotFoundError, match=r"\[Errno 2\] no such file: "):
        expand_inputs(tmp_path / folder / "missing.tar")


def test_a_missing_shard_of_a_range_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "x-0", "x-2")
    with pytest.raises(FileNotFoundError, match=r"x-1"):
        expand_inputs(tmp_path / "x-{0..2}")


def test_the_same_file_twice_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "x")
    with pytest.raises(SourceError, match="same file"):
        expand_inputs([tmp_path / "x", tmp_path / "." / "x"])


def test_an_endless_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="more than"):
        expand_inputs(tmp_path / "x-{0..999999999999}")


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(SourceError, match="no shard"):
        expand_inputs([])


def test_equal_names_in_two_folders_stay_apart(tmp_path: Path) -> None:
    touch(tmp_path, "a/0.tar", "b/0.tar")
    assert short_names([tmp_path / "a" / "0.tar", tmp_path / "b" / "0.tar"]) == ["a/0.tar", "b/0.tar"]


@given(st.lists(st.text(max_size=3), max_size=200))
def test_seen_keys_remember_as_a_dict_does(keys: list[str]) -> None:
    seen, model = SeenKeys(), {}
    for place, key in enumerate(keys):
        assert seen.add(key, place) == model.get(key)
        model.setdefault(key, place)


def test_seen_keys_survive_growth() -> None:
    seen = SeenKeys()
    assert all(seen.add(str(number), number) is None for number in range(5000))
    assert all(seen.add(str(number), -1) == number for number in range(5000))


def test_notes_count_in_place_and_leave_others_alone() -> None:
    notes = ["first"]
    counted = CountedNotes(notes)
    counted.add("odd", 2)
    counted.add("even", 0)
    counted.add("odd")
    assert notes == ["first", "3 odd"]
    counted.clear()
    assert notes == ["first"]


def test_folders_give_classes_below_a_shared_top() -> None:
    classes = FolderClasses({"set/dog", "set/cat", "set/cat/young"}, {"set/empty", "other"})
    assert classes.names == ("cat", "dog", "empty")
    assert classes.label("set/cat/young/1.jpg") == 0
    assert classes.label("set/1.jpg") is None


@pytest.mark.parametrize("parents", [set(), {""}, {"images"}, {"", "images"}])
def test_flat_sets_have_no_classes(parents: set[str]) -> None:
    assert FolderClasses(parents).names == ()


def test_an_image_above_the_class_folders_has_no_class() -> None:
    classes = FolderClasses({"", "a", "b"})
    assert (classes.names, classes.label("stray.jpg"), classes.label("b/1.jpg")) == (("a", "b"), None, 1)


@pytest.mark.parametrize("key", [".DS_Store", "a/._x.jpg", "__MACOSX/x.jpg", ".git/x.jpg", "a/Thumbs.db"])
def test_hidden_names(key: str) -> None:
    assert is_hidden(key)


@pytest.mark.parametrize("key", ["a.jpg", "./a.jpg", "../a.jpg", "a..b/c.jpg", "_x.jpg"])
def test_names_that_are_not_hidden(key: str) -> None:
    assert not is_hidden(key)


def test_names_that_the_pack_has_are_changed() -> None:
    assert [free_name(name, ["label"]) for name in ("width", "label", "age")] == ["source_width", "source_label", "age"]
