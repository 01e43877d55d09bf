"""Damaged JPEGs: what Pillow refuses is never shown as a picture, by any decoder, unless pixel for pixel as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make
import numpy as np
import pytest

import packfmt
from packfmt.errors import DecodeError
from packfmt.images import libjpeg
from packfmt.images.decode import Decoder
from tools.bench.damage import KINDS, Damage, by_pillow, damaged, photos_of
from tools.bench.photos import jpegs

Decode = Callable[[bytes], np.ndarray]


def into(data: bytes) -> np.ndarray:
    """As training decodes: a chunk of one, into a slot of the image's size."""
    whole = Decoder(partial=True).decode(data)
    out = np.empty((1, *whole.shape), np.uint8)
    failures = Decoder().decode_into([data], out)
    if failures:
        raise DecodeError(failures[0][1])
    return out[0]


DECODERS: dict[str, Decode] = {"decode": packfmt.decode, "decode_into": into}


def shown(decode: Decode, data: bytes) -> np.ndarray | None:
    try:
        return decode(data)
    except DecodeError:
        return None


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    """Baseline, progressive, gray, with restart markers, of several sizes."""
    made = jpegs(8_000, 200, 160, 8) + jpegs(2_000, 64, 64, 8)
    picture = make.picture(96, 80)
    return [
        *made,
        make.saved(picture, "JPEG", progressive=True),
        make.saved(picture, "JPEG", restart_marker_blocks=2),
        make.saved(picture[..., 0], "JPEG"),
        make.saved(picture, "JPEG", optimize=True, subsampling=0),
    ]


