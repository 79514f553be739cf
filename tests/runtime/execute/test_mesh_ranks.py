"""Experts over both axes of a mesh on four real ranks: faults on some ranks, and runs with few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moepass.compilations import record_compilations
from tests.helpers.processes.ranks import run_ranks
from tests.helpers.project_styles import hops_style, mesh_style
from tests.helpers.project_styles.style_sizes import StyleSizes

LAYERS: dict[str, type[nn.Module]] = {
    "hops": hops_style.ExactByExpert,
    "hops, slots": hops_style.SlotsWithinMachineFirst,
    "cut": mesh_style.CutExperts,
    "cut, tokens": mesh_style.CutExpertsOfTokens,
    "cut, slots": mesh_style.CutSlots,
}
SIZES = StyleSizes()
RANKS = 4


def _hidden(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, SIZES.hidden, generator=torch.Generator().manual_seed(seed))


def _run(
    name: str, of_ranks: Sequence[Any], tokens: Sequence[int], scale: float = 1.0, options: dict[str, Any] | None = None
) -> list[Any]:
    """Return differences from the uncompiled layer, forms of blocks, reasons of refusals and statistics of runs.

    The operations between GEMMs differ between ranks by `of_ranks`. The last rank's tokens are scaled by `scale`.
    """
    rank = dist.get_rank()
    model, reference = (LAYERS[name](SIZES, dist.group.WORLD).eval() for _ in range(2))  # type: ignore[call-arg]
    differences = []
    chosen = {"lower": "eager", "timeout_s": 40, **(options or {})}
    switches = torch._dynamo.config.patch({"capture_scalar_outputs": True})
    with torch.no_grad(), switches, record_compilations() as compilations:
        for layer in (model, reference):
            of_ranks[rank](layer)
        compiled = torch.compile(model, backend="asyncep", options=chosen)
        for seed, number in enumerate(tokens):
            hidden = _hidden(number, 10 * seed + (rank // 2 if name == "cut, tokens" else rank))
            hidden = hidden * scale if rank == RANKS - 1 else hidden
            expected = reference(hidden)
            differences.append(float((compiled(hidden) - expected).abs().max()))
    forms = [[block.form for block in compilation.plan.local_blocks] for compilation in compilations]
    reasons = [refusal.reason for compilation in compilations for refusal in compilation.plan.refusals]
    statistics = [compilation.executor.forms for compilation in compilations]
    runs = [(counts.gathered_runs, counts.exchanged_runs) for counts in statistics if counts is not None]
    return [differences, forms, reasons, runs]


def _unchanged(layer: nn.Module) -> None:
    pass


def _other_activation(layer: Any) -> None:
    """Call the activation's operations in another order: another graph that computes the same numbers."""
    compute = layer._run if hasattr(layer, "_pass_on") or not hasattr(layer, "compute") else layer.compute

    def changed(*arguments: torch.Tensor) -> torch.Tensor:
        first, *remaining = arguments
        result: torch.Tensor = compute(first * 1.5, *remaining)
        return result

    setattr(layer, compute.__name__, changed)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("changed", [0, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_all_ranks_of_a_mesh_leave_what_one_of_them_leaves(name: str, changed: int) -> None:
    of_ranks = [_other_activation if rank == changed else _unchanged for rank in range(RANKS)]
    results = run_ranks(RANKS, _run, name, of_ranks, (12, 12), timeout=200.0)
    for rank, (differences, forms, reasons, _) in enumerate(results):
        assert max(differences) < 1e-5
        assert forms == [[]]
        assert reasons
        assert rank == changed or any(f"rank {changed} " in reason for reason in reasons), reasons


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYERS)
def test_few_tokens_on_a_mesh_are_exchanged(name: str) -> None:
    for differences, forms, reasons, runs in run_ranks(
        RANKS, _run, name, [_unchanged] * RANKS, (12, 40, 40, 5), 1.0, {"all_to_all_below": 20}, timeout=200.0
    ):
        assert max(differences) < 1e-5
        assert all(len(of_graph) == 1 for of_graph in forms), reasons
        assert tuple(map(sum, zip(*runs, strict=True))) == (2, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_that_differ_between_ranks_with_parts_of_the_same_experts() -> None:
    """The routing is equal, but results of different tokens would be added up."""
    arguments = ("cut, tokens", [_unchanged] * RANKS, (12, 12), 1.01)
    for differences, _, reasons, _ in run_ranks(RANKS, _run, *arguments, timeout=200.0):
        assert max(differences) < 1e-5
        assert any("the inputs that it is computed from differ between ranks" in reason for reason in reasons), reasons
        assert any("on rank 2" in reason and "on rank 3" in reason for reason in reasons), reasons


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slots_of_ranks_with_parts_of_the_same_experts_may_differ() -> None:
    for differences, forms, reasons, _ in run_ranks(
        RANKS, _run, "cut, slots", [_unchanged] * RANKS, (12, 12), 1.5, timeout=200.0
    ):
        assert max(differences) < 1e-5
        assert forms == [["all_to_all_slots"]], reasons


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["hops", "cut", "cut, slots"])
def test_ranks_of_a_mesh_gather_together(name: str) -> None:
    arguments = (name, [_unchanged] * RANKS, (12, 40), 1.0, {"transport": "collective"})
    for differences, forms, reasons, _ in run_ranks(RANKS, _run, *arguments, timeout=200.0):
        assert max(differences) < 1e-5
        assert all(len(of_graph) == 1 for of_graph in forms), reasons
