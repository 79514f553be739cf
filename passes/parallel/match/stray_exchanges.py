"""Refuse exchanges of tokens that belong to no block of experts in their graph: none of them stays without a word.

Nor does the sum over ranks to which a rank that holds no expert adds its zeros.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.collectives import EXPERTS_INSIDE, Communication, communications_of
from moepass.passes.graph.nodes import fake_value, graphs_within
from moepass.passes.graph.refusals import refusal_of
from moepass.passes.graph.source_lines import named, place_of
from moepass.passes.ir.plan import Refusal
from moepass.passes.ir.protocol import CaptureNotes
from moepass.passes.parallel.match.zero_sums import adds_nothing

# Rows of tokens have two dimensions, slots of experts three; attention exchanges heads in four.
_MOST_DIMENSIONS = 3


def stray_exchanges(
    graph: Graph,
    claimed: Collection[Node],
    told: Collection[str],
    groups: Collection[str],
    capture: CaptureNotes,
) -> list[Refusal]:
    """One refusal for each module with exchanges that are not `claimed`, except where one was `told` of already."""
    owner = graph.owning_module
    graphs = list(graphs_within(owner)) if isinstance(owner, GraphModule) and owner.graph is graph else [graph]
    strays: dict[str, list[tuple[Graph, Communication]]] = {}
    for each in graphs:
        for one in communications_of(each):
            if one.node not in claimed and _is_for_experts(one, capture):
                strays.setdefault(place_of(one.node), []).append((each, one))
    refusals = []
    for where, found in strays.items():
        if where not in told:
            each, first = found[0]
            reason = _reason([one for _, one in found], capture)
            group = first.group_name if first.group_name in groups else ""
            refusals.append(refusal_of(each, reason, first.node, where, group))
    return refusals


def _reason(strays: list[Communication], capture: CaptureNotes) -> str:
    first = strays[0]
    if first.kind == EXPERTS_INSIDE:
        return (
            f"{named(first.node)} holds experts, and what it exchanges for them, in one operator that moepass cannot "
            "look into; use an implementation of these experts that is written in PyTorch operators"
        )
    if all(adds_nothing(one.node) for one in strays):
        return (
            f"this rank adds nothing but zeros to the sum over ranks that {first.kind} {named(first.node)} makes, as a "
            "rank does that holds none of the experts; it cannot see what they do, so spread them over as many ranks "
            "as there are experts, or fewer"
        )
    number = f"{len(strays)} exchanges of tokens or counts" if len(strays) > 1 else "an exchange of tokens or counts"
    return (
        f"{number}, {first.kind} {named(first.node)}, stand{'s' * (len(strays) == 1)} around no expert GEMM that "
        f"moepass recognises in this graph (a grouped GEMM, or bmm with weights [experts, ., .]); {capture.advice()}"
    )


def _is_for_experts(one: Communication, capture: CaptureNotes) -> bool:
    """Exchanges of rows or slots of tokens, and sums that this rank has no part in.

    Those of sizes too, where the graph ends because Dynamo may not read them.
    """
    sent = [fake_value(used) for used in one.node.all_input_nodes]
    tensors = [value for value in sent if isinstance(value, torch.Tensor)]
    if adds_nothing(one.node):
        return True
    if one.is_exchange:
        return all(value.dim() <= _MOST_DIMENSIONS for value in tensors)
    sizes = bool(tensors) and not any(value.is_floating_point() for value in tensors)
    return sizes and any(switch in capture.graph_break for switch in capture.switches_off)
