"""Match expert GEMMs between an AllToAll of rows, with its exchange of counts, and the AllToAll back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import sympy
import torch
from torch.fx import Node

from moepass.models.formulas.expert_placement import shard_bounds
from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.near_experts import communications_before, is_size, most_nodes
from moepass.passes.parallel.match.parallel_block import ParallelBlock, expert_tensors
from moepass.passes.parallel.match.region_walk import before_reshape, check_leaves, walk_back

aten = torch.ops.aten


def match_all_to_all(
    match: BlockMatch, combine: Collective, groups: Mapping[str, Group], capture: CaptureNotes
) -> ParallelBlock:
    """Return the block of `match` whose results `combine` exchanges. Raises NotThisForm."""
    group = groups[combine.group_name]
    # Megatron-Core exchanges counts over a separate group with the same ranks.
    same_ranks = {name for name, each in groups.items() if name == combine.group_name or each.has_members_of(group)}
    arriving = {communication.node for communication in communications_before(match.gemms[0].activations)}
    region, exchanges, leaves = walk_back(
        combine.result,
        most_nodes(group.ranks),
        stop_at=frozenset((*_sizes_of_rows(arriving), *expert_tensors(match, set()))),
        stop_at_inputs_of=lambda exchange: (
            (exchange.kind == "all_to_all" or (exchange.kind == "all_gather" and not exchange.is_float))
            and exchange.group_name in same_ranks
            and exchange != combine
        ),
    )
    exchanges = [exchange for exchange in exchanges if exchange != combine]
    floats = [exchange for exchange in exchanges if exchange.is_float]
    counts = [exchange for exchange in exchanges if not exchange.is_float]
    dispatches = [exchange for exchange in floats if exchange.node in arriving]
    travelling = [exchange for exchange in floats if exchange not in dispatches]
    if len(floats) == len(counts) == 1 and not dispatches:
        raise NotThisForm(
            f"rows that {named(floats[0].node)} brings are computed with before its GEMMs; expected them to be moved "
            "and cast only"
        )
    is_aligned = len(dispatches) == 1 and all(_split_sizes(each) == _split_sizes(dispatches[0]) for each in travelling)
    if is_aligned:
        _check_exact_sizes(dispatches[0], counts)
    integers = [count for count in counts if is_aligned and _split_sizes(count) == _split_sizes(dispatches[0])]
    if integers:
        raise NotThisForm(
            f"beside its rows {named(integers[0].node)} exchanges integers, "
            f"{describe_shape(fake_value(integers[0].input))}, such as the ids of their experts; expected rows that "
            "are sorted by expert before their exchange, and an exchange of how many rows go to each expert"
        )
    if not is_aligned or len(counts) > 1 or (not counts and not _are_slots(match)):
        raise NotThisForm(_other_exchanges(floats, counts, capture))
    (dispatch,) = dispatches
    rows = dispatch.input
    sources = {"rows": rows}
    if counts:
        sources["counts"] = before_reshape(counts[0].input)
    sources |= {f"travels_{number}": exchange.input for number, exchange in enumerate(travelling)}
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
    tensors = expert_tensors(match, set(sources.values()))
    try:
        check_leaves(leaves - {*sources.values(), *tensors}, rows)
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
        (*counts, dispatch, *travelling, combine),
        tuple(region),
    )


def _check_exact_sizes(dispatch: Collective, counts: Sequence[Collective]) -> None:
    """Raise NotThisForm if each rank receives a fixed number of slots, but `counts` of filled slots are exchanged."""
    # A rank without tokens also has constant sizes, zeros, and is refused too.
    if counts and all(isinstance(size, int) for size in (*dispatch.send, *dispatch.receive)):
        raise NotThisForm(
            f"{named(dispatch.node)} exchanges a constant number of slots, and {named(counts[0].node)} how many of "
            "them are filled; expected as many rows as the counts say, or slots without an exchange of counts, all of "
            "which are computed"
        )


def _check_counts(counts: Node) -> None:
    """Raise NotThisForm if `counts` were cast from another integer dtype, in which the rank reads its own counts."""
    source = counts.all_input_nodes[0] if has_trait(counts, Trait.CAST) else None
    if source is not None and not fake_value(source).is_floating_point():
        raise NotThisForm(
            f"{named(counts)} turns counts from {fake_value(source).dtype} into {fake_value(counts).dtype} for their "
            "exchange, but this rank reads its own before; expected torch.int32 or torch.int64 in both places"
        )


def _sizes_of_rows(exchanges: Iterable[Node]) -> list[Node]:
    """Return sizes of the sent rows that the host has read, such as a number of slots. The block starts after them."""
    sent = [record.input for node in exchanges if (record := collective_of(node)) is not None and record.is_float]
    sizes = (size_expression(size) for node in sent for size in fake_value(node).shape)
    symbols = {symbol for size in sizes for symbol in size.free_symbols}
    target = aten._local_scalar_dense.default
    reads = sent[0].graph.find_nodes(op="call_function", target=target) if sent else []
    return [node for node in reads if size_expression(node) in symbols]


def _split_sizes(exchange: Collective) -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    """Return the sizes sent to and received from each rank."""
    return [*map(size_expression, exchange.send)], [*map(size_expression, exchange.receive)]


def _bounds(count: Collective | None, dispatch: Collective, group: Group, experts: int) -> tuple[int, ...]:
    """Return the bounds of the ranks' shards of experts; this rank holds `experts`. Raises NotThisForm."""
    if count is not None and count.kind != "all_gather":
        return _bounds_from_counts(count, group, experts)
    total = experts * group.ranks
    if count is not None and (numbers := fake_value(count.input).numel()) != total:
        raise NotThisForm(
            f"this rank holds {experts} experts of {group.ranks} ranks, but {named(count.node)} gathers {numbers} "
            f"counts of each; expected {total}, one for each expert"
        )
    sizes = set(map(size_expression, (*dispatch.send, *dispatch.receive)))
    if count is None and (len(dispatch.send) != group.ranks or len(sizes) != 1):
        raise NotThisForm(
            f"slots are exchanged by {named(dispatch.node)} in parts of different sizes, and no counts are; expected "
            "as many slots for each rank as from it, or an exchange of counts"
        )
    return shard_bounds(total, group.ranks)


