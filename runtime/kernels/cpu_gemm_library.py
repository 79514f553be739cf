"""The choice of a GEMM library on this machine's CPU."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from moepass.runtime.system.device_names import cpu_info
from moepass.runtime.system.huge_pages import empty_in_huge_pages

# [Empirical] The least rows and multiplications for which oneDNN is faster where MKL is held back (on Zen 5). Below
# them, calling it takes longer than the GEMM.
_LEAST_ROWS, _LEAST_MULTIPLICATIONS = 8, 2 << 20


@functools.cache
def is_mkl_held_back() -> bool:
    """Return whether this CPU has AVX-512 but MKL does not use it, because the CPU is not Intel's.

    oneDNN, which torch includes, checks what the processor can do: on AMD's Zen 5 it multiplies float32 twice as fast.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_info("vendor_id") not in (None, "GenuineIntel")
    )


def multiply(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `rows` [n, in] times `weights` [in, out], in `out` [n, out] or a new tensor.

    The library depends on the machine, the type, the layout and the sizes, never on a measurement, so that every run of
    the same rows gives the same numbers. For compiled code only: autocast and autograd do not see it.
    """
    if not (_is_for_onednn(rows, weights) and is_mkl_held_back() and torch.backends.mkldnn.enabled):
        if out is None:
            out = empty_in_huge_pages((len(rows), weights.shape[1]), rows.dtype)
        return torch.mm(rows, weights, out=out)
    extra = _padded(len(rows)) - len(rows)
    padded = F.pad(rows, (0, 0, 0, extra)) if extra else rows
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, weights.t(), None, "none", [], "")
    result = result[: len(rows)]
    return result if out is None else out.copy_(result)


def _is_for_onednn(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    # oneDNN multiplies weights with gaps by its reference code, which is a thousand times slower. torch.mm uses oneDNN
    # for bfloat16 anyway, and oneDNN has no float64.
    return (
        rows.dtype == torch.float32
        and len(rows) >= _LEAST_ROWS
        and len(rows) * weights.numel() >= _LEAST_MULTIPLICATIONS
        and (weights.is_contiguous() or weights.t().is_contiguous())
    )


def _padded(rows: int) -> int:
    """Return a number of rows that is at least `rows` and, from 32 on, at most an eighth more.

    oneDNN generates code for each number of rows, 0.3 ms and 0.6 MB each, and caches the code of 1024 GEMMs. Routers
    produce all numbers, so they are rounded up to a few.
    """
    step = max(4, 1 << rows.bit_length() >> 4)
    return -(-rows // step) * step
