"""Describe a top-level graph of segments as operations on memory, in the order in which they run.

Contract
    in    a top-level graph, whether its segments are fused, and whether some run in chunks of tokens
    out   its operations (held_bytes.py), and the storages that the graph returns

    eager       each operator of the captured graph is one operation; views take no memory
    fused       Inductor computes some values in the kernels that read them (fusion.py). Experts are one operation for
                each kernel, or one for the loop over experts
    chunks      a segment in chunks is one operation, with all of its inputs and outputs, and the peaks of one chunk

Inputs of the graph, weights and slots do not count: they exist before and after a run.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs, is_call, module_path, several
from moepass.passes.ir.shards import FP8_BLOCK
from moepass.passes.ir.slot_operations import BANK_TENSOR, EXPERT_STACK, SLOT_OPS, gather
from moepass.passes.memory.fusion import NO_FUSION, Fusion, fusion_of, is_computed, is_kernel
from moepass.passes.memory.held_bytes import Operation, peaks
from moepass.passes.memory.operator_workspace import workspace_bytes
from moepass.passes.memory.value_bytes import row_bytes, tensor_bytes
from moepass.passes.ops.traits import base_operation, is_view, operation
from moepass.passes.segments.expert_kernels import read_kernels
from moepass.passes.segments.expert_program import (
    CHUNK_ROWS,
    ExpertProgram,
    GroupedGemm,
    NotByExpertError,
    expert_gemms_in,
    read_program,
)
from moepass.passes.segments.partition import cut_into_segments
from moepass.passes.segments.token_body import describe_body, memory_order
from moepass.passes.segments.token_program import (
    NotByTokenError,
    TokenDims,
    TokenFactor,
    TokenProgram,
    is_region,
    read_token_program,
)

# The tokens of the largest chunk, in expressions of a plan.
CHUNK_TOKENS = sympy.Symbol("chunk_tokens", integer=True, positive=True)

# The storages of a tensor, or of each of several tensors.
Storages = frozenset[int] | tuple[frozenset[int], ...]
_NONE: frozenset[int] = frozenset()
Sizes = Mapping[sympy.Expr, sympy.Expr]


@dataclasses.dataclass(frozen=True)
class SegmentExecution:
    """The lowering of segments that matters for memory.

    Attributes:
        is_fused: segments run as Inductor code and kernels, not operator by operator
        chunk_tokens: regions run in chunks of at most this many tokens; None for all at once
        multiplies_in_fp8: kernels of experts multiply copies of their rows in FP8
    """

    is_fused: bool
    chunk_tokens: int | None = None
    multiplies_in_fp8: bool = False


def operations_of(top: GraphModule, execution: SegmentExecution) -> tuple[list[Operation], frozenset[int]]:
    """Return the operations of `top` in order, and the storages that it returns."""
    writer = _OperationWriter(execution)
    returned = writer.graph(top, {}, {})
    return writer.operations, _union(returned)


@dataclasses.dataclass(frozen=True)
class _Body:
    """The program of a segment, its body cut into segments, and the symbol for the number of tokens of a chunk."""

    program: TokenProgram
    top: GraphModule
    tokens: sympy.Symbol


def _body_of(segment: GraphModule, chunk_tokens: int) -> _Body | None:
    try:
        program = read_token_program(segment)
        _, symbol = describe_body(program, segment, chunk_tokens)
    except NotByTokenError:
        return None
    return _Body(program, cut_into_segments(program.body).top, symbol)


class _OperationWriter:
    def __init__(self, execution: SegmentExecution) -> None:
        self.execution = execution
        self.operations: list[Operation] = []
        self._numbers = itertools.count()
        # Storages to which several values are written; Inductor does not reuse them in place.
        self._concatenated: set[int] = set()
        # The kernel that the next operation may join.
        self._kernel: int | None = None
        # A cache, because layers share segments, and describing bodies takes most of the time of this pass.
        self._bodies: dict[GraphModule, _Body | None] = {}

    def graph(self, top: GraphModule, memory: dict[Node, Storages], sizes: Sizes) -> Sequence[Storages]:
        """Add a graph's operations, and the storages of its nodes to `memory`; return those of its outputs."""
        for node in top.graph.nodes:
            if node.op == "call_module":
                segment = top.get_submodule(str(node.target))
                assert isinstance(segment, GraphModule)
                memory[node] = tuple(_union([output]) for output in self._segment(node, segment, memory, sizes))
            elif node.op != "output":
                self._node(node, memory, sizes)
        return _returned(top.graph, memory)

    def _segment(
        self, call: Node, segment: GraphModule, outside: Mapping[Node, Storages], outer: Sizes
    ) -> Sequence[Storages]:
        inputs = graph_inputs(segment.graph)
        arguments = list(call.args)
        sizes = {**outer, **_sizes_within(inputs, arguments, outer)}
        memory = {
            node: outside.get(value, _NONE) if isinstance(value, Node) else _NONE
            for node, value in zip(inputs, arguments, strict=True)
        }
        if self.execution.chunk_tokens is not None and is_region(segment):
            looped = self._in_chunks(segment, memory, sizes)
            if looped is not None:
                return looped
        if self.execution.is_fused and expert_gemms_in(segment):
            by_expert = self._by_expert(segment, memory, sizes)
            if by_expert is not None:
                return by_expert
        fusion = fusion_of(list(segment.graph.nodes)) if self.execution.is_fused else NO_FUSION
        for node in segment.graph.nodes:
            if node.op != "output":
                self._node(node, memory, sizes, fusion)
        self._kernel = None
        return _returned(segment.graph, memory)

    def _node(self, node: Node, memory: dict[Node, Storages], sizes: Sizes, fusion: Fusion = NO_FUSION) -> None:
        if node.op in ("placeholder", "get_attr") or is_call(node, *SLOT_OPS, BANK_TENSOR, EXPERT_STACK, gather):
            memory.setdefault(node, _NONE)
            return
        if is_call(node, operator.getitem):
            source, index = node.args
            storages = memory[source]  # type: ignore[index]
            memory[node] = storages[index] if isinstance(storages, tuple) else storages  # type: ignore[index]
            self._add(node, _union([storages]))
            return
        reads = _union(memory.get(used, _NONE) for used in node.all_input_nodes)
        if node in fusion.hidden:
            memory[node] = reads
            return
        if is_view(node):
            memory[node] = reads
            self._add(node, reads)
            return
        makes: dict[int, sympy.Expr] = {}
        for written in (node, *fusion.with_first.get(node, ())):
            if written not in memory:
                memory[written] = self._allocate(fake_value(written), sizes, makes)
        if not (self.execution.is_fused and is_kernel(node)):
            self._kernel = None
        elif self._kernel is None:
            self._kernel = next(self._numbers)
        workspace = workspace_bytes(node).xreplace(dict(sizes))
        if base_operation(node) == "cat":
            self._concatenated |= makes.keys()
        may_overwrite = self.execution.is_fused and is_computed(node)
        self._add(node, reads, makes, [workspace], reads - self._concatenated if may_overwrite else _NONE)

    def _allocate(self, value: Any, sizes: Sizes, makes: dict[int, sympy.Expr]) -> Storages:
        """Return new storages for `value`, and add them to `makes`."""
        if isinstance(value, (tuple, list)):
            return tuple(_union([self._allocate(item, sizes, makes)]) for item in value)
        made = self._new_storages(value, sizes)
        makes.update(made)
        return frozenset(made)

    def _new_storages(self, value: Any, sizes: Sizes) -> dict[int, sympy.Expr]:
        if not isinstance(value, torch.Tensor):
            return {}
        return {next(self._numbers): tensor_bytes(value).xreplace(dict(sizes))}

    def _add(
        self,
        node: Node,
        reads: frozenset[int],
        makes: Mapping[int, sympy.Expr] | None = None,
        temporary: Sequence[sympy.Expr] = (),
        overwrites: frozenset[int] = _NONE,
    ) -> None:
        path = module_path(node)
        where = f"{path} ({operation(node)})" if path else operation(node)
        self.operations.append(Operation(where, reads, makes or {}, temporary, overwrites, self._kernel))

    def _in_chunks(
        self, segment: GraphModule, memory: Mapping[Node, Storages], sizes: Sizes
    ) -> Sequence[Storages] | None:
        """Add a segment that runs in chunks as one operation; return None if it cannot."""
        assert self.execution.chunk_tokens is not None
        if segment not in self._bodies:
            self._bodies[segment] = _body_of(segment, self.execution.chunk_tokens)
        described = self._bodies[segment]
        if described is None:
            return None
        program, body, symbol = described.program, described.top, described.tokens
        inner = _OperationWriter(self.execution)
        chunk_sizes = {symbol: CHUNK_TOKENS, **{key: value for key, value in sizes.items() if key != symbol}}
        body_inputs: dict[Node, Storages] = {}
        copies: dict[int, sympy.Expr] = {}
        inputs = graph_inputs(segment.graph)
        for node, position, dims in zip(graph_inputs(body.graph)[1:], program.tensors, program.inputs, strict=True):
            copied = (
                {}
                if dims is None or _is_contiguous_chunk(fake_value(inputs[position]), dims)
                else inner._new_storages(fake_value(node), chunk_sizes)
            )
            body_inputs[node] = frozenset(copied)
            copies.update(copied)
        first = next(iter(segment.graph.nodes))
        if copies:
            inner._add(first, _NONE, copies)
        returned = inner.graph(body, body_inputs, chunk_sizes)
        temporary = [peak.expression for peak in peaks(inner.operations, _union(returned))]
        outputs = [self._new_storages(fake_value(node), sizes) for node in _outputs(segment.graph)]
        last = segment.graph.output_node().prev
        self._add(last, _union(memory.values()), _merged(outputs), temporary)
        return [frozenset(output) for output in outputs]

    def _by_expert(self, segment: GraphModule, memory: dict[Node, Storages], sizes: Sizes) -> Sequence[Storages] | None:
        """Add a segment that runs expert by expert; return None if it cannot."""
        try:
            program = read_program(segment)
            if fake_value(program.row_inputs[0]).device.type != "cpu":
                return self._kernels(program, memory, sizes)
        except NotByExpertError:
            return None
        if any(order is not None for order in program.orders):
            return None
        outputs = {node: self._new_storages(fake_value(node), sizes) for node in program.outputs}
        temporaries = [
            node
            for step in program.steps
            for node in ((step.node,) if isinstance(step, GroupedGemm) else step.outputs)
            if node not in outputs
        ]
        rows = size_expression(fake_value(program.row_inputs[0]).shape[0]).xreplace(dict(sizes))
        bytes_per_row = sympy.Add(*(row_bytes(fake_value(node)) for node in temporaries))
        # An upper bound: one expert has a full chunk of rows.
        temporary = sympy.Min(rows, CHUNK_ROWS) * bytes_per_row
        self._add(program.outputs[-1], _union(memory.values()), _merged(outputs.values()), [temporary])
        return [frozenset(outputs[node]) for node in program.outputs]

    def _kernels(self, program: ExpertProgram, memory: dict[Node, Storages], sizes: Sizes) -> Sequence[Storages]:
        kernels = read_kernels(program)
        stages: list[tuple[Sequence[Node], Sequence[Node], list[sympy.Expr]]]
        stages = [] if kernels.before is None else [(kernels.before.inputs, kernels.before.outputs, [])]
        for kernel in kernels.kernels:
            copies = [_fp8_bytes(fake_value(kernel.operands[kernel.rows]))] if self.execution.multiplies_in_fp8 else []
            stages.append((kernel.operands, kernel.outputs, [nbytes.xreplace(dict(sizes)) for nbytes in copies]))
        for operands, outputs, copies in stages:
            reads = _union(memory.get(node, _NONE) for node in operands)
            made = [self._new_storages(fake_value(node), sizes) for node in outputs]
            memory.update(zip(outputs, map(frozenset, made), strict=True))
            self._add(outputs[-1], reads, _merged(made), copies)
        return [memory[node] for node in program.outputs]


