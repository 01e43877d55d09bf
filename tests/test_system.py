"""What packfmt finds out about the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packfmt import system
from packfmt.system import memory_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("groups", "limits", "found"),
    [
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "max\n"}, 4096),
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "512\n"}, 512),
        ("0::/\n", {"memory.max": "8192\n"}, 8192),
        ("0::/gone\n", {"memory.max": "8192\n"}, 8192),
        ("3:cpu,memory:/box\n1:name=x:/\n", {"memory/box/memory.limit_in_bytes": "77\n"}, 77),
        ("3:memory:/box\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("2:cpu:/box\n", {"memory/box/memory.limit_in_bytes": "77\n"}, MACHINE),
        ("0::/job\n", {"job/memory.max": "max\n"}, MACHINE),
        ("0::/job\n", {"job/memory.max": ""}, MACHINE),
        ("nonsense\n\n", {}, MACHINE),
        (None, {"memory.max": "5\n"}, MACHINE),
    ],
)
def test_the_limit_of_a_container_or_job_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, limits: dict[str, str], found: int
) -> None:
    monkeypatch.setattr(system, "GROUPS", str(tmp_path / "groups"))
    monkeypatch.setattr(system, "CONTROL", str(tmp_path / "control"))
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    for name, text in limits.items():
        path = tmp_path / "control" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_bytes() == found
