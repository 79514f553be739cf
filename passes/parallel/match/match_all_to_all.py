"""Match expert GEMMs between an AllToAll of rows, with its exchange of counts, and the AllToAll back."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import Node

from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.operations import CASTS, base_operation
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.parallel.match.near_experts import communications_before, is_size, most_nodes
from moepass.passes.parallel.match.parallel_block import GLOBAL_IDS, OWN_IDS, ParallelBlock, expert_tensors
from moepass.passes.parallel.match.region_walk import check_leaves, reshaped, walk_back

aten, prims = torch.ops.aten, torch.ops.prims

# What makes numbers from constants and sizes alone.
_MAKE_NUMBERS = (
    prims.iota.default, aten.arange.start_step, aten.full.default, aten.cumsum.default, aten._to_copy.default,
    prims.convert_element_type.default, aten.mul.Tensor, aten.add.Tensor,
)  # fmt: skip

# What turns the id of an expert into its number on its own rank.
_RENUMBERS = {"remainder", "fmod", "sub", "bitwise_and", "rem"}


def match_all_to_all(
    match: BlockMatch,
    combine: Collective,
    groups: Mapping[str, Group],
    place: dict[Node, int],
    capture: CaptureNotes,
) -> ParallelBlock:
    group = groups[combine.group_name]
    # Megatron-Core tells counts over a group of its own, which has the same ranks.
    same = {name for name, other in groups.items() if name == combine.group_name or other.has_members_of(group)}
    brings_rows = {one.node for one in communications_before(match.gemms[0].activations)}
    region, exchanges, leaves = walk_back(
        combine.result,
        place,
        most_nodes(group.ranks),
        stop_at=frozenset((*sizes_of_rows(brings_rows), *expert_tensors(match, set(), place))),
        stop_at_inputs_of=lambda found: (
            (found.kind == "all_to_all" or (found.kind == "all_gather" and not found.is_float))
            and found.group_name in same
            and found != combine
        ),
    )
    exchanges = [exchange for exchange in exchanges if exchange != combine]
    floats = [exchange for exchange in exchanges if exchange.is_float]
    counts = [exchange for exchange in exchanges if not exchange.is_float]
    dispatches = [exchange for exchange in floats if exchange.node in brings_rows]
    beside = [exchange for exchange in floats if exchange not in dispatches]
    if len(floats) == len(counts) == 1 and not dispatches:
        raise NotThisForm(
            f"rows that {named(floats[0].node)} brings are computed with before its GEMMs; expected them to be moved "
            "and cast only"
        )
    is_beside = len(dispatches) == 1 and all(split_sizes(one) == split_sizes(dispatches[0]) for one in beside)
    with_rows = [
        one for one in counts if len(counts) == 2 and is_beside and split_sizes(one) == split_sizes(dispatches[0])
    ]
    if len(with_rows) == 1:
        counts.remove(with_rows[0])
    if not is_beside or len(counts) > 1 or (not counts and not are_slots(match)):
        raise NotThisForm(_other_exchanges(floats, counts, capture))
    (dispatch,) = dispatches
    rows = dispatch.input
    sources = {"rows": rows}
    own = match.record.experts
    ids = _travelling_ids(with_rows[0], counts[0], rows, group, own) if with_rows else None
    if ids is not None:
        sources["ids"] = ids.routed
    elif counts:
        sources["counts"] = reshaped(counts[0].input)
    sources |= {f"travels_{number}": one.input for number, one in enumerate(beside)}
    if fake_value(rows).dim() != 2 or not is_size(fake_value(rows).shape[1], match.record.hidden):
        raise NotThisForm(
            f"the AllToAll before its GEMMs, {named(dispatch.node)}, carries {describe_shape(fake_value(rows))}; "
            f"expected rows of tokens [., {match.record.hidden}]"
        )
    bounds = ids.bounds if ids is not None else _bounds(counts[0] if counts else None, dispatch, group, own)
    if split_sizes(dispatch) != split_sizes(combine)[::-1]:
        raise NotThisForm(
            f"the AllToAll after its GEMMs, {named(combine.node)}, is not the reverse of {named(dispatch.node)} "
            "before them; expected the input_split_sizes of each as the output_split_sizes of the other"
        )
    # Without tokens what a rank sends is constant too: nothing.
    static = all(isinstance(size, int) for size in (*dispatch.send, *dispatch.receive))
    form = "all_to_all_slots" if not counts else "all_to_all_capacity" if static else "all_to_all"
    if ids is not None:
        form, stops = ids.form, frozenset(sources.values())
        # Counts are computed from the ids, so the region begins with these.
        region, _, leaves = walk_back(combine.result, place, most_nodes(group.ranks), stop_at=stops)
    tensors = expert_tensors(match, set(sources.values()), place)
    try:
        check_leaves(leaves - {*sources.values(), *tensors}, rows, place)
    except NotThisForm:
        if "counts" in sources:
            _check_counts(sources["counts"])
        raise
    return ParallelBlock(
        form,
        match.record.name,
        combine.group_name,
        group,
        bounds,
        match.gemms,
        tensors,
        sources,
        combine.result,
        (*counts, *with_rows, dispatch, *beside, combine),
        tuple(region),
    )


def _check_counts(counts: Node) -> None:
    """Raises NotThisForm where `counts` were whole numbers of a wider type before, by which a rank sends its rows."""
    source = counts.all_input_nodes[0] if base_operation(counts) in CASTS else None
    if source is not None and not fake_value(source).is_floating_point():
        raise NotThisForm(
            f"{named(counts)} turns counts from {fake_value(source).dtype} into {fake_value(counts).dtype} for their "
            "exchange, but this rank reads its own before; expected torch.int32 or torch.int64 in both places"
        )


def sizes_of_rows(exchanges: Iterable[Node]) -> Iterator[Node]:
    """Sizes that the host has read, and that the rows have before they are exchanged, as the number of their slots.

    Whatever they were computed from, they are known where the block begins.
    """
    sent = [found.input for node in exchanges if (found := collective_of(node)) is not None and found.is_float]
    symbols = {
        symbol for node in sent for size in fake_value(node).shape for symbol in size_expression(size).free_symbols
    }
    for node in sent[0].graph.nodes if sent else ():
        if is_call(node, aten._local_scalar_dense.default) and size_expression(fake_value(node)) in symbols:
            yield node


def split_sizes(exchange: Collective) -> tuple[list[str], list[str]]:
    """The sizes that are sent to each rank, and received from it, as text: equal numbers may be several nodes."""
    return [*map(_text, exchange.send)], [*map(_text, exchange.receive)]


def _bounds(count: Collective | None, dispatch: Collective, group: Group, own: int) -> tuple[int, ...]:
    """Which experts each rank holds."""
    if count is None:
        return _bounds_from_slots(dispatch, group, own)
    if count.kind == "all_gather":
        return _bounds_from_gathered(count, group, own)
    return _bounds_from_counts(count, group, own)


def _bounds_from_gathered(count: Collective, group: Group, own: int) -> tuple[int, ...]:
    """Every rank is told the counts of all ranks for all experts: each holds as many as this one."""
    numbers = fake_value(count.input).numel()
    if numbers != own * group.ranks:
        raise NotThisForm(
            f"this rank holds {own} experts of {group.ranks} ranks, but {named(count.node)} gathers {numbers} counts "
            f"of each; expected {own * group.ranks}, one for each expert"
        )
    return tuple(own * rank for rank in range(group.ranks + 1))


def are_slots(match: BlockMatch) -> bool:
    """True where every expert has the same number of rows, however tokens are routed."""
    return all(is_call(node, *_MAKE_NUMBERS) for node in _calls_before(match.gemms[0].key))


def _calls_before(node: Node) -> Iterator[Node]:
    """`node` and all operations on tensors that it is computed from."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if current.op == "call_function":
            yield current
        for used in current.all_input_nodes:
            if used not in seen and isinstance(fake_value(used), torch.Tensor):
                seen.add(used)
                pending.append(used)


