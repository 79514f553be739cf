"""Make small changes to captured graphs, which change their meaning or leave them meaningless."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moepass.passes.graph.collectives import KINDS
from moepass.passes.graph.nodes import copy_graph_module, fake_value

SWAPS = {
    torch.ops.aten.add.Tensor: torch.ops.aten.sub.Tensor,
    torch.ops.aten.mul.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.sub.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.ge.Scalar: torch.ops.aten.gt.Scalar,
    torch.ops.aten.ge.Tensor: torch.ops.aten.gt.Tensor,
    torch.ops.aten.lt.Scalar: torch.ops.aten.le.Scalar,
    torch.ops.aten.silu.default: torch.ops.aten.relu.default,
    torch.ops.aten.floor_divide.default: torch.ops.aten.remainder.Scalar,
    torch.ops.aten.bitwise_or.Tensor: torch.ops.aten.bitwise_and.Tensor,
}


def mutate(module: GraphModule, node_index: int, how: int) -> GraphModule | None:
    """Return the graph with node number `node_index` changed in way `how`, 0 to 4; None if that is not possible."""
    changed = copy_graph_module(module)
    nodes = [node for node in changed.graph.nodes if node.op == "call_function"]
    node = nodes[node_index % len(nodes)]
    if how == 0 and node.target in SWAPS:
        node.target = SWAPS[node.target]
        if node.target is torch.ops.aten.remainder.Scalar:
            node.kwargs = {}
    elif how == 1 and any(isinstance(argument, int) and not isinstance(argument, bool) for argument in node.args):
        index = next(i for i, argument in enumerate(node.args) if isinstance(argument, int))
        node.update_arg(index, node.args[index] + 1)
    elif how == 2 and len(node.args) > 1 and all(isinstance(argument, torch.fx.Node) for argument in node.args[:2]):
        node.args = (node.args[1], node.args[0], *node.args[2:])
    elif how == 3 and isinstance(fake_value(node), torch.Tensor) and node.users:
        twin = [
            earlier
            for earlier in nodes[: node_index % len(nodes)]
            if isinstance(fake_value(earlier), torch.Tensor)
            and str(fake_value(earlier).shape) == str(fake_value(node).shape)
            and fake_value(earlier).dtype == fake_value(node).dtype
        ]
        if not twin:
            return None
        node.replace_all_uses_with(twin[-1])
    elif how == 4 and node.target in KINDS and isinstance(node.args[1], list):
        node.update_arg(1, list(reversed(node.args[1])))
    else:
        return None
    if not _refresh_values(node):
        return None
    changed.recompile()
    return changed


def _refresh_values(changed: Node) -> bool:
    """Recompute the fake values of `changed` and its users. Return False if a node has no value any more.

    A capture never yields a graph whose recorded shapes differ from those of its operators.
    """
    mode = detect_fake_mode([fake_value(node) for node in changed.graph.nodes])
    assert mode is not None
    assert mode.shape_env is not None
    stale = {changed}
    # Sizes are compared by their hints: a guard would specialise a symbol of the original graph, which shares them.
    with mode, mode.shape_env.suppress_guards():
        for node in changed.graph.nodes:
            # Data-dependent sizes have their own symbols, which are kept.
            if node not in stale or node.op != "call_function" or node.meta.get("unbacked_bindings"):
                continue
            try:
                value = node.target(*map_arg(node.args, fake_value), **map_arg(node.kwargs, fake_value))
            except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):  # of a meta function
                return False
            if _layout(value) != _layout(fake_value(node)):
                stale.update(node.users)
            node.meta["val"] = value
    return True


def _layout(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return str([_layout(item) for item in value])
    return f"{value.shape} {value.dtype} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)


def _insert(module: GraphModule, node: Node, target: object, *arguments: object) -> None:
    """Make every user of `node` read target(node, *arguments) instead."""
    users = list(node.users)
    with module.graph.inserting_after(node):
        fresh = module.graph.call_function(target, (node, *arguments))  # type: ignore[arg-type]
    fresh.meta = {key: node.meta[key] for key in ("val", "nn_module_stack", "stack_trace") if key in node.meta}
    for user in users:
        user.replace_input_with(node, fresh)


# Changes of a rank's floating-point values, and of its integers.
FLOAT_CHANGES = {
    "scale": (torch.ops.aten.mul.Tensor, 1.25),
    "shift": (torch.ops.aten.add.Tensor, 0.125),
    "limit": (torch.ops.aten.clamp_max.default, 0.3),
    "threshold": (torch.ops.aten.threshold.default, 0.2, 0.0),
    "gelu": (torch.ops.aten.gelu.default,),
    "negate": (torch.ops.aten.neg.default,),
}
INT_CHANGES = {
    "one more": (torch.ops.aten.add.Tensor, 1),
    "modulo": (torch.ops.aten.remainder.Scalar, 3),
    "at most": (torch.ops.aten.clamp_max.default, 2),
}


EVERY_CHANGE: tuple[int | str, ...] = (*range(5), *FLOAT_CHANGES, *INT_CHANGES, "flag", "constant")


def mutate_values(module: GraphModule, node_index: int, how: str) -> GraphModule | None:
    """Return the graph with the value of one node changed; None if the change does not apply to it.

    `how` is a key of FLOAT_CHANGES or INT_CHANGES, "flag" to invert a Boolean argument, or "constant" to change a float
    argument.
    """
    changed = copy_graph_module(module)
    nodes = [node for node in changed.graph.nodes if node.op == "call_function"]
    node = nodes[node_index % len(nodes)]
    value = fake_value(node)
    if how in FLOAT_CHANGES or how in INT_CHANGES:
        wants_float = how in FLOAT_CHANGES
        is_number = isinstance(value, torch.Tensor) and value.dtype is not torch.bool and node.users
        if not is_number or value.is_floating_point() != wants_float:
            return None
        target, *arguments = (FLOAT_CHANGES if wants_float else INT_CHANGES)[how]
        _insert(changed, node, target, *arguments)
    else:
        kind, change = (bool, lambda old: not old) if how == "flag" else (float, lambda old: old * 1.5 + 0.1)
        places = [index for index, argument in enumerate(node.args) if type(argument) is kind]
        names = [name for name, argument in node.kwargs.items() if type(argument) is kind]
        if places:
            node.update_arg(places[0], change(node.args[places[0]]))
        elif names:
            node.update_kwarg(names[0], change(node.kwargs[names[0]]))
        else:
            return None
        if not _refresh_values(node):
            return None
    changed.recompile()
    return changed


def mutant_of(module: GraphModule, node_index: int, how: int | str) -> GraphModule | None:
    """Return the graph with one node changed: by `mutate` if `how` is a number, else by `mutate_values`."""
    return mutate(module, node_index, how) if isinstance(how, int) else mutate_values(module, node_index, how)


def changes_of(module: GraphModule, ways: Sequence[int | str]) -> list[tuple[int, int | str]]:
    """Return all pairs of the number of a node that calls a function, and one of `ways`."""
    nodes = sum(node.op == "call_function" for node in module.graph.nodes)
    return [(index, how) for index in range(nodes) for how in ways]


def finite_or_none(run: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor] | None:
    """Return the outputs of `run`; None if it raises, or if an output is not finite, as in unwritten memory."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills such memory with NaN
    try:
        outputs = run()
    except Exception:
        return None
    finally:
        torch.use_deterministic_algorithms(False)
    return outputs if all(bool(torch.isfinite(output).all()) for output in outputs) else None
