"""Experts that are lowered expert by expert: the numbers equal those of the operators, or a reason is reported."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import moepass
from moepass.passes.blocks.sink_token_gather import first_expert_node, is_lookup
from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.segment import NotLowered
from moepass.passes.segments.expert_program import GroupedGemm, NotByExpertError, RowWork, read_program
from moepass.runtime.lowering import lower_experts
from moepass.runtime.lowering.lower_segments import LOWERINGS, compile_with_inductor, decompositions
from tests.helpers.models.moe_stack import StackConfig, build_stack

EXPERTS, HIDDEN, WIDTH = 4, 8, 16
gemm = torch.ops.transformers.grouped_mm_fallback

Inputs = tuple[torch.Tensor, ...]


def gated(table: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> Inputs:
    """Fused gate and up projections, with a bias for each expert."""
    ids, up, up_bias, down, down_bias = weights
    gate, value = (gemm(table[chosen], up.transpose(1, 2), ends) + up_bias[ids]).chunk(2, dim=-1)
    return (gemm(F.silu(gate) * value, down.transpose(1, 2), ends) + down_bias[ids],)


def split(table: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> Inputs:
    """Two GEMMs of the same rows, with the activations as a second output."""
    _, up, _, down, _ = weights
    rows = table[chosen]
    gate, value = gemm(rows, up[:, :WIDTH].transpose(1, 2), ends), gemm(rows, up[:, WIDTH:].transpose(1, 2), ends)
    between = F.gelu(gate) * value.clamp(max=1.5)
    return gemm(between, down.transpose(1, 2), ends), between


def plain(table: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> Inputs:
    """Two consecutive GEMMs of an input with rows, without an activation function."""
    _, up, _, down, _ = weights
    return (gemm(gemm(table, up[:, :WIDTH].transpose(1, 2), ends), down.transpose(1, 2), ends),)


def viewed(table: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> Inputs:
    """Row work on views with gaps: halves of a bias, part of a weight, half of a GEMM that another GEMM reads.

    One input is an output as well.
    """
    ids, up, up_bias, down, _ = weights
    gate, value = gemm(table[chosen], up.transpose(1, 2), ends).chunk(2, dim=-1)
    biased = gate + up_bias[:, :WIDTH][ids] + up[:, ::2, 0][ids]
    straight = gemm(value, down.transpose(1, 2), ends)
    return gemm(F.silu(biased) * value, down.transpose(1, 2), ends) + straight, ids


FORMS: dict[str, Callable[..., Inputs]] = {"gated": gated, "split": split, "plain": plain, "viewed": viewed}


def inputs_for(counts: list[int], beyond: int, form: str, dtype: torch.dtype = torch.float64) -> Inputs:
    """Return inputs of a segment whose experts have `counts` rows, and `beyond` more rows that belong to no expert."""
    generator = torch.Generator().manual_seed(len(counts) + sum(counts))
    rows = sum(counts) + beyond

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ids = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    return (
        draw(rows if form == "plain" else 5, HIDDEN),
        torch.randint(0, 5, (rows,), generator=generator),
        torch.tensor(counts).cumsum(0).to(torch.int32),
        F.pad(ids, (0, beyond), value=EXPERTS - 1),
        draw(EXPERTS, 2 * WIDTH, HIDDEN),
        draw(2 * WIDTH, EXPERTS).t() if form == "viewed" else draw(EXPERTS, 2 * WIDTH),
        draw(EXPERTS, HIDDEN, WIDTH),
        draw(EXPERTS, HIDDEN),
    )


def segment_of(function: Callable[..., Inputs], *example: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake", decomposition_table=decompositions("inductor"))(*example)


@functools.cache
def lowered(form: str) -> tuple[GraphModule, Callable[[list[torch.Tensor]], Inputs]]:
    segment = segment_of(FORMS[form], *inputs_for([3, 4, 6, 7], 0, form))
    lowered = lower_experts.lower_experts(segment, compile_with_inductor)
    assert isinstance(lowered, lower_experts.ExpertLoop)
    return segment, lowered


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(0, 9), min_size=EXPERTS, max_size=EXPERTS), beyond=st.integers(0, 3))
def test_expert_by_expert_equals_all_at_once(form: str, counts: list[int], beyond: int) -> None:
    segment, run = lowered(form)
    if sum(counts) + beyond == 0:
        beyond = 1
    inputs = inputs_for(counts, beyond, form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_experts, "CHUNK_ROWS", 4)
        outputs = run(list(inputs))
    for output, expected in zip(outputs, segment(*inputs), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        assert output.stride() == expected.stride()


@pytest.mark.parametrize("form", ["gated", "split"])
def test_no_rows_of_no_tokens_are_compiled_as_a_whole(form: str) -> None:
    """The first step of a rank without tokens: an empty table has no row to look up."""
    table, *tensors = inputs_for([0] * EXPERTS, 0, form)
    inputs = (table[:0], *tensors)
    segment = segment_of(FORMS[form], *inputs)
    lowered, lowering = LOWERINGS["inductor"](segment)
    refusal = lowering.refusal
    assert refusal is not None
    assert (lowering.how, refusal.wanted, refusal.reason) == ("inductor", "expert_loop", "it has no rows")
    outputs = lowered(*inputs)
    assert [output.shape for output in outputs] == [output.shape for output in segment(*inputs)]


def test_a_program_keeps_its_parts_apart() -> None:
    steps = read_program(segment_of(split, *inputs_for([3, 4, 6, 7], 0, "split"))).steps
    assert [type(step) for step in steps] == [RowWork, GroupedGemm, GroupedGemm, RowWork, GroupedGemm]


def _mixes_rows(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    return (gemm(gemm(rows, up, ends).cumsum(0), down, ends),)


def _mean_of_rows(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    between = gemm(rows, up, ends)
    return (gemm(between - between.mean(0, keepdim=True), down, ends),)


def _rows_as_columns(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    return (gemm(gemm(rows, up, ends) + rows.sum(1)[:WIDTH], down, ends),)


def _other_groups(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    return (gemm(gemm(rows, up, ends), down, ends + 0),)


def _computed_offsets(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    ends = ends + 0
    return (gemm(gemm(rows, up, ends), down, ends),)


def _more_than_a_gemm(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    rows, up, down = rows.bfloat16(), up.bfloat16(), down.bfloat16()
    return (torch._grouped_mm(torch._grouped_mm(rows, up, ends), down, ends, out_dtype=torch.bfloat16),)


def _computed_weights(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    return (gemm(gemm(rows, up * 2, ends), down, ends),)


def _shows_weights(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    return gemm(gemm(rows, up, ends), down, ends), up.transpose(1, 2)


def _half_of_the_rows(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    return (gemm(gemm(rows, up, ends), down, ends)[2:],)


def _transposed(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    return (gemm(gemm(rows, up, ends), down, ends).t(),)


def _two_results(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Inputs:
    mantissa, exponent = torch.frexp(gemm(rows, up, ends))
    return (gemm(mantissa * exponent, down, ends),)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_mixes_rows, "rows may depend on each other in `aten.cumsum.default`"),
        (_mean_of_rows, "rows may depend on each other in `aten.mean.dim`"),
        (_rows_as_columns, "rows may depend on each other in `aten.sum.dim_IntList`"),
        (_other_groups, "group rows by different offsets"),
        (_computed_offsets, "it computes where each expert's rows end (`aten.add.Tensor`)"),
        (_computed_weights, "it computes `aten.mul.Tensor`, which all rows read"),
        (_shows_weights, "its output `aten.permute.default` is not one dense row for each pair"),
        (_half_of_the_rows, "rows may depend on each other in `aten.slice.Tensor`"),
        (_two_results, "rows may depend on each other in `aten.frexp.Tensor`"),
        (_transposed, "rows may depend on each other in `aten.permute.default`"),
        (_more_than_a_gemm, "does more than multiply rows by the weights of their experts"),
    ],
)
def test_what_is_no_work_on_single_rows_is_compiled_as_a_whole(function: Callable[..., Inputs], reason: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(WIDTH + 3, HIDDEN, generator=generator)
    ends = torch.tensor([4, 4, 9, WIDTH + 3], dtype=torch.int32)
    up, down = torch.randn(EXPERTS, HIDDEN, WIDTH), torch.randn(EXPERTS, WIDTH, HIDDEN)
    segment = segment_of(function, rows, ends, up, down)
    with pytest.raises(NotByExpertError) as raised:
        read_program(segment)
    refusal = lower_experts.lower_experts(segment, compile_with_inductor)
    assert isinstance(refusal, NotLowered)
    assert reason in refusal.reason
    assert refusal.wanted == "expert_loop"
    assert refusal.node == raised.value.node.name
    assert raised.value.node.graph is segment.graph


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_segments_hand_on_no_rows_but_the_outputs_of_experts(streaming: bool, no_grad: None) -> None:
    config = StackConfig(layers=2, hidden=32, width=16, experts=4, top_k=3)
    model = build_stack(config)
    if streaming:
        moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        torch.compile(model, backend="asyncep", options={"lower": "eager"})(torch.randn(70, config.hidden))
    values = [node.meta.get("val") for node in compilations[0].executor.graph_module.graph.nodes]
    wide = [value for value in values if isinstance(value, torch.Tensor) and value.shape == (210, config.hidden)]
    assert len(wide) == config.layers


def test_a_lookup_that_others_read_stays_where_it_is() -> None:
    def keeps_rows(table: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> Inputs:
        rows = table[chosen]
        return (rows + 1, gemm(rows, weights[1].transpose(1, 2), ends))

    inputs = inputs_for([3, 4, 6, 7], 0, "gated")
    for function, is_moved in ((keeps_rows, False), (gated, True)):
        graph = segment_of(function, *inputs).graph
        (first, *_) = (node for node in graph.nodes if is_call(node, gemm.default))
        assert (first_expert_node(first) is not first) == (is_moved and is_lookup(first.prev))
        assert is_lookup(first.args[0]) == is_moved


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_a_loop_of_one_gemm(rows: int) -> None:
    """Calibration times this loop to learn the speed of grouped GEMMs on a CPU."""
    left, weights = torch.randn(EXPERTS * rows, HIDDEN), torch.randn(EXPERTS, WIDTH, HIDDEN)
    loop = lower_experts.grouped_gemm_loop(left, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_experts, "CHUNK_ROWS", 4)
        (product,) = loop([left, weights, torch.arange(1, EXPERTS + 1) * rows])
    expected = torch.bmm(left.view(EXPERTS, rows, HIDDEN), weights.transpose(1, 2)).flatten(0, 1)
    torch.testing.assert_close(product, expected)
