"""Append operator calls with their fake values, and take them out again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call, map_nodes, mutates
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.slot_operations import gather

aten, prims = torch.ops.aten, torch.ops.prims

# Where a node comes from in the model.
_PLACE = ("nn_module_stack", "stack_trace")


class GraphWriter:
    """Inserts nodes in front of `like`, a node of `graph` that has a fake value."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self.graph = graph
        self.fake_mode = fake_value(like).fake_mode
        # What is written says of itself that it comes from where `like` does.
        self.meta = {key: like.meta[key] for key in _PLACE if key in like.meta}
        self.written: list[Node] = []
        self.like = like

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of `target`, with its fake value. Raises NotThisForm where it does not take these arguments."""
        return self._append(target, args, kwargs)

    def _append(self, target: Callable[..., Any], args: Any, kwargs: Any, repeated: Node | None = None) -> Node:
        """As `emit`; `repeated` is the node whose operation this is, if it is one's."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta)
        fake_args, fake_kwargs = map_nodes((args, kwargs), fake_value)
        self.written.append(node)
        try:
            with self.fake_mode:
                node.meta["val"] = target(*fake_args, **fake_kwargs)
        except Exception as error:  # whatever an operator says to arguments that do not fit it
            raise NotThisForm(self._unfit(node, fake_args, repeated, error)) from error
        return node

    def described(self, target: Callable[..., Any], args: Any, value: Any) -> Node:
        """A call of `target`, whose fake value is known."""
        node = self.graph.call_function(target, args)
        node.meta.update(self.meta)
        node.meta["val"] = value
        self.written.append(node)
        return node

    def _unfit(self, node: Node, arguments: Any, repeated: Node | None, error: Exception) -> str:
        """The reason why `node` does not take its `arguments`."""
        return f"{node.target} does not take the rows of all experts together: {error}"

    def erase(self) -> None:
        """Take out what was written, which nothing else reads."""
        for node in reversed(self.written):
            self.graph.erase_node(node)
        self.written.clear()

    def erase_unread(self) -> None:
        """Take out what was written and nobody reads."""
        for node in reversed(self.written):
            if not node.users:
                self.graph.erase_node(node)
        self.written.clear()

    def size(self, tensor: Node, dim: int) -> Any:
        """A size of `tensor`: a number, or the node that reads it."""
        size = fake_value(tensor).shape[dim]
        if isinstance(size, int):
            return size
        # A size that the graph has already: whatever it is computed from, `tensor` need not be. Where the inputs tell
        # it, at best one that is computed from sizes alone, since a length needs the tensor that it is read of.
        equal = filter(functools.partial(self._gives, size), self.graph.nodes)
        found = next(equal, None)
        if found is not None and is_call(found, aten.sym_size.int) and not free_unbacked_symbols(size):
            found = next((node for node in equal if not is_call(node, aten.sym_size.int)), found)
        return self.emit(aten.sym_size.int, tensor, dim) if found is None else found

    def _gives(self, size: torch.SymInt, node: Node) -> bool:
        value = fake_value(node)
        return isinstance(value, torch.SymInt) and node < self.like and value.node.expr == size.node.expr

    def product(self, left: Any, right: Any) -> Any:
        """Of two sizes, each a number or a node."""
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        if left == 1 or right == 1:
            return right if left == 1 else left
        return self.emit(operator.mul, left, right)

    def getitem(self, source: Node, place: int) -> Node:
        return self.emit(operator.getitem, source, place)

    def arange(self, count: Any, device: torch.device) -> Node:
        """0, 1, .. below `count`, a number or a node: int64."""
        return self.emit(
            prims.iota.default, count, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
        )

    def viewed(self, source: Node, shape: Sequence[Any]) -> Node:
        """`source` in another shape; itself where that is its own."""
        if [*map(size_expression, shape)] == [*map(size_expression, fake_value(source).shape)]:
            return source
        return self.emit(aten.reshape.default, source, list(shape))


def describe_again(graph: Graph, *changed: Node) -> None:
    """Fake values of what depends on `changed`, as far as their sizes are other ones now."""
    fresh = {*changed}
    with fake_value(changed[0]).fake_mode:
        for node in graph.nodes:
            if node.op != "call_function" or not any(used in fresh for used in node.all_input_nodes):
                continue
            if node.target is gather:
                continue
            args, kwargs = map_nodes((node.args, node.kwargs), fake_value)
            value = node.target(*args, **kwargs)
            if described_sizes(value) != described_sizes(fake_value(node)):
                node.meta["val"] = value
                fresh.add(node)


def described_sizes(value: Any) -> object:
    """Sizes and strides as text: they may be symbols."""
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape)), str(value.stride())
    return [described_sizes(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


def erase_unread(graph: Graph, last: Node) -> None:
    """Erase `last`, which nobody reads, and what only it read."""
    pending = {last}
    while pending:
        node = pending.pop()
        if node.op == "call_function" and not node.users and not mutates(node):
            used = node.all_input_nodes
            graph.erase_node(node)
            pending.update(used)
