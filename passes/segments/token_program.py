"""Read a segment that processes every token independently as a program for some of the tokens.

Contract
    in    a segment that is a region (`passes/tokens`), with the token dimensions of its values
    out   the same computation for any number `tokens` of tokens, as a graph whose first input is this number, and the
          token dimensions of its inputs and outputs (TokenProgram)
          NotByTokenError, with the node that prevents it, if there is no such graph

The program processes one sequence [1, tokens, ..], because independent tokens do not depend on where their sequence
ends. Sizes in the segment that depend on the number of tokens or of sequences are computed from `tokens` instead.
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

from moepass.passes.graph.nodes import fake_value, graph_inputs, is_call
from moepass.passes.graph.source_lines import named
from moepass.passes.ir.segment import ALL_TOKENS_KEY, REGION_KEY, TOKENS_KEY
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import base_operation
from moepass.passes.rows.row_layout import Dimension, Layout, Part

aten = torch.ops.aten


class NotByTokenError(Exception):
    """Raised if `node` prevents a segment from being run in chunks of tokens; the message says why."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class TokenFactor(enum.Enum):
    """A factor of a dimension that counts sequences, tokens of one sequence, or all tokens."""

    SEQUENCES = enum.auto()
    TOKENS = enum.auto()
    ALL_TOKENS = enum.auto()


Factor = int | TokenFactor


@dataclasses.dataclass(frozen=True)
class TokenDims:
    """The token dimensions of a value.

    Attributes:
        factors: factors of each dimension, outermost first, whose product is its size. Either ALL_TOKENS occurs once,
            or TOKENS occurs once and SEQUENCES at most once. Without SEQUENCES there is only one sequence, or the value
            is the same for all sequences. Integers count elements of each token
    """

    factors: tuple[tuple[Factor, ...], ...]

    @property
    def in_order(self) -> tuple[Factor, ...]:
        """The factors of all dimensions."""
        return tuple(factor for factors in self.factors for factor in factors)


# The allowed token factors of a value, sorted by name.
_TOKEN_FACTORS = (
    [TokenFactor.ALL_TOKENS],
    [TokenFactor.TOKENS],
    [TokenFactor.SEQUENCES, TokenFactor.TOKENS],
)


@dataclasses.dataclass(frozen=True)
class BodySize:
    """`factor` elements, or `factor` elements for each token."""

    factor: int
    by_token: bool


