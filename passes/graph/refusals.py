"""Refusals that a user can act on: with the place in the model, the reason, and a note on collectives."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.source_lines import in_words, named, named_nodes, source_line
from moepass.passes.ir.plan import Refusal

# The end of the reason of every refusal of a block that communicates with other ranks.
COLLECTIVES_STAY = "; its collectives stay"


def first_line(error: Exception) -> str:
    """Return the first line of the text of `error`, or its type if it has no text."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def why_it_stopped(error: Exception) -> str:
    """Return why a block could not be run on sample numbers, with internal error texts replaced by an explanation."""
    first = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or ("alloc" in first and "memory" in first):
        return "a proof on sample numbers needs more memory than is free; capture the model with fewer tokens"
    if isinstance(error, KeyError):
        return (
            "it has a data-dependent size, as from .item(), a mask or nonzero, that ranks do not exchange; all sizes "
            "must follow from its inputs and from the counts that it sends and receives"
        )
    return f"it cannot be computed on rows as other ranks send them ({type(error).__name__}: {first})"


def refusal_of(graph: Graph, reason: str, node: Node, where: str, group: str) -> Refusal:
    """Return the refusal of a part of the graph that continues to communicate with the ranks of `group`.

    `reason` may name nodes as `name (operator)`; the refusal points to the first of them, or else to `node`. Raises
    ValueError for an empty reason, because nothing is refused silently.
    """
    if not reason.strip():
        raise ValueError(f"the refusal of {where} at {named(node)} has no reason; this is a bug in moepass")
    culprit = next(named_nodes(reason, graph), node)
    return Refusal(
        culprit.name,
        in_words(reason, graph, culprit) + COLLECTIVES_STAY,
        where,
        group,
        source_line=source_line(culprit) or source_line(node),
        crosses_ranks=True,
    )
