"""Timing computation on one device: products, products by expert, attention and memory traffic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from moepass.runtime.experiments import Experiment, Sizes
from moepass.runtime.stopwatch import Timing, time_calls

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Enough heads to give a GPU work at short sequences; a CPU takes one after the other.
_GPU_HEAD_ROWS = 1 << 16
_CPU_HEADS = 4


def compute_experiments(sizes: Sizes, device: torch.device) -> list[Experiment]:
    """`gemm.DTYPE`, `grouped_gemm.DTYPE` and `attention.DTYPE` for each dtype, and `memory`."""
    experiments: list[Experiment] = []
    for name in sizes.dtypes:
        dtype = TORCH_DTYPES[name]
        widths = {"inner": sizes.widths, "columns": sizes.widths}
        shapes = {"sequence": sizes.sequences, "head_dim": sizes.head_dims}
        experiments += [
            Experiment(f"gemm.{name}", {"rows": sizes.rows, **widths}, _gemm(sizes, device, dtype), True),
            Experiment(
                f"grouped_gemm.{name}", {"rows": sizes.expert_rows, **widths}, _grouped(sizes, device, dtype), True
            ),
            Experiment(f"attention.{name}", shapes, _attention(sizes, device, dtype), True),
        ]
    return [*experiments, Experiment("memory", {"bytes": sizes.memory_bytes}, _memory(sizes, device), True)]


def _gemm(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Callable[..., Timing]:
    def measure(rows: int, inner: int, columns: int) -> Timing:
        left, right = _random(device, dtype, rows, inner), _random(device, dtype, columns, inner)
        return time_calls(lambda: F.linear(left, right), device, sizes.patience)

    return measure


def _grouped(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Callable[..., Timing]:
    """Seconds of one expert. On a CPU experts run one after the other, as the lowered graph runs them."""

    def measure(rows: int, inner: int, columns: int) -> Timing:
        left = _random(device, dtype, sizes.experts * rows, inner)
        weights = _random(device, dtype, sizes.experts, columns, inner)
        if device.type == "cuda" and dtype is torch.bfloat16:
            ends = torch.arange(1, sizes.experts + 1, device=device, dtype=torch.int32) * rows

            def run() -> object:
                return F.grouped_mm(left, weights.transpose(1, 2), offs=ends)
        else:

            def run() -> object:
                parts = zip(left.split(rows), weights.unbind(), strict=True)
                return [F.linear(part, weight) for part, weight in parts]

        timing = time_calls(run, device, sizes.patience)
        return Timing(timing.seconds / sizes.experts, timing.spread)

    return measure


def _attention(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Callable[..., Timing]:
    """Seconds of one head over one causal sequence."""

    def measure(sequence: int, head_dim: int) -> Timing:
        heads = max(8, _GPU_HEAD_ROWS // sequence) if device.type == "cuda" else _CPU_HEADS
        query, key, value = (_random(device, dtype, 1, heads, sequence, head_dim) for _ in range(3))
        timing = time_calls(
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), device, sizes.patience
        )
        return Timing(timing.seconds / heads, timing.spread)

    return measure


def _memory(sizes: Sizes, device: torch.device) -> Callable[..., Timing]:
    """A sum of two tensors into a third: `bytes` are read and written in all."""

    def measure(bytes: int) -> Timing:
        count = max(1, bytes // 12)
        left, right, result = (torch.ones(count, device=device) for _ in range(3))
        return time_calls(lambda: torch.add(left, right, out=result), device, sizes.patience)

    return measure


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    # Zeros would let some processors run faster than they can.
    return torch.randn(shape, device=device).to(dtype)
