"""The counted work of kernels, against their loops in Triton's interpreter."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moepass.passes.segments.expert_kernels import GemmKernel, read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.grouped_gemm import launch
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes
from moepass.runtime.profiles.hardware_profiles import load_hardware
from tests.helpers.kernels.kernel_work import KernelWork, count_work, roofline
from tests.helpers.models.expert_segments import ExpertSizes, expert_inputs, expert_segment

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton, which is there on Linux alone")

SIZES = ExpertSizes(tokens=40, pairs=75, experts=5, hidden=48, width=24)
SKEWED = torch.tensor([8.0, 0.0, 1.0, 1.0, 0.2])
TILE = TileSizes(rows=16, columns=16, inner=32, warps=4, stages=1, group=2)


class Counted:
    """The work of a kernel in the interpreter.

    Attributes:
        addresses: The addresses of loaded rows and weights, by the number of the tile in its program: tiles of one
            number run at the same time.
        ends: Bytes that tiles load to find where their experts begin and end.
    """

    def __init__(self) -> None:
        self.loaded = self.stored = self.flops = self.tiles = self.ends = 0
        self.addresses: dict[int, set[int]] = collections.defaultdict(set)
        self.of_program: collections.Counter[int] = collections.Counter()


@contextmanager
def _counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted, builder = Counted(), interpreter.InterpreterBuilder
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def counting_load(self: Any, pointers: Any, mask: Any, *arguments: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        counted.loaded += int(mask.data.sum()) * size
        if mask.data.size == 1 and size == 8:  # the address of an expert's weights, once per tile
            counted.tiles += 1
            counted.of_program[self.grid_idx[0]] += 1
        elif mask.data.size == 1:
            counted.ends += int(mask.data.sum()) * size
        elif mask.data.ndim == 2:
            counted.addresses[counted.of_program[self.grid_idx[0]]].update(pointers.data[mask.data].tolist())
        return load(self, pointers, mask, *arguments)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *arguments: Any) -> Any:
        counted.stored += int(mask.data.sum()) * (pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *arguments)

    def counting_dot(self: Any, left: Any, right: Any, *arguments: Any) -> Any:
        counted.flops += 2 * left.data.size * right.data.shape[1]
        return dot(self, left, right, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counting_load)
        patch.setattr(builder, "create_masked_store", counting_store)
        patch.setattr(builder, "create_dot", counting_dot)
        yield counted


def _both(
    number: int, activation: str, form: str, monkeypatch: pytest.MonkeyPatch, sizes: ExpertSizes = SIZES
) -> tuple[KernelWork, Counted]:
    """Return the work of one kernel of a segment, counted by formulas and in the interpreter."""
    programs = launch._programs(torch.device("cpu"))
    inputs = expert_inputs(sizes, SKEWED)
    rows = torch.diff(inputs.ends, prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    kernel = _kernels(activation, form, sizes)[number]
    described = [node.meta["val"] for node in kernel.operands]
    operands = [torch.zeros(value.shape, dtype=value.dtype) for value in described]
    weights = torch.zeros(tuple(kernel.gemm.weights.meta["val"].shape))
    with _counting(monkeypatch) as counted:
        GeneratedGemm(kernel)(operands, [weights], inputs.ends, sizes.pairs, TILE)
    return count_work(kernel, TILE, rows, programs), counted


def _kernels(activation: str, form: str, sizes: ExpertSizes) -> tuple[GemmKernel, ...]:
    segment = expert_segment(activation, form, expert_inputs(sizes, device="meta"))
    return read_kernels(read_program(segment)).kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "form"),
    [("swiglu", "plain"), ("clamped, interleaved", "biases"), ("geglu", "returned"), ("squared relu", "low rank")],
)
def test_counted_tiles_flops_and_bytes_match_the_interpreter(
    activation: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(len(_kernels(activation, form, SIZES))):
        work, counted = _both(number, activation, form, monkeypatch)
        assert work.tiles == counted.tiles
        assert work.most_tiles == max(counted.of_program.values())
        assert work.issued_flops == counted.flops
        assert work.loaded_bytes == counted.loaded
        assert work.stored_bytes == counted.stored


def test_bytes_shared_within_a_wave_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    work, counted = _both(1, "swiglu", "plain", monkeypatch)
    elements = sum(len(addresses) for addresses in counted.addresses.values())
    other_bytes = 8 * work.tiles + work.programs * 2 * 4 * SIZES.experts + counted.ends
    assert len(counted.addresses) == work.most_tiles
    assert work.wave_bytes == 4 * elements + other_bytes + work.stored_bytes
    assert work.once_bytes == 4 * len(set.union(*counted.addresses.values())) + work.stored_bytes
    assert work.once_bytes < work.wave_bytes < work.loaded_bytes + work.stored_bytes


def test_a_roofline_is_the_slower_of_tensor_cores_and_memory() -> None:
    machine = load_hardware("1xh100-80g")
    assert machine.processors is not None
    (up, _) = _kernels("swiglu", "plain", ExpertSizes(4096, 32768, 8, 512, 512, torch.bfloat16))
    tile = TileSizes(128, 128, 64, 8, 3)
    programs = int(machine.processors.value)
    many = count_work(up, tile, [programs * 128] * 8, programs)
    line = roofline(many, machine, "bf16")
    # All tiles are full, and all programs have equal work.
    assert many.flops == many.issued_flops
    assert line.tensor_cores == pytest.approx(many.flops / machine.flops["bf16"].value)
    assert line.bound == "tensor cores"
    few = roofline(count_work(up, TileSizes(16, 64, 64, 4, 4), [1] * 8, programs), machine, "bf16")
    assert few.bound == "memory"
    assert few.memory_once <= few.memory_by_wave == few.seconds
    with pytest.raises(ValueError, match="fp8e"):
        roofline(many, machine, "fp8e")
