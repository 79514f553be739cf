"""Eliminate expert parallelism from the captured graphs of ranks, and check that the ranks compute the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import graph_inputs, is_call
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.passes.ir.protocol import Pass, PassContext, PassResult, run_passes
from moepass.passes.ir.shards import shard_layout
from moepass.passes.ir.slot_operations import gather
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from moepass.runtime.banks.banks import write_parts
from tests.helpers.graphs.simulated_ranks import Captured, hidden_rows, run_ranks, with_tokens


def eliminate(
    captured: Captured,
    leave: Mapping[str, str] | None = None,
    passes: Sequence[Pass] = (eliminate_expert_parallelism,),
) -> PassResult:
    """Return the result of `passes` for the graph of one rank.

    `leave` maps the names of blocks that must stay to the reasons.
    """
    context = PassContext(groups=captured.groups, leave=leave or {})
    return run_passes(passes, captured.module, Plan(), context)


def collective_kinds(result: PassResult | Captured) -> list[str]:
    """Return the kinds of the collectives in a graph, in order."""
    return [collective.kind for collective in communications_of(result.module.graph)]


def complete_banks(captured: Sequence[Captured], results: Sequence[PassResult]) -> dict[int, list[torch.Tensor]]:
    """Return the complete tensors of every bank by index, built from the inputs that each rank's gather reads."""
    banks: dict[int, list[torch.Tensor]] = {}
    for bank in results[0].plan.banks:
        # Each rank computes its shard by its own recipes.
        shards = [
            _shard_of_rank(result.plan.bank(bank.index), rank, result)
            for rank, result in zip(captured, results, strict=True)
        ]
        banks[bank.index] = [torch.cat(tensors) for tensors in zip(*shards, strict=True)]
    return banks


def _shard_of_rank(bank: BankSpec, captured: Captured, result: PassResult) -> list[torch.Tensor]:
    values = dict(zip((node.name for node in graph_inputs(captured.module.graph)), captured.inputs, strict=True))
    # Two halves of a batch may gather the same bank.
    call = next(
        node for node in result.module.graph.nodes if is_call(node, gather) and node.kwargs["bank"] == bank.index
    )
    parameters: list[Any] = [values[node.name] for node in call.all_input_nodes]
    rank = captured.groups[bank.group].rank
    layout = shard_layout(bank, rank)
    shard = torch.empty(layout.nbytes, dtype=torch.uint8)
    write_parts(bank, rank, parameters, shard)
    return [tensor.view(shard) for tensor in layout.tensors]


def check_same_outputs(
    captured: Sequence[Captured],
    results: Sequence[PassResult],
    tokens: Sequence[Sequence[int]],
    *,
    hidden: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check that all ranks together return the same before and after the passes.

    Args:
        captured: The graphs of all ranks, captured with hidden states of size `hidden` and of type `dtype`.
        results: The results of the passes, by rank.
        tokens: For each run, the number of tokens of every rank; further numbers are ignored.
        hidden: The size of a hidden state.
        dtype: The type of the hidden states, which decides the tolerance.
    """
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    banks = complete_banks(captured, results)
    for seed, counts in enumerate(tokens):
        rows = [hidden_rows(hidden, counts[rank], rank, dtype, seed) for rank in range(len(captured))]
        inputs = [with_tokens(rank, values) for rank, values in zip(captured, rows, strict=True)]
        expected = run_ranks([rank.module for rank in captured], inputs)
        outputs = run_ranks([result.module for result in results], inputs, banks)
        for actual, reference in zip(outputs, expected, strict=True):
            torch.testing.assert_close(list(actual), list(reference), rtol=tolerance, atol=tolerance)
