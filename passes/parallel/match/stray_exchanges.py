"""Refuse exchanges of tokens, and sums to which this rank adds only zeros, that belong to no block in their graph."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.collectives import EXPERTS_INSIDE, Communication, collective_of, communications_of
from moepass.passes.graph.nodes import fake_value, graphs_within
from moepass.passes.graph.refusals import refusal_of
from moepass.passes.graph.source_lines import named, place_of
from moepass.passes.ir.plan import Refusal
from moepass.passes.ir.protocol import CaptureNotes
from moepass.passes.ops.arguments import fill_value, is_accumulating_write, moved_elements, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_view

# Rows of tokens have two dimensions, slots of experts three; attention exchanges heads in four.
_MOST_DIMENSIONS = 3
# A rank without experts computes its zeros in a few operations, so the search gives up after this many.
_MOST_STEPS = 128


def stray_exchanges(
    graph: Graph, claimed: Collection[Node], refused: Collection[str], groups: Collection[str], capture: CaptureNotes
) -> list[Refusal]:
    """Return one refusal for each module that has exchanges outside `claimed` and is not in `refused`."""
    owner = graph.owning_module
    graphs = list(graphs_within(owner)) if isinstance(owner, GraphModule) and owner.graph is graph else [graph]
    strays: dict[str, list[tuple[Graph, Communication]]] = {}
    for holder in graphs:
        for exchange in communications_of(holder):
            if exchange.node not in claimed and _is_for_experts(exchange, capture):
                strays.setdefault(place_of(exchange.node), []).append((holder, exchange))
    refusals = []
    for where, exchanges in strays.items():
        if where not in refused:
            holder, first = exchanges[0]
            reason = _reason([exchange for _, exchange in exchanges], capture)
            group = first.group_name if first.group_name in groups else ""
            refusals.append(refusal_of(holder, reason, first.node, where, group))
    return refusals


def _reason(strays: list[Communication], capture: CaptureNotes) -> str:
    first = strays[0]
    if first.kind == EXPERTS_INSIDE:
        return (
            f"{named(first.node)} holds experts, and what it exchanges for them, in one operator that moepass cannot "
            "look into; use an implementation of these experts that is written in PyTorch operators"
        )
    if all(_adds_only_zeros(stray.node) for stray in strays):
        return (
            f"this rank adds nothing but zeros to the sum over ranks that {first.kind} {named(first.node)} makes, as a "
            "rank does that holds none of the experts; it cannot see what they do, so spread them over as many ranks "
            "as there are experts, or fewer"
        )
    number = f"{len(strays)} exchanges of tokens or counts" if len(strays) > 1 else "an exchange of tokens or counts"
    return (
        f"{number}, {first.kind} {named(first.node)}, stand{'s' * (len(strays) == 1)} around no expert GEMM that "
        f"moepass recognises in this graph (a grouped GEMM, or bmm with weights [experts, ., .]); {capture.advice()}"
    )


def _is_for_experts(communication: Communication, capture: CaptureNotes) -> bool:
    """Return whether `communication` exchanges rows, slots or sizes that Dynamo may not read, or adds only zeros."""
    sent = [fake_value(used) for used in communication.node.all_input_nodes]
    tensors = [value for value in sent if isinstance(value, torch.Tensor)]
    if _adds_only_zeros(communication.node):
        return True
    if communication.is_exchange:
        return all(value.dim() <= _MOST_DIMENSIONS for value in tensors)
    sizes = bool(tensors) and not any(value.is_floating_point() for value in tensors)
    return sizes and any(switch in capture.graph_break for switch in capture.switches_off)


def _adds_only_zeros(summing: Node) -> bool:
    """Return whether this rank adds only zeros, for all inputs, to a float sum by AllReduce or ReduceScatter."""
    collective = collective_of(summing)
    if collective is None or collective.reduction != "sum" or not collective.is_float:
        return False
    return _is_zero(collective.input, {})


def _is_zero(value: object, known: dict[Node, bool]) -> bool:
    """Return whether `value` is 0, or a node with zeros alone; adds to `known`, the nodes that were searched."""
    if not isinstance(value, Node):
        return isinstance(value, (int, float)) and value == 0
    if value not in known and len(known) < _MOST_STEPS:
        known[value] = False
        known[value] = _has_zeros_alone(value, lambda operand: _is_zero(operand, known))
    return known.get(value, False)


def _has_zeros_alone(node: Node, is_zero: Callable[[object], bool]) -> bool:
    if node.op != "call_function" or not isinstance(fake_value(node), (torch.Tensor, tuple, list)):
        return False
    base, arguments = base_operation(node), named_arguments(node)
    if has_trait(node, Trait.FILL, Trait.FILL_LIKE):
        return is_zero(fill_value(node))
    if has_trait(node, Trait.REFILL):
        return is_zero(arguments.get("value", 0))
    if base in ("mul", "div"):
        return is_zero(arguments["self"]) or (base == "mul" and is_zero(arguments["other"]))
    if base == "copy":
        return is_zero(arguments["src"])
    elements = moved_elements(node) or (node.all_input_nodes[:1] if is_view(node) else [])
    adds = base in ("add", "sub", "neg", "sum") or has_trait(node, Trait.WRITE_SUM, Trait.CAST)
    if adds or is_accumulating_write(node):
        elements = [arguments[name] for name in ("self", "other", "src", "source", "values", "a") if name in arguments]
    return bool(elements) and all(map(is_zero, elements))
