"""Compiles kernels for a GPU without having one: registers, spills, memory and instructions of the code."""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.shards import FP8_BLOCK
from moepass.passes.segments.expert_kernels import GemmKernel, read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.fp8_rows import ScaledRows
from moepass.runtime.kernels.grouped_gemm.kernel_source import varying_parameters
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm, Launch
from moepass.runtime.kernels.grouped_gemm.tile_functions import triton_type
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes

_THREADS_PER_WARP = 32
# Resources of a multiprocessor, by compute capability. CUDA C++ programming guide, "technical specifications per
# compute capability", and for tensor memory the PTX manual on tcgen05. Shared memory is that of all blocks together.
_REGISTERS = 65536
_REGISTERS_GRANULE = 256  # registers are allocated to a warp in units of this size
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
_RESERVED_SHARED_BYTES = 1 << 10  # in each block, used by the system
_THREADS = 2048
_TENSOR_MEMORY_COLUMNS = 512
# Instructions of tensor cores begin with these; the newest first.
_TENSOR_CORE_INSTRUCTIONS = ("UTCHMMA", "UTCQMMA", "HGMMA", "QGMMA", "HMMA")
# The least alignment of allocated memory, and the largest that Triton makes use of.
_ALIGNED_BYTES = 16


@dataclasses.dataclass(frozen=True)
class GpuCode:
    """Resources of one kernel.

    Attributes:
        tensor_memory_columns: Columns that a block takes on an architecture with tensor memory.
        instructions: How often each instruction occurs in the code, not how often it runs.
    """

    registers_per_thread: int
    spilled_bytes: int
    shared_bytes: int
    threads: int
    tensor_memory_columns: int
    instructions: dict[str, int]

    def blocks_per_processor(self, capability: int) -> int:
        """Return how many blocks fit on a multiprocessor of a GPU of this compute capability; 0 if not even one does.

        Raises KeyError for a capability whose limits are not in the table.
        """
        warps = self.threads // _THREADS_PER_WARP
        of_warp = _round_up(self.registers_per_thread * _THREADS_PER_WARP, _REGISTERS_GRANULE)
        limits = [
            _REGISTERS // (of_warp * warps),
            _SHARED_BYTES[capability] // (self.shared_bytes + _RESERVED_SHARED_BYTES),
            _THREADS // self.threads,
        ]
        if self.tensor_memory_columns:
            limits.append(_TENSOR_MEMORY_COLUMNS // self.tensor_memory_columns)
        return min(limits)

    def tensor_core_instructions(self) -> tuple[str, int]:
        """Return the most frequent instruction of the newest kind, and the count of that kind; else "none" and 0."""
        for kind in _TENSOR_CORE_INSTRUCTIONS:
            counts = {name: count for name, count in self.instructions.items() if name.startswith(kind)}
            if counts:
                return max(counts, key=lambda name: counts[name]), sum(counts.values())
        return "none", 0


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


class CompiledKernel(NamedTuple):
    """One kernel of a segment at one size of tiles."""

    kernel: GemmKernel
    tile: TileSizes
    code: GpuCode


def compile_segment(
    segment: GraphModule,
    capability: int,
    sizes: Callable[[GemmKernel, int, torch.dtype], Sequence[TileSizes]],
    in_fp8: bool = False,
) -> Iterator[CompiledKernel]:
    """Yield all kernels of a segment of experts, compiled for each tile size.

    `sizes` returns the tile sizes for a kernel, the GPU's generation and a dtype. The segment's values are fake
    tensors. With `in_fp8` the kernels multiply in FP8. Raises NotByExpertError for a segment without kernels.
    """
    program = read_program(segment)
    for kernel in read_kernels(program).kernels:
        gemm = GeneratedGemm(kernel)
        operands = [_on_meta(node) for node in kernel.operands]
        outputs = [_on_meta(node) for node in kernel.outputs]
        weights, scales, rows = _on_meta(kernel.gemm.weights), None, None
        if in_fp8:
            weights = weights.to(torch.float8_e4m3fn)
            scales = torch.empty(
                [len(weights), *(-(-size // FP8_BLOCK) for size in weights.mT.shape[1:])], device="meta"
            ).mT
            count, width = operands[kernel.rows].shape
            rows = ScaledRows(
                torch.empty(count, width, dtype=weights.dtype, device="meta"),
                torch.empty(count, -(-width // FP8_BLOCK), device="meta"),
            )
        for tile in sizes(kernel, capability // 10, weights.dtype):
            launch = gemm.launch(operands, [weights], _on_meta(program.ends), outputs, tile, scales, rows)
            yield CompiledKernel(kernel, tile, compile_for(gemm, launch, tile, capability))


def _on_meta(node: Node) -> torch.Tensor:
    value = fake_value(node)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def compile_for(gemm: GeneratedGemm, launch: Launch, sizes: TileSizes, capability: int) -> GpuCode:
    """Return the code of `launch` for a GPU of compute capability `capability` (90 for 9.0).

    Tensors in `launch` may be fake or on the meta device. Triton must not be in the interpreter's mode.
    """
    varying = varying_parameters(gemm.kernel)
    return compile_kernel(gemm.function, launch.arguments, launch.constants, capability, varying, sizes.options())


def compile_kernel(
    function: Any,
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    capability: int,
    varying: Sequence[str] = (),
    options: Mapping[str, Any] = types.MappingProxyType({}),
) -> GpuCode:
    """Return the code of a Triton function for `arguments`, followed by the `constants`, as a launch specialises it.

    Integers in `varying` are not specialised.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    values = dict(constants)
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, (name, value) in enumerate(zip(function.arg_names, arguments, strict=False)):
        if value is None or (isinstance(value, int) and value == 1 and name not in varying):
            signature[name] = "constexpr"
            values[name] = value
            continue
        signature[name] = _type_of(value)
        if isinstance(value, torch.Tensor) or (
            isinstance(value, int) and value % _ALIGNED_BYTES == 0 and name not in varying
        ):
            attributes[index,] = [["tt.divisibility", _ALIGNED_BYTES]]
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", capability, _THREADS_PER_WARP)
    compiled = triton.compile(source, target=target, options=dict(options))
    used = _resources(compiled.asm["cubin"])
    return GpuCode(
        registers_per_thread=used["REG"],
        spilled_bytes=used["LOCAL"] + used["STACK"],
        shared_bytes=compiled.metadata.shared,
        threads=_THREADS_PER_WARP * compiled.metadata.num_warps,
        tensor_memory_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        instructions=_instructions(compiled.asm["cubin"]),
    )


def _type_of(value: torch.Tensor | float) -> str:
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn:
        return "*fp8e4nv"
    if isinstance(value, int):
        return "i32" if abs(value) < 1 << 31 else "i64"
    short = {"float": "fp", "bfloat": "bf", "int": "i", "uint": "u"}
    name = triton_type(value.dtype).removeprefix("tl.")
    kind, bits = re.fullmatch(r"([a-z]+)(\d+)", name).groups()  # type: ignore[union-attr]
    return f"*{short[kind]}{bits}"


def _resources(cubin: bytes) -> dict[str, int]:
    text = _dump("cuobjdump", cubin, "--dump-resource-usage")
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def _instructions(cubin: bytes) -> dict[str, int]:
    text = _dump("nvdisasm", cubin)
    # /*0a10*/  @!P0 HGMMA.64x128x16.F32.BF16 R24, ... ;
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text)
    return dict(collections.Counter(names))


def _dump(tool: str, cubin: bytes, *options: str) -> str:
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], check=True, capture_output=True, text=True).stdout
