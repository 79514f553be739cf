"""The cost of a proof does not depend on a block's sizes, nor its outcome on static or symbolic shapes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moepass.models.reference.expert_parallel import EP_FORMS, AllReduceExperts, AllToAllExperts, ShardedExperts
from moepass.models.reference.grouped_experts import grouped_gemm
from moepass.passes.ir.protocol import PassResult
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.simulated_ranks import capture, hidden_states, run_local, run_ranks, with_tokens
from tests.helpers.models.expert_variants import ACT_ON_MORE, FewRows, OwnSizesExperts
from tests.helpers.models.moe_stack import StackConfig, build_stack

PROOF = importlib.import_module("moepass.passes.parallel.proof.prove")
MODES = ["static", "dynamic"]


def _reasons(result: PassResult) -> list[str]:
    return [refusal.reason for refusal in result.refusals]


# ---------------------------------------------------------------------------------------------------------------- cost


class _Elements(TorchDispatchMode):
    """Counts the elements of all results that are real tensors, and of the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if type(value) is torch.Tensor:
                # Views of one number take no memory.
                size = value.untyped_storage().nbytes() // value.element_size()
                self.total += size
                self.largest = max(self.largest, size)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_the_elements_of_a_proof_do_not_depend_on_sizes(form: str) -> None:
    config = StackConfig(layers=1, hidden=256, width=128, experts=16, top_k=4)
    captured = capture(config, form, 1, 4, 4096, dynamic=False, moe_alone=True)
    with _Elements() as elements:
        result = eliminate(captured)
    assert not result.refusals
    # One activation of the captured block has 4096 * 4 * 256 elements.
    assert elements.largest < 100_000
    assert elements.total < 20_000_000


def _cost(form: str, mode: str, *sizes: int) -> dict[str, Any]:
    """Return the cost of a proof; `sizes` are tokens, hidden, width, experts, top-k and ranks."""
    command = [sys.executable, "-m", "tests.helpers.graphs.proof_cost", form, mode, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    cost: dict[str, Any] = json.loads(done.stdout)
    return cost


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", EP_FORMS)
def test_a_proof_of_a_large_block_is_cheap(form: str, mode: str) -> None:
    cost = _cost(form, mode, 32768, 4096, 512, 128, 8, 8)
    assert (cost["banks"], cost["refusals"]) == (1, [])
    assert cost["bytes"] < 2**30
    assert cost["cpu_seconds"] < 20


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(("experts", "ranks"), [(128, 64), (128, 128), (256, 256), (256, 100)])
@pytest.mark.parametrize("form", EP_FORMS)
def test_hundreds_of_ranks_are_taken(form: str, experts: int, ranks: int) -> None:
    cost = _cost(form, "static", 4096, 256, 128, experts, 8, ranks)
    assert (cost["banks"], cost["refusals"]) == (1, [])
    assert cost["bytes"] < 2**30
    assert cost["cpu_seconds"] < 20


@pytest.mark.slow
def test_a_block_of_more_nodes_than_a_walk_once_had_is_taken() -> None:
    """Each of 72 ranks has its own nodes to read sizes that it sends and receives."""
    captured = capture(StackConfig(layers=1, experts=72), "all_to_all", 5, 72, 12, moe_alone=True)
    assert sum(node.op == "call_function" for node in captured.module.graph.nodes) > 700
    result = eliminate(captured)
    assert not result.refusals


# ------------------------------------------------------------------------------------------------- static and dynamic


class PairedActivation(ShardedExperts):
    """Views gate and up as one tensor of two, by the number of rows."""

    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        both = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends)
        both = both.view(rows.shape[0], 2, self.down_proj.shape[2])
        return grouped_gemm(F.silu(both[:, 0]) * both[:, 1], self.down_proj.transpose(1, 2), ends)


class PairedAllToAll(PairedActivation, AllToAllExperts):
    pass


class PairedAllReduce(PairedActivation, AllReduceExperts):
    pass


class NormedActivation(ShardedExperts):
    """Mixes features between the GEMMs, but not rows."""

    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        inner = F.rms_norm(F.silu(gate) * up, gate.shape[-1:])
        return grouped_gemm(inner, self.down_proj.transpose(1, 2), ends)


