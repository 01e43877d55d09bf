"""In which order records are read: pure functions of (seed, epoch, position), with numpy and without torch.

``BlockBatchSampler`` is the one to take; the others are for batches that belong together (``GroupBatchSampler``,
``BucketBatchSampler``) or records that follow each other (``SequenceSampler``). All share ``BatchSampler``.
"""

from __future__ import annotations

from packfmt.sampling.block import BlockBatchSampler
from packfmt.sampling.group import BucketBatchSampler, GroupBatchSampler
from packfmt.sampling.order import BatchSampler
from packfmt.sampling.quality import OrderQuality
from packfmt.sampling.sampleindex import SampleIndex
from packfmt.sampling.sequence import SequenceSampler

__all__ = [
    "BatchSampler",
    "BlockBatchSampler",
    "BucketBatchSampler",
    "GroupBatchSampler",
    "OrderQuality",
    "SampleIndex",
    "SequenceSampler",
]
