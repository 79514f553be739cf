"""Kernels on unusual numbers, types and layouts, in Triton's interpreter, against torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # registers the operator
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from moepass.passes.ir.segment import NotLowered
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm, Launch
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes
from moepass.runtime.lowering.lower_segments import decompositions
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton

ROWS, INNER, WIDTH = 9, 16, 6
gemm = torch.ops.transformers.grouped_mm_fallback
Compute = Callable[..., torch.Tensor]


def _gemm_inputs(experts: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ends = torch.linspace(ROWS // 2, ROWS, experts).to(torch.int32)
    weights = torch.randn(experts, INNER, WIDTH, generator=generator) / 4
    return [torch.randn(ROWS, INNER, generator=generator), weights, ends]


def _lowered(
    compute: Compute, inputs: list[torch.Tensor], decomposed: bool = True
) -> TritonExperts | NotLowered | None:
    """Lower a GEMM of the first three `inputs`, and `compute` of its result [ROWS, WIDTH] and the other inputs."""

    def segment(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, *operands: torch.Tensor) -> Any:
        return (compute(gemm(rows, weights, ends), *operands),)

    table = decompositions("inductor" if decomposed else "eager")
    return lower_to_triton(make_fx(segment, table, tracing_mode="fake")(*inputs), _not_called)


def _not_called(graph: GraphModule) -> Any:
    raise AssertionError("nothing has to be computed before the first GEMM")


def _assert_as_torch(compute: Compute, *operands: torch.Tensor, decomposed: bool = True, experts: int = 3) -> None:
    inputs = [*_gemm_inputs(experts), *operands]
    lowered = _lowered(compute, inputs, decomposed)
    assert isinstance(lowered, TritonExperts), lowered
    (result,) = lowered(list(inputs))
    expected = compute(gemm(*inputs[:3]), *operands)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-6, atol=1e-30, equal_nan=True)


SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -20.0, float("inf"), float("nan")]).expand(ROWS, WIDTH)
INTEGERS = torch.tensor([0, 1, -1, 7, (1 << 24) + 1, -(1 << 40)]).repeat(ROWS, 1)
TRUTHS = torch.tensor([True, False] * 3).expand(ROWS, WIDTH)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about these numbers
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("compute", [lambda x: 1 / -x, F.softplus, lambda x: x.exp().log1p()])
def test_special_numbers(compute: Compute, decomposed: bool) -> None:
    """The sign of zero and the digits of small numbers are preserved."""
    _assert_as_torch(lambda product, x: torch.where(product < 99, compute(x), x), SPECIAL, decomposed=decomposed)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "compute",
    [
        lambda product, integers, _: integers.relu() + (product > 99),
        lambda product, integers, _: torch.where(product > 0, 1, 0) * 5_000_000_000,
        lambda product, integers, _: integers.masked_fill(product > 0, 1.5),
        lambda product, _, truths: (product > 0) + truths,
        lambda product, integers, _: (integers + (product > 0)).to(torch.float64).to(torch.bfloat16),
    ],
    ids=["relu", "choice of constants", "filled integers", "sum of truths", "rounded"],
)
def test_integers_and_booleans(compute: Compute) -> None:
    _assert_as_torch(compute, INTEGERS, TRUTHS)


def test_constants_out_of_range_of_an_integer_type_are_refused() -> None:
    inputs = [*_gemm_inputs(), torch.ones(ROWS, WIDTH, dtype=torch.uint8)]
    refusal = _lowered(lambda product, small: product * (small + (-1)), inputs)
    assert isinstance(refusal, NotLowered)
    assert "aten.add.Tensor with -1, which is out of range for torch.uint8" in refusal.reason


def test_columns_far_apart() -> None:
    """Rows may be the inner dimension in memory, here with 2^31 elements between the first column and the last."""
    far = torch.empty((WIDTH - 1) << 29 | 63, dtype=torch.bool).as_strided((ROWS, WIDTH), (1, 1 << 29))
    far.copy_(TRUTHS)
    _assert_as_torch(lambda product, mask: product * mask, far)
    _assert_as_torch(lambda product, mask: product * mask[:, 5:], far)


@pytest.mark.parametrize("step", [1, 2])
def test_ends_that_are_not_contiguous(step: int) -> None:
    rows, weights, ends = _gemm_inputs()
    table = torch.full((len(ends), step), -1, dtype=torch.int32)
    table[:, 0] = ends
    inputs = [rows, weights, table[:, 0]]
    lowered = _lowered(F.silu, inputs)
    assert isinstance(lowered, TritonExperts)
    (result,) = lowered(list(inputs))
    torch.testing.assert_close(result, F.silu(gemm(rows, weights, ends)))


def test_as_many_experts_as_rows() -> None:
    _assert_as_torch(F.silu, experts=ROWS)


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU; on another GPU the kernel would not wait for its inputs."""
    lowered = _lowered(F.silu, _gemm_inputs())
    assert isinstance(lowered, TritonExperts)
    current: list[torch.device] = []
    launched: list[torch.device] = []

    @contextlib.contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def start(gemm: GeneratedGemm, *inputs: Any) -> None:
        launched.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(GeneratedGemm, "launch", lambda *inputs: Launch([], {}, 1))
    monkeypatch.setattr(GeneratedGemm, "_start", start)
    monkeypatch.setattr("moepass.runtime.kernels.grouped_gemm.launch._programs", lambda device: 1)
    second = torch.device("cuda", 1)
    with FakeTensorMode():
        rows, weights, ends = (torch.empty_like(value, device=second) for value in _gemm_inputs())
        lowered.generated[0]([rows], [weights], ends, ROWS, TileSizes(16, 16, 16, 4, 2))
    assert launched == [second]
