"""Crops and flips: inside the image, functions of the key alone, and distributed as torchvision's."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfmt.images.boxes import crop_boxes, turn_boxes
from packfmt.images.exif import oriented
from packfmt.images.geometry import (
    CenterCrop,
    Crop,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    VerticalFlip,
    choose_flips,
)
from packfmt.randomness import sample_keys, uniform

ALL = [
    RandomResizedCrop(224),
    RandomResizedCrop((96, 128), scale=(0.0, 0.3), ratio=(0.5, 4.0)),
    RandomResizedCrop(8, scale=(0.9, 1.0), ratio=(3.0, 5.0)),
    RandomResizedCrop(8, ratio=(0.1, 0.2)),
    RandomCrop(1),
    CenterCrop(1),
    CenterCrop(224, resize=256),
    CenterCrop((100, 224), resize=224),
    CenterCrop(1, resize=999),
    CenterCrop(224, resize=256, interpolation="bicubic"),
    Resize(224),
    Resize(shorter=256, max_size=300),
]
SIDES = st.one_of(st.integers(1, 40), st.integers(1, 65_535))
IMAGES = st.lists(st.tuples(SIDES, SIDES, st.integers(0, 10**9)), max_size=20)


def arrays(images):
    heights, widths, indices = np.array(images, np.int64).reshape(-1, 3).T
    return heights, widths, sample_keys(3, 1, indices)


class KeyedDraws:
    """The draws of one sample, one at a time, in the order in which the scalar algorithm asks for them."""

    def __init__(self, key):
        self.key = np.array([key], np.uint64)
        self.shapes = iter(range(16, 36))

    def uniform(self, low, high):
        return low + (high - low) * uniform(self.key, next(self.shapes))[0]

    def below(self, stop, stream):
        return math.floor(uniform(self.key, stream)[0] * stop)


class PlainDraws:
    """Draws of Python's own generator."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def uniform(self, low, high):
        return self.random.uniform(low, high)

    def below(self, stop, stream):
        return self.random.randrange(stop)


def reference(height, width, draws, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)):
    """torchvision's published RandomResizedCrop for one image: (x0, y0, x1, y1, whether it fell back)."""
    for _ in range(10):
        target = height * width * draws.uniform(*scale)
        aspect = math.exp(draws.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, tall = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            top, left = draws.below(height - tall + 1, 1), draws.below(width - wide + 1, 2)
            return left, top, left + wide, top + tall, False
    wide, tall = width, height
    if width / height < ratio[0]:
        tall = round(width / ratio[0])
    elif width / height > ratio[1]:
        wide = round(height * ratio[1])
    top, left = (height - tall) // 2, (width - wide) // 2
    return left, top, left + wide, top + tall, True


def same_distribution(first, second):
    """Two-sample Kolmogorov-Smirnov test; a false alarm once in 10,000 times."""
    points = np.concatenate([first, second])
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (first, second)]
    limit = math.sqrt(-math.log(1e-4 / 2) / 2) * math.sqrt(1 / len(first) + 1 / len(second))
    return np.abs(shares[0] - shares[1]).max() < limit


