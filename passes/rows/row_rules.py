"""Rules for the layout of rows in the result of an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.fx import Node

from moepass.passes.graph.input_sizes import size_expression, size_expressions
from moepass.passes.graph.nodes import fake_value, nodes_in, several, tensor_inputs
from moepass.passes.graph.not_this_form import refuse
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import (
    dims_along,
    indexed_dimensions,
    is_mask,
    matrix_operands,
    named_arguments,
    permutation,
)
from moepass.passes.ops.traits import Trait, base_operation, draws_random_numbers, has_trait, is_aten, mutates
from moepass.passes.rows.row_layout import (
    Layout,
    broadcast,
    features,
    features_per_row,
    is_features,
    no_rows,
    reshaped,
    rows_first,
    size_of,
)

# Position of a number of rows in a node's arguments: the argument's name and the index in a list.
Place = tuple[str, int]
# The layout of a node's value, or of each of several values; None if unknown.
Layouts = Layout | tuple[Layout | None, ...] | None


class RowRules:
    """Rules for the layout of rows in results. Raise NotThisForm with the node if rows do not stay separate."""

    def __init__(self, starts: Iterable[Node] = ()) -> None:
        self._layouts: dict[Node, Layouts] = {start: rows_first(fake_value(start).shape) for start in starts}
        self._places: dict[Node, dict[Place, int]] = {}
        self._whole: set[Node] = set()
        # Constants with equal elements.
        self._uniform: set[Node] = set()
        # Constants with sizes that may be numbers of rows: these sizes, and the readers that need them.
        self._made: dict[Node, tuple[dict[Place, int], set[Node]]] = {}

    def with_rows(self, node: Node) -> Layouts:
        base, arguments = base_operation(node), named_arguments(node)
        if has_trait(node, Trait.ITEM):
            source, position = node.args
            return self._layouts[source][position]  # type: ignore[index]
        if has_trait(node, Trait.ELEMENTWISE):
            return self._elementwise(node)
        has_several = has_trait(node, Trait.TOGETHER, Trait.BATCHED_MATMUL)
        first = no_rows(()) if has_several else self._layout(next(iter(arguments.values())))
        if has_trait(node, Trait.RESHAPE):
            return self._view(node, first)
        if has_trait(node, Trait.EXPAND):
            return self._expanded(node, first)
        if has_trait(node, Trait.PERMUTE):
            return Layout(tuple(first.dimensions[dim] for dim in permutation(node)))
        if has_trait(node, Trait.FILL_LIKE):
            return first
        if has_trait(node, Trait.ALONG):
            return self._along(node, base, first, arguments)
        if has_trait(node, Trait.TOGETHER):
            return self._join(node, base, arguments)
        if has_trait(node, Trait.NORM):
            return self._norm(node, first, arguments)
        if has_trait(node, Trait.GROUP_NORM):
            return self._group_norm(node, first, arguments)
        if has_trait(node, Trait.LOOKUP):
            return self._looked_up(node, first, arguments)
        if has_trait(node, Trait.PAD, Trait.REPEAT):
            return self._padded(node, base, first, arguments)
        if base in ("mm", "addmm", "bmm"):
            return self._gemm(node, base, arguments)
        self._refuse(node, "is an operation that is not known to keep rows separate")

    def _check_operator(self, node: Node) -> None:
        """Refuse operators of other libraries, writes to inputs and random numbers."""
        if not is_aten(node.target):
            self._refuse(node, "is not an operator of ATen, so its effect on rows is unknown")
        if mutates(node) or draws_random_numbers(node):
            self._refuse(node, "writes to its inputs or draws random numbers")

    def _check_layouts(self, node: Node, layouts: Layouts) -> None:
        """Refuse rows that cannot be followed; one of several values may have an unknown layout if nothing reads it."""
        for layout, value in zip(several(layouts), several(fake_value(node)), strict=True):
            if layout is None and isinstance(layouts, tuple):
                continue
            if layout is None or not fits(layout, value):
                self._refuse(node, "gives rows in a way that cannot be followed")
            if any(size.free_symbols for size in layout.of_a_row):
                self._refuse(node, "gives each row as many features as there are rows")

    def _elementwise(self, node: Node) -> Layouts:
        value = fake_value(node)
        # Of several results (`frexp`), the first has the broadcast shape; other shapes are those of unread buffers.
        shape = several(value)[0].shape
        tensors = tensor_inputs(node)
        layout = broadcast([self._layout(used) for used in tensors if self._has_rows(used)], shape)
        if layout is None:
            self._refuse(node, "combines rows with other rows")
        for constant in (used for used in tensors if not self._has_rows(used)):
            self._check_constant(node, constant, layout)
        return _layouts_of(value, lambda item_shape: layout if item_shape == shape else None)

    def _check_constant(self, node: Node, constant: Node, layout: Layout) -> None:
        """Refuse a constant that is not equal for all rows with which it is combined."""
        value = fake_value(constant)
        for dim in range(-value.dim(), 0):
            if not layout.has_rows_along(dim) or size_expression(value.shape[dim]) == 1:
                continue
            if not self._is_uniform(constant) and not is_flat(constant, dim):
                self._refuse(node, f"combines rows with {self._named(constant)}, which differs between rows")
            times = features_per_row(layout.dimensions[dim])
            if times is not None and has_trait(constant, Trait.FILL, Trait.EXPAND):
                sizes, readers = self._made.setdefault(constant, ({}, set()))
                sizes["size", dim % value.dim()] = times
                readers.add(node)

    def _view(self, node: Node, layout: Layout) -> Layout:
        result = reshaped(layout, fake_value(node).shape)
        if result is None:
            self._refuse(node, "regroups rows")
        self._note_sizes(node, result)
        return result

    def _expanded(self, node: Node, layout: Layout) -> Layout:
        shape = fake_value(node).shape
        new = len(shape) - len(layout.dimensions)
        expanded = [
            features(size) if is_features(dimension) else dimension
            for dimension, size in zip(layout.dimensions, shape[new:], strict=True)
        ]
        result = Layout((*map(features, shape[:new]), *expanded))
        self._note_sizes(node, result)
        return result

    def _note_sizes(self, node: Node, layout: Layout) -> None:
        if len(node.args) < 2 or not isinstance(node.args[1], (list, tuple)):
            return
        times = {("size", dim): features_per_row(dimension) for dim, dimension in enumerate(layout.dimensions)}
        self._places[node] = {position: number for position, number in times.items() if number is not None}

    def _along(self, node: Node, base: str, layout: Layout, arguments: dict[str, Any]) -> Layouts:
        rank = len(layout.dimensions)
        dims = dims_along(node, rank) or range(rank)
        if any(map(layout.has_rows_along, dims)):
            if base == "slice" and fits(layout, fake_value(node)) and arguments.get("step", 1) == 1:
                self._whole.add(node)
                return layout
            self._refuse(node, "works along the rows, not along features")
        return _layouts_of(fake_value(node), lambda shape: _along_result(layout, dims, shape))

    def _join(self, node: Node, base: str, arguments: dict[str, Any]) -> Layout:
        tensors = tensor_inputs(node)
        layouts = [self._layout(used) for used in tensors if self._has_rows(used)]
        (dim,) = dims_along(node, len(layouts[0].dimensions) + (base == "stack")) or [0]
        # Operands of `stack` do not have its dimension.
        after = dim if base == "stack" else dim + 1
        common = {(layout.dimensions[:dim], layout.dimensions[after:]) for layout in layouts}
        joined = [dimension for layout in layouts for dimension in layout.dimensions[dim:after]]
        if len(common) != 1 or not all(map(is_features, joined)):
            self._refuse(node, "joins rows with other rows")
        ((before, behind),) = common
        result = Layout((*before, features(fake_value(node).shape[dim]), *behind))
        operand = Layout((*before, *behind)) if base == "stack" else result
        for constant in (used for used in tensors if not self._has_rows(used)):
            sizes = size_expressions(fake_value(constant).shape)
            # Unlike elementwise operations, these do not expand operands of size 1.
            if len(sizes) != len(operand.dimensions) or any(
                not is_features(dimension) and size_of(dimension) != size
                for dimension, size in zip(operand.dimensions, sizes, strict=True)
            ):
                self._refuse(node, f"joins rows with {self._named(constant)}, which does not have all rows")
            self._check_constant(node, constant, operand)
        return result

    def _norm(self, node: Node, layout: Layout, arguments: dict[str, Any]) -> Layouts:
        rank = len(layout.dimensions)
        dims = range(rank - len(arguments["normalized_shape"]), rank)
        self._check_norm(node, not any(map(layout.has_rows_along, dims)))
        return _layouts_of(fake_value(node), lambda shape: _along_result(layout, dims, shape))

    def _group_norm(self, node: Node, layout: Layout, arguments: dict[str, Any]) -> Layouts:
        rows = layout.dimensions[:1]
        self._check_norm(node, layout.is_by_row and size_of(*rows) == size_expression(arguments["N"]))
        self._places[node] = {("N", 0): 1}
        return _layouts_of(fake_value(node), lambda shape: Layout((*rows, *map(features, shape[1:]))))

    def _check_norm(self, node: Node, is_by_row: bool) -> None:
        parameters = nodes_in((node.args[1:], node.kwargs))
        if not is_by_row or any(map(self._has_rows, parameters)):
            self._refuse(node, "normalises over rows, not features alone")

    def _looked_up(self, node: Node, layout: Layout, arguments: dict[str, Any]) -> Layout:
        rank, shape = len(layout.dimensions), fake_value(node).shape
        indexed = {dim % rank: index for dim, index in indexed_dimensions(arguments)}
        first, end = min(indexed), max(indexed) + 1
        has_masks = any(map(is_mask, indexed.values()))
        if not has_masks and not layout.has_rows and [*indexed] == [0] and self._has_rows(indexed[0]):
            # A lookup in a table of constants, with indices that belong to rows.
            return Layout((*self._layout(indexed[0]).dimensions, *layout.dimensions[1:]))
        is_by_row = any(map(self._has_rows, indexed.values())) or any(map(layout.has_rows_along, indexed))
        if is_by_row or has_masks or len(indexed) < end - first:
            self._refuse(node, "looks up rows by their indices")
        looked_up = shape[first : len(shape) - (rank - end)]
        return Layout((*layout.dimensions[:first], *map(features, looked_up), *layout.dimensions[end:]))

    def _padded(self, node: Node, base: str, layout: Layout, arguments: dict[str, Any]) -> Layout:
        shape = fake_value(node).shape
        new = len(shape) - len(layout.dimensions)
        for dim, dimension in enumerate(layout.dimensions):
            if base == "repeat":
                unchanged = arguments["repeats"][new + dim] == 1
            else:
                start = 2 * (len(layout.dimensions) - 1 - dim)
                unchanged = all(amount == 0 for amount in arguments["pad"][start : start + 2])
            if not is_features(dimension) and not unchanged:
                self._refuse(node, "adds rows")
        return self._expanded(node, layout)

    def _gemm(self, node: Node, base: str, arguments: dict[str, Any]) -> Layout:
        """Return the layout of a GEMM of rows and one matrix for all, or of a batched GEMM of features of one row."""
        left, right, added = matrix_operands(node)
        batch = int(base == "bmm")
        left_layout, right_layout = self._layout(left), self._layout(right)
        if left_layout.has_rows_along(batch + 1) or right_layout.has_rows_along(batch):
            self._refuse(node, "multiplies and adds up rows")
        if left_layout.has_rows and right_layout.has_rows:
            by_batch = batch and left_layout.dimensions[0] == right_layout.dimensions[0]
            if not by_batch or left_layout.has_rows_along(1) or right_layout.has_rows_along(2):
                self._refuse(node, "multiplies rows by other rows")
        elif batch and (left_layout.has_rows_along(0) or right_layout.has_rows_along(0)):
            constant = right if left_layout.has_rows else left
            if not self._is_uniform(constant) and not is_flat(constant, 0):
                self._refuse(node, f"combines rows with {self._named(constant)}, a different matrix for each row")
        leading = (left_layout if left_layout.has_rows else right_layout).dimensions[:batch]
        product = Layout((*leading, left_layout.dimensions[batch], right_layout.dimensions[batch + 1]))
        if added is not None:
            if self._has_rows(added):
                return broadcast([product, self._layout(added)], fake_value(node).shape) or self._refuse(
                    node, "combines rows with other rows"
                )
            self._check_constant(node, added, product)
        return product

    def _layout(self, node: Any) -> Layout:
        if not isinstance(node, Node):
            return no_rows(())
        layout = self._layouts.get(node)
        return layout if isinstance(layout, Layout) else no_rows(getattr(fake_value(node), "shape", ()))

    def _has_rows(self, node: Node) -> bool:
        return any_rows(self._layouts.get(node))

    def _is_uniform(self, node: Node) -> bool:
        return node in self._uniform or all(size_expression(size) == 1 for size in fake_value(node).shape)

    def _named(self, node: Node) -> str:
        return named(node)

    def _refuse(self, node: Node, what: str) -> NoReturn:
        refuse(node, what)


def any_rows(layouts: Layouts | None) -> bool:
    return any(layout is not None and layout.has_rows for layout in several(layouts))


def fits(layout: Layout, value: torch.Tensor) -> bool:
    return size_expressions(value.shape) == [*map(size_of, layout.dimensions)]


def is_flat(node: Node, dim: int) -> bool:
    """Return whether all elements along a dimension are equal: it has size 1 or stride 0."""
    value = fake_value(node)
    stride = value.stride(dim)
    return size_expression(value.shape[dim]) == 1 or (isinstance(stride, int) and stride == 0)


def has_symbols(value: Any) -> bool:
    return any(
        isinstance(size, torch.SymInt)
        for item in several(value)
        if isinstance(item, torch.Tensor)
        for size in item.shape
    )


def _along_result(layout: Layout, dims: Sequence[int], shape: Sequence[Any]) -> Layout | None:
    """Return the layout of a result with `shape` of an operation along `dims`."""
    if len(shape) == len(layout.dimensions):
        sized = enumerate(zip(layout.dimensions, shape, strict=True))
        return Layout(tuple(features(size) if dim in dims else dimension for dim, (dimension, size) in sized))
    if len(shape) == len(layout.dimensions) - len(set(dims)):
        return Layout(tuple(dimension for dim, dimension in enumerate(layout.dimensions) if dim not in dims))
    return None


def _layouts_of(value: Any, layout_of: Callable[[Any], Layout | None]) -> Layouts:
    if isinstance(value, (tuple, list)):
        return tuple(layout_of(item.shape) for item in value)
    return layout_of(value.shape)
