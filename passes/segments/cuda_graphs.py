"""Which segments can be CUDA graphs: those that compute on one GPU alone, and never ask the host.

A CUDA graph is recorded while the host issues work, and replayed without the host. So whatever the host decides by
values, or does itself, would be missing or stale in a replay.
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

aten = torch.ops.aten

# Namespaces of operators whose CUDA kernels are torch's own. An operator of anybody else is code that the host runs.
_KNOWN = ("aten", "prims")
# With a mask in their second argument, and only then, the host waits for the number of places.
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten._unsafe_index_put.default)
_UNRECORDABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)


def with_cuda_graphs(segments: Sequence[Segment], top: GraphModule) -> tuple[Segment, ...]:
    """The records of `segments`, which say now whether their modules in `top` become CUDA graphs, or why not."""
    modules = dict(top.named_children())
    found = []
    for segment in segments:
        module = modules[segment.name]
        assert isinstance(module, GraphModule)
        refusal = recording_refusal(module)
        if segment.lowering is not None and segment.lowering.how == TENSORRT:
            refusal = NotRecorded("", "TensorRT runs it, on a stream of its own")
        found.append(dataclasses.replace(segment, cuda_graph=CudaGraphUse(refusal)))
    return tuple(found)


def recording_refusal(segment: GraphModule) -> NotRecorded | None:
    """Why `segment` cannot be a CUDA graph, by its first node that stands in the way; None where none does."""
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
            return f"it {verb} a tensor on {device}, and a CUDA graph has work on the GPU alone"
    if free_unbacked_symbols(_described(fake_value(node))):
        return "a number in it is read from values, so that no two runs need have the same"
    if node.op in ("placeholder", "get_attr") or is_call(node, operator.getitem):
        return None
    if communication_of(node) is not None:
        return "it communicates, which ranks do run by run"
    return _reason_of_operator(node)


def _reason_of_operator(node: Node) -> str | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        if isinstance(fake_value(node), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None  # arithmetic of sizes, which are the same in every run of a shape
        return f"operator {target} runs code on the host, which a CUDA graph would leave out"
    if target.namespace not in _KNOWN:
        return f"operator {target} is not torch's own, and what it does on the host a CUDA graph would leave out"
    if is_call(node, *_INDEXING):
        is_masked = any(_is_mask(index) for index in node.args[1])  # type: ignore[union-attr]
        return f"for operator {target} with a mask the host waits for the number of places" if is_masked else None
    if any(tag in target.tags for tag in _UNRECORDABLE):
        return f"for operator {target} the host waits for values of the device"
    return None


def _is_mask(index: object) -> bool:
    value = fake_value(index) if isinstance(index, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _devices(node: Node) -> Iterator[torch.device]:
    value: Any = fake_value(node)
    if isinstance(value, torch.Tensor):
        yield value.device


def _described(value: Any) -> Any:
    """What of `value` may have symbols."""
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, kinds)]
    return value if isinstance(value, kinds) else []
