"""Lower a segment of experts on a CPU: expert by expert, a few rows at a time, row work compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moepass.passes.graph.nodes import copy_graph_module, fake_value, graph_inputs, map_nodes
from moepass.passes.graph.source_lines import in_words, named, source_line
from moepass.passes.ir.segment import EXPERT_LOOP, NotLowered
from moepass.passes.segments.expert_program import (
    CHUNK_ROWS,
    ExpertProgram,
    GroupedGemm,
    NotByExpertError,
    RowWork,
    expert_gemms_in,
    read_program,
)
from moepass.runtime.lowering.cpu_gemms import multiply
from moepass.runtime.lowering.fixed_values import FixedValues, WeightParts, subgraph, weights_of
from moepass.runtime.system.huge_pages import empty_in_huge_pages

# Compiles a graph whose nodes have fake values of that mode. The result takes a list of inputs.
Compile = Callable[[GraphModule, FakeTensorMode], Callable[[list[Any]], Sequence[torch.Tensor]]]


def lower_experts(segment: GraphModule, compile_rows: Compile) -> ExpertLoop | NotLowered | None:
    """Lower the experts of `segment` to a loop; return the reason if that is impossible, None if it has no experts."""
    experts = expert_gemms_in(segment)
    if not experts:
        return None
    try:
        program = read_program(segment)
        _check_cpu(program)
        graphs = {step: _for_any_rows(step, program) for step in program.steps if isinstance(step, RowWork)}
    except NotByExpertError as error:
        reason = in_words(str(error), segment.graph, error.node)
        line = source_line(error.node) or source_line(experts[0])
        return NotLowered(EXPERT_LOOP, error.node.name, reason, line)
    work = {
        step: RowsInAnyNumber(graph, compile_rows(copy_graph_module(graph), mode))
        for step, (graph, mode) in graphs.items()
    }
    return ExpertLoop(segment, program, work)


def _check_cpu(program: ExpertProgram) -> None:
    for node, order in zip(program.outputs, program.orders, strict=True):
        if order is not None:
            raise NotByExpertError(
                node, f"the rows of {named(node)} are returned in another order, but the loop keeps their order"
            )
    for step in program.steps:
        if isinstance(step, GroupedGemm) and fake_value(step.rows).device.type != "cpu":
            device = fake_value(step.rows).device.type
            raise NotByExpertError(step.node, f"{named(step.node)} computes on {device}, but the loop is for CPUs")


def grouped_gemm_loop(rows: torch.Tensor, weights: torch.Tensor) -> ExpertLoop:
    """Return the loop of a segment that is a single grouped GEMM. Its inputs are rows, weights and the ends of rows.

    Only shapes and types of `rows` [n, in] and `weights` [experts, out, in] are read.
    """
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("rows", "weights", "ends")]
    turned = graph.call_method("transpose", (inputs[1], 1, 2))
    gemm = graph.call_function(torch.ops.aten._grouped_mm.default, (inputs[0], turned, inputs[2]))
    gemm.meta["val"] = torch.empty(len(rows), weights.shape[1], dtype=rows.dtype, device="meta")
    graph.output((gemm,))
    step = GroupedGemm(gemm, inputs[0], turned)
    program = ExpertProgram(inputs[2], (inputs[0],), (turned,), (step,), (gemm,), (None,))
    return ExpertLoop(GraphModule({}, graph), program, {})


class RowsInAnyNumber:
    """Row work that is compiled for any number of rows from 1 on."""

    def __init__(self, graph: GraphModule, compiled: Callable[[list[Any]], Sequence[torch.Tensor]]) -> None:
        self.graph = graph
        self.compiled = compiled

    def __call__(self, inputs: list[Any], rows: int) -> Sequence[torch.Tensor]:
        """Return the results for this number of rows."""
        # A symbolic size is 2 or more. Code for it may be wrong for 1, where strides have no meaning.
        if rows == 1:
            single_row: Sequence[torch.Tensor] = self.graph(*inputs)
            return single_row
        results = self.compiled(inputs)
        # Inductor wraps its code for profilers and caches. The first call needs that; few rows are faster without.
        self.compiled = getattr(self.compiled, "current_callable", None) or self.compiled
        return results


class ExpertLoop:
    """Runs a program expert by expert on a list of inputs; weights may come in parts, see `FixedValues`."""

    def __init__(self, segment: GraphModule, program: ExpertProgram, work: dict[RowWork, RowsInAnyNumber]) -> None:
        self.segment = segment
        self.program = program
        self.steps = [(step, work[step] if isinstance(step, RowWork) else None) for step in program.steps]
        self._inputs = graph_inputs(segment.graph)
        self._fixed = FixedValues(segment, program)

    def __call__(self, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        """Return the segment's outputs and empty `inputs`."""
        by_node = dict(zip(self._inputs, inputs, strict=True))
        weights = self._fixed.weights(inputs)
        tables = {node: table.contiguous() for node, table in self._fixed.tables(inputs).items()}
        inputs.clear()
        row_inputs = {node: by_node[node] for node in self.program.row_inputs}
        ends = by_node[self.program.ends]
        del by_node
        rows = len(next(iter(row_inputs.values())))
        outputs = {
            node: row_inputs[node] if node in row_inputs else _empty(node, rows) for node in self.program.outputs
        }
        chunks = list(_chunks(ends.tolist(), rows))
        sizes = [size for _, size in chunks]
        # All views are created at once, because one by one would take noticeable time with few rows.
        input_parts, output_parts = (
            {node: tensor.split(sizes) for node, tensor in tensors.items()} for tensors in (row_inputs, outputs)
        )
        for index, (expert, size) in enumerate(chunks):
            values = {**tables, **{node: parts[index] for node, parts in input_parts.items()}}
            out = {node: parts[index] for node, parts in output_parts.items()}
            self._run(weights, expert, size, values, out)
        return tuple(outputs[node] for node in self.program.outputs)

    def _run(
        self,
        weights: dict[Node, WeightParts],
        expert: int | None,
        rows: int,
        values: dict[Node, torch.Tensor],
        outputs: dict[Node, torch.Tensor],
    ) -> None:
        """Compute the `outputs` of `rows` rows of `expert` from `values`; without an expert, GEMMs return zeros."""
        for step, work in self.steps:
            if isinstance(step, GroupedGemm):
                out = outputs.get(step.node)
                if expert is None:
                    values[step.node] = (_empty(step.node, rows) if out is None else out).zero_()
                else:
                    values[step.node] = multiply(values[step.rows], weights_of(weights[step.weights], expert), out)
                continue
            # The code was compiled for contiguous inputs. For example, half of a GEMM's output is not contiguous.
            assert work is not None
            results = work([values[node].contiguous() for node in step.inputs], rows)
            for node, result in zip(step.outputs, results, strict=True):
                values[node] = result
                if node in outputs:
                    outputs[node].copy_(result)


