"""Read a segment that treats every token alone as a program for some tokens.

Contract
    in    a segment that is a region (`passes/tokens`), with the places of tokens in its values
    out   the same computation for `tokens` tokens, whatever number that is, as a graph whose first input is that
          number; and where tokens lie in inputs and outputs (TokenProgram)
          NotByTokenError, with the node that stands in the way, where there is no such graph

The program knows one sequence [1, tokens, ..]: tokens that are alone do not know where their sequence ends. Every size
that is written into the segment and depends on the number of tokens, or of sequences, is computed of `tokens` instead.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.node_arguments import all_arguments
from moepass.passes.graph.nodes import fake_value, graph_inputs, is_call
from moepass.passes.graph.operations import base_operation
from moepass.passes.graph.source_lines import named
from moepass.passes.ir.segment import ALL_TOKENS_KEY, REGION_KEY, TOKENS_KEY
from moepass.passes.rows.row_layout import Dimension, Layout, Part

aten = torch.ops.aten
_SHAPED = {"view": 1, "_unsafe_view": 1, "reshape": 1, "expand": 1, "new_empty": 1}
# What is made for as many rows as there are.
_MADE_AGAIN = (aten.arange.default, torch.ops.prims.iota.default, aten.empty.memory_format)


class NotByTokenError(Exception):
    """This segment cannot run some tokens at a time: `node` stands in the way. The text says why."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class TokenFactor(enum.Enum):
    """A factor of a dimension that has something for each sequence, for each token of one, or for each of all."""

    SEQUENCES = enum.auto()
    TOKENS = enum.auto()
    ALL_TOKENS = enum.auto()


Factor = int | TokenFactor


@dataclasses.dataclass(frozen=True)
class TokenDims:
    """Where the tokens of a value lie: `factors` of each dimension, outermost first, whose product is its size.

    Either ALL_TOKENS stands in one place, or TOKENS in one and SEQUENCES in another one. Without SEQUENCES there is but
    one sequence, or what there is for a token is the same in all of them. Whole numbers are elements of each token.
    """

    factors: tuple[tuple[Factor, ...], ...]

    @property
    def in_order(self) -> tuple[Factor, ...]:
        """The factors of all dimensions."""
        return tuple(factor for factors in self.factors for factor in factors)


# What stands in the factors of a value beside whole numbers, sorted by name.
_TOKENS_IN_ONE_PLACE = (
    [TokenFactor.ALL_TOKENS],
    [TokenFactor.TOKENS],
    [TokenFactor.SEQUENCES, TokenFactor.TOKENS],
)


@dataclasses.dataclass(frozen=True)
class BodySize:
    """`factor` elements, or `factor` for each token."""

    factor: int
    by_token: bool


@dataclasses.dataclass(frozen=True)
class TokenProgram:
    """`body` takes the number of tokens and then the segment's tensors, in their order; those with `inputs` cut.

    `tensors` are the places of these inputs among the segment's; `inputs` and `outputs` say where tokens lie, None: the
    value is the same for all. `shapes` are those of the body's tensors, `expected` those of what it computes.
    """

    body: GraphModule
    tensors: tuple[int, ...]
    inputs: tuple[TokenDims | None, ...]
    shapes: tuple[tuple[BodySize, ...], ...]
    outputs: tuple[TokenDims, ...]
    expected: Mapping[Node, tuple[BodySize, ...]]
    sequences: sympy.Expr
    tokens_per_sequence: sympy.Expr


def is_region(segment: GraphModule) -> bool:
    return any(REGION_KEY in node.meta for node in segment.graph.nodes)


def read_token_program(segment: GraphModule) -> TokenProgram:
    """Raises NotByTokenError."""
    return _Writer(segment).write()


