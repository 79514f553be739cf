"""The arguments of a node by name, and the integers in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

# Name of an argument of a Python operator, which has no names for them.
UNNAMED = "other"


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


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _names(node: Node) -> list[str]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [str(position) for position in range(len(node.args))]
    return [argument.name for argument in schema.arguments]
