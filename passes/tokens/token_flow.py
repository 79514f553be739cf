"""Tell which nodes of a graph treat every token alone.

Contract
    in    a captured graph
    out   for each node whose value has something for each token: in which dimensions the tokens lie, and whether the
          node computes it for each token alone (TokenFlow); why not, where it does not

A node is alone if what it gives for a token follows from what its inputs have for that token, and from values that are
the same for all tokens. `passes/rows` has the rules; this walk adds what they do not need:

    sequences     tokens lie in one dimension [tokens, ..] or in two [sequences, tokens, ..]
    constants     what has a number for each token, such as the angles of positions, may meet tokens in its place
    experts       rows that are sorted by expert are still rows of tokens: see `routing.py`
    attention     computes no token alone, but gives tokens in the places in which its queries have them
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import sympy
import torch
from torch.fx import Graph, Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs, nodes_in, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import ARGUMENT_KEY, named
from moepass.passes.ops.arguments import all_arguments, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, draws_random_numbers, has_trait, mutates, operation
from moepass.passes.rows.row_layout import Dimension, Layout, Part, features, rows_first, size_of
from moepass.passes.rows.row_rules import Layouts, any_rows, fits
from moepass.passes.tokens.routing import RoutingRules


@dataclasses.dataclass(frozen=True)
class TokenFlow:
    """What is known of a graph's nodes.

    layouts    where tokens lie in a node's values, for all that have something for each token
    aligned    the same of values that no token went into: where they meet tokens
    alone      the nodes that treat every token alone, with what they make of rows sorted by expert
    routed     for a node that has such rows, or numbers that only hold beside them: the sort
    recreated  numbers 0, 1, ... that are made again for some tokens, by what reads them
    all_tokens slices that leave out no token
    reasons    why a node is not alone although a value of its inputs has something for each token
    """

    layouts: Mapping[Node, Layouts]
    aligned: Mapping[Node, Layout]
    alone: frozenset[Node]
    routed: Mapping[Node, Node]
    recreated: frozenset[Node]
    all_tokens: frozenset[Node]
    reasons: Mapping[Node, str]


def token_inputs(graph: Graph) -> dict[Node, Layout]:
    """The arguments that have something for each token: ids [sequences, tokens]; without ids, floating-point numbers
    [tokens, width] or [sequences, tokens, width]. Of several shapes the largest counts."""
    arguments = [node for node in graph_inputs(graph) if node.meta.get(ARGUMENT_KEY, True)]
    tensors = [node for node in arguments if isinstance(fake_value(node), torch.Tensor)]
    ids = [node for node in tensors if fake_value(node).dtype in (torch.int64, torch.int32)]
    for found in (
        [node for node in ids if fake_value(node).dim() == 2],
        [node for node in tensors if fake_value(node).is_floating_point() and fake_value(node).dim() in (2, 3)],
    ):
        if found:
            largest = max(found, key=lambda node: math.prod(map(_hint, fake_value(node).shape)))
            shape = _texts(largest)
            is_flat = largest not in ids and len(shape) == 2
            return {
                node: rows_first(fake_value(node).shape) if is_flat else sequences_of(fake_value(node).shape)
                for node in found
                if _texts(node) == shape
            }
    return {}


def token_count(inputs: Mapping[Node, Layout]) -> int | None:
    """The number of tokens of all sequences; None where runs may have other numbers."""
    layout = next(iter(inputs.values()))
    total = sympy.Mul(*(part.size for dimension in layout.dimensions for part in dimension if part.is_rows))
    return int(total) if total.is_Integer else None


def sequences_of(shape: Any) -> Layout:
    """Of a tensor [sequences, tokens, ..]."""
    count, length, *rest = map(size_expression, shape)
    if count == 1:
        return Layout(((), (Part(length, ()),), *map(features, rest)))
    name = f"{count} x {length}"
    return Layout(((Part(count, ((name, 0),)),), (Part(length, ((name, 1),)),), *map(features, rest)))


def _parts_of_sequences(inputs: Mapping[Node, Layout]) -> tuple[Part, ...]:
    parts = [part for layout in inputs.values() for dimension in layout.dimensions for part in dimension if part.share]
    return tuple(parts[:2])


def _texts(node: Node) -> list[str]:
    return [str(size_expression(size)) for size in fake_value(node).shape]


def _hint(size: Any) -> int:
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)


def token_flow(graph: Graph, inputs: Mapping[Node, Layout], never: frozenset[Node] = frozenset()) -> TokenFlow:
    """Follow the tokens from `inputs`. Rows sorted by ids of `never` are not followed."""
    read_whole: frozenset[Node] = frozenset()
    while True:
        walk = _TokenWalk(inputs, never, read_whole)
        flow = walk.follow(graph)
        # A constant is cut for all that treat tokens alone, or for none.
        also_whole = walk.aligned_and_whole() - read_whole
        if not also_whole:
            return flow
        read_whole |= also_whole


class _TokenWalk(RoutingRules):
    def __init__(self, inputs: Mapping[Node, Layout], never: frozenset[Node], read_whole: frozenset[Node]) -> None:
        super().__init__(never)
        self._layouts.update(inputs)
        # All tokens as sequences and the tokens of each.
        self._sequences = _parts_of_sequences(inputs)
        # Constants that are not cut.
        self._read_whole = read_whole
        self._alone: set[Node] = set()
        # Nodes that a token went into, and that are not alone.
        self._of_all_tokens: set[Node] = set()
        self._reasons: dict[Node, str] = {}
        self._aligned: dict[Node, Layout] = {}
        self._aligned_uses: set[tuple[Node, Node]] = set()

    def follow(self, graph: Graph) -> TokenFlow:
        for node in graph.nodes:
            if node.op == "call_function" and any(self._depends(used) for used in node.all_input_nodes):
                self._step(node)
        self._alone |= self.recreated
        return TokenFlow(
            self._layouts,
            self._aligned,
            frozenset(self._alone),
            self.routed(),
            frozenset(self.recreated),
            frozenset(self._whole & self._alone),
            self._reasons,
        )

    def aligned_and_whole(self) -> frozenset[Node]:
        """Constants that one reader cuts, and another reads as a whole."""
        return frozenset(
            constant
            for constant in self._aligned
            if any(user in self._alone and (user, constant) not in self._aligned_uses for user in constant.users)
        )

    def _depends(self, node: Node) -> bool:
        return node in self._of_all_tokens or node in self.facts or self._has_rows(node)

    def _step(self, node: Node) -> None:
        aligned = dict(self._aligned)
        try:
            found = self._alone_layouts(node)
        except NotThisForm as error:
            self._aligned = aligned
            self._of_all_tokens.add(node)
            self._reasons[node] = str(error)
            found = self._layouts_of_whole(node)
        else:
            self._alone.add(node)
        if found is not None:
            self._layouts[node] = found

    def _alone_layouts(self, node: Node) -> Layouts:
        self._check_operator(node)
        if not any(used in self.facts or self._has_rows(used) for used in node.all_input_nodes):
            self._refuse(node, "reads a value that is computed of all tokens together")
        if any(used in self._of_all_tokens and operation(node) == "getitem" for used in node.all_input_nodes):
            self._refuse(node, "takes one of several values that are computed of all tokens together")
        routed = self.routing_layouts(node)
        if routed is not None:
            return routed.layouts
        self._check_sizes(node)
        found = self._layouts_of_operation(node)
        for layout, value in zip(several(found), several(fake_value(node)), strict=True):
            if layout is None and isinstance(found, tuple):
                continue  # of several values, one that nobody reads
            if layout is None or not fits(layout, value):
                self._refuse(node, "gives tokens in a way that cannot be followed")
            if any(size.free_symbols for size in layout.of_a_row):
                self._refuse(node, "gives each token as many numbers as there are tokens")
        if not any_rows(found):
            self._refuse(node, "computes one value of all tokens")
        return found

    def _check_operator(self, node: Node) -> None:
        target = node.target
        is_known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
        if not (is_known or operation(node) == "getitem" or self.is_routing_operator(node)):
            self._refuse(node, "is no operator of which is known that it leaves tokens apart")
        if draws_random_numbers(node) or mutates(node):
            self._refuse(node, "draws random numbers or writes to its inputs")
        values = several(fake_value(node))
        if not all(isinstance(value, torch.Tensor) for value in values):
            self._refuse(node, "makes a number of tokens")

    def _check_sizes(self, node: Node) -> None:
        """A size may say how long something is, and nothing else: for some tokens it is another one."""
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
            self._refuse(node, "is given the number of tokens")
        if base == "repeat":
            return self._repeated(node, arguments)
        if base == "slice_scatter":
            return self._scattered(node, all_arguments(node))
        if base == "new_empty":
            return self._empty_beside(node, arguments)
        if base in ("view_as_complex", "view_as_real"):
            dimensions = self._layout(arguments["self"]).dimensions
            return Layout(dimensions[:-1] if base == "view_as_complex" else (*dimensions, features(2)))
        return self.with_rows(node)

    def _linear(self, node: Node, arguments: dict[str, Any]) -> Layout:
        layout = self._layout(arguments["input"])
        self._check_only(node, arguments["input"])
        if layout.has_rows_along(len(layout.dimensions) - 1):
            self._refuse(node, "multiplies and adds up tokens")
        return Layout((*layout.dimensions[:-1], features(fake_value(node).shape[-1])))

    def _view(self, node: Node, layout: Layout) -> Layout:
        try:
            return super()._view(node, layout)
        except NotThisForm:
            # All tokens may be taken apart into sequences, however many tokens these have.
            def apart(dimension: Dimension) -> Dimension:
                return tuple(one for part in dimension for one in (self._sequences if part.share == () else (part,)))

            if not self._sequences:
                raise
            return super()._view(node, Layout(tuple(map(apart, layout.dimensions))))

    def _gemm(self, node: Node, base: str, arguments: dict[str, Any]) -> Layout:
        found = super()._gemm(node, base, arguments)
        added = arguments["self"] if base == "addmm" else None
        if added in self._aligned and added in (arguments["mat1"], arguments["mat2"]):
            self._refuse(node, f"reads {named(added)} for each token, and as a matrix for all of them")
        operands = [used for used in node.all_input_nodes if fake_value(used).dim() == 3]
        if base == "bmm" and any(self._layout(used).has_rows_along(0) for used in operands):
            others = [used for used in operands if not self._layout(used).has_rows_along(0)]
            if any(size_expression(fake_value(used).shape[0]) != 1 for used in others):
                self._refuse(node, "multiplies tokens by another matrix for each of them")
        return found

    def _scattered(self, node: Node, arguments: dict[str, Any]) -> Layout:
        """Features in the place of other features of the same tokens."""
        into, source = self._layout(arguments["self"]), self._layout(arguments["src"])
        dim = arguments["dim"] % len(into.dimensions)
        rest = [layout.dimensions[:dim] + layout.dimensions[dim + 1 :] for layout in (into, source)]
        if into.has_rows_along(dim) or source.has_rows_along(dim) or rest[0] != rest[1]:
            self._refuse(node, "writes tokens into others")
        return into

    def _empty_beside(self, node: Node, arguments: dict[str, Any]) -> Layout:
        """Memory in the shape of `self`, but for features: what is written to it must have its tokens there too."""
        like, shape = self._layout(arguments["self"]).dimensions, fake_value(node).shape
        found = Layout(
            tuple(
                dimension if any(part.is_rows for part in dimension) else features(size)
                for dimension, size in zip(like, shape, strict=False)
            )
        )
        if not fits(found, fake_value(node)):
            self._refuse(node, "makes memory in which tokens have no place")
        return found

    def _repeated(self, node: Node, arguments: dict[str, Any]) -> Layout:
        """All tokens again behind all tokens: as if each copy were a feature that stands before them."""
        layout, times = self._layout(arguments["self"]), arguments["repeats"]
        if len(times) != len(layout.dimensions) or not all(isinstance(number, int) for number in times):
            self._refuse(node, "repeats tokens in a way that cannot be followed")
        return Layout(
            tuple(
                (*features(number), *dimension) if layout.has_rows_along(dim) else features(number * size_of(dimension))
                for dim, (number, dimension) in enumerate(zip(times, layout.dimensions, strict=True))
            )
        )

    def _check_only(self, node: Node, wanted: Any) -> None:
        """Tokens come in by `wanted` alone."""
        if any(self._depends(used) for used in node.all_input_nodes if used is not wanted):
            self._refuse(node, "multiplies tokens by other tokens")

    # ----------------------------------------------------------------------------------------------------- constants

    def _check_constant(self, node: Node, constant: Node, layout: Layout) -> None:
        """A constant may have another value for each token: then it is cut as the tokens are."""
        value = fake_value(constant)
        dimensions = []
        for place in range(-value.dim(), 0):
            met, size = layout.dimensions[place], size_expression(value.shape[place])
            if not any(part.is_rows for part in met) or size == 1:
                dimensions.append(features(size))
            elif size_of(met) == size:
                dimensions.append(met)
            else:
                self._refuse(node, f"meets tokens with {named(constant)}, which is not there for all of them")
        found = Layout(tuple(dimensions))
        if not found.has_rows:
            return
        if constant in self._read_whole or self._aligned.setdefault(constant, found) != found:
            self._refuse(node, f"meets tokens with {named(constant)} in another way than before")
        self._aligned_uses.add((node, constant))

    # --------------------------------------------------------------------------------------------------------- whole

    def _layouts_of_whole(self, node: Node) -> Layouts:
        """Where tokens lie in what is computed of all of them; None where that is not known.

        What a token meets does not matter here: a value has a layout if its numbers of each token lie in its place.
        """
        value = fake_value(node)
        if operation(node) == "getitem":
            source, place = node.args
            known = self._layouts.get(source)  # type: ignore[arg-type]
            return known[place] if isinstance(known, tuple) else None  # type: ignore[index]
        if not all(isinstance(one, torch.Tensor) for one in several(value)):
            return None
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or not self._has_rows(first):
            return None
        dimensions, base = self._layout(first).dimensions, base_operation(node)
        found: Layouts = None
        if has_trait(node, Trait.ATTENTION) and len(dimensions) == 4:
            # For each dimension of the result that of the queries.
            order = (0, 2, 1) if base == "moepass::trie_attention" else (0, 1, 2)
            found = Layout((*(dimensions[place] for place in order), features(several(value)[0].shape[-1])))
        elif base in ("mm", "bmm"):
            found = Layout((*dimensions[:-1], features(value.shape[-1])))
        elif not has_trait(node, Trait.FILL, Trait.GROUP_NORM) and self._follows_rules(node):
            aligned = dict(self._aligned)
            try:
                found = self.with_rows(node)
            except NotThisForm:
                found = None
            self._aligned = aligned
        if isinstance(found, Layout) and isinstance(value, (tuple, list)):
            found = (found, *[None] * (len(value) - 1))
        if not any_rows(found) or not all(
            layout is None or fits(layout, one) for layout, one in zip(several(found), several(value), strict=True)
        ):
            return None
        return found

    def _follows_rules(self, node: Node) -> bool:
        target = node.target
        is_known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
        knows_inputs = all(self._has_rows(used) or not self._depends(used) for used in node.all_input_nodes)
        return is_known and knows_inputs and not any(used in self.facts for used in node.all_input_nodes)

    def _refuse(self, node: Node, what: str) -> NoReturn:
        raise NotThisForm(f"{named(node)} {what}")
