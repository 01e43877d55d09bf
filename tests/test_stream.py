"""A stream gives each record once, with the pixels that its position says, and leaves no thread behind."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="streams need torch")

from hypothesis import given, settings  # noqa: E402  (after the skip)
from hypothesis import strategies as st  # noqa: E402
from make import jpeg, oriented_jpeg  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from train_inputs import image_columns, records  # noqa: E402

import packfmt  # noqa: E402
from packfmt.randomness import sample_rng  # noqa: E402

# Python 3.12 warns of forks in a process with threads; torch's own are always there.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

COUNT = 23
SMALL = jpeg(8, 8)
AUGMENT = {"crop": packfmt.RandomResizedCrop(16), "flip": packfmt.HorizontalFlip(), "seed": 5}


@pytest.fixture(scope="module")
def some() -> list[packfmt.Record]:
    return records(COUNT)


def numbered(count, data=SMALL):
    """Pairs that carry nothing but their number."""
    return [(data, number) for number in range(count)]


def targets_of(samples) -> list[int]:
    return [int(target) for _, target in samples]


EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    """Threads of other tests' datasets, which end when the collector gets to the errors that hold them."""
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


def own_threads() -> list[str]:
    new = set(threading.enumerate()) - EARLIER
    return [thread.name for thread in new if thread.name.startswith("packfmt")]


def noisy(image):
    return image + torch.from_numpy(sample_rng().integers(0, 3, tuple(image.shape), np.uint8))


class TestSamples:
    def test_pixels_and_targets_are_those_of_a_pack_with_these_records(self, tmp_path, some):
        with packfmt.create(tmp_path / "some.bin") as writer:
            for record in some:
                writer.write(record.data, key=record.key, **record.columns, **image_columns(record.data))
        dataset = packfmt.MMapImageDataset(tmp_path / "some.bin", transform=noisy, **AUGMENT)
        dataset.set_epoch(3)
        stream = packfmt.ImageStream(some, transform=noisy, **AUGMENT)
        stream.set_epoch(3)
        for index, (image, target) in enumerate(stream):
            wanted, label = dataset[index]
            assert torch.equal(image, wanted)
            assert target == label
        assert index == COUNT - 1
        dataset.close()

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("ahead", [1, 5, 64])
    def test_threads_and_look_ahead_change_nothing(self, some, threads, ahead):
        wanted = list(packfmt.ImageStream(some, threads=2, **AUGMENT))
        got = list(packfmt.ImageStream(some, threads=threads, prefetch=ahead, **AUGMENT))
        assert all(torch.equal(a, b) and s == t for (a, s), (b, t) in zip(wanted, got, strict=True))

    def test_image_is_channels_first_uint8_at_its_own_size_without_a_crop(self, some):
        for number, (image, _) in enumerate(packfmt.ImageStream(some)):
            assert image.dtype == torch.uint8
            assert image.shape == (3, 20 + number % 3, 24)
            assert np.array_equal(image.permute(1, 2, 0).numpy(), packfmt.decode(some[number].data))

    @pytest.mark.parametrize(
        ("item", "target"),
        [(SMALL, -1), (bytearray(SMALL), -1), ((memoryview(SMALL), "cat"), "cat"), ([SMALL, 7], 7)],
        ids=["bytes", "bytearray", "text", "list"],
    )
    def test_bytes_and_pairs_are_records_too(self, item, target):
        ((image, got),) = packfmt.ImageStream([item])
        assert image.shape == (3, 8, 8)
        assert got == target

    def test_fields_become_a_dict_and_boxes_follow_crop_and_flip(self):
        boxes = [np.array([[8, 2, 10, 6], [20, 10, 24, 20]], np.float32)] * 3  # the crop shows columns 6 to 18
        some = records(3, boxes=boxes, tag=[np.array([number, -number]) for number in range(3)])
        stream = packfmt.ImageStream(
            some, fields=["boxes", "tag", "label"], crop=packfmt.CenterCrop((20, 12)), flip=packfmt.HorizontalFlip(1)
        )
        for number, (top, (_, target)) in enumerate(zip([0, 0, 1], stream, strict=True)):
            assert target["boxes"].tolist() == [[8, 2 - top, 10, 6 - top]]
            assert target["tag"].tolist() == [number]
            assert target["label"] == number

    def test_torchvision_targets_and_boxes_that_are_turned(self):
        columns = {"boxes": np.array([[30, 10, 38, 44]], np.float32), "labels": [4]}  # of 48 x 40 pixels as stored
        some = [packfmt.Record(oriented_jpeg(6), f"{number}", columns) for number in range(2)]
        options = {"targets": "torchvision", "label_offset": 1, "boxes": "stored", "orientation": "apply"}
        ((images, targets),) = packfmt.ImageStream(some, **options).batches(2, collate="list")
        assert images[0].shape == (3, 40, 48)
        assert [{name: value.tolist() for name, value in target.items()} for target in targets] == [
            {"boxes": [[4, 30, 38, 38]], "labels": [5], "image_id": number} for number in range(2)
        ]

    def test_target_transform_sees_every_target(self, some):
        stream = packfmt.ImageStream(some, target_transform=lambda label: label * 10)
        assert targets_of(stream) == list(range(0, 10 * COUNT, 10))

    def test_exif_orientation_is_applied_when_asked(self):
        ((stored, _),) = packfmt.ImageStream([oriented_jpeg(6)])
        ((upright, _),) = packfmt.ImageStream([oriented_jpeg(6)], orientation="apply", crop=packfmt.Resize((40, 48)))
        assert torch.equal(upright, stored.rot90(-1, (1, 2)))

    def test_empty_stream_gives_nothing(self):
        assert list(packfmt.ImageStream([])) == []
        assert list(packfmt.ImageStream([]).batches(4)) == []


