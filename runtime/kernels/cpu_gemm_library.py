"""The library that multiplies matrices on this machine's CPU."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from moepass.runtime.system.device_names import cpu_info
from moepass.runtime.system.huge_pages import empty_in_huge_pages

# [Empirical] Where MKL is held back, oneDNN is faster from so many rows and multiplications on (on Zen 5). With fewer,
# calling it takes longer than the GEMM.
_LEAST_ROWS, _LEAST_MULTIPLICATIONS = 8, 2 << 20


@functools.cache
def is_mkl_held_back() -> bool:
    """Whether this CPU has AVX-512 and MKL does not use it, because it is none of Intel's.

    oneDNN, which torch brings too, asks what the processor can do: on AMD's Zen 5 it multiplies float32 twice as fast.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_info("vendor_id") not in (None, "GenuineIntel")
    )


def multiply(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`rows` [n, in] times `weights` [in, out], in `out` [n, out] where there is one.

    The library depends on the machine, the type, the layout and the sizes; never on a measurement, so that every run of
    the same rows gives the same numbers. For compiled code, which autocast and autograd do not reach.
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
    # Weights with gaps would be multiplied by its reference code, a thousand times slower. Of the other types, bfloat16
    # is oneDNN's in torch.mm too, and float64 is none that it has.
    return (
        rows.dtype == torch.float32
        and len(rows) >= _LEAST_ROWS
        and len(rows) * weights.numel() >= _LEAST_MULTIPLICATIONS
        and (weights.is_contiguous() or weights.t().is_contiguous())
    )


def _padded(rows: int) -> int:
    """A number of rows of which there are few, at least `rows` and at most an eighth more (from 32 on).

    oneDNN generates code for every number of rows that it meets, 0.3 ms and 0.6 MB each, and keeps that of 1024
    GEMMs. Routers give every number there is.
    """
    step = max(4, 1 << rows.bit_length() >> 4)
    return -(-rows // step) * step
