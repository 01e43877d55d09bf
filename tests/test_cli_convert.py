"""`packfmt convert`: what it prints, what its options reach, and that hostile sources end in one line."""

from __future__ import annotations

import io
import json
import pickle
import signal
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kinds
import numpy as np
import pytest
from make import Trap, example, frame, trapped_pickle, write_lmdb

import packfmt
from packfmt.cli import main
from packfmt.cli.convert import convert as command
from packfmt.cli.flags import as_flags, flag_of
from packfmt.sources.registry import KINDS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run `packfmt convert` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["convert", *map(str, arguments)])
        return (stopped.value.code, *capfd.readouterr())  # type: ignore[return-value]

    yield call
    signal.signal(signal.SIGTERM, handler)


def labels(path: str = "out.bin") -> list[Any]:
    with packfmt.open(path) as reader:
        return list(reader.columns["label"])


def test_a_conversion_and_its_report(run: Run, tmp_path: Path) -> None:
    code, out, err = run(kinds.zipped(tmp_path), "out.bin")
    assert (code, err) == (0, "")
    told = [line.split(maxsplit=1) for line in out.splitlines()]
    assert told[:2] == [["pack", "out.bin"], ["images", "3"]]
    assert ["classes", "cat  1"] in told


def test_the_report_as_json(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(kinds.zipped(tmp_path), "out.bin", "--json")
    told = json.loads(out)
    assert (code, told["records"], told["classes"]) == (0, 3, {"cat": 1, "dog": 2})


def test_several_shards_are_one_source(run: Run, tmp_path: Path) -> None:
    with packfmt.create("a.bin") as one, packfmt.create("b.bin") as two:
        one.write(kinds.IMAGES[0], "1.jpg")
        two.write(kinds.IMAGES[1], "2.jpg")
    assert run("a.bin", "b.bin", "out.bin")[0] == 0
    with packfmt.open("out.bin") as reader:
        assert len(reader) == 2


# What is asked before


def test_the_kinds_are_listed_with_their_options(run: Run) -> None:
    code, out, _ = run("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == list(KINDS)
    assert "--layout --range --channels --encode --no-locking" in out


def test_the_kinds_are_listed_as_json(run: Run) -> None:
    told = json.loads(run("--list", "--json")[1])
    assert told["table"]["options"] == ["--root", "--key-column", "--label-column"]
    assert told.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_every_option_of_a_source_can_be_given(name: str) -> None:
    flags = {flag for parameter in command.params for flag in parameter.opts}
    for option in KINDS[name].options():
        if option != "classes":
            assert flag_of(option) in flags
            told = "h5_labels" if option == "labels" else option
            assert as_flags(f"name it with {told}=") == f"name it with {flag_of(option)}"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("pass locking=False", "pass --no-locking"),
        ("pass carve=True to cut", "pass --carve to cut"),
        ("as layout='NHWC', or h5_labels='' for none", "as --layout 'NHWC', or --h5-labels '' for none"),
        ("again with which='hr' for it", "again with --which 'hr' for it"),
        ("with images=, its axes with layout=", "with --images, its axes with --layout"),
        ("value_range='0,1' or '0,255'. Values", "--range '0,1' or '0,255'. Values"),
    ],
)
def test_messages_name_flags(message: str, told: str) -> None:
    assert as_flags(message) == told


@pytest.mark.parametrize("path", ["/data/images=/x.h5", "image=1/x.h5", "label=True/x", "a.key=", "labels="])
def test_paths_stay_as_they_are(path: str) -> None:
    assert as_flags(f"{path}: no such file") == f"{path}: no such file"


def test_errors_and_notes_name_flags(run: Run, tmp_path: Path) -> None:
    import h5py

    with h5py.File("x.h5", "w") as file:
        file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
        file["labels"] = [1, 2, 3]
    assert "name the right labels with --h5-labels, or pass --h5-labels '' for none" in run("x.h5", "out.bin")[2]
    assert "pass --channels 'bgr'" in run("x.h5", "out.bin", "--h5-labels", "")[1]
    entries = [(b"num-samples", b"1"), (b"label-000000001", b"text")]
    entries += [(b"image_%s-000000001" % which, kinds.IMAGES[0]) for which in (b"hr", b"lr")]
    zoom = write_lmdb(tmp_path / "zoom", entries)
    assert "again with --which 'lr' for image_lr-*" in run(zoom, "--dry-run")[1]