class TestBatches:
    @pytest.mark.parametrize("size", [1, 4, COUNT, COUNT + 1])
    def test_batches_hold_the_samples_in_order(self, some, size):
        samples = list(packfmt.ImageStream(some, **AUGMENT))
        batches = list(packfmt.ImageStream(some, **AUGMENT).batches(size))
        assert [len(images) for images, _ in batches] == [min(size, COUNT - start) for start in range(0, COUNT, size)]
        assert torch.equal(torch.cat([images for images, _ in batches]), torch.stack([image for image, _ in samples]))
        assert torch.cat([targets for _, targets in batches]).tolist() == list(range(COUNT))

    def test_a_batch_is_one_channels_last_tensor(self, some):
        images, targets = next(packfmt.ImageStream(some, **AUGMENT).batches(8))
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert images.shape == (8, 3, 16, 16)
        assert targets.dtype == torch.int64

    def test_images_of_differing_sizes_come_as_list_or_padded(self, some):
        listed, _ = next(packfmt.ImageStream(some).batches(3, collate="list"))
        padded, _ = next(packfmt.ImageStream(some).batches(3, collate="pad"))
        assert [tuple(image.shape) for image in listed] == [(3, 20, 24), (3, 21, 24), (3, 22, 24)]
        assert padded.shape == (3, 3, 22, 24)

    def test_images_of_differing_sizes_do_not_stack(self, some):
        with pytest.raises(ValueError, match="cannot be stacked"):
            next(packfmt.ImageStream(some).batches(3))


