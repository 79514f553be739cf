"""Replacement of sizes by equal sizes that are known without an exchange.

An exchange cannot be removed while a node outside the block reads its result, even if only a size of it. For
`slots.reshape(-1, width)` with an unknown number of slots, torch captures a quotient of the number of all elements.
"""

from __future__ import annotations

import operator

import sympy
import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import ancestors, descendants
from moepass.passes.parallel.match.parallel_block import ParallelBlock

aten = torch.ops.aten


def read_known_lengths(graph: Graph, block: ParallelBlock) -> None:
    """Let nodes outside `block` read sizes that do not depend on its exchanges, except in assertions of equal sizes."""
    region, exchanges = set(block.region), [exchange.node for exchange in block.exchanges]
    # Nodes that depend on the exchanges, but not through the result of the block.
    exchanged = set(descendants(*exchanges, follow=lambda user: user is not block.sink)) - {block.sink}
    known_sizes: dict[sympy.Expr, Node] = {}
    for node in list(graph.nodes):
        if not isinstance(fake_value(node), torch.SymInt):
            continue
        size = size_expression(node)
        if node not in exchanged:
            known_sizes.setdefault(size, node)
        elif is_call(node, aten.sym_size.int) and size in known_sizes:
            # An assertion of equal sizes must keep reading both.
            for user in [user for user in node.users if user not in region and not _compares_sizes(user)]:
                user.replace_input_with(node, known_sizes[size])
    for node in sorted(exchanged - region, reverse=True):
        if is_call(node, aten.sym_size.int) and not node.users and node in graph.nodes:
            erase_unread(graph, node)


def _compares_sizes(node: Node) -> bool:
    return has_trait(node, Trait.COMPARE) and not isinstance(fake_value(node), torch.Tensor)


def read_whole_quotients(graph: Graph) -> None:
    """Replace `(a * b * c) // (b * c)` by `a` if the graph has the node `a` and its value is unknown before a run."""
    for node in graph.find_nodes(op="call_function", target=operator.floordiv):
        product, number = node.args
        if not (isinstance(product, Node) and isinstance(number, int) and number > 0 and _is_unknown(product)):
            continue
        quotient = (size_expression(product) / number).expand()
        factors = ancestors(product, stop=lambda node: not is_call(node, operator.mul))
        factor = next((factor for factor in factors if size_expression(factor) == quotient), None)
        if factor is not None:
            node.replace_all_uses_with(factor)
            erase_unread(graph, node)


def _is_unknown(node: Node) -> bool:
    env = fake_value(node).node.shape_env
    return any(map(env.is_unbacked_symint, size_expression(node).free_symbols))
