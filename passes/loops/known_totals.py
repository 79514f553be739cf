"""Take out host reads of counts of which nothing is left but their sum, and that is known.

A loop over slices by counts reads these from the device. As grouped GEMMs it needs their sum alone: how many rows there
are together. Where the counts are those of all pairs of a token and an expert, that is tokens · k. So the host has to
wait for nothing.

    counts    of each expert, how often it is among chosen ids, none of which is any other number
    reads     of each of the counts
    asserted  what is said of these numbers is true of all counts with that sum, and is not asked any more
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
    """Something is left that only a run tells."""


def without_known_reads(module: GraphModule) -> GraphModule:
    """Return a copy of `module` without unnecessary host reads, or `module` itself if it has none."""
    if any(True for _ in communications_of(module.graph)):
        return module
    for name in [node.name for node in read_tables(module.graph)]:
        trial = copy_graph_module(module)
        table = next(node for node in trial.graph.nodes if node.name == name)
        try:
            _take_out(trial.graph, table)
        except NotKnownError:
            continue
        trial.graph.lint()
        trial.recompile()
        module = trial
    return module


def read_tables(graph: Graph) -> list[Node]:
    """The tensors [n] that the host reads number by number."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if is_call(node, aten._local_scalar_dense.default) and is_call(node.args[0], aten.select.int):
            found[node.args[0].args[0]] = None
    return list(found)


@dataclasses.dataclass(frozen=True)
class KnownCounts:
    """Counts, none of them below zero, that add up to `total`.

    `known` are the counts that the host reads; `whole` the same, where the last count is the rest.
    """

    counts: tuple[sympy.Symbol, ...]
    total: sympy.Expr
    known: Mapping[sympy.Symbol, sympy.Expr]
    whole: Mapping[sympy.Symbol, sympy.Expr]

    @classmethod
    def of(cls, reads: Sequence[Node], total: sympy.Expr) -> KnownCounts:
        """Return symbols for the counts that `reads` read. Raises NotKnownError."""
        counts = [sympy.Symbol(f"count_{number}", integer=True, nonnegative=True) for number in range(len(reads))]
        known = {size_expression(read): count for read, count in zip(reads, counts, strict=True)}
        if not all(symbol.is_Symbol for symbol in known) or len(known) != len(reads):
            raise NotKnownError
        rest = {counts[-1]: total - sympy.Add(*counts[:-1])}
        whole = {symbol: rest.get(count, count) for symbol, count in known.items()}
        return cls(tuple(counts), total, known, whole)

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
        for one in several(value):
            sizes = [*one.shape, *one.stride()] if isinstance(one, torch.Tensor) else [one]
            for size in sizes:
                symbols = getattr(getattr(size, "node", None), "expr", sympy.Integer(0)).free_symbols
                if any(symbol in self.known for symbol in symbols):
                    return True
        return False

    def _are_true(self, condition: Any) -> bool:
        if isinstance(condition, (sympy.Ge, sympy.Le)):
            larger, smaller = condition.args if isinstance(condition, sympy.Ge) else condition.args[::-1]
            difference = sympy.expand((larger - smaller).xreplace(self.known))
            # Of sizes of the graph, one term is as many as all counts: as often as it goes into the difference.
            for times in (0, 1):
                shifted = sympy.expand(difference + times * (sympy.Add(*self.counts) - self.total))
                terms = shifted.as_coefficients_dict()
                if all(value >= 0 and (term == 1 or term in self.counts) for term, value in terms.items()):
                    return True
        return bool(sympy.simplify(sympy.sympify(condition).xreplace(self.whole)) == sympy.true)


def _take_out(graph: Graph, table: Node) -> None:
    """Raises NotKnownError; the graph is of no use then."""
    reads = reads_of(table)
    total = known_total(table, len(reads))
    if total is None:
        raise NotKnownError
    known = KnownCounts.of(reads, total)
    for assertion, is_true in known.assertions(graph):
        if not is_true:
            raise NotKnownError
        erase_assertion(graph, assertion)
    for node in list(graph.nodes):
        if known.are_in(node):
            _describe(graph, node, known.whole, {*known.counts})
    for node in reversed(list(graph.nodes)):
        if not node.users and known.are_in(node) and node.op == "call_function" and not mutates(node):
            graph.erase_node(node)
    if any(map(known.are_in, graph.nodes)):
        raise NotKnownError


def erase_assertion(graph: Graph, assertion: Node) -> None:
    (condition,) = assertion.all_input_nodes
    graph.erase_node(assertion)
    if not condition.users:
        erase_unread(graph, condition)


