"""Graphs of all ranks of a mesh, run in this one process: collectives are carried out among the ranks of their group.

As simulated_ranks.py, which has one group of all ranks.
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
    """The graph of `layer` on `rank`, with all groups that it knows of."""
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
    """The outputs of every rank's graph. Raises whatever a rank raises, and AssertionError where ranks disagree.

    `groups` and `banks` are those of each rank.
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
            of_members = [groups[one][asked[one][0].group_name].members for one in members if one in asked]
            if members[0] == rank and of_members == [members] * len(members):
                answers |= dict(zip(members, carry_out([asked[one] for one in members]), strict=True))
        for rank in answers:
            del asked[rank]
    assert not asked, f"ranks {list(asked)} wait for others"
    return outputs


def decide_on_mesh(
    ranks: Sequence[Captured], eliminate: Callable[[int, Mapping[str, str]], PassResult]
) -> list[PassResult]:
    """What each rank runs in the end: as `decisions.py` has it, without the messages, group by group.

    `eliminate` is given a rank and the blocks that it leaves, by name, and why.
    """
    leave: list[dict[str, str]] = [{} for _ in ranks]
    results = [eliminate(rank, {}) for rank in range(len(ranks))]
    exchanges = [exchanges_to_compare(one.module.graph, one.groups) for one in ranks]
    while True:
        found: list[dict[str, str]] = [{} for _ in ranks]
        met: dict[tuple[int, ...], list[Proposal]] = {}
        for rank, one in enumerate(ranks):
            for name, of_group in exchanges[rank].items():
                proposal = Proposal.of(results[rank].plan, name, of_group, "")
                met.setdefault(one.groups[name].members, []).append(proposal)
        for members, proposals in met.items():
            assert len(proposals) == len(members), f"of ranks {members} some do not come"
            for rank in members:
                found[rank] |= blocks_to_leave(proposals)
        fresh = [rank for rank in range(len(ranks)) if found[rank].keys() - leave[rank].keys()]
        if not fresh:
            return results
        for rank in fresh:
            leave[rank] |= found[rank]
            results[rank] = eliminate(rank, leave[rank])
