"""Sums by token: each branch of a loop over experts adds its rows to a tensor that the next branch reads.

Supported are

    result.index_add_(0, tokens, rows)
    result[tokens] += rows                  if no expert has a token twice
    result[pairs] = rows                    if each pair of a token and an expert has a row
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import refuse
from moepass.passes.loops.branches import Branches, RowsOfAll
from moepass.passes.masks.chosen_rows import Chosen, expert_mask, selected_column
from moepass.passes.ops.arguments import all_arguments, fill_number, is_mask
from moepass.passes.ops.traits import Trait, has_trait

aten = torch.ops.aten

_BY_MASK = (
    "selects rows by a mask that is not computed from expert ids; expected (ids == expert).any(-1) with the ids of a "
    "top-k of scores [tokens, experts]"
)

_BY_PAIRS = (
    "selects pairs of a token and one of its experts by a mask [tokens, k]; expected a mask of rows: "
    "(ids == expert).any(-1), or ids.view(-1) == expert if each pair is a row"
)
_OTHER_SUMS = "combines the rows of experts; expected result.index_add_(0, tokens, rows) or result[tokens] += rows"
_OTHER_VALUES = "writes values that are not known to be one for each row that its mask selects"


@dataclasses.dataclass(frozen=True)
class SumByToken:
    """The last node of a chain of additions to `first` [tokens, ..], one of each branch; `start` is the first addition.

    Each branch adds its rows at its `tokens`. If `overwrites`, each token is in one branch, which replaces its row.
    `refusal` is the reason why the chain is not supported.
    """

    node: Node
    start: Node
    branches: tuple[Node, ...]
    tokens: tuple[Node, ...]
    overwrites: bool = False
    refusal: str | None = None

    @property
    def first(self) -> Node:
        first = all_arguments(self.start)["self"]
        assert isinstance(first, Node)
        return first


@dataclasses.dataclass(frozen=True)
class _Addition:
    """The addition of one branch: `rows` are added to `total` at indices `tokens`."""

    node: Node
    total: Node
    tokens: Node
    rows: Node
    # Another node of the addition that reads `total`.
    reader: Node | None = None
    overwrites: bool = False
    refusal: str | None = None

    @property
    def chosen(self) -> Chosen | None:
        """Return the expert ids whose mask selects the tokens, if there is one."""
        selected = selected_column(self.tokens)
        return None if selected is None else selected[0].chosen

    def is_same_kind(self, addition: _Addition) -> bool:
        return (self.overwrites, self.refusal) == (addition.overwrites, addition.refusal)


def sums_by_token(graph: Graph) -> list[SumByToken]:
    """Return every chain of several additions in `graph`."""
    additions = {addition.node: addition for node in list(graph.nodes) if (addition := _addition_of(node)) is not None}
    sums: list[SumByToken] = []
    totals = {addition.total for addition in additions.values()}
    for last in additions.values():
        if last.node in totals and _only_next_reads(last.node, additions):
            continue
        chain = [last]
        while (previous := additions.get(chain[-1].total)) is not None and _only_next_reads(previous.node, additions):
            chain.append(previous)
        if len(chain) == 1:
            continue  # no loop
        chain.reverse()
        branches, tokens = (tuple(getattr(addition, name) for addition in chain) for name in ("rows", "tokens"))
        sums.append(SumByToken(last.node, chain[0].node, branches, tokens, last.overwrites, last.refusal))
    return sums


def _only_next_reads(node: Node, additions: dict[Node, _Addition]) -> bool:
    """Return whether only the next addition reads `node`, and is of the same kind."""
    following = [each for each in additions.values() if each.total is node and each.is_same_kind(additions[node])]
    return len(following) == 1 and set(node.users) == {following[0].node, following[0].reader} - {None}


def _addition_of(node: Node) -> _Addition | None:
    if is_call(node, aten.index_add.default):
        arguments = all_arguments(node)
        if arguments["dim"] % fake_value(arguments["self"]).dim() != 0 or arguments["alpha"] != 1:
            return None
        return _Addition(node, arguments["self"], arguments["index"], arguments["source"])
    if is_call(node, aten.scatter_add.default, aten.index_copy.default):
        arguments = all_arguments(node)
        if arguments["dim"] % fake_value(arguments["self"]).dim() != 0:
            return None
        rows = arguments["src" if "src" in arguments else "source"]
        return _Addition(node, arguments["self"], arguments["index"], rows, refusal=_OTHER_SUMS)
    if not is_call(node, aten.index_put.default):
        return None
    arguments = all_arguments(node)
    total, indices, rows = arguments["self"], arguments["indices"], arguments["values"]
    if len(indices) != 1 or indices[0] is None or (fake_value(indices[0]).dim() != 1 and not is_mask(indices[0])):
        return None
    by_mask = fake_value(indices[0]).dtype is torch.bool
    refusal = _reason_not_listed(indices[0]) if by_mask else None
    if arguments["accumulate"]:  # as Inductor writes index_add
        return _Addition(node, total, indices[0], rows, refusal=refusal)
    overwritten = _overwriting(node, total, indices[0], rows)
    if has_trait(rows, Trait.CAST) and len(rows.users) == 1:
        # A sum of another type is cast to that of the result before it is written.
        (rows,) = rows.all_input_nodes
    if not is_call(rows, aten.add.Tensor) or all_arguments(rows)["alpha"] != 1 or len(rows.users) != 1:
        return overwritten
    left, right = all_arguments(rows)["self"], all_arguments(rows)["other"]
    for previous, addend in ((left, right), (right, left)):
        is_read = is_call(previous, aten.index.Tensor) and previous.args == (total, [indices[0]])
        if not is_read or not isinstance(addend, Node):
            continue
        # The graph may also read the number of rows that a mask selects.
        if all(user is rows or (by_mask and is_call(user, aten.sym_size.int)) for user in previous.users):
            return _Addition(node, total, indices[0], addend, previous, refusal=refusal)
    return overwritten


def _reason_not_listed(mask: Node) -> str:
    """Return the reason why `list_masked_rows` has not replaced `mask`."""
    if expert_mask(mask) is None:
        return _BY_MASK
    return _OTHER_VALUES if fake_value(mask).dim() == 1 else _BY_PAIRS


def _overwriting(node: Node, total: Node, tokens: Node, rows: Node) -> _Addition:
    if fake_value(tokens).dtype is torch.bool:
        return _Addition(node, total, tokens, rows, refusal=_reason_not_listed(tokens))
    overwrites = _Addition(node, total, tokens, rows, overwrites=True)
    if overwrites.chosen is None or overwrites.chosen.k != 1:
        return _Addition(node, total, tokens, rows, refusal="overwrites rows, and does not add to them")
    return overwrites


def sum_rows_by_token(join: SumByToken, branches: Branches, writer: GraphWriter) -> Node:
    """Return the result of `join`: rows of all branches in the order of tokens, summed. Raises NotThisForm."""
    rows = branches.together(join.branches)
    tokens = branches.together(join.tokens)
    pairs, chosen = branches.pairs, branches.chosen
    if pairs is None or chosen is None or not isinstance(tokens, RowsOfAll) or tokens.node is not pairs.tokens:
        refuse(join.node, "sums rows, but not by the tokens that masks of all experts select")
    first, ids = fake_value(join.first), fake_value(chosen[0].ids)
    if not isinstance(rows, RowsOfAll) or size_expression(first.shape[0]) != size_expression(ids.shape[0]):
        refuse(join.node, "does not sum rows into one row for each token")
    row_value = fake_value(rows.node)
    if str(row_value.shape[1:]) != str(first.shape[1:]):
        refuse(join.node, "adds rows to a tensor with another row shape")
    is_cast = row_value.dtype != first.dtype
    if is_cast and not (row_value.dtype.is_floating_point and first.dtype.is_floating_point):
        refuse(join.node, f"adds {row_value.dtype} to {first.dtype}")
    in_order = writer.restore_order(rows.node, pairs.order)
    if join.overwrites:
        return in_order
    shape = [writer.size(chosen[0].ids, 0), chosen[0].k, *first.shape[1:]]
    # `result[tokens] += rows` adds in the wider type.
    wider = {"dtype": torch.promote_types(row_value.dtype, first.dtype)} if is_cast else {}
    result = writer.emit(aten.sum.dim_IntList, writer.viewed(in_order, shape), [1], **wider)
    if fill_number(join.first) != 0:
        result = writer.emit(aten.add.Tensor, result, join.first)
    return writer.cast(result, first.dtype)
