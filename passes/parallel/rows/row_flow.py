"""Every row of the experts goes through the activation function alone.

Contract
    in    a local form that was written for a block: of the activation function it knows the nodes that it repeats
    out   what is known of these, on both sides (RowFlow); NotThisForm, naming the operation and what to do, where what
          comes out of a row may depend on other rows, on how many there are, or on the place of a row

The local form brings other rows together than the block does: a rank's own, of all experts, instead of all ranks', of
its own experts. So the nodes that it repeats compute the same only if every row is treated alone. They are followed
from the GEMMs' results, and it is known of every value in which of its dimensions the rows lie
(row_layout.py). An operation that is not known to leave rows apart is refused. A value without rows is a
constant: the same in the block and in the local form, and on all ranks that have the same text of it
(experts_text.py). A size that depends on the number of rows may say how long something is, and nothing else.
A number in the arguments of a node may be the number of the block's rows, so that its copy does something else with
other rows: the features of a row must lie in the same dimensions on both sides, node by node (`check_equal_flow`).
A mask that the local form does without (LocalForm.left_out) must take or leave whole rows; which ones, the mock runs
tell.

Since the activation function is then one function of a row, the same on both sides, its formula does not matter to the
proof: mock runs put another one in its place, which no row leaves as another does (mock_run.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, is_call, nodes_in, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ops.arguments import named_arguments
from moepass.passes.ops.traits import Trait, base_operation, draws_random_numbers, has_trait, operation
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.rows.row_layout import Layout, no_rows
from moepass.passes.rows.row_rules import (
    Layouts,
    Place,
    RowRules,
    any_rows,
    fits,
    has_symbols,
    is_flat,
)

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RowFlow:
    """What is known of one activation function: the block's, or its copy in the local form.

    `layouts` tell where the rows lie in everything that descends from them, `starts` included. `places` are the
    numbers in the arguments of nodes that count rows, as how many of each row. `sizes` are numbers that the graph
    computes from how many rows there are, `whole` are cuts of rows that leave all of them.
    """

    layouts: Mapping[Node, Layouts]
    places: Mapping[Node, Mapping[Place, int]]
    sizes: frozenset[Node]
    whole: frozenset[Node]

    def has_rows(self, node: Node) -> bool:
        return any_rows(self.layouts.get(node))


def flow_in_block(local: LocalForm) -> RowFlow:
    """The rows of the block's own activation function. Raises NotThisForm."""
    inside = [node for node in local.block.region if node in local.copied or node in local.unmasked]
    return _Walk(local.starts, local.unmasked, {}, local.sizes).follow(
        inside, [local.block.down.activations, *([local.end] if local.weighting else [])]
    )


def flow_in_local_form(local: LocalForm) -> RowFlow:
    """The rows of its copy. Raises NotThisForm."""
    down = len(local.block.gemms) - 1
    results: list[Any] = [node.args[0] for node, number in local.gemms.items() if number == down]
    results += [local.outputs] if local.weighting else []
    copied = [node for node in local.written if node in local.copies]
    sizes = (size for size in local.sizes.values() if isinstance(size, Node))
    return _Walk(local.starts.values(), {}, local.copies, sizes).follow(copied, results)


def check_equal_flow(of_block: RowFlow, of_local_form: RowFlow, copies: Mapping[Node, Node]) -> None:
    """Both do the same to each row: of every node and its copy, the features of a row lie in the same places.

    A number in the arguments of a node may be that of the rows which the block has, and something else where there are
    others: a view by 20 of 20 rows, first features, then rows, is one of features by rows, of 10 rows it is none.
    Raises NotThisForm.
    """
    for copy, origin in copies.items():
        if _of_a_row(of_block, origin) != _of_a_row(of_local_form, copy):
            raise NotThisForm(
                f"between its GEMMs {named(origin)} has {_shape(origin)} in the block and {_shape(copy)} where this "
                "rank runs its rows through all experts, which are not the same features of a row; expected sizes that "
                "do not depend on how many rows there are, or -1 in their place, and rows in the first dimension"
            )


def _of_a_row(flow: RowFlow, node: Node) -> tuple[Any, ...]:
    """None in it for what has no rows."""
    layouts = several(flow.layouts.get(node))
    return tuple(layout.of_a_row if layout is not None and layout.has_rows else None for layout in layouts)