class TestSharing:
    @settings(max_examples=30, deadline=None)
    @given(
        count=st.integers(0, 40),
        world=st.integers(1, 4),
        buffer=st.integers(0, 8),
        partial=st.sampled_from(["keep", "drop"]),
    )
    def test_ranks_share_out_the_stream(self, count, world, buffer, partial):
        parts = [
            targets_of(
                packfmt.ImageStream(
                    numbered(count), rank=rank, world_size=world, shuffle_buffer=buffer, partial=partial, threads=1
                )
            )
            for rank in range(world)
        ]
        whole = count - count % world if partial == "drop" else count
        assert sorted(itertools.chain(*parts)) == list(range(whole))
        assert all(number % world == rank for rank, part in enumerate(parts) for number in part)

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_workers_share_out_what_is_a_ranks(self, some, workers, rank):
        stream = packfmt.ImageStream(some, rank=rank, world_size=2, partial="keep", **AUGMENT)
        batches = list(DataLoader(stream, batch_size=4, num_workers=workers))
        got = sorted(torch.cat([targets for _, targets in batches]).tolist())
        assert got == list(range(rank, COUNT, 2))

    def test_pixels_do_not_depend_on_workers_or_ranks(self, some):
        wanted = [image for image, _ in packfmt.ImageStream(some, **AUGMENT)]
        loader = DataLoader(packfmt.ImageStream(some, rank=1, world_size=2, **AUGMENT), batch_size=3, num_workers=2)
        for images, targets in loader:
            for image, target in zip(images, targets.tolist(), strict=True):
                assert torch.equal(image, wanted[target])

    def test_pixels_do_not_depend_on_what_becomes_of_the_last(self, some):
        looks = [
            next(packfmt.ImageStream(some, rank=0, world_size=3, partial=partial, **AUGMENT).batches(7))[0]
            for partial in ("keep", "drop")
        ]
        assert torch.equal(*looks)

    def test_what_is_fed_to_each_process_is_its_own(self):
        stream = packfmt.ImageStream(numbered(6), split="elsewhere")
        batches = list(DataLoader(stream, batch_size=6, num_workers=2))
        assert [targets.tolist() for _, targets in batches] == [list(range(6))] * 2

    def test_records_fed_elsewhere_share_no_random_numbers(self):
        def crops(rank):
            stream = packfmt.ImageStream([(jpeg(64, 64), 0)] * 8, split="elsewhere", rank=rank, world_size=2, **AUGMENT)
            return [image for image, _ in stream]

        assert not any(torch.equal(a, b) for a, b in itertools.product(crops(0), crops(1)))

    @pytest.mark.parametrize(
        ("options", "counts"),
        [
            ({"world_size": 3}, [3, 3, 3]),
            ({"world_size": 3, "partial": "keep"}, [4, 4, 3]),
            ({"world_size": 1}, [11]),
            ({"world_size": 3, "split": "elsewhere"}, [11, 11, 11]),
        ],
    )
    def test_ranks_get_equally_many_unless_told_otherwise(self, options, counts):
        ranks = range(options["world_size"])
        streams = [packfmt.ImageStream(records(11), rank=rank, **options) for rank in ranks]
        assert [sum(1 for _ in stream) for stream in streams] == counts


class TestShuffle:
    def order(self, buffer, seed=0, epoch=0, count=60):
        stream = packfmt.ImageStream(numbered(count), shuffle_buffer=buffer, seed=seed, threads=1)
        stream.set_epoch(epoch)
        return targets_of(stream)

    def test_it_is_a_permutation_that_seed_and_epoch_decide(self):
        assert self.order(16) == self.order(16)
        assert sorted(self.order(16)) == list(range(60))
        assert len({tuple(self.order(16, seed, epoch)) for seed in range(2) for epoch in range(2)}) == 4

    @pytest.mark.parametrize("buffer", [0, 1])
    def test_order_stays_without_a_buffer(self, buffer):
        assert self.order(buffer) == list(range(60))

    @pytest.mark.parametrize("buffer", [2, 7, 100])
    def test_nothing_comes_earlier_than_the_buffer_allows(self, buffer):
        assert all(number <= place + buffer for place, number in enumerate(self.order(buffer)))

    def test_each_of_a_full_buffer_may_come_first(self):
        firsts = [self.order(5, seed, count=12)[:4] for seed in range(100)]
        assert {first for first, *_ in firsts} == set(range(5))
        assert {fourth for *_, fourth in firsts} == set(range(8))

    def test_a_buffer_as_large_as_the_data_mixes_evenly(self):
        means = np.mean([self.order(20, seed, count=20) for seed in range(200)], axis=0)
        assert np.abs(means - 9.5).max() < 4 * np.sqrt(399 / 12 / 200)


