"""Bring nodes that treat every token alone together into regions, each of which can run some tokens at a time.

    W   a node that is computed of all tokens, or of none
    A   a node that treats every token alone
    region      successive A nodes, which read what was computed before the region, and each other

Pseudo-code
    until every node has its place:
        region: in host order, all A nodes that need W nodes only which need no A node without a place
            no more than one bank is read in a region, so that it needs no more slots than the model as it came
        W nodes that the region needs, then the region
    where rows sorted by expert would leave a region: that sort is not followed, and all begins anew
    a region without a GEMM is none: it has nothing large to save
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
    """`order` are nodes in their new order; `number` tells the region of those that are in one.

    What `stands_with_readers` is in neither.
    """

    order: tuple[Node, ...]
    number: Mapping[Node, int]


def stands_with_readers(node: Node, flow: TokenFlow) -> bool:
    """True for what each region that reads it has for itself: views of weights, which cost nothing, and numbers that
    are made again for some tokens."""
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
    """The regions of `nodes`, which may change places among each other."""
    attached = {node for node in nodes if stands_with_readers(node, flow)}
    pending = [node for node in nodes if node not in attached]
    inside = set(pending)
    placed: set[Node] = set()
    order: list[Node] = []
    number: dict[Node, int] = {}

    def needed(node: Node) -> list[Node]:
        """What `node` reads among `pending`, also through what stands with it."""
        found: list[Node] = []
        for used in node.all_input_nodes:
            if used in attached:
                found += needed(used)
            elif used in inside:
                found.append(used)
        return found

    needs = {node: needed(node) for node in pending}
    while len(placed) < len(pending):
        left = [node for node in pending if node not in placed]
        early: set[Node] = set()  # W nodes that need no A node without a place
        region: set[Node] = set()
        bank: Node | None = None
        for node in left:
            if node not in flow.alone:
                if all(used in placed or used in early for used in needs[node]):
                    early.add(node)
                continue
            if all(used in placed or used in early or used in region for used in needs[node]):
                banks = _banks(node)
                if bank is not None and banks - {bank}:
                    continue
                bank = next(iter(banks), bank)
                region.add(node)
        members = [node for node in left if node in region]
        # A region needs the sizes in its shapes, which it need not read.
        wanted = _ancestors([*members, *filter(_is_size, early)], needs, early) if region else early
        first = [node for node in left if node in wanted]
        order += [*first, *members]
        placed.update(first, members)
        if any(has_trait(node, Trait.MATMUL, Trait.GROUPED_MATMUL) or is_grouped_gemm(node) for node in members):
            number.update(dict.fromkeys(members, first_number))
            first_number += 1
    return Regions(tuple(order), number)


def _is_size(node: Node) -> bool:
    return isinstance(fake_value(node), torch.SymInt)


def _banks(node: Node) -> set[Node]:
    return {source for used in node.all_input_nodes if is_call(source := view_source(used), gather)}


def _ancestors(members: Sequence[Node], needs: Mapping[Node, Sequence[Node]], among: set[Node]) -> set[Node]:
    """What `members` need of the nodes `among`, which may hold some of them."""
    starts = [*members, *(used for node in members for used in needs[node])]
    return set(walk(filter(among.__contains__, starts), needs.__getitem__, among.__contains__))


def sorts_that_leave(regions: Regions, flow: TokenFlow) -> frozenset[Node]:
    """Ids whose sorted rows, or places of rows, are read on both sides of a region's edge."""
    leaving = set()
    for node, ids in flow.routed.items():
        if node in flow.alone and node not in flow.recreated:
            place = regions.number.get(node)
            if place is None or any(regions.number.get(user) != place for user in node.users):
                leaving.add(ids)
    return frozenset(leaving)
