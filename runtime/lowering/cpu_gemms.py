"""Multiply matrices on a CPU with the faster of torch's two libraries, MKL and oneDNN.

Contract
    in    a graph for Inductor
    out   the same graph, in which products with weights are `moepass::gemm` if `is_mkl_held_back()`
"""

from __future__ import annotations

import functools

import torch
from torch.fx import GraphModule
from torch.nn import functional as F

from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.walk import view_source
from moepass.runtime.system.device_names import cpu_info
from moepass.runtime.system.huge_pages import empty_in_huge_pages

aten = torch.ops.aten

# [Empirical] The least rows and multiplications for which oneDNN is faster where MKL is held back (on Zen 5). Below
# them, calling it takes longer than the GEMM.
_LEAST_ROWS, _LEAST_MULTIPLICATIONS = 8, 2 << 20
# Products with fewer weights stay with MKL: the call of an operator that is not torch's own costs more than it gains.
_LEAST_WEIGHTS = 1 << 14

_library = torch.library.Library("moepass", "FRAGMENT")
_library.define("gemm(Tensor rows, Tensor weights, Tensor? bias) -> Tensor")


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
    the same rows returns the same numbers. For compiled code only: autocast and autograd do not see it.
    """
    if not takes_onednn(rows, weights):
        if out is None:
            out = empty_in_huge_pages((len(rows), weights.shape[1]), rows.dtype)
        return torch.mm(rows, weights, out=out)
    result = _with_onednn(rows, weights, None)
    return result if out is None else out.copy_(result)


def _gemm(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if takes_onednn(rows, weights):
        return _with_onednn(rows, weights, bias)
    return torch.mm(rows, weights) if bias is None else torch.addmm(bias, rows, weights)


_library.impl("gemm", _gemm, "CPU")
torch.library.register_fake(
    "moepass::gemm", lambda rows, weights, bias: rows.new_empty(rows.shape[0], weights.shape[1]), lib=_library
)


def _with_onednn(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    extra = _padded(len(rows)) - len(rows)
    padded = F.pad(rows, (0, 0, 0, extra)) if extra else rows
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, weights.t(), bias, "none", [], "")
    return result[: len(rows)]


def use_faster_gemms(module: GraphModule) -> None:
    """Replace products of float32 rows with weights in `module` by `moepass::gemm`, where MKL is held back."""
    if not is_mkl_held_back():
        return
    for node in list(module.graph.nodes):
        if is_call(node, aten.mm.default):
            bias, (rows, weights) = None, node.args
        elif is_call(node, aten.addmm.default) and not node.kwargs and fake_value(node.args[0]).dim() == 1:
            bias, rows, weights = node.args
        else:
            continue
        value = fake_value(weights)
        if (
            value.dtype is torch.float32
            and value.device.type == "cpu"
            and view_source(weights).op == "placeholder"
            and all(isinstance(size, int) for size in value.shape)
            and value.numel() >= _LEAST_WEIGHTS
        ):
            node.target = torch.ops.moepass.gemm.default
            node.args = (rows, weights, bias)
    module.recompile()


def takes_onednn(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether `multiply` takes oneDNN for `rows` [n, in] and `weights` [in, out]."""
    # oneDNN multiplies weights with gaps by its reference code, which is a thousand times slower. torch.mm uses oneDNN
    # for bfloat16 anyway, and oneDNN has no float64.
    return (
        is_mkl_held_back()
        and bool(torch.backends.mkldnn.enabled)
        and rows.dtype == torch.float32
        and rows.device.type == "cpu"
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
