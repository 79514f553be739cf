"""The number of cores that this process may compute with."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores in this process's affinity, at most the CPU quota of its cgroups, rounded up.

    `root` is the folder of `proc` and `sys`. Files that are absent or unreadable limit nothing.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([allowed, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores that each cgroup of this process, and each of their parents, may use.

    A container sees its own cgroup as the mounted folder, whatever path the kernel names, so that folder counts too.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, read = root / "sys/fs/cgroup", _quota_of_version_2
        elif "cpu" in controllers.split(","):
            mount, read = root / "sys/fs/cgroup/cpu", _quota_of_version_1
        else:
            continue
        folder = mount / path.strip("/")
        while folder != mount.parent:
            yield read(folder)
            folder = folder.parent


def _quota_of_version_2(folder: Path) -> float:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else math.inf


def _quota_of_version_1(folder: Path) -> float:
    quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() else math.inf  # -1 is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
