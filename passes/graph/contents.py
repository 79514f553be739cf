"""Analysis of which operations read contents of their inputs, not only sizes, and which contents are constant."""

from __future__ import annotations

import itertools
import operator

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, is_call, nodes_in
from moepass.passes.ops.arguments import is_arange, named_arguments
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import first_inputs

aten = torch.ops.aten


def is_uninitialised(node: Node) -> bool:
    """Return whether the node's result is uninitialised memory."""
    return has_trait(node, Trait.UNINITIALISED)


def inputs_read(node: Node) -> tuple[list[Node], list[Node]]:
    """Return two lists: the inputs whose contents `node` reads, and the inputs whose size alone it reads."""
    unread = _unread_argument(node)
    if unread is None:
        return list(node.all_input_nodes), []
    # The same node may also be another argument, whose contents are read.
    remaining = [value for value in named_arguments(node).values() if value is not unread]
    read = list(dict.fromkeys(used for value in remaining for used in nodes_in(value)))
    return read, [] if unread in read else [unread]


def _unread_argument(node: Node) -> Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    first = node.args[0]
    return first if has_trait(node, Trait.SIZES_ONLY, Trait.REFILL) or _overwrites(node, first) else None


def _overwrites(node: Node, first: Node) -> bool:
    """Return whether `node` overwrites all elements of `first`."""
    arguments = named_arguments(node)
    if is_call(node, aten.copy.default, aten.bernoulli.p, aten.uniform.default, aten.normal_functional.default):
        return True
    if is_call(node, aten.slice_scatter.default):
        return arguments.get("step", 1) == 1 and _have_equal_sizes(first, arguments["src"])
    if is_call(node, aten.index_put.default) and not arguments.get("accumulate", False):
        indices = arguments["indices"]
        return len(indices) == 1 and _is_permutation_index(indices[0], first)
    if is_call(node, aten.index_copy.default):
        return arguments["dim"] == 0 and _is_permutation_index(arguments["index"], first)
    if is_call(node, aten.scatter.src) and fake_value(first).dim() == 1:
        return _is_permutation_index(arguments["index"], first)
    return False


def _have_equal_sizes(left: Node, right: Node) -> bool:
    return str(tuple(fake_value(left).shape)) == str(tuple(fake_value(right).shape))


def _is_permutation_index(index: Node, written: Node) -> bool:
    """Return whether `index` has each position of the first dimension of `written` once, like the order of a sort."""
    value, target = fake_value(index), fake_value(written)
    if value.dim() != 1 or target.dim() == 0 or str(value.shape[0]) != str(target.shape[0]):
        return False

    def has_same_numbers(step: Node) -> bool:
        is_same = has_trait(step, Trait.COPY, Trait.CAST, Trait.RESHAPE)
        return is_same and _have_equal_sizes(step, step.all_input_nodes[0])

    # Smaller integer types may not represent all positions.
    integers = itertools.takewhile(
        lambda step: fake_value(step).dtype in (torch.int64, torch.int32), first_inputs(index, has_same_numbers)
    )
    return any(map(_is_order, integers))


def _is_order(node: Node) -> bool:
    """Return whether `node` has the positions from a one-dimensional sort, or their inverse."""
    if is_call(node, aten.argsort.default, aten.argsort.stable):
        return True
    if is_call(node, operator.getitem) and node.args[1] == 1:
        return is_call(node.args[0], aten.sort.default, aten.sort.stable)
    if is_call(node, aten.index_put.default) and is_uninitialised(node.args[0]):  # type: ignore[arg-type]
        _, unread = inputs_read(node)
        values = named_arguments(node)["values"]
        return bool(unread) and is_arange(values) and _have_equal_sizes(values, node)
    return False
