"""Expert parallelism is eliminated from captured graphs of every form, and refused if the result would be wrong."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Sequence

import pytest
import torch
from torch.fx import GraphModule

from moepass.models.formulas.expert_placement import shard_bounds
from moepass.models.reference.collectives import sum_over_ranks
from moepass.models.reference.expert_parallel import EP_FORMS, AllReduceExperts, AllToAllExperts, ShardedExperts
from moepass.models.reference.grouped_experts import count_per_expert, sort_by_expert, weighted_sum
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import copy_graph_module, fake_value
from moepass.passes.ir.protocol import PassResult
from tests.helpers.graphs import simulated_ranks
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.readable_refusals import check_readable
from tests.helpers.graphs.simulated_ranks import (
    Captured,
    capture,
    first_outputs,
    hidden_states,
    run_local,
    run_ranks,
    with_tokens,
)
from tests.helpers.models.expert_variants import ACT_ON_MORE, OwnSizesExperts
from tests.helpers.models.moe_stack import MoEStack, StackConfig, build_stack
from tests.helpers.mutants.graph_mutants import finite_or_none, mutate
from tests.helpers.mutants.random_cases import check_cases

# Operators that must not remain in a graph whose blocks are all taken.
HOST_SYNCS = ("aten._local_scalar_dense", "aten._assert_scalar", "aten.nonzero")


def _eliminated(captured: Captured) -> PassResult:
    result = eliminate(captured)
    check_readable(result.refusals)
    return result


def _complete(config: StackConfig) -> dict[str, list[torch.Tensor]]:
    """Return the complete tensors of every layer's bank."""
    model = build_stack(config)
    return {
        f"moe.{layer}.experts": [moe.experts.gate_up_proj, moe.experts.down_proj] for layer, moe in enumerate(model.moe)
    }


def _remains(module: GraphModule) -> list[str]:
    remaining = [communication.kind for communication in communications_of(module.graph)]
    for node in module.graph.nodes:
        value = fake_value(node)
        values = value if isinstance(value, (list, tuple)) else [value]
        sizes = [size for item in values if isinstance(item, torch.Tensor) for size in item.shape]
        if str(node.target).startswith(HOST_SYNCS):
            remaining.append(node.name)
        remaining += [
            f"{node.name} {size}"
            for size in sizes
            if isinstance(size, torch.SymInt)
            and any(size.node.shape_env.is_unbacked_symint(symbol) for symbol in size.node.expr.free_symbols)
        ]
    return remaining


CONFIGS = {
    "even": (2, StackConfig(layers=2)),
    "one layer": (2, StackConfig(layers=1, experts=7, top_k=3)),
    "uneven": (3, StackConfig(layers=1, experts=7, top_k=3)),
    "top-1": (2, StackConfig(layers=1, top_k=1)),
    "top-8": (2, StackConfig(layers=1, experts=8, top_k=8)),
    "four ranks": (4, StackConfig(layers=1, experts=9, top_k=2, skew=3.0)),
}


def _check_local(
    captured: Sequence[Captured], config: StackConfig, hidden: Sequence[torch.Tensor], *, rtol: float, atol: float
) -> None:
    """Check that the graph of every rank becomes local, and returns the same for the hidden states of its rank."""
    inputs = [with_tokens(captured_rank, values) for captured_rank, values in zip(captured, hidden, strict=True)]
    expected = first_outputs([captured_rank.module for captured_rank in captured], inputs)
    for captured_rank, arguments, reference in zip(captured, inputs, expected, strict=True):
        result = _eliminated(captured_rank)
        assert not result.refusals
        assert len(result.plan.banks) == config.layers
        assert _remains(result.module) == []
        (output,) = run_local(result.module, arguments, result.plan.banks, _complete(config))
        torch.testing.assert_close(output, reference, rtol=rtol, atol=atol)


@pytest.mark.sampled(every=5)  # the fast tests run every form on ranks, see tests/runtime/execute/test_adoption.py
@pytest.mark.parametrize("form", EP_FORMS)
def test_every_form_becomes_local(form: str) -> None:
    _check_form(form, "one layer", torch.float32, True, "eager")


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("form", EP_FORMS)
def test_every_form_becomes_local_and_stays_right(
    form: str, case: str, dtype: torch.dtype, dynamic: bool, lower: str
) -> None:
    _check_form(form, case, dtype, dynamic, lower)


