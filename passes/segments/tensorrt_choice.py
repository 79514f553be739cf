"""Decide which segments are for TensorRT: those of dense GEMMs.

Experts and attention stay with our kernels and Inductor. The choice depends only on the graph and works without
TensorRT; whether TensorRT supports all operators of a segment shows when it is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from moepass.passes.graph.nodes import fake_value, graph_inputs, symbolic_sizes
from moepass.passes.ir.segment import ATTENTION, DENSE, EXPERTS, HEAD, PART_KEY, Segment, TensorrtChoice

_NOT_READ_FROM = ("cpu",)


def with_tensorrt_choices(segments: Sequence[Segment], top: GraphModule) -> tuple[Segment, ...]:
    """Return `segments` with the decision whether their modules in `top` are for TensorRT."""
    modules = dict(top.named_children())
    decided = []
    for segment in segments:
        module = modules[segment.name]
        assert isinstance(module, GraphModule)
        decided.append(dataclasses.replace(segment, tensorrt=TensorrtChoice(stays_out_of_tensorrt(module))))
    return tuple(decided)


def stays_out_of_tensorrt(segment: GraphModule) -> str:
    """Return why `segment` is not for TensorRT; empty if it is."""
    parts = {node.meta.get(PART_KEY) for node in segment.graph.nodes}
    if EXPERTS in parts:
        return "it has expert GEMMs, and TensorRT has no grouped GEMM"
    if ATTENTION in parts:
        return "it has attention, which stays with Inductor"
    if not parts & {DENSE, HEAD}:
        return "it has no GEMM with dense weights, and TensorRT is used only for these"
    open_sizes = {str(symbol) for size in symbolic_sizes(segment.graph.nodes) for symbol in size.node.expr.free_symbols}
    if open_sizes:
        return (
            f"it has dynamic sizes ({', '.join(sorted(open_sizes))}), but engines need constant sizes: "
            "torch.compile(model, dynamic=False) compiles each shape separately"
        )
    for node in graph_inputs(segment.graph):
        value = fake_value(node)
        if not isinstance(value, torch.Tensor):
            return f"its input {node.name} is a {type(value).__name__}, but engines accept only tensors"
        if value.device.type in _NOT_READ_FROM:
            return f"its input {node.name} is on the CPU, but engines read only GPU memory"
    for node in segment.graph.nodes:
        if node.op == "get_attr":
            return f"it has a constant ({node.target}), which the engine would copy"
    return ""
