"""Random numbers as pure functions of (seed, epoch, sample index, draw), computed for a whole batch at once.

There is no generator whose state moves on: a number depends on its key and on nothing else, not on threads, workers,
batch size or the order of calls. The algorithm, all modulo 2**64, with G = 0x9e3779b97f4a7c15::

    mix(z)                      the output function of SplitMix64
    base(domain, seed, epoch) = mix(mix(mix((domain + 1) * G) + (seed + 1) * G) + (epoch + 1) * G)
    key of a sample           = mix(base + (index + 1) * G)     a SplitMix64 seeded with base, output `index`
    bits of a stream          = mix(key + (stream + 1) * G)     a SplitMix64 seeded with key, output `stream`
    uniform                   = (bits >> 11) / 2**53

A sample that is drawn more than once in an epoch has a key for each draw. The first, number 0, has the key above; the
others have bases of their own, in a third domain::

    base of draw d > 0        = mix(base(domain, seed, epoch) + (d + 1) * G)

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the constants of ``mix``
are variant 13 of David Stafford's "Better bit mixing" (2011). Samples, batches and further draws of a sample have
domains of their own, so that batch 5 and sample 5 share nothing.

A ``stream`` names which number of the sample is meant (crop position, flip, ...): numbers of different streams are
independent. packfmt's own crops and flips use streams below 1024.

``sample_rng`` gives a user's transform a numpy generator seeded with the sample's key. numpy promises the bits of PCG64
for ever, but may change the methods on top of them (``normal``, ``choice``) between versions; all else here is fixed.
"""

from __future__ import annotations

import operator
import threading
from functools import lru_cache
from types import TracebackType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.random import PCG64, Generator  # now, not at the first draw: a fork in that moment would hang

__all__ = [
    "Keys",
    "batch_rng",
    "generator",
    "integers",
    "sample_keys",
    "sample_rng",
    "sampling",
    "set_sample",
    "uniform",
]

Keys: TypeAlias = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_G = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, made odd
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_SAMPLE, _BATCH, _AGAIN = 0, 1, 2  # domains

_U11, _U27, _U30, _U31 = (np.uint64(shift) for shift in (11, 27, 30, 31))
_UG, _UM1, _UM2 = (np.uint64(constant) for constant in (_G, _M1, _M2))


def sample_keys(seed: int, epoch: int, indices: npt.ArrayLike, draws: npt.NDArray[np.int64] | None = None) -> Keys:
    """The keys of samples, from which all their randomness follows.

    Thread-safe; a pure function. Two samples of one (seed, epoch, draw) never have the same key.

    Args:
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**64.
        indices: (N,) integers, the samples' positions in the dataset, none negative.
        draws: (N,) integers, how often each was drawn before in the epoch; None stands for zeros.

    Returns:
        (N,) uint64.

    Raises:
        TypeError: seed, epoch, indices or draws are no integers.
        ValueError: one of them is out of range, or ``indices`` or ``draws`` has another shape.
    """
    counters = _counters("indices", indices, "sample indices start at 0")
    base = np.uint64(_base(_SAMPLE, seed, epoch))
    if draws is None:
        return _nth(base, counters)
    numbers = _counters("draws", draws, "draws are counted from 0")
    if numbers.shape != counters.shape:
        raise ValueError(f"draws must have shape {counters.shape} as indices have, got {numbers.shape}")
    further = numbers > 0
    bases = _nth(np.uint64(_base(_AGAIN, seed, epoch)), numbers)
    return _nth(np.where(further, bases, base), counters)


def uniform(keys: Keys, stream: int | tuple[int, ...]) -> npt.NDArray[np.float64]:
    """One draw of each sample, uniform in [0, 1), a multiple of 2**-53; or several.

    Thread-safe; a pure function, elementwise in ``keys``.

    Args:
        keys: (N,) uint64, from ``sample_keys``.
        stream: which draw of the sample, 0 <= stream < 2**64; or S of them, which costs less than one after another.

    Returns:
        (N,) float64, or (S, N).

    Raises:
        TypeError: ``keys`` are not uint64, or ``stream`` is no integer.
        ValueError: ``keys`` is not one-dimensional, or ``stream`` is out of range.
    """
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64:
        kind = getattr(keys, "dtype", type(keys).__name__)
        raise TypeError(f"keys must be a uint64 array from sample_keys, got {kind}")
    if keys.ndim != 1:
        raise ValueError(f"keys must have shape (N,), got {keys.shape}")
    bits = _mix(keys + _offsets(stream))
    bits >>= _U11
    return bits * np.float64(2.0**-53)


def integers(
    keys: Keys, stream: int | tuple[int, ...], low: npt.ArrayLike, high: npt.ArrayLike
) -> npt.NDArray[np.int64]:
    """One whole number of each sample, uniform in [low, high).

    It is ``low + floor(uniform * (high - low))``; a value's probability differs by at most 2**-53 from its fair share.

    Args:
        keys: (N,) uint64, from ``sample_keys``.
        stream: which draw of the sample, or S of them.
        low: an integer, or as many as are returned: the least value.
        high: an integer, or as many as are returned: one more than the greatest value.

    Returns:
        (N,) int64, or (S, N).

    Raises:
        ValueError: a range is empty or holds more than 2**53 values.
    """
    start = np.asarray(low, dtype=np.int64)
    span = np.asarray(high, dtype=np.int64) - start
    if span.size and not (span.min() >= 1 and span.max() <= 2**53):
        raise ValueError(f"high - low must lie in 1..2**53, got {span.min()}..{span.max()}")
    # The product stays below span: rounding to nearest cannot lift (1 - 2**-53) * span onto span.
    return (uniform(keys, stream) * span).astype(np.int64) + start


