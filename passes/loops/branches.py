"""Follow the branches of a loop over experts in lockstep, and write what all of them compute, once, for all rows.

All branches apply the same operations, each to different rows and with different weights. This module follows the
branches back from the node that joins them. The corresponding nodes of all branches have one of these kinds:

    rows       pieces of one tensor, and values computed from them row by row: together [rows of all branches, ..]
    by expert  weights, and values computed from weights alone: together [experts, ..]
    shared     the same node, or the same constant, in all branches

The product of rows and weights by expert is a grouped GEMM. Other values by expert, such as a bias, are looked up for
each row. All other operations are repeated as they are, because `passes/rows` proves that they do not mix rows.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call, map_nodes, nodes_in, several
from moepass.passes.graph.source_lines import named
from moepass.passes.loops.expert_weights import FixedNodes, stacked_weights
from moepass.passes.loops.pieces import Pieces, pieces_of, rows_in
from moepass.passes.loops.repeated_matrix import multiplies_by_one_matrix, repeated_matrix
from moepass.passes.loops.row_groups import RowGroups
from moepass.passes.masks.chosen_rows import (
    Chosen,
    SortedPairs,
    chosen_by_top_k,
    masks_of_all_experts,
    masks_of_experts,
)
from moepass.passes.ops.arguments import all_arguments, dims_along, matrix_operands, permutation, positional, with_dims
from moepass.passes.ops.traits import Trait, base_operation, draws_random_numbers, has_trait, mutates
from moepass.passes.rows.equal_arguments import compute_the_same
from moepass.passes.rows.row_layout import Layout, no_rows, size_of
from moepass.passes.rows.row_rules import Layouts, RowRules, any_rows, fits
from moepass.passes.rows.rows_in_front import dim_in_front, features_behind, row_parts, rows_dim, trailing

aten = torch.ops.aten

# An expert has fewer nodes.
_MOST_STEPS = 400
_OTHER_ARGUMENTS = "has other arguments than in other branches"


@dataclasses.dataclass(frozen=True)
class RowsOfAll:
    """`node` has the rows of all branches. `layouts` are the layouts of the first branch's rows in its own node."""

    node: Node
    layouts: Layouts

    @property
    def layout(self) -> Layout:
        assert isinstance(self.layouts, Layout)
        return self.layouts


@dataclasses.dataclass(frozen=True)
class ByExpert:
    """`node` [experts, ..] has the values of all branches, one after the other."""

    node: Node


@dataclasses.dataclass(frozen=True)
class Shared:
    """One `node` that is the value in all branches."""

    node: Node


Together = RowsOfAll | ByExpert | Shared


