"""`packfmt info`, `verify`, `cat` and `unpack`: verbs that read a pack."""

from __future__ import annotations

import sys

import click

from packfmt import storage
from packfmt.checking import verify as verify_pack
from packfmt.cli.show import print_json, print_table, progress_bar, readable_size
from packfmt.describing import describe
from packfmt.system import system_facts
from packfmt.unpacking import unpack as unpack_pack

__all__ = ["cat", "info", "unpack", "verify"]


@click.command()
@click.argument("packs", nargs=-1, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--system", is_flag=True, help="Show versions, cores and what packfmt falls back to on this machine.")
def info(packs: tuple[str, ...], as_json: bool, system: bool) -> None:
    """Show what a pack holds."""
    if bool(packs) == system:
        raise click.UsageError("name a pack, or give --system")
    if system:
        facts = system_facts()
    else:
        with storage.open(packs[0] if len(packs) == 1 else packs) as reader:
            facts = describe(reader)
        facts["mean_record"] = readable_size(facts["mean_record"])
    if as_json:
        print_json(facts)
    else:
        print_table([(name.replace("_", " "), value) for name, value in facts.items()])


@click.command()
@click.argument("packs", nargs=-1, required=True, type=click.Path())
@click.option("--decode", is_flag=True, help="Decode every picture too, and compare sizes.")
@click.option("--threads", type=click.IntRange(1), help="Threads for --decode. [default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(packs: tuple[str, ...], decode: bool, threads: int | None, as_json: bool) -> None:
    """Check every byte of a pack. Exit code 1 and a list if anything is damaged."""
    with progress_bar("decoding", shown=decode) as progress:
        target = packs[0] if len(packs) == 1 else packs
        report = verify_pack(target, decode=decode, threads=threads, progress=progress)
    if as_json:
        print_json(report)
    else:
        for damage in report.damaged:
            place = f"{damage.path}, record {damage.index}" if damage.index is not None else damage.path
            name = f", key {damage.key!r}" if damage.key is not None else ""
            click.echo(f"{place}{name}: {damage.message}")
        checked = f"{report.records} records, {report.decoded} decoded" if decode else f"{report.records} records"
        verdict = "whole" if report.ok else f"{len(report.damaged)} faults"
        click.echo(f"{report.path}: {verdict} ({checked}, {report.seconds:.2f} s)")
    if not report.ok:
        sys.exit(1)


@click.command()
@click.argument("pack", type=click.Path())
@click.argument("record")
@click.option("--key", "by_key", is_flag=True, help="RECORD is a key even if it looks like a number.")
def cat(pack: str, record: str, by_key: bool) -> None:
    """Write the bytes of one RECORD, named by its index or its key, to standard output."""
    with storage.open(pack) as reader:
        is_index = not by_key and record.isascii() and record.isdigit()
        data = reader[int(record) if is_index else reader.find(record)].data
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@click.command()
@click.argument("pack", type=click.Path())
@click.argument("folder", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def unpack(pack: str, folder: str, as_json: bool) -> None:
    """Write every record of PACK to its own file below FOLDER, which must be new or empty."""
    with progress_bar("unpacking") as progress:
        report = unpack_pack(pack, folder, progress=progress)
    if as_json:
        print_json(report)
    else:
        click.echo(f"{report.records} files, {readable_size(report.bytes)}, in {report.path}")