class TestEpochs:
    def looks(self, batches) -> bytes:
        return b"".join(images.numpy().tobytes() for images, _ in batches)

    def epochs_of(self, loader, count=2):
        return [self.looks(loader) for _ in range(count)]

    def wanted(self, some):
        looks = []
        for epoch in range(2):
            stream = packfmt.ImageStream(some, **AUGMENT)
            stream.set_epoch(epoch)
            looks.append(self.looks(stream.batches(COUNT)))
        return looks

    def test_each_iteration_is_the_next_epoch(self, some):
        wanted = self.wanted(some)
        stream = packfmt.ImageStream(some, **AUGMENT)
        assert [self.looks(stream.batches(COUNT)) for _ in range(2)] == wanted
        assert wanted[0] != wanted[1]
        assert stream.epoch == 2

    @pytest.mark.parametrize("persistent", [False, True])
    def test_so_it_is_in_workers(self, some, persistent):
        options = {"batch_size": COUNT, "num_workers": 1, "persistent_workers": persistent}
        loader = DataLoader(packfmt.ImageStream(some, **AUGMENT), **options)
        assert self.epochs_of(loader) == self.wanted(some)

    @pytest.mark.parametrize("persistent", [False, True])
    def test_set_epoch_reaches_workers(self, some, persistent):
        stream = packfmt.ImageStream(some, **AUGMENT)
        loader = DataLoader(stream, batch_size=COUNT, num_workers=1, persistent_workers=persistent)
        first = self.looks(loader)
        stream.set_epoch(1)
        second = self.looks(loader)
        stream.set_epoch(0)
        assert [first, second, self.looks(loader)] == [*self.wanted(some), first]

    def test_set_epoch_reaches_spawned_workers(self, some):
        stream = packfmt.ImageStream(some, **AUGMENT)
        stream.set_epoch(1)
        loader = DataLoader(stream, batch_size=COUNT, num_workers=1, multiprocessing_context="spawn")
        assert self.looks(loader) == self.wanted(some)[1]

    def test_copies_and_pickles_keep_the_epoch(self, some):
        stream = packfmt.ImageStream(some, **AUGMENT)
        stream.set_epoch(4)
        pickled = pickle.loads(pickle.dumps(stream))
        assert (pickled.epoch, copy.deepcopy(stream).epoch) == (4, 4)
        assert torch.equal(next(iter(pickled))[0], next(iter(stream))[0])

    def test_a_function_gives_every_epoch_a_new_iterable(self):
        stream = packfmt.ImageStream(lambda: iter(numbered(3)))
        assert [targets_of(stream) for _ in range(2)] == [[0, 1, 2]] * 2


class Endless:
    """Counts what is drawn from it, and knows whether it was closed."""

    def __init__(self):
        self.drawn = 0
        self.closed = False

    def __call__(self):
        try:
            while True:
                self.drawn += 1
                yield SMALL, self.drawn - 1
        finally:
            self.closed = True


