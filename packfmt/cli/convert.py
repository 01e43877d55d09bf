"""`packfmt convert`."""

from __future__ import annotations

import os
from typing import Any

import click

from packfmt.cli.flags import as_flags, flag_of
from packfmt.cli.packing import copy_options, print_report
from packfmt.cli.show import print_json, print_table, progress_bar
from packfmt.converting import convert as convert_source
from packfmt.converting import describe_source
from packfmt.errors import SourceError
from packfmt.reports import Bad
from packfmt.sources.registry import KINDS, recognise

__all__ = ["convert"]

OWN = {"threads", "decode", "shuffle", "shard_size", "backend", "force"}  # options of the copy, not of the source
SHOWN = 20  # classes, columns or reasons listed


@click.command()
@click.argument("src", nargs=-1, type=click.Path())
@click.argument("dst", required=False, type=click.Path())
@click.option("--list", "list_kinds", is_flag=True, help="Show the kinds of source and their options.")
@click.option("--from", "kind", metavar="KIND", help="What SRC is, instead of recognising it.")
@click.option("--dry-run", is_flag=True, help="Say what SRC is and what would be kept; write nothing. Needs no DST.")
@copy_options
@click.option("--labels", type=click.Path(), metavar="TABLE", help="Labels from a CSV, TSV or JSON lines file, by key.")
@click.option("--key-column", help="Of a table: the column of paths.")
@click.option("--label-column", help="Of a table: the column of labels.")
@click.option("--root", type=click.Path(), help="Table, COCO: the folder that paths are relative to.")
@click.option("--classes-from", type=click.Path(), metavar="PACK", help="Number classes as PACK does.")
@click.option("--follow-links", is_flag=True, help="Folder: follow symbolic links.")
@click.option("--flat", is_flag=True, help="Folder: ignore class folders and store no labels.")
@click.option("--image", help="Parquet, TFRecord: the column or feature of images.")
@click.option("--label", help="Parquet, TFRecord: the column or feature of labels.")
@click.option("--key", help="TFRecord: the feature of keys.")
@click.option("--images", help="HDF5: the dataset or group of images.")
@click.option("--h5-labels", help="HDF5: the dataset of labels.")
@click.option("--layout", help="HDF5: the axes, as NHWC, NCHW or NHW.")
@click.option("--range", "value_range", metavar="LOW,HIGH", help="HDF5: black and white, as 0,1 or 0,255.")
@click.option("--channels", type=click.Choice(["rgb", "bgr"]), help="HDF5: order of colours.")
@click.option("--no-locking", is_flag=True, help="HDF5: open a file another program has locked.")
@click.option("--encode", metavar="png|jpeg:QUALITY", help="HDF5, LMDB: how pixels are stored. [default: png]")
@click.option("--timeout", type=float, metavar="SECONDS", help="HDF5, LMDB: give up after so long without a record.")
@click.option("--resolution", type=int, help="LMDB: which of several resolutions.")
@click.option("--which", type=click.Choice(["hr", "lr"]), help="LMDB (TextZoom): which of the two images.")
@click.option("--database", help="LMDB: the named database.")
@click.option("--raw-rgb", is_flag=True, help="LMDB: values that are no files are square RGB pixels.")
@click.option("--carve", is_flag=True, help="LMDB: cut JPEGs out of pyarrow.serialize values.")
def convert(
    src: tuple[str, ...],
    dst: str | None,
    list_kinds: bool,
    kind: str | None,
    dry_run: bool,
    as_json: bool,
    bad: Bad,
    **options: Any,
) -> None:
    """Copy the images of SRC (a database, an archive, a table, a folder, a pack) to DST.

    DST is out.bin, out.lmdb, out-%05d.tar, out.parquet, or a folder.
    """
    if list_kinds:
        _list_kinds(as_json)
        return
    paths = (*src, *([dst] if dst is not None else []))
    if not paths or (len(paths) < 2 and not dry_run):
        raise click.UsageError("name a source and a target (or --list, or --dry-run with a source)")
    given = _given(options)
    if dry_run:
        sources, notes = _sources(paths, kind, force=options["force"])
        _describe(sources, kind, notes, {name: value for name, value in given.items() if name not in OWN}, as_json)
        return
    with progress_bar("converting") as progress:
        report = convert_source(_one_or_all(paths[:-1]), paths[-1], kind=kind, bad=bad, progress=progress, **given)
    report.notes = [as_flags(note) for note in report.notes]
    print_report(report, as_json)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Options that were given, under the names the sources know."""
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    for flag, name in (("no_locking", "locking"), ("flat", "labelled")):
        if given.pop(flag, False):
            given[name] = False
    return given


def _one_or_all(paths: tuple[str, ...]) -> Any:
    return paths[0] if len(paths) == 1 else list(paths)


def _sources(paths: tuple[str, ...], kind: str | None, force: bool) -> tuple[tuple[str, ...], list[str]]:
    """What a dry run reads, and notes: after the whole command the last path is what would be written."""
    last = paths[-1]
    if len(paths) == 1:
        return paths, []
    if force or not os.path.lexists(last) or (os.path.isdir(last) and not os.listdir(last)):
        return paths[:-1], []
    first = kind or _kind_of(paths[0])
    if first not in KINDS or not KINDS[first].several or _kind_of(last) != first:
        return paths[:-1], [f"{last} exists and was taken as the target, not read: it is no further {first} source"]
    return paths, [f"{last} exists and was read as a source too; if it is the target, leave it out or give --force"]


def _kind_of(path: str) -> str | None:
    try:
        return recognise(path)
    except (SourceError, OSError):
        return None


def _describe(
    paths: tuple[str, ...], kind: str | None, notes: list[str], options: dict[str, Any], as_json: bool
) -> None:
    with progress_bar("reading") as progress:
        facts = describe_source(_one_or_all(paths), kind=kind, progress=progress, **options)
    facts["notes"] = [*(as_flags(note) for note in facts["notes"]), *notes]
    if as_json:
        print_json(facts)
        return
    rows = [(name.replace("_", " "), _short(value)) for name, value in facts.items()]
    print_table([("would be lost" if name == "lost" else name, value) for name, value in rows])


def _short(value: Any) -> Any:
    if not isinstance(value, (list, dict)) or len(value) <= SHOWN:
        return value
    kept = list(value.items() if isinstance(value, dict) else value)[:SHOWN]
    more = f"and {len(value) - SHOWN} more (--json lists all)"
    return [*(f"{item[0]}  {item[1]}" if isinstance(value, dict) else item for item in kept), more]


def _list_kinds(as_json: bool) -> None:
    # What a folder is given as classes comes from --classes-from, which all have.
    flags = {n: [flag_of(option) for option in kind.options() if option != "classes"] for n, kind in KINDS.items()}
    if as_json:
        print_json({name: {"what": kind.what, "options": flags[name]} for name, kind in KINDS.items()})
        return
    for name, kind in KINDS.items():
        lines = [kind.what, *([f"options: {' '.join(flags[name])}"] if flags[name] else [])]
        print_table([(f"{name:<9}", lines)])