class TestEveryCrop:
    @pytest.mark.parametrize("crop", ALL, ids=repr)
    @given(images=IMAGES)
    def test_boxes_are_never_empty_and_always_inside(self, crop, images):
        heights, widths, keys = arrays(images)
        boxes = crop.boxes(heights, widths, keys)
        x0, y0, x1, y1 = boxes.T
        fractional = getattr(crop, "resize", None) is not None
        assert boxes.dtype == (np.float64 if fractional else np.int64)
        assert boxes.shape == (len(images), 4)
        assert ((x0 >= 0) & (x0 < x1) & (x1 <= widths)).all()
        assert ((y0 >= 0) & (y0 < y1) & (y1 <= heights)).all()

    @pytest.mark.parametrize("crop", ALL, ids=repr)
    @given(images=IMAGES, cut=st.integers(0, 20))
    def test_a_box_does_not_depend_on_its_batch(self, crop, images, cut):
        heights, widths, keys = arrays(images)
        whole = crop.boxes(heights, widths, keys)
        parts = [crop.boxes(heights[part], widths[part], keys[part]) for part in (slice(cut), slice(cut, None))]
        assert np.array_equal(whole, np.concatenate(parts))
        assert np.array_equal(whole[::-1], crop.boxes(heights[::-1], widths[::-1], keys[::-1]))

    @pytest.mark.parametrize("crop", ALL, ids=repr)
    @pytest.mark.parametrize("dtype", ["u1", "i2", "<u4", ">u4", "i8", "u8"])
    def test_any_integer_dtype(self, crop, dtype):
        sizes, keys = np.array([1, 100, 127], dtype), sample_keys(0, 0, range(3))
        expected = crop.boxes([1, 100, 127], [127, 100, 1], keys)
        assert np.array_equal(crop.boxes(sizes, sizes[::-1], keys), expected)

    @pytest.mark.parametrize("crop", ALL, ids=repr)
    def test_is_a_crop_that_pickles(self, crop):
        assert isinstance(crop, Crop)
        assert pickle.loads(pickle.dumps(crop)) == crop
        assert eval(repr(crop)) == crop
        assert hash(crop) == hash(eval(repr(crop)))

    @pytest.mark.parametrize("crop", ALL, ids=repr)
    def test_is_immutable(self, crop):
        with pytest.raises(FrozenInstanceError):
            crop.size = (1, 1)

    @pytest.mark.parametrize("crop", ALL, ids=repr)
    def test_an_image_without_pixels(self, crop):
        with pytest.raises(ValueError, match="sample 1 in the batch has 0 x 300"):
            crop.boxes([300, 0], [300, 300], sample_keys(0, 0, range(2)))

    @pytest.mark.parametrize("crop", ALL, ids=repr)
    def test_sizes_that_are_no_integers(self, crop):
        with pytest.raises(TypeError, match="must be integers"):
            crop.boxes([300.0], [300.0], sample_keys(0, 0, [0]))

    @pytest.mark.parametrize(("heights", "widths", "samples"), [([9], [9, 9], 1), ([9], [9], 2), ([[9]], [[9]], 1)])
    def test_shapes_that_differ(self, heights, widths, samples):
        with pytest.raises(ValueError, match="share one shape"):
            Resize(3).boxes(heights, widths, sample_keys(0, 0, range(samples)))

    @pytest.mark.parametrize("kind", [RandomResizedCrop, RandomCrop, CenterCrop, Resize])
    def test_sizes(self, kind):
        assert kind(7).size == (7, 7)
        assert kind((7, 9)).size == kind([np.int64(7), 9]).size == (7, 9)

    @pytest.mark.parametrize("kind", [RandomResizedCrop, RandomCrop, CenterCrop, Resize])
    @pytest.mark.parametrize("size", [0, -1, 2.5, True, "7", None, (7,), (7, 7, 3), (7, 0)])
    def test_unusable_sizes(self, kind, size):
        with pytest.raises(ValueError, match=f"{kind.__name__}: size must be"):
            kind(size)


