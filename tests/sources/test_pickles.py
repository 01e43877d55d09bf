"""Pickles are followed, never run."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make import Bomb, encoded

from packfmt.sources.lmdb.pickles import PickleError, read_pickle
from packfmt.sources.values import Array, Opaque, ValueFault, numbers, sample_of

PROTOCOLS = range(6)

_watchers: list[list[str]] = []


@contextmanager
def watched() -> Iterator[list[str]]:
    """The audit events of what runs within."""
    if not hasattr(watched, "hooked"):
        sys.addaudithook(lambda event, _: _watchers[-1].append(event) if _watchers else None)
        watched.hooked = True  # a hook stays for the life of the process: one is enough
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain, st.sampled_from(PROTOCOLS))
@settings(max_examples=200, deadline=None)
def test_plain_values_come_out_as_unpickling_would_give_them(value: object, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [np.array([7]), np.int64(-3), np.float32(1.5), np.arange(6, dtype=">i4").reshape(2, 3), np.array([], np.uint8)],
    ids=["row", "int", "float", "big-endian", "empty"],
)
def test_numpy_arrays_come_out_of_their_bytes(protocol: int, array: np.ndarray) -> None:
    found = read_pickle(pickle.dumps((array,), protocol))[0]
    assert isinstance(found, Array)
    np.testing.assert_array_equal(numbers(found), array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bomb_beside_the_image_never_goes_off(tmp_path: Path, protocol: int, place: int) -> None:
    canary = tmp_path / "canary"
    value: list[object] = [encoded(1), 5]
    value.insert(place, Bomb(canary))
    found = sample_of(read_pickle(pickle.dumps(tuple(value), protocol)))
    assert (found.image, found.label) == (encoded(1), 5)
    assert any("open" in name for name in found.opaque)
    assert not canary.exists()


HAND_MADE = {
    "inst": b"(S'echo'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'echo'\no.",
    "newobj": b"cos\nsystem\n(S'echo'\nt\x81.",
    "newobj_ex": b"\x80\x04cos\nsystem\n(S'echo'\nt}\x92.",
    "build": b"cos\nsystem\n(S'echo'\ntR}b.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04echo\x85R.",
    "extension": b"\x80\x02\x82\x01)R.",
    "persistent": b"Pname\n.",
    "binary persistent": b"\x8c\x04nameQ.",
    "nested pickle": b"cpickle\nloads\n(S'cos\\nsystem\\n.'\ntR.",
    "eval": b"c__builtin__\neval\n(S'1'\ntR.",
    "getattr chain": b"cbuiltins\ngetattr\n(cos\n_exit\nS'__call__'\ntR.",
    "out-of-band": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_every_way_to_call_something_stays_a_name(name: str) -> None:
    with watched() as events:
        assert isinstance(read_pickle(HAND_MADE[name]), Opaque)
    assert not {"pickle.find_class", "exec", "compile", "os.system", "import", "open"} & set(events)


def test_the_watch_sees_what_unpickling_does() -> None:
    with watched() as events:
        pickle.loads(pickle.dumps(np.int64))
    assert "pickle.find_class" in events


@pytest.mark.parametrize(
    "data", [b"", b".", b"\x80", b"t.", b"(", b"0.", b"\x80\x04h\x00.", b"\xff\xd8", b"X\xff\xff\xff\xff", b"]" * 50]
)
def test_damaged_pickles_are_errors(data: bytes) -> None:
    with pytest.raises(PickleError):
        read_pickle(data)


def test_a_cut_at_every_place_is_an_error() -> None:
    whole = pickle.dumps((encoded(1), np.array([3])))
    for size in range(len(whole)):
        with pytest.raises(PickleError):
            read_pickle(whole[:size])


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_value_or_a_pickle_error(data: bytes) -> None:
    with suppress(PickleError):
        read_pickle(data)


def test_shared_parts_do_not_multiply() -> None:
    value: object = [b"x"]
    for _ in range(60):
        value = [value, value]
    assert read_pickle(pickle.dumps(value)) is not None


def test_strings_of_python_2_are_bytes_again() -> None:
    image = encoded(2, "PNG")
    text = repr(image)[1:]
    for found in (b"(S" + text.encode() + b"\nI3\nt.", b"(T" + len(image).to_bytes(4, "little") + image + b"K\x03t."):
        assert sample_of(read_pickle(found)).image == image
        assert sample_of(read_pickle(found)).label == 3


@pytest.mark.parametrize(
    "array",
    [
        Array("|O", (1,), b"12345678"),
        Array("<i8", (2,), b"12345678"),
        Array("<i8", (2**62, 4), b""),
        Array("V8", (1,), b"12345678"),
        Array("f16", (1,), b"1" * 16),
    ],
)
def test_arrays_of_other_types_or_sizes_are_refused(array: Array) -> None:
    with pytest.raises(ValueFault):
        numbers(array)


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ((b"IMAGE", 3), 3),
        (([b"IMAGE"], Array("<i8", (1,), b"\x05" + b"\0" * 7)), [5]),
        ({"height": 32, "image": b"IMAGE", "label": 4}, 4),
        ((b"IMAGE", 0.5), 0.5),
        ((b"IMAGE", [1.0, 2.0]), [1.0, 2.0]),
        ((b"IMAGE", "word"), "word"),
        ((b"IMAGE",), None),
    ],
)
def test_the_label_is_found_beside_the_image(value: object, label: object) -> None:
    image = encoded(3)

    def filled(part: object) -> object:
        if part == b"IMAGE":
            return image
        if isinstance(part, dict):
            return {key: filled(item) for key, item in part.items()}
        return type(part)(filled(item) for item in part) if isinstance(part, list | tuple) else part

    found = sample_of(filled(value))
    assert (found.image, found.label) == (image, label)


def test_two_images_in_one_value_are_refused() -> None:
    with pytest.raises(ValueFault, match="2 images"):
        sample_of((encoded(1), encoded(2)))
