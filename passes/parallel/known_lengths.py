"""Sizes that the graph has already: read there, where computing them again would hide what they are.

An exchange cannot go while anything else reads its result, and a length of it is enough. Where another node gives the
same size, and no exchange of the block brought what that is computed from, it is read instead.

`slots.reshape(-1, width)` of a number of slots that only a run tells is captured as a quotient of the number of all
elements, which counts the slots more often than any number of experts or ranks would.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

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
    """Let what stands outside `block` read sizes that are known without its exchanges, as far as it compares none."""
    region, brought = set(block.region), _brought(block)
    known: dict[sympy.Expr, Node] = {}
    for node in list(graph.nodes):
        if not isinstance(fake_value(node), torch.SymInt):
            continue
        size = size_expression(node)
        if node not in brought:
            known.setdefault(size, node)
        elif is_call(node, aten.sym_size.int) and size in known:
            # An assertion that two sizes are equal keeps reading both.
            for user in [user for user in node.users if user not in region and not _compares_sizes(user)]:
                user.replace_input_with(node, known[size])
    for node in sorted(brought - region, reverse=True):
        if is_call(node, aten.sym_size.int) and not node.users and node in graph.nodes:
            erase_unread(graph, node)


def _compares_sizes(node: Node) -> bool:
    return has_trait(node, Trait.COMPARE) and not isinstance(fake_value(node), torch.Tensor)


def read_whole_quotients(graph: Graph) -> None:
    """Read `a` for `(a * b * c) // (b * c)`, where the graph has `a`, which only a run tells."""
    for node in graph.find_nodes(op="call_function", target=operator.floordiv):
        product, number = node.args
        if not (isinstance(product, Node) and isinstance(number, int) and number > 0 and _only_a_run_tells(product)):
            continue
        quotient = (size_expression(product) / number).expand()
        found = next((factor for factor in _factors(product) if size_expression(factor) == quotient), None)
        if found is not None:
            node.replace_all_uses_with(found)
            erase_unread(graph, node)


def _only_a_run_tells(node: Node) -> bool:
    env = fake_value(node).node.shape_env
    return any(map(env.is_unbacked_symint, size_expression(node).free_symbols))


def _factors(product: Node) -> Iterator[Node]:
    return ancestors(product, stop=lambda node: not is_call(node, operator.mul))


def _brought(block: ParallelBlock) -> set[Node]:
    """Return the nodes that depend on the results of the block's exchanges, and not on its own result."""
    exchanges = [exchange.node for exchange in block.exchanges]
    return set(descendants(*exchanges, follow=lambda user: user is not block.sink)) - {block.sink}