class TestRandomResizedCrop:
    def test_golden_boxes(self):
        """A change here changes every user's training run: never edit the numbers."""
        boxes = RandomResizedCrop(224).boxes([375, 500, 64, 10, 1], [500, 333, 64, 900, 1], sample_keys(7, 3, range(5)))
        expected = [[99, 117, 331, 352], [7, 238, 307, 498], [4, 7, 59, 50], [443, 0, 456, 10], [0, 0, 1, 1]]
        assert boxes.tolist() == expected

    @pytest.mark.parametrize(
        "options", [{}, {"scale": (0.0, 0.4)}, {"scale": (0.9, 1.0), "ratio": (0.2, 5.0)}], ids=repr
    )
    @given(images=IMAGES)
    def test_equals_the_published_algorithm_on_the_same_draws(self, options, images):
        heights, widths, keys = arrays(images)
        boxes = RandomResizedCrop(224, **options).boxes(heights, widths, keys)
        rows = zip(heights, widths, keys, strict=True)
        expected = [reference(int(h), int(w), KeyedDraws(k), **options)[:4] for h, w, k in rows]
        assert boxes.tolist() == [list(box) for box in expected]

    @pytest.mark.parametrize("shape", [(375, 500), (500, 333), (64, 64), (120, 400), (900, 60), (9, 11)], ids=str)
    def test_distribution_equals_the_published_algorithm(self, shape):
        height, width, count = *shape, 10_000
        boxes = RandomResizedCrop(224).boxes(
            np.full(count, height), np.full(count, width), sample_keys(2024, 5, np.arange(count))
        )
        draws = PlainDraws(1)
        others = np.array([reference(height, width, draws)[:4] for _ in range(count)])
        for name, measure in {
            "area": lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]),
            "aspect": lambda b: (b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1]),
            "left": lambda b: b[:, 0],
            "top": lambda b: b[:, 1],
            "left within its range": lambda b: b[:, 0] / (width - (b[:, 2] - b[:, 0]) + 1),
            "top against left": lambda b: b[:, 0] * height - b[:, 1] * width,
        }.items():
            assert same_distribution(measure(boxes), measure(others)), name

    def test_the_test_of_distributions_sees_a_difference(self):
        count = 10_000
        images, keys = np.full(count, 300), sample_keys(1, 1, np.arange(count))
        first, second = (RandomResizedCrop(224, scale=(low, 1.0)).boxes(images, images, keys) for low in (0.08, 0.12))
        assert not same_distribution(np.prod(first[:, 2:] - first[:, :2], 1), np.prod(second[:, 2:] - second[:, :2], 1))

    def test_epochs_differ(self):
        sizes = np.full(1000, 300)
        keys = [sample_keys(0, epoch, range(1000)) for epoch in (0, 1)]
        first, second = (RandomResizedCrop(9).boxes(sizes, sizes, epoch_keys) for epoch_keys in keys)
        assert (first == second).all(axis=1).mean() < 0.01

    @pytest.mark.parametrize(
        ("height", "width", "box"),
        [(10, 2000, [993, 0, 1006, 10]), (2000, 9, [0, 994, 9, 1006])],
    )
    def test_where_nothing_fits_the_box_is_central(self, height, width, box):
        keys = sample_keys(0, 0, range(50))
        boxes = RandomResizedCrop(224, scale=(0.5, 1.0)).boxes([height] * 50, [width] * 50, keys)
        assert (boxes == box).all()

    @pytest.mark.parametrize(
        "options",
        [
            {"scale": (0.5, 0.1)},
            {"scale": (-0.1, 1.0)},
            {"scale": (0.0, 0.0)},
            {"scale": (8, 100)},
            {"scale": (0.1, math.nan)},
            {"scale": (0.5,)},
            {"ratio": (0.0, 1.0)},
            {"ratio": (4 / 3, 3 / 4)},
            {"ratio": (1.0, math.inf)},
        ],
        ids=repr,
    )
    def test_unusable_options(self, options):
        with pytest.raises(ValueError, match=f"RandomResizedCrop: .*{next(iter(options))}"):
            RandomResizedCrop(224, **options)


class TestRandomCrop:
    def test_every_place_is_equally_likely(self):
        count = 20_000
        boxes = RandomCrop((4, 8)).boxes(np.full(count, 8), np.full(count, 11), sample_keys(6, 0, np.arange(count)))
        assert (boxes[:, 2:] - boxes[:, :2] == [8, 4]).all()
        places = np.bincount(boxes[:, 1] * 4 + boxes[:, 0], minlength=20)
        assert ((places - count / 20) ** 2 / (count / 20)).sum() < 19 + 5 * math.sqrt(2 * 19)

    def test_an_image_of_the_same_size_is_shown_whole(self):
        assert RandomCrop((3, 5)).boxes([3], [5], sample_keys(0, 0, [0])).tolist() == [[0, 0, 5, 3]]

    def test_a_smaller_image_is_an_error_that_says_which(self):
        message = r"RandomCrop needs images of 32 x 48 .* sample 2 in the batch has 40 x 47"
        with pytest.raises(ValueError, match=message):
            RandomCrop((32, 48)).boxes([32, 40, 40], [48, 48, 47], sample_keys(0, 0, range(3)))