def generator(key: int | np.uint64) -> Generator:
    """A numpy generator (PCG64) that depends on ``key`` only; ``spawn`` on it is as repeatable as its draws.

    Args:
        key: 0 <= key < 2**64, as one element of ``sample_keys``.
    """
    # Not Philox(key=...): numpy gives that one a spawn sequence from the operating system's entropy.
    return Generator(PCG64(_word("key", key)))


def batch_rng(seed: int, epoch: int, batch: int) -> Generator:
    """The generator of one batch, for batch transforms such as MixUp; it shares nothing with any sample's.

    Args:
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**64.
        batch: the batch's number in the epoch, from 0.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is out of range.
    """
    return generator(_mix_int(_base(_BATCH, seed, epoch) + (_word("batch", batch) + 1) * _G))


class _Current(threading.local):
    """The sample that this thread works on: its key, and its generator once somebody asked for it."""

    key: int | np.uint64 | None = None
    rng: Generator | None = None


_current = _Current()


def sample_rng() -> Generator:
    """The generator of the sample that is being transformed, for use inside a ``transform``.

    It is keyed by (seed, epoch, sample index, draw), so that a transform gives the same result for any number of
    threads and workers. Within one sample every call returns the same generator, so draws go on where they stopped::

        def transform(image):
            return image.rot90(int(sample_rng().integers(4)), (1, 2))

    Each thread has a sample of its own; ask again in each call, and do not keep the generator.

    Raises:
        RuntimeError: no sample is being transformed in this thread.
    """
    if _current.rng is None:
        if _current.key is None:
            raise RuntimeError(
                "sample_rng() was called while no sample is being transformed in this thread; call it inside a "
                "dataset's transform, in the thread that runs it, or around your own code write `with "
                "packfmt.randomness.sampling(key):` with a key from sample_keys(seed, epoch, indices)"
            )
        _current.rng = generator(_current.key)
    return _current.rng


def set_sample(key: int | np.uint64 | None) -> None:
    """Say which sample this thread works on from now on; None says that it works on none.

    Costs two assignments: the generator is made by the first ``sample_rng()``. Setting the same key again starts its
    draws anew.
    """
    _current.key = key
    _current.rng = None


class sampling:
    """Context manager: inside it ``sample_rng()`` is the generator of ``key``; afterwards what it was before.

    Args:
        key: one element of ``sample_keys``.
    """

    __slots__ = ("_before", "_key")

    def __init__(self, key: int | np.uint64) -> None:
        self._key = key
        self._before: tuple[int | np.uint64 | None, Generator | None] = (None, None)

    def __enter__(self) -> None:
        self._before = (_current.key, _current.rng)
        set_sample(self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.key, _current.rng = self._before


def _counters(name: str, values: npt.ArrayLike, start: str) -> Keys:
    """(N,) integers, none negative, as uint64 that may be overwritten."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have shape (N,), got {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    if array.size and array.dtype.kind == "i" and array.min() < 0:
        position = int(np.argmax(array < 0))
        raise ValueError(f"{name}[{position}] is {array[position]}; {start}")
    return array.astype(np.uint64)


def _word(name: str, value: int | np.integer) -> int:
    """``value`` as an int of 64 bits, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not 0 <= number <= _MASK:
        raise ValueError(f"{name} must lie in 0..2**64-1, got {number}")
    return number


@lru_cache(maxsize=256)
def _offsets(stream: int | tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """What a draw adds to the key: () uint64, or (S, 1) of several draws."""
    streams = stream if isinstance(stream, tuple) else (stream,)
    words = np.array([(_word("stream", each) + 1) * _G & _MASK for each in streams], np.uint64)
    words.setflags(write=False)
    return words[:, None] if isinstance(stream, tuple) else words.reshape(())


def _base(domain: int, seed: int, epoch: int) -> int:
    state = 0
    for word in (domain, _word("seed", seed), _word("epoch", epoch)):
        state = _mix_int(state + (word + 1) * _G)
    return state


def _mix_int(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * _M1 & _MASK
    z = (z ^ (z >> 27)) * _M2 & _MASK
    return z ^ (z >> 31)


def _mix(z: Keys) -> Keys:
    """``_mix_int`` of each element, overwriting ``z``."""
    z ^= z >> _U30
    z *= _UM1
    z ^= z >> _U27
    z *= _UM2
    z ^= z >> _U31
    return z


def _nth(base: np.uint64 | Keys, counters: Keys) -> Keys:
    """Output number ``counters`` of a SplitMix64 seeded with ``base``, overwriting ``counters``."""
    counters += np.uint64(1)
    counters *= _UG
    counters += base
    return _mix(counters)