class Branches(RowRules):
    """The `experts` branches of one loop."""

    def __init__(self, writer: GraphWriter, fixed: FixedNodes, experts: int) -> None:
        super().__init__()
        self.writer = writer
        self.experts = experts
        self.gemms: list[Node] = []
        # Whether each branch has its own weight.
        self.has_weights = False
        self.groups: RowGroups | None = None
        # If masks of experts select the rows: the chosen experts, the kind of mask, and all pairs.
        self.chosen: tuple[Chosen, bool] | None = None
        self.pairs: SortedPairs | None = None
        self._fixed = fixed
        self._results: dict[tuple[Node, ...], Together] = {}
        self._row_ids: Node | None = None

    def together(self, nodes: Sequence[Node]) -> Together:
        """Return the value of `nodes`, one of each branch, for all branches together. Raises NotThisForm."""
        key = tuple(nodes)
        if key not in self._results:
            if len(self._results) > _MOST_STEPS:
                self._refuse(key[0], "depends on more nodes than an expert has")
            self._results[key] = self._follow(key)
        return self._results[key]

    def _follow(self, nodes: tuple[Node, ...]) -> Together:
        first = nodes[0]
        if len(set(nodes)) == 1 and (self.experts > 1 or first.op == "get_attr"):
            return Shared(first)
        if all(node.op == "placeholder" for node in nodes):
            self.has_weights = True
        weights = stacked_weights(nodes, self._fixed, self.writer)
        if weights is not None:
            self.has_weights = True
            return ByExpert(weights)
        pieces = self._masked_pieces(nodes) or pieces_of(nodes)
        if pieces is not None and not self._fixed.holds(pieces.source):
            return self._rows_of_pieces(nodes, pieces)
        self._check_same_operation(nodes)
        if all(map(multiplies_by_one_matrix, nodes)):
            return self._batched_product(nodes)
        inputs = [_tensors_in(node) for node in nodes]
        if len(set(map(len, inputs))) != 1:
            self._refuse(first, "reads more or fewer values than in other branches")
        tensors = {branch_inputs[0]: self.together(branch_inputs) for branch_inputs in zip(*inputs, strict=True)}
        have_rows = any(isinstance(value, RowsOfAll) for value in tensors.values())
        if not compute_the_same(nodes, have_rows=have_rows):
            self._check_pieces(nodes)
            self._refuse(first, _OTHER_ARGUMENTS)
        if have_rows:
            return self._row_operation(nodes, tensors)
        if any(isinstance(value, ByExpert) for value in tensors.values()):
            return ByExpert(self._weight_operation(first, tensors))
        return self._common_constant(nodes)

    def _rows_of_pieces(self, nodes: tuple[Node, ...], pieces: Pieces) -> RowsOfAll:
        first = nodes[0]
        shape = fake_value(first).shape
        dims = self._row_dims(shape) if pieces.is_even else [pieces.dim]
        if not dims:
            self._refuse(first, "has another number of rows than other operands")
        layout = rows_in(shape, dims)
        rows = sympy.expand(sympy.Mul(*(factor.size for factor in row_parts(layout))))
        if self.groups is not None and (self.groups.pieces.table is None) != (pieces.table is None):
            self._refuse(first, "is split into other pieces than other operands")
        if self.groups is None:
            self.groups = RowGroups.of(pieces, first, dims, self.writer)
        elif not self.groups.fit(pieces, rows):
            self._refuse(first, "is split into other pieces than other operands")
        self._layouts[first] = layout
        return RowsOfAll(self.groups.all_rows(pieces, self._shape_of(layout), self.writer), layout)

    def _masked_pieces(self, nodes: tuple[Node, ...]) -> Pieces | None:
        """Return the pairs that `nodes` list by masks of experts, as pieces; None if they list no such pairs."""
        masked = masks_of_all_experts(nodes)
        if masked is None:
            if (masks := masks_of_experts(nodes)) is not None:
                if len({(mask.chosen, mask.is_transposed) for mask in masks}) != 1:
                    self._refuse(
                        nodes[0],
                        "and those of the other branches list rows by different expert ids, or in different orders; "
                        "expected are the ids of one router",
                    )
                numbers = [mask.expert for mask in masks]
                self._refuse(
                    nodes[0],
                    f"and those of the other branches list the rows of experts {numbers} of the "
                    f"{masks[0].chosen.experts} that a router chooses among; expected all of them, in order",
                )
            return None
        *chosen, are_tokens = masked
        if self.pairs is None:
            self.chosen, self.pairs = (masked[0], masked[1]), SortedPairs.of(masked[0], self.writer)
        if [*chosen] != [*(self.chosen or ())]:
            self._refuse(nodes[0], "lists the rows of a mask in another order than other operands")
        sizes = tuple(size_expression(fake_value(node).shape[0]) for node in nodes)
        if any(size.is_Integer for size in sizes):
            self._refuse(nodes[0], "has a constant number of rows")
        source = self.pairs.tokens if are_tokens else self.pairs.choices
        return Pieces(source, 0, sizes, table=self.pairs.ends, are_complete=True)

    def _row_dims(self, shape: Sequence[Any]) -> list[int]:
        """Return the row dimensions of an even piece: all but the last, or as many as give the rows of a group."""
        if self.groups is None:
            return list(range(max(1, len(shape) - 1)))
        for number in range(len(shape), 0, -1):
            if sympy.expand(sympy.Mul(*map(size_expression, shape[:number]))) == self.groups.sizes[0]:
                return list(range(number))
        return []

    def _common_constant(self, nodes: tuple[Node, ...]) -> Shared:
        """Return a constant that every branch computes. Raises NotThisForm for other nodes."""
        first = nodes[0]
        if first.op != "call_function" or draws_random_numbers(first):
            self._refuse(first, "is neither the same in all branches nor a piece of rows")
        if not isinstance(fake_value(first), (torch.Tensor, tuple, list)):
            self._refuse(first, "is a size of one branch")
        return Shared(first)

    def _check_same_operation(self, nodes: tuple[Node, ...]) -> None:
        """Raise NotThisForm unless `nodes` do the same, except for their numbers of rows."""
        first = nodes[0]
        if all(node.op == "placeholder" for node in nodes):
            if (tied := next((node for node in nodes if nodes.count(node) > 1), None)) is not None:
                self._refuse(tied, "is a weight of several experts")
            self._refuse(first, "is no weight, or has another shape or type than in other branches")
        for node in nodes[1:]:
            if (node.op, node.target) != (first.op, first.target) or node.op != "call_function":
                self._refuse(node, f"is another operation than {named(first)} in the first branch")
        if mutates(first) or draws_random_numbers(first):
            self._refuse(first, "writes to its inputs or draws random numbers")
        texts = {str(map_nodes((node.args, node.kwargs), _as_dot)) for node in nodes}
        if len(texts) != 1 and base_operation(first) == "eq":
            if chosen_by_top_k(first.args[0]) is not None:
                self._refuse(first, "compares ids of experts, but does not select rows or weights by them alone")
            self._refuse(first, "compares something other than the ids [tokens, k] that torch.topk gives")
        if len(texts) != 1 and not self._has_size_arguments(first):
            self._check_pieces(nodes)
            self._refuse(first, _OTHER_ARGUMENTS)

    def _check_pieces(self, nodes: tuple[Node, ...]) -> None:
        """Raise NotThisForm if `nodes` may leave out rows, or take pieces in another order."""
        sources = {node.args[0] for node in nodes if is_call(node, operator.getitem)}
        if len(sources) == 1 and has_trait(next(iter(sources)), Trait.SPLIT):
            self._refuse(
                nodes[0],
                "splits rows into pieces, but some are not combined, or in another order; "
                "combine the results of all experts in the order of their pieces",
            )
        if base_operation(nodes[0]) != "slice":
            return
        arguments = [all_arguments(node) for node in nodes]
        sizes = [fake_value(node).shape[values["dim"]] for node, values in zip(nodes, arguments, strict=True)]
        if len({values["self"] for values in arguments}) == 1 and not all(isinstance(size, int) for size in sizes):
            self._refuse(
                nodes[0],
                "and those of the other branches are not known to be consecutive slices of all rows; if each starts at "
                "the end of the previous one, and end = start + n with a count n that the host reads, add "
                "torch._check(end >= start) and torch._check(end <= rows.shape[0]) before each rows[start:end]",
            )

    def _has_size_arguments(self, node: Node) -> bool:
        """Return whether the arguments contain sizes; `_check_results` compares those of the results."""
        return has_trait(node, Trait.RESHAPE, Trait.FILL, Trait.EXPAND) or base_operation(node) == "slice"

    def _row_operation(self, nodes: tuple[Node, ...], tensors: dict[Node, Together]) -> RowsOfAll:
        node = nodes[0]
        base = base_operation(node)
        if has_trait(node, Trait.ITEM):
            (source,) = tensors.values()
            assert isinstance(source, RowsOfAll)
            index = cast("int", node.args[1])
            self._layouts[node] = layout = several(source.layouts)[index]
            return RowsOfAll(self.writer.getitem(source.node, index), layout)
        self._check_operator(node)
        self._layouts[node] = layouts = self.with_rows(node)
        self._check_results(nodes, layouts)
        if base in ("mm", "addmm"):
            return RowsOfAll(self._gemm_product(node, tensors), layouts)
        if node in self._whole:
            return dataclasses.replace(self._only_rows(tensors), layouts=layouts)
        return RowsOfAll(self._repeated(node, base, tensors, layouts), layouts)

    def _batched_product(self, nodes: tuple[Node, ...]) -> RowsOfAll:
        """Return the products of batches of rows with the matrix of their branch."""
        node = nodes[0]
        rows = self.together([cast("Node", gemm.args[0]) for gemm in nodes])
        weights = self.together([repeated_matrix(gemm.args[1]) for gemm in nodes])
        if not isinstance(rows, RowsOfAll) or isinstance(weights, RowsOfAll):
            self._refuse(node, "has no rows on its left, or rows on its right")
        *batch, features = rows.layout.dimensions
        if any(factor.is_rows for factor in features):
            self._refuse(node, "multiplies and sums over rows")
        width = fake_value(node).shape[-1]
        self._layouts[node] = layout = Layout((*batch, *no_rows([width]).dimensions))
        self._check_results(nodes, layout)
        return RowsOfAll(self._product(node, rows, weights), layout)

    def _looked_up(self, node: Node, layout: Layout, arguments: dict[str, Any]) -> Layout:
        """Return the layout of a lookup, which may be in a tensor without rows, with several indices of each row."""
        start, indices = _lookup_indices(node)
        layouts = [self._layout(index) for index in indices]
        are_rows = all(
            by_row == layouts[0]
            and by_row.is_by_row
            and len(by_row.dimensions) == 1
            and fake_value(index).dtype is torch.int64
            for index, by_row in zip(indices, layouts, strict=True)
        )
        if not indices or not are_rows or layout.has_rows or len(indices) + start == 1:
            return super()._looked_up(node, layout, arguments)
        dimensions = layout.dimensions
        if any(dimension != () for dimension in dimensions[:start]):
            self._refuse(node, "looks up several features of each row")
        return Layout((*dimensions[:start], *layouts[0].dimensions, *dimensions[start + len(indices) :]))

    def _looked_up_rows(self, node: Node, tensors: dict[Node, Together]) -> Node:
        """Return the values that all rows look up in a tensor that all branches share."""
        start, indices = _lookup_indices(node)
        source = cast("Node", node.args[0])
        have_rows = all(isinstance(tensors[index], RowsOfAll) for index in indices)
        if not isinstance(tensors[source], Shared) or not have_rows:
            self._refuse(node, "looks up values of each expert, or with indices of each expert")
        shape = [self.writer.size(source, dim) for dim in range(start, fake_value(source).dim())]
        table = self.writer.viewed(tensors[source].node, shape)
        return self.writer.emit(aten.index.Tensor, table, [tensors[index].node for index in indices])

    def _check_operator(self, node: Node) -> None:
        super()._check_operator(node)
        sizes = [used for used in node.all_input_nodes if not isinstance(fake_value(used), (torch.Tensor, tuple, list))]
        if sizes and not self._has_size_arguments(node):
            self._refuse(node, "computes with the number of rows")

    def _check_results(self, nodes: tuple[Node, ...], layouts: Layouts) -> None:
        """Raise NotThisForm unless all branches have results of this layout, with the same features and types."""
        node = nodes[0]
        assert self.groups is not None
        if not any_rows(layouts):
            self._refuse(node, "computes one value from all rows")
        for branch, branch_node in enumerate(nodes):
            values = several(fake_value(branch_node))
            for layout, value, first_value in zip(several(layouts), values, several(fake_value(node)), strict=True):
                if layout is None:
                    continue
                if not fits(layout, first_value):
                    self._refuse(node, "returns rows in dimensions that cannot be followed")
                for dimension, size in zip(layout.dimensions, value.shape, strict=True):
                    if size_expression(size) != self._size_in_branch(size_of(dimension), dimension, branch):
                        self._refuse(branch_node, f"returns rows with other features than {named(node)}")
                if first_value.dtype != value.dtype:
                    self._refuse(branch_node, f"returns another type than {named(node)}")

    def _size_in_branch(self, size: sympy.Expr, dimension: Any, branch: int) -> sympy.Expr:
        assert self.groups is not None
        if self.groups.is_even or not any(factor.is_rows for factor in dimension):
            return size
        features = sympy.Mul(*(factor.size for factor in dimension if not factor.is_rows))
        return sympy.expand(features * self.groups.sizes[branch])

    def _only_rows(self, tensors: dict[Node, Together]) -> RowsOfAll:
        return next(value for value in tensors.values() if isinstance(value, RowsOfAll))

    def _gemm_product(self, node: Node, tensors: dict[Node, Together]) -> Node:
        left, right, added = matrix_operands(node)
        rows, weights = tensors[left], tensors[right]
        if not isinstance(rows, RowsOfAll) or isinstance(weights, RowsOfAll):
            self._refuse(node, "has no rows on its left, or rows on its right")
        product = self._product(node, rows, weights)
        if added is None:
            return product
        arguments = all_arguments(node)
        if arguments["beta"] != 1 or arguments["alpha"] != 1:
            self._refuse(node, "has a factor `alpha` or `beta`")
        return self.writer.emit(aten.add.Tensor, product, self._operand(added, tensors, 1))

    def _product(self, node: Node, rows: RowsOfAll, weights: ByExpert | Shared) -> Node:
        """Return rows [rows, in] times the weights [in, out] of their experts, or times weights that all share."""
        assert self.groups is not None
        *middle, features = features_behind(rows.layout)
        if any(size != 1 for size in middle):
            self._refuse(node, "multiplies several rows of features for each row")
        matrix = self.writer.viewed(rows.node, [self.groups.total, features])
        if isinstance(weights, Shared):
            product = self.writer.emit(aten.mm.default, matrix, weights.node)
        else:
            gemm = grouped_gemm_for(matrix, weights.node)
            product = self.writer.emit(gemm, matrix, weights.node, self.groups.ends(self.writer))
            self.gemms.append(product)
        return self.writer.viewed(product, [self.groups.total, *middle, fake_value(product).shape[1]])

    def _operand(self, used: Node, tensors: dict[Node, Together], behind: int) -> Node:
        """Return `used` for all rows, in a shape that broadcasts with `behind` dimensions of features."""
        value = tensors[used]
        if isinstance(value, RowsOfAll):
            return value.node
        shape = trailing(fake_value(used).shape, behind)
        if isinstance(value, Shared):
            return self.writer.viewed(value.node, shape) if fake_value(used).dim() > behind else value.node
        by_row = self.writer.emit(aten.index.Tensor, value.node, [self.row_ids()])
        return self.writer.viewed(by_row, [self.writer.size(by_row, 0), *[1] * (behind - len(shape)), *shape])

    def row_ids(self) -> Node:
        """Return the expert of each row."""
        assert self.groups is not None
        if self._row_ids is None:
            self._row_ids = self.groups.expert_of_each_row(self.writer)
        return self._row_ids

    def _repeated(self, node: Node, base: str, tensors: dict[Node, Together], layouts: Layouts) -> Node:
        """Return the result of the same operation on the rows of all branches, which are the first dimension."""
        writer = self.writer
        if has_trait(node, Trait.RESHAPE) or base == "expand":
            assert isinstance(layouts, Layout)
            rows, shape = self._only_rows(tensors).node, self._shape_of(layouts)
            return writer.emit(aten.expand.default, rows, shape) if base == "expand" else writer.viewed(rows, shape)
        if has_trait(node, Trait.PERMUTE):
            return self._permuted_rows(node, self._only_rows(tensors))
        if base == "index":
            looked_up = self._looked_up_rows(node, tensors)
            if not isinstance(layouts, Layout) or not self._has_shape(fake_value(looked_up), layouts):
                self._refuse(node, "returns other sizes for the rows of all experts together")
            return looked_up
        if any(isinstance(value, ByExpert) for value in tensors.values()) and not has_trait(node, Trait.ELEMENTWISE):
            self._refuse(node, "reads a value of each expert, but is not elementwise")
        layout = several(layouts)[0]
        assert layout is not None
        if has_trait(node, Trait.ELEMENTWISE):
            behind = len(features_behind(layout))
            operands = {used: self._operand(used, tensors, behind) for used in tensors}
            args, kwargs = map_nodes((node.args, node.kwargs), operands.__getitem__)
        else:
            args, kwargs = self._along_features(node, base, tensors)
        written = writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        values = several(fake_value(written))
        for row_layout, value, branch_value in zip(several(layouts), values, several(fake_value(node)), strict=True):
            if row_layout is not None and not self._has_shape(value, row_layout):
                self._refuse(node, "returns other sizes for the rows of all experts together")
            self._check_type(node, branch_value, value)
        return written

    def _check_type(self, node: Node, single: torch.Tensor, together: torch.Tensor) -> None:
        """Raise NotThisForm if the values of all experts have another dtype than those of one.

        A number does not change the dtype of the rows that it multiplies, but the tensor of all experts' numbers may.
        """
        if single.dtype != together.dtype:
            self._refuse(node, f"returns {single.dtype} in a branch, but {together.dtype} for all experts together")

    def _along_features(self, node: Node, base: str, tensors: dict[Node, Together]) -> tuple[Any, Any]:
        """Return the arguments of an operation along features, which are the last dimension of all rows together."""
        if has_trait(node, Trait.PAD, Trait.NORM):
            args, kwargs = map_nodes((node.args, node.kwargs), lambda used: tensors[used].node)
            return args, kwargs
        if not has_trait(node, Trait.ALONG, Trait.TOGETHER) and base != "index_select":
            self._refuse(node, "is not an operation that moepass can compute for all experts together")
        source = self._only_rows(tensors).layout
        if base == "stack":
            source = Layout((*source.dimensions, ()))
        dims = dims_along(node, len(source.dimensions))
        if dims is None:
            self._refuse(node, "operates on all dimensions")
        arguments = with_dims(node, [dim_in_front(source, dim) for dim in dims])
        return positional(node, map_nodes(arguments, lambda used: tensors[used].node))

    def _permuted_rows(self, node: Node, rows: RowsOfAll) -> Node:
        behind = [dim for dim in permutation(node) if dim > rows_dim(rows.layout)]
        order = [0, *(dim_in_front(rows.layout, dim) for dim in behind)]
        layout = self._layouts[node]
        assert isinstance(layout, Layout)
        features_behind(layout)  # raises if features are in front of the rows
        return rows.node if order == sorted(order) else self.writer.emit(aten.permute.default, rows.node, order)

    def _has_shape(self, value: torch.Tensor, layout: Layout) -> bool:
        return [*map(size_expression, value.shape)] == [*map(size_expression, self._shape_of(layout))]

    def _shape_of(self, layout: Layout) -> list[Any]:
        assert self.groups is not None
        return [self.groups.total, *features_behind(layout)]

    def _weight_operation(self, node: Node, tensors: dict[Node, Together]) -> Node:
        """Return the result of a branch's operation on its weights, for the weights [experts, ..] of all experts."""
        base, writer = base_operation(node), self.writer
        (first, *operands_after) = tensors.values()
        if base == "getitem":
            return writer.getitem(first.node, node.args[1])  # type: ignore[arg-type]
        value = fake_value(node)
        if has_trait(node, Trait.CAST, Trait.COPY):
            return writer.emit(node.target, first.node, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
        if has_trait(node, Trait.PERMUTE):
            return writer.emit(aten.permute.default, first.node, [0, *(dim + 1 for dim in permutation(node))])
        if has_trait(node, Trait.RESHAPE):
            return writer.viewed(first.node, [self.experts, *value.shape])
        if has_trait(node, Trait.SLICE, Trait.SPLIT) and not operands_after:
            dims = dims_along(node, fake_value(next(iter(tensors))).dim()) or []
            args, kwargs = positional(node, {**with_dims(node, [dim + 1 for dim in dims]), "self": first.node})
            return writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        if has_trait(node, Trait.ELEMENTWISE) and isinstance(value, torch.Tensor):
            operands = {used: self._aligned(used, operand, value.dim()) for used, operand in tensors.items()}
            args, kwargs = map_nodes((node.args, node.kwargs), lambda used: operands.get(used, used))
            written = writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
            self._check_type(node, value, fake_value(written))
            return written
        if any(isinstance(operand, Shared) and not self._fixed.holds(used) for used, operand in tensors.items()):
            self._refuse(node, "has the same rows in every branch, or rows that are not pieces of one tensor")
        return self._refuse(node, "computes a value from weights that moepass cannot compute for all experts at once")

    def _aligned(self, used: Node, value: Together, dims: int) -> Node:
        if not isinstance(value, ByExpert):
            return value.node
        shape = list(fake_value(used).shape)
        return self.writer.viewed(value.node, [self.experts, *[1] * (dims - len(shape)), *shape])


def grouped_gemm_for(rows: Node, weights: Node) -> Any:
    """Return the operator of a grouped GEMM that takes these operands."""
    import transformers.integrations.moe  # noqa: F401  registers the operator; takes seconds to import

    left, right = fake_value(rows), fake_value(weights)
    step = 16 // left.element_size()
    is_aligned = left.shape[1] % step == 0 and right.shape[2] % step == 0 and right.shape[1] % step == 0
    if left.dtype == torch.bfloat16 and is_aligned:
        return aten._grouped_mm.default
    return torch.ops.transformers.grouped_mm_fallback.default


def _lookup_indices(node: Node) -> tuple[int, list[Node]]:
    """Return the first indexed dimension of a lookup, and its indices; no indices if a dimension between has none."""
    if base_operation(node) != "index":
        return 0, []
    indices = list(all_arguments(node)["indices"])
    start = next((dim for dim, index in enumerate(indices) if index is not None), 0)
    while indices and indices[-1] is None:
        indices.pop()
    return start, [] if None in indices[start:] else indices[start:]


def _tensors_in(node: Node) -> list[Node]:
    used_nodes = nodes_in((node.args, node.kwargs))
    return [used for used in used_nodes if isinstance(fake_value(used), (torch.Tensor, tuple, list))]


def _as_dot(node: Node) -> str:
    return "."
