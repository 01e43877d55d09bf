"""Batches by group, by aspect ratio, and of clips."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfmt.sampling import BucketBatchSampler, GroupBatchSampler, SequenceSampler


class Sized:
    """A dataset whose reader knows sizes."""

    def __init__(self, widths, heights):
        self.columns = {"width": np.array(widths, np.uint32), "height": np.array(heights, np.uint32)}

    def __len__(self):
        return len(self.columns["width"])


class TestGroup:
    @given(
        st.lists(st.sampled_from("abc"), max_size=40),
        st.integers(1, 6),
        st.sampled_from([1, 2, 3]),
        st.booleans(),
        st.integers(0, 3),
    )
    def test_keep_gives_every_sample_once_in_batches_of_one_group(self, groups, batch_size, world_size, shuffle, epoch):
        ranks = [
            GroupBatchSampler(
                groups, batch_size, rank=rank, world_size=world_size, shuffle=shuffle, block_size=3, window=2
            )
            for rank in range(world_size)
        ]
        steps = list(zip(*(sampler.batches(epoch) for sampler in ranks), strict=True))
        for step in steps:
            assert len({groups[index] for batch in step for index in batch}) == 1
        samples = [index for step in steps for batch in step for index in batch.tolist()]
        assert set(samples) == set(range(len(groups)))
        assert len(samples) == len(groups) + ranks[0].repeated
        assert len(steps) == len(ranks[0])

    def test_pad_fills_a_batch_from_its_own_group(self):
        groups = ["a"] * 5 + ["b"] * 2
        batches = [sorted(groups[i] for i in batch) for batch in GroupBatchSampler(groups, 4, partial="pad")]
        assert sorted(batches) == [["a"] * 4, ["a"] * 4, ["b"] * 4]

    def test_drop_leaves_out_the_rest_of_each_group(self):
        groups = ["a"] * 5 + ["b"] * 6
        batches = [[groups[i] for i in batch] for batch in GroupBatchSampler(groups, 4, partial="drop")]
        assert sorted(batches) == [["a"] * 4, ["b"] * 4]

    def test_without_shuffle_batches_come_as_their_groups_fill_up(self):
        sampler = GroupBatchSampler(["a", "b", "a", "b", "b", "a"], 2, shuffle=False)
        assert list(sampler) == [[0, 2], [1, 3], [4], [5]]

    def test_without_shuffle_the_order_is_the_one_drawn_in_the_docstring(self):
        groups = "aaaaabbbb"
        batches = GroupBatchSampler(list(groups), 2, shuffle=False)
        assert " ".join("".join(groups[i] for i in batch) for batch in batches) in GroupBatchSampler.__doc__

    def test_groups_are_mixed(self):
        groups = np.repeat(np.arange(20), 10)
        order = [int(groups[batch[0]]) for batch in GroupBatchSampler(groups, 5)]
        assert order != sorted(order)
        assert np.count_nonzero(np.diff(order) == 0) < 10

    def test_a_subset_holds_exactly_its_indices(self):
        sampler = GroupBatchSampler([0, 1] * 10, 3, indices=[3, 4, 5, 19])
        assert sorted(index for batch in sampler for index in batch) == [3, 4, 5, 19]

    def test_no_records_are_no_batches(self):
        assert list(GroupBatchSampler([], 3)) == []

    def test_dropping_everything_warns(self):
        with pytest.warns(UserWarning, match="no global batch of 3 samples"):
            GroupBatchSampler([0, 1, 2], 3, partial="drop")

    def test_groups_of_another_length_than_the_dataset_are_refused(self):
        with pytest.raises(ValueError, match="3 groups for a dataset of 2 records"):
            GroupBatchSampler([0, 1, 2], 3, dataset=[7, 8])

    def test_groups_of_two_dimensions_are_refused(self):
        with pytest.raises(ValueError, match=r"groups must have shape \(n,\), got \(1, 2\)"):
            GroupBatchSampler([[0, 1]], 3)


class TestBucket:
    def test_a_bad_image_that_was_kept_has_no_size_and_any_bucket(self):
        assert len(list(BucketBatchSampler(Sized([40, 0, 30], [30, 0, 40]), 1))) == 3

    def test_batches_have_one_aspect_ratio(self):
        widths, heights = [400, 300, 640, 480] * 6, [300, 400, 480, 480] * 6
        for batch in BucketBatchSampler(Sized(widths, heights), 3):
            assert len({widths[i] / heights[i] for i in batch}) == 1

    @pytest.mark.parametrize(
        ("width", "height", "ratio"), [(200, 100, 2), (999, 100, 2), (100, 101, 1), (119, 100, 1), (1, 1000, 0.5)]
    )
    def test_an_image_goes_to_the_nearest_ratio(self, width, height, ratio):
        sampler = BucketBatchSampler(([width], [height]), 1, ratios=(0.5, 1, 2))
        assert sampler.ratios[sampler.buckets[0]] == ratio

    def test_upright_and_lying_are_treated_alike(self):
        widths, heights = np.arange(50, 500), np.full(450, 200)
        lying = BucketBatchSampler((widths, heights), 1).buckets
        upright = BucketBatchSampler((heights, widths), 1).buckets
        assert (lying + upright == 8).mean() > 0.98  # images right on a border go to the lower bucket both times

    def test_a_dataset_without_sizes_is_refused(self):
        with pytest.raises(ValueError, match="list has no columns 'width' and 'height'"):
            BucketBatchSampler([1, 2, 3], 2)

    def test_a_size_that_is_not_positive_is_refused(self):
        with pytest.raises(ValueError, match=r"heights\[1\] is 0; sizes must be positive"):
            BucketBatchSampler(([1, 2], [1, 0]), 2)

    def test_sizes_of_different_lengths_are_refused(self):
        with pytest.raises(ValueError, match=r"heights must have shape \(2,\), got \(1,\)"):
            BucketBatchSampler(([1, 2], [1]), 2)

    @pytest.mark.parametrize("ratios", [(), (1, 1), (2, 1), (0, 1), (-1, 1), (1, float("inf")), (float("nan"),)])
    def test_ratios_that_do_not_ascend_are_refused(self, ratios):
        with pytest.raises(ValueError, match="ratios must be positive and ascending"):
            BucketBatchSampler(([1], [1]), 2, ratios=ratios)


class TestSequence:
    @given(
        st.lists(st.integers(1, 12), max_size=6),
        st.integers(1, 5),
        st.integers(1, 4),
        st.booleans(),
        st.integers(0, 9),
    )
    @pytest.mark.filterwarnings("ignore:.*are never seen:UserWarning")
    def test_clips_are_consecutive_and_stay_in_their_recording(self, sizes, length, batch_size, shuffle, epoch):
        groups = np.repeat(np.arange(len(sizes)), sizes)
        sampler = SequenceSampler(len(groups), batch_size, length=length, groups=groups, shuffle=shuffle)
        clips = [clip for batch in sampler.batches(epoch) for clip in batch.reshape(-1, length)]
        assert len(clips) == sum(size // length for size in sizes)
        for clip in clips:
            assert (np.diff(clip) == 1).all()
            assert len(set(groups[clip])) == 1

    def test_without_shuffle_clips_come_in_time_order(self):
        sampler = SequenceSampler(11, 2, length=3, groups=[0] * 7 + [1] * 4, shuffle=False)
        assert list(sampler) == [[0, 1, 2, 3, 4, 5], [7, 8, 9]]

    def test_clips_start_everywhere_over_the_epochs(self):
        sampler = SequenceSampler(12, 1, length=4)
        starts = {int(batch[0]) for epoch in range(200) for batch in sampler.batches(epoch)}
        assert starts == set(range(9))

    def test_clips_of_an_epoch_share_a_phase_and_do_not_overlap_but_for_one(self):
        sampler = SequenceSampler(100, 1, length=10)
        for epoch in range(20):
            phases = np.bincount([int(batch[0]) % 10 for batch in sampler.batches(epoch)], minlength=10)
            assert phases.max() >= 9

    def test_recordings_that_are_too_short_are_told(self):
        with pytest.warns(UserWarning, match="1 of 2 recordings are shorter than length=3 and are never seen"):
            sampler = SequenceSampler(6, 1, length=3, groups=[0, 0, 1, 1, 1, 1])
        assert len(sampler) == 1

    def test_no_records_are_no_batches(self):
        assert list(SequenceSampler(0, 2, length=3)) == []

    def test_fewer_clips_than_ranks_reach_every_rank(self):
        ranks = [SequenceSampler(3, 1, length=3, rank=rank, world_size=2) for rank in range(2)]
        assert [list(sampler) for sampler in ranks] == [[[0, 1, 2]], [[0, 1, 2]]]

    def test_a_length_below_one_is_refused(self):
        with pytest.raises(ValueError, match="length must be 1 or more, got 0"):
            SequenceSampler(10, 2, length=0)

    def test_groups_of_another_length_are_refused(self):
        with pytest.raises(ValueError, match=r"groups must have shape \(10,\), got \(2,\)"):
            SequenceSampler(10, 2, length=2, groups=[0, 1])

    @given(
        st.lists(st.integers(1, 20), max_size=6), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 9)
    )
    @pytest.mark.filterwarnings("ignore:.*are never seen:UserWarning")
    def test_with_a_step_clips_skip_records(self, sizes, length, step, shuffle, epoch):
        groups = np.repeat(np.arange(len(sizes)), sizes)
        sampler = SequenceSampler(len(groups), 2, length=length, step=step, groups=groups, shuffle=shuffle)
        clips = [clip for batch in sampler.batches(epoch) for clip in batch.reshape(-1, length)]
        assert len(clips) == sum((size + step - 1) // (length * step) for size in sizes)
        for clip in clips:
            assert (np.diff(clip) == step).all()
            assert len(set(groups[clip])) == 1

    def test_with_a_step_epochs_together_see_every_record(self):
        sampler = SequenceSampler(13, 1, length=3, step=4)
        seen = np.concatenate([batch for epoch in range(200) for batch in sampler.batches(epoch)])
        assert set(seen.tolist()) == set(range(13))

    def test_of_a_subset_clips_stay_within_what_follows_each_other(self):
        sampler = SequenceSampler(20, 2, length=3, indices=[9, 8, 7, 6, 1, 2, 3, 15, 16, 17], shuffle=False)
        assert list(sampler) == [[1, 2, 3, 6, 7, 8], [15, 16, 17]]

    def test_of_a_subset_groups_are_borders_too(self):
        groups = [0] * 5 + [1] * 5
        sampler = SequenceSampler(10, 2, length=3, indices=range(2, 10), groups=groups, shuffle=False)
        assert list(sampler) == [[2, 3, 4, 5, 6, 7]]

    def test_a_record_twice_in_a_subset_is_refused(self):
        with pytest.raises(ValueError, match="indices hold 4 twice"):
            SequenceSampler(10, 2, length=2, indices=[3, 4, 5, 4])

    def test_a_recording_shorter_than_a_clip_with_its_step_is_told(self):
        with pytest.warns(UserWarning, match=r"1 of 1 recordings are shorter than a clip of 7 \(length, step\)"):
            assert len(SequenceSampler(6, 1, length=3, step=3)) == 0

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_the_frames_of_a_clip_have_one_key(self, world_size):
        for rank in range(world_size):
            sampler = SequenceSampler(60, 3, length=4, step=2, rank=rank, world_size=world_size, partial="pad")
            keys = []
            for batch in sampler:
                for clip in np.array(batch, dtype=object).reshape(-1, 4):
                    assert {index.source for index in clip} == {clip[0]}
                    assert len({index.draw for index in clip}) == 1
                    keys.append((clip[0].source, clip[0].draw))
            assert len(set(keys)) == len(keys)

    def test_a_clip_that_comes_twice_in_an_epoch_has_two_keys(self):
        sampler = SequenceSampler(9, 3, length=3, partial="pad")  # where the phase is not 0, one clip is anywhere
        for epoch in range(30):
            starts = [int(batch[place]) for batch in sampler.batches(epoch) for place in (0, 3, 6)]
            numbers = [
                int(draws.numbers[place]) if draws.numbers is not None else 0
                for draws in sampler.draws(epoch)
                for place in (0, 3, 6)
            ]
            assert len(set(zip(starts, numbers, strict=True))) == 3

    def test_a_state_from_before_there_were_steps_goes_on(self):
        state = SequenceSampler(60, 3, length=4).state_dict(epoch=1, position=2)
        del state["step"], state["indices"]
        sampler = SequenceSampler(60, 3, length=4)
        sampler.load_state_dict(state)
        assert sampler.place == (1, 2)

    @pytest.mark.parametrize("options", [{"step": 2}, {"indices": range(40)}])
    def test_a_state_of_other_clips_is_refused(self, options):
        with pytest.raises(ValueError, match="the state was taken with"):
            SequenceSampler(60, 3, length=4, **options).load_state_dict(SequenceSampler(60, 3, length=4).state_dict())


def test_an_index_that_a_group_has_twice_is_drawn_with_two_numbers():
    sampler = GroupBatchSampler([0] * 4 + [1] * 4, 4, indices=[1, 1, 2, 5, 6], partial="pad")
    found = [(int(index), index.draw) for batch in sampler for index in batch]
    assert len(set(found)) == len(found) == 8
    assert {(1, 0), (1, 1), (2, 0), (5, 0), (6, 0)} <= set(found)