class TestEndless:
    def test_no_more_is_drawn_than_the_bounds_allow(self):
        source = Endless()
        stream = packfmt.ImageStream(source, prefetch=10, shuffle_buffer=7, threads=2)
        assert len(list(itertools.islice(stream, 30))) == 30
        assert (
            source.drawn <= 30 + 8 + 10 + 7 + 1
        )  # and a chunk in the consumer's hands, and one record in the thread's

    def test_batches_are_bounded_by_prefetch(self):
        source = Endless()
        batches = packfmt.ImageStream(source, threads=2).batches(4, prefetch=2)
        assert [next(batches)[1].tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        batches.close()
        assert source.drawn <= 12 + 2 * 4 + 1

    @pytest.mark.parametrize("take", ["samples", "batches"])
    def test_stopping_early_ends_all_threads_and_closes_the_iterable(self, take):
        source = Endless()
        stream = packfmt.ImageStream(source, threads=2)
        for number, _ in enumerate(stream if take == "samples" else stream.batches(4)):
            if number == 5:
                assert own_threads()
                break
        assert not own_threads()
        assert source.closed

    def test_an_iterator_of_the_users_is_not_closed(self):
        source = Endless()
        iterator = source()
        next(iter(packfmt.ImageStream(iterator, threads=2)))
        assert not source.closed
        assert next(iterator)[0] == SMALL


class Waiting:
    """Gives some records, then waits until it is let go."""

    def __init__(self, count):
        self.count = count
        self.let_go = threading.Event()

    def __iter__(self):
        yield from numbered(self.count)
        self.let_go.wait()
        yield SMALL, self.count


class TestWaiting:
    def test_samples_read_before_are_delivered(self):
        source = Waiting(5)
        samples = iter(packfmt.ImageStream(source, threads=2))
        assert targets_of(itertools.islice(samples, 5)) == [0, 1, 2, 3, 4]
        source.let_go.set()
        assert targets_of(samples) == [5]

    def test_full_batches_are_delivered(self):
        source = Waiting(5)
        batches = packfmt.ImageStream(source, threads=2).batches(2)
        assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        source.let_go.set()
        assert [targets.tolist() for _, targets in batches] == [[4, 5]]

    def test_the_thread_that_waits_ends_with_the_next_record(self, monkeypatch):
        monkeypatch.setattr("packfmt.training.stream.PATIENCE", 0.01)
        source = Waiting(3)
        samples = iter(packfmt.ImageStream(source, threads=2))
        assert targets_of(itertools.islice(samples, 3)) == [0, 1, 2]
        samples.close()
        assert own_threads() == ["packfmt-stream"]
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "packfmt-stream")
        source.let_go.set()
        thread.join(10)
        assert not thread.is_alive()


