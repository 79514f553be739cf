"""Decide which segments can be CUDA graphs: those that compute on a single GPU and never ask the host.

A CUDA graph is recorded while the host issues work, and replayed without the host. So anything that the host computes,
or decides from values, would be missing or stale in a replay.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moepass.passes.graph.collectives import communication_of
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.source_lines import source_line
from moepass.passes.ir.segment import TENSORRT, CudaGraphUse, NotRecorded, Segment
from moepass.passes.ops.traits import Trait, has_trait

# Namespaces of operators whose CUDA kernels are torch's. Other operators may run any code on the host.
_KNOWN = ("aten", "prims")
# With a mask as second argument, the host waits for the number of True elements.
_UNRECORDABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)


def with_cuda_graphs(segments: Sequence[Segment], top: GraphModule) -> tuple[Segment, ...]:
    """Return `segments` with the decision whether their modules in `top` become CUDA graphs."""
    modules = dict(top.named_children())
    decided = []
    for segment in segments:
        module = modules[segment.name]
        assert isinstance(module, GraphModule)
        refusal = recording_refusal(module)
        if segment.lowering is not None and segment.lowering.how == TENSORRT:
            refusal = NotRecorded("", "TensorRT runs it on a separate stream")
        decided.append(dataclasses.replace(segment, cuda_graph=CudaGraphUse(refusal)))
    return tuple(decided)


def recording_refusal(segment: GraphModule) -> NotRecorded | None:
    """Return why `segment` cannot be a CUDA graph, for the first node that prevents it, or None."""
    for node in segment.graph.nodes:
        reason = _reason(node)
        if reason is not None:
            return NotRecorded(node.name, reason, source_line(node))
    return None


def _reason(node: Node) -> str | None:
    if node.op == "output":
        return None
    for device in _devices(node):
        if device.type != "cuda":
            verb = "reads" if node.op in ("placeholder", "get_attr") else "makes"
            return f"it {verb} a tensor on {device}, but a CUDA graph can only use GPU memory"
    if free_unbacked_symbols(_described(fake_value(node))):
        return "a size in it depends on values of tensors, so it may differ in every run"
    if node.op in ("placeholder", "get_attr") or is_call(node, operator.getitem):
        return None
    if communication_of(node) is not None:
        return "it communicates with other ranks, which moepass does not record"
    return _reason_of_operator(node)


def _reason_of_operator(node: Node) -> str | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        if isinstance(fake_value(node), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None  # arithmetic of sizes, which are equal in all runs of a shape
        return f"operator {target} runs code on the host, which a CUDA graph does not replay"
    if target.namespace not in _KNOWN:
        return (
            f"operator {target} is not part of torch and may run code on the host, which a CUDA graph does not replay"
        )
    if has_trait(node, Trait.LOOKUP, Trait.WRITE) and isinstance(node.args[1], (list, tuple)):
        is_masked = any(_is_mask(index) for index in node.args[1])
        return (
            f"operator {target} with a mask makes the host wait for the number of True elements" if is_masked else None
        )
    if any(tag in target.tags for tag in _UNRECORDABLE):
        return f"operator {target} makes the host wait for values on the device"
    return None


def _is_mask(index: object) -> bool:
    value = fake_value(index) if isinstance(index, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _devices(node: Node) -> Iterator[torch.device]:
    value: Any = fake_value(node)
    if isinstance(value, torch.Tensor):
        yield value.device


def _described(value: Any) -> Any:
    """Return the values of `value` that may contain symbols."""
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, kinds)]
    return value if isinstance(value, kinds) else []
