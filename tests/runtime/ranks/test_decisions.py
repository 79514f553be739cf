"""Ranks decide together which blocks of expert parallelism they take: all of them the same, and in the same run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import moepass
from moepass.models.reference.expert_parallel import EP_FORMS, ShardedExperts
from moepass.models.reference.grouped_experts import grouped_gemm
from moepass.passes.ir.plan import LocalBlock
from moepass.passes.parallel import eliminate_expert_parallelism as eliminate_expert_parallelism
from moepass.passes.parallel.mock.mock_run import ContractBroken
from moepass.passes.parallel.proposals import UNEXPLAINED, Proposal, RefusedBlock, blocks_to_leave, explain_difference
from moepass.runtime.ranks.block_decisions import BlockDecisions
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.models.moe_stack import build_stack
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


def _proposal(
    *names: str, leaves: tuple[str, ...] = (), experts: str = "1", exchanges: tuple[str, ...] = ()
) -> Proposal:
    takes = tuple(LocalBlock(name, "all_to_all", "0", experts) for name in names)
    return Proposal(takes, tuple(RefusedBlock(name, "it is odd") for name in leaves), exchanges)


def test_a_block_is_taken_only_if_all_ranks_take_it_alike() -> None:
    both = _proposal("a", "b")
    assert blocks_to_leave([both, both, both]) == {}
    assert blocks_to_leave([_proposal(leaves=("a",)), _proposal(leaves=("a",)), _proposal()]) == {}
    assert blocks_to_leave([both, _proposal("a", leaves=("b",))]) == {"b": "rank 1 cannot take it: it is odd"}
    assert blocks_to_leave([_proposal("a"), both]) == {"b": "rank 0 does not see it in the graph that it runs here"}
    assert blocks_to_leave([both, _proposal("a", experts="2")]).keys() == {"a", "b"}
    assert blocks_to_leave([both, _proposal("a", "b", experts="2")]) == {"a": UNEXPLAINED, "b": UNEXPLAINED}
    # A layer that is applied twice is taken in both uses or in none.
    assert blocks_to_leave([_proposal("a", "a"), _proposal("a")]) == {"a": UNEXPLAINED}
    (reason,) = blocks_to_leave([_proposal("a", exchanges=("x", "y")), _proposal("a", exchanges=("y", "x"))]).values()
    assert reason == "ranks talk to each other in different orders: `x` on rank 0, `y` on rank 1"


def test_the_first_difference_of_texts_is_named() -> None:
    assert explain_difference([["x", "y"], ["x", "y"]], "they") is None
    assert explain_difference([["x", "y"], ["x", "y"], ["x", "z"]], "they") == (
        "they differ between ranks: `y` on rank 0, `z` on rank 2"
    )
    assert "`nothing more` on rank 0, `y` on rank 1" in str(explain_difference([["x"], ["x", "y"]], "they"))


@contextmanager
def _refusing(*names: str) -> Iterator[None]:
    """Let the blocks with these names fail the proof of their local form on this rank."""
    real, real_text = eliminate_expert_parallelism.check_local_form, eliminate_expert_parallelism.block_text

    def check(block: Any, *args: Any) -> None:
        if block.name in names:
            raise ContractBroken("it fails by hand")
        real(block, *args)

    eliminate_expert_parallelism.check_local_form, eliminate_expert_parallelism.block_text = (
        check,
        lambda *parts: object(),
    )
    try:
        yield
    finally:
        eliminate_expert_parallelism.check_local_form, eliminate_expert_parallelism.block_text = real, real_text


BLOCKS = ("moe.0.experts", "moe.1.experts")


def _refusals(compilations: list[moepass.Compilation]) -> dict[str, str]:
    return {refusal.where: refusal.reason for compilation in compilations for refusal in compilation.plan.refusals}


def _one_refuses(names: tuple[str, ...]) -> dict[str, str]:
    hidden, full = hidden_rows(SMALL, 8, dist.get_rank()), build_stack(SMALL)
    refused = names if dist.get_rank() == 1 else ()
    with torch.no_grad(), _refusing(*refused), moepass.record_compilations() as compilations:
        compiled = compile_whole(build_stack(SMALL, "all_to_all"))
        for _ in range(2):
            torch.testing.assert_close(compiled(hidden), full(hidden))
    assert len(compilations[0].plan.banks) == len(BLOCKS) - len(names)
    return _refusals(compilations)


@pytest.mark.slow
@pytest.mark.parametrize("names", [BLOCKS[1:], pytest.param(BLOCKS, marks=pytest.mark.slow)])
def test_a_block_that_one_rank_refuses_is_left_by_all_in_the_same_run(names: tuple[str, ...]) -> None:
    others_reasons, reasons = run_ranks(2, _one_refuses, names)
    assert reasons.keys() == others_reasons.keys() == set(names)
    for name in names:
        assert reasons[name].startswith("with tokens anywhere, it fails by hand") or reasons[name].startswith(
            "it fails by hand"
        )
        assert others_reasons[name].startswith("rank 1 cannot take it: ")
        assert "it fails by hand" in others_reasons[name]


def _one_disables_the_pass() -> dict[str, str]:
    hidden, full = hidden_rows(SMALL, 8, dist.get_rank()), build_stack(SMALL)
    disable = ["eliminate_expert_parallelism"] if dist.get_rank() == 1 else []
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(build_stack(SMALL, "all_to_all"), disable=disable)
        torch.testing.assert_close(compiled(hidden), full(hidden))
    return _refusals(compilations)


@pytest.mark.slow
def test_a_rank_that_found_no_block_is_heard_too() -> None:
    refusals, _ = run_ranks(2, _one_disables_the_pass)
    assert refusals.keys() == set(BLOCKS)
    assert all(reason.startswith("rank 1 does not see it in the graph") for reason in refusals.values())


def _activate(what: str, rank: int, rows: torch.Tensor) -> torch.Tensor:
    """Return an activation function that differs on rank 1 as `what` says."""
    if rank == 1 and what == "function":
        return F.gelu(rows).clamp(max=7.0)
    limit = 0.5 if rank == 1 and what == "limit" else 7.0
    active = F.silu(rows).clamp(max=limit)
    if rank == 1 and what == "factor":
        return 1.5 * active
    return active + torch.tensor([0.25 if rank == 1 and what == "constant" else 0.0])


def _with_own_activation(form: str, what: str) -> type[ShardedExperts]:
    class Experts(EP_FORMS[form]):  # type: ignore[misc]
        def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
            active = _activate(what, self.placement.rank, gate) * up
            return grouped_gemm(active, self.down_proj.transpose(1, 2), ends)

    return Experts


def _activations_differ(form: str, what: str) -> dict[str, str]:
    hidden = hidden_rows(SMALL, 8, 0 if form == "all_reduce" else dist.get_rank())
    EP_FORMS[form], original = _with_own_activation(form, what), EP_FORMS[form]
    try:
        model = build_stack(SMALL, form)
    finally:
        EP_FORMS[form] = original
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = model(hidden)
        torch.testing.assert_close(compile_whole(model)(hidden), expected)
    assert bool(compilations[0].plan.banks) == (what == "nothing")
    return _refusals(compilations)


WHATS = {"function": "gelu", "limit": "0.5", "factor": "aten.mul.Tensor", "constant": "constant torch.float32"}


# What experts compute is compared in the same way for every form.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("all_to_all", "function"),
        ("all_to_all", "limit"),
        ("all_to_all", "factor"),
        ("all_to_all", "nothing"),
        ("all_gather", "constant"),
        ("all_gather", "nothing"),
        ("all_reduce", "limit"),
        ("all_reduce", "nothing"),
    ],
)
def test_experts_that_differ_by_rank_are_refused_on_all_with_the_difference(form: str, what: str) -> None:
    first, second = run_ranks(2, _activations_differ, form, what)
    assert first == second
    assert first.keys() == (set() if what == "nothing" else set(BLOCKS))
    for reason in first.values():
        assert "its experts compute differently: they differ between ranks: " in reason
        assert WHATS[what] in reason


def _recompiles_alone(form: str, what: str) -> int:
    """Let rank 0 compile again for other shapes, alone: the decision holds, and no rank waits."""
    EP_FORMS[form], original = _with_own_activation(form, what), EP_FORMS[form]
    try:
        model = build_stack(SMALL, form)
    finally:
        EP_FORMS[form] = original
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(model, dynamic=False)
        for step, tokens in enumerate((8, 5, 0, 1) if dist.get_rank() == 0 else (8, 8, 8, 8)):
            hidden = hidden_rows(SMALL, tokens, step)
            expected = model(hidden)
            torch.testing.assert_close(compiled(hidden), expected)
    assert len({len(compilation.plan.banks) for compilation in compilations}) == 1
    return len(compilations)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["limit", "nothing"])
def test_a_rank_that_compiles_again_alone_keeps_what_was_decided(what: str) -> None:
    assert run_ranks(2, _recompiles_alone, "all_to_all", what) == [4, 1]


def _all_refuse(counts: list[list[int]]) -> None:
    full = build_stack(SMALL)
    with torch.no_grad(), _refusing(*BLOCKS), moepass.record_compilations() as compilations:
        compiled = compile_whole(build_stack(SMALL, "all_to_all"))
        for step, tokens in enumerate(counts):
            hidden = hidden_rows(SMALL, tokens[dist.get_rank()], step)
            torch.testing.assert_close(compiled(hidden), full(hidden))
    assert len(compilations) == (2 if dist.get_rank() == 0 else 1)
    assert not any(compilation.plan.banks for compilation in compilations)


@pytest.mark.slow
def test_a_graph_that_all_ranks_refuse_may_be_compiled_again_alone() -> None:
    """The timeout is 50 s, so a wait for a rank with unchanged shapes would show."""
    run_ranks(2, _all_refuse, [[8, 8], [9, 8], [7, 8]])


def _refuses_later() -> str:
    full = build_stack(SMALL)
    with torch.no_grad():
        compiled = compile_whole(build_stack(SMALL, "all_to_all"), timeout_s=2.0)
        hidden = hidden_rows(SMALL, 8, 0)
        assert torch.equal(compiled(hidden), full(hidden))
        dist.barrier()
        if dist.get_rank() == 0:
            return ""
        with _refusing(BLOCKS[0]), pytest.raises(PeerError) as caught:
            compiled(hidden_rows(SMALL, 9, 0))
        return str(caught.value)


@pytest.mark.slow
def test_a_block_that_is_refused_later_is_an_error_within_the_timeout() -> None:
    _, message = run_ranks(2, _refuses_later)
    assert "rank 0 did not publish a list of blocks within 2 s" in message
    assert "block moe.0.experts, which all ranks took before, stays unchanged in this graph, because it" in message


def _one_is_not_compiled() -> None:
    hidden, full = hidden_rows(SMALL, 8, 0), build_stack(SMALL)
    model = build_stack(SMALL, "all_to_all")
    with torch.no_grad(), _refusing(*BLOCKS):
        run = compile_whole(model, timeout_s=2.0) if dist.get_rank() == 0 else model
        for _ in range(2):
            torch.testing.assert_close(run(hidden), full(hidden))


@pytest.mark.slow
def test_a_rank_that_does_not_compile_is_waited_for_once_where_nothing_was_taken() -> None:
    run_ranks(2, _one_is_not_compiled)


def _the_next_model_is_taken() -> None:
    """Let rank 1 run the first model uncompiled, in which rank 0 finds no block; both compile the second one."""
    hidden, full = hidden_rows(SMALL, 8, 0), build_stack(SMALL)
    first, second = build_stack(SMALL, "all_to_all"), build_stack(SMALL, "all_to_all")
    with torch.no_grad():
        with _refusing(*BLOCKS):
            run = compile_whole(first, timeout_s=0.5) if dist.get_rank() == 0 else first
            torch.testing.assert_close(run(hidden), full(hidden))
        torch._dynamo.reset()
        assert torch.equal(compile_whole(second)(hidden), full(hidden))


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_with_nothing_to_take_can_meet_the_others_later() -> None:
    run_ranks(2, _the_next_model_is_taken)


class _BranchesOnBatchSize(nn.Module):
    """A layer that can be taken for small batches, but not for large ones, whose weights depend on the ids."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.router, self.experts = layer.router, layer.experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        ids, weights = self.router(hidden_states)
        if hidden_states.shape[0] > 4:
            weights = weights * (ids >= 0)
        output: torch.Tensor = self.experts(hidden_states, ids, weights)
        return output


