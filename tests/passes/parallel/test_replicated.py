"""All-reduced results become local only if all ranks have the same tokens, experts and weights."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moepass
from moepass.models.reference.collectives import gather_rows, scatter_sums, sum_over_ranks
from moepass.models.reference.grouped_experts import count_per_expert
from moepass.passes.ir.protocol import PassResult
from moepass.runtime.ranks import replicas
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.simulated_ranks import capture
from tests.helpers.models.moe_stack import MoELayer, build_stack
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows
from tests.helpers.processes.ranks import run_ranks

on_ranks = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


class OddLayer(MoELayer):
    """A layer whose tokens, experts or weights, as `what` says, differ between ranks."""

    def __init__(self, layer: MoELayer, what: str) -> None:
        super().__init__(layer.router, layer.experts)
        self.what = what
        self.is_odd = dist.get_rank() == 1
        self.register_buffer("bias", torch.full((SMALL.experts,), 1.0))
        if self.is_odd and what == "buffer":
            self.bias[2] += 3.0
        if self.is_odd and what == "router":
            self.router.weight = nn.Parameter(self.router.weight + 0.5, requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.what == "scaled by rank" and self.is_odd:
            hidden_states = hidden_states * 2.0
        ids, weights = self.router(hidden_states)
        if self.what == "buffer":
            weights = weights * self.bias[ids]
        if self.what == "weights of a rank" and self.is_odd:
            weights = weights.clamp(min=0.2)
        if self.what == "experts of a rank" and self.is_odd:
            ids = SMALL.experts - 1 - ids
        output: torch.Tensor = self.experts(hidden_states, ids, weights)
        return output


def _tokens_differ(what: str) -> tuple[list[str], int]:
    hidden = hidden_rows(SMALL, 8, dist.get_rank() if what == "inputs" else 0)
    model = build_stack(SMALL, "all_reduce")
    model.moe[1] = OddLayer(model.moe[1], what)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = model(hidden)
        compiled = compile_whole(model, debug=False)
        for _ in range(2):
            torch.testing.assert_close(compiled(hidden), expected, rtol=1e-5, atol=1e-5)
    (compilation,) = compilations
    return [f"{refusal.where}: {refusal.reason}" for refusal in compilation.plan.refusals], len(compilation.plan.banks)


IN_THE_GRAPH = {
    "scaled by rank": "aten.mul.Tensor",
    "weights of a rank": "aten.clamp",
    "experts of a rank": "aten.rsub.Scalar",
}
IN_THE_VALUES = ("buffer", "router", "inputs")


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow if what[0] == "w" else ()) for what in IN_THE_GRAPH]
)
def test_tokens_computed_differently_on_a_rank_keep_their_all_reduce(what: str) -> None:
    first, second = run_ranks(2, _tokens_differ, what)
    assert first == second
    (refusal,), banks = first
    assert banks == 1, "the layer before is taken"
    assert refusal.startswith("moe.1.experts: its results are summed over ranks, so all must have the same tokens, but")
    assert IN_THE_GRAPH[what] in refusal


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("what", IN_THE_VALUES)
def test_tokens_of_other_parameters_or_inputs_keep_their_all_reduce_in_the_same_run(what: str) -> None:
    first, second = run_ranks(2, _tokens_differ, what)
    assert first == second
    assert len(first[0]) == 2, "one refusal for each layer of the graph"
    assert all("the inputs that it is computed from differ between ranks: `" in refusal for refusal in first[0])
    assert all("the graph runs as it was captured" in refusal for refusal in first[0])


@pytest.mark.slow
@on_ranks
def test_equal_inputs_are_taken() -> None:
    for refusals, banks in run_ranks(2, _tokens_differ, "nothing"):
        assert not refusals
        assert banks == 2


class _Balanced(MoELayer):
    """A layer whose router adds a bias to its logits, which the graph updates for its next run."""

    def __init__(self, layer: MoELayer, what: str) -> None:
        super().__init__(layer.router, layer.experts)
        self.what = what
        self.register_buffer("bias", torch.zeros(SMALL.experts))
        self.register_buffer("load", torch.zeros(SMALL.experts))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = hidden_states @ self.router.weight.t() + self.bias
        weights, ids = logits.softmax(-1).topk(SMALL.top_k, -1)
        load = count_per_expert(ids.reshape(-1), SMALL.experts).to(torch.float32)
        owned = self.experts.placement.owned
        if self.what == "own":
            self.bias[owned.start : owned.stop] -= 0.3 * load[owned.start : owned.stop]
        if self.what == "own, one run later":
            self.bias -= 0.3 * self.load
            self.load[owned.start : owned.stop] += load[owned.start : owned.stop]
        if self.what == "random":
            self.bias -= torch.randn_like(load)
        if self.what == "scattered":
            self.bias -= scatter_sums(load, 2, self.experts.group_name).repeat(2)
        if self.what == "alike":
            self.bias -= 0.3 * load
        if self.what == "alike, one run later":
            self.bias -= 0.3 * self.load
            self.load += load
        if self.what == "summed":
            own_load = torch.nn.functional.pad(load[owned.start : owned.stop], (owned.start, len(load) - owned.stop))
            self.bias -= 0.3 * sum_over_ranks(own_load, self.experts.group_name)
        output: torch.Tensor = self.experts(hidden_states, ids, weights.to(hidden_states.dtype))
        return output


def _writes_its_bias(what: str) -> tuple[list[str], int]:
    model = build_stack(SMALL, "all_reduce")
    model.moe[1] = _Balanced(model.moe[1], what)
    batches = [hidden_rows(SMALL, 8, seed) for seed in range(3)]
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = [model(hidden) for hidden in batches]
        for written in (model.moe[1].bias, model.moe[1].load):
            written.zero_()
        compiled = compile_whole(model, debug=False)
        for hidden, wanted in zip(batches, expected, strict=True):
            torch.testing.assert_close(compiled(hidden), wanted, rtol=1e-5, atol=1e-5)
    (compilation,) = compilations
    return [f"{refusal.where}: {refusal.reason}" for refusal in compilation.plan.refusals], len(compilation.plan.banks)


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("what", ["own", "own, one run later"])
def test_a_bias_that_each_rank_writes_for_itself_keeps_its_all_reduce(what: str) -> None:
    first, second = run_ranks(2, _writes_its_bias, what)
    assert first == second
    (refusal,), banks = first
    assert banks == 1, "the layer before is taken"
    buffer = "moe.1.bias" if what == "own" else "moe.1.load"
    assert f"what is written to {buffer}: aten.slice.Tensor" in refusal
    assert "in forward: self." in refusal, "the line of the write"


@pytest.mark.slow
@on_ranks
def test_a_bias_that_all_ranks_write_alike_is_taken() -> None:
    for refusals, banks in run_ranks(2, _writes_its_bias, "alike, one run later"):
        assert not refusals
        assert banks == 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["own", "own, one run later", "alike", "alike, one run later", "summed"])
def test_writes_to_buffers_are_compared(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local_blocks = [_take_balanced(what, rank, monkeypatch).plan.local_blocks for rank in range(2)]
    assert all(len(blocks) == 1 for blocks in local_blocks)
    (first,), (second,) = local_blocks
    assert first.experts == second.experts
    assert (first.tokens == second.tokens) == (what.startswith("alike") or what == "summed")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("what", "why"), [("random", "draws random numbers"), ("scattered", "results differ by rank")])
def test_a_buffer_that_no_rank_can_write_alike_keeps_its_all_reduce(
    what: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _take_balanced(what, 0, monkeypatch)
    assert not result.plan.local_blocks
    (refusal,) = result.refusals
    assert why in refusal.reason
    assert "by what is written to input `" in refusal.reason
    assert "self.bias -= " in refusal.reason, "the line of the write"


def _take_balanced(what: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> PassResult:
    from tests.helpers.graphs import simulated_ranks

    def build(config: Any, form: str) -> nn.Module:
        stack = build_stack(config, form)
        stack.moe[0] = _Balanced(stack.moe[0], what)
        return stack

    monkeypatch.setattr(simulated_ranks, "build_stack", build)
    captured = capture(SMALL, "all_reduce", rank, 2, 8, moe_alone=True, dynamic=False)
    return eliminate(captured)


def _inputs_differ_later(debug: bool) -> list[str]:
    model = build_stack(SMALL, "all_reduce")
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(model, debug=debug)
        for seed in (0, 1, 1 + dist.get_rank() if debug else 2):
            hidden = hidden_rows(SMALL, 8, seed)
            torch.testing.assert_close(compiled(hidden), model(hidden), rtol=1e-5, atol=1e-5)
    return [refusal.reason for refusal in compilations[0].plan.refusals]


@pytest.mark.slow
@on_ranks
def test_under_debug_every_run_is_compared() -> None:
    first, second = run_ranks(2, _inputs_differ_later, True)
    assert first == second
    assert len(first) == 2
    assert run_ranks(2, _inputs_differ_later, False) == [[], []]


def _compiles_again_alone() -> int:
    """Run the model equally often on both ranks, and compile it twice on the second."""
    model, hidden = build_stack(SMALL, "all_reduce"), hidden_rows(SMALL, 8, 0)
    with torch.no_grad(), moepass.record_compilations() as compilations, _counted_checksums() as counted:
        expected = model(hidden)
        compiled = compile_whole(model, debug=False, timeout_s=20)
        # Adopted experts have another address in the second run.
        for _ in range(2):
            torch.testing.assert_close(compiled(hidden), expected, rtol=1e-5, atol=1e-5)
        before = len(counted)
        if dist.get_rank() == 1:
            torch._dynamo.reset()
            compiled = compile_whole(model, debug=False, timeout_s=20)
        torch.testing.assert_close(compiled(hidden), expected, rtol=1e-5, atol=1e-5)
    assert len(counted) == before > 0
    return len(compilations)


@contextmanager
def _counted_checksums() -> Iterator[list[Any]]:
    """Yield a list of the values of which this rank computes checksums."""
    counted: list[Any] = []
    real = replicas.describe

    def describe(value: Any) -> str:
        counted.append(value)
        return real(value)

    replicas.describe = describe
    try:
        yield counted
    finally:
        replicas.describe = real


@pytest.mark.slow
@on_ranks
def test_a_recompiling_rank_does_not_compare_again() -> None:
    assert run_ranks(2, _compiles_again_alone) == [1, 2]


def _one_bank_and_three_routers(is_odd: bool) -> tuple[bool, list[str]]:
    """Run layers with the same experts and different routers, compiled separately; rank 1 has another last router."""
    config = dataclasses.replace(SMALL, layers=3)
    model, hidden = build_stack(config, "all_reduce"), hidden_rows(config, 8, 0)
    for layer in model.moe:
        layer.experts = model.moe[0].experts
    if is_odd and dist.get_rank() == 1:
        model.moe[2].router.weight.data.add_(0.5)
    options = {"lower": "eager", "timeout_s": 20}
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = model(hidden)
        for layer in model.moe:
            layer.compile(backend="asyncep", options=options, fullgraph=True)
        results = [model(hidden) for _ in range(2)]
    is_right = all(torch.allclose(result, expected, rtol=1e-5, atol=1e-5) for result in results)
    return is_right, [refusal.reason for compilation in compilations for refusal in compilation.plan.refusals]


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("is_odd", [True, False])
def test_the_routers_of_layers_that_share_experts_are_all_compared(is_odd: bool) -> None:
    for is_right, reasons in run_ranks(2, _one_bank_and_three_routers, is_odd):
        assert is_right
        assert len(reasons) == is_odd
        assert all("router" in reason for reason in reasons)


def _change(router: nn.Module, what: str) -> None:
    """Change the weights of a router between two runs, on one of two ranks or on both."""
    rank, weight = dist.get_rank(), router.weight
    flipped = weight.detach().flip(0) * 2.0
    if what == "all write":
        weight.add_(0.5)
    elif what == "one loads and sends" and rank == 0:
        weight.copy_(flipped)
    elif what == "one copies what it has" and rank == 1:
        weight.copy_(weight.clone())
    elif what == "one moves what it has" and rank == 1:
        weight.data = weight.data.clone()
    elif what == "one writes" and rank == 1:
        weight.add_(flipped)
    elif what == "one receives" and rank == 1:
        dist.recv(weight, 0)
    elif what == "one receives":
        dist.send(flipped, 1)
    elif what == "one writes into its data" and rank == 1:
        weight.data.copy_(flipped)
    if what == "one loads and sends":
        dist.broadcast(weight, 0)


def _change_later(what: str, is_inference: bool = False) -> tuple[list[str], list[int]]:
    """Return the refusals and the number of checksums of five runs; the weights change before the third run."""
    with torch.inference_mode(is_inference):
        model, hidden = build_stack(SMALL, "all_reduce"), hidden_rows(SMALL, 8, 0)
    is_debugging = what == "one debugs" and dist.get_rank() == 0
    checksums = []
    with (
        torch.inference_mode() if is_inference else torch.no_grad(),
        moepass.record_compilations() as compilations,
        _counted_checksums() as counted,
    ):
        compiled = compile_whole(model, debug=is_debugging, timeout_s=10)
        for run in range(5):
            if run == 2:
                _change(model.moe[1].router, what)
            before = len(counted)
            torch.testing.assert_close(compiled(hidden), model(hidden), rtol=1e-5, atol=1e-5)
            checksums.append(len(counted) - before)
    return [refusal.reason for refusal in compilations[0].plan.refusals], checksums


EQUAL = ["all write", "one loads and sends", "one copies what it has", "one moves what it has", "one debugs"]
DIFFERENT = ["one writes", "one receives", "one writes into its data"]


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("what", EQUAL)
def test_a_change_on_one_rank_makes_all_ranks_compare_again(what: str) -> None:
    """Weights that remain equal are accepted, and no rank waits for another."""
    (refusals, checksums), second_rank = run_ranks(2, _change_later, what)
    assert (refusals, checksums) == second_rank
    assert not refusals
    assert checksums[2] > 0
    assert (checksums[3] > 0, checksums[4] > 0) == ((what == "one debugs"), (what == "one debugs"))


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_router_that_differs_later_keeps_the_all_reduce_from_that_run_on(what: str) -> None:
    (refusals, checksums), second_rank = run_ranks(2, _change_later, what)
    assert (refusals, checksums) == second_rank
    assert len(refusals) == SMALL.layers
    assert all("differ between ranks: `" in reason and "router" in reason for reason in refusals)
    assert checksums[2] > 0
    assert checksums[3:] == [0, 0]


@pytest.mark.slow
@on_ranks
def test_parameters_without_version_counters_are_compared_again() -> None:
    (refusals, _), _ = run_ranks(2, _change_later, "one writes into its data", True)
    assert len(refusals) == SMALL.layers


def _one_goes_back_to_what_was_compared() -> None:
    """Let one rank go back to compared weights, while its peer has new ones."""
    model, hidden = build_stack(SMALL, "all_reduce"), hidden_rows(SMALL, 8, 0)
    router = model.moe[1].router
    first, second = router.weight, nn.Parameter(router.weight.flip(0) * 2.0, requires_grad=False)
    with torch.no_grad():
        compiled = compile_whole(model, debug=False, timeout_s=10)
        # The outcomes of each rank: taken, refused, taken, refused.
        for choice in [(first, first), (first, first), (second, first), (second, second), (first, second)]:
            router.weight = choice[dist.get_rank()]
            torch.testing.assert_close(compiled(hidden), model(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@on_ranks
def test_ranks_rely_on_the_same_comparison() -> None:
    run_ranks(2, _one_goes_back_to_what_was_compared)


def _one_stays_away() -> str:
    model, hidden = build_stack(SMALL, "all_reduce"), hidden_rows(SMALL, 8, 0)
    with torch.no_grad():
        compiled = compile_whole(model, debug=False, timeout_s=2)
        compiled(hidden)
        dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()
            return ""
        with pytest.raises(PeerError) as caught:
            compiled(hidden)
        dist.barrier()
    return str(caught.value)


@pytest.mark.slow
@on_ranks
def test_a_rank_that_stays_away_from_a_run_is_named() -> None:
    _, text = run_ranks(2, _one_stays_away)
    assert text.startswith("rank 0 did not agree on a run within 2 s. ")
    assert "if ranks sum the results of their experts" in text


class _AfterAnExchange(nn.Module):
    """A layer for the results of a collective: summed ones are equal on all ranks, scattered ones are not."""

    def __init__(self, layer: nn.Module, group_name: str, kind: str) -> None:
        super().__init__()
        self.layer, self.group_name, self.kind = layer, group_name, kind

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.kind == "summed":
            hidden_states = sum_over_ranks(hidden_states, self.group_name)
        elif self.kind == "gathered":
            hidden_states = gather_rows(hidden_states, 2, self.group_name)
        else:
            hidden_states = scatter_sums(hidden_states, 2, self.group_name)
        output: torch.Tensor = self.layer(hidden_states)
        return output


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("kind", "is_taken"), [("summed", True), ("gathered", True), ("scattered", False)])
def test_an_earlier_exchange_decides_whether_tokens_are_equal(
    kind: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.graphs import simulated_ranks

    def build(config: Any, form: str) -> nn.Module:
        stack = build_stack(config, form)
        stack.moe[0] = _AfterAnExchange(stack.moe[0], dist.group.WORLD.group_name, kind)  # type: ignore[union-attr]
        return stack

    monkeypatch.setattr(simulated_ranks, "build_stack", build)
    signatures = []
    for rank in range(2):
        captured = capture(SMALL, "all_reduce", rank, 2, 8, moe_alone=True, dynamic=False)
        result = eliminate(captured)
        assert len(result.plan.local_blocks) == is_taken
        signatures.append([block.signature for block in result.plan.local_blocks])
        assert all("results differ by rank" in refusal.reason for refusal in result.refusals)
        # Only the router's parameters remain to be compared: the exchange makes the tokens equal.
        assert len(result.plan.replicated) == (2 if is_taken else 0)
    assert signatures[0] == signatures[1]