@dataclasses.dataclass(frozen=True)
class TokenProgram:
    """The computation of a region for some of its tokens.

    Attributes:
        body: graph whose inputs are the number of tokens and then the segment's tensors, in order; tensors with
            `inputs` are cut
        tensors: positions of these tensors among the segment's inputs
        inputs, outputs: their token dimensions; None if the value is the same for all tokens
        shapes: shapes of the body's tensors
        expected: shapes of the values that the body computes
        sequences, tokens_per_sequence: sizes of the segment
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
    """Return whether `segment` is a region that can run in chunks of tokens."""
    return any(REGION_KEY in node.meta for node in segment.graph.nodes)


def read_token_program(segment: GraphModule) -> TokenProgram:
    """Return the program of a region. Raises NotByTokenError if it cannot run in chunks of tokens."""
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
        segment_inputs = graph_inputs(self.segment.graph)
        for position, node in enumerate(segment_inputs):
            value = fake_value(node)
            if not isinstance(value, torch.Tensor):
                continue
            layout = node.meta.get(TOKENS_KEY)
            if layout is not None and not isinstance(layout, Layout):
                raise NotByTokenError(node, f"{named(node)} is a tuple")
            tensors.append(position)
            inputs.append(_token_dims(node, layout) if layout is not None and layout.has_rows else None)
            shapes.append(self._body_shape(node, layout, value.shape))
            copied = self.graph.placeholder(f"input_{position}")
            copied.meta = _kept_meta(node)
            self.values[node] = copied
        for node in self.segment.graph.nodes:
            if node.op == "get_attr":
                if (layout := node.meta.get(TOKENS_KEY)) is not None and layout.has_rows:
                    raise NotByTokenError(node, f"{named(node)} is a constant with an element for each token")
                self.values[node] = self.graph.node_copy(node)
            elif node.op == "call_function" and not isinstance(fake_value(node), (torch.SymInt, int, torch.SymFloat)):
                self._add(node)
        outputs = cast("Sequence[Node]", self.segment.graph.output_node().args[0])
        places = []
        for node in outputs:
            layout = node.meta.get(TOKENS_KEY)
            if not isinstance(layout, Layout) or not layout.has_rows:
                raise NotByTokenError(node, f"{named(node)} has no tokens, but is read after its region")
            places.append(_token_dims(node, layout))
            if any(isinstance(stride, int) and stride == 0 for stride in fake_value(node).stride()):
                raise NotByTokenError(node, f"{named(node)} is expanded: several elements share memory")
        self.graph.output(tuple(self.values[node] for node in outputs))
        body = GraphModule(self.segment, self.graph)
        _check_one_cut(self.segment.graph)
        sequences, length = _sequence_sizes([*segment_inputs, *outputs])
        for node, dims in zip(outputs, places, strict=True):
            factors = dims.in_order
            is_same_for_all = TokenFactor.ALL_TOKENS not in factors and TokenFactor.SEQUENCES not in factors
            if is_same_for_all and sequences != 1:
                raise NotByTokenError(node, f"{named(node)} has one value for all sequences")
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
        if is_call(node, aten.arange.default, torch.ops.prims.iota.default, aten.empty.memory_format):
            assert isinstance(layout, Layout)
            size = self._size(self._body_size(node, layout.dimensions[0], value.shape[0]))
            args[0] = [size] if is_call(node, aten.empty.memory_format) else size
        elif base in ("view", "_unsafe_view", "reshape", "expand", "new_empty"):
            shape = self._body_shape(node, layout if isinstance(layout, Layout) else None, value.shape)
            args[1] = [self._size(size) for size in shape]
        elif is_call(node, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            target, args = aten.squeeze.dims, [node.args[0], _squeezed(node)]
        elif is_call(node, aten.slice.Tensor):
            args[2:4] = [bound if isinstance(bound, int) else None for bound in args[2:4]]
        made = self.graph.create_node("call_function", target, *self._mapped(node, tuple(args)), name=node.name)
        made.meta = _kept_meta(node)
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
        """Return the size of a dimension in the body.

        It is 1 for sequences, and `tokens` both for the tokens of a sequence and for all tokens.
        """
        if not any(component.is_rows for component in dimension):
            return BodySize(_constant(node, size), False)
        factor, by_token = 1, False
        for component in dimension:
            if len(component.share or ()) > 1:
                raise NotByTokenError(node, f"{named(node)} divides the tokens of a sequence")
            if not component.is_rows:
                factor *= _constant(node, component.size)
            elif component.share == () or _is_second_share(component.share):
                by_token = True
            elif not _is_sequences(component.share):
                # Rows sorted by expert: one for each expert of a token.
                by_token, factor = True, factor * self._rows_per_token(node, component.size)
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
        raise NotByTokenError(node, f"{named(node)} has a data-dependent size, {size}, in addition to tokens")
    return size


def _kept_meta(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in ("val", REGION_KEY)}


def _squeezed(node: Node) -> list[int]:
    """Return the dimensions that `node` removes in the segment, excluding tokens, which may have size 1 in the body."""
    shape = fake_value(node.all_input_nodes[0]).shape
    argument = all_arguments(node).get("dim", range(len(shape)))
    dims = [dim % len(shape) for dim in (argument if isinstance(argument, (list, tuple, range)) else [argument])]
    return [dim for dim in dims if isinstance(shape[dim], int) and shape[dim] == 1]


def _is_sequences(share: Any) -> bool:
    return bool(share) and share[0][1] == 0 and " x " in share[0][0]


def _is_second_share(share: Any) -> bool:
    return bool(share) and share[0][1] == 1


def _token_dims(node: Node, layout: Layout) -> TokenDims:
    """Return the token dimensions.

    Raises NotByTokenError if they are unknown, or if tokens are in several dimensions.
    """
    dims = TokenDims(tuple(tuple(_factor(node, component) for component in dim) for dim in layout.dimensions))
    factors = sorted((item for item in dims.in_order if isinstance(item, TokenFactor)), key=lambda item: item.name)
    if factors == [TokenFactor.SEQUENCES]:
        raise NotByTokenError(node, f"{named(node)} has one value for each sequence")
    if factors not in _TOKEN_FACTORS:
        raise NotByTokenError(node, f"{named(node)} has tokens in several dimensions")
    return dims


def _factor(node: Node, component: Part) -> Factor:
    if not component.is_rows:
        return _constant(node, component.size)
    if component.share == ():
        return TokenFactor.ALL_TOKENS
    if len(component.share or ()) == 1 and _is_sequences(component.share):
        return TokenFactor.SEQUENCES
    if len(component.share or ()) == 1 and _is_second_share(component.share):
        return TokenFactor.TOKENS
    raise NotByTokenError(node, f"{named(node)} divides its tokens in a way that moepass does not follow")


def _check_one_cut(graph: Graph) -> None:
    """Raise NotByTokenError unless all values divide their tokens into the same sequences."""
    first: str | None = None
    for node in graph.nodes:
        layouts = node.meta.get(TOKENS_KEY)
        for layout in layouts if isinstance(layouts, tuple) else (layouts,):
            for share in layout.shares if layout is not None else ():
                if not (_is_sequences(share) or _is_second_share(share)):
                    continue
                first = first or share[0][0]
                if share[0][0] != first:
                    reason = f"{named(node)} divides all tokens into {share[0][0]}, but other values into {first}"
                    raise NotByTokenError(node, reason)


def _sequence_sizes(nodes: Sequence[Node]) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the number of sequences and the tokens of each; one sequence if one dimension has all tokens.

    Raises NotByTokenError if neither is known.
    """
    shares: dict[Any, sympy.Expr] = {}
    flat: sympy.Expr | None = None
    for node in nodes:
        layouts = node.meta.get(TOKENS_KEY)
        for layout in layouts if isinstance(layouts, tuple) else (layouts,):
            for dimension in layout.dimensions if layout is not None else ():
                for component in dimension:
                    if component.share == ():
                        flat = component.size
                    elif component.is_rows and (_is_sequences(component.share) or _is_second_share(component.share)):
                        shares[component.share[0][1]] = component.size
    if len(shares) == 2:
        return shares[0], shares[1]
    if 1 in shares and flat is not None:
        return sympy.simplify(flat / shares[1]), shares[1]
    if flat is None:
        node = next(node for node in nodes if TOKENS_KEY in node.meta)
        raise NotByTokenError(node, f"{named(node)} has tokens whose sequences are unknown")
    return sympy.Integer(1), flat