class TestErrors:
    def failing(self, count, error):
        yield from numbered(count)
        raise error

    @pytest.mark.parametrize("take", ["samples", "batches"])
    def test_the_iterables_error_comes_after_what_was_read(self, take):
        got = []
        stream = packfmt.ImageStream(lambda: self.failing(5, ConnectionError("gone")), threads=2)
        with pytest.raises(ConnectionError, match="gone"):  # noqa: PT012  (the samples before it count)
            for _, target in stream if take == "samples" else stream.batches(3):
                got += np.atleast_1d(np.asarray(target)).tolist()
        assert got == [0, 1, 2, 3, 4]
        assert not own_threads()

    def test_it_crosses_from_a_worker(self):
        loader = DataLoader(
            packfmt.ImageStream(lambda: self.failing(0, ConnectionError("gone"))), batch_size=2, num_workers=1
        )
        with pytest.raises(ConnectionError, match="gone"):
            list(loader)

    def test_a_bad_record_is_named(self, some):
        some = [*some[:2], packfmt.Record(SMALL[:-40], "cut.jpg", {"label": 2}), *some[3:]]
        with pytest.raises(packfmt.DecodeError) as caught:
            list(packfmt.ImageStream(some, **AUGMENT))
        assert (caught.value.index, caught.value.key) == (2, "cut.jpg")

    def test_a_record_without_a_key_goes_by_its_position(self):
        with pytest.raises(packfmt.DecodeError, match=r"record 1, key '1'.*zero bytes"):
            list(packfmt.ImageStream([SMALL, b""]))

    @pytest.mark.parametrize("crop", [None, packfmt.RandomCrop(8)], ids=["whole", "crop"])
    def test_bad_records_are_skipped_when_asked(self, crop):
        items = [*numbered(3), (b"no image", 3), (SMALL[:-40], 4), *numbered(7)[5:]]
        stream = packfmt.ImageStream(items, crop=crop, on_error="skip")
        assert targets_of(stream) == [0, 1, 2, 5, 6]
        assert [targets.tolist() for _, targets in stream.batches(2)] == [[0, 1], [2], [5], [6]]
        assert stream.skipped == 4

    def test_a_record_too_small_for_the_crop_does_not_end_the_stream(self):
        items = [(jpeg(10, 10), 0), (SMALL, 1), (jpeg(12, 11), 2)]
        stream = packfmt.ImageStream(items, crop=packfmt.RandomCrop(10), on_error="skip")
        assert targets_of(stream) == [0, 2]
        assert stream.skipped == 1
        with pytest.raises(ValueError, match="RandomCrop needs images"):
            list(packfmt.ImageStream(items, crop=packfmt.RandomCrop(10)))

    @pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
    def test_what_belongs_to_a_vanished_box_goes_with_it(self, form):
        boxes = np.array([[0, 0, 2, 2], [30, 30, 38, 38]], np.float32)
        columns = {"boxes": boxes, "labels": form([1, 2]), "names": ["left", "right"]}
        records = [packfmt.Record(jpeg(40, 40), str(n), columns) for n in range(4)]
        stream = packfmt.ImageStream(records, fields=("boxes", "labels", "names"), crop=packfmt.RandomCrop(16))
        found = [target for _, target in stream]
        assert {len(target["boxes"]) for target in found} <= {0, 1}
        for target in found:
            assert len(target["labels"]) == len(target["names"]) == len(target["boxes"])

    def test_lists_of_numbers_are_batched_as_a_packs_arrays_are(self):
        records = [packfmt.Record(SMALL, str(n), {"labels": [n, n + 1]}) for n in range(3)]
        ((_, targets),) = packfmt.ImageStream(records, fields=("labels",)).batches(3)
        assert [labels.tolist() for labels in targets["labels"]] == [[0, 1], [1, 2], [2, 3]]

    def test_a_batch_without_any_good_record_is_left_out(self):
        batches = packfmt.ImageStream([b"", b"", SMALL], on_error="skip").batches(2)
        assert [len(images) for images, _ in batches] == [1]

    @pytest.mark.parametrize("item", [7, (7, 8), (SMALL, 1, 2), "text"], ids=repr)
    def test_other_items_are_refused_by_position_and_type(self, item):
        if isinstance(item, tuple) and len(item) == 3:
            wanted = "record 1 .* type tuple"
        else:
            wanted = f"record 1 .* type {type(item).__name__}"
        with pytest.raises(TypeError, match=wanted):
            list(packfmt.ImageStream([SMALL, item]))

    def test_a_missing_column_is_named(self, some):
        with pytest.raises(ValueError, match=r"record 0 .*'0.jpg'.*\['boxes'\].*label"):
            list(packfmt.ImageStream(some, fields="boxes"))

    def test_a_pair_has_no_columns(self):
        with pytest.raises(ValueError, match=r"record 0 .* give Records"):
            list(packfmt.ImageStream(numbered(1), fields="label"))

    def test_a_transform_that_fails_names_its_record(self, some):
        def broken(image):
            raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken") as caught:
            list(packfmt.ImageStream(some, transform=broken))
        assert "0.jpg" in str(getattr(caught.value, "__notes__", caught.value))

    @pytest.mark.parametrize(
        "options",
        [
            {"on_error": "ignore"},
            {"partial": "pad"},
            {"split": "none"},
            {"split": "elsewhere", "partial": "drop"},
            {"threads": 0},
            {"prefetch": 0},
            {"shuffle_buffer": -1},
            {"rank": 1},
            {"output": "jpeg"},
        ],
        ids=str,
    )
    def test_options_are_checked(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            packfmt.ImageStream([], **options)

    def test_records_must_be_iterable(self):
        with pytest.raises(TypeError, match="int"):
            packfmt.ImageStream(5)
