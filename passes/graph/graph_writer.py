"""Insertion of operator calls with their fake values, and their removal."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call, map_nodes
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.traits import mutates

aten, prims = torch.ops.aten, torch.ops.prims

# Metadata keys for the source location of a node in the model.
_LOCATION_KEYS = ("nn_module_stack", "stack_trace")


class GraphWriter:
    """A writer that inserts nodes before `like`, a node of `graph` with a fake value.

    Written nodes have the source location of `like`.
    """

    def __init__(self, graph: Graph, like: Node) -> None:
        self.graph = graph
        self.fake_mode = fake_value(like).fake_mode
        self.meta = {key: like.meta[key] for key in _LOCATION_KEYS if key in like.meta}
        self.written: list[Node] = []
        self.like = like

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a call of `target`, and compute its fake value.

        Raises NotThisForm if `target` does not accept these arguments.
        """
        return self._append(target, args, kwargs)

    def _append(self, target: Callable[..., Any], args: Any, kwargs: Any, repeated: Node | None = None) -> Node:
        """Insert a call; `repeated` is the node whose operation is repeated, if any."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta)
        fake_args, fake_kwargs = map_nodes((args, kwargs), fake_value)
        self.written.append(node)
        try:
            with self.fake_mode:
                node.meta["val"] = target(*fake_args, **fake_kwargs)
        except Exception as error:  # an operator may raise any exception for unfit arguments
            raise NotThisForm(self._unfit(node, fake_args, repeated, error)) from error
        return node

    def described(self, target: Callable[..., Any], args: Any, value: Any) -> Node:
        """Insert a call of `target` with a known fake value."""
        node = self.graph.call_function(target, args)
        node.meta.update(self.meta)
        node.meta["val"] = value
        self.written.append(node)
        return node

    def _unfit(self, node: Node, arguments: Any, repeated: Node | None, error: Exception) -> str:
        """Return the reason why `node` does not accept its `arguments`."""
        return f"{node.target} does not take the rows of all experts together: {error}"

    def erase(self) -> None:
        """Erase all written nodes, which nothing else may read."""
        for node in reversed(self.written):
            self.graph.erase_node(node)
        self.written.clear()

    def erase_unread(self) -> None:
        """Erase the written nodes that nothing reads."""
        for node in reversed(self.written):
            if not node.users:
                self.graph.erase_node(node)
        self.written.clear()

    def size(self, tensor: Node, dim: int) -> Any:
        """Return a size of `tensor`: a number, or a node."""
        size = fake_value(tensor).shape[dim]
        if isinstance(size, int):
            return size
        # Reuse a node with this size, so that `tensor` need not be computed. Sizes computed from other sizes are
        # preferred, because `sym_size` needs its tensor.
        equal = filter(functools.partial(self._has_size, size), self.graph.nodes)
        existing = next(equal, None)
        if existing is not None and is_call(existing, aten.sym_size.int) and not free_unbacked_symbols(size):
            existing = next((node for node in equal if not is_call(node, aten.sym_size.int)), existing)
        return self.emit(aten.sym_size.int, tensor, dim) if existing is None else existing

    def _has_size(self, size: torch.SymInt, node: Node) -> bool:
        value = fake_value(node)
        return isinstance(value, torch.SymInt) and node < self.like and value.node.expr == size.node.expr

    def product(self, left: Any, right: Any) -> Any:
        """Return the product of two sizes, each a number or a node."""
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        if left == 1 or right == 1:
            return right if left == 1 else left
        return self.emit(operator.mul, left, right)

    def cast(self, value: Node, dtype: torch.dtype) -> Node:
        """Return `value` in `dtype`: unchanged if it has this dtype."""
        is_same = fake_value(value).dtype == dtype
        return value if is_same else self.emit(prims.convert_element_type.default, value, dtype)

    def getitem(self, source: Node, index: int) -> Node:
        """Insert the selection of an element of a tuple."""
        return self.emit(operator.getitem, source, index)

    def arange(self, count: Any, device: torch.device) -> Node:
        """Insert an int64 arange from 0 below `count`, a number or a node."""
        return self.emit(
            prims.iota.default, count, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
        )

    def viewed(self, source: Node, shape: Sequence[Any]) -> Node:
        """Return `source` in another shape, or unchanged if it already has this shape."""
        if [*map(size_expression, shape)] == [*map(size_expression, fake_value(source).shape)]:
            return source
        return self.emit(aten.reshape.default, source, list(shape))


def refresh_fake_values(graph: Graph, *changed: Node) -> None:
    """Recompute the fake values that depend on `changed`, where their sizes changed."""
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
    """Return sizes and strides as text, because they may be symbols."""
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape)), str(value.stride())
    return [described_sizes(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


def erase_unread(graph: Graph, last: Node) -> None:
    """Erase `last`, which nothing reads, and nodes that only it reads."""
    pending = {last}
    while pending:
        node = pending.pop()
        if node.op == "call_function" and not node.users and not mutates(node):
            used = node.all_input_nodes
            graph.erase_node(node)
            pending.update(used)
