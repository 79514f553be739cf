"""Lower a segment of experts to Triton kernels: each grouped GEMM with the row work around it, generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.graph.source_lines import in_words, source_line
from moepass.passes.ir.segment import TRITON, NotLowered
from moepass.passes.segments.expert_kernels import ExpertKernels, GemmKernel, read_kernels
from moepass.passes.segments.expert_program import (
    ExpertProgram,
    NotByExpertError,
    RowWork,
    expert_gemms_in,
    read_program,
)
from moepass.runtime.kernels.grouped_gemm.kernel_source import GEMM_TYPES
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm
from moepass.runtime.kernels.grouped_gemm.tile_functions import NoTileFunctionError
from moepass.runtime.lowering.fixed_values import FixedValues, subgraph

# Compiles a graph whose nodes have fake values. The result takes a list of inputs.
Compile = Callable[[GraphModule], Callable[[list[Any]], Sequence[torch.Tensor]]]


def lower_to_triton(segment: GraphModule, compile_graph: Compile) -> TritonExperts | NotLowered | None:
    """Lower the experts of `segment` to Triton kernels; return why not, or None if the segment has no experts."""
    experts = expert_gemms_in(segment)
    if not experts:
        return None
    try:
        program = read_program(segment)
        kernels = read_kernels(program)
        generated = [_generated(kernel) for kernel in kernels.kernels]
    except NotByExpertError as error:
        reason = in_words(str(error), segment.graph, error.node)
        line = source_line(error.node) or source_line(experts[0])
        return NotLowered(TRITON, error.node.name, reason, line)
    before = None if kernels.before is None else compile_graph(_graph_of(kernels.before, _sizes(segment)))
    return TritonExperts(segment, program, kernels, generated, before)


def _generated(kernel: GemmKernel) -> GeneratedGemm:
    node = kernel.gemm.node
    dtype = fake_value(node).dtype
    if dtype not in GEMM_TYPES:
        raise NotByExpertError(node, f"it multiplies in {dtype}, which tensor cores do not support")
    try:
        return GeneratedGemm(kernel)
    except NoTileFunctionError as error:
        raise NotByExpertError(node, f"the operators after it include {error}, which tiles cannot compute") from error


class TritonExperts:
    """Runs the kernels of a program on a list of the segment's inputs; weights may come in parts, see `FixedValues`."""

    def __init__(
        self,
        segment: GraphModule,
        program: ExpertProgram,
        kernels: ExpertKernels,
        generated: Sequence[GeneratedGemm],
        before: Callable[[list[Any]], Sequence[torch.Tensor]] | None,
    ) -> None:
        self.program = program
        self.kernels = kernels
        self.generated = generated
        self._inputs = graph_inputs(segment.graph)
        # Kernels contain some of the values that row work reads as constants.
        read = [node for kernel in kernels.kernels for node in kernel.operands]
        self._fixed = FixedValues(segment, program, [*read, *(() if kernels.before is None else kernels.before.inputs)])
        self._before = before
        self._sizes = _sizes(segment)
        # For each kernel, the values that nothing reads after it.
        later = set(program.outputs)
        self._dead: list[list[Node]] = []
        for run in reversed(generated):
            self._dead.append([node for node in dict.fromkeys(run.kernel.operands) if node not in later])
            later.update(run.kernel.operands)
        self._dead.reverse()

    def __call__(self, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        """Return the segment's outputs and empty `inputs`."""
        values: dict[Node, Any] = dict(zip(self._inputs, inputs, strict=True))
        values.update(self._fixed.tables(inputs))
        weights = self._fixed.weights(inputs)
        inputs.clear()
        if self.kernels.before is not None:
            assert self._before is not None
            results = self._before([values[node] for node in (*self._sizes, *self.kernels.before.inputs)])
            values.update(zip(self.kernels.before.outputs, results, strict=True))
        rows = len(values[self.program.row_inputs[0]])
        ends = values[self.program.ends]
        for run, dead in zip(self.generated, self._dead, strict=True):
            kernel = run.kernel
            operands = [values[node] for node in kernel.operands]
            outputs = run(operands, weights[kernel.gemm.weights], ends, rows)
            values.update(zip(kernel.outputs, outputs, strict=True))
            del operands
            for node in dead:
                del values[node]
        return tuple(values[node] for node in self.program.outputs)


def _sizes(segment: GraphModule) -> list[Node]:
    """Return the inputs that are sizes: Inductor finds tokens in a number of rows, as twice the tokens, from them."""
    return [node for node in graph_inputs(segment.graph) if isinstance(fake_value(node), torch.SymInt)]


def _graph_of(work: RowWork, sizes: Sequence[Node]) -> GraphModule:
    """Return `work` for all rows as a graph of `sizes` and its inputs, with the fake values of the segment's nodes."""
    inputs = [*sizes, *work.inputs]
    module = subgraph(inputs, work.nodes, work.outputs)
    for placeholder, node in zip(graph_inputs(module.graph), inputs, strict=True):
        placeholder.meta.update(node.meta)
    return module
