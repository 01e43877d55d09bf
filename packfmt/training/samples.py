"""A decoded batch as a loop wants it: one by one, as a list that collates without copying, or whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from packfmt.training.batch import BatchJob
from packfmt.training.collate import Collate, collate_images
from packfmt.training.pipeline import Form

__all__ = ["NamedSample", "Sample", "SampleList", "Samples", "as_batch", "make_batch"]

IMAGE, TARGET = "pixel_values", "labels"  # as Hugging Face's models for images name their arguments


class Sample(tuple[Any, Any]):
    """``(image, target)``. A type of its own, so that torch's default_collate knows that its batch is made already."""

    __slots__ = ()


class NamedSample(dict[str, Any]):
    """``{"pixel_values": image, "labels": target}``, a type of its own as ``Sample`` is.

    A target that is a dict lies beside the image instead, under its own names, as that of a batch will.
    """

    __slots__ = ()


def _named(image: Any, target: Any) -> dict[str, Any]:
    return {IMAGE: image, **(target if isinstance(target, dict) else {TARGET: target})}


def as_batch(images: Any, targets: Any, form: Form) -> Any:
    """Images and targets of a batch as its samples have theirs: a tuple or a dict."""
    return (images, targets) if form == "tuple" else _named(images, targets)


class Samples(Sequence[Any]):
    """The samples of a batch that did not fail, made when asked for."""

    def __init__(self, job: BatchJob) -> None:
        self.job = job
        self.failures: Mapping[int, Exception] = job.failures
        places = range(len(job.indices))
        self.positions: Sequence[int] = [p for p in places if p not in self.failures] if self.failures else places

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = self.positions[index]
        return self.formed(self.image(position), self.targets([position])[0][0])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def formed(self, image: Any, target: Any) -> Any:
        """One sample, as the user asked for it."""
        pipeline = self.job.pipeline
        if pipeline.sample == "tuple":
            return Sample((image, target))
        return NamedSample({IMAGE: image, TARGET: target} if pipeline.targets.listed else _named(image, target))

    def image(self, position: int) -> Any:
        """The image at a place of the batch, as the user asked for it."""
        plan, pipeline = self.job.plan, self.job.pipeline
        return plan.images[position] if pipeline.transforming else pipeline.present(plan.pixels(position))

    def targets(self, positions: Sequence[int]) -> tuple[list[Any], Callable[[], Any]]:
        """The targets at some places of the batch, and what collates them."""
        return self.job.pipeline.targets.of_samples(self.job.plan, positions)

    @property
    def whole(self) -> npt.NDArray[np.uint8] | None:
        """The images as one array (n, H, W, C), where they are in one and no transform came after."""
        plan, pipeline = self.job.plan, self.job.pipeline
        if plan.out is None or pipeline.transforming or pipeline.output == "pil":
            return None
        return plan.out if len(self) == len(plan.indices) else plan.out[self.positions]

    def images(self, how: Collate) -> Any:
        """The images as those of a batch; those in one array become a tensor without copying."""
        whole = self.whole
        if whole is None or how == "list":
            return collate_images([self.image(position) for position in self.positions], how)
        return whole if self.job.pipeline.output == "numpy" else torch.from_numpy(whole.transpose(0, 3, 1, 2))


class SampleList(list[Any]):
    """The samples of a batch, as the ``collate_fn`` of a DataLoader gets them: a list like any other.

    While it is as it was made, torch's default_collate takes the array that the images lie in, and copies nothing.
    """

    def __init__(self, samples: Samples) -> None:
        targets, self._collated_targets = samples.targets(samples.positions)
        plan, pipeline = samples.job.plan, samples.job.pipeline
        images: Iterable[Any] = map(samples.image, samples.positions)
        if plan.out is not None and not (samples.failures or pipeline.transforming) and pipeline.output == "tensor":
            images = map(torch.from_numpy, plan.out.transpose(0, 3, 1, 2))  # the same, in half of the time
        super().__init__(map(Sample, zip(images, targets, strict=True)))
        if pipeline.sample != "tuple":
            self[:] = [samples.formed(image, target) for image, target in self]
        self._samples = samples
        self._made = list(map(_parts, self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (list(self),))

    def collated(self) -> Any:
        """The batch, None where the list is not what it was made as. What changed within arrays is in it."""
        if len(self) != len(self._made) or not all(map(_same, map(_parts, self), self._made)):
            return None
        images, form = self._samples.images("stack"), self._samples.job.pipeline.sample
        images = torch.from_numpy(images) if isinstance(images, np.ndarray) else images
        batch = as_batch(images, self._collated_targets(), form)
        return batch if form == "dict" else list(batch)  # as torch's own


def _parts(sample: Any) -> Sequence[Any]:
    """The sample, and what can be put in another's place in it."""
    if type(sample) is Sample and not isinstance(sample[1], dict):
        return (sample,)
    holders = (sample, sample[1] if isinstance(sample, tuple) else None)
    return [sample, *chain.from_iterable(chain(*holder.items()) for holder in holders if isinstance(holder, dict))]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def make_batch(samples: Samples, how: Collate) -> tuple[Any, Any]:
    """Images and targets of a batch. Images in one array become a channels-last (N, C, H, W) tensor without copying."""
    job = samples.job
    return samples.images(how), job.pipeline.targets.of_batch(job.plan, samples.positions)


def _collate_samples(batch: Any, *, collate_fn_map: Any = None) -> Any:
    made = batch.collated() if isinstance(batch, SampleList) else None
    if made is not None:
        return made
    if isinstance(batch[0], dict):
        return {name: collate([one[name] for one in batch], collate_fn_map=collate_fn_map) for name in batch[0]}
    return [collate(list(parts), collate_fn_map=collate_fn_map) for parts in zip(*batch, strict=True)]


# torch's own way to teach default_collate about a type.
default_collate_fn_map[Sample] = _collate_samples
default_collate_fn_map[NamedSample] = _collate_samples
