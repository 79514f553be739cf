"""Write refusals that a user can act on: where in the model, what was found, and that the collectives stay."""

from __future__ import annotations

from torch.fx import Graph, Node

from moepass.passes.ir import Refusal
from moepass.passes.source_lines import in_words, named_nodes, source_line


def refusal_of(graph: Graph, reason: str, node: Node, where: str, group: str) -> Refusal:
    """The refusal of something that talks to the ranks of `group` and goes on doing so.

    `reason` may name nodes as `name (operator)`: the first of them is what the refusal points to, else `node`.
    """
    culprit = next(named_nodes(reason, graph), node)
    return Refusal(
        culprit.name,
        f"{in_words(reason, graph, culprit)}; its collectives stay",
        where,
        group,
        source_line=source_line(culprit) or source_line(node),
        crosses_ranks=True,
    )
