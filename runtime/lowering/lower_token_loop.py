"""Lower a segment that treats every token alone as a loop: some tokens at a time, into outputs that are there before.

Contract
    in    a segment that is a region, how its parts are lowered, and the most tokens that run at a time
    out   TokenLoop: called with a list of the segment's inputs, gives its outputs; or why not

The program for some tokens (`passes/segments/token_program.py`) is cut at the edges of its experts and lowered like a
graph, for any number of tokens from 2 on; a single token runs operator by operator. Temporary values are then as large
as those of one chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._guards import tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.graph.source_lines import in_words, named, source_line
from moepass.passes.ir.segment import TOKEN_LOOP, NotLowered
from moepass.passes.segments.partition import cut_into_segments
from moepass.passes.segments.token_program import (
    Factor,
    NotByTokenError,
    TokenDims,
    TokenFactor,
    TokenProgram,
    read_token_program,
)

SEQUENCES, TOKENS, ALL_TOKENS = TokenFactor.SEQUENCES, TokenFactor.TOKENS, TokenFactor.ALL_TOKENS
LowerSegments = Callable[[GraphModule], GraphModule]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [`first`, `first` + `tokens`) of each of the sequences [`sequence`, `sequence` + `sequences`).

    More than one sequence come whole. There are `all_sequences`, with `length` tokens each."""

    sequence: int
    sequences: int
    first: int
    tokens: int
    all_sequences: int
    length: int

    @property
    def count(self) -> int:
        return self.sequences * self.tokens


