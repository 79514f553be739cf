"""Say of a node what a user can find: the line of the model that it came from, and what an input is called there.

Reasons of refusals name a node as `name (operator)`, which is all that a pass knows; `in_words` turns that into the
operator and its line. So whoever reads a plan needs no names of a graph that he never saw.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from pathlib import PurePath

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.nodes import fake_value, module_path

# What a placeholder is called in the model; whoever captures a graph knows, and writes it on the node.
INPUT_NAME_KEY = "moepass_input"
# Set on a placeholder that is an argument of the model, no parameter or other state of it.
ARGUMENT_KEY = "moepass_argument"

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_TORCH = str(PurePath(torch.__file__).parent)
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(\w+)_at_\d+$")
# `add_3 (aten.add.Tensor)`, as reasons name nodes.
_NAMED_NODE = re.compile(r"\b(?P<name>\w+) \((?P<target>[\w.<>: -]+)\)")
_LONGEST_CODE = 100
# Dynamo's way to a value: L['self']._modules['layers']._modules['0']._parameters['weight'].
_SOURCE_PARTS = re.compile(r"\['(\w+)'\]|\[(\d+)\]|\.(\w+)")
_CONTAINERS = {"_modules", "_parameters", "_buffers"}


def source_line(node: Node) -> str:
    """`moe.py:123, in forward: rows = exchange(...)`: the innermost line outside torch; empty where none is known."""
    frames = _frames_of(node)
    return line_of_frame(*frames[-1]) if frames else ""


def place_of(node: Node) -> str:
    """Position in the model: the path of the module, else the innermost `forward`, else the node's own name."""
    frames = _frames_of(node)
    forwards = [frame for frame in frames if _function_name(frame[2]) == "forward"] or frames
    return module_path(node) or (line_of_frame(*forwards[-1][:3], "") if forwards else node.name)


def _frames_of(node: Node) -> list[tuple[str, int, str, str]]:
    """File, line, function and code of the frames outside torch that `node` came from, outermost first."""
    own = _frames(str(node.meta.get("stack_trace") or ""))
    if own or node.op == "placeholder":
        return own
    # A node that a pass wrote has no line of its own; its inputs have.
    given = (_frames(str(used.meta.get("stack_trace") or "")) for used in node.all_input_nodes)
    return next((frames for frames in given if frames), [])


def _frames(trace: str) -> list[tuple[str, int, str, str]]:
    lines = trace.splitlines()
    found = []
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is not None and not frame["file"].startswith(_TORCH):
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            found.append((frame["file"], int(frame["line"]), frame["function"], code))
    return found


def _function_name(function: str) -> str:
    resumed = _RESUMED.match(function)
    return resumed[1] if resumed else function


def line_of_frame(file: str, line: int, function: str, code: str) -> str:
    """One frame of a stack in one line."""
    shown = code if len(code) <= _LONGEST_CODE else f"{code[: _LONGEST_CODE - 3]}..."
    return f"{PurePath(file).name}:{line}, in {_function_name(function)}" + (f": {shown}" if shown else "")


def input_name(node: Node) -> str:
    """The user's name for a graph input: the path of a parameter, the name of an argument, or its kind and place."""
    known = node.meta.get(INPUT_NAME_KEY)
    target = getattr(node.meta.get("desc"), "target", None)
    if known or isinstance(target, str):
        return str(known or target)
    value = fake_value(node)
    inputs = [other for other in node.graph.nodes if other.op == "placeholder"]
    kind = describe_shape(value) if isinstance(value, torch.Tensor) else "a number"
    return f"input {inputs.index(node) + 1} of the graph ({kind})"


def name_of_source(source: str) -> str:
    """Dynamo's way to a value, as the user writes it: `layers.0.experts.gate_up_proj`."""
    local = re.match(r"^L\['(\w+)'\]", source)
    if local is None:
        return source
    rest = source[local.end() :]
    parts = [next(filter(None, found.groups())) for found in _SOURCE_PARTS.finditer(rest)]
    path = ".".join(part for part in parts if part not in _CONTAINERS)
    if not path:
        return local[1]
    return path if local[1] == "self" else f"{local[1]}.{path}"


def named(node: Node) -> str:
    """A node as reasons name it."""
    return f"{node.name} ({node.target})"


def describe_shape(value: torch.Tensor) -> str:
    """Type and sizes, a `*` for each size that is no constant of the graph."""
    sizes = ", ".join(str(size) if isinstance(size, int) else "*" for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} [{sizes}]"


def describe_node(node: Node, *, with_line: bool = True) -> str:
    """A node in words: an input by its name, an operation by the operator and its line."""
    if node.op == "placeholder":
        return f"input `{input_name(node)}`"
    if node.op == "get_attr":
        return f"constant `{node.target}`"
    line = source_line(node) if with_line else ""
    return f"`{_operator_of(node)}` ({line})" if line else f"`{_operator_of(node)}`"


def _operator_of(node: Node) -> str:
    while node.target is operator.getitem and node.all_input_nodes:
        node = node.all_input_nodes[0]
    is_torch = isinstance(node.target, (str, torch._ops.OpOverload))
    return str(node.target) if is_torch else str(getattr(node.target, "__name__", node.target))


def named_nodes(text: str, graph: Graph) -> Iterator[Node]:
    """The nodes that `text` names as `name (operator)`, in its order."""
    by_name = {node.name: node for node in graph.nodes}
    for found in _NAMED_NODE.finditer(text):
        node = by_name.get(found["name"])
        if node is not None and str(node.target) == found["target"]:
            yield node


def in_words(text: str, graph: Graph, culprit: Node | None = None) -> str:
    """`text` with every node that it names as `name (operator)` described, `culprit` without its line."""
    by_name = {node.name: node for node in graph.nodes}

    def describe(found: re.Match[str]) -> str:
        node = by_name.get(found["name"])
        if node is None or str(node.target) != found["target"]:
            return found[0]
        return describe_node(node, with_line=node is not culprit)

    return _NAMED_NODE.sub(describe, text)
