"""Lower a segment that treats every token alone as a loop: some tokens at a time, into outputs that are there before.

Contract
    in    a segment that is a region, how its parts are lowered, and the most tokens that run at a time
    out   TokenLoop: called with a list of the segment's inputs, gives its outputs; or why not

The program for some tokens (`passes/segments/token_program.py`) is cut at the edges of its experts and lowered like a
graph, for any number of tokens from 2 on; a single token runs operator by operator. Temporary values are then as large
as those of one chunk.
"""

from __future__ import annotations

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
from moepass.runtime.lowering.chosen_chunk import chunk_tokens_of_run

SEQUENCES, TOKENS, ALL_TOKENS = TokenFactor.SEQUENCES, TokenFactor.TOKENS, TokenFactor.ALL_TOKENS
logger = logging.getLogger("moepass")
LowerSegments = Callable[[GraphModule], GraphModule]


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
        self._run, self._run_alone = run_by_list(body), run_by_list(program.body)
        self._guards, self._symbol = tuple(guards), symbol
        self._inputs = graph_inputs(segment.graph)
        outputs: Any = segment.graph.output_node().args[0]
        self._outputs = [fake_value(node) for node in outputs]
        self._orders = [memory_order(fake_value(self._inputs[place])) for place in program.tensors]
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
        for chunk in chunks_of(sequences, length, chunk_tokens_of_run() or self.chunk_tokens):
            given: list[Any] = [chunk.count]
            given += [
                tensor if dims is None else _dense(take(tensor, dims, chunk), order)
                for tensor, dims, order in zip(tensors, self.program.inputs, self._orders, strict=True)
            ]
            results = (self._run if self._is_right_for(chunk.count) else self._run_alone)(given)
            for result, whole, dims in zip(results, outputs, self.program.outputs, strict=True):
                put(result, whole, dims, chunk)
            del results
        return tuple(outputs)

    def _is_right_for(self, tokens: int) -> bool:
        is_known, is_right = tokens in self._is_known, self._holds(tokens)
        if not is_right and not is_known and tokens > 1:
            logger.warning(
                "chunks of %d tokens run operator by operator: what was compiled needs %s", tokens, self._guards
            )
        return is_right

    def _holds(self, tokens: int) -> bool:
        """Whether what was compiled is right for so many tokens: a symbolic size is 2 or more, and guards hold."""
        if tokens not in self._is_known:
            values = {self._symbol: sympy.Integer(tokens)}
            self._is_known[tokens] = tokens > 1 and all(guard.xreplace(values) == sympy.true for guard in self._guards)
        return self._is_known[tokens]


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
            mode, symbol = describe_body(program, segment, chunk_tokens)
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
