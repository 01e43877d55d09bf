"""`packfmt demo`."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

import click

from packfmt.demo import Stage, can_train, pack_stages, training_stages

__all__ = ["demo"]


@click.command()
@click.option("--images", type=click.IntRange(20), default=400, show_default=True, help="How many to draw.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Work in DIR (new or empty); leave it.")
def demo(images: int, keep: Path | None) -> None:
    """Draw some images, pack them, verify, train a small model; show the times beside image files."""
    with tempfile.TemporaryDirectory(prefix="packfmt-demo-") if keep is None else nullcontext(keep) as name:
        folder = Path(name)
        click.echo(f"{'':18} {'packfmt':>9} {'files':>9}")
        for stage in pack_stages(folder, images):
            print_stage(stage)
        if not can_train():
            click.echo("torch is not installed, so nothing was trained. To install it: pip install torch")
            return
        for stage in training_stages(folder):
            print_stage(stage)


def print_stage(stage: Stage) -> None:
    """One line: what, how long, how long with files, and a note."""
    plain = "" if stage.plain is None else f"{stage.plain:.3f} s"
    click.echo(f"{stage.name:18} {stage.seconds:7.3f} s {plain:>9}  {stage.note}".rstrip())
