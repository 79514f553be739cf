"""Removal of host reads of counts from which the graph needs only a sum that is known.

A loop over slices reads the number of rows of each expert from the device. Its grouped GEMMs need only the total number
of rows. If the counts are those of all pairs of a token and an expert, the total is tokens · k, so the host need not
wait for the device.

    counts      the number of rows of each expert, from the ids of a top-k over all experts
    reads       the host reads of the counts, one of each
    assertions  conditions on these numbers that hold for all counts with this total; they are removed
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.expert_masks import chosen_experts
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call, map_nodes, several
from moepass.passes.masks.chosen_rows import chosen_by_top_k
from moepass.passes.ops.arguments import all_arguments, fill_number, is_arange
from moepass.passes.ops.traits import Trait, has_trait, is_view, mutates
from moepass.passes.ops.walk import first_inputs, origin

aten = torch.ops.aten


class NotKnownError(Exception):
    """A number that the graph needs is known only at run time."""


def without_known_reads(module: GraphModule) -> GraphModule:
    """Return a copy of `module` without unnecessary host reads, or `module` itself if it has none."""
    if any(True for _ in communications_of(module.graph)):
        return module
    for name in [node.name for node in read_tables(module.graph)]:
        trial = copy_graph_module(module)
        table = next(node for node in trial.graph.nodes if node.name == name)
        try:
            _remove_reads(trial.graph, table)
        except NotKnownError:
            continue
        trial.graph.lint()
        trial.recompile()
        module = trial
    return module


def read_tables(graph: Graph) -> list[Node]:
    """Return the tensors [n] of which the host reads single numbers."""
    tables: dict[Node, None] = {}
    for node in graph.nodes:
        if is_call(node, aten._local_scalar_dense.default) and is_call(node.args[0], aten.select.int):
            tables[node.args[0].args[0]] = None
    return list(tables)


@dataclasses.dataclass(frozen=True)
class KnownCounts:
    """Symbols for counts that are not negative, and whose sum is `total`.

    `by_size` has the count of each size that the host reads; in `reduced`, `total` less the others is the last count.
    """

    counts: tuple[sympy.Symbol, ...]
    total: sympy.Expr
    by_size: Mapping[sympy.Symbol, sympy.Expr]
    reduced: Mapping[sympy.Symbol, sympy.Expr]

    @classmethod
    def of(cls, reads: Sequence[Node], total: sympy.Expr) -> KnownCounts:
        """Return symbols for the counts that `reads` read. Raises NotKnownError."""
        counts = [sympy.Symbol(f"count_{number}", integer=True, nonnegative=True) for number in range(len(reads))]
        by_size = {size_expression(read): count for read, count in zip(reads, counts, strict=True)}
        if not all(symbol.is_Symbol for symbol in by_size) or len(by_size) != len(reads):
            raise NotKnownError
        last = {counts[-1]: total - sympy.Add(*counts[:-1])}
        reduced = {symbol: last.get(count, count) for symbol, count in by_size.items()}
        return cls(tuple(counts), total, by_size, reduced)

    def assertions(self, graph: Graph) -> Iterator[tuple[Node, bool]]:
        """Yield assertions of the graph about these numbers, and whether they hold for all counts with this total."""
        for node in list(graph.nodes):
            if is_call(node, aten._assert_scalar.default) and self.are_in(node.args[0]):
                yield node, self._are_true(fake_value(node.args[0]).node.expr)

    def are_in(self, node: object) -> bool:
        """Return whether the value of `node` has sizes that the host reads."""
        if not isinstance(node, Node):
            return False
        value = fake_value(node)
        for item in several(value):
            sizes = [*item.shape, *item.stride()] if isinstance(item, torch.Tensor) else [item]
            for size in sizes:
                symbols = getattr(getattr(size, "node", None), "expr", sympy.Integer(0)).free_symbols
                if any(symbol in self.by_size for symbol in symbols):
                    return True
        return False

    def _are_true(self, condition: Any) -> bool:
        if isinstance(condition, (sympy.Ge, sympy.Le)):
            larger, smaller = condition.args if isinstance(condition, sympy.Ge) else condition.args[::-1]
            difference = sympy.expand((larger - smaller).xreplace(self.by_size))
            # The sum of the counts minus the total is 0, so adding it does not change the difference.
            for times in (0, 1):
                shifted = sympy.expand(difference + times * (sympy.Add(*self.counts) - self.total))
                terms = shifted.as_coefficients_dict()
                if all(value >= 0 and (term == 1 or term in self.counts) for term, value in terms.items()):
                    return True
        return bool(sympy.simplify(sympy.sympify(condition).xreplace(self.reduced)) == sympy.true)


def _remove_reads(graph: Graph, table: Node) -> None:
    """Remove the host reads of `table`. Raises NotKnownError, and leaves an invalid graph."""
    reads = reads_of(table)
    total = known_total(table, len(reads))
    if total is None:
        raise NotKnownError
    counts = KnownCounts.of(reads, total)
    for assertion, is_true in counts.assertions(graph):
        if not is_true:
            raise NotKnownError
        erase_assertion(graph, assertion)
    for node in list(graph.nodes):
        if counts.are_in(node):
            _update_sizes(graph, node, counts.reduced, {*counts.counts})
    for node in reversed(list(graph.nodes)):
        if not node.users and counts.are_in(node) and node.op == "call_function" and not mutates(node):
            graph.erase_node(node)
    if any(map(counts.are_in, graph.nodes)):
        raise NotKnownError


def erase_assertion(graph: Graph, assertion: Node) -> None:
    (condition,) = assertion.all_input_nodes
    graph.erase_node(assertion)
    if not condition.users:
        erase_unread(graph, condition)


def reads_of(table: Node) -> list[Node]:
    """Return the reads of all numbers of `table`, in order. Raises NotKnownError if some are missing."""
    value = fake_value(table)
    reads: dict[int, Node] = {}
    for select in table.users:
        if is_call(select, aten.select.int):
            for read in select.users:
                if is_call(read, aten._local_scalar_dense.default):
                    reads[selected_index(select)] = read
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64) or sorted(reads) != list(range(len(reads))):
        raise NotKnownError
    # The size of the result of torch.bincount is not known before a run.
    if size_expression(value.shape[0]) != len(reads):
        raise NotKnownError
    return [reads[number] for number in range(len(reads))]


def selected_index(select: Node) -> int:
    """Return the index that `select` reads, from the front if the number of values is known."""
    arguments = all_arguments(select)
    index, size = arguments["index"], fake_value(arguments["self"]).shape[arguments["dim"]]
    return index + size if index < 0 and isinstance(size, int) else index  # type: ignore[no-any-return]


def known_total(counts: Node, experts: int) -> sympy.Expr | None:
    """Return the sum of `counts` [experts], none of which is negative; None if it is not known."""
    _, *casts = first_inputs(counts, lambda step: has_trait(step, Trait.CAST, Trait.COPY))
    if any(fake_value(step).dtype not in (torch.int32, torch.int64, torch.float32) for step in casts):
        return None
    counts = casts[-1] if casts else counts
    if is_call(counts, aten.histc.default):
        arguments = all_arguments(counts)
        is_whole = arguments["bins"] == experts and arguments["min"] == 0 and arguments["max"] in (experts - 1, experts)
        return _number_of(arguments["self"], experts) if is_whole else None
    if is_call(counts, aten.scatter_add.default):
        arguments = all_arguments(counts)
        starts, steps = fill_number(arguments["self"]), fill_number(arguments["src"])
        is_count = (starts, steps) == (0, 1) and fake_value(arguments["index"]).dim() == 1
        return _elements(arguments["index"]) if is_count else None
    if not is_call(counts, aten.sum.dim_IntList):
        return None
    arguments = all_arguments(counts)
    summed = arguments["self"]
    value = fake_value(summed)
    dims = sorted(dim % value.dim() for dim in arguments["dim"])
    if dims != list(range(value.dim() - 1)) or arguments["keepdim"]:
        return None
    mask = chosen_experts(summed) if value.dim() == 2 else None
    if mask is not None and not mask.is_by_expert and size_expression(value.shape[1]) == experts:
        ids = fake_value(mask.ids)
        # Integers and booleans are summed exactly.
        return _elements(mask.ids) if not value.is_floating_point() and ids.dim() == 2 else None
    summed = origin(summed, Trait.CAST, Trait.COPY)
    if not is_call(summed, aten.eq.Tensor) or value.is_floating_point():
        return None
    for ids, numbers in (summed.args, summed.args[::-1]):
        assert isinstance(ids, Node)
        assert isinstance(numbers, Node)
        is_column = is_call(ids, aten.unsqueeze.default) and size_expression(fake_value(ids).shape[-1]) == 1
        if is_arange(numbers) and is_column:
            return _number_of(ids, experts)
    return None


def _number_of(ids: Node, experts: int) -> sympy.Expr | None:
    """Return the number of `ids` if they are all ids of a top-k over this many experts, in any order."""
    node = ids
    while True:
        if not _has_exact_ids(fake_value(node).dtype, experts):
            return None
        if is_call(node, operator.getitem) and is_call(node.args[0], aten.sort.stable, aten.sort.default):
            if node.args[1] != 0:
                return None
            node = node.args[0].args[0]  # type: ignore[union-attr, assignment]
        elif is_view(node) and not is_call(node, operator.getitem, aten.expand.default, aten.view.dtype):
            if sympy.expand(_elements(node) - _elements(node.all_input_nodes[0])) != 0:
                return None
            node = node.all_input_nodes[0]
        elif has_trait(node, Trait.CAST, Trait.COPY):
            node = node.all_input_nodes[0]
        else:
            break
    chosen = chosen_by_top_k(node)
    return _elements(node) if chosen is not None and chosen.experts == experts else None


def _has_exact_ids(dtype: torch.dtype, experts: int) -> bool:
    if dtype.is_floating_point:
        return experts <= 2 / torch.finfo(dtype).eps
    return dtype is not torch.bool and not dtype.is_complex and experts - 1 <= torch.iinfo(dtype).max


def _elements(node: Node) -> sympy.Expr:
    return sympy.expand(sympy.Mul(*map(size_expression, fake_value(node).shape)))


def _update_sizes(graph: Graph, node: Node, reduced: Mapping[Any, Any], counts: set[sympy.Symbol]) -> None:
    """Replace the counts in the size or value of `node` as far as possible."""
    value = fake_value(node)
    if isinstance(value, torch.SymInt):
        size = sympy.expand(value.node.expr.xreplace(reduced))
        if size.free_symbols & counts or not node.users:
            return
        with graph.inserting_before(node):
            node.replace_all_uses_with(_size_before(size, node))
        return
    if isinstance(value, (torch.Tensor, tuple, list)) and node.op == "call_function":
        args, kwargs = map_nodes((node.args, node.kwargs), fake_value)
        first: Any = value if isinstance(value, torch.Tensor) else value[0]
        with first.fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _size_before(size: sympy.Expr, node: Node) -> Any:
    """Return a size as a number, or as a node before `node`. Raises NotKnownError."""
    if size.is_Integer:
        return int(size)
    for candidate in node.graph.nodes:
        if candidate is node:
            break
        if isinstance(fake_value(candidate), torch.SymInt) and size_expression(candidate) == size:
            return candidate
    if not (size.is_Mul or size.is_Add):
        raise NotKnownError
    tensor = next(candidate for candidate in node.graph.nodes if isinstance(fake_value(candidate), torch.Tensor))
    writer = GraphWriter(node.graph, tensor)
    operands = [_size_before(operand, node) for operand in size.args]
    join = operator.mul if size.is_Mul else operator.add
    return functools.reduce(lambda left, right: writer.emit(join, left, right), operands)
