"""A decoded batch as DataLoader wants it: a sequence of samples that collates without copying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from packfmt.images.pillow import to_pil
from packfmt.training.batch import BatchJob
from packfmt.training.collate import Collate, collate_images, to_tensor
from packfmt.training.targets import Targets

__all__ = ["Sample", "Samples", "make_batch", "present"]

Output = Literal["tensor", "numpy", "pil"]

_FORMS: dict[str, Callable[[npt.NDArray[np.uint8]], Any]] = {
    "tensor": to_tensor,
    "numpy": np.asarray,
    "pil": to_pil,
}


def present(output: Output) -> Callable[[npt.NDArray[np.uint8]], Any]:
    """What turns pixels (H, W, C) into the form named.

    Raises:
        ValueError: there is no such form.
    """
    if output not in _FORMS:
        raise ValueError(f"output={output!r}, allowed are {', '.join(map(repr, _FORMS))}")
    return _FORMS[output]


class Sample(tuple[Any, Any]):
    """``(image, target)``. A type of its own, so that torch's default_collate knows that its batch is made already."""

    __slots__ = ()


class Samples(Sequence[Sample]):
    """The samples of a batch that did not fail, made when asked for."""

    def __init__(self, job: BatchJob, failures: Mapping[int, Exception], targets: Targets, output: Output) -> None:
        self.job = job
        self.failures = failures
        self.targets = targets
        self.output = output
        places = range(len(job.indices))
        self.positions: Sequence[int] = [p for p in places if p not in failures] if failures else places

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = self.positions[index]
        return Sample((self.image(position), self.targets.of_sample(self.job.plan, position)))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def image(self, position: int) -> Any:
        """The image at a place of the batch, as the user asked for it."""
        plan, recipe = self.job.plan, self.job.recipe
        return plan.images[position] if recipe.transform is not None else recipe.present(plan.pixels(position))

    @property
    def whole(self) -> npt.NDArray[np.uint8] | None:
        """The images as one array (n, H, W, C), where they are in one and no transform came after."""
        plan = self.job.plan
        if plan.out is None or self.job.recipe.transform is not None or self.output == "pil":
            return None
        return plan.out if len(self) == len(plan.choices.indices) else plan.out[self.positions]


def make_batch(samples: Samples, how: Collate) -> tuple[Any, Any]:
    """Images and targets of a batch. Images in one array become a channels-last (N, C, H, W) tensor without copying."""
    targets = samples.targets.of_batch(samples.job.plan, samples.positions)
    whole = samples.whole
    if whole is not None and how != "list":
        return (whole if samples.output == "numpy" else torch.from_numpy(whole.transpose(0, 3, 1, 2))), targets
    return collate_images([samples.image(position) for position in samples.positions], how), targets


def _collate_samples(batch: Any, *, collate_fn_map: Any = None) -> Any:
    if isinstance(batch, Samples):
        images, targets = make_batch(batch, "stack")
        return [torch.from_numpy(images) if isinstance(images, np.ndarray) else images, targets]
    return [  # samples that were asked for one by one
        collate(list(parts), collate_fn_map=collate_fn_map) for parts in zip(*batch, strict=True)
    ]


# torch's own way to teach default_collate about a type.
default_collate_fn_map[Sample] = _collate_samples
