"""Names of a graph's operations, and the arguments that they index by."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.node_arguments import all_arguments, named_arguments
from moepass.passes.graph.nodes import fake_value

# By their `base_operation`: the same numbers in another type; the same elements, copied or not; in another order of
# dimensions.
CASTS = frozenset({"_to_copy", "convert_element_type"})
COPIES = frozenset({"clone", "alias", "detach", "contiguous"})
TURNS = frozenset({"permute", "transpose", "t"})


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


def permutation(node: Node) -> list[int]:
    """Of each dimension of the result of one of `TURNS`, which one of the operand it is."""
    base, given = base_operation(node), all_arguments(node)
    order = list(range(fake_value(node).dim()))
    if base == "permute":
        return [dim % len(order) for dim in given["dims"]]
    if base == "t":
        return order[::-1]
    left, right = (given[name] % len(order) for name in ("dim0", "dim1"))
    order[left], order[right] = order[right], order[left]
    return order


def adds_to_places(node: Node) -> bool:
    """True for a write to places that adds to what is there."""
    return base_operation(node) in ("index_put", "_unsafe_index_put") and bool(named_arguments(node).get("accumulate"))


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
