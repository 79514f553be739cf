"""The arguments of a node by name, and the numbers that are written into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

# Name of an argument if a Python operator has no names for them.
UNNAMED = "other"


def named_arguments(node: Node, args: Any = None, kwargs: Any = None) -> dict[str, Any]:
    """The arguments of a node, or `args` and `kwargs` in their place, by the names of its operator's schema.

    By place where it has no schema.
    """
    args, kwargs = (node.args, node.kwargs) if args is None else (args, kwargs)
    return {**dict(zip(_names(node), args, strict=False)), **kwargs}


def all_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, in the order of its operator's schema, with defaults for what is not given."""
    schema = getattr(node.target, "_schema", None)
    given = named_arguments(node)
    if schema is None:
        return given
    known = ((one.name, given.get(one.name, one.default_value)) for one in schema.arguments)
    required = {one.name for one in schema.arguments if not one.has_default_value()}
    return {name: value for name, value in known if name in given or name not in required}


def replace_numbers(node: Node, replace: Callable[[str, int, int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with `replace(name, position, number)` for each whole number that is written into them.

    `position` is that in a list, 0 outside. An argument without a name is called `UNNAMED`.
    """
    names = _names(node) if hasattr(node.target, "_schema") else [UNNAMED] * len(node.args)

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            parts = [replace(name, place, part) if _is_number(part) else part for place, part in enumerate(value)]
            return tuple(parts) if isinstance(value, tuple) else parts
        return replace(name, 0, value) if _is_number(value) else value

    args = tuple(changed(name, value) for name, value in zip(names, node.args, strict=False))
    return args, {name: changed(name, value) for name, value in node.kwargs.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _names(node: Node) -> list[str]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [str(place) for place in range(len(node.args))]
    return [argument.name for argument in schema.arguments]
