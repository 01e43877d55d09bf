"""How orders are judged, and the warning that an order would be one-sided."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from packfmt.sampling import BlockBatchSampler, GroupBatchSampler, SequenceSampler
from packfmt.sampling.quality import entropy
from packfmt.sampling.shuffle import permutation

SORTED = np.arange(10_000) // 1000


class Data:
    def __init__(self, labels, **facts):
        self.labels = labels
        for name, value in facts.items():
            setattr(self, name, value)

    def __len__(self):
        return 10_000


@pytest.mark.parametrize(
    ("labels", "bits"), [([], 0), ([7, 7], 0), ([0, 1], 1), ([0, 0, 1, 1, 2, 2, 3, 3], 2), (["a", "b"], 1)]
)
def test_entropy_is_in_bits(labels, bits):
    assert entropy(np.array(labels)) == pytest.approx(bits)


class TestReport:
    def test_a_full_shuffle_mixes_fully(self):
        report = BlockBatchSampler(10_000, 64, block_size=1, window=10_000).quality(SORTED)
        assert report.mixing == pytest.approx(1, abs=0.02)
        assert abs(report.neighbour_correlation) < 0.05

    def test_no_shuffle_does_not_mix(self):
        report = BlockBatchSampler(10_000, 64, shuffle=False).quality(SORTED)
        assert report.mixing < 0.05
        assert report.neighbour_correlation > 0.99
        assert report.run_records > 2000

    def test_larger_windows_mix_better(self):
        mixing = [BlockBatchSampler(10_000, 64, block_size=50, window=w).quality(SORTED).mixing for w in (1, 4, 16)]
        assert mixing == sorted(mixing)
        assert mixing[0] < 0.4 < 0.8 < mixing[2]

    def test_runs_are_about_a_block_long(self):
        report = BlockBatchSampler(100_000, 64, block_size=50, window=16).quality()
        assert 45 < report.run_records < 60

    def test_runs_are_in_bytes_where_the_size_is_known(self):
        report = BlockBatchSampler(Data(None, record_bytes=1000.0), 64, block_size=50, window=16).quality()
        assert report.run_bytes == report.run_records * 1000

    def test_without_labels_or_sizes_they_are_missing(self):
        report = BlockBatchSampler(10_000, 64).quality()
        assert (report.label_entropy, report.mixing, report.run_bytes) == (None, None, None)

    def test_labels_come_from_the_dataset(self):
        data = Data(SORTED[permutation(10_000, 0, 0, 0)])
        assert BlockBatchSampler(data, 64).quality().mixing == pytest.approx(1, abs=0.02)

    def test_a_subset_is_compared_with_itself(self):
        report = BlockBatchSampler(10_000, 64, indices=np.arange(2000)).quality(SORTED)
        assert report.full_shuffle_entropy < 1.01

    @pytest.mark.parametrize(
        "sampler",
        [GroupBatchSampler(SORTED, 64), SequenceSampler(10_000, 8, length=8)],
        ids=["group", "sequence"],
    )
    def test_is_given_by_every_sampler(self, sampler):
        report = sampler.quality(SORTED)
        assert 0 <= report.mixing < 1

    def test_of_nothing_is_empty(self):
        report = BlockBatchSampler(0, 64).quality([])
        assert (report.batches, report.run_records) == (0, 0)

    def test_labels_of_two_dimensions_are_refused(self):
        with pytest.raises(ValueError, match=r"labels must have shape \(n,\)"):
            BlockBatchSampler(10, 2).quality(np.zeros((10, 2)))


class TestWarning:
    def test_sorted_data_and_a_small_window_warn_with_both_remedies(self):
        with pytest.warns(UserWarning, match=r"one-sided.*`pack --shuffle`, or raise window \(now 2 of") as caught:
            BlockBatchSampler(Data(SORTED), 64, block_size=100, window=2)
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_a_label_column_is_enough(self):
        reader = SimpleNamespace(columns={"label": SORTED})
        with pytest.warns(UserWarning, match="one-sided"):
            BlockBatchSampler(Data(None, reader=reader), 64, block_size=100, window=2)

    def test_a_sorted_subset_warns(self):
        with pytest.warns(UserWarning, match="one-sided"):
            BlockBatchSampler(Data(SORTED), 64, block_size=100, window=2, indices=np.arange(0, 10_000, 2))

    @pytest.mark.parametrize(
        "options",
        [
            {"window": 50},
            {"shuffle": False},
            {"window": 2, "block_size": 5000},
            {},
            {"window": 2, "indices": np.arange(1000)},
        ],
        ids=["large window", "not shuffled", "one window", "defaults", "subset of one class"],
    )
    def test_a_mixed_order_does_not_warn(self, options):
        BlockBatchSampler(Data(SORTED), 64, **{"block_size": 100, **options})

    @pytest.mark.parametrize("rare", [0.001, 0.01, 0.03, 0.1])
    def test_rare_classes_do_not_warn(self, rare):
        for seed in range(10):
            labels = permutation(10_000, seed, 0, 0) < rare * 10_000
            BlockBatchSampler(Data(labels), 64, block_size=100, window=2, seed=seed)

    @pytest.mark.parametrize("labels", [None, np.zeros((10_000, 2)), np.zeros(3, int), np.zeros(10_000), "label"])
    def test_labels_that_are_none_are_passed_over(self, labels):
        BlockBatchSampler(Data(labels), 64, block_size=100, window=2)
