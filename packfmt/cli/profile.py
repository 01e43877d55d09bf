"""`packfmt profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packfmt.cli.show import print_json, print_table

if TYPE_CHECKING:
    from packfmt.training.profiling import Profile

__all__ = ["profile"]

SHOWN = 5  # of the slowest samples


@click.command()
@click.argument("packs", nargs=-1, required=True, metavar="PACK...", type=click.Path())
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True)
@click.option("--crop", type=click.IntRange(0), default=224, show_default=True, help="Pixels; 0 leaves sizes alone.")
@click.option("--workers", type=click.IntRange(0), default=0, show_default=True, help="Processes that decode.")
@click.option("--threads", type=click.IntRange(1), help="That decode. [default: all cores]")
@click.option("--batches", type=click.IntRange(1), default=100, show_default=True, help="How many to take.")
@click.option("--consume-ms", type=click.FloatRange(0), default=0.0, help="Time a training step takes, on a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(packs: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Load PACK as training does (random crops and flips), and show what limits it."""
    try:
        import packfmt.training.profiling  # noqa: F401  (to see whether torch is there)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise click.ClickException("profile needs torch; to install it: pip install 'packfmt[torch]'") from None
    found = run(packs, **options)
    if as_json:
        print_json(found.facts())
    else:
        print_profile(found)


def run(
    packs: tuple[str, ...],
    batch_size: int,
    crop: int,
    workers: int,
    threads: int | None,
    batches: int,
    consume_ms: float,
) -> Profile:
    """Build the loader that the options say, and run it."""
    from packfmt import HorizontalFlip, ImageDataset, Loader, RandomResizedCrop
    from packfmt.training.profiling import profile as run_loader

    dataset = ImageDataset(
        packs[0] if len(packs) == 1 else packs,
        crop=RandomResizedCrop(crop) if crop else None,
        flip=HorizontalFlip(),
        threads=threads,
    )
    try:
        with Loader(dataset, batch_size, workers=workers, collate="stack" if crop else "list") as loader:
            return run_loader(loader, batches, consume=consume_ms / 1000)
    finally:
        dataset.close()


def print_profile(found: Profile) -> None:
    """The table."""
    stats = found.stats
    work = max(sum(found.stages.values()), 1e-12)
    stages = {
        stage: f"{seconds:8.3f} s {seconds / work:6.1%} {seconds / max(stats.samples, 1) * 1000:8.3f} ms per image"
        for stage, seconds in found.stages.items()
    }
    print_table(
        [
            ("loaded", f"{stats.samples} images in {stats.batches} batches, {found.seconds:.2f} s"),
            ("rate", f"{found.rate:,.0f} images/s with {stats.threads} threads"),
            ("stages", stages),
            ("", "(summed over threads)"),
            ("loop waited", f"{stats.waited:.1%} of the time"),
            ("batches ready", f"{stats.depth:.2f} when one was asked for, on average"),
            ("skipped", f"{stats.skipped} images" if stats.skipped else None),
            ("slowest", [f"{seconds * 1000:8.1f} ms  {key}" for seconds, key in stats.slowest[:SHOWN]]),
            ("verdict", stats.verdict),
            ("advice", stats.advice),
        ]
    )
