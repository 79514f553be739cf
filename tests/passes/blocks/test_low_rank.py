"""Low-rank pairs of expert weights belong to their block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers the fallback of grouped_mm
from torch import nn
from torch.nn import functional as F

import moepass

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
