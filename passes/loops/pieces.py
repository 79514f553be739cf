"""Pieces of rows: the slices of one tensor that the branches of a loop over experts read.

slices     `rows[0:n0]`, `rows[n0:n0 + n1]`, ..: consecutive, from the first row
splits     `rows.split([n0, n1, ..])`, all results
chunks     `slots.chunk(experts, dim)`, `slots[e]`: equal sizes, along any dimension
masks      the rows that masks of all experts select (`masks/chosen_rows.py`)
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.rows.row_layout import Layout, Part, features

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of `source` along `dim` that the branches read, in order of branches, with these `sizes`.

    `counts` are the sizes as numbers or nodes of the graph, if they are not constants. If the pieces together are all
    of `source`, `table` may hold their ends [experts] instead. `are_complete` is True if they are all of `source`, but
    torch does not know that their sizes add up to its size. `keeps_dim` is False for `slots[e]`, which removes `dim`.
    """

    source: Node
    dim: int
    sizes: tuple[sympy.Expr, ...]
    counts: tuple[Any, ...] | None = None
    table: Node | None = None
    keeps_dim: bool = True
    are_complete: bool = False

    @property
    def is_even(self) -> bool:
        return self.sizes[0].is_Integer and len(set(self.sizes)) == 1

    @property
    def total(self) -> sympy.Expr:
        return sympy.expand(sympy.Add(*self.sizes))


def pieces_of(nodes: Sequence[Node]) -> Pieces | None:
    """Return `nodes`, one of each branch, as pieces of one tensor, or None."""
    if all(is_call(node, aten.slice.Tensor) for node in nodes):
        return _slices(nodes)
    if all(is_call(node, aten.select.int) for node in nodes):
        return _selected(nodes)
    if all(is_call(node, operator.getitem) for node in nodes):
        return _split(nodes)
    return None


def _slices(nodes: Sequence[Node]) -> Pieces | None:
    arguments = [all_arguments(node) for node in nodes]
    source = arguments[0]["self"]
    dim = arguments[0]["dim"] % fake_value(source).dim()
    sizes: list[sympy.Expr] = []
    start: Any = 0
    for node, values in zip(nodes, arguments, strict=True):
        is_same = values["self"] is source and values["dim"] % fake_value(source).dim() == dim and values["step"] == 1
        if not is_same or size_expression(values["start"] or 0) != size_expression(start):
            return None
        size = size_expression(fake_value(node).shape[dim])
        start = values["end"]
        if isinstance(start, int) and isinstance(fake_value(source).shape[dim], int):
            start = min(start, fake_value(source).shape[dim])  # a slice ends at the last row
        if sympy.expand(size_expression(start) - size_expression(values["start"] or 0)) != size:
            return None
        sizes.append(size)
    counts = _counts(nodes, sizes)
    are_known = counts is not None or all(size.is_Integer for size in sizes)
    return Pieces(source, dim, tuple(sizes), counts) if are_known else None


def _counts(nodes: Sequence[Node], sizes: Sequence[sympy.Expr]) -> tuple[Any, ...] | None:
    """Return the nodes before the last of `nodes` that read `sizes` from the device, or None if some are missing."""
    reads: dict[sympy.Expr, Node] = {}
    for node in nodes[0].graph.nodes:
        if node is nodes[-1]:
            break
        if is_call(node, aten._local_scalar_dense.default):
            reads.setdefault(size_expression(node), node)
    return tuple(reads[size] for size in sizes) if all(size in reads for size in sizes) else None


def _selected(nodes: Sequence[Node]) -> Pieces | None:
    arguments = [all_arguments(node) for node in nodes]
    source = arguments[0]["self"]
    dim = arguments[0]["dim"] % fake_value(source).dim()
    indices = [values["index"] for values in arguments]
    if any(values["self"] is not source or values["dim"] % fake_value(source).dim() != dim for values in arguments):
        return None
    if indices != list(range(len(nodes))) or fake_value(source).shape[dim] != len(nodes):
        return None
    return Pieces(source, dim, (sympy.Integer(1),) * len(nodes), keeps_dim=False)


def _split(nodes: Sequence[Node]) -> Pieces | None:
    sources = {node.args[0] for node in nodes}
    if len(sources) != 1 or [node.args[1] for node in nodes] != list(range(len(nodes))):
        return None
    (split,) = sources
    assert isinstance(split, Node)
    base = base_operation(split)
    if not has_trait(split, Trait.SPLIT):
        return None
    if len(fake_value(split)) != len(nodes):
        return None
    arguments = all_arguments(split)
    source = arguments["self"]
    dim = arguments["dim"] % fake_value(source).dim()
    if base == "unbind":
        return Pieces(source, dim, (sympy.Integer(1),) * len(nodes), keeps_dim=False)
    if base.endswith("with_sizes"):
        counts = tuple(arguments["split_sizes"])
        sizes = tuple(map(size_expression, counts))
        return Pieces(source, dim, sizes, counts, are_complete=not _fills(source, dim, counts))
    sizes = tuple(size_expression(value.shape[dim]) for value in fake_value(split))
    return Pieces(source, dim, sizes) if all(size.is_Integer for size in sizes) else None


def _fills(source: Node, dim: int, counts: Sequence[Any]) -> bool:
    """Return whether torch knows that the size of `source` along `dim` is at least the sum of `counts`."""
    value = fake_value(source)
    rows = sum(fake_value(count) if isinstance(count, Node) else count for count in counts)
    if not isinstance(rows, torch.SymInt):
        return True
    with value.fake_mode, rows.node.shape_env.ignore_fresh_unbacked_symbols():
        cut = aten.slice.Tensor(value, dim, 0, rows)
    return bool(size_expression(cut.shape[dim]) == size_expression(rows))


def rows_in(shape: Sequence[Any], dims: Sequence[int]) -> Layout:
    """Return the layout of a piece of `shape` whose dimensions `dims` are rows, outermost first."""
    row_dims = [dim for dim in dims if size_expression(shape[dim]) != 1] or list(dims[-1:])
    shares: dict[int, tuple[tuple[str, int], ...]] = {}
    prefix: tuple[tuple[str, int], ...] = ()
    for position, dim in enumerate(row_dims):
        if position == len(row_dims) - 1:
            shares[dim] = prefix
        else:
            inner = sympy.Mul(*(size_expression(shape[inner_dim]) for inner_dim in row_dims[position + 1 :]))
            name = f"{size_expression(shape[dim])} x {inner}"
            shares[dim] = (*prefix, (name, 0))
            prefix = (*prefix, (name, 1))
    return Layout(
        tuple(
            (Part(size_expression(size), shares[dim]),) if dim in shares else features(size)
            for dim, size in enumerate(shape)
        )
    )
