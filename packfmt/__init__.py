"""packfmt: pack small images into memory-mapped shards and feed PyTorch training from them.

``import packfmt`` imports neither torch nor h5py nor pyarrow; names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from packfmt.version import __version__

# Public name -> the module it lives in. The one place that says what is public.
_EXPORTS = {
    "BadImagesError": "reports",
    "BlockBatchSampler": "sampling",
    "BucketBatchSampler": "sampling",
    "CenterCrop": "images.geometry",
    "Column": "record",
    "ConvertError": "errors",
    "CorruptError": "errors",
    "CutMix": "training.mix",
    "DecodeError": "errors",
    "FormatError": "errors",
    "GroupBatchSampler": "sampling",
    "HorizontalFlip": "images.geometry",
    "ImageDataset": "training.dataset",
    "ImageStream": "training.stream",
    "LMDBImageDataset": "training.dataset",
    "Loader": "training.loader",
    "LoaderStats": "training.stats",
    "MMapImageDataset": "training.dataset",
    "MixUp": "training.mix",
    "PackReport": "reports",
    "PackfmtError": "errors",
    "RandomCrop": "images.geometry",
    "RandomResizedCrop": "images.geometry",
    "Reader": "storage",
    "Record": "record",
    "Resize": "images.geometry",
    "SequenceSampler": "sampling",
    "Source": "sources.base",
    "SourceError": "errors",
    "UnpackReport": "unpacking",
    "VerifyReport": "checking",
    "VerticalFlip": "images.geometry",
    "Writer": "storage",
    "convert": "converting",
    "create": "storage",
    "decode": "images.decode",
    "encode_jpeg": "images.encode",
    "encode_png": "images.encode",
    "open": "storage",
    "pack": "packing",
    "sample_rng": "randomness",
    "unpack": "unpacking",
    "verify": "checking",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'packfmt' has no attribute {name!r}")
    value = getattr(import_module(f"packfmt.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