def _chunks(ends: Sequence[int], rows: int) -> Iterator[tuple[int | None, int]]:
    """Yield an expert and a number of rows that go through it together. The numbers add up to `rows`.

    Rows beyond the last expert's belong to no expert; GEMMs return zeros for them.
    """
    start = 0
    for expert, end in [*enumerate(ends), (None, rows)]:
        while start < (stop := min(end, rows)):
            size = min(CHUNK_ROWS, stop - start)
            yield expert, size
            start += size


def _empty(node: Node, rows: int) -> torch.Tensor:
    value = fake_value(node)
    return empty_in_huge_pages((rows, *map(int, value.shape[1:])), value.dtype)


def _for_any_rows(work: RowWork, program: ExpertProgram) -> tuple[GraphModule, FakeTensorMode]:
    """Return `work` as a graph for any number of rows. Raises NotByExpertError if not all are valid."""
    fixed = set(program.fixed)
    if any(isinstance(size, int) and size == 0 for node in program.row_inputs for size in fake_value(node).shape[:1]):
        # There is nothing to loop over.
        raise NotByExpertError(work.nodes[0], "it has no rows")
    with unset_fake_temporarily():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        module = subgraph(work.inputs, work.nodes, work.outputs)
        *copies, _ = module.graph.nodes
        for node, copied in zip((*work.inputs, *work.nodes), copies, strict=True):
            if copied.op == "placeholder":
                copied.meta["val"] = _fake_input(mode, node, with_rows=node not in fixed)
                continue
            arguments, keywords = map_nodes((copied.args, copied.kwargs), fake_value)
            with mode:
                copied.meta["val"] = copied.target(*arguments, **keywords)
        shapes = mode.shape_env
        if shapes is None or shapes.guards or shapes.replacements:
            reason = f"what begins at {named(work.nodes[0])} is valid for some numbers of rows only"
            raise NotByExpertError(work.nodes[0], reason)
        return module, mode


def _fake_input(mode: FakeTensorMode, node: Node, with_rows: bool) -> torch.Tensor:
    value = fake_value(node)
    sizes, dynamic = list(value.shape), [DimDynamic.STATIC] * value.dim()
    if with_rows:
        # All inputs with rows have the same number of them: equal sizes become one symbol.
        sizes[0], dynamic[0] = CHUNK_ROWS, DimDynamic.DUCK
    elif sizes and not isinstance(sizes[0], int):
        sizes[0], dynamic[0] = 2 * CHUNK_ROWS, DimDynamic.DYNAMIC
    if not all(isinstance(size, int) for size in sizes):
        raise NotByExpertError(node, f"the shape of {named(node)} is known at run time only")
    example = torch.empty(sizes, dtype=value.dtype)  # contiguous like the value that it represents
    context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
    fake: torch.Tensor = mode.from_tensor(example, symbolic_context=context)
    return fake
