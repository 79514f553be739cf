"""Analysis of which nodes of a graph are tokenwise: they treat each token independently.

Contract
    in    a captured graph
    out   for each node with elements of each token: the dimensions of the tokens, and whether it is tokenwise or the
          reason why not (TokenFlow)

The elements of a token in a tokenwise result depend only on the inputs' elements of the same token, and on values that
are the same for all tokens. `passes/rows` has the rules; this walk adds:

    sequences     tokens are one dimension [tokens, ..] or two [sequences, tokens, ..]
    constants     values with elements of each token, such as the angles of positions, are sliced like the tokens
    experts       rows sorted by expert: see `routing.py`
    attention     is not tokenwise, but its result has the token dimensions of the queries
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs, nodes_in, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import ARGUMENT_KEY, named
from moepass.passes.ops.arguments import all_arguments, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_aten, operation
from moepass.passes.rows.row_layout import Dimension, Layout, Part, features, rows_first, size_of
from moepass.passes.rows.row_rules import Layouts, any_rows, fits
from moepass.passes.tokens.routing import RoutingRules


@dataclasses.dataclass(frozen=True)
class TokenFlow:
    """Facts about the nodes of a graph.

    layouts    the token dimensions of values that depend on tokens
    aligned    the same for values that do not depend on tokens, but have elements of each token
    tokenwise  nodes that treat each token independently, including those on rows sorted by expert
    routed     the ids of each node that has rows sorted by expert, or numbers of such rows
    recreated  pair numbers 0, 1, ..., which each region creates for its own pairs
    all_tokens slices that select all tokens
    reasons    why a node is not tokenwise although an input depends on tokens
    """

    layouts: Mapping[Node, Layouts]
    aligned: Mapping[Node, Layout]
    tokenwise: frozenset[Node]
    routed: Mapping[Node, Node]
    recreated: frozenset[Node]
    all_tokens: frozenset[Node]
    reasons: Mapping[Node, str]


def token_inputs(graph: Graph) -> dict[Node, Layout]:
    """Return the arguments with elements of each token, of the largest shape if there are several.

    These are ids [sequences, tokens] or, without ids, floating-point numbers [(sequences,) tokens, width].
    """
    arguments = [node for node in graph_inputs(graph) if node.meta.get(ARGUMENT_KEY, True)]
    tensors = [node for node in arguments if isinstance(fake_value(node), torch.Tensor)]
    ids = [node for node in tensors if fake_value(node).dtype in (torch.int64, torch.int32)]
    for candidates in (
        [node for node in ids if fake_value(node).dim() == 2],
        [node for node in tensors if fake_value(node).is_floating_point() and fake_value(node).dim() in (2, 3)],
    ):
        if candidates:
            largest = max(candidates, key=lambda node: math.prod(map(_hint, fake_value(node).shape)))
            shape = _texts(largest)
            is_flat = largest not in ids and len(shape) == 2
            return {
                node: rows_first(fake_value(node).shape) if is_flat else sequences_of(fake_value(node).shape)
                for node in candidates
                if _texts(node) == shape
            }
    return {}


def token_count(inputs: Mapping[Node, Layout]) -> int | None:
    """Return the number of tokens of all sequences, or None if it differs between runs."""
    layout = next(iter(inputs.values()))
    total = sympy.Mul(*(factor.size for dimension in layout.dimensions for factor in dimension if factor.is_rows))
    return int(total) if total.is_Integer else None


def sequences_of(shape: Any) -> Layout:
    """Return the layout of a tensor [sequences, tokens, ..]."""
    count, length, *widths = map(size_expression, shape)
    if count == 1:
        return Layout(((), (Part(length, ()),), *map(features, widths)))
    name = f"{count} x {length}"
    return Layout(((Part(count, ((name, 0),)),), (Part(length, ((name, 1),)),), *map(features, widths)))


def _parts_of_sequences(inputs: Mapping[Node, Layout]) -> tuple[Part, ...]:
    factors = [factor for layout in inputs.values() for dim in layout.dimensions for factor in dim if factor.share]
    return tuple(factors[:2])


def _texts(node: Node) -> list[str]:
    return [str(size_expression(size)) for size in fake_value(node).shape]


def _hint(size: Any) -> int:
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)


def token_flow(graph: Graph, inputs: Mapping[Node, Layout], excluded_ids: frozenset[Node] = frozenset()) -> TokenFlow:
    """Follow tokens from `inputs`, but not in rows sorted by `excluded_ids`."""
    unsliced: frozenset[Node] = frozenset()
    while True:
        walk = _TokenWalk(inputs, excluded_ids, unsliced)
        flow = walk.follow(graph)
        # A constant is sliced for all tokenwise readers, or for none.
        newly_unsliced = walk.aligned_and_unsliced() - unsliced
        if not newly_unsliced:
            return flow
        unsliced |= newly_unsliced


class _TokenWalk(RoutingRules):
    def __init__(self, inputs: Mapping[Node, Layout], excluded_ids: frozenset[Node], unsliced: frozenset[Node]) -> None:
        super().__init__(excluded_ids)
        self._layouts.update(inputs)
        # The dimensions [sequences, tokens] of all tokens.
        self._sequences = _parts_of_sequences(inputs)
        # Constants that are not sliced.
        self._unsliced = unsliced
        self._tokenwise: set[Node] = set()
        # Nodes that depend on tokens, but are not tokenwise.
        self._of_all_tokens: set[Node] = set()
        self._reasons: dict[Node, str] = {}
        self._aligned: dict[Node, Layout] = {}
        self._aligned_uses: set[tuple[Node, Node]] = set()

    def follow(self, graph: Graph) -> TokenFlow:
        for node in graph.nodes:
            if node.op == "call_function" and any(self._depends(used) for used in node.all_input_nodes):
                self._step(node)
        self._tokenwise |= self.recreated
        return TokenFlow(
            self._layouts,
            self._aligned,
            frozenset(self._tokenwise),
            self.routed(),
            frozenset(self.recreated),
            frozenset(self._whole & self._tokenwise),
            self._reasons,
        )

    def aligned_and_unsliced(self) -> frozenset[Node]:
        """Return constants that one tokenwise reader needs sliced, and another unsliced."""
        return frozenset(
            constant
            for constant in self._aligned
            if any(user in self._tokenwise and (user, constant) not in self._aligned_uses for user in constant.users)
        )

    def _depends(self, node: Node) -> bool:
        return node in self._of_all_tokens or node in self.facts or self._has_rows(node)

    def _step(self, node: Node) -> None:
        aligned = dict(self._aligned)
        try:
            layouts = self._tokenwise_layouts(node)
        except NotThisForm as error:
            self._aligned = aligned
            self._of_all_tokens.add(node)
            self._reasons[node] = str(error)
            layouts = self._layouts_of_all_tokens(node)
        else:
            self._tokenwise.add(node)
        if layouts is not None:
            self._layouts[node] = layouts

    def _tokenwise_layouts(self, node: Node) -> Layouts:
        self._check_operator(node)
        if not any(used in self.facts or self._has_rows(used) for used in node.all_input_nodes):
            self._refuse(node, "reads a value that is computed from all tokens together")
        if any(used in self._of_all_tokens and operation(node) == "getitem" for used in node.all_input_nodes):
            self._refuse(node, "takes one of several results that are computed from all tokens together")
        routed = self.routing_layouts(node)
        if routed is not None:
            return routed.layouts
        self._check_sizes(node)
        layouts = self._layouts_of_operation(node)
        self._check_layouts(node, layouts)
        if not any_rows(layouts):
            self._refuse(node, "computes one value from all tokens")
        return layouts

    def _check_operator(self, node: Node) -> None:
        if operation(node) != "getitem" and not self.is_routing_operator(node):
            super()._check_operator(node)
        values = several(fake_value(node))
        if not all(isinstance(value, torch.Tensor) for value in values):
            self._refuse(node, "computes a number from tokens")

    def _check_sizes(self, node: Node) -> None:
        """Raise NotThisForm if `node` reads a size other than as a shape, because a chunk has another size."""
        sizes = {used for used in node.all_input_nodes if not isinstance(fake_value(used), (torch.Tensor, tuple, list))}
        if not sizes:
            return
        base = base_operation(node)
        is_shaped = has_trait(node, Trait.RESHAPE, Trait.EXPAND) or base == "new_empty"
        for name, value in named_arguments(node).items():
            is_shape = (is_shaped and name in ("size", "shape")) or (base, name) == ("slice", "end")
            if not is_shape and any(used in sizes for used in nodes_in(value)):
                self._refuse(node, "computes with a size that depends on the number of tokens")

    def _layouts_of_operation(self, node: Node) -> Layouts:
        base, arguments = base_operation(node), named_arguments(node)
        if base == "embedding":
            self._check_only(node, arguments["indices"])
            shape = fake_value(node).shape
            return Layout((*self._layout(arguments["indices"]).dimensions, features(shape[-1])))
        if base == "linear":
            return self._linear(node, arguments)
        if has_trait(node, Trait.FILL, Trait.GROUP_NORM):
            self._refuse(node, "depends on the number of tokens")
        if base == "repeat":
            return self._repeated(node, arguments)
        if base == "slice_scatter":
            return self._slice_written(node, all_arguments(node))
        if base == "new_empty":
            return self._empty_like(node, arguments)
        if base in ("view_as_complex", "view_as_real"):
            dimensions = self._layout(arguments["self"]).dimensions
            return Layout(dimensions[:-1] if base == "view_as_complex" else (*dimensions, features(2)))
        return self.with_rows(node)

    def _linear(self, node: Node, arguments: dict[str, Any]) -> Layout:
        layout = self._layout(arguments["input"])
        self._check_only(node, arguments["input"])
        if layout.has_rows_along(len(layout.dimensions) - 1):
            self._refuse(node, "multiplies and sums over tokens")
        return Layout((*layout.dimensions[:-1], features(fake_value(node).shape[-1])))

    def _view(self, node: Node, layout: Layout) -> Layout:
        try:
            return super()._view(node, layout)
        except NotThisForm:
            # All tokens may be split into sequences of any length.
            def split_into_sequences(dim: Dimension) -> Dimension:
                return tuple(each for factor in dim for each in (self._sequences if factor.share == () else (factor,)))

            if not self._sequences:
                raise
            return super()._view(node, Layout(tuple(map(split_into_sequences, layout.dimensions))))

    def _gemm(self, node: Node, base: str, arguments: dict[str, Any]) -> Layout:
        layout = super()._gemm(node, base, arguments)
        added = arguments["self"] if base == "addmm" else None
        if added in self._aligned and added in (arguments["mat1"], arguments["mat2"]):
            self._refuse(node, f"reads {named(added)} for each token, and as a matrix for all of them")
        operands = [used for used in node.all_input_nodes if fake_value(used).dim() == 3]
        if base == "bmm" and any(self._layout(used).has_rows_along(0) for used in operands):
            matrices = [used for used in operands if not self._layout(used).has_rows_along(0)]
            if any(size_expression(fake_value(used).shape[0]) != 1 for used in matrices):
                self._refuse(node, "multiplies tokens by another matrix for each of them")
        return layout

    def _slice_written(self, node: Node, arguments: dict[str, Any]) -> Layout:
        """Return the layout of a write that replaces features of the same tokens."""
        target, source = self._layout(arguments["self"]), self._layout(arguments["src"])
        dim = arguments["dim"] % len(target.dimensions)
        unwritten = [layout.dimensions[:dim] + layout.dimensions[dim + 1 :] for layout in (target, source)]
        if target.has_rows_along(dim) or source.has_rows_along(dim) or unwritten[0] != unwritten[1]:
            self._refuse(node, "overwrites tokens with other tokens")
        return target

    def _empty_like(self, node: Node, arguments: dict[str, Any]) -> Layout:
        """Return the layout of empty memory, with the token dimensions of `self` and any number of features."""
        like, shape = self._layout(arguments["self"]).dimensions, fake_value(node).shape
        layout = Layout(
            tuple(
                dimension if any(factor.is_rows for factor in dimension) else features(size)
                for dimension, size in zip(like, shape, strict=False)
            )
        )
        if not fits(layout, fake_value(node)):
            self._refuse(node, "allocates memory without the dimensions of the tokens")
        return layout

    def _repeated(self, node: Node, arguments: dict[str, Any]) -> Layout:
        """Return the layout of repeated tokens, in which the copies are a feature dimension before the tokens."""
        layout, times = self._layout(arguments["self"]), arguments["repeats"]
        if len(times) != len(layout.dimensions) or not all(isinstance(number, int) for number in times):
            self._refuse(node, "repeats tokens in a way that cannot be followed")
        return Layout(
            tuple(
                (*features(number), *dimension) if layout.has_rows_along(dim) else features(number * size_of(dimension))
                for dim, (number, dimension) in enumerate(zip(times, layout.dimensions, strict=True))
            )
        )

    def _check_only(self, node: Node, token_input: Any) -> None:
        """Raise NotThisForm if an input other than `token_input` depends on tokens."""
        if any(self._depends(used) for used in node.all_input_nodes if used is not token_input):
            self._refuse(node, "multiplies tokens by other tokens")

    def _check_constant(self, node: Node, constant: Node, layout: Layout) -> None:
        """Note that `constant` is sliced like the tokens of `layout`, if it has elements of each token."""
        value = fake_value(constant)
        dimensions = []
        for dim in range(-value.dim(), 0):
            token_dimension, size = layout.dimensions[dim], size_expression(value.shape[dim])
            if not any(factor.is_rows for factor in token_dimension) or size == 1:
                dimensions.append(features(size))
            elif size_of(token_dimension) == size:
                dimensions.append(token_dimension)
            else:
                self._refuse(node, f"combines tokens with {named(constant)}, which has no elements of each token")
        aligned = Layout(tuple(dimensions))
        if not aligned.has_rows:
            return
        if constant in self._unsliced or self._aligned.setdefault(constant, aligned) != aligned:
            self._refuse(node, f"combines tokens with {named(constant)} in other dimensions than an earlier reader")
        self._aligned_uses.add((node, constant))

    def _layouts_of_all_tokens(self, node: Node) -> Layouts:
        """Return the token dimensions in the result of a node that is not tokenwise, or None if unknown."""
        value = fake_value(node)
        if operation(node) == "getitem":
            source, index = node.args
            source_layouts = self._layouts.get(source)  # type: ignore[arg-type]
            return source_layouts[index] if isinstance(source_layouts, tuple) else None  # type: ignore[index]
        if not all(isinstance(item, torch.Tensor) for item in several(value)):
            return None
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or not self._has_rows(first):
            return None
        dimensions, base = self._layout(first).dimensions, base_operation(node)
        layouts: Layouts = None
        if has_trait(node, Trait.ATTENTION) and len(dimensions) == 4:
            # The dimension of the queries for each dimension of the result.
            order = (0, 2, 1) if base == "moepass::trie_attention" else (0, 1, 2)
            layouts = Layout((*(dimensions[index] for index in order), features(several(value)[0].shape[-1])))
        elif base in ("mm", "bmm"):
            layouts = Layout((*dimensions[:-1], features(value.shape[-1])))
        elif not has_trait(node, Trait.FILL, Trait.GROUP_NORM) and self._follows_rules(node):
            aligned = dict(self._aligned)
            try:
                layouts = self.with_rows(node)
            except NotThisForm:
                layouts = None
            self._aligned = aligned
        if isinstance(layouts, Layout) and isinstance(value, (tuple, list)):
            layouts = (layouts, *[None] * (len(value) - 1))
        if not any_rows(layouts) or not all(
            layout is None or fits(layout, item) for layout, item in zip(several(layouts), several(value), strict=True)
        ):
            return None
        return layouts

    def _follows_rules(self, node: Node) -> bool:
        knows_inputs = all(self._has_rows(used) or not self._depends(used) for used in node.all_input_nodes)
        return is_aten(node.target) and knows_inputs and not any(used in self.facts for used in node.all_input_nodes)
