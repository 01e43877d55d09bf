"""Keyed randomness: values that never change, independence, and the generator of the current sample."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfmt.randomness import (
    batch_rng,
    generator,
    integers,
    sample_keys,
    sample_rng,
    sampling,
    set_sample,
    uniform,
)

COUNT = 100_000
WORDS = st.integers(0, 2**64 - 1)


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator in plain Python."""
    mask, outputs = 2**64 - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def chi_square(counts: np.ndarray) -> float:
    """Pearson's statistic of equally likely cells, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.fixture(autouse=True)
def no_sample():
    set_sample(None)
    yield
    set_sample(None)


@pytest.mark.torch
def test_numpys_generators_are_there_before_the_first_draw() -> None:
    # Importing them in one thread, while another forks, leaves the child with a lock that never opens.
    program = "import sys, packfmt; packfmt.Loader; sys.exit('numpy.random' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class TestGolden:
    """A change here changes every user's training run: never edit the numbers."""

    def test_keys(self):
        assert sample_keys(0, 0, [0, 1, 2]).tolist() == [0x2130748AAAC80268, 0x0CC78FB979CE5090, 0xAB9AA3DAFBA6B4AC]
        assert sample_keys(7, 3, [0, 10**12]).tolist() == [0x148B3BCC5816D109, 0x2FF602DAB651F6B6]

    def test_uniform(self):
        keys = sample_keys(0, 0, range(2))
        assert [value.hex() for value in uniform(keys, 0)] == ["0x1.e2b96a69ad7f4p-2", "0x1.9038aa2bc6b08p-1"]
        assert [value.hex() for value in uniform(keys, 5)] == ["0x1.4fff014254800p-8", "0x1.b7d891204e34ap-1"]

    def test_integers(self):
        assert integers(sample_keys(0, 0, range(4)), 1, 0, 1000).tolist() == [724, 192, 597, 907]

    def test_generators(self):
        assert generator(0x2130748AAAC80268).bit_generator.random_raw() == 3904894811010551341
        assert batch_rng(0, 0, 0).bit_generator.random_raw() == 8473999173996958591
        assert batch_rng(7, 3, 2).bit_generator.random_raw() == 17607640019096582110

    def test_published_splitmix64_outputs(self):
        published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
        assert splitmix64(1234567, 4) == published
        key = np.array([1234567], dtype=np.uint64)
        assert [int(uniform(key, stream)[0] * 2**53) for stream in range(4)] == [bits >> 11 for bits in published]

    @given(WORDS, WORDS)
    def test_keys_follow_the_documented_formula(self, seed, epoch):
        base = 0
        for word in (0, seed, epoch):
            base = splitmix64(base + word * 0x9E3779B97F4A7C15, 1)[0]
        assert sample_keys(seed, epoch, range(5)).tolist() == splitmix64(base, 5)

    @given(WORDS, WORDS, st.integers(1, 2**40))
    def test_keys_of_further_draws_follow_the_documented_formula(self, seed, epoch, draw):
        base = 0
        for word in (2, seed, epoch, draw):
            base = splitmix64(base + word * 0x9E3779B97F4A7C15, 1)[0]
        assert sample_keys(seed, epoch, range(5), np.full(5, draw)).tolist() == splitmix64(base, 5)


