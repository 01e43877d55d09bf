"""Damaged JPEGs: what Pillow refuses is never shown as a picture, by any decoder, unless pixel for pixel as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import images
import numpy as np
import pytest

import packfmt
from packfmt.errors import DecodeError
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
    picture = images.picture(96, 80)
    return [
        *made,
        images.saved(picture, "JPEG", progressive=True),
        images.saved(picture, "JPEG", restart_marker_blocks=2),
        images.saved(picture[..., 0], "JPEG"),
        images.saved(picture, "JPEG", optimize=True, subsampling=0),
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
    "Adobe transform": lambda data: images.adobe(data, 77),
    "ICC profile": lambda data: images.with_segment(data, 0xE2, b"ICC_PROFILE\0\x09\x02broken"),
    "bytes between segments": lambda data: data[: images.frame_at(data)] + b"junk" + data[images.frame_at(data) :],
    "bytes before the end": lambda data: data[:-2] + b"\0" * 40 + data[-2:],
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_what_is_harmless_is_decoded_as_pillow_does(decoder: str, name: str) -> None:
    whole = images.jpeg()
    odd = HARMLESS[name](whole)
    assert odd != whole
    np.testing.assert_array_equal(DECODERS[decoder](odd), by_pillow(odd))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_hides_no_damage(name: str) -> None:
    whole = images.jpeg()
    scan = whole.index(b"\xff\xda") + 40
    broken = HARMLESS[name](whole[:scan] + b"\xff\xc4" + whole[scan:])
    with pytest.raises(DecodeError, match="damaged JPEG"):
        packfmt.decode(broken)


@pytest.mark.parametrize("marker", [b"\xff\xda", b"\xff\xc4"])
def test_bytes_between_passes_are_passed_over_as_pillow_does(marker: bytes) -> None:
    data = images.progressive_jpeg()
    place = data.index(marker, data.index(b"\xff\xda") + 2)
    odd = data[:place] + b"stray bytes" + data[place:]
    np.testing.assert_array_equal(packfmt.decode(odd), by_pillow(odd))


@pytest.mark.parametrize("made", [images.jpeg, images.progressive_jpeg, images.rare_subsampling_jpeg])
def test_a_marker_in_the_scan_is_damage_whoever_decodes(made: Callable[[], bytes]) -> None:
    data = made()
    place = data.rindex(b"\xff\xda") + 14
    with pytest.raises(DecodeError, match="damaged JPEG"):
        packfmt.decode(data[:place] + b"\xff\x30" + data[place:])


def test_packing_verifying_and_training_agree(tmp_path: Path) -> None:
    """Stray bytes that Pillow reads are a picture for all of them; a marker in the scan is an error for all."""
    whole = images.jpeg()
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
