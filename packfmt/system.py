"""Facts about this machine that decide how packfmt behaves."""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

from packfmt.version import __version__

__all__ = ["memory_bytes", "system_facts"]

PACKAGES = ("numpy", "pillow", "simplejpeg", "lmdb", "xxhash", "torch", "torchvision", "h5py", "pyarrow")

GROUPS, CONTROL = "/proc/self/cgroup", "/sys/fs/cgroup"


def system_facts() -> dict[str, Any]:
    """JSON-able: versions (None where a package is absent), cores, memory in bytes, and fallbacks in force."""
    return {
        "packfmt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_usable": memory_bytes(),
        "packages": {name: _version(name) for name in PACKAGES},
        "fallbacks": _fallbacks(),
    }


def memory_bytes() -> int | None:
    """Memory that this process and the page cache of its files may take: the machine's, or a container's or job's."""
    found = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _limits():
        try:
            with open(path, encoding="ascii") as file:
                found.append(int(file.read()))
        except (OSError, ValueError):  # no limit of that group, or "max"
            continue
    return min(found, default=None)


def _limits() -> Iterator[str]:
    """Files that tell the limits of this process's control groups, and of those around them, on Linux."""
    try:
        with open(GROUPS, encoding="utf-8", errors="surrogateescape") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for number, controllers, path in (group for group in groups if len(group) == 3):
        if number == "0":
            root, name = CONTROL, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = f"{CONTROL}/memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield f"{root}{folder}/{name}"


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
