"""Origin of the rows, expert ids and weights of a block, before they were moved, masked, padded or gathered."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

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
from moepass.passes.parallel.match.near_experts import MOST_NODES, is_size

aten = torch.ops.aten


def origin(node: Node, passes_through: Callable[[Node], Node | None], gathered: bool) -> Node:
    """Origin of a value, before it was moved, masked, padded and gathered for this block.

    A block takes rows [tokens, .]; the model may have brought them into that form right in front of it.
    """
    rows, is_before = node, gathered
    while True:
        if fake_value(node).dim() == 2:
            rows = node
        if gathered and (collective := _waited_for(node)) is not None and collective.kind == "all_gather":
            node, is_before = collective.input, False
            if OF_MASK_KEY in collective.node.meta:
                return node
            if is_call(node, aten.constant_pad_nd.default):
                node = node.all_input_nodes[0]
            continue
        source = passes_through(node)
        if source is None and is_before:
            source = _laid_out(node)
        if source is None:
            return rows
        node = source


def _waited_for(node: Node) -> Collective | None:
    """The collective that `node` is the result of; behind a copy that is its last result alone."""
    start, is_copied = node, False
    while is_call(node, WAIT, aten.copy.default):
        is_copied |= is_call(node, aten.copy.default)
        node = node.args[is_call(node, aten.copy.default)]  # type: ignore[assignment]
    found = collective_of(node)
    return None if found is None or (is_copied and found.result is not start) else found


def gathered_rows(node: Node) -> Node | None:
    """What ranks gather, where `node` is some rows of that; None where it is anything else."""
    current: Node | None = node
    while current is not None:
        collective = _waited_for(current)
        if collective is not None:
            return collective.input if collective.kind == "all_gather" else None
        current = is_row_move(current) or _laid_out(current)
    return None


def is_row_move(node: Node) -> Node | None:
    """The value whose rows `node` selects, masks or views."""
    if is_call(node, aten.index.Tensor, aten.index_select.default, aten.masked_fill.Scalar):
        return _node(node.args[0])
    if is_call(node, aten.where.self) and _is_scalar_constant(node.args[1]):
        return _node(node.args[2])
    if is_call(node, aten.clone.default) or (is_view(node) and not is_call(node, operator.getitem)):
        return _node(node.args[0])
    return None


def _laid_out(node: Node) -> Node | None:
    """The rows beside which `node` puts rows of padding, or which it writes to places among these."""
    if is_call(node, aten.cat.default):
        rows = [part for part in node.args[0] if not _is_filling(part)]  # type: ignore[union-attr]
        return _node(rows[0]) if len(rows) == 1 else None
    if is_call(node, aten.constant_pad_nd.default):
        return _node(node.args[0])
    if is_call(node, aten.index_put.default) and _is_filling(node.args[0]) and not is_accumulating_write(node):
        return _node(node.args[2])
    return None


def _is_filling(node: object) -> bool:
    """Return whether `node` is memory that rows are written to, or that stands next to them."""
    assert isinstance(node, Node)
    source = walk.origin(node, passes=lambda step: is_view(step) and not has_trait(step, Trait.ITEM))
    return has_trait(source, Trait.FILL, Trait.FILL_LIKE, Trait.EMPTY)


def is_id_arithmetic(node: Node) -> Node | None:
    """Return the ids that `node` shifts, wraps, masks or views, to turn global ids into those of this rank."""
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return None
    if is_call(node, aten.where.self):
        candidates = [argument for argument in node.args[1:] if not _is_scalar_constant(argument)]
        return _node(candidates[0]) if len(candidates) == 1 else None
    is_same = has_trait(node, Trait.COPY, Trait.CAST, Trait.RESHAPE)
    is_arithmetic = is_same or base_operation(node) in ("add", "sub", "remainder", "masked_fill", "clamp")
    return _node(node.args[0]) if is_arithmetic else None


def _is_scalar_constant(argument: object) -> bool:
    return is_call(argument, aten.scalar_tensor.default, aten.full.default) or isinstance(argument, (int, float))


def _node(argument: object) -> Node | None:
    return argument if isinstance(argument, Node) else None


def sort_key(match: BlockMatch) -> Node:
    """The sort key of the rows: the ids behind the places of the rows, or behind the offsets of the GEMMs."""
    first = match.gemms[0]
    for start in (*_row_places(first.activations), first.key):
        for node in _places_before(start):
            if is_call(node, aten.sort.stable, aten.sort.default, aten.argsort.default):
                key = node.args[0]
                assert isinstance(key, Node)
                return key
    raise NotThisForm(
        f"the rows of {named(first.node)} are not sorted by expert; expected torch.sort or argsort of expert ids "
        "before its lookup of rows"
    )


def _row_places(rows: Node) -> Iterator[Node]:
    """The places at which the rows of a block were looked up, those of the last lookup first."""
    node: Node | None = rows
    while node is not None:
        if is_call(node, aten.index.Tensor, aten.index_select.default):
            yield from (used for used in node.all_input_nodes[1:] if not is_float(used))
        node = is_row_move(node) or _laid_out(node)


def _places_before(start: Node) -> Iterator[Node]:
    """Yield what places or counts are computed from, nearest first: not beyond the scores that a router chose ids by.

    Behind those lies the rest of the model, and in it the blocks before this one.
    """

    def is_place(used: Node) -> bool:
        # Counts may be floating numbers (histc); they were cast from ids.
        return not is_float(used) or has_trait(used, Trait.CAST) or is_call(used, aten.histc.default)

    def sorts_scores(node: Node) -> bool:
        return has_trait(node, Trait.SORT) and is_float(node.args[0])

    before = walk.ancestors(start, follow=is_place, stop=sorts_scores, most=MOST_NODES)
    return (node for node in before if not sorts_scores(node))


def row_weights(match: BlockMatch) -> Node:
    """The weights by which the expert outputs are multiplied, row by row."""
    for node in walk.descendants(match.gemms[-1].node, most=MOST_NODES):
        for user in filter(lambda user: is_call(user, aten.mul.Tensor), node.users):
            others = [argument for argument in user.args if argument is not node]
            if len(others) == 1 and isinstance(others[0], Node) and is_size(fake_value(others[0]).shape[-1], 1):
                return others[0]
    raise NotThisForm(
        f"the results of {named(match.gemms[-1].node)} are not multiplied by weights [., 1] of their rows before "
        "they are added up"
    )
