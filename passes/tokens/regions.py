"""Group nodes that treat each token independently into regions, each of which can run in chunks of tokens.

    T       a node that treats each token independently
    A       any other node: its result depends on all tokens together, or on none
    region  successive T nodes, which read values from before the region, and each other

Pseudo-code
    until all nodes are ordered:
        region: in graph order, all T nodes that depend on no A node that needs an unordered T node
            a region reads at most one bank, so that it needs no more slots than the original order
        append the A nodes that the region needs, then the region
    where rows sorted by expert would leave a region: start again without following that sort
    a region without a GEMM does not count: it has no large temporary values
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_view
from moepass.passes.ops.walk import origin, view_source, walk
from moepass.passes.tokens.token_flow import TokenFlow


@dataclasses.dataclass(frozen=True)
class Regions:
    """Nodes in their new order, and the region number of each node in a region, both without copied nodes."""

    order: tuple[Node, ...]
    number: Mapping[Node, int]


def is_copied_to_readers(node: Node, flow: TokenFlow) -> bool:
    """Return whether each region that reads `node` has a copy of it: a view of a weight, or pair numbers."""
    return node in flow.recreated or _is_weight_view(node, flow)


def _is_weight_view(node: Node, flow: TokenFlow) -> bool:
    def is_of_tokens(step: Node) -> bool:
        return step in flow.layouts or step in flow.aligned

    def is_plain_view(step: Node) -> bool:
        is_end = is_of_tokens(step) or _is_element_of_gather(step)
        return is_view(step) and len(step.all_input_nodes) == 1 and not is_end

    source = origin(node, passes=is_plain_view)
    is_root = source.op in ("placeholder", "get_attr") or _is_element_of_gather(source)
    return source is not node and is_root and not is_of_tokens(source)


def _is_element_of_gather(node: Node) -> bool:
    return base_operation(node) == "getitem" and is_call(node.args[0], gather)


def find_regions(nodes: Sequence[Node], flow: TokenFlow, first_number: int) -> Regions:
    """Return the regions of `nodes`, which may be reordered among each other, with numbers from `first_number`."""
    attached = {node for node in nodes if is_copied_to_readers(node, flow)}
    pending = [node for node in nodes if node not in attached]
    movable = set(pending)
    placed: set[Node] = set()
    order: list[Node] = []
    number: dict[Node, int] = {}

    def needed(node: Node) -> list[Node]:
        """Return the nodes of `pending` that `node` reads, directly or through copied nodes."""
        movable_inputs: list[Node] = []
        for used in node.all_input_nodes:
            if used in attached:
                movable_inputs += needed(used)
            elif used in movable:
                movable_inputs.append(used)
        return movable_inputs

    needs = {node: needed(node) for node in pending}
    while len(placed) < len(pending):
        unordered = [node for node in pending if node not in placed]
        early: set[Node] = set()  # A nodes that need no unordered T node
        region: set[Node] = set()
        bank: Node | None = None
        for node in unordered:
            if node not in flow.tokenwise:
                if all(used in placed or used in early for used in needs[node]):
                    early.add(node)
                continue
            if all(used in placed or used in early or used in region for used in needs[node]):
                banks = _banks(node)
                if bank is not None and banks - {bank}:
                    continue
                bank = next(iter(banks), bank)
                region.add(node)
        members = [node for node in unordered if node in region]
        # The shapes of a region have sizes that it may not read.
        wanted = _ancestors([*members, *filter(_is_size, early)], needs, early) if region else early
        before = [node for node in unordered if node in wanted]
        order += [*before, *members]
        placed.update(before, members)
        if any(has_trait(node, Trait.MATMUL, Trait.GROUPED_MATMUL) or is_grouped_gemm(node) for node in members):
            number.update(dict.fromkeys(members, first_number))
            first_number += 1
    return Regions(tuple(order), number)


def _is_size(node: Node) -> bool:
    return isinstance(fake_value(node), torch.SymInt)


def _banks(node: Node) -> set[Node]:
    return {source for used in node.all_input_nodes if is_call(source := view_source(used), gather)}


def _ancestors(members: Sequence[Node], needs: Mapping[Node, Sequence[Node]], among: set[Node]) -> set[Node]:
    """Return those of `among` that `members` depend on, members in it included."""
    starts = [*members, *(used for node in members for used in needs[node])]
    return set(walk(filter(among.__contains__, starts), needs.__getitem__, among.__contains__))


def ids_leaving_regions(regions: Regions, flow: TokenFlow) -> frozenset[Node]:
    """Return ids whose sorted rows, or indices of sorted rows, are read outside the region that computes them."""
    leaving = set()
    for node, ids in flow.routed.items():
        if node in flow.tokenwise and node not in flow.recreated:
            region = regions.number.get(node)
            if region is None or any(regions.number.get(user) != region for user in node.users):
                leaving.add(ids)
    return frozenset(leaving)
