"""Without the extra ``convert``, each format that needs it says what to install, and is still recognised."""

from __future__ import annotations

import sys
from pathlib import Path

import msgpack
import pytest
from make import example, frame, jpg, write_lmdb

from packfmt.errors import SourceError
from packfmt.sources.annotations.voc import VocSource
from packfmt.sources.annotations.yolo import YoloSource
from packfmt.sources.lmdb.msgpack import read_msgpack
from packfmt.sources.registry import open_source, recognise

INSTALL = r"pip install 'packfmt\[convert\]'"


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith(module + ".")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)


def test_tfrecord(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(example(image=[jpg()])))
    without(monkeypatch, "google_crc32c")
    assert recognise(path) == "tfrecord"
    with pytest.raises(SourceError, match=INSTALL):
        open_source(path)


def test_voc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"JPEGImages/a.jpg": jpg(), "Annotations/a.xml": b"<annotation/>"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    without(monkeypatch, "defusedxml")
    assert recognise(tmp_path) == "voc"
    with pytest.raises(SourceError, match=INSTALL):
        VocSource(tmp_path)


def test_yolo_with_names_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.yaml").write_text("names: [a]\n")
    without(monkeypatch, "yaml")
    with pytest.raises(SourceError, match=INSTALL):
        YoloSource(tmp_path)


def test_messagepack(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "msgpack")
    with pytest.raises(SourceError, match=INSTALL):
        read_msgpack(b"\x93\x01\x02\x03")


def test_messagepack_in_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that reads LMDB is another process: there a folder in front on the path hides the package."""
    path = write_lmdb(tmp_path / "x.lmdb", [(b"%08d" % n, msgpack.packb([jpg(), n])) for n in range(3)])
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "msgpack.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "hidden"))
    with pytest.raises(SourceError, match=INSTALL):
        list(open_source(path, "lmdb"))
