"""Expert tensors that a model computes of its parameters in every run: cast, viewed, cut, put together, scaled.

Nothing else goes into them, so they are the same in every run, and may be computed once.
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
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import ancestors, origin

# [Empirical] A few operations for each of some hundreds of experts. What takes more is no weight.
_MOST_STEPS = 4096


class NotComputedAheadError(Exception):
    """A tensor that cannot be computed before a run; says why."""


def before_transposes(operand: Node) -> Node:
    """Return the tensor [experts, ., .] whose matrices `operand` transposes, or `operand` itself."""
    return origin(operand, passes=lambda step: has_trait(step, Trait.PERMUTE) and permutation(step)[0] == 0)


def is_computed(tensor: Node) -> bool:
    """Return whether `tensor` is computed from parameters alone, and is neither a parameter nor a stack of them."""
    if tensor.op != "call_function" or is_expert_stack(tensor):
        return False
    try:
        steps_behind(tensor)
    except NotComputedAheadError:
        return False
    return True


def steps_behind(tensor: Node) -> list[Node]:
    """Return the operations that compute `tensor`, in host order. Raises NotComputedAheadError, in words."""
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


def parameters_behind(tensor: Node) -> tuple[Node, ...]:
    """The parameters that `tensor` is computed of, in the order of the graph. Raises NotComputedAheadError."""
    used = {used for step in steps_behind(tensor) for used in step.all_input_nodes}
    return tuple(sorted(node for node in used if node.op == "placeholder"))


def recipe_of(tensor: Node, position: int, places: Mapping[Node, int]) -> WeightRecipe:
    """The recipe of tensor `position` of a bank; `places` are those of its parameters. Raises NotComputedAheadError."""
    inputs = parameters_behind(tensor)
    number_of = {node: number for number, node in enumerate(inputs)}
    steps = []
    for step in steps_behind(tensor):
        name = "getitem" if step.target is operator.getitem else str(step.target)
        call = {"operator": name, "args": _written(step.args, number_of), "kwargs": _written(step.kwargs, number_of)}
        steps.append(json.dumps(call, sort_keys=True))
        number_of[step] = len(number_of)
    return WeightRecipe(position, tuple(places[node] for node in inputs), tuple(steps))


def _check_step(node: Node) -> None:
    target = node.target
    is_known = target is operator.getitem or (
        isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    )
    if node.op != "call_function" or not is_known or base_operation(node) not in RECIPE_OPERATIONS:
        raise NotComputedAheadError(
            f"{named(node)} goes into it; expected casts, views, slices, joins, sums and products of parameters"
        )
    if not _is_static(node):
        raise NotComputedAheadError(f"{named(node)} has sizes that only a run tells")
    _written((node.args, node.kwargs), dict.fromkeys(node.all_input_nodes, 0))
    device = node.kwargs.get("device")
    if device is not None and device != fake_value(node.all_input_nodes[0]).device:
        raise NotComputedAheadError(f"{named(node)} moves it to {device}")


def _is_static(node: Node) -> bool:
    values = several(fake_value(node))
    return all(isinstance(one, torch.Tensor) and all(isinstance(size, int) for size in one.shape) for one in values)


def _written(argument: Any, number_of: Mapping[Node, int]) -> Any:
    """An argument as a recipe has it. Raises NotComputedAheadError."""
    if isinstance(argument, Node):
        return {"value": number_of[argument]}
    if isinstance(argument, (list, tuple)):
        return [_written(part, number_of) for part in argument]
    if isinstance(argument, dict):
        # Its device is that of what it copies, wherever that is.
        return {name: _written(part, number_of) for name, part in argument.items() if name != "device"}
    if isinstance(argument, torch.dtype):
        return {"dtype": dtype_name(argument)}
    if isinstance(argument, torch.memory_format):
        return {"memory_format": str(argument).removeprefix("torch.")}
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    raise NotComputedAheadError(f"it is computed with {argument}, which is no number, type or size")
