"""Names of a graph's operations, and their index arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.node_arguments import all_arguments, named_arguments
from moepass.passes.graph.nodes import fake_value

# Sets of `base_operation` names: operators that change the dtype; that keep all elements, copied or not; that permute
# dimensions.
CASTS = frozenset({"_to_copy", "convert_element_type"})
COPIES = frozenset({"clone", "alias", "detach", "contiguous"})
PERMUTATIONS = frozenset({"permute", "transpose", "t"})


def operation(node: Node) -> str:
    """Return the name of a node's operation with its overload, such as `sum.dim_IntList`, or `view`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.rsplit("::", 1)[-1]
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    return str(getattr(target, "__name__", target))


def base_operation(node: Node) -> str:
    """Return the name of a node's operation without its overload."""
    return operation(node).split(".", 1)[0]


def permutation(node: Node) -> list[int]:
    """Return for each dimension of the result of one of `PERMUTATIONS` the dimension of its operand."""
    base, arguments = base_operation(node), all_arguments(node)
    order = list(range(fake_value(node).dim()))
    if base == "permute":
        return [dim % len(order) for dim in arguments["dims"]]
    if base == "t":
        return order[::-1]
    left, right = (arguments[name] % len(order) for name in ("dim0", "dim1"))
    order[left], order[right] = order[right], order[left]
    return order


def is_accumulating_write(node: Node) -> bool:
    """Return whether `node` is an indexed write that accumulates."""
    return base_operation(node) in ("index_put", "_unsafe_index_put") and bool(named_arguments(node).get("accumulate"))


def is_mask(index: Node) -> bool:
    """Return whether `index` is a boolean mask."""
    return bool(fake_value(index).dtype is torch.bool)


def indexed_dimensions(arguments: dict[str, Any]) -> list[tuple[int, Node]]:
    """Return the dimensions that a lookup or write with these `arguments` indexes, each with its index."""
    indices = arguments.get("indices")
    if indices is None:
        return [(arguments["dim"], arguments["index"])]
    indexed, dim = [], 0
    for index in indices:
        if index is not None:
            indexed.append((dim, index))
        dim += fake_value(index).dim() if index is not None and is_mask(index) else 1
    return indexed
