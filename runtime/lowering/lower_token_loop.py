"""Lower a segment that treats every token alone as a loop over chunks of tokens, which writes into allocated outputs.

Contract
    in    a segment that is a region, the lowering of its parts, and the most tokens per chunk
    out   TokenLoop: takes a list of the segment's inputs and returns its outputs; or a reason

The program for one chunk (`passes/segments/token_program.py`) is cut at the edges of its experts and lowered like a
graph, for any number of tokens from 2 on. A single token runs operator by operator. Temporary values then have the size
of one chunk.
"""

from __future__ import annotations

import contextvars
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.graph.source_lines import in_words, source_line
from moepass.passes.ir.segment import TOKEN_LOOP, NotLowered
from moepass.passes.ir.token_chunks import Chunk, chunks_of
from moepass.passes.segments.partition import cut_into_segments
from moepass.passes.segments.token_body import describe_body, memory_order
from moepass.passes.segments.token_program import (
    Factor,
    NotByTokenError,
    TokenDims,
    TokenFactor,
    TokenProgram,
    read_token_program,
)
from moepass.runtime.lowering.boxed_code import run_by_list

SEQUENCES, TOKENS, ALL_TOKENS = TokenFactor.SEQUENCES, TokenFactor.TOKENS, TokenFactor.ALL_TOKENS
logger = logging.getLogger("moepass")
# Tokens per chunk that the current run chose; None keeps the size of each loop.
_chunk_of_run: contextvars.ContextVar[int | None] = contextvars.ContextVar("chunk", default=None)


class ChunkOfRun:
    """A context in which loops over chunks of tokens take `tokens` tokens at a time; None keeps their own size."""

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens

    def __enter__(self) -> None:
        self._reset = _chunk_of_run.set(self._tokens)

    def __exit__(self, *_: object) -> None:
        _chunk_of_run.reset(self._reset)


def _view_of(tensor: torch.Tensor, dims: TokenDims, chunk: Chunk) -> torch.Tensor:
    """Return the memory of a chunk's tokens in `tensor`, with one dimension for each factor."""
    sizes = {SEQUENCES: chunk.all_sequences, TOKENS: chunk.length, ALL_TOKENS: chunk.all_sequences * chunk.length}
    ranges = {
        SEQUENCES: (chunk.sequence, chunk.sequences),
        TOKENS: (chunk.first, chunk.tokens),
        ALL_TOKENS: (chunk.sequence * chunk.length + chunk.first, chunk.count),
    }
    view = tensor.view([factor if isinstance(factor, int) else sizes[factor] for factor in dims.in_order])
    for dim, factor in enumerate(dims.in_order):
        if not isinstance(factor, int):
            view = view.narrow(dim, *ranges[factor])
    return view


def take(tensor: torch.Tensor, dims: TokenDims, chunk: Chunk) -> torch.Tensor:
    """Return a chunk's tokens as one sequence: a view, or a copy if the strides do not allow a view."""
    view, order = _view_of(tensor, dims, chunk), dims.in_order
    if chunk.sequences > 1 and TOKENS in order:
        tokens = order.index(TOKENS)
        if SEQUENCES in order:
            sequences = order.index(SEQUENCES)
            joined = _tokens_alone(order)
            view = view.movedim(sequences, joined).flatten(joined, joined + 1).unsqueeze(sequences)
        else:
            # All sequences share these values.
            shape = list(view.shape)
            view = view.unsqueeze(tokens).expand(*shape[:tokens], chunk.sequences, *shape[tokens:])
            view = view.flatten(tokens, tokens + 1)
    sizes = iter(view.shape)
    return view.reshape([math.prod(next(sizes) for _ in factors) for factors in dims.factors])


def put(result: torch.Tensor, output: torch.Tensor, dims: TokenDims, chunk: Chunk) -> None:
    """Write the results of a chunk's tokens into `output`."""
    target, order = _view_of(output, dims, chunk), dims.in_order
    if chunk.sequences > 1 and TOKENS in order:
        sequences, joined = order.index(SEQUENCES), _tokens_alone(order)
        shape = [factor if isinstance(factor, int) else chunk.count for factor in order if factor is not SEQUENCES]
        by_sequence = result.reshape(shape).unflatten(joined, (chunk.sequences, chunk.tokens))
        target.copy_(by_sequence.movedim(joined, sequences))
    else:
        target.copy_(result.reshape(target.shape))


