"""MixUp and CutMix: labels weigh what the pixels show, by the batch's generator alone."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="batch transforms need torch")

from packfmt.randomness import batch_rng  # noqa: E402  (after the skip)
from packfmt.training.mix import CutMix, MixUp  # noqa: E402

CLASSES = 7
BOTH = [MixUp(alpha=1.0, num_classes=CLASSES), CutMix(num_classes=CLASSES)]
FORMATS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16]

both = pytest.mark.parametrize("mix", BOTH, ids=lambda mix: type(mix).__name__)


def batch(count=6, height=20, width=30, dtype=torch.uint8, memory_format=torch.channels_last):
    pixels = np.random.default_rng(count).integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    images = torch.from_numpy(pixels).to(dtype).contiguous(memory_format=memory_format)
    return images, torch.arange(count) % CLASSES


def numbered(count, height=16, width=24):
    """Images that hold nothing but their own number."""
    return torch.arange(count, dtype=torch.float32).reshape(-1, 1, 1, 1).expand(count, 3, height, width).clone()


class TestBoth:
    @both
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("memory_format", FORMATS, ids=str)
    def test_dtype_shape_and_memory_format_stay(self, mix, dtype, memory_format):
        images, labels = batch(dtype=dtype, memory_format=memory_format)
        mixed, soft = mix(images, labels, batch_rng(0, 0, 0))
        assert mixed.dtype == dtype
        assert mixed.shape == images.shape
        assert mixed.stride() == images.stride()
        assert soft.dtype == torch.float32
        assert soft.shape == (len(images), CLASSES)

    @both
    def test_label_rows_sum_to_one(self, mix):
        images, labels = batch()
        for number in range(50):
            _, soft = mix(images, labels, batch_rng(0, 0, number))
            assert torch.allclose(soft.sum(1), torch.ones(len(images)), atol=1e-6)
            assert (soft >= 0).all()

    @both
    def test_the_key_decides(self, mix):
        images, labels = batch()
        first, again, other = (mix(images, labels, batch_rng(0, epoch, 5)) for epoch in (1, 1, 2))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
        assert not torch.equal(first[1], other[1])

    @both
    def test_torchs_own_generator_is_left_alone(self, mix):
        before = torch.random.get_rng_state()
        mix(*batch(), batch_rng(0, 0, 0))
        assert torch.equal(torch.random.get_rng_state(), before)

    @both
    def test_the_input_is_left_alone(self, mix):
        images, labels = batch()
        copies = images.clone(), labels.clone()
        mix(images, labels, batch_rng(0, 0, 0))
        assert torch.equal(images, copies[0])
        assert torch.equal(labels, copies[1])

    @both
    def test_every_sample_is_mixed_with_the_one_before_it(self, mix):
        images = numbered(5)
        labels = torch.arange(5)
        mixed, soft = mix(images, labels, batch_rng(0, 0, 3))
        for number in range(5):
            partner = (number - 1) % 5
            assert set(soft[number].nonzero().ravel().tolist()) == {number, partner}
            low, high = sorted((number, partner))
            assert low <= float(mixed[number].min()) <= float(mixed[number].max()) <= high

    @both
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
    def test_a_batch_of_one_is_itself(self, mix, dtype):
        images, labels = batch(1, dtype=dtype)
        mixed, soft = mix(images, labels, batch_rng(0, 0, 0))
        assert torch.equal(mixed, images)
        assert soft.tolist() == [[1.0] + [0.0] * (CLASSES - 1)]

    @both
    def test_an_empty_batch(self, mix):
        images = torch.zeros(0, 3, 4, 4, dtype=torch.uint8)
        mixed, soft = mix(images, torch.zeros(0, dtype=torch.int64), batch_rng(0, 0, 0))
        assert mixed.shape == (0, 3, 4, 4)
        assert soft.shape == (0, CLASSES)

    @both
    def test_a_batch_of_one_class_keeps_its_labels(self, mix):
        images, _ = batch()
        _, soft = mix(images, torch.full((len(images),), 3), batch_rng(0, 0, 0))
        assert torch.equal(soft, torch.nn.functional.one_hot(torch.full((len(images),), 3), CLASSES).float())

    @pytest.mark.parametrize("kind", [MixUp, CutMix])
    def test_a_single_class(self, kind):
        images, labels = batch(4)
        _, soft = kind(num_classes=1)(images, labels * 0, batch_rng(0, 0, 0))
        assert soft.tolist() == [[1.0]] * 4

    @both
    def test_soft_labels_are_mixed_as_hard_ones(self, mix):
        images, labels = batch()
        hard = mix(images, labels, batch_rng(0, 0, 0))[1]
        soft = mix(images, torch.nn.functional.one_hot(labels, CLASSES).double(), batch_rng(0, 0, 0))[1]
        assert torch.equal(hard, soft)

    @both
    def test_pickles(self, mix):
        assert pickle.loads(pickle.dumps(mix)) == mix

    @both
    @pytest.mark.parametrize(
        ("images", "labels", "error", "message"),
        [
            (torch.zeros(3, 4, 4), torch.zeros(3).long(), ValueError, r"shape \(N, C, H, W\)"),
            (torch.zeros(2, 3, 4, 4).int(), torch.zeros(2).long(), TypeError, "uint8 or floating point"),
            (torch.zeros(2, 3, 4, 4), torch.zeros(3).long(), ValueError, r"labels must have shape \(2,\) or \(2, 7\)"),
            (torch.zeros(2, 3, 4, 4), torch.zeros(2, 5), ValueError, r"labels must have shape"),
            (torch.zeros(2, 3, 4, 4), torch.zeros(2), TypeError, "must be integers"),
            (torch.zeros(2, 3, 4, 4), torch.zeros(2, 7).long(), TypeError, "must be floating point"),
            (torch.zeros(2, 3, 4, 4), torch.tensor([0, 7]), ValueError, r"label 7 is outside 0\.\.6"),
            (torch.zeros(2, 3, 4, 4), torch.tensor([-1, 0]), ValueError, r"label -1 is outside 0\.\.6"),
        ],
    )
    def test_unusable_batches(self, mix, images, labels, error, message):
        with pytest.raises(error, match=message):
            mix(images, labels, batch_rng(0, 0, 0))

    @pytest.mark.parametrize("kind", [MixUp, CutMix])
    @pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": math.nan}, {"num_classes": 0}], ids=repr)
    def test_unusable_options(self, kind, options):
        with pytest.raises(ValueError, match=f"{kind.__name__}: {next(iter(options))} must be"):
            kind(**{"num_classes": CLASSES, **options})


class TestMixUp:
    def test_lambda_is_the_first_draw_from_beta(self):
        images, labels = batch()
        _, soft = MixUp(alpha=0.4, num_classes=CLASSES)(images, labels, batch_rng(1, 2, 3))
        assert float(soft[0, 0]) == pytest.approx(batch_rng(1, 2, 3).beta(0.4, 0.4), abs=1e-6)

    @pytest.mark.parametrize("count", [2, 3, 90])
    @pytest.mark.parametrize("memory_format", FORMATS, ids=str)
    def test_uint8_is_the_rounded_blend(self, count, memory_format):
        images, labels = batch(count, 40, 50, memory_format=memory_format)  # 90 images take several steps
        lam = batch_rng(0, 0, 1).beta(1.0, 1.0)
        mixed, _ = MixUp(alpha=1.0, num_classes=CLASSES)(images, labels, batch_rng(0, 0, 1))
        exact = images.double() * lam + images.double().roll(1, 0) * (1 - lam)
        assert float((mixed.double() - exact).abs().max()) <= 0.5 + 1e-4

    def test_float_is_the_blend(self):
        images, labels = batch(dtype=torch.float64)
        lam = batch_rng(0, 0, 1).beta(1.0, 1.0)
        mixed, _ = MixUp(alpha=1.0, num_classes=CLASSES)(images, labels, batch_rng(0, 0, 1))
        assert torch.allclose(mixed, images * lam + images.roll(1, 0) * (1 - lam), rtol=0, atol=1e-10)

    def test_uint8_reaches_neither_below_0_nor_above_255(self):
        images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).repeat(1, 3, 8, 8)
        for number in range(100):
            mixed, soft = MixUp(num_classes=2)(images, torch.tensor([0, 1]), batch_rng(0, 0, number))
            assert float((mixed[1, 0, 0, 0] - 255 * soft[1, 1]).abs()) <= 0.5 + 1e-4


class TestCutMix:
    def test_labels_are_the_share_of_pixels_exactly(self):
        count, height, width = 5, 16, 32  # a power of two, so that float32 holds every share exactly
        images, labels = numbered(count, height, width), torch.arange(count)
        shares = []
        for number in range(200):
            mixed, soft = CutMix(num_classes=count)(images, labels, batch_rng(0, 0, number))
            shown = torch.stack([(mixed[:, 0] == label).flatten(1).float().mean(1) for label in range(count)], 1)
            assert torch.equal(soft, shown)
            shares.append(float(soft[0, 0]))
        assert len(set(shares)) > 50

    def test_what_is_replaced_is_a_rectangle_at_the_same_place_of_the_neighbour(self):
        images, labels = batch()
        for number in range(20):
            mixed, _ = CutMix(num_classes=CLASSES)(images, labels, batch_rng(0, 0, number))
            changed = (mixed != images).any(1).any(0)
            rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
            if len(rows):
                box = (slice(None), slice(None), slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
                assert torch.equal(mixed[box], images.roll(1, 0)[box])

    def test_rectangles_follow_the_published_algorithm(self):
        """Kept shares are distributed as in a plain re-telling (Kolmogorov-Smirnov, false alarm 1 in 10,000)."""
        height, width, count = 20, 30, 4000
        mix, images, labels = CutMix(num_classes=2), torch.zeros(2, 1, height, width), torch.tensor([0, 1])
        ours = np.array([float(mix(images, labels, batch_rng(9, 0, n))[1][0, 0]) for n in range(count)])
        rng = np.random.default_rng(1)
        lam, x, y = rng.uniform(size=count), rng.integers(width, size=count), rng.integers(height, size=count)
        half_w, half_h = ((0.5 * np.sqrt(1 - lam) * side).astype(int) for side in (width, height))
        across = np.minimum(x + half_w, width) - np.maximum(x - half_w, 0)
        down = np.minimum(y + half_h, height) - np.maximum(y - half_h, 0)
        theirs = (1 - across * down / (height * width)).astype(np.float32)
        points = np.concatenate([ours, theirs])
        shares = [np.searchsorted(np.sort(sample), points, side="right") / count for sample in (ours, theirs)]
        assert np.abs(shares[0] - shares[1]).max() < math.sqrt(-math.log(1e-4 / 2) / 2) * math.sqrt(2 / count)

    def test_images_of_one_pixel(self):
        images = torch.tensor([1, 2], dtype=torch.uint8).reshape(2, 1, 1, 1)
        mixed, soft = CutMix(num_classes=2)(images, torch.tensor([0, 1]), batch_rng(0, 0, 0))
        assert torch.equal(mixed, images)
        assert soft.tolist() == [[1, 0], [0, 1]]
