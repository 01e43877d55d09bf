"""`packfmt pack`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from packfmt.cli.show import Size, print_json, print_table, progress_bar, readable_size
from packfmt.packing import pack as pack_folder
from packfmt.reports import Bad, BadImage, PackReport

__all__ = ["copy_options", "pack", "print_report"]

SHOWN = 20  # bad images that the report lists


# Of every copy into a pack, in the order in which --help lists them.
_COPY_OPTIONS = (
    click.option("--threads", type=click.IntRange(1), help="Images prepared at a time. [default: cores, at least 2]"),
    click.option(
        "--bad",
        type=click.Choice(["fail", "skip", "keep"]),
        default="fail",
        show_default=True,
        help="Zero-byte, unreadable, broken images: list all and write nothing, leave them out, or store what bytes "
        "there are.",
    ),
    click.option("--decode", is_flag=True, help="Decode every image too: what cannot be decoded is bad."),
    click.option("--shuffle", type=int, metavar="SEED", help="Store records in random order."),
    click.option("--shard-size", type=Size(), help="Split into shards of this size (512MB, 1GiB) with a manifest."),
    click.option("--backend", type=click.Choice(["shard", "lmdb"]), help="[default: lmdb for a name.lmdb, else shard]"),
    click.option("--force", is_flag=True, help="Replace what is there."),
    click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
)


def copy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with what all copies into a pack take."""
    for option in reversed(_COPY_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("images", type=click.Path())
@click.argument("out", type=click.Path())
@copy_options
@click.option("--follow-links", is_flag=True, help="Follow symbolic links.")
@click.option("--flat", is_flag=True, help="Ignore class folders and store no labels.")
def pack(images: str, out: str, bad: Bad, flat: bool, as_json: bool, **options: Any) -> None:
    """Pack the folder IMAGES, flat or with one sub-folder per class, into OUT."""
    with progress_bar("packing") as progress:
        report = pack_folder(images, out, bad=bad, labelled=not flat, progress=progress, **options)
    print_report(report, as_json)


def print_report(report: PackReport, as_json: bool) -> None:
    """What a copy did, for a person or a program."""
    if as_json:
        print_json(report)
        return
    kept = [problem for problem in report.problems if problem.kept]
    left_out = [problem for problem in report.problems if not problem.kept]
    rate = readable_size(report.bytes / max(report.seconds, 1e-9))
    print_table(
        [
            ("pack", report.path),
            ("shards", len(report.files) - 1 if len(report.files) > 1 else None),
            ("images", report.records),
            ("bytes", f"{report.bytes} ({readable_size(report.bytes)})"),
            ("boxes", report.boxes or None),
            ("classes", report.classes),
            ("formats", report.formats),
            ("passed over", report.skipped),
            ("bad, kept", _named(kept)),
            ("bad, left out", _named(left_out)),
            ("EXIF-rotated", report.rotated or None),
            ("CMYK", report.cmyk or None),
            ("notes", report.notes),
            ("time", f"{report.seconds:.2f} s ({rate}/s)"),
        ]
    )


def _named(problems: Sequence[BadImage]) -> list[str]:
    """How many, and the first of them."""
    if not problems:
        return []
    lines = [f"{len(problems)} images", *(f"{problem.key}: {problem.reason}" for problem in problems[:SHOWN])]
    if len(problems) > SHOWN:
        lines.append(f"and {len(problems) - SHOWN} more (--json lists all)")
    return lines
