"""Facts about this machine that decide how packfmt behaves."""

from __future__ import annotations

import mmap
import os
import platform
from importlib import metadata
from typing import Any

from packfmt.version import __version__

__all__ = ["system_facts"]

PACKAGES = ("numpy", "pillow", "simplejpeg", "lmdb", "xxhash", "torch", "torchvision", "h5py", "pyarrow")


def system_facts() -> dict[str, Any]:
    """JSON-able: versions (None where a package is absent), cores, and fallbacks in force."""
    return {
        "packfmt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "fallbacks": _fallbacks(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fallbacks() -> list[str]:
    found = []
    if not hasattr(mmap.mmap, "madvise"):
        how = "read with pread" if hasattr(os, "pread") else "mapped without advice"
        found.append(f"no madvise on this system: packs are {how}, which is slower on a cold disk")
    if _version("torch") is None:
        found.append("torch is not installed: no datasets and loaders (pip install torch)")
    return found