class TestCenterCrop:
    @pytest.mark.parametrize("crop", [CenterCrop((10, 21)), CenterCrop(5)], ids=repr)
    @given(height=st.integers(10, 99), width=st.integers(21, 99))
    def test_plain_crop_rounds_as_torchvision(self, crop, height, width):
        top, left = round((height - crop.size[0]) / 2.0), round((width - crop.size[1]) / 2.0)
        expected = [left, top, left + crop.size[1], top + crop.size[0]]
        assert crop.boxes([height], [width]).tolist() == [expected]

    def test_plain_crop_of_a_smaller_image(self):
        with pytest.raises(ValueError, match=r"CenterCrop needs images of 10 x 10 .* sample 0 in the batch has 9 x 10"):
            CenterCrop(10).boxes([9], [10])

    @given(height=st.integers(1, 5000), width=st.integers(1, 5000))
    def test_with_resize_shows_what_resizing_first_would_show(self, height, width):
        short, long = min(height, width), max(height, width)
        resized = {short: 256, long: int(256 * long / short)}
        box = []
        for side in (width, height):
            first = round((resized[side] - 224) / 2.0)
            box.append([first * side / resized[side], (first + 224) * side / resized[side]])
        exact = np.array(box).T.ravel()
        got = CenterCrop(224, resize=256).boxes([height], [width])[0]
        assert np.abs(got - exact).max() <= 1e-9 * long

    @pytest.mark.parametrize(
        ("height", "width", "box"),
        [(256, 256, [16, 16, 240, 240]), (512, 1024, [288, 32, 736, 480])],
    )
    def test_known_boxes(self, height, width, box):
        assert CenterCrop(224, resize=256).boxes([height], [width]).tolist() == [box]

    def test_a_height_and_a_width_that_are_not_one_argument(self):
        with pytest.raises(TypeError, match=r"resize is given by name; .* one argument: CenterCrop\(\(224, 192\)\)"):
            CenterCrop(224, 192)

    @pytest.mark.parametrize("resize", [223, 0, 256.0])
    def test_unusable_resize(self, resize):
        with pytest.raises(ValueError, match="CenterCrop: resize must be"):
            CenterCrop((100, 224), resize=resize)


class TestResize:
    @pytest.mark.parametrize("resize", [Resize((2, 3)), Resize(shorter=2)], ids=repr)
    def test_shows_the_whole_image(self, resize):
        assert resize.boxes([5, 1], [7, 1], sample_keys(0, 0, [0, 1])).tolist() == [[0, 0, 7, 5], [0, 0, 1, 1]]

    def test_one_size_for_all(self):
        assert Resize((2, 3)).sizes([5, 1], [7, 1]).tolist() == [[2, 3], [2, 3]]

    @given(height=st.integers(1, 9999), width=st.integers(1, 9999), most=st.none() | st.integers(256, 2000))
    def test_the_shorter_side_as_torchvision(self, height, width, most):
        short, long = min(height, width), max(height, width)
        new_short, new_long = 256, int(256 * long / short)
        if most is not None and new_long > most:
            new_short, new_long = max(int(most * new_short / new_long), 1), most
        expected = [new_short, new_long] if height <= width else [new_long, new_short]
        assert Resize(shorter=256, max_size=most).sizes([height], [width]).tolist() == [expected]

    @pytest.mark.parametrize(
        "options",
        [{"size": 9, "shorter": 9}, {"shorter": 0}, {"size": 9, "max_size": 9}, {"shorter": 9, "max_size": 8}],
    )
    def test_unusable_options(self, options):
        with pytest.raises(ValueError, match=r"Resize: .*(size|shorter)"):
            Resize(**options)


@pytest.mark.parametrize("make", [RandomResizedCrop, RandomCrop, Resize])
def test_a_height_and_a_width_that_are_not_one_argument(make):
    with pytest.raises(TypeError, match=rf"one argument: {make.__name__}\(\(224, 192\)\)"):
        make(224, 192)


@pytest.mark.parametrize("make", [RandomResizedCrop, CenterCrop, Resize])
def test_an_interpolation_that_there_is_not(make):
    assert make(9, interpolation="bicubic").interpolation == "bicubic"
    with pytest.raises(ValueError, match=f"{make.__name__}: interpolation must be 'bilinear' or 'bicubic', got 3"):
        make(9, interpolation=3)


