"""Measure how fast one core decodes each layout of quantised weights into a slot, beside a copy of as many bytes.

The weights have the expert sizes of qwen3-30b-a3b. They are random codes, or for lossless packing random numbers with a
normal distribution. Every round decodes all layouts in turn, and packs as many matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import interleaved_seconds, median_and_spread, print_table
from moepass.models.layouts.layout import MatrixFormula, Packing, Role
from moepass.models.layouts.lossless import LosslessFormula
from moepass.models.layouts.published import read_quantization
from moepass.models.layouts.weight_layout import Formula, WeightLayout
from moepass.runtime.kernels.cpu_decoder import can_decode
from moepass.runtime.kernels.decoders import decode_matrices
from moepass.runtime.kernels.encoders import encode_matrices

ROWS, COLUMNS = 768, 2048
PACKING = "lossless bf16, packing"


def _tensors(format: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}}


CONFIGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "fp8 blocks 128 x 128": ({"quant_method": "fp8"}, "deepseek_v3"),
    "fp8 per channel": (_tensors("float-quantized", num_bits=8, type="float", strategy="channel"), "qwen3_moe"),
    "mxfp4 (gpt-oss, transposed)": ({"quant_method": "mxfp4"}, "gpt_oss"),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "qwen3_moe"),
    "int4 groups of 32": (
        _tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        "qwen3_moe",
    ),
    "gptq, groups of 128": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "qwen3_moe"),
    "awq, groups of 128": ({"quant_method": "awq", "bits": 4, "group_size": 128}, "qwen3_moe"),
}


def main(
    experts: Annotated[int, typer.Option(help="Matrices that are decoded at once.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds that are measured.")] = 15,
) -> None:
    """Print bytes at rest and rates of decoding, in GB/s of the bf16 bytes that are written, or packed."""
    torch.set_num_threads(1)
    layouts = {
        name: read_quantization(config, model_type, name).layouts[0] for name, (config, model_type) in CONFIGS.items()
    }
    formulas: dict[str, Formula] = {name: layout.formula for name, layout in layouts.items()}
    stored = {name: _random_matrices(layout, experts) for name, layout in layouts.items()}
    lossless = LosslessFormula("bf16")
    weights = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    formulas["lossless bf16"] = lossless
    stored["lossless bf16"] = {
        role: torch.stack([values] * experts) for role, values in lossless.encode(weights).items()
    }
    matrix = torch.ones(experts, ROWS, COLUMNS, dtype=torch.bfloat16)
    targets = {
        name: matrix.transpose(1, 2).contiguous() if formula.is_transposed else matrix.clone()
        for name, formula in formulas.items()
    }
    if not can_decode(matrix):
        raise typer.Exit(1)

    def decode(name: str) -> None:
        decode_matrices(formulas[name], stored[name], targets[name])

    variants: dict[str, Callable[[], object]] = {name: functools.partial(decode, name) for name in formulas}
    sources = [weights] * experts
    packing = {PACKING: lambda: encode_matrices(lossless, sources, (experts, ROWS, COLUMNS))}
    seconds = interleaved_seconds({"memcpy": lambda: targets["nvfp4"].copy_(matrix), **variants, **packing}, rounds)
    stored[PACKING] = stored["lossless bf16"]
    rows = []
    for name, times in seconds.items():
        rates = [matrix.nbytes / value / 1e9 for value in times]
        nbytes = sum(tensor.nbytes for tensor in stored[name].values()) if name in stored else matrix.nbytes
        rows.append([name, f"{nbytes / matrix.nbytes:.3f}", median_and_spread(rates)])
    print_table(
        f"Decoding of {experts} matrices {ROWS} x {COLUMNS} on one core",
        ["layout", "bytes at rest / bf16", "GB/s of bf16: median (slowest to fastest)"],
        rows,
    )


def _random_matrices(layout: WeightLayout, experts: int) -> dict[Role, torch.Tensor]:
    """Return stored tensors with random codes and zero points, and scales between 2^-9 and 2^-7."""
    formula, generator = layout.formula, torch.Generator().manual_seed(0)
    assert isinstance(formula, MatrixFormula)
    blocks = formula.block_counts(ROWS, COLUMNS)
    turned = formula.packing.transposed
    scales = (-7 - 2 * torch.rand(experts, *(blocks[::-1] if turned else blocks), generator=generator)).exp2()
    scale_dtype = layout.scales[0]
    stored = {
        Role.VALUES: _random_codes(formula.packing, layout.dtypes[0], (experts, ROWS, COLUMNS), generator),
        # e8m0 is stored as exponents.
        Role.SCALES: (scales.log2().round() + 127).byte() if scale_dtype == torch.uint8 else scales.to(scale_dtype),
    }
    if Role.GLOBAL_SCALE in layout.suffixes:
        stored[Role.GLOBAL_SCALE] = torch.rand(experts, generator=generator) + 0.5
    if formula.zero_points is not None:
        stored[Role.ZERO_POINTS] = _random_codes(formula.zero_points, layout.dtypes[0], (experts, *blocks), generator)
    if Role.BLOCK_INDICES in layout.optional and turned:
        stored[Role.BLOCK_INDICES] = (torch.arange(COLUMNS) // (COLUMNS // blocks[1])).int().expand(experts, COLUMNS)
    return stored


def _random_codes(
    packing: Packing, dtype: torch.dtype, shape: tuple[int, int, int], generator: torch.Generator
) -> torch.Tensor:
    experts, rows, columns = shape
    sizes = [columns, rows] if packing.transposed else [rows, columns]
    sizes[packing.dim] = -(-sizes[packing.dim] // packing.count)
    codes = torch.randint(0, 256, (experts, *sizes, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype == torch.float8_e4m3fn:
        codes &= 0xF7  # no NaN
    packed = codes.view(dtype).squeeze(-1)
    return packed.unflatten(-1, (-1, 16)) if packing.folded else packed


if __name__ == "__main__":
    typer.run(main)
