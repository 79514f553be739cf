"""Layers of one name with different experts: ranks compare each run, so that all run the same experts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from moepass.passes.parallel.proposals import Proposal, RefusedBlock
from moepass.runtime.ranks import eager_watch
from moepass.runtime.ranks.block_decisions import BlockDecisions
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.models.moe_stack import StackConfig, build_stack
from tests.helpers.processes.adopted_stacks import compile_whole, hidden_rows
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")

FORM = "all_to_all"
# An activation function that cannot be taken, because the result for a row depends on the rows before it.
SILU, TANH, MIXES_ROWS = "silu", "tanh", "mixes rows"
THREE = StackConfig(layers=3)
TIMEOUT_S = 12
LAYERS = "the layers that they are about to run without exchanges"


def _own_experts() -> type[ShardedExperts]:
    class Experts(EP_FORMS[FORM]):  # type: ignore[misc]
        kind = SILU

        def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
            active = (3 * torch.tanh(gate) if self.kind == TANH else F.silu(gate)) * up
            active = active.cumsum(0) if self.kind == MIXES_ROWS else active
            return grouped_gemm(active, self.down_proj.transpose(1, 2), ends)

    return Experts


def _stack(config: StackConfig) -> tuple[nn.Module, list[Any]]:
    """Return a model whose experts are of `kind`, and these experts, by layer."""
    EP_FORMS[FORM], original = _own_experts(), EP_FORMS[FORM]
    try:
        model = build_stack(config, FORM)
    finally:
        EP_FORMS[FORM] = original
    return model, [module for module in model.modules() if isinstance(module, ShardedExperts)]


def _runs(function: Any, expected: Any, hidden: torch.Tensor) -> str:
    try:
        torch.testing.assert_close(function(hidden), expected)
    except PeerError as error:
        return str(error)
    return "right"


def _compiled_one_by_one(kinds: Sequence[Sequence[str]], runs: int) -> tuple[list[str], list[str]]:
    model, experts = _stack(THREE)
    for module, kind in zip(experts, kinds[dist.get_rank()], strict=True):
        module.kind = kind
    hidden = hidden_rows(THREE, 8, dist.get_rank())
    torch._dynamo.config.capture_scalar_outputs = True
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = model(hidden)
        for layer in model.moe:  # type: ignore[union-attr]
            options = {"lower": "eager", "debug": True, "timeout_s": TIMEOUT_S}
            layer.compile(backend="asyncep", options=options, fullgraph=True)
        outcomes = [_runs(model, expected, hidden) for _ in range(runs)]
    return outcomes, [block.name for compilation in compilations for block in compilation.plan.local_blocks]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TANH, MIXES_ROWS])
def test_layers_of_one_name_may_compute_differently(kind: str) -> None:
    """One of the layers may even keep its exchanges, which the others have lost."""
    kinds = [SILU, kind, SILU]
    for outcomes, taken in run_ranks(2, _compiled_one_by_one, [kinds, kinds], 3):
        assert outcomes == ["right"] * 3
        assert taken == ["experts"] * (2 if kind == TANH else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TANH, MIXES_ROWS])
def test_ranks_that_run_known_layers_in_another_order_are_an_error(kind: str) -> None:
    """All graphs are decided and compiled before the ranks run different ones."""
    kinds = [[SILU, kind, SILU], [SILU, kind, kind]]
    for (outcome,), _ in run_ranks(2, _compiled_one_by_one, kinds, 1):
        assert f"ranks disagree on {LAYERS}: experts (all_to_all " in outcome


def _switched_by_a_flag(kinds: Sequence[Sequence[str]], **options: Any) -> list[str]:
    config = StackConfig(layers=2)
    model, experts = _stack(config)
    compiled, hidden = compile_whole(model, timeout_s=TIMEOUT_S, **options), hidden_rows(config, 8, dist.get_rank())
    outcomes = []
    with torch.no_grad():
        for kind in kinds[dist.get_rank()]:
            for module in experts:
                module.kind = kind
            outcomes.append(_runs(compiled, model(hidden), hidden))
    return outcomes


@pytest.mark.slow
def test_a_flag_may_choose_what_experts_compute_where_all_ranks_have_the_same() -> None:
    kinds = [SILU, TANH, SILU, MIXES_ROWS, TANH, MIXES_ROWS, SILU]
    assert run_ranks(2, _switched_by_a_flag, [kinds, kinds]) == [["right"] * len(kinds)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TANH, MIXES_ROWS])
def test_a_flag_that_ranks_set_differently_is_an_error_in_that_run(kind: str) -> None:
    kinds = [[SILU, kind, SILU], [SILU, kind, kind]]
    for first, second, third in run_ranks(2, _switched_by_a_flag, kinds):
        assert (first, second) == ("right", "right")
        assert f"ranks disagree on {LAYERS}: moe.0.experts (all_to_all " in third


def _switched_where_runs_are_agreed_on(kinds: Sequence[Sequence[str]]) -> list[str]:
    return _switched_by_a_flag(kinds, all_to_all_below=2)


@pytest.mark.slow
def test_runs_that_ranks_agree_on_anyway_are_compared_too() -> None:
    kinds = [[SILU, TANH, SILU], [SILU, TANH, TANH]]
    for *before, last in run_ranks(2, _switched_where_runs_are_agreed_on, kinds):
        assert before == ["right", "right"]
        assert f"ranks disagree on {LAYERS}: moe.0.experts (all_to_all " in last


def _one_rank_has_another_flag(kind: str) -> list[str]:
    """Let rank 1 alone run a layer that differs from another layer of the same name."""
    eager_watch.FAILURE_CHECK_SECONDS = 0.0
    config = StackConfig(layers=2)
    model, experts = _stack(config)
    compiled, hidden = compile_whole(model, timeout_s=2), hidden_rows(config, 8, dist.get_rank())
    with torch.no_grad():
        expected = model(hidden)
        outcomes = [_runs(compiled, expected, hidden)]
        dist.barrier()
        if dist.get_rank() == 1:
            for module in experts:
                module.kind = kind
            outcomes.append(_runs(compiled, expected, hidden))
            for module in experts:
                module.kind = SILU
        dist.barrier()
        outcomes.append(_runs(compiled, expected, hidden))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TANH, MIXES_ROWS])
def test_a_rank_that_waited_in_vain_is_an_error_of_the_others_in_their_next_run(kind: str) -> None:
    (first, later), (second, error, after) = run_ranks(2, _one_rank_has_another_flag, kind)
    assert first == second == "right"
    assert error.startswith("rank 0 did not publish a list of blocks within 2 s; every rank of the group must compile")
    assert "block moe.0.experts, which all ranks took before, " in error
    for text in (later, after):
        assert text.startswith("the ranks of this group got out of step, and anything that they have computed since")
        assert error in text
    assert "(rank 1 waited)" in error


def _one_suppresses_errors() -> tuple[str, dict[str, str]]:
    config = StackConfig(layers=2)
    model, hidden = build_stack(config, FORM), hidden_rows(config, 8, dist.get_rank())
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(suppress_errors=dist.get_rank() == 1),
        moepass.record_compilations() as compilations,
    ):
        outcome = _runs(compile_whole(model), model(hidden), hidden)
    return outcome, {
        refusal.where: refusal.reason for compilation in compilations for refusal in compilation.plan.refusals
    }


@pytest.mark.slow
def test_a_rank_that_suppresses_errors_takes_no_block_nor_do_the_others() -> None:
    """An error would send that rank to eager mode, where it waits for ranks that exchange nothing."""
    (first, first_reasons), (second, second_reasons) = run_ranks(2, _one_suppresses_errors)
    assert (first, second) == ("right", "right")
    assert second_reasons.keys() == first_reasons.keys() == {"moe.0.experts", "moe.1.experts"}
    for name, reason in second_reasons.items():
        assert reason.startswith("torch._dynamo.config.suppress_errors is on")
        assert first_reasons[name].startswith("rank 1 cannot take it: torch._dynamo.config.suppress_errors is on")


def _decided(*proposals: Proposal) -> BlockDecisions:
    decisions = BlockDecisions()
    for proposal in proposals:
        decisions._remember([proposal, proposal], {block.name: block.reason for block in proposal.leaves})
    return decisions


def _takes(name: str, experts: str = "1", weights: str = "float32 [4, 8, 8]") -> Proposal:
    return Proposal(takes=(LocalBlock(name, FORM, "0", experts, weights=weights),))


def test_runs_are_compared_only_where_ranks_may_run_different_experts() -> None:
    left = Proposal(leaves=(RefusedBlock("c", "it is odd"),))
    dense = Proposal(exchanges=("all_reduce at attention",))
    assert not _decided(_takes("a"), _takes("b")).must_agree(_takes("a"))
    assert not _decided(left, dense).must_agree(left)
    models = _takes("a"), _takes("a", "2", "float32 [6, 8, 8]")
    assert not any(_decided(*models).must_agree(model) for model in models)
    two = _decided(_takes("a"), _takes("a", "2"), _takes("b"))
    assert two.must_agree(_takes("a"))
    assert two.must_agree(_takes("a", "2"))
    assert not two.must_agree(_takes("b"))
    # It was not compared when it was compiled, so other ranks may not run it at all.
    assert not two.must_agree(_takes("a", "3"))
    for proposal in (left, dense):
        mixed = _decided(_takes("a"), proposal)
        assert mixed.must_agree(_takes("a"))
        assert mixed.must_agree(proposal)
