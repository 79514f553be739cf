"""Compute the values of dense experts for selected pairs only: as rows, sorted by expert.

A value [experts, positions, features], with dimensions in any order, becomes [rows, features]. Its operands are traced
back, operation by operation (`pair_layouts.py`): values without experts are looked up by the position of each row,
values without positions by its expert, and values that cannot be traced by both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import sympy
import torch
from torch.fx import Node

from moepass.passes.dense.dense_gemms import DenseGemm, dense_gemm
from moepass.passes.dense.pair_layouts import (
    Pairs,
    broadcast_operand,
    feature_dims,
    features_in,
    is_features,
    operand_layouts,
)
from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, map_nodes, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.loops.branches import grouped_gemm_for
from moepass.passes.ops.arguments import all_arguments, permutation
from moepass.passes.ops.traits import Trait, base_operation, draws_random_numbers, has_trait, mutates, operation
from moepass.passes.ops.walk import ancestors, first_inputs
from moepass.passes.rows.row_layout import Layout, Part

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
        self._reaches: dict[tuple[Node, Layout], bool] = {}
        self._smaller_sources: dict[tuple[Node, Layout], bool] = {}

    def write(self, node: Node, layout: Layout) -> Node:
        """Return [rows, features] of `node`, which has `layout`. Raises NotThisForm."""
        key = (node, layout)
        if key not in self._cache:
            self._cache[key] = self._write(node, layout)
            wanted = [*map(size_expression, self._shape(layout))]
            if [*map(size_expression, fake_value(self._cache[key]).shape)] != wanted:
                self._refuse(node, "has another shape for the chosen rows")
            if fake_value(self._cache[key]).dtype != fake_value(node).dtype:
                self._refuse(node, "has another type for the chosen rows")
        return self._cache[key]

    def reaches_gemms(self, node: Node, layout: Layout) -> bool:
        """Return whether known operations lead from `node` back to a GEMM of the experts."""
        key = (node, layout)
        if key not in self._reaches:
            self._reaches[key] = False
            self._reaches[key] = self.pairs.has_pairs(layout) and (
                self._gemm(node, layout) is not None
                or any(self.reaches_gemms(*operand) for operand in self._operands(node, layout).items())
            )
        return self._reaches[key]

    def _operands(self, node: Node, layout: Layout) -> dict[Node, Layout]:
        if node.op != "call_function" or mutates(node) or draws_random_numbers(node):
            return {}
        layouts = operand_layouts(node, layout, self.pairs) or {}
        # Operands without rows are equal for all rows.
        return {used: each for used, each in layouts.items() if each.has_rows and self.pairs.are_complete(each)}

    def _reads_less(self, node: Node, layout: Layout) -> bool:
        """Return whether `node` is computed from a value without experts or positions, with less to look up."""
        key = (node, layout)
        if key not in self._smaller_sources:
            self._smaller_sources[key] = False
            operands = self._operands(node, layout)
            self._smaller_sources[key] = any(
                not self.pairs.has_pairs(each) or self._reads_less(used, each) for used, each in operands.items()
            )
        return self._smaller_sources[key]

    def _gemm(self, node: Node, layout: Layout) -> DenseGemm | None:
        gemm = dense_gemm(node)
        if gemm is None or gemm.kind == "summed" or gemm.experts != self.pairs.experts:
            return None
        return gemm if gemm.result_layout(self.pairs) == layout else None

    def _write(self, node: Node, layout: Layout) -> Node:
        if not self.pairs.are_complete(layout):
            self._refuse(node, "splits experts or tokens")
        if not self.pairs.has_pairs(layout):
            return self._look_up(node, layout)
        gemm = self._gemm(node, layout)
        if gemm is not None:
            return self._grouped_gemm(gemm, layout)
        if self.reaches_gemms(node, layout) or self._reads_less(node, layout):
            return self._repeat(node, layout)
        return self._look_up(node, layout)

    def _look_up(self, node: Node, layout: Layout) -> Node:
        """Return the elements of `node` for each row, by its expert, its position, or both."""
        writer = self.writer
        factors = [factor for dimension in layout.dimensions for factor in dimension]
        split = self._split_pairs(factors)
        source = self._viewed(node, [self._size(factor.size, node) for factor in split])
        expert_dims = [dim for dim, each in enumerate(split) if each.is_rows and each.share == self._expert_share]
        position_dims = [dim for dim, each in enumerate(split) if each.is_rows and each.share != self._expert_share]
        position_dims.sort(key=lambda dim: split[dim].share or ())
        feature_axes = [dim for dim, factor in enumerate(split) if not factor.is_rows]
        order = [*position_dims, *expert_dims, *feature_axes]
        if position_dims and expert_dims:
            self._check_not_computed(node)
        if self.rows.are_all and position_dims and expert_dims:
            order = [*expert_dims, *position_dims, *feature_axes]
            if order != sorted(order):
                source = writer.emit(aten.permute.default, source, order)
            return writer.viewed(source, self._shape(layout))
        if order != sorted(order):
            source = writer.emit(aten.permute.default, source, order)
        shape = [writer.size(source, dim) for dim in range(len(order))]
        if len(position_dims) > 1:
            source = writer.viewed(source, [self._position_count(), *shape[len(position_dims) :]])
        numbers = [self.rows.positions] * bool(position_dims) + [self.rows.experts] * bool(expert_dims)
        return writer.viewed(writer.emit(aten.index.Tensor, source, numbers), self._shape(layout))

    def _check_not_computed(self, node: Node) -> None:
        """Raise NotThisForm if `node` seems to depend on a GEMM of the same experts."""

        def is_of_experts(used: Node) -> bool:
            tensors = [value for value in several(fake_value(used)) if isinstance(value, torch.Tensor)]
            return any(size_expression(size) == self.pairs.experts for value in tensors for size in value.shape)

        for gemm in map(dense_gemm, ancestors(node, follow=is_of_experts)):
            if gemm is not None and Pairs(gemm.experts, gemm.positions) == self.pairs:
                self._refuse(node, "is computed from results of all experts, and may mix pairs of token and expert")

    def _viewed(self, node: Node, shape: list[Any]) -> Node:
        """Return `node` in another shape: a tensor that it is a view of, or a new view."""
        wanted = [*map(size_expression, shape)]
        _, *viewed = first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY))
        same = (source for source in viewed if [*map(size_expression, fake_value(source).shape)] == wanted)
        return next(same, None) or self.writer.viewed(node, shape)

    @property
    def _expert_share(self) -> Any:
        return self.pairs.of_experts[0].share

    def _split_pairs(self, factors: list[Part]) -> list[Part]:
        """Return `factors`, with all pairs split into experts and positions."""
        split: list[Part] = []
        for factor in factors:
            split += [*self.pairs.of_experts, *self.pairs.of_positions] if factor.share == () else [factor]
        return split

    def _position_count(self) -> Any:
        return self._size(self.pairs.positions, self.rows.positions)

    def _size(self, size: sympy.Expr, node: Node) -> Any:
        if size.is_Integer:
            return int(size)
        for source in (node, *node.all_input_nodes, *(each for each in node.graph.nodes if each < self.rows.positions)):
            value = fake_value(source)
            if isinstance(value, torch.SymInt) and size_expression(value) == size and source < self.writer.like:
                return source
            for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if size_expression(extent) == size:
                    return self.writer.size(source, dim)
        self._refuse(node, f"has a size of {size}, which is not found in the graph")

    def _grouped_gemm(self, gemm: DenseGemm, layout: Layout) -> Node:
        writer = self.writer
        rows = writer.viewed(self.write(gemm.rows, gemm.rows_layout(self.pairs)), [self.rows.count, gemm.width])
        product = self.product(gemm, rows)
        self.gemms[gemm.node] = product
        product = writer.viewed(product, self._shape(layout))
        if gemm.added is None:
            return product
        return writer.emit(aten.add.Tensor, product, self._operand(gemm.added, layout))

    def product(self, gemm: DenseGemm, rows: Node) -> Node:
        """Return `rows` [rows, in] times the weights of their experts."""
        weights = gemm.weights
        if gemm.inner == 2:
            weights = self.writer.emit(aten.permute.default, weights, [0, 2, 1])
        product = self.writer.emit(grouped_gemm_for(rows, weights), rows, weights, self.rows.ends)
        # The block's name is that of the module that multiplies.
        product.meta.update({key: gemm.node.meta[key] for key in _MODULE_KEYS if key in gemm.node.meta})
        return product

    def _operand(self, used: Node, layout: Layout) -> Node:
        """Return `used` in a shape that broadcasts with the rows of a result that has `layout`."""
        value = fake_value(used)
        front = len(layout.dimensions) - value.dim()
        operand_layout = broadcast_operand(layout, value.shape)
        sizes = [
            features_in(operand_layout.dimensions[dim - front]) if dim >= front else sympy.Integer(1)
            for dim in feature_dims(layout)
        ]
        if operand_layout.has_rows:
            return self._viewed(self.write(used, operand_layout), [self.rows.count, *map(int, sizes)])
        sizes = sizes[len([dim for dim in feature_dims(layout) if dim < front]) :]
        return self.writer.viewed(used, list(map(int, sizes)))

    def _repeat(self, node: Node, layout: Layout) -> Node:
        writer, base = self.writer, base_operation(node)
        operands = operand_layouts(node, layout, self.pairs)
        if operands is None or mutates(node) or draws_random_numbers(node):
            self._refuse(node, "is not an operation that is known to keep pairs of token and expert separate")
        if has_trait(node, Trait.COPY, Trait.RESHAPE, Trait.REPEAT):
            ((source, operand_layout),) = operands.items()
            return self._viewed(self.write(source, operand_layout), self._shape(layout))
        if base == "expand":
            ((source, operand_layout),) = operands.items()
            return writer.emit(aten.expand.default, self._operand(source, layout), self._shape(layout))
        if has_trait(node, Trait.PERMUTE):
            return self._permute(node, layout, *next(iter(operands.items())))
        if operation(node) == "getitem":
            return self._item(node, *next(iter(operands.items())))
        if has_trait(node, Trait.ELEMENTWISE):
            if not all(isinstance(fake_value(used), torch.Tensor) for used in node.all_input_nodes):
                self._refuse(node, "computes with a size")
            args, kwargs = map_nodes((node.args, node.kwargs), lambda used: self._operand(used, layout))
            return writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        if has_trait(node, Trait.JOIN):
            if not all(each.has_rows for each in operands.values()):
                self._refuse(node, "joins rows with a value that is equal for all rows")
            dim = all_arguments(node)["dim"] % len(layout.dimensions)
            rows = {used: self.write(used, each) for used, each in operands.items()}
            tensors = map_nodes(list(all_arguments(node)["tensors"]), rows.__getitem__)
            return writer.emit(node.target, tensors, 1 + feature_dims(layout).index(dim))  # type: ignore[arg-type]
        source, operand_layout = next(iter(operands.items()))
        if has_trait(node, Trait.ALONG):
            return self._along(node, operand_layout, self.write(source, operand_layout))
        return self._refuse(node, "is not an operation that moepass repeats for chosen rows")

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
        arguments, row_dims = all_arguments(node), feature_dims(layout)
        name = "dim" if "dim" in arguments else "dims"
        dims = arguments[name] if isinstance(arguments[name], (list, tuple)) else [arguments[name]]
        dims = [dim % len(layout.dimensions) for dim in dims]
        if any(not is_features(layout.dimensions[dim]) for dim in dims):
            if base_operation(node) == "slice":
                return rows  # all of them
            self._refuse(node, "works along experts or tokens")
        moved = [1 + row_dims.index(dim) for dim in dims]
        arguments[name] = moved if isinstance(arguments[name], (list, tuple)) else moved[0]
        (first, *_) = arguments
        arguments[first] = rows
        names = [entry.name for entry in node.target._schema.arguments if not entry.kwarg_only]  # type: ignore[union-attr]
        args = [arguments.pop(name) for name in names]
        return self.writer.emit(node.target, *args, **arguments)  # type: ignore[arg-type]

    def _shape(self, layout: Layout) -> list[Any]:
        sizes = [features_in(layout.dimensions[dim]) for dim in feature_dims(layout)]
        if not all(size.is_Integer for size in sizes):
            raise NotThisForm("it has a number of features that is only known at run time")
        return [self.rows.count, *map(int, sizes)]

    def _refuse(self, node: Node, what: str) -> NoReturn:
        raise NotThisForm(f"{named(node)} {what}")
