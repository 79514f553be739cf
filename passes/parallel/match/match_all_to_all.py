"""Match expert GEMMs between an AllToAll of rows, with its exchange of counts, and the AllToAll back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.near_experts import communications_before, is_size, most_nodes
from moepass.passes.parallel.match.parallel_block import ParallelBlock, expert_tensors
from moepass.passes.parallel.match.region_walk import check_leaves, reshaped, walk_back

aten = torch.ops.aten


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
        stop_at=frozenset((*_sizes_of_rows(brings_rows), *expert_tensors(match, set(), place))),
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
    is_beside = len(dispatches) == 1 and all(_split_sizes(one) == _split_sizes(dispatches[0]) for one in beside)
    if is_beside:
        _check_exact_sizes(dispatches[0], counts)
    with_rows = [one for one in counts if is_beside and _split_sizes(one) == _split_sizes(dispatches[0])]
    if with_rows:
        raise NotThisForm(
            f"beside its rows {named(with_rows[0].node)} exchanges integers, "
            f"{describe_shape(fake_value(with_rows[0].input))}, such as the ids of their experts; expected rows that "
            "are sorted by expert before their exchange, and an exchange of how many rows go to each expert"
        )
    if not is_beside or len(counts) > 1 or (not counts and not _are_slots(match)):
        raise NotThisForm(_other_exchanges(floats, counts, capture))
    (dispatch,) = dispatches
    rows = dispatch.input
    sources = {"rows": rows}
    if counts:
        sources["counts"] = reshaped(counts[0].input)
    sources |= {f"travels_{number}": one.input for number, one in enumerate(beside)}
    if fake_value(rows).dim() != 2 or not is_size(fake_value(rows).shape[1], match.record.hidden):
        raise NotThisForm(
            f"the AllToAll before its GEMMs, {named(dispatch.node)}, carries {describe_shape(fake_value(rows))}; "
            f"expected rows of tokens [., {match.record.hidden}]"
        )
    bounds = _bounds(counts[0] if counts else None, dispatch, group, match.record.experts)
    if _split_sizes(dispatch) != _split_sizes(combine)[::-1]:
        raise NotThisForm(
            f"the AllToAll after its GEMMs, {named(combine.node)}, is not the reverse of {named(dispatch.node)} "
            "before them; expected the input_split_sizes of each as the output_split_sizes of the other"
        )
    tensors = expert_tensors(match, set(sources.values()), place)
    try:
        check_leaves(leaves - {*sources.values(), *tensors}, rows, place)
    except NotThisForm:
        if "counts" in sources:
            _check_counts(sources["counts"])
        raise
    return ParallelBlock(
        "all_to_all" if counts else "all_to_all_slots",
        match.record.name,
        combine.group_name,
        group,
        bounds,
        match.gemms,
        tensors,
        sources,
        combine.result,
        (*counts, dispatch, *beside, combine),
        tuple(region),
    )


def _check_exact_sizes(dispatch: Collective, counts: Sequence[Collective]) -> None:
    """Raise NotThisForm if each rank gets a fixed number of slots, and `counts` say how many of them are filled."""
    # Sizes are also constant on a rank without tokens, which sends nothing and is refused too.
    if counts and all(isinstance(size, int) for size in (*dispatch.send, *dispatch.receive)):
        raise NotThisForm(
            f"{named(dispatch.node)} exchanges as many slots as constants say, and {named(counts[0].node)} how many of "
            "them are filled; expected as many rows as the counts say, or slots without an exchange of counts, all of "
            "which are computed"
        )


def _check_counts(counts: Node) -> None:
    """Raises NotThisForm where `counts` were whole numbers of a wider type before, by which a rank sends its rows."""
    source = counts.all_input_nodes[0] if has_trait(counts, Trait.CAST) else None
    if source is not None and not fake_value(source).is_floating_point():
        raise NotThisForm(
            f"{named(counts)} turns counts from {fake_value(source).dtype} into {fake_value(counts).dtype} for their "
            "exchange, but this rank reads its own before; expected torch.int32 or torch.int64 in both places"
        )


def _sizes_of_rows(exchanges: Iterable[Node]) -> Iterator[Node]:
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


def _split_sizes(exchange: Collective) -> tuple[list[str], list[str]]:
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


def _are_slots(match: BlockMatch) -> bool:
    """True where every expert has the same number of rows, however tokens are routed."""
    before = ancestors(match.gemms[0].key, follow=lambda used: isinstance(fake_value(used), torch.Tensor))
    return all(
        has_trait(node, Trait.ARANGE, Trait.FILL, Trait.CAST) or base_operation(node) in ("cumsum", "mul", "add")
        for node in before
        if node.op == "call_function"
    )


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
