"""Expert tensors that a model computes from its parameters alone, by casts, views, slices, joins and scales.

They are the same in every run, so they can be computed once.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.blocks.expert_stack import is_expert_stack
from moepass.passes.graph.nodes import fake_value, several
from moepass.passes.graph.source_lines import ARGUMENT_KEY, named
from moepass.passes.graph.written_inputs import writes_to_inputs
from moepass.passes.ir.plan import dtype_name
from moepass.passes.ir.weight_recipe import RECIPE_OPERATIONS, WeightRecipe
from moepass.passes.ops.arguments import permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait, is_aten
from moepass.passes.ops.walk import ancestors, origin

# [Empirical] A few operations for each of some hundreds of experts. A tensor that takes more is no weight.
_MOST_STEPS = 4096


class NotComputedAheadError(Exception):
    """A tensor cannot be computed before a run; the message has the reason."""


def before_transposes(operand: Node) -> Node:
    """Return the tensor [experts, ., .] whose matrices `operand` transposes, or `operand` itself."""
    return origin(operand, passes=lambda step: has_trait(step, Trait.PERMUTE) and permutation(step)[0] == 0)


def is_computed(tensor: Node) -> bool:
    """Return whether `tensor` is computed from parameters alone, and is neither a parameter nor a stack of them."""
    if tensor.op != "call_function" or is_expert_stack(tensor):
        return False
    try:
        weight_steps(tensor)
    except NotComputedAheadError:
        return False
    return True


def weight_steps(tensor: Node) -> list[Node]:
    """Return the operations that compute `tensor`, in host order. Raises NotComputedAheadError."""
    steps: list[Node] = []
    inputs: list[Node] = []
    for node in ancestors(tensor):
        if node.op == "placeholder":
            if node.meta.get(ARGUMENT_KEY, False) or not _is_static(node):
                raise NotComputedAheadError(f"{named(node)} goes into it, which a caller may pass anew in every run")
            inputs.append(node)
            continue
        _check_step(node)
        steps.append(node)
        if len(steps) > _MOST_STEPS:
            raise NotComputedAheadError(f"it takes more than {_MOST_STEPS} operations")
    written = writes_to_inputs(tensor.graph) if steps else {}
    for node in sorted(inputs):
        if node in written:
            raise NotComputedAheadError(f"{named(node)} goes into it, to which the model writes in every run")
    return sorted(steps)


def weight_parameters(tensor: Node) -> tuple[Node, ...]:
    """Return the parameters from which `tensor` is computed, in graph order. Raises NotComputedAheadError."""
    used = {used for step in weight_steps(tensor) for used in step.all_input_nodes}
    return tuple(sorted(node for node in used if node.op == "placeholder"))


def recipe_of(tensor: Node, position: int, indices: Mapping[Node, int]) -> WeightRecipe:
    """Return the recipe of tensor `position` of a bank, with `indices` of parameters. Raises NotComputedAheadError."""
    inputs = weight_parameters(tensor)
    number_of = {node: number for number, node in enumerate(inputs)}
    steps = []
    for step in weight_steps(tensor):
        name = "getitem" if step.target is operator.getitem else str(step.target)
        call = {"operator": name, "args": _as_json(step.args, number_of), "kwargs": _as_json(step.kwargs, number_of)}
        steps.append(json.dumps(call, sort_keys=True))
        number_of[step] = len(number_of)
    return WeightRecipe(position, tuple(indices[node] for node in inputs), tuple(steps))


def _check_step(node: Node) -> None:
    is_known = node.target is operator.getitem or is_aten(node.target)
    if node.op != "call_function" or not is_known or base_operation(node) not in RECIPE_OPERATIONS:
        raise NotComputedAheadError(
            f"{named(node)} goes into it; expected casts, views, slices, joins, sums and products of parameters"
        )
    if not _is_static(node):
        raise NotComputedAheadError(f"{named(node)} has sizes that are known only at run time")
    _as_json((node.args, node.kwargs), dict.fromkeys(node.all_input_nodes, 0))
    device = node.kwargs.get("device")
    if device is not None and device != fake_value(node.all_input_nodes[0]).device:
        raise NotComputedAheadError(f"{named(node)} moves it to {device}")


def _is_static(node: Node) -> bool:
    values = several(fake_value(node))
    return all(isinstance(item, torch.Tensor) and all(isinstance(size, int) for size in item.shape) for item in values)


def _as_json(argument: Any, number_of: Mapping[Node, int]) -> Any:
    """Return an argument in the JSON form of recipes. Raises NotComputedAheadError."""
    if isinstance(argument, Node):
        return {"value": number_of[argument]}
    if isinstance(argument, (list, tuple)):
        return [_as_json(item, number_of) for item in argument]
    if isinstance(argument, dict):
        # The result is on the device of the operand, which is known when the recipe runs.
        return {name: _as_json(item, number_of) for name, item in argument.items() if name != "device"}
    if isinstance(argument, torch.dtype):
        return {"dtype": dtype_name(argument)}
    if isinstance(argument, torch.memory_format):
        return {"memory_format": str(argument).removeprefix("torch.")}
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    raise NotComputedAheadError(f"it is computed with {argument}; expected numbers, types and sizes")
