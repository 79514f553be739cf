"""Find what crosses ranks around experts: blocks of expert parallelism, and what talks to ranks and is no such block.

Contract
    in    a functional ATen inference graph; the process groups that it talks to, as (rank, ranks) by name
    out   a typed record of every block that fits a form; a refusal for all else that talks to other ranks for experts.
          Nothing is edited, and nothing of the kind is left out.

Pseudo-code
    for each block of expert GEMMs:
        what brings its rows or counts from other ranks, and what its results reach first
        nothing, or sums and gathers around all experts of the router: the block is local, and none of our business
        else match it with the forms (`match_block.py`); a refusal where it fits none
    for each grouped GEMM that makes no block, with such things near it: refuse it
    for each exchange that belongs to none of them, as the half that a graph break leaves: refuse it
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.detect import BlockMatch, find_blocks
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.collectives import Communication, collective_of, communication_of, communications_of
from moepass.passes.graph.nodes import fake_value, is_call, is_float, positions
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.refusals import refusal_of
from moepass.passes.graph.source_lines import place_of
from moepass.passes.ir.plan import Refusal
from moepass.passes.ir.protocol import NO_NOTES, CaptureNotes, Group
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
from moepass.passes.parallel.match.token_origin import is_id_arithmetic, origin, sort_key

aten = torch.ops.aten


def find_parallel_blocks(
    graph: Graph,
    groups: Mapping[str, Group],
    capture: CaptureNotes = NO_NOTES,
    unread: Mapping[Node, str] = MappingProxyType({}),
) -> tuple[tuple[ParallelBlock, ...], tuple[Refusal, ...]]:
    """Every block whose tokens or results cross ranks, in host order, and refusals for those that fit no form.

    What exchanges tokens and belongs to no block of GEMMs is refused too. `unread` are gathers of masks that could not
    be replaced, and why: that is what a block with one of them is refused for.
    """
    if not any(True for _ in communications_of(graph)):
        return (), ()
    place = positions(graph)
    most = most_nodes(max((group.ranks for group in groups.values()), default=1))
    blocks: list[ParallelBlock] = []
    refusals: list[Refusal] = []
    claimed: set[Node] = set()
    found = find_blocks(graph, may_compute=True)
    for match in found.matches:
        first, down = match.gemms[0], match.gemms[-1]
        combine = first_communication_after(down.node, down.outer, place, most)
        arriving = communications_before(first.activations, first.key)
        near = [*arriving, *([combine] if combine is not None else [])]
        claimed |= {one.node for one in near}
        if not near or (_holds_all_experts(match) and not any(_is_for_experts(one) for one in near)):
            continue
        group = _known_group(near, groups)
        try:
            block = match_block(match, combine, arriving, groups, place, capture)
            group = ""  # what the next line finds is known to all ranks
            check_bounds(block.bounds)
            blocks.append(block)
            claimed |= {exchange.node for exchange in block.exchanges}
        except NotThisForm as error:
            claimed |= _second_way_back(combine, arriving, down.outer, place, most)
            reason = next((unread[one.node] for one in near if one.node in unread), str(error))
            refusals.append(refusal_of(graph, reason, near[-1].node, match.record.name, group))
    refusals += _of_refused_gemms(graph, found.refusals, place, groups, claimed)
    claimed |= _counts_of(claimed)
    refusals += stray_exchanges(graph, claimed, {refusal.where for refusal in refusals}, groups, capture)
    return tuple(blocks), tuple(refusals)


def _holds_all_experts(match: BlockMatch) -> bool:
    """True where the router chooses among as many experts as this rank holds: collectives near it share other work."""
    try:
        ids = origin(sort_key(match), is_id_arithmetic, gathered=False)
    except NotThisForm:
        return False
    scores = ids.args[0] if is_call(ids, operator.getitem) else None
    if not isinstance(scores, Node) or not is_call(scores, aten.topk.default):
        return False
    return is_size(fake_value(scores.all_input_nodes[0]).shape[-1], match.record.experts)


def _counts_of(exchanges: Iterable[Node]) -> set[Node]:
    """Return the communication that tells the ranks how many rows come with `exchanges`."""

    def is_size(node: Node) -> bool:
        return isinstance(fake_value(node), torch.SymInt)

    def is_count(node: Node) -> bool:
        return is_size(node) or (isinstance(fake_value(node), torch.Tensor) and not is_float(node))

    def communicates(node: Node) -> bool:
        return communication_of(node) is not None

    sizes = (used for node in exchanges for used in node.all_input_nodes if is_size(used))
    return set(filter(communicates, ancestors(*sizes, follow=is_count, stop=communicates)))


def _second_way_back(
    combine: Communication | None,
    arriving: Sequence[Communication],
    width: int,
    place: dict[Node, int],
    most: int,
) -> set[Node]:
    """Return the AllToAll behind `combine` by which a refused block's results [., width] go over a second mesh axis."""
    collective = None if combine is None else collective_of(combine.node)
    after = None if collective is None else first_communication_after(collective.result, width, place, most)
    if collective is None or after is None or after.group_name == collective.group_name:
        return set()
    came_by = {one.group_name for one in arriving if one.kind == "all_to_all"}
    return {after.node} if after.group_name in came_by else set()


def _known_group(near: Sequence[Communication], groups: Mapping[str, Group]) -> str:
    """The group that the block's results go to, or else its rows come from, as far as ranks of it can meet."""
    return next((one.group_name for one in reversed(near) if one.group_name in groups), "")


def _is_for_experts(one: Communication) -> bool:
    return one.is_exchange or collective_of(one.node) is None


def _of_refused_gemms(
    graph: Graph,
    refused: Iterable[Refusal],
    place: dict[Node, int],
    groups: Mapping[str, Group],
    claimed: set[Node],
) -> Iterator[Refusal]:
    """Grouped GEMMs that make no block, as far as something that talks to other ranks is near them."""
    by_name = {node.name: node for node in graph.nodes}
    told: set[str] = set()
    for refusal in refused:
        gemm = by_name[refusal.node]
        if not is_grouped_gemm(gemm):
            continue
        after = first_communication_after(gemm, fake_value(gemm).shape[-1], place)
        near = [*communications_before(*gemm.all_input_nodes), *([after] if after is not None else [])]
        claimed |= {one.node for one in near}
        where = refusal.where or place_of(gemm)
        if near and where not in told:
            told.add(where)
            reason = f"its GEMMs make no block of experts that moepass knows ({refusal.reason})"
            yield refusal_of(graph, reason, near[-1].node, where, _known_group(near, groups))
