"""What the benchmarks share: contenders in turn, medians of ratios, and words about the machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping


def machine() -> str:
    """One line on where the figures come from."""
    model = "unknown processor"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Linux {platform.release()}, Python {platform.python_version()}"


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turn(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time the contenders A B C, A B C, ..., so that a drift of the machine's speed meets all of them alike.

    Args:
        contenders: name to what is timed.
        rounds: times that each is called and counted.
        warm_up: times that each is called beforehand, uncounted.
        before: called before each call, untimed: what makes the start the same for all.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        for name, function in contenders.items():
            before()
            elapsed = seconds(function)
            if number >= 0:
                times[name].append(elapsed)
    return times


def ratio(times: Mapping[str, list[float]], name: str, other: str) -> float:
    """The median over the rounds of time(name) / time(other)."""
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def report(title: str, times: Mapping[str, list[float]], work: float, unit: str) -> None:
    """Print each contender's median rate with its range."""
    print(f"\n{title}")
    for name, values in times.items():
        low, middle, high = (work / t for t in (max(values), statistics.median(values), min(values)))
        print(f"  {name:<44} {middle:>12,.0f} {unit}  ({low:,.0f} to {high:,.0f})")


def verdict(what: str, value: float, target: float, *, at_most: bool) -> None:
    """Print a figure beside its target."""
    met = value <= target if at_most else value >= target
    print(f"  {what}: {value:.2f} ({'at most' if at_most else 'at least'} {target:g}: {'met' if met else 'MISSED'})")
