"""Insertion of operator calls with their fake values, and their removal."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moepass.passes.graph.input_sizes import size_expression, size_expressions
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
        dim %= fake_value(tensor).dim()
        return self.emit(aten.sym_size.int, tensor, dim) if existing is None else existing

    def _has_size(self, size: torch.SymInt, node: Node) -> bool:
        value = fake_value(node)
        return isinstance(value, torch.SymInt) and node < self.like and value.node.expr == size.node.expr

    def find_size(self, size: sympy.Expr, nodes: Iterable[Node]) -> Any:
        """Return `size` as a number, or as a node from the values and shapes of `nodes`; None if it is not there."""
        if size.is_Integer:
            return int(size)
        for node in nodes:
            value = fake_value(node)
            if isinstance(value, torch.SymInt) and size_expression(value) == size and node < self.like:
                return node
            for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if size_expression(extent) == size:
                    return self.size(node, dim)
        return None

    def product(self, *sizes: Any) -> Any:
        """Return the product of sizes, each a number or a node."""
        total: Any = 1
        for size in sizes:
            if total == 1:
                total = size
            elif size != 1:
                total = self._computed(operator.mul, total, size)
        return total

    def sum(self, left: Any, right: Any) -> Any:
        """Return the sum of two sizes, each a number or a node."""
        return self._computed(operator.add, left, right)

    def _computed(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        are_numbers = isinstance(left, int) and isinstance(right, int)
        return operation(left, right) if are_numbers else self.emit(operation, left, right)

    def getitem(self, source: Node, index: int) -> Node:
        """Insert the selection of an element of a tuple."""
        return self.emit(operator.getitem, source, index)

    def arange(self, count: Any, device: torch.device) -> Node:
        """Insert an int64 arange from 0 below `count`, a number or a node."""
        return self.emit(
            prims.iota.default, count, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
        )

    def full(self, shape: Sequence[Any], value: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Node:
        """Insert a tensor of `shape` filled with `value`; sizes and `value` are numbers or nodes."""
        return self.emit(aten.full.default, list(shape), value, dtype=dtype, device=device)

    def group_of_each_row(self, groups: int, rows: Any, device: torch.device) -> Node:
        """Insert the number of each row's group, int64 [groups · rows], for `groups` groups of `rows` rows each."""
        column = self.emit(aten.unsqueeze.default, self.arange(groups, device), -1)
        return self.emit(aten.reshape.default, self.emit(aten.expand.default, column, [groups, rows]), [-1])

    def ends_of_even_groups(self, groups: int, rows: Any, device: torch.device) -> Node:
        """Insert the end of each group's rows, int32 [groups], for `groups` groups of `rows` rows each."""
        sums = self.emit(aten.cumsum.default, self.full([groups], rows, device), 0)
        # The cast is separate, because Inductor ignores the dtype of a cumsum of a filled tensor.
        return self.cast(sums, torch.int32)

    def counts(self, ids: Node, bins: int) -> Node:
        """Insert how often each number below `bins` is in the int64 `ids` [n]: int64 [bins]."""
        device = fake_value(ids).device
        zeros, ones = self.full([bins], 0, device), self.full([self.size(ids, 0)], 1, device)
        return self.emit(aten.scatter_add.default, zeros, 0, ids, ones)

    def sort(self, ids: Node) -> tuple[Node, Node]:
        """Insert a stable sort of `ids` [n]; return the sorted ids, and the index of each before the sort."""
        both = self.emit(aten.sort.stable, ids, stable=True)
        return self.getitem(both, 0), self.getitem(both, 1)

    def scalar(self, value: Any, like: Node) -> Node:
        """Insert `value`, a number or a node, as a tensor without dimensions in the dtype of `like`."""
        tensor = fake_value(like)
        return self.emit(aten.scalar_tensor.default, value, dtype=tensor.dtype, device=tensor.device)

    def viewed(self, source: Node, shape: Sequence[Any]) -> Node:
        """Return `source` in another shape, or unchanged if it already has this shape."""
        if size_expressions(shape) == size_expressions(fake_value(source).shape):
            return source
        return self.emit(aten.reshape.default, source, list(shape))

    def cast(self, source: Node, dtype: torch.dtype) -> Node:
        """Return `source` in another dtype, or unchanged if it already has this dtype."""
        if fake_value(source).dtype is dtype:
            return source
        return self.emit(prims.convert_element_type.default, source, dtype)

    def cast_to_accumulate(self, source: Node) -> Node:
        """Return `source` in float32, in which GEMMs accumulate, if it is in bfloat16 or float16; else unchanged."""
        is_short = fake_value(source).dtype in (torch.bfloat16, torch.float16)
        return self.cast(source, torch.float32) if is_short else source

    def permuted(self, source: Node, order: Sequence[int]) -> Node:
        """Return `source` with its dimensions in another order, or unchanged if `order` is 0, 1, 2, ..."""
        return source if [*order] == sorted(order) else self.emit(aten.permute.default, source, list(order))

    def restore_order(self, rows: Node, order: Node) -> Node:
        """Return sorted `rows` as they were before a sort returned `order`, int64 [rows]."""
        count, memory = self.size(order, 0), self.emit(aten.empty_like.default, order)
        every = self.arange(count, fake_value(order).device)
        return self.emit(aten.index.Tensor, rows, [self.emit(aten.index_put.default, memory, [order], every)])


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
