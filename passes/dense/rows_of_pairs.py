"""Write what dense experts compute for some pairs of an expert and a place alone: rows, sorted by expert.

A value [experts, places, features], in whatever order of dimensions, becomes [rows, features]: dimensions of experts
and places are left out, and rows stand in front. What it is computed of is followed back, operation by operation
(`pair_layouts.py`): what has no experts is looked up by the place of each row, what has no places by its expert, and
what is not followed by both.
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

_PLACE = ("nn_module_stack", "stack_trace")


@dataclasses.dataclass(frozen=True)
class PairRows:
    """The rows that are computed: `count` of them, a number or a node; of each its expert and its place, int64 [rows].
    `ends` [experts] is where each expert's rows end, int32. `are_all`: all pairs, one expert after the other.
    """

    count: Any
    experts: Node
    positions: Node
    ends: Node
    are_all: bool = False


class RowsOfPairs:
    """Writes values for `rows`, which are some of `pairs`."""

    def __init__(self, writer: GraphWriter, pairs: Pairs, rows: PairRows) -> None:
        self.writer, self.pairs, self.rows = writer, pairs, rows
        # The GEMMs of the graph that were written for the rows, and what they became.
        self.gemms: dict[Node, Node] = {}
        self._cache: dict[tuple[Node, Layout], Node] = {}
        self._reaches: dict[tuple[Node, Layout], bool] = {}
        self._gains: dict[tuple[Node, Layout], bool] = {}

    def write(self, node: Node, layout: Layout) -> Node:
        """[rows, features] of `node`, in which experts and places lie as in `layout`. Raises NotThisForm."""
        key = (node, layout)
        if key not in self._cache:
            self._cache[key] = self._write(node, layout)
            wanted = [*map(size_expression, self._shape(layout))]
            if [*map(size_expression, fake_value(self._cache[key]).shape)] != wanted:
                self._refuse(node, "gives other sizes for the rows that are chosen")
            if fake_value(self._cache[key]).dtype != fake_value(node).dtype:
                self._refuse(node, "gives another type for the rows that are chosen")
        return self._cache[key]

    def reaches_gemms(self, node: Node, layout: Layout) -> bool:
        """True where operations that are known lead from `node` back to a GEMM of the experts."""
        key = (node, layout)
        if key not in self._reaches:
            self._reaches[key] = False
            self._reaches[key] = self.pairs.has_pairs(layout) and (
                self._gemm(node, layout) is not None
                or any(self.reaches_gemms(*one) for one in self._sources(node, layout).items())
            )
        return self._reaches[key]

    def _sources(self, node: Node, layout: Layout) -> dict[Node, Layout]:
        if node.op != "call_function" or mutates(node) or draws_random_numbers(node):
            return {}
        found = operand_layouts(node, layout, self.pairs) or {}
        # An operand without rows is the same for all of them.
        return {used: one for used, one in found.items() if one.has_rows and self.pairs.are_complete(one)}

    def _is_looked_up_before(self, node: Node, layout: Layout) -> bool:
        """True where `node` is computed of what has no experts, or no places, so that less is looked up before it."""
        key = (node, layout)
        if key not in self._gains:
            self._gains[key] = False
            below = self._sources(node, layout)
            self._gains[key] = any(
                not self.pairs.has_pairs(one) or self._is_looked_up_before(used, one) for used, one in below.items()
            )
        return self._gains[key]

    def _gemm(self, node: Node, layout: Layout) -> DenseGemm | None:
        gemm = dense_gemm(node)
        if gemm is None or gemm.kind == "summed" or gemm.experts != self.pairs.experts:
            return None
        return gemm if gemm.result_layout(self.pairs) == layout else None

    def _write(self, node: Node, layout: Layout) -> Node:
        if not self.pairs.are_complete(layout):
            self._refuse(node, "takes experts or tokens apart")
        if not self.pairs.has_pairs(layout):
            return self._looked_up(node, layout)
        gemm = self._gemm(node, layout)
        if gemm is not None:
            return self._multiplied(gemm, layout)
        if self.reaches_gemms(node, layout) or self._is_looked_up_before(node, layout):
            return self._repeated(node, layout)
        return self._looked_up(node, layout)

    # -------------------------------------------------------------------------------------------------------- leaves

    def _looked_up(self, node: Node, layout: Layout) -> Node:
        """What each row has in `node`, by its expert, or its place, or both."""
        writer = self.writer
        parts = [part for dimension in layout.dimensions for part in dimension]
        atoms = self._atoms(parts)
        source = self._viewed(node, [self._size(part.size, node) for part in atoms])
        of_experts = [dim for dim, part in enumerate(atoms) if part.is_rows and part.share == self._expert_share]
        of_positions = [dim for dim, part in enumerate(atoms) if part.is_rows and part.share != self._expert_share]
        of_positions.sort(key=lambda dim: atoms[dim].share or ())
        others = [dim for dim, part in enumerate(atoms) if not part.is_rows]
        order = [*of_positions, *of_experts, *others]
        if of_positions and of_experts:
            self._check_not_computed(node)
        if self.rows.are_all and of_positions and of_experts:
            order = [*of_experts, *of_positions, *others]
            if order != sorted(order):
                source = writer.emit(aten.permute.default, source, order)
            return writer.viewed(source, self._shape(layout))
        if order != sorted(order):
            source = writer.emit(aten.permute.default, source, order)
        shape = [writer.size(source, dim) for dim in range(len(order))]
        if len(of_positions) > 1:
            source = writer.viewed(source, [self._places(), *shape[len(of_positions) :]])
        numbers = [self.rows.positions] * bool(of_positions) + [self.rows.experts] * bool(of_experts)
        return writer.viewed(writer.emit(aten.index.Tensor, source, numbers), self._shape(layout))

    def _check_not_computed(self, node: Node) -> None:
        """Raises NotThisForm where a GEMM of the same experts gives what `node` is computed of, as it seems."""

        def is_of_experts(used: Node) -> bool:
            tensors = [value for value in several(fake_value(used)) if isinstance(value, torch.Tensor)]
            return any(size_expression(size) == self.pairs.experts for value in tensors for size in value.shape)

        for gemm in map(dense_gemm, ancestors(node, follow=is_of_experts)):
            if gemm is not None and Pairs(gemm.experts, gemm.positions) == self.pairs:
                self._refuse(node, "is computed of what all experts give, in another way than pair by pair")

    def _viewed(self, node: Node, shape: list[Any]) -> Node:
        """`node` in another shape: what it is a view of, where that has it."""
        wanted = [*map(size_expression, shape)]
        _, *viewed = first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY))
        same = (source for source in viewed if [*map(size_expression, fake_value(source).shape)] == wanted)
        return next(same, None) or self.writer.viewed(node, shape)

    @property
    def _expert_share(self) -> Any:
        return self.pairs.of_experts[0].share

    def _atoms(self, parts: list[Part]) -> list[Part]:
        """Parts, all pairs in one of them as experts and places."""
        found: list[Part] = []
        for part in parts:
            found += [*self.pairs.of_experts, *self.pairs.of_positions] if part.share == () else [part]
        return found

    def _places(self) -> Any:
        return self._size(self.pairs.positions, self.rows.positions)

    def _size(self, size: sympy.Expr, node: Node) -> Any:
        """A size as a number or a node."""
        if size.is_Integer:
            return int(size)
        for known in (node, *node.all_input_nodes, *(one for one in node.graph.nodes if one < self.rows.positions)):
            value = fake_value(known)
            if isinstance(value, torch.SymInt) and size_expression(value) == size and known < self.writer.like:
                return known
            for dim, own in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if size_expression(own) == size:
                    return self.writer.size(known, dim)
        self._refuse(node, f"has a size of {size}, which nothing in the graph shows")

    # ---------------------------------------------------------------------------------------------------- operations

    def _multiplied(self, gemm: DenseGemm, layout: Layout) -> Node:
        writer = self.writer
        rows = writer.viewed(self.write(gemm.rows, gemm.rows_layout(self.pairs)), [self.rows.count, gemm.width])
        product = self.product(gemm, rows)
        self.gemms[gemm.node] = product
        product = writer.viewed(product, self._shape(layout))
        if gemm.added is None:
            return product
        return writer.emit(aten.add.Tensor, product, self._operand(gemm.added, layout))

    def product(self, gemm: DenseGemm, rows: Node) -> Node:
        """`rows` [rows, in] times the weights of their experts."""
        weights = gemm.weights
        if gemm.inner == 2:
            weights = self.writer.emit(aten.permute.default, weights, [0, 2, 1])
        product = self.writer.emit(grouped_gemm_for(rows, weights), rows, weights, self.rows.ends)
        # The block is named after the module that multiplies.
        product.meta.update({key: gemm.node.meta[key] for key in _PLACE if key in gemm.node.meta})
        return product

    def _operand(self, used: Node, layout: Layout) -> Node:
        """`used` as it meets rows of a result that has `layout`."""
        value = fake_value(used)
        front = len(layout.dimensions) - value.dim()
        of_operand = broadcast_operand(layout, value.shape)
        sizes = [
            features_in(of_operand.dimensions[dim - front]) if dim >= front else sympy.Integer(1)
            for dim in feature_dims(layout)
        ]
        if of_operand.has_rows:
            return self._viewed(self.write(used, of_operand), [self.rows.count, *map(int, sizes)])
        sizes = sizes[len([dim for dim in feature_dims(layout) if dim < front]) :]
        return self.writer.viewed(used, list(map(int, sizes)))

    def _repeated(self, node: Node, layout: Layout) -> Node:
        """The operation of `node` on the rows of what it is computed of."""
        writer, base = self.writer, base_operation(node)
        below = operand_layouts(node, layout, self.pairs)
        if below is None or mutates(node) or draws_random_numbers(node):
            self._refuse(
                node, "is no operation that moepass knows to compute every pair of a token and an expert alone"
            )
        if has_trait(node, Trait.COPY, Trait.RESHAPE, Trait.REPEAT):
            ((source, one),) = below.items()
            return self._viewed(self.write(source, one), self._shape(layout))
        if base == "expand":
            ((source, one),) = below.items()
            return writer.emit(aten.expand.default, self._operand(source, layout), self._shape(layout))
        if has_trait(node, Trait.PERMUTE):
            return self._turned(node, layout, *next(iter(below.items())))
        if operation(node) == "getitem":
            return self._item(node, *next(iter(below.items())))
        if has_trait(node, Trait.ELEMENTWISE):
            if not all(isinstance(fake_value(used), torch.Tensor) for used in node.all_input_nodes):
                self._refuse(node, "computes with a size")
            args, kwargs = map_nodes((node.args, node.kwargs), lambda used: self._operand(used, layout))
            return writer.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        if has_trait(node, Trait.JOIN):
            if not all(one.has_rows for one in below.values()):
                self._refuse(node, "puts rows together with what is the same for all of them")
            dim = all_arguments(node)["dim"] % len(layout.dimensions)
            rows = {used: self.write(used, one) for used, one in below.items()}
            tensors = map_nodes(list(all_arguments(node)["tensors"]), rows.__getitem__)
            return writer.emit(node.target, tensors, 1 + feature_dims(layout).index(dim))  # type: ignore[arg-type]
        source, one = next(iter(below.items()))
        if has_trait(node, Trait.ALONG):
            return self._along(node, one, self.write(source, one))
        return self._refuse(node, "is no operation that moepass repeats for chosen rows")

    def _turned(self, node: Node, layout: Layout, source: Node, before: Layout) -> Node:
        order, own = permutation(node), feature_dims(before)
        places = [1 + own.index(order[dim]) for dim in feature_dims(layout)]
        rows = self.write(source, before)
        # Where a dimension of 1 stands does not matter; einsum moves them about.
        moved = [place for place in places if fake_value(rows).shape[place] != 1]
        if moved == sorted(moved):
            return self._viewed(rows, self._shape(layout))
        return self.writer.emit(aten.permute.default, rows, [0, *places])

    def _item(self, node: Node, source: Node, before: Layout) -> Node:
        cut = node.args[0]
        assert isinstance(cut, Node)
        rows = self.write(source, before)
        if has_trait(cut, Trait.NORM):
            args, kwargs = map_nodes((cut.args, cut.kwargs), lambda used: rows if used is source else used)
            return self.writer.getitem(self.writer.emit(cut.target, *args, **kwargs), 0)  # type: ignore[arg-type]
        assert has_trait(cut, Trait.SPLIT)
        return self.writer.getitem(self._along(cut, before, rows), node.args[1])  # type: ignore[arg-type]

    def _along(self, node: Node, before: Layout, rows: Node) -> Node:
        """An operation along features, as these stand behind rows."""
        given, own = all_arguments(node), feature_dims(before)
        name = "dim" if "dim" in given else "dims"
        dims = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
        dims = [dim % len(before.dimensions) for dim in dims]
        if any(not is_features(before.dimensions[dim]) for dim in dims):
            if base_operation(node) == "slice":
                return rows  # all of them
            self._refuse(node, "works along experts or tokens")
        moved = [1 + own.index(dim) for dim in dims]
        given[name] = moved if isinstance(given[name], (list, tuple)) else moved[0]
        (first, *_) = given
        given[first] = rows
        names = [one.name for one in node.target._schema.arguments if not one.kwarg_only]  # type: ignore[union-attr]
        args = [given.pop(name) for name in names]
        return self.writer.emit(node.target, *args, **given)  # type: ignore[arg-type]

    def _shape(self, layout: Layout) -> list[Any]:
        sizes = [features_in(layout.dimensions[dim]) for dim in feature_dims(layout)]
        if not all(size.is_Integer for size in sizes):
            raise NotThisForm("it has a number of features that only a run tells")
        return [self.rows.count, *map(int, sizes)]

    def _refuse(self, node: Node, what: str) -> NoReturn:
        raise NotThisForm(f"{named(node)} {what}")
