"""Fake values of a token program for a symbolic number of tokens.

Contract
    in    a token program and the segment from which it was read
    out   every node of its body has a fake value, in which the number of tokens is a symbol
"""

from __future__ import annotations

from collections.abc import Sequence
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
from moepass.passes.graph.source_lines import named
from moepass.passes.segments.token_program import NotByTokenError, TokenDims, TokenProgram

# Replaces data-dependent sizes.
_ANY_SIZE = 4096


def describe_body(
    program: TokenProgram, segment: GraphModule, chunk_tokens: int
) -> tuple[FakeTensorMode, sympy.Symbol]:
    """Set a fake value on every node of the body, with a symbol for the number of tokens."""
    # Tensors made here must not belong to the caller's fake mode, because the caller may be capturing a graph.
    with tracing(None), unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        return _described(program, segment, chunk_tokens)


def _described(program: TokenProgram, segment: GraphModule, chunk_tokens: int) -> tuple[FakeTensorMode, sympy.Symbol]:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    env = ShapeEnv()
    # Chunks of one sequence have nearly equal sizes, and none is larger.
    hint = max(2, chunk_tokens)
    symbol = env.create_symbol(hint, ConstantSource("tokens"), dynamic_dim=DimDynamic.DYNAMIC)
    tokens = env.create_symintnode(symbol, hint=hint)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    inputs = graph_inputs(segment.graph)
    values: list[Any] = [tokens]
    for position, dims, shape in zip(program.tensors, program.inputs, program.shapes, strict=True):
        sizes = [size.factor * tokens if size.by_token else size.factor for size in shape]
        values.append(_fake_input(mode, inputs[position], dims, sizes))
    with enable_python_dispatcher():
        FakeTensorProp(program.body, mode).propagate_dont_convert_inputs(*values)
    for node, shape in program.expected.items():
        actual = [size_expression(size) for size in fake_value(node).shape]
        if actual != [sympy.expand(size.factor * symbol) if size.by_token else size.factor for size in shape]:
            raise NotByTokenError(node, f"{named(node)} has the sizes {actual} for {symbol} tokens")
    return mode, symbol


def _fake_input(mode: FakeTensorMode, node: Node, dims: TokenDims | None, shape: list[Any]) -> torch.Tensor:
    """Return a constant with its strides, or the chunk of a value that is cut, in the same memory order and dense."""
    value = fake_value(node)
    with mode:
        if dims is None:
            if not all(size_expression(stride).is_Integer for stride in value.stride()):
                raise NotByTokenError(node, f"{named(node)} has strides that are known only when it runs")
            return torch.empty_strided(
                shape, [int(stride) for stride in value.stride()], dtype=value.dtype, device=value.device
            )
        order = memory_order(value)
        base = torch.empty([shape[dim] for dim in order], dtype=value.dtype, device=value.device)
        inverse = [order.index(dim) for dim in range(value.dim())]
        return base.permute(inverse)


def memory_order(value: torch.Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    strides: Sequence[Any] = value.stride()
    is_known = all(stride.node.has_hint() for stride in strides if isinstance(stride, torch.SymInt))
    # Any number for a data-dependent size gives the right order, because a stride is the product of the inner sizes.
    steps = list(map(_hint if is_known else _with_any_sizes, strides))
    return sorted(range(value.dim()), key=lambda dim: (-steps[dim], dim))


def _hint(stride: Any) -> int:
    return int(stride.node.hint) if isinstance(stride, torch.SymInt) else int(stride)


def _with_any_sizes(stride: Any) -> int:
    expression = size_expression(stride)
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(_ANY_SIZE))))
