"""Costs of one operator: FLOPs, bytes of memory traffic, bytes between ranks, in the symbols of the graph's shapes.

Operators that are more than elementwise register a cost function: `@op_cost(aten.mm.default)` on a function from
`OpCall` to `OpCost` that uses the formulas of `moepass.models.formulas`. Views cost nothing. Elementwise operators,
reductions and copies cost their traffic: every tensor is read or written once. All other operators cost their traffic
too, with `is_known=False`, and the plan lists them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from moepass.models.formulas.gemms import convolution_flops, gemm_flops, triangular_solve_flops
from moepass.models.formulas.memory import experts_hit
from moepass.models.formulas.sizes import Size, divided
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.slot_operations import BANK_TENSOR, EXPERT_STACK, SLOT_OPS, gather
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import Trait, is_aten, is_view, mutates, traits_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class OpCost:
    """FLOPs, bytes read and written in device memory, bytes sent to and received from other ranks.

    `is_known` is False if the operator has no cost function, so that its FLOPs are missing.
    """

    flops: Size = 0
    memory_bytes: Size = 0
    communication_bytes: Size = 0
    is_known: bool = True

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            self.flops + other.flops,
            self.memory_bytes + other.memory_bytes,
            self.communication_bytes + other.communication_bytes,
            self.is_known and other.is_known,
        )


@dataclasses.dataclass(frozen=True)
class OpCall:
    """The arguments of a node by the names of its schema, and the numbers of ranks of process groups by name."""

    node: Node
    arguments: Mapping[str, Any]
    ranks: Mapping[str, int]

    def shape(self, name: str) -> tuple[Size, ...]:
        """Return the shape of a tensor argument. Raises KeyError if the call has no such argument."""
        return shape_of(fake_value(self.arguments[name]))

    @property
    def output_shape(self) -> tuple[Size, ...]:
        """Shape of the result, or of its first tensor."""
        return shape_of(tensors_in(fake_value(self.node))[0])

    def nbytes(self, name: str) -> Size:
        """Return the bytes of a tensor argument."""
        return value_bytes(fake_value(self.arguments[name]))

    @property
    def output_bytes(self) -> Size:
        """Bytes of the result."""
        return value_bytes(fake_value(self.node))

    @property
    def traffic_bytes(self) -> Size:
        """Bytes of every tensor that is read or written, each once."""
        return sum(value_bytes(fake_value(used)) for used in self.node.all_input_nodes) + self.output_bytes


CostFunction = Callable[[OpCall], OpCost]
_COMPUTE = {Trait.MATMUL, Trait.GROUPED_MATMUL, Trait.CONVOLUTION, Trait.ATTENTION}
OP_COSTS: dict[str, CostFunction] = {}


def op_cost(*targets: object) -> Callable[[CostFunction], CostFunction]:
    """Register a function as the cost of operators. Names are for operators that may not be loaded."""

    def register(function: CostFunction) -> CostFunction:
        for target in targets:
            name = str(target)
            if name in OP_COSTS:
                raise ValueError(f"{name} already has a cost function")
            OP_COSTS[name] = function
        return function

    return register


def node_cost(node: Node, ranks: Mapping[str, int] | None = None) -> OpCost:
    """Return the cost of `node`. `ranks` is the size of each process group by name."""
    if node.op != "call_function" or node.target is operator.getitem:
        return OpCost()
    # Bank transfers are not computation: the plan counts them by bank.
    if node.target in (BANK_TENSOR, EXPERT_STACK, gather, *SLOT_OPS) or not tensors_in(fake_value(node)):
        return OpCost()
    call = OpCall(node, all_arguments(node), ranks or {})
    function = OP_COSTS.get(str(node.target))
    if function is not None:
        return function(call)
    if is_view(node) and not mutates(node):
        return OpCost()
    return OpCost(memory_bytes=call.traffic_bytes, is_known=is_elementwise(node.target))


def is_elementwise(target: object) -> bool:
    """Return whether only memory traffic counts: for pointwise operators, reductions, copies, sorts and fills."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if getattr(torch.Tag, "reduction", None) in target.tags:
        return True
    traits = traits_of(target)
    return is_aten(target) and bool(traits) and traits.isdisjoint(_COMPUTE)


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """Return the shape of `value`, with expressions for symbolic sizes."""
    return tuple(size_of(size) for size in value.shape)


