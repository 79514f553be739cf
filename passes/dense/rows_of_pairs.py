"""Compute the values of dense experts for selected pairs only: as rows, sorted by expert.

A value [experts, positions, features], with dimensions in any order, becomes [rows, features]. Its operands are traced
back, operation by operation (`pair_layouts.py`): values without experts are looked up by the position of each row,
values without positions by its expert, and values that cannot be traced by both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.dense.dense_gemms import DenseGemm, dense_gemm
from moepass.passes.dense.pair_layouts import Pairs, broadcast_operand, feature_dims, operand_layouts
from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression, size_expressions
from moepass.passes.graph.nodes import fake_value, map_nodes, several, tensor_inputs
from moepass.passes.graph.not_this_form import refuse
from moepass.passes.loops.branches import grouped_gemm_for
from moepass.passes.ops.arguments import all_arguments, dims_along, permutation, positional, with_dims
from moepass.passes.ops.traits import Trait, base_operation, draws_random_numbers, has_trait, mutates
from moepass.passes.ops.walk import ancestors, first_inputs, walk
from moepass.passes.rows.row_layout import Layout, features_in, is_features
from moepass.passes.rows.rows_in_front import fixed_sizes

aten = torch.ops.aten

_MODULE_KEYS = ("nn_module_stack", "stack_trace")


@dataclasses.dataclass(frozen=True)
class PairRows:
    """The `count` (a number or a node) of rows that are computed, and the expert and position of each, int64 [rows].

    `ends` are the ends of the experts' rows, int32 [experts]. `are_all` means all pairs, sorted by expert.
    """

    count: Any
    experts: Node
    positions: Node
    ends: Node
    are_all: bool = False


class RowsOfPairs:
    """A writer of values for `rows`, which are some of `pairs`."""

    def __init__(self, writer: GraphWriter, pairs: Pairs, rows: PairRows) -> None:
        self.writer, self.pairs, self.rows = writer, pairs, rows
        # The grouped GEMM that replaces each GEMM.
        self.gemms: dict[Node, Node] = {}
        self._cache: dict[tuple[Node, Layout], Node] = {}

    def write(self, node: Node, layout: Layout) -> Node:
        """Return [rows, features] of `node`, which has `layout`. Raises NotThisForm."""
        key = (node, layout)
        if key not in self._cache:
            self._cache[key] = written = self._write(node, layout)
            if size_expressions(fake_value(written).shape) != size_expressions(self._shape(layout)):
                refuse(node, "has another shape for the chosen rows")
            if fake_value(written).dtype != fake_value(node).dtype:
                refuse(node, "has another type for the chosen rows")
        return self._cache[key]

    def reaches_gemms(self, node: Node, layout: Layout) -> bool:
        """Return whether known operations lead from `node` back to a GEMM of the experts."""
        return any(self._gemm(*source) is not None for source in self._sources(node, layout))

    def _sources(self, node: Node, layout: Layout) -> Iterator[tuple[Node, Layout]]:
        """Yield `node`, its operands with rows, and so on up to those without experts or positions, with layouts."""

        def operands(value: tuple[Node, Layout]) -> Iterable[tuple[Node, Layout]]:
            source, of_source = value
            if not self.pairs.has_pairs(of_source) or mutates(source) or draws_random_numbers(source):
                return ()
            layouts = operand_layouts(source, of_source, self.pairs) or {}
            # Operands without rows are equal for all rows.
            return ((used, each) for used, each in layouts.items() if each.has_rows and self.pairs.are_complete(each))

        return walk([(node, layout)], operands)

    def _gemm(self, node: Node, layout: Layout) -> DenseGemm | None:
        gemm = dense_gemm(node)
        return gemm if gemm is not None and gemm.kind != "summed" and gemm.result_layout == layout else None

    def _write(self, node: Node, layout: Layout) -> Node:
        if not self.pairs.are_complete(layout):
            refuse(node, "splits experts or tokens")
        gemm = self._gemm(node, layout)
        if gemm is not None:
            return self._grouped_gemm(gemm, layout)
        # Values without experts or positions are smaller to look up than `node`.
        if self.pairs.has_pairs(layout) and any(
            self._gemm(*source) is not None or not self.pairs.has_pairs(source[1])
            for source in self._sources(node, layout)
        ):
            return self._repeat(node, layout)
        return self._look_up(node, layout)

    def _look_up(self, node: Node, layout: Layout) -> Node:
        """Return the elements of `node` for each row, by its expert, its position, or both."""
        writer, all_pairs = self.writer, [*self.pairs.of_experts, *self.pairs.of_positions]
        split = [each for factor in layout.factors for each in (all_pairs if factor.share == () else [factor])]
        source = self._viewed(node, [self._size(factor.size, node) for factor in split])
        dims = range(len(split))
        expert_dims = [dim for dim in dims if split[dim] in self.pairs.of_experts]
        position_dims = [dim for dim in dims if split[dim].is_rows and dim not in expert_dims]
        position_dims.sort(key=lambda dim: split[dim].share or ())
        has_pairs = bool(position_dims and expert_dims)
        if has_pairs:
            self._check_not_computed(node)
        is_sorted = has_pairs and self.rows.are_all
        order = [*expert_dims, *position_dims] if is_sorted else [*position_dims, *expert_dims]
        source = writer.permuted(source, [*order, *(dim for dim in dims if not split[dim].is_rows)])
        if is_sorted:
            return writer.viewed(source, self._shape(layout))
        shape = [writer.size(source, dim) for dim in dims]
        if len(position_dims) > 1:
            positions = self._size(self.pairs.positions, self.rows.positions)
            source = writer.viewed(source, [positions, *shape[len(position_dims) :]])
        numbers = [self.rows.positions] * bool(position_dims) + [self.rows.experts] * bool(expert_dims)
        return writer.viewed(writer.emit(aten.index.Tensor, source, numbers), self._shape(layout))

    def _check_not_computed(self, node: Node) -> None:
        """Raise NotThisForm if `node` seems to depend on a GEMM of the same experts."""

        def is_of_experts(used: Node) -> bool:
            tensors = [value for value in several(fake_value(used)) if isinstance(value, torch.Tensor)]
            return any(size_expression(size) == self.pairs.experts for value in tensors for size in value.shape)

        for gemm in map(dense_gemm, ancestors(node, follow=is_of_experts)):
            if gemm is not None and gemm.pairs == self.pairs:
                refuse(node, "is computed from results of all experts, and may mix pairs of token and expert")

    def _viewed(self, node: Node, shape: list[Any]) -> Node:
        """Return `node` in another shape: a tensor that it is a view of, or a new view."""
        wanted = size_expressions(shape)
        _, *viewed = first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY))
        same = (source for source in viewed if size_expressions(fake_value(source).shape) == wanted)
        return next(same, None) or self.writer.viewed(node, shape)

    def _size(self, size: sympy.Expr, node: Node) -> Any:
        earlier = (each for each in node.graph.nodes if each < self.rows.positions)
        number = self.writer.find_size(size, itertools.chain([node], node.all_input_nodes, earlier))
        return refuse(node, f"has a size of {size}, which is not found in the graph") if number is None else number

    def _grouped_gemm(self, gemm: DenseGemm, layout: Layout) -> Node:
        writer = self.writer
        rows = writer.viewed(self.write(gemm.rows, gemm.rows_layout), [self.rows.count, gemm.width])
        product = self.product(gemm, rows)
        self.gemms[gemm.node] = product
        product = writer.viewed(product, self._shape(layout))
        if gemm.added is None:
            return product
        return writer.emit(aten.add.Tensor, product, self._operand(gemm.added, layout))

    def product(self, gemm: DenseGemm, rows: Node) -> Node:
        """Return `rows` [rows, in] times the weights of their experts."""
        weights = self.writer.permuted(gemm.weights, [0, gemm.inner, 3 - gemm.inner])
        product = self.writer.emit(grouped_gemm_for(rows, weights), rows, weights, self.rows.ends)
        # The block's name is that of the module that multiplies.
        product.meta.update({key: gemm.node.meta[key] for key in _MODULE_KEYS if key in gemm.node.meta})
        return product

    def _operand(self, used: Node, layout: Layout) -> Node:
        """Return `used` in a shape that broadcasts with the rows of a result that has `layout`."""
        front = len(layout.dimensions) - fake_value(used).dim()
        operand_layout = broadcast_operand(layout, fake_value(used).shape)
        dims = [dim - front for dim in feature_dims(layout)]
        sizes = [int(features_in(operand_layout.dimensions[dim])) for dim in dims if dim >= 0]
        if not operand_layout.has_rows:
            return self.writer.viewed(used, sizes)
        ones = [1] * (len(dims) - len(sizes))
        return self._viewed(self.write(used, operand_layout), [self.rows.count, *ones, *sizes])

    def _repeat(self, node: Node, layout: Layout) -> Node:
        writer = self.writer
        operands = operand_layouts(node, layout, self.pairs)
        if operands is None or mutates(node) or draws_random_numbers(node):
            refuse(node, "is not an operation that is known to keep pairs of token and expert separate")
        if has_trait(node, Trait.JOIN):
            return self._join(node, layout, operands)
        source, source_layout = next(iter(operands.items()))
        if has_trait(node, Trait.COPY, Trait.RESHAPE, Trait.REPEAT):
            return self._viewed(self.write(source, source_layout), self._shape(layout))
        if has_trait(node, Trait.EXPAND):
            return writer.emit(aten.expand.default, self._operand(source, layout), self._shape(layout))
        if has_trait(node, Trait.PERMUTE):
            return self._permute(node, layout, source, source_layout)
        if has_trait(node, Trait.ITEM):
            return self._item(node, source, source_layout)
        if has_trait(node, Trait.ELEMENTWISE):
            if len(tensor_inputs(node)) < len(node.all_input_nodes):
                refuse(node, "computes with a size")
            args, kwargs = map_nodes((node.args, node.kwargs), lambda used: self._operand(used, layout))
            return writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        if has_trait(node, Trait.ALONG):
            return self._along(node, source_layout, self.write(source, source_layout))
        refuse(node, "is not an operation that moepass repeats for chosen rows")

    def _join(self, node: Node, layout: Layout, operands: dict[Node, Layout]) -> Node:
        if not all(each.has_rows for each in operands.values()):
            refuse(node, "joins rows with a value that is equal for all rows")
        arguments = all_arguments(node)
        rows = {used: self.write(used, each) for used, each in operands.items()}
        tensors = map_nodes(list(arguments["tensors"]), rows.__getitem__)
        dim = feature_dims(layout).index(arguments["dim"] % len(layout.dimensions))
        return self.writer.emit(node.target, tensors, 1 + dim)  # type: ignore[arg-type]

    def _permute(self, node: Node, layout: Layout, source: Node, source_layout: Layout) -> Node:
        order, source_dims = permutation(node), feature_dims(source_layout)
        dims = [1 + source_dims.index(order[dim]) for dim in feature_dims(layout)]
        rows = self.write(source, source_layout)
        # Moving dimensions of size 1, as einsum does, needs no permutation.
        moved = [dim for dim in dims if fake_value(rows).shape[dim] != 1]
        if moved == sorted(moved):
            return self._viewed(rows, self._shape(layout))
        return self.writer.emit(aten.permute.default, rows, [0, *dims])

    def _item(self, node: Node, source: Node, source_layout: Layout) -> Node:
        producer = node.args[0]
        assert isinstance(producer, Node)
        rows = self.write(source, source_layout)
        if has_trait(producer, Trait.NORM):
            args, kwargs = map_nodes((producer.args, producer.kwargs), lambda used: rows if used is source else used)
            return self.writer.getitem(self.writer.emit(producer.target, *args, **kwargs), 0)  # type: ignore[arg-type]
        assert has_trait(producer, Trait.SPLIT)
        return self.writer.getitem(self._along(producer, source_layout, rows), node.args[1])  # type: ignore[arg-type]

    def _along(self, node: Node, layout: Layout, rows: Node) -> Node:
        dims = dims_along(node, len(layout.dimensions)) or []
        if not all(is_features(layout.dimensions[dim]) for dim in dims):
            if base_operation(node) == "slice":
                return rows  # all of them
            refuse(node, "works along experts or tokens")
        arguments = with_dims(node, [1 + feature_dims(layout).index(dim) for dim in dims])
        arguments[next(iter(arguments))] = rows
        args, kwargs = positional(node, arguments)
        return self.writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _shape(self, layout: Layout) -> list[Any]:
        sizes = (features_in(layout.dimensions[dim]) for dim in feature_dims(layout))
        return [self.rows.count, *fixed_sizes(sizes)]
