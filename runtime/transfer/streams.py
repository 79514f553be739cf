"""Streams of the compute device; a CPU has none, and all that was issued to it is done."""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream to which work for `device` goes in this thread; None where work is done when its call returns."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def with_index(device: torch.device) -> torch.device:
    """The device as other threads know it too, each of which has a current CUDA device of its own."""
    is_known = device.type != "cuda" or device.index is not None
    return device if is_known else torch.device("cuda", torch.cuda.current_device())


def finish_on(device: torch.device) -> None:
    """Return when all that was issued to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pinned_memory(nbytes: int) -> torch.Tensor:
    """Flat uint8 memory of the host, from which a stream copies without waiting for the host."""
    with torch.inference_mode(False):  # inference tensors could not be written outside that mode
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