@pytest.mark.parametrize("name", kinds.MADE)
def test_a_dry_run_writes_nothing(name: str, run: Run, tmp_path: Path) -> None:
    kind, make = kinds.MADE[name]
    path = make(tmp_path, kinds.IMAGES)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(path, "--dry-run")
    told = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(" "))
    assert (code, err, told["source"], told["kind"], told["records"]) == (0, "", str(path), kind, "3")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_takes_the_whole_command(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(kinds.coco(tmp_path), "out.bin", "--shuffle", 3, "--force", "--dry-run", "--json")
    assert (code, json.loads(out)["kind"]) == (0, "coco")
    assert not Path("out.bin").exists()


def dry(run: Run, *arguments: object) -> tuple[int, str]:
    """Records and notes that a dry run tells of."""
    code, out, err = run(*arguments, "--dry-run", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    return told["records"], " ".join(told["notes"])


def test_a_dry_run_does_not_read_the_target(run: Run, tmp_path: Path) -> None:
    pack, images = kinds.pack(tmp_path), kinds.MADE["folder"][1](tmp_path, kinds.IMAGES)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.bin").write_bytes(pack.read_bytes())
    assert dry(run, pack, "empty") == (3, "")
    assert dry(run, pack, "other.bin", "--force") == (3, "")
    assert dry(run, images, "other.bin", "--force") == (3, "")
    for source, target in ((images, "other.bin"), (pack, images), (images, images)):
        records, notes = dry(run, source, target)
        assert (records, f"{target} exists and was taken as the target" in notes) == (3, True)


def test_a_dry_run_of_two_sources_of_a_kind_says_that_it_read_both(run: Run, tmp_path: Path) -> None:
    pack = kinds.pack(tmp_path)
    (tmp_path / "other.bin").write_bytes(pack.read_bytes())
    records, notes = dry(run, pack, "other.bin")
    assert (records, "other.bin exists and was read as a source too; if it is the target" in notes) == (6, True)


def test_a_dry_run_of_an_unknown_kind_says_so(run: Run, tmp_path: Path) -> None:
    pack = kinds.pack(tmp_path)
    code, _, err = run(pack, pack, "--dry-run", "--from", "nothing")
    assert (code, "unknown kind 'nothing'" in err) == (1, True)


def test_a_dry_run_says_what_would_be_lost(run: Run, tmp_path: Path) -> None:
    out = run(kinds.voc(tmp_path), "--dry-run")[1]
    assert [line.split()[-1] for line in out.splitlines() if "parts" in line or "pose" in line] == ["parts", "pose"]
    assert "would be lost" in out


def test_long_lists_are_cut_for_people_only(run: Run, tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / "many" / f"c{number:02d}").mkdir(parents=True)
        (tmp_path / "many" / f"c{number:02d}" / "x.jpg").write_bytes(kinds.IMAGES[0])
    out = run("many", "--dry-run")[1]
    assert ("c19" in out, "c20" in out, "and 10 more (--json lists all)" in out) == (True, False, True)
    assert len(json.loads(run("many", "--dry-run", "--json")[1])["classes"]) == 30


# Options


def test_a_kind_can_be_given(run: Run, tmp_path: Path) -> None:
    assert run(kinds.voc(tmp_path), "out.bin", "--from", "folder")[0] == 0
    code, _, err = run(kinds.voc(tmp_path), "out2.bin", "--from", "nothing")
    assert (code, err.count("\n"), "unknown kind 'nothing'" in err) == (1, 1, True)


def test_the_seed_zero_is_a_seed(run: Run, tmp_path: Path) -> None:
    run(kinds.zipped(tmp_path), "out.bin")
    run(kinds.zipped(tmp_path), "out0.bin", "--shuffle", 0)
    with packfmt.open("out.bin") as plain, packfmt.open("out0.bin") as shuffled:
        assert [r.key for r in plain] != [r.key for r in shuffled]


def test_labels_from_a_table(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("name,kind\n0.jpg,5\n1.jpg,6\n2.jpg,7\n")
    path = kinds.zipped(tmp_path)
    code, _, err = run(path, "out.bin", "--labels", "t.csv", "--key-column", "name", "--label-column", "kind")
    assert (code, err, labels()) == (0, "", [5, 6, 7])


def test_classes_from_another_pack(run: Run, tmp_path: Path) -> None:
    with packfmt.create("train.bin", classes=("dog", "cat")) as writer:
        writer.write(kinds.IMAGES[0], "x.jpg", label=0)
    assert run(kinds.folder(tmp_path), "out.bin", "--classes-from", "train.bin")[0] == 0
    assert labels() == [1, 0, 0]
    (tmp_path / "made-folder" / "bird").mkdir()
    code, _, err = run(kinds.folder(tmp_path), "out2.bin", "--classes-from", "train.bin")
    assert (code, err.count("\n"), "['bird'] are not among those of train.bin" in err) == (1, 1, True)


def test_options_of_folders(run: Run, tmp_path: Path) -> None:
    path = kinds.folder(tmp_path)
    (path / "cat" / "link.jpg").symlink_to(path / "cat" / "0.jpg")
    out = json.loads(run(path, "out.bin", "--flat", "--follow-links", "--json")[1])
    assert (out["records"], out["classes"]) == (4, {})


def test_options_of_hdf5(run: Run, tmp_path: Path) -> None:
    import h5py

    with h5py.File("x.h5", "w") as file:
        file["a/pictures"] = np.linspace(0, 1, 2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8)
        file["a/answers"] = [4, 2]
    options = ["--images", "a/pictures", "--h5-labels", "a/answers", "--layout", "NCHW", "--range", "0,1"]
    code, _, err = run("x.h5", "out.bin", *options, "--channels", "bgr", "--encode", "jpeg:80", "--timeout", 30)
    assert (code, err, labels()) == (0, "", [4, 2])
    with packfmt.open("out.bin") as reader:
        assert bytes(reader[0].data[:2]) == b"\xff\xd8"


def test_root_of_a_table(run: Run, tmp_path: Path) -> None:
    path = kinds.table(tmp_path).rename("list.csv")
    code, _, err = run(path, "out.bin", "--root", tmp_path / "made-table")
    assert (code, err, labels()) == (0, "", [0, 1, 1])


def test_the_feature_that_is_the_key(run: Run, tmp_path: Path) -> None:
    examples = [example(image=data, name=b"n%d" % number) for number, data in enumerate(kinds.IMAGES)]
    (tmp_path / "x.tfrecord").write_bytes(b"".join(map(frame, examples)))
    assert run("x.tfrecord", "out.bin", "--key", "name")[0] == 0
    with packfmt.open("out.bin") as reader:
        assert [record.key for record in reader] == ["n0", "n1", "n2"]


@pytest.mark.parametrize("arguments", [[], ["only-one"], ["a", "b", "--bad", "often"], ["a", "b", "--shard-size", "x"]])
def test_wrong_usage(arguments: list[str], run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Error: " in err


def test_an_option_of_another_kind(run: Run, tmp_path: Path) -> None:
    code, _, err = run(kinds.zipped(tmp_path), "out.bin", "--layout", "NHWC")
    assert (code, err) == (1, f"packfmt: {tmp_path}/made.zip: a zip source takes no layout; it takes no options\n")


def test_what_exists(run: Run, tmp_path: Path) -> None:
    path = kinds.zipped(tmp_path)
    Path("out.bin").write_bytes(b"mine")
    code, _, err = run(path, "out.bin")
    assert (code, err) == (1, "packfmt: out.bin: exists; choose another name or force overwriting (--force)\n")
    assert run(path, "out.bin", "--force")[0] == 0


def test_bad_images_are_listed(run: Run, tmp_path: Path) -> None:
    path = kinds.zipped(tmp_path, [kinds.IMAGES[0], kinds.BROKEN, b""])
    code, _, err = run(path, "out.bin")
    assert (code, err.count("\n")) == (1, 3)
    assert "'dog/1.jpg': " in err
    code, out, _ = run(path, "out.bin", "--bad", "skip")
    assert (code, "2 images" in out) == (0, True)


# Hostile sources. The canary is a file that nothing may create, or whose content nothing may read.


def refuse_reading(canary: Path) -> bytes:
    """A secret in a file; whoever finds it in a pack has opened a path that a source named."""
    canary.write_bytes(kinds.IMAGES[0][:2] + b"SECRET" * 50 + kinds.IMAGES[0])
    return b"SECRET"


def pickles_in_lmdb(folder: Path, canary: Path) -> Path:
    entries = [(b"%d" % number, pickle.dumps(([data], Trap(canary)))) for number, data in enumerate(kinds.IMAGES)]
    counts = [(name, trapped_pickle(canary)) for name in (b"__keys__", b"__len__")]
    return write_lmdb(folder / "x", [*entries, *counts])


def only_pickles_in_lmdb(folder: Path, canary: Path) -> Path:
    return write_lmdb(folder / "x", [(b"%d" % number, trapped_pickle(canary)) for number in range(3)])


def pickles_in_tar(folder: Path, canary: Path) -> Path:
    path = kinds.tar(folder)
    with tarfile.open(path, "a") as archive:
        for name in ("000.pkl", "001.pyd", "x.npy"):
            member = tarfile.TarInfo(name)
            member.size = len(trapped_pickle(canary))
            archive.addfile(member, io.BytesIO(trapped_pickle(canary)))
    return path


def objects_in_tar(folder: Path, canary: Path) -> Path:
    stream = io.BytesIO()
    np.save(stream, np.array([Trap(canary)], object), allow_pickle=True)
    with tarfile.open(folder / "x.tar", "w") as archive:
        for name, data in (("0.jpg", kinds.IMAGES[0]), ("0.npy", stream.getvalue())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return folder / "x.tar"


def pickles_in_hdf5(folder: Path, canary: Path) -> Path:
    import h5py

    with h5py.File(folder / "x.h5", "w") as file:
        for number, data in enumerate(kinds.IMAGES):
            file[f"{number}"] = np.void(data)
        file["trap"] = np.void(trapped_pickle(canary))
    return folder / "x.h5"


def pickles_in_tfrecord(folder: Path, canary: Path) -> Path:
    examples = [example(image=data, trap=trapped_pickle(canary)) for data in kinds.IMAGES]
    (folder / "x.tfrecord").write_bytes(b"".join(map(frame, examples)))
    return folder / "x.tfrecord"


def pickles_in_parquet(folder: Path, canary: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    trap = trapped_pickle(canary)
    table = pyarrow.table({"image": kinds.IMAGES, "trap": [trap] * 3})
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"packfmt": trap, b"huggingface": trap}), folder / "x")
    return folder / "x"


def entities_in_voc(folder: Path, canary: Path) -> Path:
    refuse_reading(canary)
    path = kinds.voc(folder)
    text = (
        f'<!DOCTYPE a [<!ENTITY e SYSTEM "file://{canary}">]><annotation><object><name>&e;</name></object></annotation>'
    )
    (path / "Annotations" / "0.xml").write_text(text)
    return path


def paths_in_coco(folder: Path, canary: Path) -> Path:
    refuse_reading(canary)
    path = kinds.coco(folder)
    path.write_text(path.read_text().replace("cat/0.jpg", str(canary)))
    return path


def paths_in_table(folder: Path, canary: Path) -> Path:
    refuse_reading(canary)
    path = kinds.table(folder)
    path.write_text(path.read_text().replace("files/cat/0.jpg", str(canary)))
    return path


def paths_in_parquet(folder: Path, canary: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    refuse_reading(canary)
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    rows = [{"bytes": None, "path": str(canary)}, {"bytes": kinds.IMAGES[0], "path": "fine.jpg"}]
    pyarrow.parquet.write_table(pyarrow.table({"image": pyarrow.array(rows, kind)}), folder / "x")
    return folder / "x"


def links_in_hdf5(folder: Path, canary: Path) -> Path:
    import h5py

    with h5py.File(canary, "w") as file:
        file["images"] = np.frombuffer(b"SECRET" * 32, np.uint8).reshape(1, 8, 8, 3)
    with h5py.File(folder / "x.h5", "w") as file:
        file["images"] = h5py.ExternalLink(str(canary), "images")
    return folder / "x.h5"


def links_in_yolo(folder: Path, canary: Path) -> Path:
    refuse_reading(canary)
    path = kinds.yolo(folder)
    (path / "images" / "0.jpg").unlink()
    (path / "images" / "0.jpg").symlink_to(canary)
    return path


def links_in_tar(folder: Path, canary: Path) -> Path:
    refuse_reading(canary)
    path = kinds.tar(folder)
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo("zzz.jpg")
        member.type, member.linkname = tarfile.SYMTYPE, str(canary)
        archive.addfile(member)
    return path


def links_in_folder(folder: Path, canary: Path) -> Path:
    refuse_reading(canary)
    path = kinds.folder(folder)
    (path / "cat" / "link.jpg").symlink_to(canary)
    return path


HOSTILE = [
    pickles_in_lmdb, only_pickles_in_lmdb, pickles_in_tar, objects_in_tar, pickles_in_hdf5, pickles_in_tfrecord,
    pickles_in_parquet, entities_in_voc, paths_in_coco, paths_in_table, paths_in_parquet, links_in_hdf5, links_in_yolo,
    links_in_tar, links_in_folder,
]  # fmt: skip


@pytest.mark.parametrize("bad", ["fail", "keep"])
@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_nothing_in_a_source_is_run_or_opened(make: Any, bad: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    canary = tmp_path / "canary"
    source = make(tmp_path / "in", canary)
    was = canary.read_bytes() if canary.exists() else None
    code, _, err = run(source, "out.bin", "--bad", bad)
    assert (canary.read_bytes() if canary.exists() else None) == was
    assert "Traceback" not in err
    assert code == 1 or b"SECRET" not in Path("out.bin").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "canary", "out.bin"}


CLIMBING = "../../climbed.jpg"


def climbing_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        archive.writestr(CLIMBING, kinds.IMAGES[0])
    return folder / "x.zip"


def climbing_tar(folder: Path) -> Path:
    with tarfile.open(folder / "x.tar", "w") as archive:
        member = tarfile.TarInfo(CLIMBING)
        member.size = len(kinds.IMAGES[0])
        archive.addfile(member, io.BytesIO(kinds.IMAGES[0]))
    return folder / "x.tar"


def climbing_lmdb(folder: Path) -> Path:
    return write_lmdb(folder / "x", [(CLIMBING.encode(), kinds.IMAGES[0])])


def climbing_tfrecord(folder: Path) -> Path:
    (folder / "x").write_bytes(frame(example(image=kinds.IMAGES[0], filename=CLIMBING.encode())))
    return folder / "x"


@pytest.mark.parametrize("target", ["deep/er/out", "deep/er/out.tar"])
@pytest.mark.parametrize("make", [climbing_zip, climbing_tar, climbing_lmdb, climbing_tfrecord])
def test_no_key_leads_out_of_the_target(make: Any, target: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    code, _, err = run(make(tmp_path / "in"), target)
    assert (code, err.count("\n")) == (1, 1)
    assert f"the key '{CLIMBING}' is not a file name inside a folder" in err
    assert {path.name for path in tmp_path.iterdir()} == {"in", "deep"}
    assert list((tmp_path / "deep" / "er").iterdir()) == []


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
PAGE = b"<!DOCTYPE html><html><body>Sign in</body></html>"


def cut(make: Any) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        path: Path = make(folder)
        file = path / "data.mdb" if path.is_dir() else path
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        return path

    return build


def put(name: str, data: bytes) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return build


BROKEN = {
    "a pointer named .h5": (put("x.h5", POINTER), "a Git LFS pointer"),
    "a page named .h5": (put("x.h5", PAGE), "an HTML or XML page"),
    "a pointer named .mdb": (put("data.mdb", POINTER), "a Git LFS pointer"),
    "an empty database": (lambda folder: write_lmdb(folder / "x", []), "the database is empty"),
    "labels only": (lambda folder: write_lmdb(folder / "x", [(b"1", b"a word"), (b"2", b"two")]), "labels only"),
    "a cut pack": (cut(kinds.pack), "made.bin"),
    "a cut tar": (cut(kinds.tar), "made.tar"),
    "a cut tar.gz": (cut(kinds.compressed_tar), "made.tar"),
    "a cut zip": (cut(kinds.zipped), "made.zip"),
    "a cut tfrecord": (cut(kinds.tfrecord), "made.tfrecord"),
    "a cut parquet": (cut(kinds.parquet), "made.parquet"),
    "a cut hdf5": (cut(kinds.hdf5), "made.h5"),
    "a cut lmdb": (cut(kinds.lmdb), "made-foreign.lmdb"),
    "a cut lmdb pack": (cut(kinds.pack_in_lmdb), "made-pack.lmdb"),
    "a cut coco": (cut(kinds.coco), "instances.json"),
    "an empty folder": (lambda folder: folder, "no image found"),
    "nothing": (lambda folder: folder / "missing", "no such file or folder"),
    "random bytes": (put("x", np.random.default_rng(0).bytes(5000)), "not recognised"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_is_one_clear_line(name: str, run: Run, tmp_path: Path) -> None:
    make, told = BROKEN[name]
    (tmp_path / "in").mkdir()
    path = make(tmp_path / "in")
    code, out, err = run(path, "out.bin")
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert told in err
    assert str(tmp_path / "in") in err
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_a_directory_that_is_not_there(run: Run, tmp_path: Path) -> None:
    code, _, err = run(kinds.zipped(tmp_path), "missing/out.bin")
    assert (code, err) == (1, "packfmt: missing: no such folder to write to\n")
