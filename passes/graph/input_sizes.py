"""Symbols of a graph that its inputs determine, and their values in a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from moepass.passes.graph.nodes import fake_value, graph_inputs


@dataclasses.dataclass(frozen=True)
class SizeSource:
    """The input that determines a size: its value, or its size in `dimension`."""

    position: int
    dimension: int | None

    def find(self, arguments: Sequence[Any]) -> Any:
        """Return the size from the inputs: a number, or a symbol if they are fake values."""
        value = arguments[self.position]
        return value if self.dimension is None else value.shape[self.dimension]

    def read(self, arguments: Sequence[Any]) -> int:
        """Return the size from the inputs of a run."""
        return int(self.find(arguments))


def size_sources(graph: Graph) -> dict[str, SizeSource]:
    """Return the source of each symbol among the inputs, without symbols that only occur in larger expressions.

    A size that was later replaced by another size, or by a constant, is also listed under its first symbol.
    """
    sources: dict[str, SizeSource] = {}
    for position, node in enumerate(graph_inputs(graph)):
        value = fake_value(node)
        if isinstance(value, torch.SymInt):
            _add(sources, value, SizeSource(position, None))
        elif isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                _add(sources, size, SizeSource(position, dimension))
    return sources


def sizes_at_capture(graph: Graph) -> dict[str, int]:
    """Return the value of each symbol of `size_sources` at capture."""
    described = [fake_value(node) for node in graph_inputs(graph)]
    sizes = {name: source.find(described) for name, source in size_sources(graph).items()}
    return {name: int(size.node.hint if isinstance(size, torch.SymInt) else size) for name, size in sizes.items()}


def _add(sources: dict[str, SizeSource], size: object, source: SizeSource) -> None:
    if isinstance(size, torch.SymInt):
        for shown in (size.node.expr, size.node._expr):
            if shown.is_symbol:
                sources.setdefault(str(shown), source)


def size_expression(size: object) -> sympy.Expr:
    """Return a size, or the value of a node that computes one, as an expression in the graph's symbols."""
    if isinstance(size, Node):
        size = fake_value(size)
    if isinstance(size, sympy.Expr):
        return size
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def size_expressions(sizes: Iterable[object]) -> list[sympy.Expr]:
    """Return `sizes` as expressions in the graph's symbols."""
    return list(map(size_expression, sizes))


def have_equal_shapes(left: Node, right: Node) -> bool:
    """Return whether two tensors have equal sizes for all values of the graph's symbols."""
    return size_expressions(fake_value(left).shape) == size_expressions(fake_value(right).shape)


def read_sizes(sources: Mapping[str, SizeSource], arguments: Sequence[Any]) -> dict[str, int]:
    """Return the sizes of a run with these arguments, by name."""
    return {name: source.read(arguments) for name, source in sources.items()}
