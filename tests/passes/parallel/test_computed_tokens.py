"""Layers whose number of tokens is computed from another size get the same decision in static and dynamic graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import moepass
from moepass.models.reference.collectives import gather_rows, scatter_sums, sum_over_ranks
from moepass.models.reference.expert_parallel import (
    EP_FORMS,
    AllGatherExperts,
    AllReduceExperts,
    AllToAllExperts,
    ShardedExperts,
)
from moepass.models.reference.grouped_experts import weighted_sum
from tests.helpers.graphs import simulated_ranks
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.simulated_ranks import Captured, capture, hidden_states, run_local, run_ranks, with_tokens
from tests.helpers.models.moe_stack import MoELayer, StackConfig, build_stack
from tests.helpers.processes.adopted_stacks import compile_whole
from tests.helpers.processes.ranks import run_ranks as run_on_processes

CONFIG = StackConfig(layers=1, experts=6, top_k=2)
TOKENS = 35


def _padded_by(layer: MoELayer, hidden: torch.Tensor, padding: int) -> torch.Tensor:
    ids, weights = layer.router(hidden)
    output: torch.Tensor = layer.experts(*(F.pad(value, (0, 0, 0, padding)) for value in (hidden, ids, weights)))
    return output[: hidden.shape[0]]


def _a_sixteenth(layer: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    rows = 2.0 * hidden[: hidden.shape[0] // 16]
    output: torch.Tensor = layer.experts(rows, *layer.router(rows))
    return output


# Functions of n tokens: how many of them go through the experts.
LAYERS: dict[str, Callable[[MoELayer, torch.Tensor], torch.Tensor]] = {
    "padded by a remainder": lambda layer, hidden: _padded_by(layer, hidden, -hidden.shape[0] % 8),
    "padded by a quotient": lambda layer, hidden: _padded_by(
        layer, hidden, (hidden.shape[0] + 7) // 8 * 8 - hidden.shape[0]
    ),
    "a quotient": _a_sixteenth,
}


class _Layer(MoELayer):
    def __init__(self, layer: MoELayer, kind: str) -> None:
        super().__init__(layer.router, layer.experts)
        self.kind = kind

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return LAYERS[self.kind](self, hidden_states)


def _captured(kind: str, form: str, rank: int, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> Captured:
    def build(config: StackConfig, form: str) -> nn.Module:
        stack = build_stack(config, form)
        stack.moe[0] = _Layer(stack.moe[0], kind)
        return stack

    monkeypatch.setattr(simulated_ranks, "build_stack", build)
    return capture(CONFIG, form, rank, 2, TOKENS, moe_alone=True, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("form", EP_FORMS)
def test_they_are_taken_and_right(form: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = build_stack(CONFIG).moe[0].experts
    complete = {"experts": [experts.gate_up_proj, experts.down_proj]}
    for dynamic in (False, True):
        captured = [_captured(kind, form, rank, monkeypatch, dynamic) for rank in range(2)]
        results = [eliminate(captured_rank) for captured_rank in captured]
        assert [result.refusals for result in results] == [(), ()]
        for counts in ((TOKENS, TOKENS), (19, 40), (7, 33)) if dynamic else ((TOKENS, TOKENS),):
            if form == "all_reduce":
                counts = (counts[1], counts[1])
            hidden = [hidden_states(CONFIG, tokens, 0 if form == "all_reduce" else rank)
                      for rank, tokens in enumerate(counts)]  # fmt: skip
            inputs = [
                with_tokens(captured_rank, values) for captured_rank, values in zip(captured, hidden, strict=True)
            ]
            expected = run_ranks([captured_rank.module for captured_rank in captured], inputs)
            for result, values, (wanted,) in zip(results, inputs, expected, strict=True):
                (output,) = run_local(result.module, values, result.plan.banks, complete)
                torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def _batches_of_many_sizes() -> list[int]:
    rank, kind = dist.get_rank(), "padded by a remainder"
    model, full = build_stack(CONFIG, "all_gather"), build_stack(CONFIG)
    model.moe[0], full.moe[0] = _Layer(model.moe[0], kind), _Layer(full.moe[0], kind)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(model, timeout_s=20)
        for step, counts in enumerate([(8, 8), (8, 11), (1, 13), (4, 0)]):
            hidden = hidden_states(CONFIG, counts[rank], rank, seed=step)
            torch.testing.assert_close(compiled(hidden), full(hidden), rtol=1e-5, atol=1e-5)
    assert not [refusal for compilation in compilations for refusal in compilation.plan.refusals]
    return [len(compilation.plan.banks) for compilation in compilations]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")
def test_ranks_stay_in_step_when_one_captures_again_with_dynamic_sizes() -> None:
    for banks in run_on_processes(2, _batches_of_many_sizes):
        assert set(banks) == {1}
        assert len(banks) > 1


class _LastRows(AllGatherExperts):
    """A layer that returns the last of the returned rows, which are padding, instead of the first."""

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ranks = self.placement.ranks
        padding = self._most_tokens(hidden_states) - hidden_states.shape[0]
        torch._check(padding >= 0)
        padded_inputs = ((hidden_states, 0), (ids, self.placement.experts), (weights, 0))
        hidden, all_ids, all_weights = (
            gather_rows(F.pad(values, (0, 0, 0, padding), value=filler), ranks, self.group_name)
            for values, filler in padded_inputs
        )
        rows, order = self.run_some(hidden, self.to_local(all_ids))
        return scatter_sums(weighted_sum(rows, order, all_weights), ranks, self.group_name)[padding:]


class _SentElsewhere(AllToAllExperts):
    """A layer that exchanges the numbers of rows to keep and to send."""

    def _sizes(self, leaving: torch.Tensor, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        send, receive = super()._sizes(leaving, arriving)
        return send[::-1], receive


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize(("form", "experts"), [("all_gather", _LastRows), ("all_to_all", _SentElsewhere)])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_experts_that_are_wrong_for_any_token_are_refused(
    form: str, experts: type[ShardedExperts], kind: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth of the few tokens of mock runs rounds to none, for which nothing is wrong."""
    monkeypatch.setitem(EP_FORMS, form, experts)
    result = eliminate(_captured(kind, form, 0, monkeypatch, dynamic))
    assert not result.plan.local_blocks
    assert result.refusals


class _Forgetful(AllReduceExperts):
    """A layer that drops the results of tokens after the first `kept`."""

    kept: Any = 0

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, order = self.run_some(hidden_states, self.to_local(ids))
        partial = weighted_sum(rows, order, weights)
        largest = partial[: self.kept]
        return sum_over_ranks(F.pad(largest, (0, 0, 0, partial.shape[0] - largest.shape[0])), self.group_name)


def _padded_and_cut(layer: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    layer.experts.kept = hidden.shape[0]
    return _padded_by(layer, hidden, -hidden.shape[0] % 8)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_block_that_also_knows_the_other_size_is_refused(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_reduce", _Forgetful)
    monkeypatch.setitem(LAYERS, "padded and cut", _padded_and_cut)
    result = eliminate(_captured("padded and cut", "all_reduce", 0, monkeypatch, dynamic))
    assert not result.plan.local_blocks
    (refusal,) = result.refusals
    if dynamic:
        assert "computes with a size from which the number of tokens is computed" in refusal.reason