class TestSampleKeys:
    @given(st.lists(st.integers(0, 2**63 - 1), max_size=20), st.integers(0, 20))
    def test_do_not_depend_on_the_batch(self, indices, cut):
        whole = sample_keys(1, 2, indices)
        parts = np.concatenate([sample_keys(1, 2, indices[:cut]), sample_keys(1, 2, indices[cut:])])
        assert np.array_equal(whole, parts)

    @pytest.mark.parametrize("dtype", ["u1", "i2", "<u4", ">i4", "i8", "u8"])
    def test_any_integer_dtype(self, dtype):
        assert np.array_equal(sample_keys(5, 0, np.arange(9, dtype=dtype)), sample_keys(5, 0, range(9)))

    def test_leave_the_indices_unchanged(self):
        indices = np.arange(4, dtype=np.uint64)
        sample_keys(0, 0, indices)
        assert indices.tolist() == [0, 1, 2, 3]

    def test_are_unique_over_samples_epochs_and_seeds(self):
        pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2**64 - 1, 2**64 - 1)]
        keys = np.concatenate([sample_keys(seed, epoch, np.arange(20_000)) for seed, epoch in pairs])
        assert len(np.unique(keys)) == len(keys)

    def test_the_first_draw_has_the_samples_key(self):
        draws = np.array([0, 3, 0, 1])
        keys = sample_keys(5, 6, range(4), draws)
        assert (keys == sample_keys(5, 6, range(4))).tolist() == [True, False, True, False]
        assert draws.tolist() == [0, 3, 0, 1]

    def test_are_unique_over_draws_epochs_and_seeds(self):
        indices, draws = (part.ravel() for part in np.meshgrid(np.arange(500), np.arange(50)))
        pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
        keys = np.concatenate([sample_keys(seed, epoch, indices, draws) for seed, epoch in pairs])
        assert len(np.unique(keys)) == len(keys)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((0, 0, [1, 2], np.array([0, -1])), ValueError, r"draws\[1\] is -1; draws are counted from 0"),
            ((0, 0, [1, 2], np.array([0.0, 1.0])), TypeError, "draws must be integers"),
            ((0, 0, [1, 2], np.array([0])), ValueError, r"draws must have shape \(2,\)"),
            ((-1, 0, [0]), ValueError, "seed must lie in"),
            ((2**64, 0, [0]), ValueError, "seed must lie in"),
            ((0, -1, [0]), ValueError, "epoch must lie in"),
            ((0.5, 0, [0]), TypeError, "seed must be an integer"),
            ((0, 0, [3, -7]), ValueError, r"indices\[1\] is -7"),
            ((0, 0, [0.0]), TypeError, "indices must be integers"),
            ((0, 0, 3), ValueError, "shape"),
        ],
    )
    def test_bad_arguments(self, arguments, error, message):
        with pytest.raises(error, match=message):
            sample_keys(*arguments)


class TestDraws:
    def test_uniform_is_uniform_in_every_byte(self):
        bits = (uniform(sample_keys(11, 0, np.arange(COUNT)), 3) * 2**53).astype(np.int64)
        for shift in (0, 8, 16, 24, 32, 40, 45):
            assert abs(chi_square(np.bincount((bits >> shift) & 255, minlength=256))) < 5

    def test_uniform_lies_in_the_half_open_interval(self):
        values = uniform(sample_keys(0, 0, np.arange(COUNT)), 0)
        assert values.dtype == np.float64
        assert values.min() >= 0
        assert values.max() < 1

    @pytest.mark.parametrize(
        "pair",
        [
            lambda i: (uniform(sample_keys(1, 0, i), 0), uniform(sample_keys(1, 0, i), 1)),
            lambda i: (uniform(sample_keys(1, 0, i), 0), uniform(sample_keys(1, 0, i + 1), 0)),
            lambda i: (uniform(sample_keys(1, 0, i), 1), uniform(sample_keys(1, 0, i + 1), 0)),
            lambda i: (uniform(sample_keys(1, 0, i), 0), uniform(sample_keys(1, 1, i), 0)),
            lambda i: (uniform(sample_keys(1, 0, i), 0), uniform(sample_keys(2, 0, i), 0)),
            lambda i: (uniform(sample_keys(1, 2, i), 0), uniform(sample_keys(2, 1, i), 0)),
        ],
        ids=["streams", "indices", "index and stream", "epochs", "seeds", "seed and epoch swapped"],
    )
    def test_neighbours_are_independent(self, pair):
        first, second = pair(np.arange(COUNT))
        cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
        assert abs(chi_square(np.bincount(cells, minlength=256))) < 5

    def test_integers_are_uniform(self):
        values = integers(sample_keys(3, 0, np.arange(COUNT)), 0, -5, 95)
        assert values.dtype == np.int64
        assert abs(chi_square(np.bincount(values + 5, minlength=100))) < 5

    @given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(-(2**50), 2**50), st.integers(1, 2**53)), max_size=20))
    def test_integers_stay_in_range(self, rows):
        indices, low, span = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        values = integers(sample_keys(0, 0, indices), 2, low, low + span)
        assert ((low <= values) & (values < low + span)).all()

    def test_the_greatest_uniform_stays_below_high(self, monkeypatch):
        monkeypatch.setattr("packfmt.randomness.uniform", lambda keys, stream: np.full(keys.shape, 1 - 2.0**-53))
        high = np.concatenate([np.arange(1, 1000), 2 ** np.arange(10, 54), 2 ** np.arange(10, 53) + 1])
        assert np.array_equal(integers(np.zeros(len(high), np.uint64), 0, 0, high), high - 1)

    @pytest.mark.parametrize(("low", "high"), [(0, 0), (5, 4), (0, 2**53 + 1), (0, [3, 0])])
    def test_integers_refuse_an_unusable_range(self, low, high):
        with pytest.raises(ValueError, match="high - low must lie in"):
            integers(sample_keys(0, 0, [0, 1]), 0, low, high)

    @pytest.mark.parametrize("keys", [np.arange(3), [1, 2], np.float64(3)])
    def test_uniform_refuses_other_keys(self, keys):
        with pytest.raises(TypeError, match="uint64 array from sample_keys"):
            uniform(keys, 0)

    def test_uniform_refuses_a_negative_stream(self):
        with pytest.raises(ValueError, match="stream must lie in"):
            uniform(sample_keys(0, 0, [0]), -1)

    def test_uniform_leaves_the_keys_unchanged(self):
        keys = sample_keys(0, 0, range(3))
        uniform(keys, 0)
        assert np.array_equal(keys, sample_keys(0, 0, range(3)))

    def test_nothing_for_nobody(self):
        keys = sample_keys(0, 0, [])
        assert keys.dtype == np.uint64
        assert uniform(keys, 0).shape == integers(keys, 0, 0, 5).shape == (0,)


