"""Match expert GEMMs between an AllToAll of rows, with its exchange of counts, and the AllToAll back."""

from __future__ import annotations

from torch.fx import Node

from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.collectives import Collective
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.parallel.match.near_experts import is_size, most_nodes
from moepass.passes.parallel.match.parallel_block import ParallelBlock, expert_tensors
from moepass.passes.parallel.match.region_walk import check_leaves, reshaped, walk_back


def match_all_to_all(
    match: BlockMatch, combine: Collective, group: Group, place: dict[Node, int], capture: CaptureNotes
) -> ParallelBlock:
    region, exchanges, leaves = walk_back(
        combine.result,
        place,
        most_nodes(group.ranks),
        stop_at_inputs_of=lambda found: (
            found.kind == "all_to_all" and found.group_name == combine.group_name and found != combine
        ),
    )
    exchanges.remove(combine)
    dispatches = [exchange for exchange in exchanges if exchange.is_float]
    counts = [exchange for exchange in exchanges if not exchange.is_float]
    if len(dispatches) != 1 or len(counts) != 1:
        raise NotThisForm(_other_exchanges(dispatches, counts, capture))
    (dispatch,), (count,) = dispatches, counts
    rows, counted = dispatch.input, reshaped(count.input)
    if fake_value(rows).dim() != 2 or not is_size(fake_value(rows).shape[1], match.record.hidden):
        raise NotThisForm(
            f"the AllToAll before its GEMMs, {named(dispatch.node)}, carries {describe_shape(fake_value(rows))}; "
            f"expected rows of tokens [., {match.record.hidden}]"
        )
    bounds = _bounds_from_counts(count, group, match.record.experts)
    if dispatch.send != combine.receive or dispatch.receive != combine.send:
        raise NotThisForm(
            f"the AllToAll after its GEMMs, {named(combine.node)}, is not the reverse of {named(dispatch.node)} "
            "before them; expected the input_split_sizes of each as the output_split_sizes of the other"
        )
    # Without tokens what a rank sends is constant too: nothing.
    static = all(isinstance(size, int) for size in (*dispatch.send, *dispatch.receive))
    tensors = expert_tensors(match, {rows, counted})
    check_leaves(leaves - {rows, counted, *tensors}, place)
    return ParallelBlock(
        "all_to_all_capacity" if static else "all_to_all",
        match.record.name,
        combine.group_name,
        group,
        bounds,
        match.gemms,
        tensors,
        {"rows": rows, "counts": counted},
        combine.result,
        (count, dispatch, combine),
        tuple(region),
    )


def _other_exchanges(dispatches: list[Collective], counts: list[Collective], capture: CaptureNotes) -> str:
    found = ", ".join(
        f"{what} {named(one.node)}" for what, of in (("rows", dispatches), ("counts", counts)) for one in of
    )
    text = (
        f"{len(dispatches)} exchanges of rows and {len(counts)} exchanges of counts stand before its GEMMs"
        f"{': ' * bool(found)}{found}; expected one of each"
    )
    if not dispatches or not counts:
        return f"{text}; {capture.advice()}"
    return f"{text}: let what travels with a row, as its weight, be applied on the rank that the token came from"


def _bounds_from_counts(count: Collective, group: Group, own: int) -> tuple[int, ...]:
    """Which experts each rank holds, from how the counts are sent: as many counts to a rank as it has experts."""
    value = fake_value(count.input)
    if len(count.send) != group.ranks or not all(isinstance(size, int) for size in (*count.send, *count.receive)):
        raise NotThisForm(
            f"counts are exchanged by {named(count.node)} in {len(count.send)} parts whose sizes are not all "
            f"constants; expected one constant size for each of {group.ranks} ranks: the number of its experts"
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise NotThisForm(
            f"how many counts {named(count.node)} exchanges is not a constant; expected one for each expert (as "
            "torch.histc, one_hot or scatter_add count them; torch.bincount has a length that only a run tells)"
        )
    per_entry = value.numel() // max(1, int(value.shape[0]))
    bounds = [0]
    for size in count.send:
        assert isinstance(size, int)
        bounds.append(bounds[-1] + size * per_entry)
    if bounds[-1] != value.numel():
        raise NotThisForm(
            f"{named(count.node)} exchanges {value.numel()} counts in parts of {list(count.send)}, which do not add up"
        )
    if bounds[group.rank + 1] - bounds[group.rank] != own:
        raise NotThisForm(
            f"this rank holds {own} experts, but {named(count.node)} brings it the counts of "
            f"{bounds[group.rank + 1] - bounds[group.rank]}"
        )
    return tuple(bounds)
