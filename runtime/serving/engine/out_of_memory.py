"""Recognition of errors that mean insufficient memory."""

from __future__ import annotations

import torch

# Start of the message of torch's host allocator, which raises a plain RuntimeError.
_HOST_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory does not suffice, on the host or on a device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _HOST_ALLOCATOR in str(error)
    )
