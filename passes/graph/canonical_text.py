"""Describe nodes so that two descriptions are equal only where the same is computed, whatever the nodes are called."""

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

# A size that only a run tells, as torch names it.
_UNBACKED = re.compile(r"\bu\d+\b")
# Constants that are what they are called.
_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch._ops.OperatorBase)


class CanonicalText:
    """A line for every node that is added, in order; `describe_source` gives that of one that others only read."""

    def __init__(self, describe_source: Callable[[Node], str]) -> None:
        self._describe_source = describe_source
        self._names: dict[Node, str] = {}
        self._numbers = itertools.count()
        self._lines: list[str] = []

    def add_source(self, node: Node, line: str | None = None) -> None:
        """`line` describes it, else `describe_source` does."""
        self._add(node, self._describe_source(node) if line is None else line)

    def add(self, node: Node, *remarks: str, arguments: Any = None) -> None:
        """Describe the computation of `node`; the sources that it reads come before it.

        `arguments` may stand for its (args, kwargs), where some of these should read otherwise.
        """
        arguments = map_nodes((node.args, node.kwargs) if arguments is None else arguments, self._name)
        self._add(node, " ".join((f"{describe_target(node)} {arguments}", *remarks)))

    def add_alias(self, node: Node, other: Node) -> None:
        """`node` is `other`, which was added: as if whoever reads one read the other."""
        self._names[node] = self._names[other]

    def remark(self, *texts: str) -> None:
        self._lines += texts

    def names(self, value: Any) -> Any:
        """`value`, of tuples, lists and mappings, with the names that its nodes have here."""
        return map_nodes(value, self._name)

    def __str__(self) -> str:
        numbers: dict[str, str] = {}
        text = "\n".join(self._lines)
        return _UNBACKED.sub(lambda found: numbers.setdefault(found[0], f"unbacked_{len(numbers)}"), text)

    def _add(self, node: Node, line: str) -> None:
        self._names[node] = f"%{next(self._numbers)}"
        self._lines.append(line)

    def _name(self, node: Node) -> _Name:
        if node not in self._names:
            self.add_source(node)
        return _Name(self._names[node])


class _Name(str):
    """Unlike the text that an operation may be given, it stands without quotes."""

    __repr__ = str.__str__


def describe_value(value: Any, known: dict[Any, str] | None = None) -> str:
    """Type and layout of what a node's fake value stands for.

    `known` keeps the texts of sizes: that of a sum of hundreds of symbols takes long to write.
    """
    known = {} if known is None else known
    if isinstance(value, torch.Tensor):
        sizes = (tuple(value.shape), value.stride(), (value.storage_offset(),))
        shape, stride, (offset,) = ([_size_text(size, known) for size in part] for part in sizes)
        return f"{value.dtype} {shape} {stride} {value.device} offset {offset}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(describe_value(item, known) for item in value)}]"
    return _size_text(value, known)


def _size_text(size: Any, known: dict[Any, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    expression = size.node.expr
    if expression not in known:
        known[expression] = str(size)
    return known[expression]


def describe_constant(value: object, is_placed: bool = True) -> str:
    """A constant of a graph: its type, layout and numbers, and where it lies unless `is_placed` is False.

    A graph, which an operator runs, is described by what it computes. Raises NotThisForm for what has contents that
    cannot be read: a text without them would be equal for others.
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
    """A constant that is called `name`, for texts of one graph alone: where it has no contents, its name tells it."""
    try:
        return describe_constant(value)
    except NotThisForm:
        return f"{type(value).__name__} {name}"


def describe_target(node: Node) -> str:
    """The target of a node as text, without the addresses that Python gives functions."""
    target = node.target
    if isinstance(target, (str, torch._ops.OperatorBase)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', type(target).__name__)}"


def describe_graph(module: GraphModule, is_placed: bool = True) -> str:
    """The computation of the graph as text, constants included. Raises NotThisForm as `describe_constant` does."""
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
    # A constant is a real tensor, although the graph is looked at in fake mode.
    with unset_fake_temporarily():
        if real is None or real.is_meta or real.layout is not torch.strided:
            raise NotThisForm(
                f"it reads a constant of type {value.dtype} {tuple(value.shape)} whose numbers cannot be read here "
                f"({'on no device' if value.layout is torch.strided else value.layout}), so ranks cannot compare it; "
                "expected dense tensors on a device"
            )
        flat = real.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    layout = describe_value(value) if is_placed else f"{value.dtype} {tuple(value.shape)}"
    return f"{layout} {hashlib.sha256(raw).hexdigest()}"
