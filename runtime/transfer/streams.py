"""Streams of the compute device. A CPU has none: work is done when its call returns."""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of this thread on `device`; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def with_index(device: torch.device) -> torch.device:
    """Return `device` with an index, so that it means the same in all threads: each has its own current CUDA device."""
    has_index = device.type != "cuda" or device.index is not None
    return device if has_index else torch.device("cuda", torch.cuda.current_device())


def finish_on(device: torch.device) -> None:
    """Block until all work issued to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pinned_memory(nbytes: int) -> torch.Tensor:
    """Return flat uint8 memory of the host from which a stream copies without waiting for the host."""
    with torch.inference_mode(False):  # inference tensors could not be written outside that mode
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
