"""Two micro-batches through the same layers in one graph: each layer has one bank, which is read twice."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import moepass
from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from moepass.passes.pipeline import PASSES
from tests.helpers.graphs import simulated_ranks
from tests.helpers.graphs.backend_helper import BLOCKS, EXPERTS, TOP_K, Stack, tokens
from tests.helpers.graphs.simulated_ranks import capture, hidden_states, run_local, with_tokens
from tests.helpers.graphs.simulated_ranks import run_ranks as run_together
from tests.helpers.models.moe_stack import MoEStack, StackConfig, build_stack
from tests.helpers.processes.ranks import run_ranks

CONFIG = StackConfig(layers=2, hidden=16, width=16)
needs_memfd = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


class InTurns(nn.Module):
    """Each layer computes one half of the tokens and then the other."""

    def __init__(self, stack: MoEStack) -> None:
        super().__init__()
        self.dense, self.moe = stack.dense, stack.moe

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        halves = [hidden[:6], hidden[6:]]
        for dense, moe in zip(self.dense, self.moe, strict=True):
            halves = [half + dense(F.rms_norm(half, half.shape[-1:])) for half in halves]
            halves = [half + moe(F.rms_norm(half, half.shape[-1:])) for half in halves]
        return torch.cat(halves)


class AfterAnother(InTurns):
    """The whole model computes one half and then the other."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs = []
        for half in (hidden[:6], hidden[6:]):
            for dense, moe in zip(self.dense, self.moe, strict=True):
                half = half + dense(F.rms_norm(half, half.shape[-1:]))
                half = half + moe(F.rms_norm(half, half.shape[-1:]))
            outputs.append(half)
        return torch.cat(outputs)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("order", [InTurns, AfterAnother])
@pytest.mark.parametrize("form", EP_FORMS)
def test_a_layer_of_expert_parallelism_has_one_bank(
    form: str, order: type[InTurns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_ranks, "build_stack", lambda config, form: order(build_stack(config, form)).eval())
    captured = [capture(CONFIG, form, rank, 2, 12, dynamic=False) for rank in range(2)]
    hidden = [hidden_states(CONFIG, 12, 0 if form == "all_reduce" else rank) for rank in range(2)]
    inputs = [with_tokens(captured_rank, values) for captured_rank, values in zip(captured, hidden, strict=True)]
    expected = run_together([captured_rank.module for captured_rank in captured], inputs)
    complete = {
        f"moe.{layer}.experts": [moe.experts.gate_up_proj, moe.experts.down_proj]
        for layer, moe in enumerate(build_stack(CONFIG).moe)
    }
    for rank, captured_rank in enumerate(captured):
        context = PassContext(groups=captured_rank.groups)
        local = run_passes((eliminate_expert_parallelism,), captured_rank.module, Plan(), context)
        assert not local.refusals
        assert [bank.name for bank in local.plan.banks] == list(complete)
        (output,) = run_local(local.module, inputs[rank], local.plan.banks, complete)
        torch.testing.assert_close(output, expected[rank][0], rtol=1e-5, atol=1e-5)
        plan = run_passes(PASSES, captured_rank.module, Plan(), context).plan
        assert [stay.bank for stay in plan.slot_stays] == ([0, 0, 1, 1] if order is InTurns else [0, 1] * 2)


def _run_on_a_rank(form: str, order: str, slots: int) -> int:
    torch._dynamo.config.capture_scalar_outputs = True
    full = build_stack(CONFIG)
    model = globals()[order](build_stack(CONFIG, form)).eval()
    with torch.no_grad(), moepass.record_compilations() as compilations:
        options = {"lower": "eager", "debug": True, "timeout_s": 50, "slots": slots}
        compiled = torch.compile(model, backend="asyncep", options=options, fullgraph=True, dynamic=False)
        for step in range(2):
            hidden = hidden_states(CONFIG, 12, 0 if form == "all_reduce" else dist.get_rank(), seed=step)
            torch.testing.assert_close(compiled(hidden), full(hidden), rtol=1e-5, atol=1e-5)
    (compilation,) = compilations
    assert not compilation.plan.refusals
    return len(compilation.plan.banks)


@pytest.mark.slow
@needs_memfd
@pytest.mark.parametrize(("form", "order", "slots"), [("all_to_all", "InTurns", 2)])
def test_real_ranks_pull_the_one_bank_of_each_layer(form: str, order: str, slots: int) -> None:
    assert run_ranks(2, _run_on_a_rank, form, order, slots) == [CONFIG.layers] * 2


class Overlapped(nn.Module):
    """The up GEMMs of both halves precede the down GEMMs of both halves, as in engines that overlap micro-batches."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.blocks = nn.ModuleList(BLOCKS[form](seed=layer) for layer in range(2)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = list(x.chunk(2))
        for block in self.blocks:
            orders, owners, ends, rows = [], [], [], []
            for half in halves:
                ids = half[:, :EXPERTS].topk(TOP_K, dim=-1).indices.reshape(-1)
                orders.append(torch.argsort(ids, stable=True))
                owners.append(ids[orders[-1]])
                counts = torch.histc(owners[-1].float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
                ends.append(counts.cumsum(0).to(torch.int32))
                rows.append(half[orders[-1] // TOP_K])
            rows = [
                block.activate(self._gemm(block, block.up, *of), None) for of in zip(rows, owners, ends, strict=True)
            ]
            rows = [self._gemm(block, block.down, *of) for of in zip(rows, owners, ends, strict=True)]
            placed = [of[torch.argsort(order)] for of, order in zip(rows, orders, strict=True)]
            halves = [
                half + of.view(len(half), TOP_K, -1).sum(1).tanh() for half, of in zip(halves, placed, strict=True)
            ]
        return torch.cat(halves)

    def _gemm(self, block: Any, weight: Any, rows: torch.Tensor, owners: Any, ends: Any) -> torch.Tensor:
        if self.form == "batched_mm":
            return torch.bmm(rows.unsqueeze(1), block.matrix(weight[owners])).squeeze(1)
        result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, block.matrix(weight), ends)
        return result


class StackInTurns(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = list(x.chunk(2))
        for linear, block in zip(self.linears, self.blocks, strict=True):
            halves = [half + linear(half) for half in halves]
            ids = [half[:, :EXPERTS].topk(TOP_K, dim=-1).indices for half in halves]
            halves = [half + block(half, of).tanh() for half, of in zip(halves, ids, strict=True)]
        return torch.cat(halves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "form", "slots"),
    [(StackInTurns, "grouped_mm", 1), (Overlapped, "grouped_mm", 2), (Overlapped, "batched_mm", 1)],
)
def test_offloaded_layers_serve_both_halves(order: Any, form: str, slots: int) -> None:
    model = order(form)
    with torch.no_grad():
        expected = model(tokens(8))
        moepass.offload_experts(model, slots=slots)
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        for _ in range(2):
            assert torch.equal(compiled(tokens(8)), expected)
