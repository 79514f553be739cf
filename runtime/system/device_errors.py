"""The meaning of errors of a device: no memory left, or a device that cannot compute any more."""

from __future__ import annotations

from collections.abc import Iterator

# Errors of libraries that allocate memory themselves have no type of their own.
_NO_MEMORY = (
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# After these errors of the CUDA runtime, every later call in the process fails with the same error.
_STICKY = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "unspecified launch failure",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` or one of its causes is a failed allocation."""
    import torch  # here, because the loop of a rank, which imports this module, needs torch only with a model

    return any(
        isinstance(cause, (MemoryError, torch.OutOfMemoryError)) or _says(cause, _NO_MEMORY) for cause in _causes(error)
    )


def is_sticky(error: BaseException) -> bool:
    """Return whether `error` or one of its causes ends the use of a CUDA device in this process."""
    return any(_says(cause, _STICKY) for cause in _causes(error))


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
