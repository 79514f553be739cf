"""Where the branches of a loop over experts add their rows up, token by token, in a tensor that goes from one branch to
the next.

    result.index_add_(0, tokens, rows)
    result[tokens] += rows                  where each expert has a token once
    result[pairs] = rows                    where each pair of a token and an expert has a row
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.loops.branches import Branches, RowsOfAll
from moepass.passes.masks.chosen_rows import Chosen, expert_mask, selected_column
from moepass.passes.ops.arguments import all_arguments, fill_number, is_mask
from moepass.passes.ops.traits import Trait, has_trait

aten, prims = torch.ops.aten, torch.ops.prims

_BY_MASK = (
    "selects rows by a mask that is not made of expert ids, as (ids == expert).any(-1) is of the ids that a top-k of "
    "scores [tokens, experts] gives"
)

_BY_PAIRS = (
    "selects pairs of a token and one of its experts by a mask [tokens, k]; a mask of rows is expected, as "
    "(ids == expert).any(-1), or ids.view(-1) == expert where each pair is a row"
)
_OTHER_SUMS = "puts the rows of experts together; expected result.index_add_(0, tokens, rows) or result[tokens] += rows"
_OTHER_VALUES = "writes values that are not known to be one for each row that its mask selects"


@dataclasses.dataclass(frozen=True)
class SumByToken:
    """`node` is `first` [tokens, ..] with the rows of each branch added where its `tokens` say; `start` is the first of
    these additions. Where it `overwrites`, each token has one branch, and `first` is not read. `refusal` says why it
    cannot be taken.
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
class _Added:
    """One branch: `total` with `rows` added where `tokens` say."""

    node: Node
    total: Node
    tokens: Node
    rows: Node
    # What else reads `total` on the way.
    reader: Node | None = None
    overwrites: bool = False
    refusal: str | None = None

    @property
    def chosen(self) -> Chosen | None:
        """Whose tokens these are, if a mask of an expert selects them."""
        selected = selected_column(self.tokens)
        return None if selected is None else selected[0].chosen

    def goes_on_as(self, other: _Added) -> bool:
        return (self.overwrites, self.refusal) == (other.overwrites, other.refusal)


def sums_by_token(graph: Graph) -> list[SumByToken]:
    """Every place of `graph` where the last of several additions stands."""
    added = {one.node: one for node in list(graph.nodes) if (one := _added(node)) is not None}
    found: list[SumByToken] = []
    totals = {one.total for one in added.values()}
    for last in added.values():
        if last.node in totals and _next_alone(last.node, added):
            continue
        chain = [last]
        while (before := added.get(chain[-1].total)) is not None and _next_alone(before.node, added):
            chain.append(before)
        if len(chain) == 1:
            continue  # no loop
        chain.reverse()
        branches, tokens = (tuple(getattr(one, name) for one in chain) for name in ("rows", "tokens"))
        found.append(SumByToken(last.node, chain[0].node, branches, tokens, last.overwrites, last.refusal))
    return found


def _next_alone(node: Node, added: dict[Node, _Added]) -> bool:
    """Whether nothing but the next addition reads `node`, which does the same with its rows."""
    following = [one for one in added.values() if one.total is node and one.goes_on_as(added[node])]
    return len(following) == 1 and set(node.users) == {following[0].node, following[0].reader} - {None}


