"""What an operation of a graph is called, and its arguments by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph import fake_value


def operation(node: Node) -> str:
    """The name of a node's operation with its variant and without its library, as `sum.dim_IntList`, or `view`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.rsplit("::", 1)[-1]
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    return str(getattr(target, "__name__", target))


def base_operation(node: Node) -> str:
    """The name of a node's operation, whichever variant."""
    return operation(node).split(".", 1)[0]


def named_arguments(node: Node) -> dict[str, Any]:
    """By the names of the schema; by their places where the target has none."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else [*map(str, range(len(node.args)))]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def is_mask(index: Node) -> bool:
    return bool(fake_value(index).dtype is torch.bool)


def indexed_dimensions(arguments: dict[str, Any]) -> list[tuple[int, Node]]:
    """The dimensions that a lookup, or a write, of these `arguments` indexes, and by what."""
    indices = arguments.get("indices")
    if indices is None:
        return [(arguments["dim"], arguments["index"])]
    found, dim = [], 0
    for index in indices:
        if index is not None:
            found.append((dim, index))
        dim += fake_value(index).dim() if index is not None and is_mask(index) else 1
    return found
