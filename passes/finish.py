"""Finish a plan: what lowering the segments decided, written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.segment import Lowering, Segment
from moepass.passes.schedule.predict import decisions_for
from moepass.passes.segments.bank_parts import with_complete_banks
from moepass.passes.segments.cuda_graphs import with_cuda_graphs
from moepass.passes.segments.tensorrt_choice import with_tensorrt_choices


def finish(
    plan: Plan,
    module: GraphModule,
    lowerings: Mapping[str, Lowering],
    context: PassContext,
    *,
    tensorrt: bool = False,
    cudagraphs: bool = False,
) -> Plan:
    """Return the plan that runs, from the `plan` of the passes and what lowering decided.

    The passes assume that segments of experts run expert by expert. A bank that another segment reads comes complete.
    `module` has the segments before they were lowered. With `tensorrt` and `cudagraphs` the plan says which segments
    are for TensorRT and which become CUDA graphs.
    """
    segments = with_lowerings(plan.segments, lowerings)
    if tensorrt:
        segments = with_tensorrt_choices(segments, module)
    if cudagraphs:
        segments = with_cuda_graphs(segments, module)
    readers = {name for name, lowering in lowerings.items() if not lowering.reads_by_expert}
    finished = with_complete_banks(module, dataclasses.replace(plan, segments=segments), readers)
    if finished.banks == plan.banks or plan.decisions is None:
        return finished
    return dataclasses.replace(finished, decisions=decisions_for(finished, dict(plan.sizes), context))


def with_lowerings(segments: Sequence[Segment], lowerings: Mapping[str, Lowering]) -> tuple[Segment, ...]:
    """Return the records of `segments` with their lowerings."""
    return tuple(dataclasses.replace(segment, lowering=lowerings[segment.name]) for segment in segments)