def _check_form(form: str, case: str, dtype: torch.dtype, dynamic: bool, lower: str) -> None:
    ranks, config = CONFIGS[case]
    config = dataclasses.replace(config, dtype=dtype)
    captured = [capture(config, form, rank, ranks, 12, dynamic=dynamic, lower=lower) for rank in range(ranks)]
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    for tokens in (12, 5) if dynamic else (12,):
        hidden = [hidden_states(config, tokens, 0 if form == "all_reduce" else rank) for rank in range(ranks)]
        _check_local(captured, config, hidden, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_ranks_that_read_their_own_sizes_before_the_exchange_become_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_to_all", OwnSizesExperts)
    config = StackConfig(layers=2, experts=6)
    captured = [capture(config, "all_to_all", rank, 2, 12) for rank in range(2)]
    hidden = [hidden_states(config, 12, rank) for rank in range(2)]
    _check_local(captured, config, hidden, rtol=1.3e-6, atol=1e-5)


class CountsUnsortedIds(AllReduceExperts):
    """A layer that counts unsorted ids, so no sort precedes the offsets."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        owned, top_k = len(self.placement.owned), top_k_index.shape[1]
        local_ids = self.to_local(top_k_index)
        counts = count_per_expert(local_ids.reshape(-1), owned)
        sorted_ids, order = sort_by_expert(local_ids)
        rows = self.run_groups(hidden_states[order // top_k], counts)
        rows = rows.masked_fill((sorted_ids == owned).unsqueeze(-1), 0.0)
        return sum_over_ranks(weighted_sum(rows, order, top_k_weights), self.group_name)


@pytest.mark.slow
def test_counts_of_unsorted_ids_belong_to_their_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets come from no sort, so the nearest sort before them belongs to the previous layer."""
    monkeypatch.setitem(EP_FORMS, "all_reduce", CountsUnsortedIds)
    config = StackConfig(layers=3)
    captured = [capture(config, "all_reduce", rank, 2, 12) for rank in range(2)]
    _check_local(captured, config, [hidden_states(config, 12, 0)] * 2, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", EP_FORMS)
def test_the_local_form_is_the_single_process_model_to_the_bit(form: str, dtype: torch.dtype) -> None:
    config = StackConfig(layers=3, experts=6, top_k=2, dtype=dtype)
    captured = capture(config, form, 1, 2, 12)
    result = _eliminated(captured)
    for tokens, seed in ((12, 1), (7, 2), (2, 3)):
        hidden = hidden_states(config, tokens, 1, seed)
        (output,) = run_local(result.module, with_tokens(captured, hidden), result.plan.banks, _complete(config))
        with torch.no_grad():
            assert torch.equal(output, build_stack(config)(hidden))


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_ranks_with_one_expert_each_are_taken(form: str) -> None:
    """For a rank with one expert, the local id of a row is both an index and a mask."""
    for dynamic in (True, False):
        config = StackConfig(layers=1, experts=3, top_k=2)
        result = _eliminated(capture(config, form, 1, 3, 12, dynamic=dynamic))
        assert not result.refusals
        assert len(result.plan.banks) == 1


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(("experts", "ranks", "top_k"), [(32, 2, 1), (128, 8, 8)])
@pytest.mark.parametrize("form", EP_FORMS)
def test_as_many_experts_as_large_models_have_are_taken(form: str, experts: int, ranks: int, top_k: int) -> None:
    """Sums over the counts of a rank's experts count every token once, for any number of experts."""
    config = StackConfig(layers=1, hidden=16, width=16, experts=experts, top_k=top_k)
    result = _eliminated(capture(config, form, 1, ranks, 12))
    assert not result.refusals
    assert len(result.plan.banks) == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_ranks_without_experts_are_a_reason_to_refuse_on_every_rank(form: str) -> None:
    config = StackConfig(layers=1, experts=3, top_k=1)
    for rank in range(4):
        result = _eliminated(capture(config, form, rank, 4, 12))
        assert not result.plan.banks
        if shard_bounds(3, 4)[rank] != shard_bounds(3, 4)[rank + 1]:
            (refusal,) = result.refusals
            assert "rank 0 holds none of its 3 experts" in refusal.reason


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_an_unknown_group_is_a_reason_to_refuse(form: str) -> None:
    captured = capture(StackConfig(layers=1), form, 0, 2, 12)
    result = _eliminated(dataclasses.replace(captured, groups={}))
    (refusal,) = result.refusals
    assert "process group" in refusal.reason
    assert [node.name for node in result.module.graph.nodes] == [node.name for node in captured.module.graph.nodes]


def test_a_graph_without_collectives_is_unchanged() -> None:
    captured = capture(StackConfig(layers=1), "local", 0, 2, 12)
    result = _eliminated(captured)
    assert result.module is captured.module
    assert not result.refusals


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("experts", ACT_ON_MORE, ids=lambda experts: experts.__name__)
def test_operations_that_act_only_on_large_inputs_are_refused(
    experts: type[ShardedExperts], dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the values of the mock run nor the tokens of the captured batch are large enough to show the effect."""
    form = "all_to_all" if issubclass(experts, AllToAllExperts) else "all_reduce"
    monkeypatch.setitem(EP_FORMS, form, experts)
    for rank in range(2):
        result = _eliminated(capture(StackConfig(layers=1), form, rank, 2, 12, dynamic=dynamic))
        assert not result.plan.banks
        (refusal,) = result.refusals
        assert ACT_ON_MORE[experts] in refusal.reason


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_single_token_is_taken(rank: int) -> None:
    """In a graph of one token, torch writes operations that are right for no other number of tokens."""
    config = StackConfig(layers=1, hidden=16, width=16, experts=3, top_k=1)
    captured = capture(config, "all_reduce", rank, 2, 1, dynamic=False)
    assert [block.form for block in _eliminated(captured).plan.local_blocks] == ["all_reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_reduce", "all_gather"])
def test_as_many_tokens_as_own_experts_are_no_expert_tensor(form: str) -> None:
    """The hidden states of a single layer are an input with the same first size as the expert weights."""
    config = StackConfig(layers=1)
    assert config.experts == 2 * 4
    for rank in range(2):
        captured = capture(config, form, rank, 2, 4, dynamic=False, moe_alone=True)
        result = _eliminated(captured)
        assert not result.refusals
        (bank,) = result.plan.banks
        assert [tensor.name for tensor in bank.tensors] == ["weight_0", "weight_1"]


class _InARow(torch.nn.Module):
    def __init__(self, stack: MoEStack) -> None:
        super().__init__()
        self.moe = stack.moe

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for moe in self.moe:
            hidden = moe(hidden)
        return hidden


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_a_block_may_start_with_the_output_of_another_block(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node of the second block is replaced together with the block before it."""
    monkeypatch.setattr(simulated_ranks, "build_stack", lambda config, form: _InARow(build_stack(config, form)).eval())
    config = StackConfig(layers=3, hidden=16, width=16)
    captured = [capture(config, form, rank, 2, 12) for rank in range(2)]
    hidden = [hidden_states(config, 12, 0 if form == "all_reduce" else rank) for rank in range(2)]
    inputs = [with_tokens(captured_rank, values) for captured_rank, values in zip(captured, hidden, strict=True)]
    results = [_eliminated(captured_rank) for captured_rank in captured]
    # An AllGather right after a ReduceScatter has the rows of all blocks, whose symbol differs from that of the ids, so
    # such a block is left unchanged.
    assert len(results[0].plan.banks) == (1 if form == "all_gather" else 3)
    complete = {bank.index: _complete(config)[bank.name] for bank in results[0].plan.banks}
    outputs = run_ranks([result.module for result in results], inputs, complete)
    for (output,), (wanted,) in zip(
        outputs, run_ranks([captured_rank.module for captured_rank in captured], inputs), strict=True
    ):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------------- mutations


@functools.cache
def _ranks_of(form: str, experts: int) -> tuple[StackConfig, tuple[Captured, ...]]:
    config = StackConfig(layers=1, hidden=16, width=16, experts=experts, top_k=2)
    return config, tuple(capture(config, form, rank, 2, 9) for rank in range(2))


def _check_mutant(form: str, experts: int, node_index: int, how: int) -> str:
    config, captured = _ranks_of(form, experts)
    mutants = [mutate(captured_rank.module, node_index, how) for captured_rank in captured]
    if any(mutant is None for mutant in mutants):
        return "no mutant"
    outcomes = [
        _eliminated(dataclasses.replace(captured_rank, module=mutant))
        for captured_rank, mutant in zip(captured, mutants, strict=True)
    ]
    if not all(outcome.plan.banks for outcome in outcomes):
        return "refused"
    for seed in range(2):
        hidden = [hidden_states(config, 9, 0 if form == "all_reduce" else rank, seed) for rank in range(2)]
        inputs = [with_tokens(captured_rank, values) for captured_rank, values in zip(captured, hidden, strict=True)]
        expected = finite_or_none(functools.partial(first_outputs, mutants, inputs))
        if expected is None:
            return "meaningless"
        # Not `run_local`: an unread collective of a mutant is outside the block and remains in the graph.
        complete = {bank.index: _complete(config)[bank.name] for bank in outcomes[0].plan.banks}
        outputs = run_ranks([outcome.module for outcome in outcomes], inputs, complete)
        for (output,), wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_mutated_graphs_are_taken_rightly_or_refused(form: str) -> None:
    cases = [(form, experts, index, how) for experts in (4, 5) for index in range(120) for how in range(5)]
    check_cases(cases, _check_mutant, 16, needed={"refused", "right"})


@pytest.mark.slow
def test_a_sum_in_another_type_is_not_taken_in_this_one() -> None:
    """The mock run is in float64, so only the types in the graph show the difference."""
    config = StackConfig(layers=1, dtype=torch.bfloat16)
    captured = capture(config, "all_reduce", 0, 2, 12)
    changed = copy_graph_module(captured.module)
    gemm = [node for node in changed.graph.nodes if node.target is torch.ops.aten._grouped_mm.default][-1]
    masked = next(iter(gemm.users))
    with changed.graph.inserting_after(masked):
        wide = changed.graph.call_function(torch.ops.aten._to_copy.default, (masked,), {"dtype": torch.float32})
    wide.meta["val"] = fake_value(masked).to(torch.float32)
    weighed = next(user for user in masked.users if user is not wide)
    weighed.replace_input_with(masked, wide)
    weighed.meta["val"] = fake_value(weighed).to(torch.float32)
    changed.recompile()
    result = _eliminated(dataclasses.replace(captured, module=changed))
    assert not result.plan.banks
    assert "it computes in torch.float32 between" in result.refusals[0].reason


@pytest.mark.slow
def test_a_cut_along_a_dimension_that_is_not_there_is_no_form() -> None:
    captured = capture(StackConfig(layers=1), "all_to_all", 0, 2, 12)
    changed = copy_graph_module(captured.module)
    cuts = [node for node in changed.graph.nodes if node.target is torch.ops.aten.slice.Tensor]
    for node in cuts:
        node.update_arg(1, 7)
    assert cuts
    (refusal,) = _eliminated(dataclasses.replace(captured, module=changed)).refusals
    assert "cuts dimension 7 of" in refusal.reason


@pytest.mark.slow
def test_an_unrepeatable_operator_is_named() -> None:
    captured = capture(StackConfig(layers=1), "all_to_all", 0, 2, 12)
    changed = copy_graph_module(captured.module)
    for node in changed.graph.nodes:
        if node.target is operator.getitem and node.args[0].target is torch.ops.aten.split.Tensor and node.args[1] == 1:
            node.update_arg(1, 2)
    (refusal,) = _eliminated(dataclasses.replace(captured, module=changed)).refusals
    check_readable([refusal])
    assert re.search(
        r"its local form cannot repeat `aten.split.Tensor`: getitem does not take float32 \[\*, \d+\], float32 "
        r"\[\*, \d+\], 2, which stand there where this rank runs its rows through all experts; expected what lies "
        r"between `\S*grouped_mm\S*` \(.*\) and `\S*grouped_mm\S*` \(.*\) to be computed row by row",
        refusal.reason,
    )
