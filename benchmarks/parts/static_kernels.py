"""Compile expert kernels for real GPUs on any machine: resources and rooflines, without measurements."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import typer

from benchmarks.common import console, print_table
from benchmarks.parts.expert_shapes import MODELS, ExpertShape, even_rows, expert_shape, skewed_rows
from moepass.passes.machine.hardware import Hardware
from moepass.passes.segments.expert_kernels import read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.grouped_gemm.tile_sizes import candidate_sizes, tile_sizes
from moepass.runtime.profiles.hardware_profiles import load_hardware
from tests.helpers.kernels.gpu_code import CompiledKernel, compile_segment
from tests.helpers.kernels.kernel_work import count_work, roofline

# One hardware preset for each compute capability.
MACHINES = {80: "1xa100-80g", 90: "1xh100-80g", 100: "1xb200-192g"}
KERNELS = ("up", "down")


def main(
    static: bool = False,
    models: str = ",".join(MODELS),
    capabilities: str = ",".join(map(str, MACHINES)),
    tokens: str = "4096,32768,131072",
) -> None:
    """Compile the kernels of MODELS for GPUs of CAPABILITIES, and print rooflines for steps of TOKENS tokens."""
    if not static:
        console.print("only --static is there: to measure takes a GPU, and no benchmark of these kernels does it yet")
        raise typer.Exit(2)
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported
    shapes = [expert_shape(name) for name in models.split(",")]
    counts = [int(text) for text in tokens.split(",")]
    for capability in map(int, capabilities.split(",")):
        _resources(shapes, capability)
        _rooflines(shapes, counts, capability)


def _resources(shapes: Sequence[ExpertShape], capability: int) -> None:
    rows = [row for shape in shapes for row in _resource_rows(shape, capability)]
    print_table(
        f"STATIC: expert kernels compiled for sm_{capability}",
        [
            "model",
            "kernel",
            "tile",
            "copies",
            "warps",
            "stages",
            "registers",
            "spilled",
            "shared",
            "blocks",
            "tensor cores",
        ],
        rows,
        "static: read from the compiled code, no GPU was used. All tiles that a tuner tries, those used by "
        "default among them. tile: rows x columns x inner. copies: TMA where the hardware copies whole tiles. "
        "registers: of a thread. spilled, shared: bytes. blocks: that fit on a multiprocessor at a time. tensor "
        "cores: the instruction, and how often it is in the code.",
    )


def _resource_rows(shape: ExpertShape, capability: int) -> Iterator[list[object]]:
    for number, compiled in _numbered(shape, capability):
        tile, code = compiled.tile, compiled.code
        instruction, count = code.tensor_core_instructions()
        yield [
            *(
                shape.name,
                KERNELS[number],
                f"{tile.rows} x {tile.columns} x {tile.inner}",
                "TMA" if tile.descriptors else "",
                tile.warps,
                tile.stages,
            ),
            *(code.registers_per_thread, code.spilled_bytes, code.shared_bytes, code.blocks_per_processor(capability)),
            f"{instruction} x {count}",
        ]


def _numbered(shape: ExpertShape, capability: int) -> Iterator[tuple[int, CompiledKernel]]:
    """Return the compiled kernels, with the number of each kernel in its segment."""
    entries: list[object] = []
    for compiled in compile_segment(shape.segment(4096), capability, candidate_sizes):
        if compiled.kernel not in entries:
            entries.append(compiled.kernel)
        yield entries.index(compiled.kernel), compiled


def _rooflines(shapes: Sequence[ExpertShape], counts: Sequence[int], capability: int) -> None:
    machine = load_hardware(MACHINES[capability])
    rows = [
        _roofline_row(shape, tokens, routing, capability, machine)
        for shape in shapes
        for tokens in counts
        for routing in ("uniform", "skewed")
    ]
    print_table(
        f"STATIC: rooflines of an expert layer on {machine.name}, from datasheet peaks",
        ["model", "tokens", "routing", "tile", "GFLOP", "empty", "loaded", "by wave", "once", "ms", "TFLOP/s",
         "of peak", "bound"],
        rows,
        "static: counted from the kernels' loops, nothing was measured. Both kernels together; the tile is that of the "
        "first. empty: FLOPs of empty rows, columns and steps, against the others. loaded, by wave, once: GB that "
        "tiles ask for (caches deliver them), that the memory delivers if blocks that run side by side share what they "
        "have alike, and that it delivers at least. ms: the slower of tensor cores, by the busiest multiprocessor, and "
        "memory by wave; TFLOP/s and its part of the peak without empty ones. skewed: the n-th most popular expert has "
        "a share of 1 / n, a quarter of them none.",
    )  # fmt: skip


def _roofline_row(shape: ExpertShape, tokens: int, routing: str, capability: int, machine: Hardware) -> list[object]:
    assert machine.processors is not None
    sizes = shape.sizes(tokens)
    rows = (even_rows if routing == "uniform" else skewed_rows)(sizes.pairs, sizes.experts)
    tiles, works = [], []
    for kernel in read_kernels(read_program(shape.segment(tokens))).kernels:
        tiles.append(tile_sizes(kernel, capability // 10, sizes.dtype, -(-sizes.pairs // sizes.experts)))
        works.append(count_work(kernel, tiles[-1], rows, int(machine.processors.value)))
    lines = [roofline(work, machine, "bf16") for work in works]
    seconds, flops = sum(line.seconds for line in lines), sum(work.flops for work in works)
    assert flops == shape.flops(tokens)
    reached = flops / seconds
    return [
        *(shape.name, tokens, routing, f"{tiles[0].rows} x {tiles[0].columns}", f"{flops / 1e9:.0f}"),
        f"{sum(work.issued_flops for work in works) / flops - 1:.0%}",
        *(f"{sum(getattr(work, name) for work in works) / 1e9:.2f}" for name in ("loaded_bytes", "wave_bytes")),
        f"{sum(work.once_bytes for work in works) / 1e9:.2f}",
        *(f"{seconds * 1e3:.3f}", f"{reached / 1e12:.0f}", f"{reached / machine.flops['bf16'].value:.0%}"),
        " and ".join(dict.fromkeys("compute" if line.bound == "tensor cores" else line.bound for line in lines)),
    ]