def size_of(size: int | torch.SymInt) -> Size:
    """Return a size for formulas: an int, or an expression in the graph's symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of a node's value, which may be a tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def value_bytes(value: object) -> Size:
    """Return the bytes of memory of a node's value; expanded elements count once."""
    total: Size = 0
    for tensor in tensors_in(value):
        elements: Size = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if not (isinstance(stride, int) and stride == 0):
                elements = elements * size_of(size)
        total = total + elements * tensor.element_size()
    return total


@op_cost(aten.mm.default)
def _mm(call: OpCall) -> OpCost:
    return _gemm(call, "self", "mat2")


@op_cost(aten.addmm.default, aten._addmm_activation.default)
def _addmm(call: OpCall) -> OpCost:
    return _gemm(call, "mat1", "mat2")


@op_cost(aten.bmm.default)
def _bmm(call: OpCall) -> OpCost:
    return _gemm(call, "self", "mat2")


@op_cost(aten.baddbmm.default)
def _baddbmm(call: OpCall) -> OpCost:
    return _gemm(call, "batch1", "batch2")


@op_cost(aten._scaled_mm.default, aten._int_mm.default)
def _scaled_mm(call: OpCall) -> OpCost:
    return _gemm(call, "self", "mat2")


@op_cost(aten.mv.default)
def _mv(call: OpCall) -> OpCost:
    rows, inner = call.shape("self")
    return OpCost(gemm_flops(rows, inner, 1), call.traffic_bytes)


@op_cost(aten.dot.default)
def _dot(call: OpCall) -> OpCost:
    return OpCost(gemm_flops(1, call.shape("self")[0], 1), call.traffic_bytes)


@op_cost(aten.linear.default)
def _linear(call: OpCall) -> OpCost:
    *rows, inner = call.shape("input")
    return OpCost(gemm_flops(_product_of(rows), inner, call.shape("weight")[0]), call.traffic_bytes)


def _gemm(call: OpCall, left: str, right: str) -> OpCost:
    *count, rows, inner = call.shape(left)
    columns = call.shape(right)[-1]
    return OpCost(gemm_flops(rows, inner, columns, _product_of(count)), call.traffic_bytes)


@op_cost(aten._grouped_mm.default, aten._scaled_grouped_mm.default, "transformers.grouped_mm_fallback.default")
def _grouped_mm(call: OpCall) -> OpCost:
    """Count one expert's matrix for each row.

    Experts without rows are not read: their number assumes uniform routing.
    """
    left, right = list(call.arguments)[:2]
    *count, rows, inner = call.shape(left)
    *experts, _, columns = call.shape(right)
    flops = gemm_flops(rows, inner, columns)
    if count or not experts:
        # Groups along the columns or along the inner size, or groups of equal size.
        return OpCost(flops * _product_of(count if experts else ()), call.traffic_bytes)
    read = experts_hit(experts[0], 1, rows)
    weights = call.nbytes(right)
    memory = call.traffic_bytes - weights + divided(weights, experts[0]) * read
    return OpCost(flops, memory)


@op_cost(aten.convolution.default)
def _convolution(call: OpCall) -> OpCost:
    channels_out, channels_in, *kernel = call.shape("weight")
    batch, *_ = call.shape("input")
    spatial = call.shape("input")[2:] if call.arguments["transposed"] else call.output_shape[2:]
    positions = batch * _product_of(spatial)
    flops = convolution_flops(positions, channels_out, channels_in, _product_of(kernel))
    return OpCost(flops, call.traffic_bytes)


@op_cost(aten.linalg_solve_triangular.default)
def _solve_triangular(call: OpCall) -> OpCost:
    *count, rows, columns = call.shape("B")
    return OpCost(triangular_solve_flops(rows, columns, _product_of(count)), call.traffic_bytes)


@op_cost(aten.index.Tensor, aten.index_select.default, aten.gather.default)
def _selection(call: OpCall) -> OpCost:
    """Count the selected rows only, not the complete table."""
    return _reads_selected(call, "self")


@op_cost(aten.embedding.default)
def _embedding(call: OpCall) -> OpCost:
    return _reads_selected(call, "weight")


def _reads_selected(call: OpCall, table: str) -> OpCost:
    return OpCost(memory_bytes=call.traffic_bytes - call.nbytes(table) + call.output_bytes)


@op_cost(aten.copy_.default, aten.copy.default)
def _copy(call: OpCall) -> OpCost:
    return OpCost(memory_bytes=call.nbytes("src") + call.output_bytes)


def _product_of(sizes: Any) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total