def _fp8_bytes(rows: torch.Tensor) -> sympy.Expr:
    """Return the bytes of `rows` [n, width] in e4m3, with an fp32 scale for each block of columns."""
    count, width = (size_expression(size) for size in rows.shape)
    return count * (width + 4 * sympy.ceiling(width / FP8_BLOCK))


def _union(values: Iterable[Storages]) -> frozenset[int]:
    return frozenset().union(*(item for value in values for item in (value if isinstance(value, tuple) else (value,))))


def _merged(storages: Iterable[Mapping[int, sympy.Expr]]) -> dict[int, sympy.Expr]:
    return {number: nbytes for made in storages for number, nbytes in made.items()}


def _outputs(graph: Graph) -> Sequence[Any]:
    return several(graph.output_node().args[0])


def _returned(graph: Graph, memory: Mapping[Node, Storages]) -> Sequence[Storages]:
    return [memory.get(node, _NONE) if isinstance(node, Node) else _NONE for node in _outputs(graph)]


def _sizes_within(inputs: Sequence[Node], arguments: Sequence[Any], outer: Sizes) -> dict[sympy.Expr, sympy.Expr]:
    """Return the sizes of this call by the symbols of the shared segment."""
    sizes = {}
    for node, argument in zip(inputs, arguments, strict=True):
        inner_size = fake_value(node)
        if isinstance(inner_size, torch.SymInt):
            outer_size = fake_value(argument) if isinstance(argument, Node) else argument
            sizes[size_expression(inner_size)] = size_expression(outer_size).xreplace(dict(outer))
    return sizes


def _is_contiguous_chunk(value: torch.Tensor, dims: TokenDims) -> bool:
    """Return whether a chunk of tokens from one sequence is contiguous in memory (see `TokenLoop`)."""
    in_memory = (factor for dim in memory_order(value) for factor in dims.factors[dim])
    outermost = next((factor for factor in in_memory if factor not in (1, TokenFactor.SEQUENCES)), None)
    return outermost in (None, TokenFactor.TOKENS, TokenFactor.ALL_TOKENS)