class NormedAllToAll(NormedActivation, AllToAllExperts):
    pass


class NormedAllReduce(NormedActivation, AllReduceExperts):
    pass


class MixesRows(AllToAllExperts):
    """The activation function subtracts the mean of all arrived rows."""

    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        inner = F.silu(gate) * up
        return grouped_gemm(inner - inner.mean(0), self.down_proj.transpose(1, 2), ends)


TAKEN = [OwnSizesExperts, PairedAllToAll, PairedAllReduce, NormedAllToAll, NormedAllReduce, *EP_FORMS.values()]


def _form_of(experts: type[ShardedExperts]) -> str:
    for form, reference in EP_FORMS.items():
        if experts is reference:
            return form
    return "all_to_all" if issubclass(experts, AllToAllExperts) else "all_reduce"


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("tokens", [12, 8, 2])
@pytest.mark.parametrize("experts", [*TAKEN, *ACT_ON_MORE, MixesRows], ids=lambda experts: experts.__name__)
def test_static_and_dynamic_captures_come_to_the_same_decision(
    experts: type[ShardedExperts], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of tokens is also that of experts, and that of a token's choices."""
    form = _form_of(experts)
    monkeypatch.setitem(EP_FORMS, form, experts)
    config = StackConfig(layers=1)
    taken = [
        bool(eliminate(capture(config, form, 1, 2, tokens, dynamic=dynamic, moe_alone=True)).plan.banks)
        for dynamic in (False, True)
    ]
    assert taken == [experts in TAKEN] * 2


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("tokens", [8, 2])
@pytest.mark.parametrize("experts", [*ACT_ON_MORE, MixesRows], ids=lambda experts: experts.__name__)
def test_sizes_that_are_equal_by_chance_hide_nothing(
    experts: type[ShardedExperts], tokens: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that act on more than their own row are refused with as many tokens as experts, or as choices."""
    form = _form_of(experts)
    monkeypatch.setitem(EP_FORMS, form, experts)
    config = StackConfig(layers=1)
    assert not eliminate(capture(config, form, 1, 2, tokens, dynamic=dynamic, moe_alone=True)).plan.banks


class MaskedByConstants(AllToAllExperts):
    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).masked_fill(torch.arange(gate.shape[1]) >= 20, 0.0)
        return grouped_gemm(inner, self.down_proj.transpose(1, 2), ends)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [PairedAllToAll, PairedAllReduce, NormedAllToAll, MaskedByConstants])
def test_static_graphs_taken_by_a_symbolic_proof_are_right(
    experts: type[ShardedExperts], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = _form_of(experts)
    monkeypatch.setitem(EP_FORMS, form, experts)
    config = StackConfig(layers=1, experts=6)
    captured = [capture(config, form, rank, 2, 12, dynamic=False) for rank in range(2)]
    hidden = [hidden_states(config, 12, 0 if form == "all_reduce" else rank) for rank in range(2)]
    inputs = [with_tokens(captured_rank, values) for captured_rank, values in zip(captured, hidden, strict=True)]
    expected = run_ranks([captured_rank.module for captured_rank in captured], inputs)
    moe = build_stack(config).moe[0].experts
    complete = {"moe.0.experts": [moe.gate_up_proj, moe.down_proj]}
    for rank, captured_rank in enumerate(captured):
        result = eliminate(captured_rank)
        assert not result.refusals
        (output,) = run_local(result.module, inputs[rank], result.plan.banks, complete)
        torch.testing.assert_close(output, expected[rank][0], rtol=1e-5, atol=1e-5)


COINCIDENCES = {
    "all alike": (8, StackConfig(hidden=8, width=8, experts=8, top_k=8), 8),
    "tokens are own experts": (4, StackConfig(hidden=16, width=8, experts=8, top_k=2), 2),
    "one token": (1, StackConfig(hidden=16, width=8, experts=8, top_k=2), 2),
    "no token": (0, StackConfig(hidden=16, width=8, experts=8, top_k=2), 2),
    "primes": (13, StackConfig(hidden=17, width=11, experts=7, top_k=3), 3),
    "every expert chosen": (7, StackConfig(hidden=16, width=8, experts=8, top_k=8), 2),
    "width 4": (13, StackConfig(hidden=4, width=4, experts=5, top_k=1), 2),
    "the sizes of small copies": (6, StackConfig(hidden=5, width=8, experts=11, top_k=1), 2),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("case", COINCIDENCES)
@pytest.mark.parametrize("form", EP_FORMS)
def test_sizes_that_are_equal_by_chance_are_distinguished(form: str, case: str) -> None:
    tokens, config, ranks = COINCIDENCES[case]
    config = dataclasses.replace(config, layers=1)
    result = eliminate(capture(config, form, ranks - 1, ranks, tokens, dynamic=False, moe_alone=True))
    assert _reasons(result) == []


# ------------------------------------------------------------------------------------- variants that must be refused


class RowsOfAllRanks(FewRows):
    """An expert takes at most the pairs of all ranks, which limits nothing while all ranks have equal numbers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most = 12 * 2 * self.placement.ranks

    def keeps(self, places: torch.Tensor) -> torch.Tensor:
        return places < self.most


@pytest.mark.slow
def test_a_multiple_of_the_tokens_that_no_run_reaches_is_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_to_all", RowsOfAllRanks)
    config = StackConfig(layers=1, experts=16)
    result = eliminate(capture(config, "all_to_all", 3, 16, 12, dynamic=False, moe_alone=True))
    (reason,) = _reasons(result)
    assert "meets the constant 384" in reason


class _ByFeature(AllToAllExperts):
    """Drops features from the 40th on between the GEMMs and the combine."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        rows = super()._run_arrived(rows, arriving)
        return self.changed(rows)

    def changed(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(rows.shape[1]) < 40, rows, 0.0)


class RolledFeatures(_ByFeature):
    def changed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, (torch.arange(rows.shape[1]) + 40) % rows.shape[1]]


class CutFeatures(_ByFeature):
    def changed(self, rows: torch.Tensor) -> torch.Tensor:
        return F.pad(rows[:, :40], (0, rows.shape[1] - 40))


class MaskedInside(AllToAllExperts):
    """Masks features between the GEMMs by the number of arrived rows."""

    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).masked_fill(torch.arange(gate.shape[1]) >= 20 + counts.sum(), 0.0)
        return grouped_gemm(inner, self.down_proj.transpose(1, 2), ends)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "experts", [_ByFeature, RolledFeatures, CutFeatures, MaskedInside], ids=lambda experts: experts.__name__
)
def test_effects_of_many_features_are_detected_with_few_features(
    experts: type[ShardedExperts], dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EP_FORMS, "all_to_all", experts)
    config = StackConfig(layers=1, hidden=64, width=32)
    result = eliminate(capture(config, "all_to_all", 1, 2, 12, dynamic=dynamic, moe_alone=True))
    assert not result.plan.banks


class FlippedTwice(AllToAllExperts):
    """This is right, although it distinguishes features."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return super()._run_arrived(rows, arriving).flip(-1).flip(-1)


def test_a_proof_that_would_take_too_much_memory_is_refused_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_to_all", FlippedTwice)
    captured = capture(StackConfig(layers=1), "all_to_all", 1, 2, 12, dynamic=False, moe_alone=True)
    assert not eliminate(captured).refusals
    monkeypatch.setattr(PROOF, "MOST_PROOF_BYTES", 1_000_000)
    with _Elements() as elements:
        (reason,) = _reasons(eliminate(captured))
    assert "would take 3222528 bytes of memory, where 1000000 are allowed" in reason
    assert "flip" in reason
    assert elements.total < 10_000


class LongActivation(AllReduceExperts):
    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        for _ in range(350):
            gate = gate * 0.999
        return grouped_gemm(gate * up, self.down_proj.transpose(1, 2), ends)


@pytest.mark.slow
def test_a_long_activation_function_is_copied_without_recursion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_reduce", LongActivation)
    result = eliminate(capture(StackConfig(layers=1), "all_reduce", 1, 2, 12, moe_alone=True))
    assert _reasons(result) == []