class TestVerticalFlip:
    def test_golden_flips(self):
        """A change here changes every user's training run: never edit the numbers."""
        flips = VerticalFlip().flips(sample_keys(0, 0, range(12)))
        assert "".join("01"[int(flip)] for flip in flips) == "110010000111"

    def test_is_independent_of_the_horizontal_one(self):
        keys = sample_keys(8, 0, np.arange(20_000))
        codes = choose_flips((HorizontalFlip(), VerticalFlip(0.25)), keys)
        assert codes.dtype == np.uint8
        shares = np.bincount(codes, minlength=4) / len(keys)
        assert np.abs(shares - [0.375, 0.375, 0.125, 0.125]).max() < 0.02

    def test_chosen_alone_and_together(self):
        keys = sample_keys(8, 0, np.arange(50))
        across, down = HorizontalFlip().flips(keys), VerticalFlip().flips(keys)
        assert np.array_equal(choose_flips((HorizontalFlip(),), keys), across)
        assert np.array_equal(choose_flips((VerticalFlip(),), keys), 2 * down)
        assert np.array_equal(choose_flips((HorizontalFlip(), VerticalFlip()), keys), across + 2 * down)
        assert choose_flips((), keys) is None

    def test_pickles(self):
        assert pickle.loads(pickle.dumps(VerticalFlip(0.25))) == VerticalFlip(0.25) != HorizontalFlip(0.25)


class TestHorizontalFlip:
    @pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
    def test_flips_as_often_as_asked(self, p):
        flips = HorizontalFlip(p).flips(sample_keys(4, 0, np.arange(20_000)))
        assert flips.dtype == np.bool_
        assert abs(flips.mean() - p) <= 5 * math.sqrt(p * (1 - p) / 20_000)

    def test_golden_flips(self):
        """A change here changes every user's training run: never edit the numbers."""
        flips = HorizontalFlip().flips(sample_keys(0, 0, range(12)))
        assert "".join("01"[int(flip)] for flip in flips) == "100011011011"

    def test_is_independent_of_the_crop(self):
        sizes, keys = np.full(20_000, 300), sample_keys(8, 0, np.arange(20_000))
        boxes, flips = RandomResizedCrop(9).boxes(sizes, sizes, keys), HorizontalFlip().flips(keys)
        for column in range(4):
            assert same_distribution(boxes[flips, column], boxes[~flips, column])

    def test_pickles(self):
        assert pickle.loads(pickle.dumps(HorizontalFlip(0.25))) == HorizontalFlip(0.25)

    def test_no_samples(self):
        assert HorizontalFlip().flips(sample_keys(0, 0, [])).shape == (0,)

    @pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
    def test_unusable_p(self, p):
        with pytest.raises(ValueError, match=r"p must lie in 0\.\.1"):
            HorizontalFlip(p)


class TestTurnBoxes:
    @pytest.mark.parametrize("tag", range(9))
    def test_follows_the_pixels_there_and_back(self, tag):
        stored = np.zeros((7, 10, 1), np.uint8)
        stored[2:4, 5:9] = 1
        upright = oriented(stored, tag)
        rows, columns, _ = np.nonzero(upright)
        turned = turn_boxes([[5, 2, 9, 4]], tag, upright.shape[:2])
        assert turned.dtype == np.float32
        assert turned.tolist() == [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]]
        back = {6: 8, 8: 6}.get(tag, tag)
        assert turn_boxes(turned, back, (7, 10)).tolist() == [[5, 2, 9, 4]]

    def test_no_boxes(self):
        assert turn_boxes([], 6, (7, 10)).shape == (0, 4)


