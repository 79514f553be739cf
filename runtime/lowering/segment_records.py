"""Lowered segments as data and back: graphs as records, code that Inductor compiled as source text."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch.fx import GraphModule, Node

from moepass.passes.graph.graph_records import NodeRecord, NotStorableError, read_graph, record_graph
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.plan import dtype_name
from moepass.passes.segments.expert_program import ExpertProgram, GroupedGemm, RowWork
from moepass.runtime.lowering.lower_experts import ExpertLoop, RowsInAnyNumber
from moepass.runtime.lowering.lower_segments import Lowered, LoweredSegment
from moepass.runtime.torch_private import (
    expect_vector_instructions,
    inductor_source,
    load_inductor_source,
    vector_instructions,
)


class EagerGraph(msgspec.Struct, frozen=True, tag="eager"):
    """A segment that runs operator by operator."""

    nodes: tuple[NodeRecord, ...]


class InductorCode(msgspec.Struct, frozen=True, tag="inductor"):
    """A segment as the Python module that Inductor wrote."""

    source: str


class GemmStep(msgspec.Struct, frozen=True, tag="gemm"):
    """A grouped GEMM of an expert loop."""

    node: str
    rows: str
    weights: str


class RowWorkStep(msgspec.Struct, frozen=True, tag="rows"):
    """Row work of an expert loop: `graph` runs for a single row, `source` for more rows."""

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: tuple[NodeRecord, ...]
    source: str


class ExpertLoopRecord(msgspec.Struct, frozen=True, tag="experts"):
    """A segment that runs expert by expert. `rows` has the sizes of one row and the dtype of each allocated value."""

    nodes: tuple[NodeRecord, ...]
    ends: str
    row_inputs: tuple[str, ...]
    fixed: tuple[str, ...]
    steps: tuple[GemmStep | RowWorkStep, ...]
    outputs: tuple[str, ...]
    rows: dict[str, tuple[tuple[int, ...], str]]


class SegmentRecord(msgspec.Struct, frozen=True):
    """The record of a `LoweredSegment`."""

    run: EagerGraph | InductorCode | ExpertLoopRecord
    tensors: tuple[int, ...]
    fresh: tuple[int, ...]


def record_segments(lowered: GraphModule) -> dict[str, SegmentRecord]:
    """Return the records of a graph's segments by name, before their first run. Raises NotStorableError."""
    return {
        name: _record_segment(segment)
        for name, segment in lowered.named_children()
        if isinstance(segment, LoweredSegment)
    }


def reads_compiled_code(record: SegmentRecord) -> bool:
    """Return whether `record` includes code that Inductor generated."""
    return not isinstance(record.run, EagerGraph)


def read_segments(records: Mapping[str, SegmentRecord], expected: str) -> dict[str, LoweredSegment]:
    """Return the segments of `records`, which were compiled on this machine for the vector instructions `expected`.

    Raises ValueError if Inductor now targets other instructions, and ValueError or KeyError if a record is damaged.
    """
    if expected:
        # Otherwise Inductor would run a compiler and another process first, which takes seconds.
        expect_vector_instructions(expected)
        if (current := vector_instructions()) != expected:
            raise ValueError(f"its segments were compiled for {expected}; the compiler now targets {current}")
    return {name: _read_segment(record) for name, record in records.items()}


def _record_segment(segment: LoweredSegment) -> SegmentRecord:
    run: EagerGraph | InductorCode | ExpertLoopRecord
    if isinstance(segment.run, GraphModule):
        run = EagerGraph(record_graph(segment.run.graph))
    elif isinstance(segment.run, ExpertLoop):
        run = _record_loop(segment.run)
    else:
        run = InductorCode(_source_of(segment.run))
    return SegmentRecord(run, tuple(segment.tensors), tuple(segment.fresh))


def _read_segment(record: SegmentRecord) -> LoweredSegment:
    run: Lowered
    if isinstance(record.run, EagerGraph):
        run = read_graph(record.run.nodes, {})
    elif isinstance(record.run, ExpertLoopRecord):
        run = _read_loop(record.run)
    else:
        run = load_inductor_source(record.run.source)
    return LoweredSegment(run, record.tensors, record.fresh, boxed=reads_compiled_code(record))


def _source_of(compiled: object) -> str:
    source = inductor_source(compiled)
    if source is None:
        raise NotStorableError("the compiled code of a segment is more than source text for a CPU")
    return source


def _record_loop(loop: ExpertLoop) -> ExpertLoopRecord:
    program = loop.program
    allocated = {*program.outputs, *(step.node for step in program.steps if isinstance(step, GroupedGemm))}
    steps: list[GemmStep | RowWorkStep] = []
    for step, work in loop.steps:
        if isinstance(step, GroupedGemm):
            steps.append(GemmStep(step.node.name, step.rows.name, step.weights.name))
        else:
            assert work is not None
            graph, source = record_graph(work.graph.graph), _source_of(work.compiled)
            steps.append(RowWorkStep(_names(step.nodes), _names(step.inputs), _names(step.outputs), graph, source))
    return ExpertLoopRecord(
        record_graph(loop.segment.graph),
        program.ends.name,
        _names(program.row_inputs),
        _names(program.fixed),
        tuple(steps),
        _names(program.outputs),
        {
            node.name: (tuple(map(int, fake_value(node).shape[1:])), dtype_name(fake_value(node).dtype))
            for node in sorted(allocated)
        },
    )


def _read_loop(record: ExpertLoopRecord) -> ExpertLoop:
    segment = read_graph(record.nodes, {})
    nodes = {node.name: node for node in segment.graph.nodes}
    for name, (sizes, dtype) in record.rows.items():
        nodes[name].meta["val"] = torch.empty((1, *sizes), dtype=getattr(torch, dtype), device="meta")

    def of(names: tuple[str, ...]) -> tuple[Node, ...]:
        return tuple(nodes[name] for name in names)

    steps: list[GroupedGemm | RowWork] = []
    work: dict[RowWork, RowsInAnyNumber] = {}
    for step in record.steps:
        if isinstance(step, GemmStep):
            steps.append(GroupedGemm(nodes[step.node], nodes[step.rows], nodes[step.weights]))
        else:
            row_work = RowWork(of(step.nodes), of(step.inputs), of(step.outputs))
            work[row_work] = RowsInAnyNumber(read_graph(step.graph, {}), load_inductor_source(step.source))
            steps.append(row_work)
    outputs = of(record.outputs)
    # A loop keeps the order of rows.
    orders = (None,) * len(outputs)
    program = ExpertProgram(nodes[record.ends], of(record.row_inputs), of(record.fixed), tuple(steps), outputs, orders)
    return ExpertLoop(segment, program, work)


def _names(nodes: tuple[Node, ...]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
