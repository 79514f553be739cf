"""Match expert GEMMs whose partial results are summed over ranks: by AllReduce, or by ReduceScatter after AllGather."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.models.formulas.expert_placement import shard_bounds
from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.collectives import Collective
from moepass.passes.graph.nodes import fake_value, is_call, is_float
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.protocol import Group
from moepass.passes.ops import walk
from moepass.passes.ops.traits import Trait, has_trait, is_view
from moepass.passes.parallel.match.gathered_masks import OF_MASK_KEY
from moepass.passes.parallel.match.near_experts import MOST_NODES, most_nodes
from moepass.passes.parallel.match.parallel_block import ParallelBlock, expert_tensors
from moepass.passes.parallel.match.region_walk import check_leaves, walk_back
from moepass.passes.parallel.match.token_origin import (
    gathered_rows,
    id_source,
    origin,
    router_scores,
    row_source,
    row_weights,
    sort_key,
)

aten = torch.ops.aten


def match_partial_sums(match: BlockMatch, combine: Collective, group: Group) -> ParallelBlock:
    """Return the block of `match` whose results `combine` sums. Raises NotThisForm."""
    if combine.reduction != "sum":
        raise NotThisForm(f"{named(combine.node)} combines its results by {combine.reduction!r}; expected a sum")
    gathered = combine.kind == "reduce_scatter"
    inner_weights = _inner_weights(match) if gathered else None
    weights = origin(row_weights(match), row_source, gathered) if inner_weights is None else inner_weights
    sources = {
        "hidden": origin(match.gemms[0].activations, row_source, gathered),
        "ids": origin(sort_key(match), id_source, gathered),
        "weights" if inner_weights is None else "travels_0": weights,
    }
    _check_router(sources["ids"], [sources["hidden"], weights])
    tokens = fake_value(sources["hidden"])
    for role in [role for role in sources if role != "hidden"]:
        value = fake_value(sources[role])
        if value.dim() != 2 or str(value.shape[0]) != str(tokens.shape[0]) or not isinstance(value.shape[1], int):
            raise NotThisForm(
                f"its expert {role} were looked for at {named(sources[role])}, which is {describe_shape(value)}; "
                f"expected [tokens, k] for the tokens {describe_shape(tokens)} at {named(sources['hidden'])}"
            )
    if fake_value(sources["ids"]).shape[1] != fake_value(weights).shape[1]:
        raise NotThisForm(
            f"its expert ids {named(sources['ids'])} are {describe_shape(fake_value(sources['ids']))}, its weights "
            f"{named(weights)} {describe_shape(fake_value(weights))}; expected one shape [tokens, k]"
        )
    sink = _unpadded_result(combine.result, tokens.shape[0]) if gathered else combine.result
    tensors = expert_tensors(match, set(sources.values()))
    stops = frozenset((*sources.values(), *tensors))
    region, exchanges, leaves = walk_back(sink, most_nodes(group.ranks), stop_at=stops)
    stray = [exchange.kind for exchange in exchanges if exchange.group_name != combine.group_name]
    kinds = sorted({exchange.kind for exchange in exchanges})
    # The AllReduce finds the largest number of tokens; ranks with equal numbers do not need it.
    gathering_kinds = [["all_gather", "reduce_scatter"], ["all_gather", "all_reduce", "reduce_scatter"]]
    if stray or kinds not in (gathering_kinds if gathered else [["all_reduce"]]):
        listed = ", ".join(f"{exchange.kind} {named(exchange.node)}" for exchange in exchanges)
        wanted = "all_gather, reduce_scatter and at most all_reduce of the largest number" if gathered else "all_reduce"
        raise NotThisForm(f"it exchanges by {listed}; expected {wanted} alone, all over one process group")
    check_leaves(leaves - stops, sources["hidden"])
    bounds = _bounds_from_router(sources["ids"], group, match.record.experts)
    drops = any(exchange.node.meta.get(OF_MASK_KEY, False) for exchange in exchanges)
    return ParallelBlock(
        "all_gather" if gathered else "all_reduce",
        match.record.name,
        combine.group_name,
        group,
        bounds,
        match.gemms,
        tensors,
        sources,
        sink,
        tuple(exchanges),
        tuple(region),
        drops,
    )


def _inner_weights(match: BlockMatch) -> Node | None:
    """Return the gathered weights [tokens, k] read between the GEMMs, or None. Raises NotThisForm for several."""
    ups, activations = {gemm.node for gemm in match.gemms[:-1]}, match.gemms[-1].activations

    def is_value(node: Node) -> bool:
        return node not in ups and is_float(node)

    def is_gathered(node: Node) -> bool:
        return gathered_rows(node) is not None

    between = walk.ancestors(activations, follow=is_value, stop=is_gathered, most=MOST_NODES)
    inputs = dict.fromkeys(filter(None, map(gathered_rows, between if is_value(activations) else ())))
    tokens = gathered_rows(match.gemms[0].activations)
    weights = [value for value in inputs if value is not tokens]
    if len(weights) > 1:
        listed = " and ".join(map(named, weights))
        raise NotThisForm(f"between its GEMMs it reads several values that ranks gather, {listed}; expected weights")
    return next(iter(weights), None)


def _check_router(ids: Node, values: list[Node]) -> None:
    """Raise NotThisForm if tokens or weights depend on expert ids, except by lookups: no mock run would test that."""

    def is_unchanged(node: Node) -> bool:
        return is_view(node) or has_trait(node, Trait.CAST, Trait.COPY)

    def looks_up(node: Node) -> bool:
        return is_float(node) and is_call(node, aten.gather.default, aten.index.Tensor, aten.scatter.src)

    ids = walk.origin(ids, passes=lambda step: is_unchanged(step) and not has_trait(step, Trait.ITEM))
    before = set(walk.ancestors(*values, follow=lambda used: used > ids))
    _, *users = walk.descendants(ids, follow=before.__contains__, stop=looks_up)
    for user in users:
        if not is_unchanged(user) and not looks_up(user):
            raise NotThisForm(
                f"its tokens or weights depend on its expert ids by {named(user)}, perhaps on this rank only; "
                "expected them as the router gave them, with masks for this rank's experts behind its GEMMs"
            )


def _bounds_from_router(ids: Node, group: Group, held: int) -> tuple[int, ...]:
    """Return even shards of the experts that the router chooses from. Raises NotThisForm if this rank's differs."""
    while (source := id_source(ids)) is not None:
        ids = source
    scores = router_scores(ids)
    experts = held * group.ranks if scores is None else int(fake_value(scores).shape[-1])
    bounds = shard_bounds(experts, group.ranks)
    expected = bounds[group.rank + 1] - bounds[group.rank]
    if held != expected:
        raise NotThisForm(
            f"rank {group.rank} of {group.ranks} holds {held} of {experts} experts; expected {expected}, an even share "
            "in the order of ranks"
        )
    return bounds


def _unpadded_result(result: Node, tokens: Any) -> Node:
    """Return the result for this rank's tokens, after the slice that removes padding, if any."""
    slices = [user for user in result.users if len(result.users) == 1 and is_call(user, aten.slice.Tensor)]
    for node in (result, *slices):
        if str(fake_value(node).shape[0]) == str(tokens):
            return node
    raise NotThisForm(
        f"the rows that ReduceScatter gives back, {named(result)}, are {describe_shape(fake_value(result))}; expected "
        "them to be this rank's tokens, or to be cut to their number by a slice"
    )
