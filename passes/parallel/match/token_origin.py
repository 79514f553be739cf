"""Find the rows, expert ids and weights of a block before they were moved, masked, padded or gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.graph.collectives import WAIT, Collective, collective_of
from moepass.passes.graph.nodes import fake_value, is_call, is_float
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops import walk
from moepass.passes.ops.arguments import is_accumulating_write
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_view
from moepass.passes.parallel.match.gathered_masks import OF_MASK_KEY
from moepass.passes.parallel.match.near_experts import MOST_NODES, is_new_memory, is_size

aten = torch.ops.aten

_ROW_LOOKUPS = (aten.index.Tensor, aten.index_select.default)


def origin(node: Node, passes_through: Callable[[Node], Node | None], gathered: bool) -> Node:
    """Return the value [tokens, .] before it was moved, masked, padded and, if `gathered`, gathered for this block."""
    rows, is_gathered = node, gathered
    while True:
        if fake_value(node).dim() == 2:
            rows = node
        if gathered and (collective := _finished_collective(node)) is not None and collective.kind == "all_gather":
            node, is_gathered = collective.input, False
            if OF_MASK_KEY in collective.node.meta:
                return node
            if is_call(node, aten.constant_pad_nd.default):
                node = node.all_input_nodes[0]
            continue
        source = passes_through(node)
        if source is None and is_gathered:
            source = _unpadded(node)
        if source is None:
            return rows
        node = source


def _finished_collective(node: Node) -> Collective | None:
    """Return the collective with this result, or None; a copy counts only if it is the collective's last result."""
    start, is_copied = node, False
    while is_call(node, WAIT, aten.copy.default):
        is_copied |= is_call(node, aten.copy.default)
        node = node.args[is_call(node, aten.copy.default)]  # type: ignore[assignment]
    collective = collective_of(node)
    return None if collective is None or (is_copied and collective.result is not start) else collective


def gathered_rows(node: Node) -> Node | None:
    """Return the input of the AllGather whose rows `node` selects, masks or views, or None."""
    collective = next(filter(None, map(_finished_collective, _rows_before(node))), None)
    return collective.input if collective is not None and collective.kind == "all_gather" else None


def _rows_before(node: Node) -> Iterator[Node]:
    """Yield `node`, the value whose rows it selects, masks, views or joins with padding, and so on."""
    return walk.walk([node], lambda rows: filter(None, [row_source(rows) or _unpadded(rows)]))


def row_source(node: Node) -> Node | None:
    """Return the value whose rows `node` selects, masks or views, or None."""
    if is_call(node, aten.where.self) and _is_scalar_constant(node.args[1]):
        return _node(node.args[2])
    selects = is_call(node, *_ROW_LOOKUPS, aten.masked_fill.Scalar, aten.clone.default)
    return _node(node.args[0]) if selects or (is_view(node) and not has_trait(node, Trait.ITEM)) else None


def _unpadded(node: Node) -> Node | None:
    """Return the rows that `node` joins with padding or writes into it, or None."""
    if is_call(node, aten.cat.default):
        rows = [item for item in node.args[0] if not _is_padding(item)]  # type: ignore[union-attr]
        return _node(rows[0]) if len(rows) == 1 else None
    if is_call(node, aten.constant_pad_nd.default):
        return _node(node.args[0])
    if is_call(node, aten.index_put.default) and _is_padding(node.args[0]) and not is_accumulating_write(node):
        return _node(node.args[2])
    return None


def _is_padding(node: Any) -> bool:
    """Return whether `node` is new memory, or a view of it."""
    return is_new_memory(walk.origin(node, passes=lambda step: is_view(step) and not has_trait(step, Trait.ITEM)))


def id_source(node: Node) -> Node | None:
    """Return the ids that `node` shifts, wraps, masks or views, as for conversion to local ids, or None."""
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return None
    if is_call(node, aten.where.self):
        candidates = [argument for argument in node.args[1:] if not _is_scalar_constant(argument)]
        return _node(candidates[0]) if len(candidates) == 1 else None
    is_same = has_trait(node, Trait.COPY, Trait.CAST, Trait.RESHAPE)
    is_arithmetic = is_same or base_operation(node) in ("add", "sub", "remainder", "masked_fill", "clamp")
    return _node(node.args[0]) if is_arithmetic else None


def router_scores(ids: Node) -> Node | None:
    """Return the scores [tokens, experts] from which torch.topk chose `ids`, or None."""
    choice = ids.args[0] if has_trait(ids, Trait.ITEM) else None
    return choice.all_input_nodes[0] if isinstance(choice, Node) and is_call(choice, aten.topk.default) else None


def _is_scalar_constant(argument: object) -> bool:
    return is_call(argument, aten.scalar_tensor.default, aten.full.default) or isinstance(argument, (int, float))


def _node(argument: object) -> Node | None:
    return argument if isinstance(argument, Node) else None


def sort_key(match: BlockMatch) -> Node:
    """Return the ids by which the rows are sorted, found from the row indices or the offsets of the GEMMs."""

    def is_index(used: Node) -> bool:
        # Counts may be floats (histc), cast from ids.
        return not is_float(used) or has_trait(used, Trait.CAST) or is_call(used, aten.histc.default)

    first = match.gemms[0]
    lookups = (rows for rows in _rows_before(first.activations) if is_call(rows, *_ROW_LOOKUPS))
    indices = (used for lookup in lookups for used in lookup.all_input_nodes[1:] if not is_float(used))
    for start in (*indices, first.key):
        # A router may sort scores; the walk does not continue to their sources.
        for node in walk.ancestors(start, follow=is_index, stop=_sorts_scores, most=MOST_NODES):
            if has_trait(node, Trait.SORT) and not _sorts_scores(node):
                return node.all_input_nodes[0]
    raise NotThisForm(
        f"the rows of {named(first.node)} are not sorted by expert; expected torch.sort or argsort of expert ids "
        "before its lookup of rows"
    )


def _sorts_scores(node: Node) -> bool:
    return has_trait(node, Trait.SORT) and is_float(node.args[0])


def row_weights(match: BlockMatch) -> Node:
    """Return the weights [., 1] by which the expert outputs are multiplied. Raises NotThisForm without such weights."""
    for node in walk.descendants(match.gemms[-1].node, most=MOST_NODES):
        for user in filter(lambda user: is_call(user, aten.mul.Tensor), node.users):
            factors = [argument for argument in user.args if argument is not node]
            if len(factors) == 1 and isinstance(factors[0], Node) and is_size(fake_value(factors[0]).shape[-1], 1):
                return factors[0]
    raise NotThisForm(
        f"the results of {named(match.gemms[-1].node)} are not multiplied by weights [., 1] of their rows before "
        "they are added up"
    )
