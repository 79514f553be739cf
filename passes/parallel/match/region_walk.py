"""Walk from a value back to the inputs of its block."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moepass.passes.blocks.expert_stack import is_expert_stack
from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import ancestors, origin

aten = torch.ops.aten


def walk_back(
    root: Node,
    most: int,
    *,
    stop_at: frozenset[Node],
    stop_at_inputs_of: Callable[[Collective], bool] = lambda exchange: False,
    followed: frozenset[Node] = frozenset(),
) -> tuple[list[Node], list[Collective], set[Node]]:
    """Return the ancestors of `root` and the collectives among them, both in host order, and the leaves of the walk.

    Leaves are `stop_at`, graph inputs, constants, inputs of the collectives for which `stop_at_inputs_of` is True (but
    not their split sizes), and lengths that the graph inputs determine, unless they belong to the block itself or are
    in `followed`. Raises NotThisForm for more than `most` nodes.
    """
    region, leaves, stops, reached = list[Node](), set[Node](), set(stop_at), {root}
    for node in reversed(root.graph.nodes):
        if node not in reached:
            continue
        is_stop = node in stops or node.op in ("placeholder", "get_attr") or is_expert_stack(node)
        if is_stop or (_is_known_length(node) and node not in followed):
            leaves.add(node)
            continue
        region.append(node)
        if len(region) > most:
            raise NotThisForm(
                f"more than {most} operations lead to {named(root)} without an exchange, so it is not clear where "
                "the block of experts begins"
            )
        collective = collective_of(node)
        if collective is not None and stop_at_inputs_of(collective):
            stops.add(collective.input if collective.is_float else before_reshape(collective.input))
        reached.update(node.all_input_nodes)
    region.reverse()
    within = {leaf for leaf in leaves if _is_known_length(leaf) and _is_within(leaf, region, stops)}
    if within:
        followed |= within
        return walk_back(root, most, stop_at=stop_at, stop_at_inputs_of=stop_at_inputs_of, followed=followed)
    return region, [exchange for exchange in map(collective_of, region) if exchange is not None], leaves


def _is_within(length: Node, region: list[Node], stops: set[Node]) -> bool:
    """Return whether `length` depends on `stops` or on the result of an exchange in `region`."""
    inside = set(stops)
    for node in region:
        if collective_of(node) is not None or not inside.isdisjoint(node.all_input_nodes):
            inside.add(node)
    first = min((node for node in inside if node.op != "placeholder"), default=None)
    before = ancestors(length, follow=lambda used: first is None or used > first)
    return any(not inside.isdisjoint(node.all_input_nodes) for node in before)


def _is_known_length(node: Node) -> bool:
    size = fake_value(node)
    return is_call(node, aten.sym_size.int) and isinstance(size, torch.SymInt) and not free_unbacked_symbols(size)


# Dtypes that hold every count.
_COUNT_TYPES = (torch.int32, torch.int64)


def before_reshape(counts: Node) -> Node:
    """Return the counts before reshapes and exact casts, since a rank may read its own sizes there."""

    def keeps_counts(step: Node) -> bool:
        if not has_trait(step, Trait.CAST):
            return has_trait(step, Trait.RESHAPE)
        before, after = fake_value(step.all_input_nodes[0]), fake_value(step)
        is_exact = before.dtype in _COUNT_TYPES and after.dtype in _COUNT_TYPES
        return is_exact and bool(before.device == after.device)

    return origin(counts, passes=keeps_counts)


def check_leaves(leaves: set[Node], rows: Node) -> None:
    """Raise NotThisForm unless `leaves` are constants and sizes, with lengths that divide the number of `rows`."""
    for leaf in sorted(leaves):
        if leaf.op != "get_attr" and isinstance(fake_value(leaf), torch.Tensor):
            raise NotThisForm(
                f"it depends on {named(leaf)}, whose values are not known when the graph is compiled; expected its "
                "rows and counts, its router and the parameters of its GEMMs alone, and constants for everything "
                "else"
            )
        if is_call(leaf, aten.sym_size.int):
            number = size_expression(fake_value(rows).shape[0])
            times = sympy.cancel(number / size_expression(leaf))
            if not times.is_Integer or times <= 0:
                raise NotThisForm(
                    f"it reads the length {named(leaf)}, which does not follow from the number of its rows "
                    f"{named(rows)}; expected the number of these rows, or a divisor of it"
                )
