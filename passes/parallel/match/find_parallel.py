"""Find expert-parallel blocks, and refuse all other communication for experts.

Contract
    in    a functional ATen inference graph, which stays unchanged; its process groups, as (rank, ranks) by name
    out   a record of every block that fits a form; a refusal for any other communication for experts

Pseudo-code
    for each block of expert GEMMs:
        find the communication that brings its rows or counts, and the first one that its results reach
        skip a block without any, and one with only sums and gathers whose experts are all on this rank
        match the block with the forms (`match_block.py`), or refuse it
    refuse each grouped GEMM that belongs to no block and has communication near it
    refuse each other exchange, such as one half of an exchange that a graph break split
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.detect import BlockMatch, find_blocks
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.collectives import Communication, collective_of, communication_of, communications_of
from moepass.passes.graph.nodes import fake_value, is_float
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.refusals import refusal_of
from moepass.passes.graph.source_lines import place_of
from moepass.passes.ir.plan import Refusal
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.match_block import match_block
from moepass.passes.parallel.match.near_experts import (
    communications_before,
    first_communication_after,
    is_size,
    most_nodes,
)
from moepass.passes.parallel.match.parallel_block import ParallelBlock, check_bounds
from moepass.passes.parallel.match.stray_exchanges import stray_exchanges
from moepass.passes.parallel.match.token_origin import id_source, origin, router_scores, sort_key


def find_parallel_blocks(
    graph: Graph, groups: Mapping[str, Group], capture: CaptureNotes, unread: Mapping[Node, str]
) -> tuple[tuple[ParallelBlock, ...], tuple[Refusal, ...]]:
    """Return the expert-parallel blocks in host order, and refusals for other blocks and exchanges.

    `unread` maps gathers of masks that could not be replaced to the reason, with which their blocks are refused.
    """
    if not any(True for _ in communications_of(graph)):
        return (), ()
    most = most_nodes(max((group.ranks for group in groups.values()), default=1))
    blocks: list[ParallelBlock] = []
    refusals: list[Refusal] = []
    claimed: set[Node] = set()
    detection = find_blocks(graph, may_compute=True)
    for match in detection.matches:
        first, down = match.gemms[0], match.gemms[-1]
        combine = first_communication_after(down.node, down.outer, most)
        arriving = communications_before(first.activations, first.key)
        near = [*arriving, *([combine] if combine is not None else [])]
        claimed |= {each.node for each in near}
        is_for_experts = any(each.is_exchange or collective_of(each.node) is None for each in near)
        if not near or (_holds_all_experts(match) and not is_for_experts):
            continue
        group = _known_group(near, groups)
        try:
            block = match_block(match, combine, arriving, groups, capture)
            group = ""  # check_bounds fails on all ranks alike, so the refusal concerns no group
            check_bounds(block.bounds)
            blocks.append(block)
            claimed |= {exchange.node for exchange in block.exchanges}
        except NotThisForm as error:
            claimed |= _second_way_back(combine, arriving, down.outer, most)
            reason = next((unread[each.node] for each in near if each.node in unread), str(error))
            refusals.append(refusal_of(graph, reason, near[-1].node, match.record.name, group))
    refusals += _of_refused_gemms(graph, detection.refusals, groups, claimed)
    claimed |= _counts_of(claimed)
    refusals += stray_exchanges(graph, claimed, {refusal.where for refusal in refusals}, groups, capture)
    return tuple(blocks), tuple(refusals)


def _holds_all_experts(match: BlockMatch) -> bool:
    """Return whether this rank holds all experts of the router; collectives near it then serve other parallelism."""
    try:
        scores = router_scores(origin(sort_key(match), id_source, gathered=False))
    except NotThisForm:
        return False
    return scores is not None and is_size(fake_value(scores).shape[-1], match.record.experts)


def _counts_of(exchanges: Iterable[Node]) -> set[Node]:
    """Return the communication of the counts from which the split sizes of `exchanges` are computed."""

    def is_count(node: Node) -> bool:
        return isinstance(fake_value(node), (torch.SymInt, torch.Tensor)) and not is_float(node)

    def communicates(node: Node) -> bool:
        return communication_of(node) is not None

    inputs = (used for node in exchanges for used in node.all_input_nodes)
    sizes = (used for used in inputs if isinstance(fake_value(used), torch.SymInt))
    return set(filter(communicates, ancestors(*sizes, follow=is_count, stop=communicates)))


def _second_way_back(
    combine: Communication | None, arriving: Sequence[Communication], width: int, most: int
) -> set[Node]:
    """Return the AllToAll after `combine` that sends a refused block's results [., width] over a second mesh axis."""
    collective = None if combine is None else collective_of(combine.node)
    if collective is None:
        return set()
    after = first_communication_after(collective.result, width, most)
    other_groups = {each.group_name for each in arriving if each.kind == "all_to_all"} - {collective.group_name}
    return {after.node} if after is not None and after.group_name in other_groups else set()


def _known_group(near: Sequence[Communication], groups: Mapping[str, Group]) -> str:
    """Return the process group of the block's results, or else of its rows; empty if this process has no such group."""
    return next((each.group_name for each in reversed(near) if each.group_name in groups), "")


def _of_refused_gemms(
    graph: Graph, refused: Iterable[Refusal], groups: Mapping[str, Group], claimed: set[Node]
) -> Iterator[Refusal]:
    """Yield refusals for grouped GEMMs that belong to no block and have communication near them."""
    by_name = {node.name: node for node in graph.nodes}
    refused_places: set[str] = set()
    for refusal in refused:
        gemm = by_name[refusal.node]
        if not is_grouped_gemm(gemm):
            continue
        after = first_communication_after(gemm, fake_value(gemm).shape[-1])
        near = [*communications_before(*gemm.all_input_nodes), *([after] if after is not None else [])]
        claimed |= {each.node for each in near}
        where = refusal.where or place_of(gemm)
        if near and where not in refused_places:
            refused_places.add(where)
            reason = f"its GEMMs make no block of experts that moepass knows ({refusal.reason})"
            yield refusal_of(graph, reason, near[-1].node, where, _known_group(near, groups))
