"""The arguments of a node by name, and the dimensions, indices and numbers in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.ops.traits import MOVES, Trait, base_operation, has_trait

# Name of an argument of a Python operator, which has no names for them.
UNNAMED = "other"
# Arguments with elements that operators move; the others say which elements, or to which positions.
_ELEMENT_ARGUMENTS = {"self", "input", "a", "tensors", "other", "src", "source", "values", "value"}


def named_arguments(node: Node, args: Any = None, kwargs: Any = None) -> dict[str, Any]:
    """Return the arguments of a node, or `args` and `kwargs` instead, by the names of its operator's schema.

    Without a schema, names are positions.
    """
    args, kwargs = (node.args, node.kwargs) if args is None else (args, kwargs)
    return {**dict(zip(_names(node), args, strict=False)), **kwargs}


def all_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a node by name, in the order of its operator's schema, including defaults."""
    schema = getattr(node.target, "_schema", None)
    arguments = named_arguments(node)
    if schema is None:
        return arguments
    values = ((entry.name, arguments.get(entry.name, entry.default_value)) for entry in schema.arguments)
    required = {entry.name for entry in schema.arguments if not entry.has_default_value()}
    return {name: value for name, value in values if name in arguments or name not in required}


def permutation(node: Node) -> list[int]:
    """Return for each dimension of the result of a permutation the dimension of its operand."""
    base, arguments = base_operation(node), all_arguments(node)
    order = list(range(node.meta["val"].dim()))
    if base == "permute":
        return [dim % len(order) for dim in arguments["dims"]]
    if base == "t":
        return order[::-1]
    left, right = (arguments[name] % len(order) for name in ("dim0", "dim1"))
    order[left], order[right] = order[right], order[left]
    return order


def moved_elements(node: Node) -> list[Any] | None:
    """Return the tensors and numbers whose elements make up the result; None if `node` computes elements.

    Accumulating writes and casts compute.
    """
    if not has_trait(node, *MOVES) or is_accumulating_write(node):
        return None
    names = _ELEMENT_ARGUMENTS if has_trait(node, Trait.CHOOSE) else _ELEMENT_ARGUMENTS - {"other"}
    values = all_arguments(node).items() if hasattr(node.target, "_schema") else (("self", node.args[0]),)
    moved = [value for name, value in values if name in names]
    return [item for value in moved for item in (value if isinstance(value, (list, tuple)) else (value,))]


def fill_number(node: Node) -> bool | int | float | None:
    """Return the number with which all elements of `node` are filled; None for no fill, or for the node of a number."""
    value = fill_value(node)
    return value if isinstance(value, (bool, int, float)) else None


def fill_value(node: Node) -> Any:
    """Return the number, or the node of a number, with which all elements of `node` are filled; None for no fill."""
    if not has_trait(node, Trait.FILL, Trait.FILL_LIKE):
        return None
    base, arguments = base_operation(node), named_arguments(node)
    number = 1 if "ones" in base else 0
    return arguments.get("fill_value", arguments.get("s", number))


def is_arange(node: Node) -> bool:
    """Return whether `node` is a one-dimensional arange 0, 1, 2, .. in int32 or int64."""
    if not has_trait(node, Trait.ARANGE):
        return False
    arguments = named_arguments(node)
    is_exact = node.meta["val"].dtype in (torch.int32, torch.int64)
    return is_exact and (arguments.get("start", 0), arguments.get("step", 1)) == (0, 1)


def is_accumulating_write(node: Node) -> bool:
    """Return whether `node` is an indexed write that accumulates."""
    return has_trait(node, Trait.WRITE) and bool(named_arguments(node).get("accumulate"))


def is_mask(index: Node) -> bool:
    """Return whether `index` is a boolean mask."""
    return bool(index.meta["val"].dtype is torch.bool)


def indexed_dimensions(arguments: dict[str, Any]) -> list[tuple[int, Node]]:
    """Return the dimensions that a lookup or write with these `arguments` indexes, each with its index."""
    indices = arguments.get("indices")
    if indices is None:
        return [(arguments["dim"], arguments["index"])]
    indexed, dim = [], 0
    for index in indices:
        if index is not None:
            indexed.append((dim, index))
        dim += index.meta["val"].dim() if index is not None and is_mask(index) else 1
    return indexed


def replace_numbers(node: Node, replace: Callable[[str, int, int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the node's arguments with each integer replaced by `replace(name, position, number)`.

    `position` is the index in a list, or 0 outside of lists. An argument without a name is called `UNNAMED`.
    """
    names = _names(node) if hasattr(node.target, "_schema") else [UNNAMED] * len(node.args)

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            items = [replace(name, index, item) if _is_number(item) else item for index, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        return replace(name, 0, value) if _is_number(value) else value

    args = tuple(changed(name, value) for name, value in zip(names, node.args, strict=False))
    return args, {name: changed(name, value) for name, value in node.kwargs.items()}


def dims_along(node: Node, rank: int) -> list[int] | None:
    """Return the `dim` or `dims` along which `node` acts, as dimensions of `rank`; None if it has neither."""
    arguments = all_arguments(node)
    dims = arguments.get("dim", arguments.get("dims"))
    if dims is None or dims == []:
        return None
    return [dim % max(1, rank) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


def with_dims(node: Node, dims: list[int]) -> dict[str, Any]:
    """Return all arguments of `node` by name, with other dimensions `dims` along which it acts."""
    arguments = all_arguments(node)
    name = "dim" if "dim" in arguments else "dims"
    return {**arguments, name: dims if isinstance(arguments[name], (list, tuple)) else dims[0]}


def positional(node: Node, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return all `arguments` of a call like `node`, by name, as positional and keyword arguments."""
    arguments = dict(arguments)
    names = [entry.name for entry in node.target._schema.arguments if not entry.kwarg_only]  # type: ignore[union-attr]
    return [arguments.pop(name) for name in names], arguments


def matrix_operands(node: Node) -> tuple[Node, Node, Node | None]:
    """Return both factors of `mm`, `addmm`, `bmm` or `baddbmm`, and the tensor that is added to their product."""
    names = ("self", "mat1", "mat2", "batch1", "batch2")
    *added, left, right = (value for name, value in all_arguments(node).items() if name in names)
    return left, right, added[0] if added else None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _names(node: Node) -> list[str]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [str(position) for position in range(len(node.args))]
    return [argument.name for argument in schema.arguments]
