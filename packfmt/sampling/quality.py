"""How good an order is: how mixed its batches are, and how contiguous the reads they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packfmt.sampling.ranks import Indices, warn_user
from packfmt.sampling.shuffle import SURVEY, BlockOrder, below, permutation

__all__ = ["OrderQuality", "entropy", "measure", "warn_if_one_sided"]

ONE_SIDED = 2 / 3  # below this part of a full shuffle's entropy batches count as one-sided
_SURVEYED = 16  # windows looked at, so that the look stays cheap for any size
_ROWS = 256  # records drawn from each


@dataclass(frozen=True, slots=True)
class OrderQuality:
    """What an order does to training and to the disk, measured on a sample of an epoch.

    Args:
        batches: number of global batches looked at.
        label_entropy: mean over them of the entropy of a batch's labels, in bits; None without labels.
        full_shuffle_entropy: the same for a full shuffle of the same records: what ``label_entropy`` could be at
            best.
        neighbour_correlation: Pearson correlation of the positions in the data of neighbours in the order: 1 is
            reading front to back (or a shuffle buffer, which stays local), 0 is a full shuffle.
        run_records: mean number of consecutive records in the records that are in use together (a window): what one
            seek reads.
        run_bytes: the same in bytes; None where the record size is not known.
    """

    batches: int
    label_entropy: float | None
    full_shuffle_entropy: float | None
    neighbour_correlation: float
    run_records: float
    run_bytes: float | None

    @property
    def mixing(self) -> float | None:
        """``label_entropy`` as a part of a full shuffle's; 1 is as good as one, None without labels."""
        if self.label_entropy is None or self.full_shuffle_entropy is None:
            return None
        return self.label_entropy / self.full_shuffle_entropy if self.full_shuffle_entropy else 1.0


def entropy(labels: npt.NDArray[Any]) -> float:
    """Shannon entropy of the values of (n,) labels, in bits."""
    if not len(labels):
        return 0.0
    _, counts = np.unique(labels, return_counts=True)
    parts = counts / len(labels)
    return float(max(0.0, -(parts * np.log2(parts)).sum()))


def measure(
    spans: Sequence[Sequence[Indices]],
    in_use: Sequence[Indices],
    population: Indices | int,
    labels: npt.NDArray[Any] | None,
    record_bytes: float | None,
) -> OrderQuality:
    """Measure batches.

    Args:
        spans: a few runs of consecutive global batches.
        in_use: a few sets of records, each in use at one time.
        population: the (k,) records that are sampled, or their number where it is all of them.
        labels: (n,) label per record, or None.
        record_bytes: mean size of a record in bytes, or None.
    """
    batches = [batch for span in spans for batch in span]
    mean, best = None, None
    if labels is not None and batches:
        mean = float(np.mean([entropy(labels[batch]) for batch in batches]))
        best = _shuffled_entropy([len(batch) for batch in batches], population, labels)
    records = _run_length(in_use)
    return OrderQuality(
        batches=len(batches),
        label_entropy=mean,
        full_shuffle_entropy=best,
        neighbour_correlation=_neighbour_correlation([np.concatenate(span) for span in spans if span]),
        run_records=records,
        run_bytes=None if record_bytes is None else records * record_bytes,
    )


def _draw(size: int, population: Indices | int, number: int) -> Indices:
    """``size`` records at random: without replacement where that is cheap."""
    count = population if isinstance(population, int) else len(population)
    if count <= 2**16:
        places = permutation(count, 0, 0, SURVEY, number)[:size]
    else:
        places = below(np.full(size, count), 0, 0, SURVEY, number)
    return places if isinstance(population, int) else population[places]


def _shuffled_entropy(sizes: list[int], population: Indices | int, labels: npt.NDArray[Any]) -> float:
    step = max(1, len(sizes) // 64)
    drawn = [entropy(labels[_draw(size, population, number)]) for number, size in enumerate(sizes[::step])]
    return float(np.mean(drawn))


def _neighbour_correlation(runs: list[Indices]) -> float:
    before = np.concatenate([run[:-1] for run in runs]) if runs else np.empty(0)
    after = np.concatenate([run[1:] for run in runs]) if runs else np.empty(0)
    if len(before) < 2 or np.ptp(before) == 0 or np.ptp(after) == 0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def _run_length(in_use: Sequence[Indices]) -> float:
    records = pieces = 0
    for some in in_use:
        touched = np.unique(some)
        records += len(touched)
        pieces += 1 + int(np.count_nonzero(np.diff(touched) > 1))
    return records / pieces if pieces else 0.0


def warn_if_one_sided(order: BlockOrder, indices: Indices | None, labels: npt.NDArray[Any]) -> None:
    """Warn where the windows of an order hold far fewer classes than the data does, as in data sorted by class.

    Looks at a few hundred records of up to 16 windows of epoch 0, whatever the size of the data.
    """
    if not order.shuffle or order.windows < 2:
        return
    chosen = np.unique(np.linspace(0, order.windows - 1, _SURVEYED).astype(np.int64)).tolist()
    drawn = [order.survey(0, window, _ROWS) for window in chosen]
    population: Indices | int = order.count if indices is None else indices
    found = float(np.mean([entropy(labels[rows if indices is None else indices[rows]]) for rows in drawn]))
    best = float(np.mean([entropy(labels[_draw(_ROWS, population, number)]) for number in range(_SURVEYED)]))
    # The difference keeps rare classes, whose entropy is small and noisy, from raising a false alarm.
    if found < ONE_SIDED * best and best - found > 0.05:
        warn_user(
            f"batches will be one-sided: {_ROWS} records of a window have {found:.2f} bits of label entropy, a full "
            f"shuffle has {best:.2f}; the records seem sorted by class. Pack with `pack --shuffle`, or raise window "
            f"(now {-(-order.blocks // order.windows)} of {order.blocks} blocks)"
        )
