"""Run the graphs of all ranks of a mesh in this process: each collective is carried out among the ranks of its group.

simulated_ranks.py does the same for one group of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from moepass.passes.graph.collectives import group_names
from moepass.passes.ir.protocol import Group, PassResult
from moepass.passes.parallel.proposals import Proposal, blocks_to_leave, exchanges_to_compare
from moepass.runtime.execute.adoption import process_groups
from tests.helpers.graphs.simulated_ranks import (
    Captured,
    capture_module,
    carry_out,
    hidden_rows,
    pretend_rank,
    steps_of,
)
from tests.helpers.project_styles.style_sizes import StyleSizes


def captured_on_mesh(
    layer: type[nn.Module], rank: int, ranks: int, tokens: int, sizes: StyleSizes, *, dynamic: bool = True
) -> Captured:
    """Return the graph of `layer` on `rank`, with all process groups in it."""
    with pretend_rank(rank, ranks):
        model = layer(sizes, dist.group.WORLD)  # type: ignore[call-arg]
        hidden = hidden_rows(sizes.hidden, tokens, rank, sizes.dtype)
        captured = capture_module(model, hidden, rank, ranks, dynamic=dynamic)
        return dataclasses.replace(captured, groups=process_groups(group_names(captured.module.graph)))


def run_mesh(
    modules: Sequence[GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Sequence[Mapping[str, Group]],
    banks: Sequence[Mapping[int, list[torch.Tensor]]] | None = None,
) -> list[Any]:
    """Return the outputs of every rank's graph.

    Args:
        modules: The graph of each rank.
        inputs: The arguments of each rank's graph.
        groups: The groups of each rank, by name.
        banks: The complete tensors of the banks of each rank, by index, for graphs with gathers.

    Raises:
        AssertionError: If ranks disagree about a collective. Errors of a rank's graph are passed on.
    """
    runs = [
        steps_of(module, values, banks[rank] if banks is not None else None)
        for rank, (module, values) in enumerate(zip(modules, inputs, strict=True))
    ]
    outputs: list[Any] = [None] * len(runs)
    answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
    asked: dict[int, Any] = {}
    while answers:
        for rank, answer in answers.items():
            try:
                asked[rank] = runs[rank].send(answer)
            except StopIteration as done:
                outputs[rank] = done.value
        answers = {}
        for rank in sorted(asked):
            members = groups[rank][asked[rank][0].group_name].members
            of_members = [groups[member][asked[member][0].group_name].members for member in members if member in asked]
            if members[0] == rank and of_members == [members] * len(members):
                answers |= dict(zip(members, carry_out([asked[member] for member in members]), strict=True))
        for rank in answers:
            del asked[rank]
    assert not asked, f"ranks {list(asked)} wait for others"
    return outputs


def decide_on_mesh(
    ranks: Sequence[Captured], eliminate: Callable[[int, Mapping[str, str]], PassResult]
) -> list[PassResult]:
    """Return the result that each rank runs in the end, decided for every group as real ranks do, without messages.

    `eliminate(rank, leave)` returns the result of the passes; `leave` maps blocks that must stay to the reasons.
    """
    leave: list[dict[str, str]] = [{} for _ in ranks]
    results = [eliminate(rank, {}) for rank in range(len(ranks))]
    exchanges = [exchanges_to_compare(captured.module.graph, captured.groups) for captured in ranks]
    while True:
        refused: list[dict[str, str]] = [{} for _ in ranks]
        met: dict[tuple[int, ...], list[Proposal]] = {}
        for rank, captured in enumerate(ranks):
            for name, of_group in exchanges[rank].items():
                proposal = Proposal.of(results[rank].plan, name, of_group, "")
                met.setdefault(captured.groups[name].members, []).append(proposal)
        for members, proposals in met.items():
            assert len(proposals) == len(members), f"of ranks {members} some do not come"
            for rank in members:
                refused[rank] |= blocks_to_leave(proposals)
        fresh = [rank for rank in range(len(ranks)) if refused[rank].keys() - leave[rank].keys()]
        if not fresh:
            return results
        for rank in fresh:
            leave[rank] |= refused[rank]
            results[rank] = eliminate(rank, leave[rank])
