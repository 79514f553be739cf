"""Describe nodes so that two descriptions are equal only where the same is computed, whatever the nodes are called."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from moepass.passes.graph import map_nodes

# A size that only a run tells, as torch names it.
_UNBACKED = re.compile(r"\bu\d+\b")


class CanonicalText:
    """A line for every node that is added, in order; `describe_source` gives that of one that others only read."""

    def __init__(self, describe_source: Callable[[Node], str]) -> None:
        self._describe_source = describe_source
        self._names: dict[Node, str] = {}
        self._numbers = itertools.count()
        self._lines: list[str] = []

    def add_source(self, node: Node) -> None:
        self._add(node, self._describe_source(node))

    def add(self, node: Node, *remarks: str, arguments: Any = None) -> None:
        """What `node` computes from what; sources that it reads come before it.

        `arguments` may stand for its (args, kwargs), where some of these should read otherwise.
        """
        arguments = map_nodes((node.args, node.kwargs) if arguments is None else arguments, self._name)
        self._add(node, " ".join((f"{node.target} {arguments}", *remarks)))

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
    """A constant of a graph: its type, layout and numbers, and where it lies unless `is_placed` is False."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch._subclasses.FakeTensor):
            return f"fake {id(value)}"
        # A constant is a real tensor, although the graph is looked at in fake mode.
        with unset_fake_temporarily():
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        layout = describe_value(value) if is_placed else f"{value.dtype} {tuple(value.shape)}"
        return f"{layout} {hashlib.sha256(raw).hexdigest()}"
    return f"{type(value).__name__} {id(value)}"
