"""Times computation on one device: GEMMs, grouped GEMMs, attention and memory traffic."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.nn import functional as F

from moepass.models.layouts.layout import MatrixFormula, Number, Packing, Role
from moepass.runtime.calibrate.experiments import CalibrationSizes, Experiment, Timing, time_calls
from moepass.runtime.kernels.decoders import decode_matrices
from moepass.runtime.lowering.cpu_gemms import multiply, takes_onednn
from moepass.runtime.lowering.lower_experts import grouped_gemm_loop

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Short sequences need many heads to fill a GPU; a CPU computes one head after the other.
_GPU_HEAD_ROWS = 1 << 16
_CPU_HEADS = 4
# [Empirical] With more rows an expert's GEMM takes many times as long as its weights take from memory.
_MOST_COLD_ROWS = 128
_MOST_COLD = 128
_DIFFERENT_VALUES = 1 << 16
_DECODED_COLUMNS = 2048


def compute_experiments(sizes: CalibrationSizes, device: torch.device) -> list[Experiment]:
    """Return `WORK.DTYPE` for each dtype and work of `passes.machine.hardware.COMPUTE_AXES`, `memory` and `decode`."""
    experiments: list[Experiment] = []
    for name in sizes.dtypes:
        dtype = TORCH_DTYPES[name]
        widths = {"inner": sizes.widths, "columns": sizes.widths}
        shapes = {"sequence": sizes.sequences, "head_dim": sizes.head_dims}
        works = {
            "gemm": ({"rows": sizes.rows, **widths}, partial(_gemm, sizes, device, dtype)),
            "grouped_gemm": ({"rows": sizes.expert_rows, **widths}, partial(_grouped_gemm, sizes, device, dtype)),
            "attention": (shapes, partial(_attention, sizes, device, dtype, False)),
            "masked_attention": (shapes, partial(_attention, sizes, device, dtype, True)),
        }
        experiments += [Experiment(f"{work}.{name}", axes, time, True) for work, (axes, time) in works.items()]
    memory = Experiment("memory", {"bytes": sizes.memory_bytes}, partial(_memory, sizes, device), True)
    decode = Experiment("decode", {"bytes": sizes.transfer_bytes}, partial(_decode, sizes, device), True)
    return [*experiments, memory, decode]


def _gemm(
    sizes: CalibrationSizes, device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int
) -> Timing:
    """Time one GEMM. Weights come from memory and results go there, as in a model of many layers."""
    own_bytes = (inner + rows) * columns * dtype.itemsize
    count = max(1, min(_MOST_COLD, sizes.cold_bytes // own_bytes))
    left, weights = _random(device, dtype, rows, inner), _random(device, dtype, count, columns, inner)
    results = torch.empty(count, rows, columns, device=device, dtype=dtype)

    copies_into_out = takes_onednn(left, weights[0].t())

    def run() -> None:
        for weight, result in zip(weights.unbind(), results.unbind(), strict=True):
            multiply(left, weight.t(), None if copies_into_out else result)

    return _share(time_calls(run, device, sizes.effort), count)


def _grouped_gemm(
    sizes: CalibrationSizes, device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int
) -> Timing:
    """Time one expert of a grouped GEMM. On a CPU experts run one after the other, in the loop of lowered graphs."""
    experts = sizes.experts
    if rows <= _MOST_COLD_ROWS:
        experts = max(experts, min(_MOST_COLD, -(-sizes.cold_bytes // (inner * columns * dtype.itemsize))))
    left = _random(device, dtype, experts * rows, inner)
    weights = _random(device, dtype, experts, columns, inner)
    if device.type == "cuda" and dtype is torch.bfloat16:
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows

        def run() -> object:
            return F.grouped_mm(left, weights.transpose(1, 2), offs=ends)
    elif device.type == "cpu":
        loop, ends = grouped_gemm_loop(left, weights), torch.arange(1, experts + 1) * rows

        def run() -> object:
            return loop([left, weights, ends])
    else:

        def run() -> object:
            experts_with_rows = zip(left.split(rows), weights.unbind(), strict=True)
            return [F.linear(rows_of_expert, weight) for rows_of_expert, weight in experts_with_rows]

    return _share(time_calls(run, device, sizes.effort), experts)


def _share(timing: Timing, count: int) -> Timing:
    return Timing(timing.seconds / count, timing.spread)


def _attention(
    sizes: CalibrationSizes, device: torch.device, dtype: torch.dtype, is_masked: bool, sequence: int, head_dim: int
) -> Timing:
    """Time one head over one causal sequence, in the layout in which projections produce it."""
    heads = max(8, _GPU_HEAD_ROWS // sequence) if device.type == "cuda" else _CPU_HEADS
    query, key, value = (_random(device, dtype, 1, sequence, heads, head_dim).transpose(1, 2) for _ in range(3))
    mask = torch.zeros(1, 1, sequence, sequence, device=device, dtype=dtype) if is_masked else None
    if mask is not None:
        mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu(1), float("-inf"))

    def run() -> object:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not is_masked)

    return _share(time_calls(run, device, sizes.effort), heads)


def _memory(sizes: CalibrationSizes, device: torch.device, bytes: int) -> Timing:
    """Time a sum of two tensors into a third, which reads and writes `bytes` in all."""
    left, right, result = (torch.ones(max(1, bytes // 12), device=device) for _ in range(3))
    return time_calls(lambda: torch.add(left, right, out=result), device, sizes.effort)


def _decode(sizes: CalibrationSizes, device: torch.device, bytes: int) -> Timing:
    """Time the decoding of NVFP4 experts into `bytes` of bf16.

    On a CPU FP8 and INT4 decode faster, and the transposed MXFP4 of gpt-oss up to a fifth slower: see
    docs/measurements.md.
    """
    rows = max(1, bytes // (2 * _DECODED_COLUMNS))
    target = torch.empty(1, rows, _DECODED_COLUMNS, device=device, dtype=torch.bfloat16)
    codes = torch.randint(0, 256, (1, rows, _DECODED_COLUMNS // 2), device=device, dtype=torch.uint8)
    scales = torch.rand(1, rows, _DECODED_COLUMNS // 16, device=device)
    stored = {Role.VALUES: codes, Role.SCALES: scales.to(torch.float8_e4m3fn), Role.GLOBAL_SCALE: scales[:, 0, 0]}
    formula = MatrixFormula(Packing(4, 2), Number.E2M1, (1, 16))
    return time_calls(lambda: decode_matrices(formula, stored, target), device, sizes.effort)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random numbers with repetitions. Zeros would let some processors run faster than usual."""
    count = math.prod(shape)
    values = torch.randn(min(count, _DIFFERENT_VALUES), device=device).to(dtype)
    return values.repeat(-(-count // len(values)))[:count].view(shape)
