"""Names of this machine's processors."""

from __future__ import annotations

import contextlib

import torch


def cpu_info(field: str) -> str | None:
    """Return a field of the kernel's description of the first CPU, such as "model name"; None if it has none."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)
    return None


def device_name(device: torch.device) -> str:
    """Return the name of a CUDA device according to its driver, or of this machine's CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    return cpu_info("model name") or "CPU"
