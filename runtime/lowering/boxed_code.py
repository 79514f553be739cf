"""Run a graph so that no value lives longer than its last reader.

A call in Python keeps its arguments until it returns: the frames below it hold them. A segment that is called so keeps
all of its inputs, although most are read at its beginning. Here it is given a list, which it empties as it goes.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node


class TakesList(torch.nn.Module):
    """A module of a graph that is called with a list of its arguments, and empties it."""

    def run_list(self, inputs: list[Any]) -> Any:
        raise NotImplementedError


def run_by_list(module: GraphModule) -> Callable[[list[Any]], Any]:
    """`module` as a function of a list of its inputs, which it empties: straight-line code, in the graph's order."""
    code = _Code(module)
    source = code.source()
    exec(compile(source, f"<graph {id(module)}>", "exec"), code.names)
    run: Callable[[list[Any]], Any] = code.names["run"]
    run.__doc__ = source
    return run


class _Code:
    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.names: dict[str, Any] = {"torch": torch}
        self.values: dict[Node, str] = {}

    def source(self) -> str:
        nodes = list(self.module.graph.nodes)
        last = {used: node for node in nodes for used in node.all_input_nodes}
        dead: dict[Node, list[Node]] = {}
        for used, node in last.items():
            dead.setdefault(node, []).append(used)
        inputs = [node for node in nodes if node.op == "placeholder"]
        lines = [f"[{', '.join(map(self._value, inputs))}] = inputs", "inputs.clear()"]
        unread = [node for node in inputs if node not in last]
        lines += [f"del {self._value(node)}" for node in unread]
        for node in nodes:
            done = [self._value(used) for used in dead.get(node, ())]
            delete = [f"del {', '.join(done)}"] if done else []
            if node.op == "output":
                lines.append(f"return {self._text(node.args[0])}")
            elif node.op == "call_module" and isinstance(self._module(node), TakesList):
                run = self._constant(self._module(node).run_list, str(node.target))
                lines += [f"box = {self._text(list(node.args))}", *delete, f"{self._value(node)} = {run}(box)"]
            elif node.op != "placeholder":
                lines += [f"{self._value(node)} = {self._call(node)}", *delete]
                if node not in last:
                    lines.append(f"del {self._value(node)}")
        return "def run(inputs):\n" + "".join(f"    {line}\n" for line in lines)

    def _call(self, node: Node) -> str:
        if node.op == "get_attr":
            return self._constant(operator.attrgetter(str(node.target))(self.module), node.name)
        function = self._module(node) if node.op == "call_module" else node.target
        given = [self._text(value) for value in node.args]
        given += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        name = self._constant(function, node.name)
        if node.op == "call_method":
            return f"{given[0]}.{node.target}({', '.join(given[1:])})"
        return f"{name}({', '.join(given)})"

    def _module(self, node: Node) -> torch.nn.Module:
        return self.module.get_submodule(str(node.target))

    def _value(self, node: Node) -> str:
        name = f"{node.name}_" if keyword.iskeyword(node.name) or node.name in ("inputs", "box") else node.name
        return self.values.setdefault(node, name)

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._value(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(part)}, ' for part in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._text(part)}' for key, part in value.items())}}}"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        return self._constant(value, "constant")

    def _constant(self, value: Any, name: str) -> str:
        """A name in the code's globals, which no value has."""
        found = f"_{len(self.names)}_{name}".replace(".", "_")
        self.names[found] = value
        return found
