"""Match expert GEMMs whose rows cross two axes of a mesh.

Two hops: an AllToAll over one axis, from there one over the other, and both back. Between machines first, then within
them, or the other way round.

Cut experts: an AllToAll over one axis and back, and before the way back an AllReduce over the other, whose ranks hold a
part of the width of each expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch.fx import Node

from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.collectives import Collective, Communication, collective_of
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.joint_groups import JointGroup, joint_group
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.parallel.match.match_all_to_all import (
    are_slots,
    check_exact_sizes,
    match_all_to_all,
    sizes_of_rows,
    split_sizes,
)
from moepass.passes.parallel.match.near_experts import first_communication_after, is_size, most_nodes
from moepass.passes.parallel.match.parallel_block import Hops, ParallelBlock, PartsOfExperts, expert_tensors
from moepass.passes.parallel.match.region_walk import check_leaves, reshaped, walk_back


@dataclasses.dataclass(frozen=True)
class RowHops:
    """The AllToAlls of rows in front of experts, over two axes: `first`, and `second`, which is nearer to the experts.

    `joint` is the group of all ranks of both axes, where this process has one.
    """

    first: Collective
    second: Collective
    joint: JointGroup | None


@dataclasses.dataclass(frozen=True)
class AddedUp:
    """The AllReduce behind experts that are cut, and the AllToAll back; `joint` as above."""

    sum: Collective
    back: Collective
    joint: JointGroup | None


def row_hops(arriving: Sequence[Communication], groups: Mapping[str, Group]) -> RowHops | None:
    """None where the rows that `arriving` brings, nearest first, come by AllToAlls of one group, or by none."""
    found = [collective_of(one.node) for one in arriving if one.kind == "all_to_all" and one.group_name in groups]
    rows = [one for one in found if one is not None and one.is_float]
    first = next((one for one in rows if one.group_name != rows[0].group_name), None)
    if first is None:
        return None
    axes = groups[first.group_name], groups[rows[0].group_name]
    return RowHops(first, rows[0], joint_group(*axes, groups))


def last_hop(
    combine: Communication | None,
    arriving: Sequence[Communication],
    width: int,
    place: dict[Node, int],
    most: int,
) -> Collective | None:
    """The AllToAll that the rows [., width] go back by behind `combine`, which is over another group, or a sum.

    Rows have come by an AllToAll over the same group; `arriving` is what brought them.
    """
    one = None if combine is None else collective_of(combine.node)
    if one is None or one.kind not in ("all_to_all", "all_reduce", "reduce_scatter"):
        return None
    after = first_communication_after(one.result, width, place, most)
    last = None if after is None else collective_of(after.node)
    if last is None or last.kind != "all_to_all" or last.group_name == one.group_name:
        return None
    came_by = {other.group_name for other in arriving if other.kind == "all_to_all"}
    return last if last.group_name in came_by else None


def match_two_hops(
    match: BlockMatch,
    combine: Collective,
    found: RowHops,
    last: Collective,
    groups: Mapping[str, Group],
    place: dict[Node, int],
    capture: CaptureNotes,
) -> ParallelBlock:
    """`combine` is the first AllToAll on the way back, `last` the second."""
    joint, (first, second) = _joint_of(found, groups), (found.first, found.second)
    most = most_nodes(joint.group.ranks)
    if combine.group_name != second.group_name or last.group_name != first.group_name:
        raise NotThisForm(
            f"its rows come in two hops, by {named(first.node)} over one process group and {named(second.node)} over "
            f"another, and go back by {named(combine.node)} and {named(last.node)}; expected the same groups on the "
            f"way back, in the other order; {capture.advice()}"
        )
    region, exchanges, leaves = walk_back(
        last.result,
        place,
        most,
        stop_at=frozenset((*sizes_of_rows([first.node]), *expert_tensors(match, set(), place))),
        stop_at_inputs_of=lambda one: one.kind == "all_to_all" and one.group_name == first.group_name and one != last,
    )
    counts = [one for one in exchanges if not one.is_float]
    hops = Hops(joint, tuple(counts), (first, second), (combine, last))
    _check_exchanges(hops, exchanges, match)
    rows, own = first.input, match.record.experts
    for one in hops.there:
        if fake_value(one.input).dim() != 2 or not is_size(fake_value(one.input).shape[1], match.record.hidden):
            raise NotThisForm(
                f"its rows come in two hops, and {named(one.node)} carries {describe_shape(fake_value(one.input))}; "
                f"expected rows of tokens [., {match.record.hidden}], or slots [.., {match.record.hidden}]"
            )
    sources = {"rows": rows}
    if counts:
        sources["counts"] = reshaped(counts[0].input)
        _check_counts(hops, own)
    check_exact_sizes(first, counts)
    if not counts:
        _check_even(hops)
    tensors = expert_tensors(match, set(sources.values()), place)
    check_leaves(leaves - {*sources.values(), *tensors}, sources["rows"], place)
    return ParallelBlock(
        "all_to_all" if counts else "all_to_all_slots",
        match.record.name,
        joint.name,
        joint.group,
        tuple(own * rank for rank in range(joint.group.ranks + 1)),
        match.gemms,
        tensors,
        sources,
        last.result,
        tuple(exchanges),
        tuple(region),
        hops=hops,
    )


def _joint_of(found: RowHops, groups: Mapping[str, Group]) -> JointGroup:
    """Raises NotThisForm where this process has no group of all ranks of both axes."""
    if found.joint is not None:
        return found.joint
    raise NotThisForm(
        f"its rows come in two hops, by {named(found.first.node)} and {named(found.second.node)}, and "
        f"{_no_joint_group(found.first, found.second, groups)}, over which they could gather weights; create one on "
        "all ranks before the model is compiled, by torch.distributed.new_group(ranks), or send rows in one AllToAll "
        "over such a group"
    )


def _no_joint_group(first: Collective, second: Collective, groups: Mapping[str, Group]) -> str:
    axes = [(one.group_name, groups[one.group_name]) for one in (first, second)]
    listed = " and ".join(f"{name!r} of ranks {list(group.members)}" for name, group in axes)
    return (
        f"this process has process groups {listed}, and none of the {axes[0][1].ranks * axes[1][1].ranks} ranks of "
        "this mesh, in the order of its rows or columns"
    )


def cut_experts(
    combine: Communication | None,
    arriving: Sequence[Communication],
    groups: Mapping[str, Group],
    width: int,
    place: dict[Node, int],
) -> AddedUp | None:
    """None where `combine`, what the experts' rows [., width] reach first, is no sum of parts of experts."""
    summed = None if combine is None else collective_of(combine.node)
    came_by = next((one for one in arriving if one.kind == "all_to_all"), None)
    if summed is None or came_by is None or summed.kind != "all_reduce" or came_by.group_name == summed.group_name:
        return None
    if came_by.group_name not in groups or summed.group_name not in groups:
        return None
    last = last_hop(combine, arriving, width, place, most_nodes(groups[came_by.group_name].ranks))
    if last is None or last.group_name != came_by.group_name:
        return None
    return AddedUp(summed, last, joint_group(groups[last.group_name], groups[summed.group_name], groups))