class _Writer:
    def __init__(self, segment: GraphModule) -> None:
        self.segment = segment
        self.graph = Graph()
        self.tokens = self.graph.placeholder("tokens")
        self.values: dict[Node, Node] = {}
        self.expected: dict[Node, tuple[BodySize, ...]] = {}
        self.sizes: dict[BodySize, Any] = {BodySize(1, True): self.tokens}

    def write(self) -> TokenProgram:
        tensors, inputs, shapes = [], [], []
        given = graph_inputs(self.segment.graph)
        for place, node in enumerate(given):
            value = fake_value(node)
            if not isinstance(value, torch.Tensor):
                continue
            layout = node.meta.get(TOKENS_KEY)
            if layout is not None and not isinstance(layout, Layout):
                raise NotByTokenError(node, f"{named(node)} is several values")
            tensors.append(place)
            inputs.append(_token_dims(node, layout) if layout is not None and layout.has_rows else None)
            shapes.append(self._body_shape(node, layout, value.shape))
            copied = self.graph.placeholder(f"input_{place}")
            copied.meta = {key: kept for key, kept in node.meta.items() if key not in ("val", REGION_KEY)}
            self.values[node] = copied
        for node in self.segment.graph.nodes:
            if node.op == "get_attr":
                if (layout := node.meta.get(TOKENS_KEY)) is not None and layout.has_rows:
                    raise NotByTokenError(node, f"{named(node)} is written into the graph for each token")
                self.values[node] = self.graph.node_copy(node)
            elif node.op == "call_function" and not isinstance(fake_value(node), (torch.SymInt, int, torch.SymFloat)):
                self._add(node)
        outputs = cast("Sequence[Node]", self.segment.graph.output_node().args[0])
        places = []
        for node in outputs:
            layout = node.meta.get(TOKENS_KEY)
            if not isinstance(layout, Layout) or not layout.has_rows:
                raise NotByTokenError(node, f"{named(node)} has nothing for each token, and is read behind its region")
            places.append(_token_dims(node, layout))
            if any(isinstance(stride, int) and stride == 0 for stride in fake_value(node).stride()):
                raise NotByTokenError(node, f"{named(node)} shows one number in several places")
        self.graph.output(tuple(self.values[node] for node in outputs))
        body = GraphModule(self.segment, self.graph)
        _check_one_cut(self.segment.graph)
        sequences, length = _sequence_sizes([*given, *outputs])
        for node, dims in zip(outputs, places, strict=True):
            found = dims.in_order
            is_same_for_all = TokenFactor.ALL_TOKENS not in found and TokenFactor.SEQUENCES not in found
            if is_same_for_all and sequences != 1:
                raise NotByTokenError(node, f"{named(node)} has one value for all sequences together")
        return TokenProgram(
            body, tuple(tensors), tuple(inputs), tuple(shapes), tuple(places), self.expected, sequences, length
        )

    def _add(self, node: Node) -> None:
        layout = node.meta.get(TOKENS_KEY)
        if node.meta.get(ALL_TOKENS_KEY):
            self.values[node] = self.values[node.all_input_nodes[0]]
            return
        base = base_operation(node)
        value = fake_value(node)
        target, args = node.target, list(node.args)
        if is_call(node, *_MADE_AGAIN):
            assert isinstance(layout, Layout)
            size = self._size(self._body_size(node, layout.dimensions[0], value.shape[0]))
            args[0] = [size] if is_call(node, aten.empty.memory_format) else size
        elif base in _SHAPED:
            shape = self._body_shape(node, layout if isinstance(layout, Layout) else None, value.shape)
            args[_SHAPED[base]] = [self._size(size) for size in shape]
        elif is_call(node, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            target, args = aten.squeeze.dims, [node.args[0], _squeezed(node)]
        elif is_call(node, aten.slice.Tensor):
            args[2:4] = [bound if isinstance(bound, int) else None for bound in args[2:4]]
        made = self.graph.create_node("call_function", target, *self._mapped(node, tuple(args)), name=node.name)
        made.meta = {key: kept for key, kept in node.meta.items() if key not in ("val", REGION_KEY)}
        self.values[node] = made
        if isinstance(layout, Layout) and isinstance(value, torch.Tensor):
            self.expected[made] = self._body_shape(node, layout, value.shape)

    def _mapped(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, Any]:
        def mapped(used: Node) -> Node:
            if used.graph is self.graph:
                return used
            if used not in self.values:
                raise NotByTokenError(node, f"{named(node)} computes with the size {named(used)}")
            return self.values[used]

        return torch.fx.node.map_arg(args, mapped), torch.fx.node.map_arg(dict(node.kwargs), mapped)

    def _size(self, size: BodySize) -> Any:
        if not size.by_token:
            return size.factor
        if size not in self.sizes:
            with self.graph.inserting_after(self.tokens):
                self.sizes[size] = self.graph.call_function(operator.mul, (self.tokens, size.factor))
        return self.sizes[size]

    def _body_shape(self, node: Node, layout: Layout | None, shape: Sequence[Any]) -> tuple[BodySize, ...]:
        if layout is None:
            return tuple(BodySize(_constant(node, size), False) for size in shape)
        return tuple(
            self._body_size(node, dimension, size) for dimension, size in zip(layout.dimensions, shape, strict=True)
        )

    def _body_size(self, node: Node, dimension: Dimension, size: Any) -> BodySize:
        """Sequences are one in the body, tokens of a sequence and all tokens are `tokens`."""
        rows = [part for part in dimension if part.is_rows]
        if not rows:
            return BodySize(_constant(node, size), False)
        factor, by_token = 1, False
        for part in dimension:
            if len(part.share or ()) > 1:
                raise NotByTokenError(node, f"{named(node)} takes the tokens of a sequence apart")
            if not part.is_rows:
                factor *= _constant(node, part.size)
            elif part.share == () or _is_second_share(part.share):
                by_token = True
            elif not _is_sequences(part.share):
                # Rows sorted by expert: as many for each token as there are experts of it.
                by_token, factor = True, factor * self._rows_per_token(node, part.size)
        return BodySize(factor, by_token)

    def _rows_per_token(self, node: Node, size: sympy.Expr) -> int:
        sequences, length = _sequence_sizes(list(self.segment.graph.nodes))
        ratio = sympy.simplify(size / (sequences * length))
        return _constant(node, ratio)


def _constant(node: Node, size: Any) -> int:
    if isinstance(size, torch.SymInt) and size.node.expr.is_Integer:
        size = int(size.node.expr)
    if isinstance(size, sympy.Expr) and size.is_Integer:
        size = int(size)
    if not isinstance(size, int):
        raise NotByTokenError(node, f"{named(node)} has a size that only a run tells, {size}, beside tokens")
    return size


def _squeezed(node: Node) -> list[int]:
    """The dimensions that `node` leaves out, here where one token is not yet one element."""
    shape = fake_value(node.all_input_nodes[0]).shape
    given = all_arguments(node).get("dim", range(len(shape)))
    wanted = [dim % len(shape) for dim in (given if isinstance(given, (list, tuple, range)) else [given])]
    return [dim for dim in wanted if isinstance(shape[dim], int) and shape[dim] == 1]


def _is_sequences(share: Any) -> bool:
    return bool(share) and share[0][1] == 0 and " x " in share[0][0]


def _is_second_share(share: Any) -> bool:
    return bool(share) and share[0][1] == 1


def _token_dims(node: Node, layout: Layout) -> TokenDims:
    """Raises NotByTokenError where it is not known which tokens lie where, or they lie in several places."""
    dims = TokenDims(tuple(tuple(_factor(node, part) for part in dimension) for dimension in layout.dimensions))
    found = sorted((factor for factor in dims.in_order if isinstance(factor, TokenFactor)), key=lambda one: one.name)
    if found == [TokenFactor.SEQUENCES]:
        raise NotByTokenError(node, f"{named(node)} has one value for each sequence")
    if found not in _TOKENS_IN_ONE_PLACE:
        raise NotByTokenError(node, f"tokens of {named(node)} lie in several places")
    return dims


def _factor(node: Node, part: Part) -> Factor:
    if not part.is_rows:
        return _constant(node, part.size)
    if part.share == ():
        return TokenFactor.ALL_TOKENS
    if len(part.share or ()) == 1 and _is_sequences(part.share):
        return TokenFactor.SEQUENCES
    if len(part.share or ()) == 1 and _is_second_share(part.share):
        return TokenFactor.TOKENS
    raise NotByTokenError(node, f"tokens of {named(node)} are cut in a way that is not followed")


def _check_one_cut(graph: Graph) -> None:
    """All tokens are taken apart into the same sequences, wherever they are."""
    first: str | None = None
    for node in graph.nodes:
        layouts = node.meta.get(TOKENS_KEY)
        for layout in layouts if isinstance(layouts, tuple) else (layouts,):
            for share in layout.shares if layout is not None else ():
                if not (_is_sequences(share) or _is_second_share(share)):
                    continue
                first = first or share[0][0]
                if share[0][0] != first:
                    reason = f"{named(node)} takes all tokens apart into {share[0][0]}, and other values into {first}"
                    raise NotByTokenError(node, reason)


def _sequence_sizes(nodes: Sequence[Node]) -> tuple[sympy.Expr, sympy.Expr]:
    """The number of sequences, and the tokens of each. Where tokens of all lie in one dimension, one sequence.

    Raises NotByTokenError where neither can be told."""
    shares: dict[Any, sympy.Expr] = {}
    flat: sympy.Expr | None = None
    for node in nodes:
        layouts = node.meta.get(TOKENS_KEY)
        for layout in layouts if isinstance(layouts, tuple) else (layouts,):
            for dimension in layout.dimensions if layout is not None else ():
                for part in dimension:
                    if part.share == ():
                        flat = part.size
                    elif part.is_rows and (_is_sequences(part.share) or _is_second_share(part.share)):
                        shares[part.share[0][1]] = part.size
    if len(shares) == 2:
        return shares[0], shares[1]
    if 1 in shares and flat is not None:
        return sympy.simplify(flat / shares[1]), shares[1]
    if flat is None:
        node = next(node for node in nodes if TOKENS_KEY in node.meta)
        raise NotByTokenError(node, f"{named(node)} has tokens of which no sequence is known")
    return sympy.Integer(1), flat