def _added(node: Node) -> _Added | None:
    if is_call(node, aten.index_add.default):
        given = all_arguments(node)
        if given["dim"] % fake_value(given["self"]).dim() != 0 or given["alpha"] != 1:
            return None
        return _Added(node, given["self"], given["index"], given["source"])
    if is_call(node, aten.scatter_add.default, aten.index_copy.default):
        given = all_arguments(node)
        if given["dim"] % fake_value(given["self"]).dim() != 0:
            return None
        rows = given["src" if "src" in given else "source"]
        return _Added(node, given["self"], given["index"], rows, refusal=_OTHER_SUMS)
    if not is_call(node, aten.index_put.default):
        return None
    given = all_arguments(node)
    total, indices, rows = given["self"], given["indices"], given["values"]
    if len(indices) != 1 or indices[0] is None or (fake_value(indices[0]).dim() != 1 and not is_mask(indices[0])):
        return None
    by_mask = fake_value(indices[0]).dtype is torch.bool
    refusal = _reason_to_keep(indices[0]) if by_mask else None
    if given["accumulate"]:  # as Inductor writes index_add
        return _Added(node, total, indices[0], rows, refusal=refusal)
    overwritten = _overwritten(node, total, indices[0], rows)
    if has_trait(rows, Trait.CAST) and len(rows.users) == 1:
        # A sum of another type than the result has is cast to that before it is written.
        (rows,) = rows.all_input_nodes
    if not is_call(rows, aten.add.Tensor) or all_arguments(rows)["alpha"] != 1 or len(rows.users) != 1:
        return overwritten
    one, other = all_arguments(rows)["self"], all_arguments(rows)["other"]
    for before, more in ((one, other), (other, one)):
        is_read = is_call(before, aten.index.Tensor) and before.args == (total, [indices[0]])
        if not is_read or not isinstance(more, Node):
            continue
        # The graph also reads how many rows a mask selects.
        if all(user is rows or (by_mask and is_call(user, aten.sym_size.int)) for user in before.users):
            return _Added(node, total, indices[0], more, before, refusal=refusal)
    return overwritten


def _reason_to_keep(mask: Node) -> str:
    """Why rows are still written by `mask`, and not by what it lists."""
    if expert_mask(mask) is None:
        return _BY_MASK
    return _OTHER_VALUES if fake_value(mask).dim() == 1 else _BY_PAIRS


def _overwritten(node: Node, total: Node, tokens: Node, rows: Node) -> _Added:
    if fake_value(tokens).dtype is torch.bool:
        return _Added(node, total, tokens, rows, refusal=_reason_to_keep(tokens))
    overwrites = _Added(node, total, tokens, rows, overwrites=True)
    if overwrites.chosen is None or overwrites.chosen.k != 1:
        return _Added(node, total, tokens, rows, refusal="overwrites rows, and does not add to them")
    return overwrites


def summed(join: SumByToken, branches: Branches, writer: GraphWriter) -> Node:
    """What `join` gives, from the rows of all branches: brought back to the order of tokens, and added up. Raises
    NotThisForm.
    """
    rows = branches.together(join.branches)
    tokens = branches.together(join.tokens)
    pairs, chosen = branches.pairs, branches.chosen
    if pairs is None or chosen is None or not isinstance(tokens, RowsOfAll) or tokens.node is not pairs.tokens:
        raise NotThisForm(
            f"{named(join.node)} adds up rows, but not those of the tokens that masks of all experts select"
        )
    first, ids = fake_value(join.first), fake_value(chosen[0].ids)
    if not isinstance(rows, RowsOfAll) or size_expression(first.shape[0]) != size_expression(ids.shape[0]):
        raise NotThisForm(f"{named(join.node)} adds up no rows of all tokens")
    of_rows = fake_value(rows.node)
    if str(of_rows.shape[1:]) != str(first.shape[1:]):
        raise NotThisForm(f"{named(join.node)} adds rows to a tensor that has others")
    is_cast = of_rows.dtype != first.dtype
    if is_cast and not (of_rows.dtype.is_floating_point and first.dtype.is_floating_point):
        raise NotThisForm(f"{named(join.node)} adds {of_rows.dtype} to {first.dtype}")
    count = writer.size(pairs.order, 0)
    like = {"dtype": torch.int64, "device": fake_value(pairs.order).device}
    empty = writer.emit(aten.empty.memory_format, [count], **like)
    places = writer.arange(count, like["device"])
    inverse = writer.emit(aten.index_put.default, empty, [pairs.order], places)
    in_order = writer.emit(aten.index.Tensor, rows.node, [inverse])
    if join.overwrites:
        return in_order
    shape = [writer.size(chosen[0].ids, 0), chosen[0].k, *first.shape[1:]]
    # `result[tokens] += rows` adds in the wider one of both types.
    wider = {"dtype": torch.promote_types(of_rows.dtype, first.dtype)} if is_cast else {}
    result = writer.emit(aten.sum.dim_IntList, writer.viewed(in_order, shape), [1], **wider)
    if fill_number(join.first) != 0:
        result = writer.emit(aten.add.Tensor, result, join.first)
    is_narrowed = fake_value(result).dtype != first.dtype
    return writer.emit(prims.convert_element_type.default, result, first.dtype) if is_narrowed else result
