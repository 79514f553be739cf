"""Whether an error says that a device has no memory left."""

from __future__ import annotations

import torch

# Errors of libraries that allocate memory themselves have no type of their own.
_TEXTS = (
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` or one of its causes is a failed allocation."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
