"""Complete the plan of a graph with the results of lowering its segments."""

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
from moepass.passes.segments.fp8_slots import check_fp8_readers
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
    """Return the final plan: `plan`, completed with the results of lowering.

    The passes assume that segments of experts run expert by expert. If another kind of segment reads a bank, the bank
    is marked as complete, and the decisions are made again.

    Args:
        plan: the plan of the passes.
        module: the graph of segments before lowering.
        lowerings: how each segment was lowered, by its name.
        context: the context of the passes.
        tensorrt: whether the plan says which segments are for TensorRT.
        cudagraphs: whether the plan says which segments are recorded as CUDA graphs.

    Raises InputError if experts multiply in FP8, and a segment that reads them is not lowered to Triton kernels.
    """
    check_fp8_readers(module, plan, lowerings)
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
