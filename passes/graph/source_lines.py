"""Descriptions of nodes for users: the line of the model from which a node comes, and the name of an input there.

A pass knows only the names of nodes, so reasons of refusals name a node as `name (operator)`. `in_words` replaces this
by the operator and its line, so that a reader of a plan needs no node names.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from pathlib import PurePath

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.nodes import fake_value, module_path

# Metadata key for the name of a placeholder in the model, set when a graph is captured.
INPUT_NAME_KEY = "moepass_input"
# Metadata key that is True on placeholders for arguments of the model, and False on those for parameters and buffers.
ARGUMENT_KEY = "moepass_argument"

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_TORCH = str(PurePath(torch.__file__).parent)
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(\w+)_at_\d+$")
# A node in a reason, such as `add_3 (aten.add.Tensor)`.
_NAMED_NODE = re.compile(r"\b(?P<name>\w+) \((?P<target>[\w.<>: -]+)\)")
_LONGEST_CODE = 100
# Dynamo's source of a value: L['self']._modules['layers']._modules['0']._parameters['weight'].
_SOURCE_PARTS = re.compile(r"\['(\w+)'\]|\[(\d+)\]|\.(\w+)")
_CONTAINERS = {"_modules", "_parameters", "_buffers"}


def source_line(node: Node) -> str:
    """Return the innermost line outside torch, such as `moe.py:123, in forward: rows = exchange(...)`.

    Returns an empty string if it is unknown.
    """
    frames = _frames_of(node)
    return line_of_frame(*frames[-1]) if frames else ""


def place_of(node: Node) -> str:
    """Return the path of the node's module, or else its innermost `forward`, or else the node's name."""
    frames = _frames_of(node)
    forwards = [frame for frame in frames if _function_name(frame[2]) == "forward"] or frames
    return module_path(node) or (line_of_frame(*forwards[-1][:3], "") if forwards else node.name)


def _frames_of(node: Node) -> list[tuple[str, int, str, str]]:
    """Return file, line, function and code of the node's stack frames outside torch, outermost first."""
    node_frames = _frames(str(node.meta.get("stack_trace") or ""))
    if node_frames or node.op == "placeholder":
        return node_frames
    # A node written by a pass has no stack trace, but its inputs do.
    input_frames = (_frames(str(used.meta.get("stack_trace") or "")) for used in node.all_input_nodes)
    return next((frames for frames in input_frames if frames), [])


def _frames(trace: str) -> list[tuple[str, int, str, str]]:
    lines = trace.splitlines()
    frames = []
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is not None and not frame["file"].startswith(_TORCH):
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            frames.append((frame["file"], int(frame["line"]), frame["function"], code))
    return frames


def _function_name(function: str) -> str:
    resumed = _RESUMED.match(function)
    return resumed[1] if resumed else function


def line_of_frame(file: str, line: int, function: str, code: str) -> str:
    """Return one stack frame as one line."""
    shown = code if len(code) <= _LONGEST_CODE else f"{code[: _LONGEST_CODE - 3]}..."
    return f"{PurePath(file).name}:{line}, in {_function_name(function)}" + (f": {shown}" if shown else "")


def input_name(node: Node) -> str:
    """Return the user's name for a graph input: a parameter's path, an argument's name, or else index and type."""
    name = node.meta.get(INPUT_NAME_KEY)
    target = getattr(node.meta.get("desc"), "target", None)
    if name or isinstance(target, str):
        return str(name or target)
    value = fake_value(node)
    inputs = list(node.graph.find_nodes(op="placeholder"))
    kind = describe_shape(value) if isinstance(value, torch.Tensor) else "a number"
    return f"input {inputs.index(node) + 1} of the graph ({kind})"


def name_of_source(source: str) -> str:
    """Return Dynamo's source of a value as the user writes it: `layers.0.experts.gate_up_proj`."""
    local = re.match(r"^L\['(\w+)'\]", source)
    if local is None:
        return source
    names = [next(filter(None, match.groups())) for match in _SOURCE_PARTS.finditer(source[local.end() :])]
    path = ".".join(name for name in names if name not in _CONTAINERS)
    if not path:
        return local[1]
    return path if local[1] == "self" else f"{local[1]}.{path}"


def named(node: Node) -> str:
    """Return `name (operator)`, as reasons name nodes."""
    return f"{node.name} ({node.target})"


def describe_shape(value: torch.Tensor) -> str:
    """Return dtype and sizes, with `*` for each symbolic size."""
    sizes = ", ".join(str(size) if isinstance(size, int) else "*" for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} [{sizes}]"


def describe_node(node: Node, *, with_line: bool = True) -> str:
    """Describe a node in words: an input by its name, an operation by its operator and line."""
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
    """Yield the nodes that `text` names as `name (operator)`, in order."""
    by_name = {node.name: node for node in graph.nodes}
    for match in _NAMED_NODE.finditer(text):
        node = by_name.get(match["name"])
        if node is not None and str(node.target) == match["target"]:
            yield node


def in_words(text: str, graph: Graph, culprit: Node | None = None) -> str:
    """Return `text` with every node that it names as `name (operator)` described in words.

    The description of `culprit` has no line.
    """
    by_name = {node.name: node for node in graph.nodes}

    def describe(match: re.Match[str]) -> str:
        node = by_name.get(match["name"])
        if node is None or str(node.target) != match["target"]:
            return match[0]
        return describe_node(node, with_line=node is not culprit)

    return _NAMED_NODE.sub(describe, text)
