"""FX graphs as data and back, for stored captures, which contain no code.

A record names operators and functions, and reading it executes nothing. Fake values (`meta`) are not stored.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.ir.slot_operations import SLOT_OPS

# Metadata key of the layers that a segment computes.
LAYERS_KEY = "moepass_layers"

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in (
        "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "eq", "ne", "lt", "le",
        "gt", "ge", "and_", "or_", "not_",
    )},
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc", "sqrt")},
    **{f"torch.{name}": getattr(torch, name) for name in (
        "sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite",
    )},
    **{f"moepass.{function.__name__}": function for function in SLOT_OPS},
}  # fmt: skip
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_CONSTANTS: tuple[tuple[str, type[Any]], ...] = (
    ("dtype", torch.dtype),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)


class NotStorableError(Exception):
    """Something that a record cannot store; the text names it."""


class NodeRecord(msgspec.Struct, frozen=True, array_like=True):
    """One node; `args` and `kwargs` are written by `_to_data`."""

    op: str
    name: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    layers: str = ""


def record_graph(graph: Graph) -> tuple[NodeRecord, ...]:
    """Return the records of a graph. Raises NotStorableError for constants, branches and unknown functions."""
    return tuple(
        NodeRecord(
            node.op,
            node.name,
            _name_of_target(node),
            [_to_data(value) for value in node.args],
            {key: _to_data(value) for key, value in node.kwargs.items()},
            str(node.meta.get(LAYERS_KEY, "")),
        )
        for node in graph.nodes
    )


def read_graph(records: tuple[NodeRecord, ...], modules: Mapping[str, torch.nn.Module]) -> GraphModule:
    """Return the graph, which calls `modules` by their names.

    Raises ValueError for records not made by `record_graph`.
    """
    graph = Graph()
    nodes: dict[str, Node] = {}
    for record in records:
        if record.op not in ("placeholder", "call_function", "call_module", "output"):
            raise ValueError(f"nodes of kind {record.op!r} are unknown")
        target = _target_of(record.target) if record.op == "call_function" else record.target
        args = tuple(_from_data(value, nodes) for value in record.args)
        kwargs = {key: _from_data(value, nodes) for key, value in record.kwargs.items()}
        node = graph.create_node(record.op, target, args, kwargs, name=record.name)
        if record.layers:
            node.meta[LAYERS_KEY] = record.layers
        nodes[record.name] = node
    graph.lint()
    return GraphModule(dict(modules), graph)


def _name_of_target(node: Node) -> str:
    if node.op in ("placeholder", "output", "call_module"):
        return str(node.target)
    if node.op == "get_attr":
        raise NotStorableError(f"the constant {node.target} of the graph cannot be stored")
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}"
    try:
        return _NAMES[node.target]  # type: ignore[index]
    except KeyError:
        raise NotStorableError(f"a call of {node.target} cannot be stored") from None


def _target_of(name: str) -> Callable[..., Any]:
    """Return the operator or function called `name`. Raises ValueError for an unknown name."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    parts = name.split(".")
    target: Any = torch.ops
    if parts[:2] != ["torch", "ops"] or len(parts) != 5:
        raise ValueError(f"{name} is not an operator")
    for attribute in parts[2:]:
        target = getattr(target, attribute, None)
    if not isinstance(target, torch._ops.OpOverload):
        raise ValueError(f"operator {name} is not registered in this process")
    return target


def _to_data(value: Any) -> Any:
    """Convert an argument to JSON data.

    Numbers, strings and lists are unchanged; other values become a mapping with one key, which names their type.
    """
    if isinstance(value, Node):
        return {"node": value.name}
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [_to_data(item) for item in value]}
    if isinstance(value, list):
        return [_to_data(item) for item in value]
    if isinstance(value, slice):
        return {"slice": [_to_data(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for name, kind in _CONSTANTS:
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise NotStorableError(f"arguments of type {type(value).__name__} cannot be stored")


def _from_data(value: Any, nodes: Mapping[str, Node]) -> Any:
    if isinstance(value, list):
        return [_from_data(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        if content not in nodes:
            raise ValueError(f"the node {content!r} is read before it is computed")
        return nodes[content]
    if kind == "tuple":
        return tuple(_from_data(item, nodes) for item in content)
    if kind == "slice":
        return slice(*(_from_data(item, nodes) for item in content))
    if kind == "float":
        return float(content)
    if kind == "device":
        return torch.device(content)
    constant = getattr(torch, content, None)
    if not any(kind == name and isinstance(constant, expected) for name, expected in _CONSTANTS):
        raise ValueError(f"{content!r} is not a constant of kind {kind}")
    return constant
