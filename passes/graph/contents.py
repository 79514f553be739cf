"""Analysis of which operations read contents of their inputs, not only sizes, and which contents are constant."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from moepass.passes.graph.node_arguments import named_arguments
from moepass.passes.graph.nodes import fake_value, is_call, nodes_in
from moepass.passes.graph.operations import base_operation

aten, prims = torch.ops.aten, torch.ops.prims

_OF_TORCH = {"aten", "prims"}
# Operators whose result is uninitialised.
MAKE_EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Further ones with uninitialised elements: of quantized types, or in memory that was enlarged.
_UNINITIALISED = MAKE_EMPTY | {
    "empty_quantized", "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "resize", "resize_as",
    "_resize_output",
}  # fmt: skip
# Operators that read only size and type of their first argument.
_READ_ONLY_SIZES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones",
    "new_full", "fill", "zero", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
}  # fmt: skip
_FILL_NUMBERS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FULL = {"full", "full_like", "new_full"}
_KEEP_NUMBERS = (
    aten.clone.default, aten._to_copy.default, prims.convert_element_type.default, aten.view.default,
    aten._unsafe_view.default, aten.alias.default,
)  # fmt: skip


def is_uninitialised(node: Node) -> bool:
    """Return whether the node's result is uninitialised memory."""
    return _is_of_torch(node) and base_operation(node) in _UNINITIALISED


def inputs_read(node: Node) -> tuple[list[Node], list[Node]]:
    """Return two lists: the inputs whose contents `node` reads, and the inputs whose size alone it reads."""
    unread = _unread_argument(node)
    if unread is None:
        return list(node.all_input_nodes), []
    # The same node may also be another argument, whose contents are read.
    remaining = [value for value in named_arguments(node).values() if value is not unread]
    read = list(dict.fromkeys(used for value in remaining for used in nodes_in(value)))
    return read, [] if unread in read else [unread]


def _is_of_torch(node: Node) -> bool:
    is_operator = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return is_operator and node.target.namespace in _OF_TORCH  # type: ignore[union-attr]


def _unread_argument(node: Node) -> Node | None:
    if not _is_of_torch(node) or not node.args or not isinstance(node.args[0], Node):
        return None
    first = node.args[0]
    return first if base_operation(node) in _READ_ONLY_SIZES or _overwrites(node, first) else None


def _overwrites(node: Node, first: Node) -> bool:
    """Return whether `node` overwrites all elements of `first`."""
    arguments = named_arguments(node)
    if is_call(node, aten.copy.default, aten.bernoulli.p, aten.uniform.default, aten.normal_functional.default):
        return True
    if is_call(node, aten.slice_scatter.default):
        return arguments.get("step", 1) == 1 and _have_equal_sizes(first, arguments["src"])
    if is_call(node, aten.index_put.default) and not arguments.get("accumulate", False):
        indices = arguments["indices"]
        return len(indices) == 1 and _is_permutation_index(indices[0], first)
    if is_call(node, aten.index_copy.default):
        return arguments["dim"] == 0 and _is_permutation_index(arguments["index"], first)
    if is_call(node, aten.scatter.src) and fake_value(first).dim() == 1:
        return _is_permutation_index(arguments["index"], first)
    return False


def _have_equal_sizes(left: Node, right: Node) -> bool:
    return str(tuple(fake_value(left).shape)) == str(tuple(fake_value(right).shape))


def _is_permutation_index(index: Node, written: Node) -> bool:
    """Return whether `index` has each position of the first dimension of `written` once, like the order of a sort."""
    value, target = fake_value(index), fake_value(written)
    if value.dim() != 1 or target.dim() == 0 or str(value.shape[0]) != str(target.shape[0]):
        return False
    node = index
    # Smaller integer types may not represent all positions.
    while fake_value(node).dtype in (torch.int64, torch.int32):
        if _is_order(node):
            return True
        inputs = node.all_input_nodes
        if not is_call(node, *_KEEP_NUMBERS) or not _have_equal_sizes(node, inputs[0]):
            return False
        node = inputs[0]
    return False


def _is_order(node: Node) -> bool:
    """Return whether `node` has the positions from a one-dimensional sort, or their inverse."""
    if is_call(node, aten.argsort.default, aten.argsort.stable):
        return True
    if is_call(node, operator.getitem) and node.args[1] == 1:
        return is_call(node.args[0], aten.sort.default, aten.sort.stable)
    if is_call(node, aten.index_put.default) and is_uninitialised(node.args[0]):  # type: ignore[arg-type]
        _, unread = inputs_read(node)
        values = named_arguments(node)["values"]
        return bool(unread) and is_arange(values) and _have_equal_sizes(values, node)
    return False


def fill_number(node: Node) -> bool | int | float | None:
    """Return the number with which all elements of `node` are filled, or None if there is none."""
    if not _is_of_torch(node):
        return None
    base = base_operation(node)
    arguments = named_arguments(node)
    number = (
        arguments["fill_value"]
        if base in _FULL
        else arguments["s"]
        if base == "scalar_tensor"
        else _FILL_NUMBERS.get(base)
    )
    return number if isinstance(number, (bool, int, float)) else None


def is_arange(node: Node) -> bool:
    """Return whether `node` is a one-dimensional arange 0, 1, 2, .. in int32 or int64."""
    if not is_call(node, aten.arange.default, aten.arange.start, aten.arange.start_step, prims.iota.default):
        return False
    arguments = named_arguments(node)
    is_exact = fake_value(node).dtype in (torch.int32, torch.int64)
    return is_exact and (arguments.get("start", 0), arguments.get("step", 1)) == (0, 1)
