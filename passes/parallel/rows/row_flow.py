"""Check that the activation function of the experts computes every row independently.

Contract
    in    a local form, which knows the nodes of the activation function that it repeats
    out   the layouts of the rows in these nodes, in the block and in the local form (RowFlow). NotThisForm, with the
          operation and advice, if the result for a row may depend on other rows, their number, or the row's position

The block computes rows of all ranks for this rank's experts, the local form rows of this rank for all experts. The
repeated nodes give equal results only if every row is independent. The check follows the rows from the results of the
GEMMs, and knows for every value which dimensions hold the rows (row_layout.py):
    an operation that is not known to keep rows separate is refused
    a value without rows is a constant, equal in the block, in the local form, and on all ranks (experts_text.py)
    a size that depends on the number of rows may be the size of a tensor, and nothing else
    in each node, the features of a row must have the same dimensions in the block and in the local form, because a
    number among its arguments may be the block's number of rows (`check_equal_flow`)
    a mask that the local form omits (LocalForm.left_out) must mask whole rows; mock runs test which ones

The activation function is then one function of a row. The proof does not depend on its formula, so mock runs use
another function, with different results for different rows (mock_run.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, is_call, nodes_in, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ops.arguments import named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait, operation
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.rows.row_layout import Layout, no_rows
from moepass.passes.rows.row_rules import Layouts, Place, RowRules, any_rows, fits, has_symbols, is_flat

aten = torch.ops.aten

_CHANGE = (
    "expected an activation function that computes every row alone, from that row and constants, independent of other "
    "rows; compute element by element or along features, or move this before or after the experts"
)


@dataclasses.dataclass(frozen=True)
class RowFlow:
    """The rows in the activation function of the block, or in its copy in the local form.

    Attributes:
        layouts: the layouts of the inputs and of all values computed from them
        places: the places of numbers of rows in the arguments of a node, each with its factor, per row
        sizes: the sizes that are computed from the number of rows
        full_slices: the slices along the rows that keep all rows
    """

    layouts: Mapping[Node, Layouts]
    places: Mapping[Node, Mapping[Place, int]]
    sizes: frozenset[Node]
    full_slices: frozenset[Node]

    def has_rows(self, node: Node) -> bool:
        return any_rows(self.layouts.get(node))


def flow_in_block(local: LocalForm) -> RowFlow:
    """Follow the rows through the block's activation function. Raises NotThisForm."""
    nodes = [node for node in local.block.region if node in local.copied or node in local.unmasked]
    results = [local.block.down.activations, *([local.end] if local.weighting else [])]
    return _Walk(local.starts, local.unmasked, {}, local.sizes).follow(nodes, results)


def flow_in_local_form(local: LocalForm) -> RowFlow:
    """Follow the rows through the copy of the activation function in the local form. Raises NotThisForm."""
    down = len(local.block.gemms) - 1
    results: list[Any] = [node.args[0] for node, number in local.gemms.items() if number == down]
    results += [local.outputs] if local.weighting else []
    copied = [node for node in local.written if node in local.copies]
    sizes = (size for size in local.sizes.values() if isinstance(size, Node))
    return _Walk(local.starts.values(), {}, local.copies, sizes).follow(copied, results)


def check_equal_flow(of_block: RowFlow, of_local_form: RowFlow, copies: Mapping[Node, Node]) -> None:
    """Raise NotThisForm if the features of a row have other dimensions in a node than in its copy.

    A number among the arguments may be the block's number of rows: in a view to [features, 20] of 20 rows the rows are
    last, but not in the same view of 10 rows.
    """
    for copy, origin in copies.items():
        if _row_shape(of_block, origin) != _row_shape(of_local_form, copy):
            raise NotThisForm(
                f"between its GEMMs {named(origin)} has {_shape(origin)} in the block and {_shape(copy)} where this "
                "rank runs its rows through all experts, which are not the same features of a row; expected sizes that "
                "do not depend on how many rows there are, or -1 in their place, and rows in the first dimension"
            )


def _row_shape(flow: RowFlow, node: Node) -> tuple[Any, ...]:
    """Return the shape of one row in each value of `node`, and None for values without rows."""
    layouts = several(flow.layouts.get(node))
    return tuple(layout.of_a_row if layout is not None and layout.has_rows else None for layout in layouts)


def _shape(node: Node) -> str:
    value = fake_value(node)
    return describe_shape(value) if isinstance(value, torch.Tensor) else str(value)