def _tokens_alone(order: Sequence[Factor]) -> int:
    """Return the dimension of tokens if the dimension of sequences is left out."""
    sequences, tokens = order.index(SEQUENCES), order.index(TOKENS)
    return tokens - (sequences < tokens)


class TokenLoop:
    """Runs a segment in chunks of tokens: call it with a list of its inputs. It returns the segment's outputs.

    `body` takes the number of tokens and the tensors of a chunk. Weights may come in parts, which are passed on.
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
        self._run, self._run_alone = run_by_list(body), run_by_list(program.body)
        self._guards, self._symbol = tuple(guards), symbol
        self._inputs = graph_inputs(segment.graph)
        outputs: Any = segment.graph.output_node().args[0]
        self._outputs = [fake_value(node) for node in outputs]
        self._orders = [memory_order(fake_value(self._inputs[position])) for position in program.tensors]
        self._held: dict[int, bool] = {}

    def __call__(self, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        """Return the segment's outputs and empty `inputs`."""
        sizes = {
            fake_value(node).node.expr: value
            for node, value in zip(self._inputs, inputs, strict=True)
            if isinstance(fake_value(node), torch.SymInt)
        }
        tensors = [inputs[position] for position in self.program.tensors]
        inputs.clear()
        sequences, length = (
            _evaluated(size, sizes) for size in (self.program.sequences, self.program.tokens_per_sequence)
        )
        outputs = [_empty(value, sizes) for value in self._outputs]
        for chunk in chunks_of(sequences, length, _chunk_of_run.get() or self.chunk_tokens):
            arguments: list[Any] = [chunk.count]
            arguments += [
                tensor if dims is None else _dense(take(tensor, dims, chunk), order)
                for tensor, dims, order in zip(tensors, self.program.inputs, self._orders, strict=True)
            ]
            results = (self._run if self._is_right_for(chunk.count) else self._run_alone)(arguments)
            for result, output, dims in zip(results, outputs, self.program.outputs, strict=True):
                put(result, output, dims, chunk)
            del results
        return tuple(outputs)

    def holds(self, tokens: int) -> bool:
        """Return whether the compiled body is right for this number of tokens: it is 2 or more, and guards hold."""
        values = {self._symbol: sympy.Integer(tokens)}
        return tokens > 1 and all(guard.xreplace(values) == sympy.true for guard in self._guards)

    def _is_right_for(self, tokens: int) -> bool:
        if tokens not in self._held:
            self._held[tokens] = self.holds(tokens)
            if tokens > 1 and not self._held[tokens]:
                logger.warning(
                    "chunks of %d tokens run operator by operator: the compiled code needs %s", tokens, self._guards
                )
        return self._held[tokens]


def _dense(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return `tensor` without gaps, with its dimensions in the order in memory that was compiled for."""
    stride = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != stride:
            return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])
        stride *= tensor.shape[dim]
    return tensor


def _evaluated(size: Any, sizes: dict[sympy.Expr, int]) -> int:
    expression = size if isinstance(size, sympy.Expr) else size_expression(size)
    return int(expression.xreplace({symbol: sympy.Integer(value) for symbol, value in sizes.items()}))


def _empty(value: torch.Tensor, sizes: dict[sympy.Expr, int]) -> torch.Tensor:
    shape = [_evaluated(size, sizes) for size in value.shape]
    strides = [_evaluated(stride, sizes) for stride in value.stride()]
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def lower_token_loop(
    segment: GraphModule, chunk_tokens: int, lower: Callable[[GraphModule], GraphModule]
) -> TokenLoop | NotLowered:
    """Return `segment` as a loop over chunks of at most `chunk_tokens` tokens, or why it runs all tokens at once."""
    try:
        program = read_token_program(segment)
        # Tensors made here must not belong to the fake mode of the capture in progress.
        with tracing(None), unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            mode, symbol = describe_body(program, segment, chunk_tokens)
            body = lower(cut_into_segments(program.body).top)
    except NotByTokenError as error:
        reason = in_words(str(error), segment.graph, error.node)
        return NotLowered(TOKEN_LOOP, error.node.name, reason, source_line(error.node))
    assert mode.shape_env is not None
    guards = [guard.expr for guard in mode.shape_env.guards]
    loop = TokenLoop(segment, program, body, guards, symbol, chunk_tokens)
    if not loop.holds(max(2, chunk_tokens)):
        node = next(iter(segment.graph.nodes))
        reason = f"the code that was compiled for a chunk is not valid for {chunk_tokens} tokens: {guards}"
        return NotLowered(TOKEN_LOOP, node.name, reason)
    return loop
