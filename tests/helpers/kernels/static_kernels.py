"""Compile the kernels of one segment for GPUs, in a separate process, because tests interpret Triton.

    python -m tests.helpers.kernels.static_kernels '{"activation": ..., "form": ..., "dtype": ...,
        "capabilities": [90], "turned": false, "tiles": "all", "geometry": "qwen3-30b-a3b", "in_fp8": false}'

prints a JSON list with one entry for each capability, kernel and tile size. `tiles` selects the sizes: "largest", "all"
default sizes, the "candidates" of the tuner, or "few rows", the smallest candidates. `geometry` is a key of SIZES.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moepass.passes.graph.nodes import fake_value
from moepass.runtime.kernels.grouped_gemm.tile_sizes import all_tile_sizes, candidate_sizes
from tests.helpers.kernels.gpu_code import compile_segment
from tests.helpers.models.expert_segments import ExpertSizes, expert_inputs, expert_segment

# For 4096 tokens. No tile divides the widths of gpt-oss-120b.
SIZES = {
    "qwen3-30b-a3b": ExpertSizes(tokens=4096, pairs=32768, experts=128, hidden=2048, width=768),
    "gpt-oss-120b": ExpertSizes(tokens=4096, pairs=16384, experts=128, hidden=2880, width=2880),
}
TILES = {
    "largest": lambda *kernel: all_tile_sizes(*kernel)[:1],
    "all": all_tile_sizes,
    "candidates": candidate_sizes,
    "few rows": lambda *kernel: tuple(sizes for sizes in candidate_sizes(*kernel) if sizes.rows < 64),
}


def compiled_kernels(
    activation: str,
    form: str,
    dtype: str,
    capabilities: Sequence[int],
    turned: bool,
    tiles: str,
    geometry: str,
    in_fp8: bool,
) -> Iterator[dict[str, Any]]:
    sizes = dataclasses.replace(SIZES[geometry], dtype=getattr(torch, dtype))
    segment = expert_segment(activation, form, expert_inputs(sizes, device="meta", turned=turned))
    for capability in capabilities:
        for kernel, tile, code in compile_segment(segment, capability, TILES[tiles], in_fp8):
            yield {
                "capability": capability,
                "is_thin": min(fake_value(kernel.gemm.weights).shape[1:]) <= sizes.rank,
                "tile": dataclasses.asdict(tile),
                **dataclasses.asdict(code),
            }


if __name__ == "__main__":
    print(json.dumps(list(compiled_kernels(**json.loads(sys.argv[1])))))
