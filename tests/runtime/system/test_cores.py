"""The number of cores follows the affinity of the process and the CPU quotas of its cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moepass.runtime.system.cores import available_cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        # The smallest quota of the cgroup and its parents counts.
        (
            {
                "proc/self/cgroup": "0::/pod/server\n",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/pod/server/cpu.max": "800000 100000\n",
            },
            3,
        ),
        # A container with version 1: the kernel names a path of the host.
        (
            {
                "proc/self/cgroup": "5:memory:/docker/1a\n4:cpu,cpuacct:/docker/1a\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
    ],
)
def test_quotas(files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert available_cores(tmp_path) == cores


def test_this_machine() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
