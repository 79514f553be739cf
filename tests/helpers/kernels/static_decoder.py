"""Compile the decoders of quantised matrices, and the quantiser of rows, for GPUs.

This runs in a separate process, because tests interpret Triton. It prints the resources of the kernels, for several
layouts and compute capabilities, as JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import MatrixFormula, Number, Packing, Role
from moepass.runtime.kernels.fp8_quantizer import quantize_tiles
from moepass.runtime.kernels.fp8_rows import QUANTIZER_CONSTANTS, quantizer_arguments
from moepass.runtime.kernels.stored_lines import stored_lines
from moepass.runtime.kernels.triton_decoder import (
    FLOAT_OPTIONS,
    OPTIONS,
    decode_float_tiles,
    decode_tiles,
    float_arguments,
    launch_arguments,
)
from tests.helpers.kernels.gpu_code import compile_kernel
from tests.helpers.kernels.packed_floats import FORMULAS
from tests.helpers.kernels.stored_matrices import INTEGERS

EXPERTS, ROWS, COLUMNS = 8, 1024, 2048


def main() -> None:
    """Compile and print."""
    gptq, awq = (INTEGERS[name][0] for name in ("gptq", "awq"))
    float8, bytes8, words = torch.float8_e4m3fn, torch.uint8, torch.int32
    layouts = {
        "fp8 blocks": (MatrixFormula(Packing(8), Number.E4M3, (128, 128)), (ROWS, COLUMNS), float8),
        "mxfp4, transposed": (
            MatrixFormula(Packing(4, 2), Number.E2M1, (1, 32), is_transposed=True),
            (ROWS, COLUMNS // 2),
            bytes8,
        ),
        "gptq": (MatrixFormula(gptq, Number.INT, (1, 128), zero_point=8), (COLUMNS // 8, ROWS), words),
        "awq": (MatrixFormula(awq, Number.INT, (1, 128), zero_point=8), (COLUMNS, ROWS // 8), words),
    }
    kernels: list[tuple[str, Any, tuple[list[Any], dict[str, Any]], dict[str, int]]] = []
    with torch.device("meta"):
        for name, (formula, shape, dtype) in layouts.items():
            blocks = formula.block_counts(ROWS, COLUMNS)
            stored = {
                Role.VALUES: torch.empty(EXPERTS, *shape, dtype=dtype),
                Role.SCALES: torch.empty(EXPERTS, *(blocks[::-1] if formula.packing.transposed else blocks)),
            }
            sizes = (COLUMNS, ROWS) if formula.is_transposed else (ROWS, COLUMNS)
            lines = stored_lines(formula, stored, torch.empty(EXPERTS, *sizes, dtype=torch.bfloat16))
            kernels.append((name, decode_tiles, launch_arguments(lines), OPTIONS))
        for packed_formula in FORMULAS:
            float_type = packed_formula.type
            floats = {
                Role.VALUES: torch.empty(EXPERTS, ROWS, COLUMNS * float_type.value_bytes, dtype=bytes8),
                Role.SECTIONS: torch.empty(EXPERTS, packed_formula.least_bytes(ROWS, COLUMNS), dtype=bytes8),
            }
            target = torch.empty(EXPERTS, ROWS, COLUMNS, dtype=float_type.dtype)
            arguments = float_arguments(packed_formula, floats, target)
            format = "elf" if isinstance(packed_formula, ElfFormula) else "lossless"
            kernels.append((f"{format} {packed_formula.number}", decode_float_tiles, arguments, FLOAT_OPTIONS))
        rows = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
        scaled = torch.empty_like(rows, dtype=float8), torch.empty(ROWS, COLUMNS // 128)
        kernels.append(("rows to fp8", quantize_tiles, (quantizer_arguments(rows, *scaled), QUANTIZER_CONSTANTS), {}))
    codes = []
    for name, kernel, arguments, options in kernels:
        for capability in (80, 90, 100):
            code = compile_kernel(kernel, *arguments, capability, options=options)
            codes.append(
                {
                    "layout": name,
                    "capability": capability,
                    "threads": code.threads,
                    "registers_per_thread": code.registers_per_thread,
                    "spilled_bytes": code.spilled_bytes,
                    "blocks_per_processor": code.blocks_per_processor(capability),
                }
            )
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
