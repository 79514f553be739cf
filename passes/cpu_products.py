"""Which library multiplies matrices on this machine's CPU."""

from __future__ import annotations

import contextlib
import functools

import torch

# [Empirical] From so many rows on oneDNN is faster than MKL where MKL is held back: at fewer, calling it costs more.
_ONEDNN_ROWS = 8


def cpu_info(field: str) -> str | None:
    """What the kernel says of this machine's first CPU, "model name" for example; None where it says nothing."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)
    return None


@functools.cache
def is_mkl_held_back() -> bool:
    """Whether MKL leaves half of this CPU's vector width unused.

    MKL runs its AVX-512 kernels on Intel's processors only. oneDNN, which torch brings too, asks what the processor can
    do: on AMD's Zen 5 it multiplies float32 more than twice as fast.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_info("vendor_id") not in (None, "GenuineIntel")
    )


def multiply(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`rows` [n, in] times `weights` [in, out], in `out` [n, out] where there is one.

    The library depends on the machine, the type, the layout and on n; never on a measurement, so that every run of
    the same rows gives the same numbers.
    """
    if not (_is_for_onednn(rows, weights) and is_mkl_held_back()):
        return torch.mm(rows, weights, out=out)
    # It takes rows with gaps too, a half of a wider product for example, but is a third slower with them.
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weights.t(), None, "none", [], "")
    return result if out is None else out.copy_(result)


def _is_for_onednn(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    # Weights with gaps would be multiplied by its reference code, a thousand times slower. Other types than float32
    # are not MKL's in the first place.
    return (
        rows.dtype == torch.float32
        and len(rows) >= _ONEDNN_ROWS
        and (weights.is_contiguous() or weights.t().is_contiguous())
    )