def match_cut_experts(
    match: BlockMatch,
    found: AddedUp,
    groups: Mapping[str, Group],
    place: dict[Node, int],
    capture: CaptureNotes,
) -> ParallelBlock:
    """`found` is what `cut_experts` found."""
    summed, last, joint = found.sum, found.back, found.joint
    begins = (
        f"{named(summed.node)} adds up its results before they go back by {named(last.node)}, as where ranks hold a "
        "part of each expert's width"
    )
    if joint is None:
        raise NotThisForm(
            f"{begins}, and {_no_joint_group(last, summed, groups)}, which all have to take the block, or leave it; "
            "create one on all ranks before the model is compiled, by torch.distributed.new_group(ranks), or use a "
            "size of 1 for the tensor parallelism of experts"
        )
    if summed.reduction != "sum":
        raise NotThisForm(f"{begins}, by {summed.reduction!r}; expected a sum")
    block = match_all_to_all(match, last, groups, place, capture, summed)
    return dataclasses.replace(block, cut=PartsOfExperts(joint, summed))


def _check_exchanges(hops: Hops, exchanges: Sequence[Collective], match: BlockMatch) -> None:
    """Raises NotThisForm where there are others than those of rows, and one of counts on each hop, or none."""
    rows = (*hops.there, *hops.back)
    groups = [one.group_name for one in hops.counts]
    # In host order: a hop tells its counts before it is made.
    known = [[], [one.group_name for one in hops.there]]
    others = [one for one in exchanges if one not in (*rows, *hops.counts) or one.kind != "all_to_all"]
    if others or groups not in known or (not groups and not are_slots(match)):
        beside = [one for one in exchanges if one not in rows]
        listed = f"{len(beside)} other exchanges, {named(beside[0].node)} first" if beside else "no other exchanges"
        raise NotThisForm(
            f"its rows come in two hops, by {named(rows[0].node)} and {named(rows[1].node)}, and there are {listed}; "
            "expected an all_to_all_single of counts on each hop, or none where every expert has as many slots. Ids "
            "of experts must not travel with rows, and weights may on one hop only: send counts, and apply weights on "
            "the rank that the token came from"
        )
    for there, back in zip(hops.there, hops.back[::-1], strict=True):
        if split_sizes(there) != split_sizes(back)[::-1]:
            raise NotThisForm(
                f"{named(back.node)} is not the reverse of {named(there.node)}; expected the input_split_sizes of each "
                "as the output_split_sizes of the other"
            )


def _check_counts(hops: Hops, own: int) -> None:
    """Raises NotThisForm where a hop tells other counts than those of single experts, as many for each rank."""
    first, second = hops.counts
    ranks, passed = hops.grid.group.ranks, own * hops.grid.second.ranks
    for count, wanted in ((first, [own * ranks]), (second, [own * ranks, passed])):
        numbers = fake_value(count.input).numel()
        if (
            not isinstance(numbers, int)
            or numbers not in wanted
            or len({*split_sizes(count)[0], *split_sizes(count)[1]}) != 1
        ):
            raise NotThisForm(
                f"{named(count.node)} exchanges {numbers} counts; expected {' or '.join(map(str, wanted))}, as many "
                f"for each rank: one for each expert of the ranks that rows go on to{' from there' * (count is second)}"
            )


def _check_even(hops: Hops) -> None:
    """Raises NotThisForm where slots are not exchanged in equal parts."""
    for one, axis in zip(hops.there, (hops.grid.first, hops.grid.second), strict=True):
        send, receive = split_sizes(one)
        if len(send) != axis.ranks or len({*send, *receive}) != 1:
            raise NotThisForm(
                f"slots are exchanged by {named(one.node)} in parts of different sizes, and no counts are; expected "
                "as many slots for each rank as from it, or an exchange of counts on each hop"
            )
