"""`packfmt convert`."""

from __future__ import annotations

from typing import Any

import click

from packfmt.cli.packing import print_report
from packfmt.cli.show import Size, print_json, print_table, progress_bar
from packfmt.converting import convert as convert_source
from packfmt.converting import describe_source
from packfmt.reports import Bad
from packfmt.sources.registry import KINDS

__all__ = ["convert"]


@click.command()
@click.argument("src", nargs=-1, type=click.Path())
@click.argument("dst", required=False, type=click.Path())
@click.option("--list", "list_kinds", is_flag=True, help="Show the kinds of source and their options.")
@click.option("--from", "kind", metavar="KIND", help="What SRC is, instead of recognising it.")
@click.option("--dry-run", is_flag=True, help="Say what SRC is and what would be kept; write nothing. Needs no DST.")
@click.option("--threads", type=click.IntRange(1), help="Records prepared at a time. [default: all cores, at least 2]")
@click.option("--bad", type=click.Choice(["fail", "skip", "keep"]), default="fail", show_default=True)
@click.option("--shuffle", type=int, metavar="SEED", help="Store records in random order.")
@click.option("--shard-size", type=Size(), help="Split into shards of this size.")
@click.option("--backend", type=click.Choice(["shard", "lmdb"]), help="[default: lmdb for DST.lmdb, else shard]")
@click.option("--force", is_flag=True, help="Replace DST if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--labels", type=click.Path(), metavar="TABLE", help="Labels for a folder: CSV, TSV or JSON lines.")
@click.option("--key-column", help="Of a table: the column of paths.")
@click.option("--label-column", help="Of a table: the column of labels.")
@click.option("--classes-from", type=click.Path(), metavar="PACK", help="Number classes as PACK does.")
@click.option("--image", help="Parquet, TFRecord: the column or feature of images.")
@click.option("--label", help="Parquet, TFRecord: the column or feature of labels.")
@click.option("--images", help="HDF5: the dataset or group of images.")
@click.option("--h5-labels", help="HDF5: the dataset of labels.")
@click.option("--layout", help="HDF5: the axes, as NHWC, NCHW or NHW.")
@click.option("--range", "value_range", metavar="LOW,HIGH", help="HDF5: black and white, as 0,1 or 0,255.")
@click.option("--channels", type=click.Choice(["rgb", "bgr"]), help="HDF5: order of colours.")
@click.option("--encode", metavar="png|jpeg:QUALITY", help="HDF5, LMDB: how pixels are stored. [default: png]")
@click.option("--no-locking", "no_locking", is_flag=True, help="HDF5: open a file another program has locked.")
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

    DST is out.bin, out.lmdb, out-%05d.tar, out.parquet, or from a pack a folder.
    """
    if list_kinds:
        _list_kinds(as_json)
        return
    paths = (*src, *([dst] if dst is not None else []))
    if not paths or (len(paths) < 2 and not dry_run):
        raise click.UsageError("name a source and a target (or --list, or --dry-run with a source)")
    given = _given(options)
    if dry_run:
        facts = describe_source(_one_or_all(paths), kind=kind, **_source_options(given))
        print_json(facts) if as_json else print_table([(n.replace("_", " "), v) for n, v in facts.items()])
        return
    with progress_bar("converting") as progress:
        report = convert_source(_one_or_all(paths[:-1]), paths[-1], kind=kind, bad=bad, progress=progress, **given)
    print_report(report, as_json)


OWN = {"threads", "shuffle", "shard_size", "backend", "force"}  # options of the copy, not of the source


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Options that were given, under the names the sources know."""
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if given.pop("no_locking", False):
        given["locking"] = False
    return given


def _source_options(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in OWN}


def _one_or_all(paths: tuple[str, ...]) -> Any:
    return paths[0] if len(paths) == 1 else list(paths)


def _list_kinds(as_json: bool) -> None:
    if as_json:
        print_json({name: {"what": kind.what, "options": list(kind.options())} for name, kind in KINDS.items()})
        return
    for name, kind in KINDS.items():
        options = ", ".join(kind.options())
        print_table([(f"{name:<9}", [kind.what, f"options: {options}"] if options else kind.what)])
