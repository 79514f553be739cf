"""Which segments are for TensorRT: those of dense GEMMs. Experts and attention stay with kernels of ours and Inductor.

Told from the graph alone, without TensorRT. Whether that has all operators of a segment shows when it is compiled.
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
    """The records of `segments`, which say now whether their modules in `top` are for TensorRT, or why not."""
    modules = dict(top.named_children())
    found = []
    for segment in segments:
        module = modules[segment.name]
        assert isinstance(module, GraphModule)
        found.append(dataclasses.replace(segment, tensorrt=TensorrtChoice(stays_out_of_tensorrt(module))))
    return tuple(found)


def stays_out_of_tensorrt(segment: GraphModule) -> str:
    """Why `segment` is not for TensorRT; empty where it is."""
    parts = {node.meta.get(PART_KEY) for node in segment.graph.nodes}
    if EXPERTS in parts:
        return "it has GEMMs of experts, which have kernels of their own; TensorRT has no grouped GEMM"
    if ATTENTION in parts:
        return "it has attention, which stays with Inductor"
    if not parts & {DENSE, HEAD}:
        return "it has no GEMM with dense weights, which are what TensorRT is for"
    open_sizes = {str(symbol) for size in symbolic_sizes(segment.graph.nodes) for symbol in size.node.expr.free_symbols}
    if open_sizes:
        return (
            f"it has open sizes ({', '.join(sorted(open_sizes))}), and engines are made for constant ones: "
            "torch.compile(model, dynamic=False) compiles each shape by itself"
        )
    for node in graph_inputs(segment.graph):
        value = fake_value(node)
        if not isinstance(value, torch.Tensor):
            return f"its input {node.name} is a {type(value).__name__}, and engines take tensors"
        if value.device.type in _NOT_READ_FROM:
            return f"its input {node.name} is on the CPU, and engines read memory of a GPU"
    for node in segment.graph.nodes:
        if node.op == "get_attr":
            return f"it has a constant of its own ({node.target}), which engines would keep a copy of"
    return ""