def _bounds_from_slots(dispatch: Collective, group: Group, own: int) -> tuple[int, ...]:
    """Which experts each rank holds where all have as many slots: as many experts everywhere, if slots are alike."""
    if len(dispatch.send) != group.ranks or len({_text(size) for size in (*dispatch.send, *dispatch.receive)}) != 1:
        raise NotThisForm(
            f"slots are exchanged by {named(dispatch.node)} in parts of different sizes, and no counts are; expected "
            "as many slots for each rank as from it, or an exchange of counts"
        )
    return tuple(own * rank for rank in range(group.ranks + 1))


def _text(size: object) -> str:
    return str(size_expression(size))


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
            "torch.histc, one_hot or scatter_add count them; torch.bincount has a length that only a run tells, unless "
            "minlength is the number of experts, and something views the counts as that many)"
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


@dataclasses.dataclass(frozen=True)
class _TravellingIds:
    """`routed` [tokens, k] are the ids that the router chose; `form` says what numbers are sent for them."""

    form: str
    routed: Node
    bounds: tuple[int, ...]


def _travelling_ids(exchange: Collective, counts: Collective, rows: Node, group: Group, own: int) -> _TravellingIds:
    """What `exchange` sends beside `rows`. Raises NotThisForm where it is not the expert of each row.

    `counts` tells the ranks how many rows come; this rank has `own` experts.
    """
    sent = fake_value(exchange.input)
    before = list(_integers_before(exchange.input))
    routed = next((node for node in before if _scores_of(node) is not None), None)
    scores = None if routed is None else _scores_of(routed)
    if routed is None or scores is None or sent.dim() != 1:
        raise NotThisForm(
            f"{named(exchange.node)} exchanges {describe_shape(sent)} beside its rows, which are not the ids of "
            "experts that topk chose, one for each row; expected these, or floating point values"
        )
    experts = own * group.ranks
    if fake_value(scores).shape[-1] != experts or fake_value(routed).dim() != 2:
        raise NotThisForm(
            f"its router chooses among {fake_value(scores).shape[-1]} experts, and this rank, of {group.ranks}, holds "
            f"{own}; expected {experts}, and as many experts on each rank, where their ids travel with the rows"
        )
    pairs, chosen = (size_expression(fake_value(node).shape[0]) for node in (rows, routed))
    if (pairs - chosen * int(fake_value(routed).shape[1])).expand() != 0:
        raise NotThisForm(
            f"it sends {pairs} rows and their ids, of {describe_shape(fake_value(routed))} that its router chose; "
            "expected a row for each of them"
        )
    parts = set(map(str, (*counts.send, *counts.receive)))
    numbers = fake_value(counts.input).numel()
    if counts.kind != "all_to_all" or numbers not in (group.ranks, experts) or len(parts) != 1:
        raise NotThisForm(
            f"{named(counts.node)} exchanges {describe_shape(fake_value(counts.input))}, while the ids of its experts "
            f"travel with the rows; expected an AllToAll of a count for each rank, or for each of {experts} experts"
        )
    path = {node for node in before if node is not routed and routed in _integers_before(node)}
    is_renumbered = any(base_operation(node) in _RENUMBERS for node in path if node.op == "call_function")
    return _TravellingIds(
        OWN_IDS if is_renumbered else GLOBAL_IDS, routed, tuple(own * rank for rank in range(group.ranks + 1))
    )


def _integers_before(start: Node) -> Iterable[Node]:
    """`start` and the integers that it is computed from, nearest first, not beyond what a router chose."""
    pending, seen = [start], {start}
    while pending:
        node = pending.pop(0)
        yield node
        for used in node.all_input_nodes if _scores_of(node) is None else ():
            value = fake_value(used)
            values = value if isinstance(value, (tuple, list)) else (value,)
            is_float = any(isinstance(item, torch.Tensor) and item.is_floating_point() for item in values)
            if used not in seen and not is_float:
                seen.add(used)
                pending.append(used)


def _scores_of(node: Node) -> Node | None:
    """The scores that `node` are the chosen experts by; None where it is nothing like that."""
    if not is_call(node, operator.getitem) or node.args[1] != 1 or not is_call(node.args[0], aten.topk.default):
        return None
    (scores,) = node.args[0].all_input_nodes  # type: ignore[union-attr]
    return scores