def chunks_of(sequences: int, length: int, most: int) -> Iterator[Chunk]:
    """Chunks of at most `most` tokens, of nearly equal sizes: of one sequence, or of several whole ones."""
    if not sequences or not length:
        return
    if length > most:
        number = -(-length // most)
        for sequence in range(sequences):
            for part in range(number):
                first, end = part * length // number, (part + 1) * length // number
                yield Chunk(sequence, 1, first, end - first, sequences, length)
        return
    number = -(-sequences // (most // length))
    for part in range(number):
        first, end = part * sequences // number, (part + 1) * sequences // number
        yield Chunk(first, end - first, 0, length, sequences, length)


def _view_of(whole: torch.Tensor, dims: TokenDims, chunk: Chunk) -> torch.Tensor:
    """The memory of a chunk's tokens in `whole`, in one dimension for each factor."""
    sizes = {SEQUENCES: chunk.all_sequences, TOKENS: chunk.length, ALL_TOKENS: chunk.all_sequences * chunk.length}
    ranges = {
        SEQUENCES: (chunk.sequence, chunk.sequences),
        TOKENS: (chunk.first, chunk.tokens),
        ALL_TOKENS: (chunk.sequence * chunk.length + chunk.first, chunk.count),
    }
    found = whole.view([factor if isinstance(factor, int) else sizes[factor] for factor in dims.in_order])
    for dim, factor in enumerate(dims.in_order):
        if not isinstance(factor, int):
            found = found.narrow(dim, *ranges[factor])
    return found


def take(whole: torch.Tensor, dims: TokenDims, chunk: Chunk) -> torch.Tensor:
    """A chunk's tokens as those of one sequence: a view, or a copy where memory does not allow one."""
    found, order = _view_of(whole, dims, chunk), dims.in_order
    if chunk.sequences > 1 and TOKENS in order:
        tokens = order.index(TOKENS)
        if SEQUENCES in order:
            sequences = order.index(SEQUENCES)
            joined = _tokens_alone(order)
            found = found.movedim(sequences, joined).flatten(joined, joined + 1).unsqueeze(sequences)
        else:
            # The same for all sequences.
            shape = list(found.shape)
            found = found.unsqueeze(tokens).expand(*shape[:tokens], chunk.sequences, *shape[tokens:])
            found = found.flatten(tokens, tokens + 1)
    sizes = iter(found.shape)
    return found.reshape([math.prod(next(sizes) for _ in factors) for factors in dims.factors])


def put(part: torch.Tensor, whole: torch.Tensor, dims: TokenDims, chunk: Chunk) -> None:
    """Write what was computed of a chunk's tokens to their places."""
    target, order = _view_of(whole, dims, chunk), dims.in_order
    if chunk.sequences > 1 and TOKENS in order:
        sequences, joined = order.index(SEQUENCES), _tokens_alone(order)
        alone = [factor if isinstance(factor, int) else chunk.count for factor in order if factor is not SEQUENCES]
        apart = part.reshape(alone).unflatten(joined, (chunk.sequences, chunk.tokens))
        target.copy_(apart.movedim(joined, sequences))
    else:
        target.copy_(part.reshape(target.shape))


def _tokens_alone(order: Sequence[Factor]) -> int:
    """The place of tokens where that of sequences is left out."""
    sequences, tokens = order.index(SEQUENCES), order.index(TOKENS)
    return tokens - (sequences < tokens)


class TokenLoop:
    """Runs a segment some tokens at a time: called with a list of its inputs, gives its outputs.

    `body` takes the number of tokens and the tensors of a chunk. Weights may come in parts, which it takes as they are.
    """

    def __init__(
        self,
        segment: GraphModule,
        program: TokenProgram,
        body: GraphModule,
        guards: Sequence[sympy.Expr],
        symbol: sympy.Symbol,
        chunk_tokens: int,
    ) -> None:
        self.program = program
        self.body = body
        self.chunk_tokens = chunk_tokens
        self._alone = program.body
        self._guards, self._symbol = tuple(guards), symbol
        self._inputs = graph_inputs(segment.graph)
        outputs: Any = segment.graph.output_node().args[0]
        self._outputs = [fake_value(node) for node in outputs]
        self._orders = [_memory_order(fake_value(self._inputs[place])) for place in program.tensors]
        self._is_known: dict[int, bool] = {}

    def __call__(self, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        sizes = {
            fake_value(node).node.expr: value
            for node, value in zip(self._inputs, inputs, strict=True)
            if isinstance(fake_value(node), torch.SymInt)
        }
        tensors = [inputs[place] for place in self.program.tensors]
        inputs.clear()
        sequences, length = (
            _evaluated(size, sizes) for size in (self.program.sequences, self.program.tokens_per_sequence)
        )
        outputs = [_empty(value, sizes) for value in self._outputs]
        for chunk in chunks_of(sequences, length, self.chunk_tokens):
            given = [
                tensor if dims is None else _dense(take(tensor, dims, chunk), order)
                for tensor, dims, order in zip(tensors, self.program.inputs, self._orders, strict=True)
            ]
            results = (self.body if self._holds(chunk.count) else self._alone)(chunk.count, *given)
            del given
            for result, whole, dims in zip(results, outputs, self.program.outputs, strict=True):
                put(result, whole, dims, chunk)
            del results
        return tuple(outputs)

    def _holds(self, tokens: int) -> bool:
        """Whether what was compiled is right for so many tokens: a symbolic size is 2 or more, and guards hold."""
        if tokens not in self._is_known:
            values = {self._symbol: sympy.Integer(tokens)}
            self._is_known[tokens] = tokens > 1 and all(guard.xreplace(values) == sympy.true for guard in self._guards)
        return self._is_known[tokens]


def _memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    return sorted(range(value.dim()), key=lambda dim: (-_hint(value.stride(dim)), dim))


def _dense(part: torch.Tensor, order: list[int]) -> torch.Tensor:
    """`part` without gaps and with its dimensions in that order in memory, as was compiled for: itself if it is so."""
    stride = 1
    for dim in reversed(order):
        if part.shape[dim] != 1 and part.stride(dim) != stride:
            return part.permute(order).contiguous().permute([order.index(dim) for dim in range(part.dim())])
        stride *= part.shape[dim]
    return part


def _evaluated(size: Any, sizes: dict[sympy.Expr, int]) -> int:
    expression = size if isinstance(size, sympy.Expr) else size_expression(size)
    return int(expression.xreplace({symbol: sympy.Integer(value) for symbol, value in sizes.items()}))


def _empty(value: torch.Tensor, sizes: dict[sympy.Expr, int]) -> torch.Tensor:
    shape = [_evaluated(size, sizes) for size in value.shape]
    strides = [_evaluated(stride, sizes) for stride in value.stride()]
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def lower_token_loop(segment: GraphModule, chunk_tokens: int, lower: LowerSegments) -> TokenLoop | NotLowered:
    """`segment` as a loop over chunks of at most `chunk_tokens` tokens, or why it runs all tokens at once."""
    try:
        program = read_token_program(segment)
        # Tensors made here belong to no mode of the caller, which is in the middle of a capture.
        with tracing(None), unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            mode, symbol = _describe(program, segment, chunk_tokens)
            body = lower(cut_into_segments(program.body).top)
    except NotByTokenError as error:
        reason = in_words(str(error), segment.graph, error.node)
        return NotLowered(TOKEN_LOOP, error.node.name, reason, source_line(error.node))
    assert mode.shape_env is not None
    guards = [guard.expr for guard in mode.shape_env.guards]
    loop = TokenLoop(segment, program, body, guards, symbol, chunk_tokens)
    if not loop._holds(max(2, chunk_tokens)):
        node = next(iter(segment.graph.nodes))
        reason = f"what was compiled for some tokens does not hold for {chunk_tokens}: {guards}"
        return NotLowered(TOKEN_LOOP, node.name, reason)
    return loop


def _describe(program: TokenProgram, segment: GraphModule, chunk_tokens: int) -> tuple[FakeTensorMode, sympy.Symbol]:
    """Give every node of the body a fake value, in which the number of tokens is a symbol."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    env = ShapeEnv()
    # Two chunks of one sequence have nearly equal sizes, and no chunk is larger.
    hint = max(2, chunk_tokens)
    symbol = env.create_symbol(hint, ConstantSource("tokens"), dynamic_dim=DimDynamic.DYNAMIC)
    tokens = env.create_symintnode(symbol, hint=hint)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    given = graph_inputs(segment.graph)
    values: list[Any] = [tokens]
    for place, dims, shape in zip(program.tensors, program.inputs, program.shapes, strict=True):
        values.append(
            _fake_input(
                mode, given[place], dims, [size.factor * tokens if size.by_token else size.factor for size in shape]
            )
        )
    with enable_python_dispatcher():
        FakeTensorProp(program.body, mode).propagate_dont_convert_inputs(*values)
    for node, shape in program.expected.items():
        found = [size_expression(size) for size in fake_value(node).shape]
        if found != [sympy.expand(size.factor * symbol) if size.by_token else size.factor for size in shape]:
            raise NotByTokenError(node, f"{named(node)} has the sizes {found} for {symbol} tokens")
    return mode, symbol


def _fake_input(mode: FakeTensorMode, node: Node, dims: TokenDims | None, shape: list[Any]) -> torch.Tensor:
    """A constant as it is, and what a chunk has of a value that is cut: see `_dense`."""
    value = fake_value(node)
    with mode:
        if dims is None:
            if not all(size_expression(stride).is_Integer for stride in value.stride()):
                raise NotByTokenError(node, f"{named(node)} lies in memory as only a run tells")
            return torch.empty_strided(
                shape, [int(stride) for stride in value.stride()], dtype=value.dtype, device=value.device
            )
        order = _memory_order(value)
        base = torch.empty([shape[dim] for dim in order], dtype=value.dtype, device=value.device)
        inverse = [order.index(dim) for dim in range(value.dim())]
        return base.permute(inverse)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