class TestGenerators:
    def test_spawned_generators_repeat(self):
        first, second = (generator(5).spawn(2)[1].random(3) for _ in range(2))
        assert np.array_equal(first, second)

    def test_batches_differ_from_each_other_and_from_samples(self):
        draws = {batch_rng(*words).random() for words in itertools.product(range(3), repeat=3)}
        draws |= {generator(key).random() for key in sample_keys(0, 0, range(3))}
        assert len(draws) == 30

    def test_batch_rng_refuses_a_negative_batch(self):
        with pytest.raises(ValueError, match="batch must lie in"):
            batch_rng(0, 0, -1)


class TestSampleRng:
    def test_outside_of_a_sample_it_says_what_to_do(self):
        with pytest.raises(RuntimeError, match=r"inside a dataset's transform.*sampling\(key\)"):
            sample_rng()

    def test_depends_on_the_key_only(self):
        keys = sample_keys(0, 0, range(3))
        forward, backward = [], []
        for key in keys:
            set_sample(key)
            forward.append(sample_rng().random())
        for key in keys[::-1]:
            with sampling(key):
                backward.append(sample_rng().random())
        assert forward == backward[::-1]

    def test_draws_go_on_within_a_sample(self):
        with sampling(9):
            draws = [sample_rng().random(), sample_rng().random()]
            assert sample_rng() is sample_rng()
        assert draws == generator(9).random(2).tolist()

    def test_setting_a_key_starts_anew(self):
        set_sample(9)
        first = sample_rng().random()
        set_sample(9)
        assert sample_rng().random() == first

    def test_the_context_ends(self):
        with sampling(9):
            pass
        with pytest.raises(RuntimeError):
            sample_rng()

    def test_the_context_ends_on_an_error(self):
        with pytest.raises(ZeroDivisionError), sampling(9):
            raise ZeroDivisionError
        with pytest.raises(RuntimeError):
            sample_rng()

    def test_a_nested_sample_leaves_the_outer_one_where_it_was(self):
        with sampling(1):
            outer = sample_rng()
            before = outer.random()
            with sampling(2):
                assert sample_rng() is not outer
            after = sample_rng().random()
        assert [before, after] == generator(1).random(2).tolist()

    def test_no_generator_is_made_unless_asked_for(self, monkeypatch):
        monkeypatch.setattr("packfmt.randomness.generator", None)
        with sampling(1):
            pass

    def test_threads_do_not_see_each_other(self):
        keys = sample_keys(0, 0, range(8))
        together, results = threading.Barrier(len(keys)), {}

        def work(position: int) -> None:
            with sampling(keys[position]):
                together.wait(10)
                first = sample_rng().random()
                together.wait(10)
                results[position] = [first, sample_rng().random()]

        threads = [threading.Thread(target=work, args=(position,)) for position in range(len(keys))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {position: generator(key).random(2).tolist() for position, key in enumerate(keys)}

    def test_a_thread_starts_without_a_sample(self):
        caught = []

        def work() -> None:
            try:
                sample_rng()
            except RuntimeError as error:
                caught.append(error)

        with sampling(1):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert len(caught) == 1