def _are_slots(match: BlockMatch) -> bool:
    """Return whether every expert has the same number of rows, independent of the routing."""
    before = ancestors(match.gemms[0].key, follow=lambda used: isinstance(fake_value(used), torch.Tensor))
    return all(
        has_trait(node, Trait.ARANGE, Trait.FILL, Trait.CAST) or base_operation(node) in ("cumsum", "mul", "add")
        for node in before
        if node.op == "call_function"
    )


def _other_exchanges(rows: list[Collective], counts: list[Collective], capture: CaptureNotes) -> str:
    listed = ", ".join(
        f"{kind} {named(each.node)}" for kind, exchanges in (("rows", rows), ("counts", counts)) for each in exchanges
    )
    text = (
        f"{len(rows)} exchanges of rows and {len(counts)} exchanges of counts stand before its GEMMs"
        f"{': ' * bool(listed)}{listed}; expected one of each"
    )
    if not rows or not counts:
        return f"{text}; {capture.advice()}"
    return f"{text}: apply values that belong to a row, such as its weight, on the rank of its token"


def _bounds_from_counts(count: Collective, group: Group, experts: int) -> tuple[int, ...]:
    """Return the bounds of the shards from the split sizes: a rank receives one count for each of its experts."""
    value = fake_value(count.input)
    if len(count.send) != group.ranks or not all(isinstance(size, int) for size in (*count.send, *count.receive)):
        raise NotThisForm(
            f"counts are exchanged by {named(count.node)} in {len(count.send)} parts whose sizes are not all "
            f"constants; expected one constant size for each of {group.ranks} ranks: the number of its experts"
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise NotThisForm(
            f"how many counts {named(count.node)} exchanges is not a constant; expected one for each expert (as "
            "torch.histc, one_hot or scatter_add count them; the length of torch.bincount depends on data, unless "
            "minlength is the number of experts, and the counts are viewed as that many)"
        )
    per_entry = value.numel() // max(1, int(value.shape[0]))
    sizes = (size * per_entry for size in count.send if isinstance(size, int))
    bounds = tuple(itertools.accumulate(sizes, initial=0))
    if bounds[-1] != value.numel():
        raise NotThisForm(
            f"{named(count.node)} exchanges {value.numel()} counts in parts of {list(count.send)}, which do not add up"
        )
    counted = bounds[group.rank + 1] - bounds[group.rank]
    if counted != experts:
        raise NotThisForm(
            f"this rank holds {experts} experts, but {named(count.node)} brings it the counts of {counted}"
        )
    return bounds