class TestCropBoxes:
    def test_crops_scales_and_flips(self):
        boxes = np.array([[10, 20, 30, 40], [0, 0, 100, 100], [12, 22, 14, 24]], np.float32)
        crop = (10, 20, 50, 60)
        plain, keep = crop_boxes(boxes, crop, (80, 20))
        assert plain.dtype == np.float32
        assert plain.tolist() == [[0, 0, 10, 40], [0, 0, 20, 80], [1, 4, 2, 8]]
        assert keep.tolist() == [True, True, True]
        flipped, _ = crop_boxes(boxes, crop, (80, 20), True)
        assert flipped.tolist() == [[10, 0, 20, 40], [0, 0, 20, 80], [18, 4, 19, 8]]

    def test_follows_either_flip(self):
        flips = [crop_boxes([[1, 2, 3, 7]], (0, 0, 10, 20), (20, 10), code)[0][0].tolist() for code in range(4)]
        assert flips == [[1, 2, 3, 7], [7, 2, 9, 7], [1, 13, 3, 18], [7, 13, 9, 18]]

    def test_boxes_without_area_are_not_kept(self):
        nan = math.nan
        boxes = [[0, 0, 10, 10], [50, 9, 60, 60], [20, 20, 20, 30], [30, 20, 20, 30], [nan, 20, 30, 30], [9, 9, 11, 11]]
        _, keep = crop_boxes(boxes, (10, 10, 50, 50), (40, 40))
        assert keep.tolist() == [False, False, False, False, False, True]

    def test_follows_the_pixels(self):
        """A rectangle painted into an image lies in the cropped, flipped, enlarged image where the box says."""
        image = np.zeros((30, 40), bool)
        image[12:20, 9:31] = True
        x0, y0, x1, y1 = crop = (15, 10, 35, 25)
        shown = image[y0:y1, x0:x1].repeat(2, 0).repeat(3, 1)[:, ::-1]
        moved, _ = crop_boxes([[9, 12, 31, 20]], crop, shown.shape, True)
        rows, columns = np.nonzero(shown)
        assert moved[0].tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]

    @given(
        st.lists(st.tuples(*[st.floats(-100, 200, width=32)] * 4), max_size=8),
        st.tuples(*[st.integers(0, 50)] * 2, *[st.integers(51, 100)] * 2),
        st.booleans(),
    )
    def test_results_lie_in_the_output_and_flipping_twice_is_nothing(self, boxes, crop, flip):
        moved, keep = crop_boxes(boxes, crop, (224, 112), flip)
        assert ((moved >= 0) & (moved <= [112, 224, 112, 224])).all()
        again, keep_again = crop_boxes(moved, (0, 0, 112, 224), (224, 112), flip)
        expected, _ = crop_boxes(boxes, crop, (224, 112), False)
        assert np.allclose(again, expected, atol=1e-4)
        assert np.array_equal(keep, keep_again)

    def test_a_batch_at_once_equals_one_at_a_time(self):
        rng = np.random.default_rng(0)
        boxes = np.sort(rng.uniform(0, 100, (6, 2, 2)), axis=1).reshape(6, 4)
        crops = np.array([[0, 0, 50, 40], [10, 20, 90, 80]])[[0, 0, 1, 1, 1, 0]]
        flips = np.array([True, False, True, False, True, False])
        whole, keep = crop_boxes(boxes, crops, (32, 64), flips)
        for row in range(6):
            alone, kept = crop_boxes(boxes[row : row + 1], crops[row], (32, 64), flips[row])
            assert np.array_equal(whole[row], alone[0])
            assert keep[row] == kept[0]

    @pytest.mark.parametrize("empty", [[], np.zeros((0, 4), np.float32)])
    def test_no_boxes(self, empty):
        moved, keep = crop_boxes(empty, (0, 0, 5, 5), (9, 9), True)
        assert moved.shape == (0, 4)
        assert keep.shape == (0,)

    @pytest.mark.parametrize(
        ("boxes", "crop", "flip"),
        [
            ([1, 2, 3, 4], (0, 0, 5, 5), False),
            ([[1, 2, 3]], (0, 0, 5, 5), False),
            ([[1, 2, 3, 4]], (0, 0, 5), False),
            ([[1, 2, 3, 4]], [(0, 0, 5, 5)] * 2, False),
            ([[1, 2, 3, 4]], (0, 0, 5, 5), [True, False]),
        ],
    )
    def test_shapes_that_do_not_fit(self, boxes, crop, flip):
        with pytest.raises(ValueError, match=r"boxes must have shape \(M, 4\)"):
            crop_boxes(boxes, crop, (9, 9), flip)

    def test_an_empty_crop(self):
        with pytest.raises(ValueError, match="x1 > x0"):
            crop_boxes([[1, 2, 3, 4]], (5, 0, 5, 5), (9, 9))
