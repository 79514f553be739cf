"""Random row work after random GEMMs: kernels in Triton's interpreter against the same layer in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # registers the operator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from moepass.passes.ir.segment import NotLowered
from moepass.runtime.lowering.lower_segments import decompositions
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton

aten = torch.ops.aten
TOKENS, HIDDEN, MOST_EXPERTS, MOST_COLUMNS = 4, 12, 6, 20
# The width of each GEMM and the row work after it: kinds, each with a number that chooses a variant.
Program = list[tuple[int, list[tuple[str, int]]]]
# Returns a tensor of this shape.
Draw = Callable[..., torch.Tensor]


class Layer:
    """A layer of `program` as a function of the tensors that it draws when it is made."""

    def __init__(self, counts: list[int], program: Program, returns: bool) -> None:
        self.program, self.returns = program, returns
        generator = torch.Generator().manual_seed(sum(counts))
        numbers = torch.tensor(counts)
        self.expert = torch.arange(len(counts)).repeat_interleave(numbers)
        self.indices = [
            self.expert,
            numbers.cumsum(0).to(torch.int32),
            torch.randint(-TOKENS, TOKENS, self.expert.shape, generator=generator),
            torch.randperm(sum(counts), generator=generator),
        ]
        self.drawn: list[torch.Tensor] = []

        def draw(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator) / (shape[1] ** 0.5 if len(shape) == 3 else 1)
            # Every second tensor has its dimensions in reverse order in memory.
            turned = made.permute(*range(len(shape))[::-1]).contiguous().permute(*range(len(shape))[::-1])
            self.drawn.append(turned if len(self.drawn) % 2 else made)
            return self.drawn[-1]

        self._compute(draw, self.indices)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        indices, drawn = tensors[: len(self.indices)], iter(tensors[len(self.indices) :])
        return self._compute(lambda *shape: next(drawn), indices)

    def _compute(self, draw: Draw, indices: Any) -> tuple[torch.Tensor]:
        expert, ends, token, order = indices
        rows = aten.index.Tensor(draw(TOKENS, HIDDEN), [token])
        for width, works in self.program:
            weights = draw(ends.shape[0], rows.shape[1], width)
            rows = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
            earlier = [rows]
            for kind, choice in works:
                rows = WORK[kind](rows, choice, draw, expert, earlier)
                earlier.append(rows)
        rows = rows * draw(expert.shape[0], 1)
        if self.returns:
            places = torch.arange(expert.shape[0])
            rows = aten.index.Tensor(rows, [aten.index_put.default(torch.empty_like(order), [order], places)])
        return (rows,)


def _columns(rows: torch.Tensor, choice: int, *_: Any) -> torch.Tensor:
    """Select every first, second or third column from some column on, or a single column."""
    width = rows.shape[1]
    if choice % 4 == 0:
        return aten.select.int(rows, 1, choice % width).unsqueeze(1)
    return aten.slice.Tensor(rows, 1, choice % min(3, width), None, 1 + choice % 3)


def _with_others(
    rows: torch.Tensor, choice: int, draw: Draw, expert: torch.Tensor, earlier: list[torch.Tensor]
) -> torch.Tensor:
    """Combine with numbers per feature, per expert or per row, or with an earlier value."""
    pairs, width = rows.shape
    kind = choice % 7
    if kind < 4:
        operand = draw(*((width,), (1, width), (pairs, width), (pairs, 1))[kind])
    elif kind < 6:
        operand = aten.index.Tensor(draw(MOST_EXPERTS, (1, width)[kind - 4]), [expert])
    else:
        fitting = [value for value in earlier if value.shape[1] in (1, width)]
        operand = fitting[choice % len(fitting)]
    combine = (torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a * 2, b))
    return combine[choice % 5](rows, operand)


def _masked(rows: torch.Tensor, choice: int, draw: Draw, *_: Any) -> torch.Tensor:
    mask = draw(rows.shape[0], 1) > 0
    return rows.masked_fill(mask if choice % 2 else mask.logical_not(), (0.0, 1.5, -2.0)[choice % 3])


def _counted(rows: torch.Tensor, choice: int, *_: Any) -> torch.Tensor:
    """Multiply by integers that are computed from the rows."""
    if choice % 2:
        return ((rows > 0) + (rows > 0.5).to(torch.int64)) * rows
    return (rows.clamp(-9, 9) * 4).to((torch.int32, torch.int64)[choice % 4 // 2]).abs() * rows


def _activated(rows: torch.Tensor, choice: int, *_: Any) -> torch.Tensor:
    activations = (F.silu, F.gelu, torch.tanh, F.relu6, F.softplus, torch.neg, F.leaky_relu, torch.erf, torch.sigmoid)
    return activations[choice % len(activations)](rows)


WORK: dict[str, Callable[..., torch.Tensor]] = {
    "columns": _columns,
    "others": _with_others,
    "masked": _masked,
    "counted": _counted,
    "activated": _activated,
}
RANDOM_LAYERS = given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5, 20]), min_size=1, max_size=MOST_EXPERTS).filter(any),
    program=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 7, 12, MOST_COLUMNS]),
            st.lists(st.tuples(st.sampled_from(sorted(WORK)), st.integers(0, 419)), max_size=5),
        ),
        min_size=1,
        max_size=3,
    ),
    returns=st.booleans(),
)


def _assert_right(counts: list[int], program: Program, returns: bool) -> None:
    layer = Layer(counts, program, returns)
    tensors = [*layer.indices, *layer.drawn]
    segment = make_fx(layer, decompositions("inductor"), tracing_mode="fake")(*tensors)
    lowered = lower_to_triton(segment, lambda graph: lambda inputs: graph(*inputs))
    if isinstance(lowered, NotLowered):
        # A tile has the columns of one output alone, outputs have the layout of some operand, and a vector with one
        # element per feature looks like one number per row if there are as many features as rows.
        reasons = ["what is stored of", "is not one dense row"]
        reasons += ["rows may depend on each other"] if sum(counts) <= MOST_COLUMNS else []
        assert any(reason in lowered.reason for reason in reasons), lowered
        return
    assert isinstance(lowered, TritonExperts)
    (result,) = lowered(list(tensors))
    (expected,) = layer(*(value.double() if value.is_floating_point() else value for value in tensors))
    assert result.shape == expected.shape
    error = (result.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= 1e-4


test_many_random_layers = pytest.mark.slow(settings(max_examples=50)(RANDOM_LAYERS(_assert_right)))
