"""Which errors say that memory does not suffice."""

from __future__ import annotations

import torch

# How torch's allocator of host memory begins, whose error has no type of its own.
_HOST_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _HOST_ALLOCATOR in str(error)
    )