def _one_comes_to_the_other_branch(counts: list[list[int]]) -> list[dict[str, str]]:
    model = build_stack(SMALL, "all_gather")
    for number in range(SMALL.layers):
        model.moe[number] = _BranchesOnBatchSize(model.moe[number])
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(model, timeout_s=3)
        for step, tokens in enumerate(counts):
            hidden = hidden_rows(SMALL, tokens[dist.get_rank()], step)
            torch.testing.assert_close(compiled(hidden), model(hidden))
    assert not any(compilation.plan.banks for compilation in compilations)
    return [_refusals([compilation]) for compilation in compilations]


@pytest.mark.slow
def test_a_block_left_by_all_ranks_stays_left_for_other_shapes() -> None:
    """A rank leaves a block even in a branch in which it could take it: the other ranks still run the exchange."""
    refusals, _ = run_ranks(2, _one_comes_to_the_other_branch, [[8, 8], [2, 8], [2, 8], [2, 2], [8, 2]])
    assert len(refusals) > 1
    assert refusals[0].keys() == refusals[-1].keys() == set(BLOCKS)
    for name in BLOCKS:
        assert "all ranks left it unchanged in a graph that they compiled before" in refusals[-1][name]


def test_a_left_block_stays_left_with_every_later_decision() -> None:
    decisions = BlockDecisions()
    decisions._remember([_proposal(leaves=("a",)), _proposal(leaves=("a",))], {})
    # There is no group, so a meeting would fail.
    (reason,) = decisions.decide(None, _proposal("a"), None, 0.0).values()  # type: ignore[arg-type]
    assert reason.startswith("all ranks left it unchanged in a graph that they compiled before, ")
    assert reason.endswith(": rank 0 cannot take it: it is odd")
    assert not decisions.must_agree(_proposal(leaves=("a",)))
    # If another block must be compared, all ranks meet, and the block is still left.
    decisions._remember([_proposal("a", "b"), _proposal("a", "b")], {})
    assert decisions.decide(None, _proposal("a", "b"), None, 0.0).keys() == {"a"}  # type: ignore[arg-type]
    assert decisions.must_agree(_proposal(leaves=("a",)))
