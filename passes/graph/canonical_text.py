"""Descriptions of nodes as text that is equal only if the same is computed, independent of node names."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Node

from moepass.passes.graph.nodes import constant_of, fake_value, map_nodes
from moepass.passes.graph.not_this_form import NotThisForm

# Torch's names of data-dependent sizes.
_UNBACKED = re.compile(r"\bu\d+\b")
# Constants that are fully described by their names.
_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch._ops.OperatorBase)


class CanonicalText:
    """A description with one line for every added node, in order.

    Args:
        describe_source: Returns the line of a node that is read but was not added.
    """

    def __init__(self, describe_source: Callable[[Node], str]) -> None:
        self._describe_source = describe_source
        self._names: dict[Node, str] = {}
        self._numbers = itertools.count()
        self._lines: list[str] = []

    def add_source(self, node: Node, line: str | None = None) -> None:
        """Add a node that is only read, with `line`, or else with the line from `describe_source`."""
        self._add(node, self._describe_source(node) if line is None else line)

    def add(self, node: Node, *remarks: str, arguments: Any = None) -> None:
        """Add the computation of `node`, after the sources that it reads.

        `remarks` are appended to the line. `arguments` replaces (args, kwargs) in the text.
        """
        arguments = map_nodes((node.args, node.kwargs) if arguments is None else arguments, self._name)
        self._add(node, " ".join((f"{describe_target(node)} {arguments}", *remarks)))

    def add_alias(self, node: Node, original: Node) -> None:
        """Describe later reads of `node` as reads of `original`, which was already added."""
        self._names[node] = self._names[original]

    def remark(self, *texts: str) -> None:
        """Add lines of text."""
        self._lines += texts

    def names(self, value: Any) -> Any:
        """Return `value`, a nesting of tuples, lists and mappings, with each node replaced by its canonical name."""
        return map_nodes(value, self._name)

    def __str__(self) -> str:
        numbers: dict[str, str] = {}
        text = "\n".join(self._lines)
        return _UNBACKED.sub(lambda match: numbers.setdefault(match[0], f"unbacked_{len(numbers)}"), text)

    def _add(self, node: Node, line: str) -> None:
        self._names[node] = f"%{next(self._numbers)}"
        self._lines.append(line)

    def _name(self, node: Node) -> _Name:
        if node not in self._names:
            self.add_source(node)
        return _Name(self._names[node])


class _Name(str):
    """A name that, unlike string arguments, is written without quotes."""

    __repr__ = str.__str__


def describe_value(value: Any, cache: dict[Any, str] | None = None) -> str:
    """Describe dtype and layout of a fake value.

    `cache` has the texts of sizes, because writing a sum of hundreds of symbols takes long.
    """
    cache = {} if cache is None else cache
    if isinstance(value, torch.Tensor):
        sizes = (tuple(value.shape), value.stride(), (value.storage_offset(),))
        shape, stride, (offset,) = ([_size_text(size, cache) for size in group] for group in sizes)
        return f"{value.dtype} {shape} {stride} {value.device} offset {offset}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(describe_value(item, cache) for item in value)}]"
    return _size_text(value, cache)


def _size_text(size: Any, cache: dict[Any, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    expression = size.node.expr
    if expression not in cache:
        cache[expression] = str(size)
    return cache[expression]


def describe_constant(value: object, is_placed: bool = True) -> str:
    """Describe a constant: its type, layout and contents, and its device unless `is_placed` is False.

    A graph, as an argument of a higher-order operator, is described by its computation. Raises NotThisForm if the
    contents cannot be read, because a text without them could be equal for different constants.
    """
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, is_placed)
    if isinstance(value, GraphModule):
        return describe_graph(value, is_placed)
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} [{', '.join(describe_constant(item, is_placed) for item in value)}]"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, _NAMED):
        return f"{type(value).__name__} {value}"
    raise NotThisForm(
        f"it reads a constant of type {type(value).__name__}, whose contents moepass cannot compare; expected tensors "
        "and numbers"
    )


def describe_constant_here(name: str, value: object) -> str:
    """Describe a constant for a text that is used within one graph: unreadable contents are replaced by `name`."""
    try:
        return describe_constant(value)
    except NotThisForm:
        return f"{type(value).__name__} {name}"


def describe_target(node: Node) -> str:
    """Return the target of a node as text, without addresses of Python functions."""
    target = node.target
    if isinstance(target, (str, torch._ops.OperatorBase)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', type(target).__name__)}"


def describe_graph(module: GraphModule, is_placed: bool = True) -> str:
    """Describe the computation of a graph, including constants. Raises NotThisForm like `describe_constant`."""
    text = CanonicalText(_describe_input)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            text.add_source(node, f"constant {describe_constant(constant_of(node), is_placed)}")
        elif node.op == "placeholder":
            text.add_source(node)
        else:
            text.add(node)
    return f"graph ({'; '.join(str(text).splitlines())})"


def _describe_input(node: Node) -> str:
    value = fake_value(node)
    return f"input {describe_value(value)}" if value is not None else "input"


def _describe_tensor(value: torch.Tensor, is_placed: bool) -> str:
    real = value.constant if isinstance(value, FakeTensor) else value
    # A constant is a real tensor, although the pass runs in fake mode.
    with unset_fake_temporarily():
        if real is None or real.is_meta or real.layout is not torch.strided:
            problem = "it has no data" if value.layout is torch.strided else f"its layout is {value.layout}"
            raise NotThisForm(
                f"it reads a constant of type {value.dtype} and shape {tuple(value.shape)}, whose contents moepass "
                f"cannot compare, because {problem}; expected dense tensors with data"
            )
        flat = real.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    layout = describe_value(value) if is_placed else f"{value.dtype} {tuple(value.shape)}"
    return f"{layout} {hashlib.sha256(raw).hexdigest()}"