def _shape(node: Node) -> str:
    value = fake_value(node)
    return describe_shape(value) if isinstance(value, torch.Tensor) else str(value)


class _Walk(RowRules):
    def __init__(
        self,
        starts: Iterable[Node],
        kept: Mapping[Node, Node],
        copies: Mapping[Node, Node],
        sizes: Iterable[Node],
    ) -> None:
        super().__init__(starts, copies)
        self._kept = kept
        self._sizes = set(sizes)

    def follow(self, nodes: Iterable[Node], results: Iterable[Any]) -> RowFlow:
        for node in nodes:
            if node not in self._layouts:
                self._step(node)
        for result in results:
            layout = self._layout(result)
            if not layout.is_by_row:
                self._refuse(result, "gives the next GEMM no row for each of its rows")
        for node, (places, readers) in self._made.items():
            if readers == set(node.users):
                self._places[node] = places
        return RowFlow(self._layouts, self._places, frozenset(self._sizes), frozenset(self._whole))

    # --------------------------------------------------------------------------------------------------------- steps

    def _step(self, node: Node) -> None:
        if node in self._kept:
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
        self._layouts[node] = found = self.with_rows(node)
        values = fake_value(node)
        for layout, value in zip(several(found), several(values), strict=True):
            # Of several values, one that cannot be followed may be one that nobody reads.
            if layout is None and found is not None:
                continue
            if layout is None or not fits(layout, value):
                self._refuse(node, "gives rows in a way that cannot be followed")
            if any(size.free_symbols for size in layout.of_a_row):
                self._refuse(node, "gives each row as many features as there are rows")

    def _check_operator(self, node: Node) -> None:
        target = node.target
        is_known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
        if not is_known and getattr(target, "__module__", "") not in ("_operator", "torch"):
            self._refuse(node, "is no operator of ATen, and what it does with rows is not known")
        if draws_random_numbers(node):
            self._refuse(node, "draws random numbers, other ones for other rows")

    def _size(self, node: Node) -> None:
        """A number that the graph computes."""
        of_rows = any(map(self._has_rows, node.all_input_nodes))
        if of_rows and operation(node) not in ("sym_size.int", "sym_numel"):
            self._refuse(node, "makes a number of all rows")
        is_symbol = isinstance(fake_value(node), torch.SymInt) and operation(node).startswith("sym_")
        if is_symbol or any(used in self._sizes for used in node.all_input_nodes):
            self._sizes.add(node)

    def _check_sizes(self, node: Node) -> None:
        """What depends on the number of rows says how long something is, and nothing else."""
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
        if not (by_element or has_trait(node, Trait.FILL, Trait.FILL_LIKE)):
            grows = [used for used in (node, *node.all_input_nodes) if has_symbols(fake_value(used))]
            if grows:
                self._refuse(node, "computes with a constant that is as long as there are rows")
        self._layouts[node] = (
            tuple(no_rows(item.shape) if isinstance(item, torch.Tensor) else no_rows(()) for item in value)
            if isinstance(value, (tuple, list))
            else no_rows(value.shape)
        )
        tensors = [used for used in node.all_input_nodes if isinstance(fake_value(used), torch.Tensor)]
        if has_trait(node, Trait.FILL, Trait.FILL_LIKE) or (
            by_element and all(self._is_uniform(used) for used in tensors)
        ):
            self._uniform.add(node)

    def _masked(self, node: Node) -> Layout:
        """A mask that the local form does without."""
        source = self._kept[node]
        layout = self._layout(source)
        choice = node.args[1] if is_call(node, aten.masked_fill.Scalar) else node.args[0]
        fills = [value for value in node.args if isinstance(value, Node) and value not in (source, choice)]
        shape = fake_value(choice).shape  # type: ignore[arg-type]
        by_row = len(shape) in (0, len(layout.dimensions)) and all(
            is_flat(choice, dim)  # type: ignore[arg-type]
            for dim in range(1, len(shape))
        )
        if not by_row or not layout.is_by_row or not fits(layout, fake_value(node)):
            self._refuse(node, "masks something other than whole rows [rows, features]")
        for fill in fills:
            dims = range(fake_value(fill).dim())
            if not has_trait(fill, Trait.FILL) and not all(is_flat(fill, dim) for dim in dims):
                self._refuse(node, "puts something other than one number in the place of the rows that it masks")
        return layout