class _Walk(RowRules):
    def __init__(
        self, starts: Iterable[Node], unmasked: Mapping[Node, Node], copies: Mapping[Node, Node], sizes: Iterable[Node]
    ) -> None:
        super().__init__(starts)
        self._copies = copies
        self._unmasked = unmasked
        self._sizes = set(sizes)

    def follow(self, nodes: Iterable[Node], results: Iterable[Any]) -> RowFlow:
        for node in nodes:
            if node not in self._layouts:
                self._step(node)
        for result in results:
            if not self._layout(result).is_by_row:
                self._refuse(result, "does not give the next GEMM one row for each row")
        for node, (places, readers) in self._made.items():
            if readers == set(node.users):
                self._places[node] = places
        return RowFlow(self._layouts, self._places, frozenset(self._sizes), frozenset(self._whole))

    def _step(self, node: Node) -> None:
        if node in self._unmasked:
            self._layouts[node] = self._masked(node)
            return
        self._check_operator(node)
        if not isinstance(fake_value(node), (torch.Tensor, tuple, list)):
            self._size(node)
            return
        self._check_sizes(node)
        if has_trait(node, Trait.FILL) or not any(map(self._has_rows, node.all_input_nodes)):
            self._constant(node)
            return
        self._layouts[node] = layouts = self.with_rows(node)
        self._check_layouts(node, layouts)

    def _named(self, node: Node) -> str:
        """Name the original of a copy, which has a line in the model."""
        return super()._named(self._copies.get(node, node))

    def _refuse(self, node: Node, what: str) -> NoReturn:
        raise NotThisForm(f"between its GEMMs {self._named(node)} {what}; {_CHANGE}")

    def _check_operator(self, node: Node) -> None:
        # Functions on sizes, and getitem.
        if getattr(node.target, "__module__", "") not in ("_operator", "torch"):
            super()._check_operator(node)

    def _size(self, node: Node) -> None:
        reads_rows = any(map(self._has_rows, node.all_input_nodes))
        if reads_rows and operation(node) not in ("sym_size.int", "sym_numel"):
            self._refuse(node, "makes a number of all rows")
        is_symbol = isinstance(fake_value(node), torch.SymInt) and operation(node).startswith("sym_")
        if is_symbol or any(used in self._sizes for used in node.all_input_nodes):
            self._sizes.add(node)

    def _check_sizes(self, node: Node) -> None:
        """Refuse a node that uses the number of rows other than as a size of its result."""
        if not any(used in self._sizes for used in node.all_input_nodes):
            return
        counted = {("slice", "end"), ("native_group_norm", "N")}
        shapes = has_trait(node, Trait.FILL, Trait.RESHAPE, Trait.EXPAND)
        for name, value in named_arguments(node).items():
            is_shape = (shapes and name in ("size", "shape")) or (base_operation(node), name) in counted
            if not is_shape and any(used in self._sizes for used in nodes_in(value)):
                self._refuse(node, "computes with the number of rows")

    def _constant(self, node: Node) -> None:
        value = fake_value(node)
        by_element = has_trait(node, Trait.ELEMENTWISE, Trait.RESHAPE, Trait.EXPAND)
        is_filled = has_trait(node, Trait.FILL, Trait.FILL_LIKE)
        grows = any(has_symbols(fake_value(used)) for used in (node, *node.all_input_nodes))
        if grows and not by_element and not is_filled:
            self._refuse(node, "computes with a constant that is as long as there are rows")
        layouts = tuple(no_rows(getattr(item, "shape", ())) for item in several(value))
        self._layouts[node] = layouts if isinstance(value, (tuple, list)) else layouts[0]
        tensors = [used for used in node.all_input_nodes if isinstance(fake_value(used), torch.Tensor)]
        if is_filled or (by_element and all(map(self._is_uniform, tensors))):
            self._uniform.add(node)

    def _masked(self, node: Node) -> Layout:
        """Return the layout of a mask that the local form omits."""
        source = self._unmasked[node]
        layout = self._layout(source)
        arguments = named_arguments(node)
        condition = arguments["mask" if is_call(node, aten.masked_fill.Scalar) else "condition"]
        fills = [value for value in node.args if isinstance(value, Node) and value not in (source, condition)]
        dims = fake_value(condition).dim()
        by_row = dims in (0, len(layout.dimensions)) and all(is_flat(condition, dim) for dim in range(1, dims))
        if not by_row or not layout.is_by_row or not fits(layout, fake_value(node)):
            self._refuse(node, "masks something other than whole rows [rows, features]")
        for fill in fills:
            if not has_trait(fill, Trait.FILL) and not all(is_flat(fill, dim) for dim in range(fake_value(fill).dim())):
                self._refuse(node, "replaces the rows that it masks by more than one number")
        return layout
