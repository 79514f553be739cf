"""Runs the kernels that `kernel_source` writes."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.shards import FP8_BLOCK
from moepass.passes.segments.expert_kernels import GemmKernel
from moepass.runtime.kernels.fp8_rows import BlockScaledWeights, ScaledRows, quantize_rows
from moepass.runtime.kernels.grouped_gemm.kernel_source import (
    COLUMNS_CONTIGUOUS,
    INNER_CONTIGUOUS,
    KERNEL_NAME,
    POINTERS,
    column_groups,
    kernel_source,
    table_operands,
)
from moepass.runtime.kernels.grouped_gemm.tile_functions import triton_type
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes, candidate_sizes, tile_sizes
from moepass.runtime.kernels.grouped_gemm.tuner import KernelIdentity, TunedTiles, active_timer, rows_bucket, tune
from moepass.runtime.system.own_files import find_cache_folder
from moepass.runtime.torch_private import load_generated_module

# Addresses with this alignment are loaded by the widest loads.
_WIDEST_LOAD_BYTES = 16


class Launch(NamedTuple):
    """The arguments in the order of the kernel's parameters, and the constants for which it is compiled, by name.

    `most_tiles` is an upper limit of the number of tiles; only the device knows the number.
    """

    arguments: list[Any]
    constants: dict[str, Any]
    most_tiles: int


class GeneratedGemm:
    """One kernel as a function of its operands, the weights, and the ends of the experts.

    Raises NoTileFunctionError if the kernel has operators or types that Triton's tiles do not have.
    """

    def __init__(self, kernel: GemmKernel) -> None:
        self.kernel = kernel
        self.source = kernel_source(kernel)
        self._tables = table_operands(kernel)
        self._digest = hashlib.sha256(self.source.encode()).hexdigest()
        # None for a kernel that is not tuned.
        self._tuned: dict[KernelIdentity, TileSizes | None] = {}

    @functools.cached_property
    def function(self) -> Any:
        """The kernel as a Triton function."""
        return getattr(load_generated_module(self.source), KERNEL_NAME)

    def __call__(
        self,
        operands: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | BlockScaledWeights,
        ends: torch.Tensor,
        rows: int,
        sizes: TileSizes | None = None,
    ) -> list[torch.Tensor]:
        """Return the outputs [rows, ...] for operands in the kernel's order.

        `weights` are ranges of experts, [experts, in, out] each, of one layout and in order of experts; or weights in
        FP8, and then the rows are multiplied in FP8 too. `ends` [experts] int32 has the index after the last row of
        each expert.
        """
        described = map(fake_value, self.kernel.outputs)
        outputs = [torch.empty((rows, *it.shape[1:]), dtype=it.dtype, device=ends.device) for it in described]
        scales, scaled_rows = None, None
        if isinstance(weights, BlockScaledWeights):
            scales, weights = weights.scales, (weights.values,)

        def run(sizes: TileSizes) -> None:
            launch = self.launch(operands, weights, ends, outputs, sizes, scales, scaled_rows)
            programs = min(launch.most_tiles, _programs(ends.device) * sizes.blocks)
            # Runs in a copy of the context, so that the allocator of the calling program stays unchanged.
            contextvars.copy_context().run(self._start, launch, programs, sizes)

        if rows:
            with _current(ends.device):
                if scales is not None:
                    scaled_rows = quantize_rows(operands[self.kernel.rows])
                run(sizes or self._fastest(weights, rows, len(ends), run))
        return outputs

    def _start(self, launch: Launch, programs: int, sizes: TileSizes) -> None:
        if sizes.descriptors:
            import triton

            triton.set_allocator(_scratch)
        self.function[(programs,)](*launch.arguments, **launch.constants, **sizes.options())

    def _fastest(
        self, weights: Sequence[torch.Tensor], rows: int, experts: int, run: Callable[[TileSizes], None]
    ) -> TileSizes:
        """Return the fastest measured sizes, else the default ones; within `tune_kernels`, measure them first."""
        first = weights[0]
        capability = _capability(first.device)
        identity = self._identity(first, rows_bucket(rows, experts), experts)
        if identity not in self._tuned or (self._tuned[identity] is None and active_timer() is not None):
            self._tuned[identity] = self._look_up_or_tune(identity, first, run)
        return self._tuned[identity] or tile_sizes(self.kernel, capability, first.dtype, -(-rows // experts))

    def _look_up_or_tune(
        self, identity: KernelIdentity, weights: torch.Tensor, run: Callable[[TileSizes], None]
    ) -> TileSizes | None:
        candidates = candidate_sizes(self.kernel, _capability(weights.device), weights.dtype)
        if self._weight_descriptor([weights]) == POINTERS:
            candidates = tuple(sizes for sizes in candidates if not sizes.descriptors)
        folder, timer = find_cache_folder(), active_timer()
        table = None if folder is None else TunedTiles(folder)
        stored = None if table is None else table.load(identity, candidates)
        if stored is not None or timer is None:
            return stored
        tuned = tune(identity, candidates, run, timer)
        if table is not None:
            table.save(tuned)
        return tuned.fastest

    def _identity(self, weights: torch.Tensor, rows_per_expert: int, experts: int) -> KernelIdentity:
        gpu, capability, triton = _machine(weights.device)
        layouts = {weights.stride(2): "columns", weights.stride(1): "inner"}
        return KernelIdentity(
            source=self._digest,
            dtype=str(weights.dtype).removeprefix("torch."),
            precision=_precision(),
            inner=weights.shape[1],
            width=self.kernel.width,
            experts=experts,
            layout=layouts.get(1, "strided"),
            rows_per_expert=rows_per_expert,
            gpu=gpu,
            capability=capability,
            triton=triton,
        )

    def launch(
        self,
        operands: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        ends: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        sizes: TileSizes,
        scales: torch.Tensor | None = None,
        scaled_rows: ScaledRows | None = None,
    ) -> Launch:
        """Return the arguments of a launch that writes `outputs`.

        With weights in FP8, `scales` are those of the weights, and `scaled_rows` the rows that are multiplied.
        """
        rows, experts = len(outputs[0]), len(ends)
        # Kernels read contiguous `ends`; models may also pass a column of a table of beginnings and ends.
        arguments: list[Any] = [expert_addresses(weights), *weights[0].stride()[1:], ends.contiguous(), rows]
        if scales is None or scaled_rows is None:
            left = operands[self.kernel.rows]
            arguments += [left, *left.stride(), None, 0, None, 0, 0, 0]
        else:
            left = scaled_rows.values
            arguments += [left, *left.stride(), scaled_rows.scales, scaled_rows.scales.stride(0)]
            arguments += [scales, *scales.stride()]
        for tensor in operands:
            arguments += [tensor, *tensor.stride()]
        arguments += [len(operands[number]) for number in self._tables]
        for tensor in outputs:
            arguments += [tensor, *tensor.stride()]
        constants = {
            "EXPERTS": experts,
            "EXPERT_LANES": 1 << experts.bit_length(),
            "INNER": weights[0].shape[1],
            "COLUMNS": weights[0].shape[2],
            "WIDTH": self.kernel.width,
            "PRODUCT_TYPE": _product_type(weights[0]),
            "PRECISION": _precision(),
            "ALIGNMENT": _alignment(weights),
            "BLOCK_ROWS": sizes.rows,
            "BLOCK_COLUMNS": sizes.columns,
            "BLOCK_INNER": sizes.inner,
            "GROUP": sizes.group,
            "WEIGHT_DESCRIPTOR": self._weight_descriptor(weights) if sizes.descriptors else POINTERS,
            "ONE_BANK": sizes.descriptors and self._lie_in_one_bank(weights, sizes),
            "ROW_DESCRIPTOR": sizes.descriptors and self._has_row_descriptor(left),
            "FP8_BLOCK": 0 if scales is None else FP8_BLOCK,
        }
        column_tiles = -(-self.kernel.width // sizes.columns)
        return Launch(arguments, constants, (-(-rows // sizes.rows) + experts) * column_tiles)

    def _weight_descriptor(self, weights: Sequence[torch.Tensor]) -> int:
        """Return the kind of descriptors that the weights allow: POINTERS for every second column alone."""
        first = weights[0]
        if any(len(group) == 1 and group[0].step != 1 for group in column_groups(self.kernel)):
            return POINTERS
        if _alignment(weights) == _WIDEST_LOAD_BYTES:
            if first.stride(1) == 1 and _is_described(first.stride(2), first):
                return INNER_CONTIGUOUS
            if first.stride(2) == 1 and _is_described(first.stride(1), first):
                return COLUMNS_CONTIGUOUS
        return POINTERS

    def _lie_in_one_bank(self, weights: Sequence[torch.Tensor], sizes: TileSizes) -> bool:
        """Return whether one descriptor serves all experts.

        It does if the experts follow each other as rows of one matrix, and no tile has inner elements of two experts.
        """
        nonempty = [bank for bank in weights if len(bank)]
        descriptor = self._weight_descriptor(weights)
        if len(nonempty) != 1 or descriptor == POINTERS:
            return False
        (bank,) = nonempty
        _, inner, columns = bank.shape
        if descriptor == INNER_CONTIGUOUS:
            return bank.stride(0) == columns * bank.stride(2)
        return bank.stride(0) == inner * bank.stride(1) and inner % sizes.inner == 0

    def _has_row_descriptor(self, rows: torch.Tensor) -> bool:
        """Return whether the rows of a tile are adjacent in memory that a descriptor can describe."""
        if self.kernel.row_numbers is not None or rows.data_ptr() % _WIDEST_LOAD_BYTES:
            return False
        return rows.stride(1) == 1 and _is_described(rows.stride(0), rows)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `device` is the current GPU: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _is_described(stride: int, tensor: torch.Tensor) -> bool:
    return stride > 0 and stride * tensor.itemsize % _WIDEST_LOAD_BYTES == 0


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Return memory in which programs write descriptors. Torch aligns allocations by more than they need."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def expert_addresses(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the address of each expert's weights, as int64 on their device."""
    first = weights[0]
    if any(experts.stride()[1:] != first.stride()[1:] or experts.dtype != first.dtype for experts in weights):
        raise ValueError("the ranges of experts of a bank must have one layout and one type")
    addresses = [
        torch.arange(len(experts), device=experts.device) * (experts.stride(0) * experts.itemsize) + experts.data_ptr()
        for experts in weights
        if len(experts)
    ]
    return addresses[0] if len(addresses) == 1 else torch.cat(addresses)


def _alignment(weights: Sequence[torch.Tensor]) -> int:
    """Return the largest power of two, up to the widest load, that divides the addresses of all experts."""
    addresses = [number for experts in weights for number in (experts.data_ptr(), experts.stride(0) * experts.itemsize)]
    alignment = _WIDEST_LOAD_BYTES
    while any(address % alignment for address in addresses):
        alignment //= 2
    return alignment


def _product_type(weights: torch.Tensor) -> Any:
    import triton.language as tl

    if weights.device.type == "cpu" and weights.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        return tl.float32  # the interpreter multiplies the bits of these types as integers; in float32, exactly
    if weights.dtype == torch.float8_e4m3fn:
        return tl.float8e4nv
    return getattr(tl, triton_type(weights.dtype).removeprefix("tl."))


def _precision() -> str:
    """Return how float32 is multiplied, according to torch's setting."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def _programs(device: torch.device) -> int:
    """Return the number of programs that keep the device busy; each computes tile after tile."""
    if device.type != "cuda":
        return 4  # the interpreter runs them one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _machine(device: torch.device) -> tuple[str, tuple[int, int], str]:
    import triton

    if device.type != "cuda":
        return "interpreter", (0, 0), triton.__version__
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), triton.__version__


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8