def reads_of(table: Node) -> list[Node]:
    """The reads of all numbers of `table`, in order. Raises NotKnownError where some are missing."""
    value = fake_value(table)
    found: dict[int, Node] = {}
    for select in table.users:
        if is_call(select, aten.select.int):
            for read in select.users:
                if is_call(read, aten._local_scalar_dense.default):
                    found[place_of_number(select)] = read
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64) or sorted(found) != list(range(len(found))):
        raise NotKnownError
    # How many numbers torch.bincount gives, only a run tells.
    if size_expression(value.shape[0]) != len(found):
        raise NotKnownError
    return [found[number] for number in range(len(found))]


def place_of_number(select: Node) -> int:
    """Return the index that `select` reads, from the front if the number of values is known."""
    arguments = all_arguments(select)
    place, numbers = arguments["index"], fake_value(arguments["self"]).shape[arguments["dim"]]
    return place + numbers if place < 0 and isinstance(numbers, int) else place  # type: ignore[no-any-return]


def known_total(counts: Node, experts: int) -> sympy.Expr | None:
    """Return the sum of `counts` [experts], none of which is negative; None if it is not known."""
    _, *casts = first_inputs(counts, lambda step: has_trait(step, Trait.CAST, Trait.COPY))
    if any(fake_value(step).dtype not in (torch.int32, torch.int64, torch.float32) for step in casts):
        return None
    counts = casts[-1] if casts else counts
    if is_call(counts, aten.histc.default):
        given = all_arguments(counts)
        is_whole = given["bins"] == experts and given["min"] == 0 and given["max"] in (experts - 1, experts)
        return _number_of(given["self"], experts) if is_whole else None
    if is_call(counts, aten.scatter_add.default):
        given = all_arguments(counts)
        starts, steps = fill_number(given["self"]), fill_number(given["src"])
        is_count = (starts, steps) == (0, 1) and fake_value(given["index"]).dim() == 1
        return _elements(given["index"]) if is_count else None
    if not is_call(counts, aten.sum.dim_IntList):
        return None
    given = all_arguments(counts)
    of = given["self"]
    value = fake_value(of)
    dims = sorted(dim % value.dim() for dim in given["dim"])
    if dims != list(range(value.dim() - 1)) or given["keepdim"]:
        return None
    mask = chosen_experts(of) if value.dim() == 2 else None
    if mask is not None and not mask.is_by_expert and size_expression(value.shape[1]) == experts:
        ids = fake_value(mask.ids)
        # Whole numbers, or truths: none is rounded.
        return _elements(mask.ids) if not value.is_floating_point() and ids.dim() == 2 else None
    of = origin(of, Trait.CAST, Trait.COPY)
    if not is_call(of, aten.eq.Tensor) or value.is_floating_point():
        return None
    for ids, numbers in (of.args, of.args[::-1]):
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
        if not _holds_ids(fake_value(node).dtype, experts):
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


def _holds_ids(dtype: torch.dtype, experts: int) -> bool:
    """True where no id of an expert becomes another number, which might be none of an expert."""
    if dtype.is_floating_point:
        return experts <= 2 / torch.finfo(dtype).eps
    return dtype is not torch.bool and not dtype.is_complex and experts - 1 <= torch.iinfo(dtype).max


def _elements(node: Node) -> sympy.Expr:
    return sympy.expand(sympy.Mul(*map(size_expression, fake_value(node).shape)))


def _describe(graph: Graph, node: Node, whole: Mapping[Any, Any], counts: set[sympy.Symbol]) -> None:
    """Let `node` have the sizes that are known, as far as they are."""
    value = fake_value(node)
    if isinstance(value, torch.SymInt):
        size = sympy.expand(value.node.expr.xreplace(whole))
        if size.free_symbols & counts or not node.users:
            return
        with graph.inserting_before(node):
            node.replace_all_uses_with(_written(size, node))
        return
    if isinstance(value, (torch.Tensor, tuple, list)) and node.op == "call_function":
        args, kwargs = map_nodes((node.args, node.kwargs), fake_value)
        first: Any = value if isinstance(value, torch.Tensor) else value[0]
        with first.fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _written(size: sympy.Expr, node: Node) -> Any:
    """A size as a number, or a node in front of `node`. Raises NotKnownError."""
    if size.is_Integer:
        return int(size)
    for one in node.graph.nodes:
        if one is node:
            break
        if isinstance(fake_value(one), torch.SymInt) and size_expression(one) == size:
            return one
    if not (size.is_Mul or size.is_Add):
        raise NotKnownError
    tensor = next(one for one in node.graph.nodes if isinstance(fake_value(one), torch.Tensor))
    writer = GraphWriter(node.graph, tensor)
    parts = [_written(part, node) for part in size.args]
    join = operator.mul if size.is_Mul else operator.add
    return functools.reduce(lambda left, right: writer.emit(join, left, right), parts)
