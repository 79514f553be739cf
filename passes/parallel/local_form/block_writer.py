"""Append operator calls with fake values to the graph of a parallel block, and compute sizes from its inputs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ops.traits import operation
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.rows.row_layout import ratio

aten = torch.ops.aten

_SIZE = "the number of its rows or tokens"
_OPERATORS: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv, CleanDiv: operator.floordiv,
    Mod: operator.mod, PythonMod: operator.mod,
}  # fmt: skip


def _in_words(arguments: Any) -> str:
    if isinstance(arguments, (list, tuple)):
        return ", ".join(map(_in_words, arguments))
    if isinstance(arguments, torch.Tensor):
        return describe_shape(arguments)
    return "a size" if isinstance(arguments, torch.SymInt) else str(arguments)


class BlockWriter(GraphWriter):
    """A writer of nodes for `block` at the insertion point of `graph`."""

    def __init__(self, graph: Graph, block: ParallelBlock) -> None:
        super().__init__(graph, block.sink)
        self.block = block
        # Only the module: refusals name the source lines of the inputs of written nodes.
        self.meta = {key: value for key, value in block.down.node.meta.items() if key == "nn_module_stack"}
        # Written nodes that have the number of this rank's rows or slots as an argument.
        self.sized: set[Node] = set()

    def _unfit(self, node: Node, arguments: Any, repeated: Node | None, error: Exception) -> str:
        ups, down = self.block.gemms[:-1], self.block.down
        begins = f"repeat {named(repeated)}" if repeated is not None else "be written"
        return (
            f"its local form cannot {begins}: {operation(node)} does not take {_in_words(arguments)}, which stand "
            "there where this rank runs its rows through all experts; expected what lies between "
            f"{' and '.join(named(up.node) for up in ups)} and {named(down.node)} to be computed row by row from their "
            "results"
        )

    def _size(self, size: Any) -> Any:
        """Return a size as a number, or as a node that computes it from the sizes of graph inputs.

        The size is not read from a tensor, for which the executor would have to leave a segment.
        """
        if not isinstance(size, torch.SymInt):
            return size
        before = (node for node in self.graph.nodes if node < self.block.sink)
        sizes = filter(lambda node: isinstance(fake_value(node), torch.SymInt), before)
        # The first node with each size.
        nodes = {str(size_expression(node)): node for node in reversed([*sizes])}
        # A multiple of the number of tokens shares the computation of that number.
        tokens = size_expression(fake_value(self.block.sink).shape[0])
        times = ratio(size.node.expr, tokens)
        if times is None or not times.is_Integer or times == 1:
            return self._expression(size.node.expr, nodes)
        return self.emit(operator.mul, self._expression(tokens, nodes), int(times))

    def _expression(self, expression: Any, nodes: dict[str, Node]) -> Any:
        if expression.is_Integer:
            return int(expression)
        if str(expression) in nodes:
            return nodes[str(expression)]
        if expression.is_Symbol:
            return self._symbol(str(expression))
        if expression.func not in _OPERATORS:
            raise NotThisForm(
                f"{_SIZE} is computed from other sizes by {expression.func.__name__}; expected sums, products, "
                "quotients and remainders"
            )
        terms = [self._expression(term, nodes) for term in expression.args]
        return functools.reduce(lambda left, right: self.emit(_OPERATORS[expression.func], left, right), terms)

    def _symbol(self, name: str) -> Node:
        for node in (*graph_inputs(self.graph), *self.block.sources.values()):
            value = fake_value(node)
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if str(size) == name:
                    return self.emit(aten.sym_size.int, node, dim)
        raise NotThisForm(
            f"{_SIZE} depends on data, as after a mask, nonzero or .item(); expected sizes of the graph's inputs, and "
            "of the values that the block exchanges"
        )

    def _inverse(self, order: Node) -> Node:
        positions = self.arange(self._size(fake_value(order).shape[0]), fake_value(order).device)
        self.sized.add(positions)
        return self.emit(aten.index_put.default, self.emit(aten.empty_like.default, order), [order], positions)
