"""Low-rank pairs of expert weights belong to their block; pairs that are in no bank are separated again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.integrations.moe  # noqa: F401  registers the fallback of grouped_mm
from torch import nn
from torch.nn import functional as F

import moepass
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from moepass.passes.parallel.merge_low_rank import merge_low_rank, split_low_rank
from tests.helpers.graphs.readable_refusals import check_readable
from tests.helpers.graphs.simulated_ranks import capture_module, hidden_rows, pretend_rank, run_ranks, with_tokens
from tests.helpers.project_styles.low_rank_style import LowRankModules
from tests.helpers.project_styles.style_sizes import StyleSizes

EXPERTS, HIDDEN, WIDTH, RANK, TOP_K = 4, 32, 48, 4, 2


class LowRankExperts(nn.Module):
    """Stacked weights with a low-rank pair each; `form` is how the pairs are multiplied."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        for name, inner, outer in (("up", HIDDEN, 2 * WIDTH), ("down", WIDTH, HIDDEN)):
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, inner, outer) / inner**0.5))
            self.register_parameter(f"{name}_a", nn.Parameter(torch.randn(EXPERTS, inner, RANK) / inner**0.5))
            self.register_parameter(f"{name}_b", nn.Parameter(torch.randn(EXPERTS, RANK, outer)))

    def multiply(self, rows: torch.Tensor, name: str, ends: torch.Tensor | None) -> torch.Tensor:
        def gemm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            if ends is None:
                return torch.bmm(left, right)
            result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(left, right, ends)
            return result

        low = gemm(gemm(rows, getattr(self, f"{name}_a")), getattr(self, f"{name}_b"))
        return gemm(rows, getattr(self, name)) + low * 0.5

    def compute(self, rows: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        gate, up = self.multiply(rows, "up", ends).chunk(2, dim=-1)
        return self.multiply(F.silu(gate) * up, "down", ends)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = hidden[:, :EXPERTS].softmax(-1).topk(TOP_K, dim=-1)
        if self.form != "grouped_mm":
            results = self.compute(hidden.expand(EXPERTS, *hidden.shape), None)
            dense = torch.zeros(hidden.shape[0], EXPERTS).scatter(1, ids, weights)
            if self.form == "dense_bmm":
                dense = dense + 0.1
            return (results * dense.t().unsqueeze(-1)).sum(0)
        sorted_ids, order = ids.view(-1).sort(stable=True)
        ends = torch.searchsorted(sorted_ids, torch.arange(EXPERTS), right=True).to(torch.int32)
        rows = self.compute(hidden[order // TOP_K], ends) * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, order // TOP_K, rows)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("is_offloaded", [True, False])
@pytest.mark.parametrize("form", ["grouped_mm", "chosen bmm", "dense_bmm"])
def test_local_pairs_are_parts_of_the_block(form: str, is_offloaded: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LowRankExperts(form), LowRankExperts(form)).eval().requires_grad_(False)
    inputs = torch.randn(9, HIDDEN)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = model(inputs)
        options: dict[str, Any] = {"lower": "eager"}
        if is_offloaded:
            moepass.offload_experts(model)
            options["debug"] = True
        outputs = torch.compile(model, backend="asyncep", options=options)(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    (compilation,) = compilations
    plan = compilation.plan
    assert plan.refusals == ()
    written = "dense_bmm" if form == "dense_bmm" else "grouped_mm"
    assert [(block.form, len(block.gemms), block.gated) for block in plan.blocks] == [(written, 6, True)] * 2
    assert [len(bank.tensors) for bank in plan.banks] == ([6, 6] if is_offloaded else [])
    assert len(plan.slot_stays) == (2 if is_offloaded else 0)


@pytest.mark.slow
def test_pairs_that_no_bank_took_are_products_of_rows_again() -> None:
    sizes, ranks = StyleSizes(experts=4), 2
    captured = []
    for rank in range(ranks):
        with pretend_rank(rank, ranks):
            layer = LowRankModules(sizes, dist.group.WORLD)  # type: ignore[arg-type]
            rows = hidden_rows(sizes.hidden, 9, rank, sizes.dtype)
            captured.append(capture_module(layer, rows, rank, ranks, dynamic=True))
    modules, counts = [], []
    for captured_rank in captured:
        module = captured_rank.module
        for each in (write_grouped_gemms, merge_low_rank, split_low_rank):
            module = run_passes((each,), module, Plan(), PassContext(groups=captured_rank.groups)).module
            counts.append(sum(map(is_grouped_gemm, module.graph.nodes)))
        modules.append(module)
    assert counts == [9, 3, 9] * ranks
    inputs = [
        with_tokens(captured_rank, hidden_rows(sizes.hidden, 7 + rank, rank, sizes.dtype))
        for rank, captured_rank in enumerate(captured)
    ]
    for outputs, expected in zip(
        run_ranks(modules, inputs), run_ranks([captured_rank.module for captured_rank in captured], inputs), strict=True
    ):
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


class TwoTypes(LowRankModules):
    """A low-rank pair in another type, which rounds differently and is not merged."""

    def __init__(self, sizes: StyleSizes, group: dist.ProcessGroup) -> None:
        super().__init__(sizes, group)
        for expert in self.experts:
            expert.up.forward = lambda rows, projection=expert.up: (  # type: ignore[assignment]
                F.linear(rows, projection.weight)
                + F.linear(F.linear(rows.double(), projection.low.double()), projection.high.double()).to(rows.dtype)
            )


@pytest.mark.slow
def test_a_pair_that_cannot_be_merged_is_refused_in_words() -> None:
    sizes = StyleSizes(experts=4)
    with pretend_rank(0, 2):
        layer = TwoTypes(sizes, dist.group.WORLD)  # type: ignore[arg-type]
        captured = capture_module(layer, hidden_rows(sizes.hidden, 9, 0, sizes.dtype), 0, 2, dynamic=True)
    passes = (write_grouped_gemms, merge_low_rank, eliminate_expert_parallelism, split_low_rank)
    result = run_passes(passes, captured.module, Plan(), PassContext(groups=captured.groups))
    check_readable(result.refusals)
    assert any("matrices of low rank" in refusal.reason for refusal in result.refusals)
    assert sum(map(is_grouped_gemm, result.module.graph.nodes)) == 9


@pytest.mark.slow
def test_a_scale_that_changes_the_type_is_not_merged() -> None:
    """A scale with one dimension promotes its factor, so the results of the experts are float64."""
    with pretend_rank(0, 2):
        layer = LowRankModules(StyleSizes(experts=4), dist.group.WORLD)  # type: ignore[arg-type]
        scale = nn.Parameter(torch.tensor([0.5], dtype=torch.float64), requires_grad=False)
        for expert in layer.experts:
            expert.down.scale = scale
        captured = capture_module(layer, hidden_rows(16, 9, 0, torch.float32), 0, 2, dynamic=True)
    module, counts = captured.module, []
    for each in (write_grouped_gemms, merge_low_rank):
        module = run_passes((each,), module, Plan(), PassContext(groups=captured.groups)).module
        counts.append(sum(map(is_grouped_gemm, module.graph.nodes)))
    assert counts == [9, 5]  # pairs of gate and up are merged, because their scale has their type