def check(decode: Decode, photos: list[bytes], kind: Damage, each: int) -> None:
    for number, (whole, broken) in enumerate(damaged(photos, kind, each)):
        pixels = shown(decode, broken)
        if pixels is not None and by_pillow(broken) is None:
            np.testing.assert_array_equal(pixels, decode(whole), err_msg=f"{kind.__doc__} {number}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("decoder", DECODERS)
def test_what_pillow_refuses_is_not_shown(decoder: str, kind: Damage, photos: list[bytes]) -> None:
    check(DECODERS[decoder], photos, kind, 10)


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_so_it_is_of_real_photos(kind: Damage, data: Path) -> None:
    check(packfmt.decode, photos_of(data / "clothing", 40) + photos_of(data / "odd", 40), kind, 1)


def test_damage_is_found_at_all(photos: list[bytes]) -> None:
    """The law would hold too of a decoder that shows nothing, and of damage that harms nobody."""
    assert all(shown(packfmt.decode, data) is not None for data in photos)
    for kind in KINDS:
        assert any(shown(packfmt.decode, broken) is None for _, broken in damaged(photos, kind, 10)), kind.__doc__


HARMLESS = {
    "JFIF revision": lambda data: data.replace(b"JFIF\0\x01", b"JFIF\0\x09", 1),
    "SOS parameters": lambda data: data.replace(b"\x11\x03\x11\x00\x3f\x00", b"\x11\x03\x11\x00\x00\x00", 1),
    "Adobe transform": lambda data: make.adobe(data, 77),
    "ICC profile": lambda data: make.with_segment(data, 0xE2, b"ICC_PROFILE\0\x09\x02broken"),
    "bytes between segments": lambda data: data[: make.frame_at(data)] + b"junk" + data[make.frame_at(data) :],
    "bytes before the end": lambda data: data[:-2] + b"\0" * 40 + data[-2:],
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_what_is_harmless_is_decoded_as_pillow_does(decoder: str, name: str) -> None:
    whole = make.jpeg()
    odd = HARMLESS[name](whole)
    assert odd != whole
    np.testing.assert_array_equal(DECODERS[decoder](odd), by_pillow(odd))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_hides_no_damage(name: str) -> None:
    whole = make.jpeg()
    scan = whole.index(b"\xff\xda") + 40
    broken = HARMLESS[name](whole[:scan] + b"\xff\xc4" + whole[scan:])
    with pytest.raises(DecodeError, match="damaged JPEG"):
        packfmt.decode(broken)


DIVIDED = [make.jpeg(restart_marker_blocks=2), make.jpeg(restart_marker_blocks=2, progressive=True)]
divided = pytest.mark.parametrize("whole", DIVIDED, ids=["one pass", "progressive"])


@divided
@pytest.mark.parametrize("stray", [bytes(40), b"stray bytes"], ids=["zeros", "text"])
def test_bytes_before_the_end_are_harmless_behind_restart_markers_too(whole: bytes, stray: bytes) -> None:
    odd = whole[:-2] + stray + whole[-2:]
    np.testing.assert_array_equal(packfmt.decode(odd), by_pillow(odd))


def restarts(data: bytes) -> list[int]:
    """Where the restart markers are."""
    return [found.start() for found in re.finditer(rb"\xff[\xd0-\xd7]", data) if found.start() > data.find(b"\xff\xda")]


@divided
def test_each_lost_restart_marker_is_damage(whole: bytes) -> None:
    places = restarts(whole)
    assert len(places) > 3
    assert [at for at in places if shown(packfmt.decode, whole[:at] + whole[at + 2 :]) is not None] == []


@divided
def test_bytes_left_over_before_a_restart_marker_are_damage(whole: bytes) -> None:
    at = restarts(whole)[1]
    with pytest.raises(DecodeError, match=r"damaged JPEG .*extraneous bytes before marker 0xd1"):
        packfmt.decode(whole[:at] + b"left over bytes" + whole[at:])


def repeated_scans(times: int) -> bytes:
    """A flat colour JPEG of one scan for each component, whose first comes often, each followed by stray bytes that
    libjpeg does not mind, and the last by more of them."""
    gray = make.saved(np.full((16, 16), 128, np.uint8), "JPEG")
    frame, scan = make.frame_at(gray), gray.index(b"\xff\xda")
    components = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    head = gray[:frame] + b"\xff\xc0\0\x11" + gray[frame + 4 : frame + 9] + b"\3" + components
    scans = [b"\xff\xda\0\x08\1" + bytes([number, 0]) + b"\0\x3f\0" + gray[scan + 10 : -2] for number in (1, 2, 3)]
    return head + gray[frame + 13 : scan] + (scans[0] + b"U" * 3) * times + b"U" * 3 + scans[1] + scans[2] + make.EOI


def test_stray_bytes_do_not_multiply_the_work_of_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are is found by trying, and a file of many passes takes long to decode."""
    calls: list[int] = []
    real = libjpeg.decode_jpeg

    def counted(data: bytes, *args: Any, **options: Any) -> np.ndarray:
        calls.append(len(data))
        return real(data, *args, **options)

    monkeypatch.setattr(libjpeg, "decode_jpeg", counted)
    np.testing.assert_array_equal(packfmt.decode(repeated_scans(1)), 128)
    assert len(calls) > 1
    calls.clear()
    with pytest.raises(DecodeError, match=r"damaged JPEG .*extraneous bytes"):
        packfmt.decode(repeated_scans(400))
    assert len(calls) <= 4


@pytest.mark.parametrize("marker", [b"\xff\xda", b"\xff\xc4"])
def test_bytes_between_passes_are_passed_over_as_pillow_does(marker: bytes) -> None:
    data = make.progressive_jpeg()
    place = data.index(marker, data.index(b"\xff\xda") + 2)
    odd = data[:place] + b"stray bytes" + data[place:]
    np.testing.assert_array_equal(packfmt.decode(odd), by_pillow(odd))


@pytest.mark.parametrize("made", [make.jpeg, make.progressive_jpeg, make.rare_subsampling_jpeg])
def test_a_marker_in_the_scan_is_damage_whoever_decodes(made: Callable[[], bytes]) -> None:
    data = made()
    place = data.rindex(b"\xff\xda") + 14
    with pytest.raises(DecodeError, match="damaged JPEG"):
        packfmt.decode(data[:place] + b"\xff\x30" + data[place:])


@pytest.mark.torch
def test_packing_verifying_and_training_agree(tmp_path: Path) -> None:
    """Stray bytes that Pillow reads are a picture for all of them; a marker in the scan is an error for all."""
    whole = make.jpeg()
    scan = whole.index(b"\xff\xda") + 40
    for name, data in {
        "good": HARMLESS["bytes between segments"](whole),
        "bad": whole[:scan] + b"\xff\x30" + whole[scan:],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_bytes(data)
        packfmt.pack(tmp_path / name, tmp_path / f"{name}.bin")
        assert packfmt.verify(tmp_path / f"{name}.bin", decode=True).ok == (name == "good")
        dataset = packfmt.MMapImageDataset(tmp_path / f"{name}.bin")
        if name == "good":
            np.testing.assert_array_equal(dataset[0][0].permute(1, 2, 0).numpy(), by_pillow(data))
        else:
            with pytest.raises(DecodeError, match="damaged JPEG"):
                dataset[0]
        dataset.close()
