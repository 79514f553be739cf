"""Costs of collectives: bytes that one rank sends and receives. Their time also depends on latency and links."""

from __future__ import annotations

import dataclasses

from moepass.models.formulas.communication import all_gather_bytes, exchanged_bytes
from moepass.models.formulas.sizes import Size
from moepass.passes.cost.op_costs import OpCall, OpCost, op_cost

_c10d = "_c10d_functional"


@op_cost(f"{_c10d}.all_to_all_single.default")
def _all_to_all(call: OpCall) -> OpCost:
    # A rank sends between none and all of its rows to itself; on average one of `ranks` equal shares.
    both = call.nbytes("input") + call.output_bytes
    return _moved(call, exchanged_bytes(both, _ranks(call)))


@op_cost(f"{_c10d}.all_gather_into_tensor.default")
def _all_gather(call: OpCall) -> OpCost:
    return _moved(call, all_gather_bytes(call.output_bytes, call.arguments["group_size"]))


@op_cost(f"{_c10d}.reduce_scatter_tensor.default")
def _reduce_scatter(call: OpCall) -> OpCost:
    return _moved(call, all_gather_bytes(call.nbytes("input"), call.arguments["group_size"]))


@op_cost(f"{_c10d}.all_reduce.default", f"{_c10d}.all_reduce_.default")
def _all_reduce(call: OpCall) -> OpCost:
    return _moved(call, 2 * all_gather_bytes(call.nbytes("input"), _ranks(call)))


@op_cost(f"{_c10d}.broadcast.default", f"{_c10d}.broadcast_.default")
def _broadcast(call: OpCall) -> OpCost:
    return _moved(call, call.output_bytes)


@op_cost(f"{_c10d}.wait_tensor.default")
def _wait(call: OpCall) -> OpCost:
    return OpCost()


def _moved(call: OpCall, moved: Size) -> OpCost:
    return dataclasses.replace(OpCost(memory_bytes=call.traffic_bytes), communication_bytes=moved)


def _ranks(call: OpCall) -> Size | None:
    return call.ranks.get(str(call.arguments["group_name"]))
