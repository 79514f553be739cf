"""Gather expert ids where a model gathers masks of them, and look up by sorted ids what its own columns select.

Ranks may gather, for the tokens of all, masks [tokens, experts] of the chosen experts, and each selects what is under
the columns of its own. Where the mask was made from k different experts of each token, the ids [tokens, k] say the
same, and the weights [tokens, k] of these experts what all probabilities [tokens, experts] say where they are selected.

Contract
    in    a captured graph, which may be changed
    out   instead of such a mask its ids are gathered, and the weights instead of probabilities that nothing else reads;
          exact where all ranks do so. Or all is as it came, and a reason says why

Pseudo-code
    for each AllGather of a mask that was made from a top-k:
        follow it through casts, transposes, flattening and a cut of columns to all that reads it
        sort the gathered ids, those of other ranks' experts last: the pairs of this rank's experts are in front
        selections, and the first places of a sorted mask: lookups of these pairs; sums of columns: how many there are
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.expert_masks import at_most_chosen, gathered_mask
from moepass.passes.graph.collectives import WAIT, collective_of, communication_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import base_operation, mutates
from moepass.passes.ops.walk import descendants
from moepass.passes.parallel.match.gathered_columns import MaskColumns, Order, columns_of

aten, prims = torch.ops.aten, torch.ops.prims

# Meta key of a gather of ids that the model has as one of a mask: whether some may be as many as there are experts.
OF_MASK_KEY = "moepass_of_mask"
_WHY_NOT_CHOSEN = (
    "the mask {}, which ranks gather by {}, is not known to hold no more than k experts for each token; expected "
    "zeros.scatter(1, ids, 1) of the ids that torch.topk gives, or that and another mask"
)


@dataclasses.dataclass(frozen=True)
class GatheredIds:
    """The gather of ids that stands in the place of a mask's, which was called `mask`."""

    mask: str
    gather: Node


def look_up_gathered_masks(graph: Graph, leave: Collection[str]) -> tuple[list[GatheredIds], dict[Node, str]]:
    """What was replaced; and gathers of masks that were not, and why. Those called as one of `leave` stay."""
    found: list[GatheredIds] = []
    reasons: dict[Node, str] = {}
    for node in [node for node in graph.nodes if _gathers_any_mask(node) and node.name not in leave]:
        if gathered_mask(node) is None:
            reasons[node] = _WHY_NOT_CHOSEN.format(named(node.all_input_nodes[0]), named(node))
            continue
        name, pairs = node.name, _GatheredPairs(node)
        try:
            gather = pairs.replace()
        except NotThisForm as error:
            pairs.writer.erase()
            reasons[node] = str(error)
        else:
            gather.meta[OF_MASK_KEY] = pairs.is_partial
            found.append(GatheredIds(name, gather))
    return found, reasons


def _gathers_any_mask(node: Node) -> bool:
    collective = collective_of(node)
    if collective is None or collective.kind != "all_gather":
        return False
    value = fake_value(collective.input)
    return gathered_mask(node) is not None or (value.dtype is torch.bool and value.dim() == 2)


@dataclasses.dataclass(frozen=True)
class _GatheredMaskReader:
    """`node` reads `value`, which is `columns` of the mask, or the places of ones in them."""

    node: Node
    value: Node
    columns: MaskColumns
    has_places: bool = False


@dataclasses.dataclass(frozen=True)
class _MaskedPairs:
    """All pairs of a token and an expert, sorted by the experts of some columns, others behind: their places, and ids.

    `counts` are those of each expert.
    """

    places: Node
    experts: Node
    counts: Node


class _GatheredPairs:
    """Replaces one gathered mask by gathered ids."""

    def __init__(self, node: Node) -> None:
        mask, self._graph = gathered_mask(node), node.graph
        assert mask is not None
        chosen = at_most_chosen(mask.input)
        assert chosen is not None
        self._mask, self._chosen = mask, chosen
        self.writer = GraphWriter(self._graph, node)
        known = map(collective_of, self._graph.nodes)
        gathers = [one for one in known if one is not None and one.kind == "all_gather"]
        self._gathers = {one.result: one for one in gathers if fake_value(one.result).dim() == 2}
        self._pairs: dict[tuple[int, int], _MaskedPairs] = {}
        # Of all experts what is gathered of the chosen ones.
        self._gathered: dict[Node, Node] = {}

    @property
    def is_partial(self) -> bool:
        return self._chosen.is_partial

    def replace(self) -> Node:
        """The gather of the ids. Raises NotThisForm where something reads the mask in a way that is not known."""
        sizes = (fake_value(self._mask.input).shape[1], fake_value(self._chosen.ids).shape[1])
        if not all(isinstance(size, int) for size in sizes):
            raise NotThisForm(f"{named(self._mask.node)} gathers a mask whose width only a run tells")
        replaced: list[tuple[Node, Node]] = []
        for reader in sorted(self._readers(), key=lambda reader: reader.node):
            with self._graph.inserting_before(reader.node):
                stands = self._of_places(reader) if reader.has_places else self._read(reader)
            if _described(reader.node) != _described(stands):
                raise self._unknown(reader.node)
            replaced.append((reader.node, stands))
        if not self._pairs:
            raise NotThisForm(f"nothing is selected by the mask that {named(self._mask.node)} gathers")
        unread = self._unread({old for old, _ in replaced})
        for old, new in replaced:
            old.replace_all_uses_with(new)
        for old in (*(old for old, _ in replaced), *sorted(unread, reverse=True)):
            if old in self._graph.nodes:
                erase_unread(self._graph, old)
        gather = self._gathered[self._mask.input].all_input_nodes[0]
        return gather

    def _unread(self, replaced: Collection[Node]) -> set[Node]:
        """What depends on the gathers that go, and not by nodes that are `replaced`: nothing reads it.

        Raises NotThisForm where something does: then its gather would stay, perhaps on this rank alone.
        """
        found: set[Node] = set()
        for gather in (one for one in self._gathers.values() if one.input in self._gathered):
            _, *users = descendants(gather.node, follow=lambda user: user not in replaced)
            for user in users:
                if not is_call(user, WAIT) and (user.is_impure() or mutates(user) or communication_of(user)):
                    raise NotThisForm(
                        f"what {named(gather.node)} gathers, of which the mask of chosen experts selects, is also "
                        f"read by {named(user)}; expected nothing else to read it"
                    )
            found.update(users)
        return found

    def _readers(self) -> list[_GatheredMaskReader]:
        found: list[_GatheredMaskReader] = []
        pending = [(self._mask.result, MaskColumns.all_of(self._mask.result))]
        while pending:
            value, columns = pending.pop()
            for user in value.users:
                behind = columns.behind(user) if user.all_input_nodes[0] is value else None
                if behind is not None:
                    pending.append((user, behind))
                elif base_operation(user) == "sort":
                    found += self._readers_of_places(user, columns)
                else:
                    found.append(_GatheredMaskReader(user, value, columns))
        return found

    def _readers_of_places(self, sort: Node, columns: MaskColumns) -> Iterator[_GatheredMaskReader]:
        """Readers of the places of ones in a flat mask: what a stable sort puts first, as many as there are."""
        given = all_arguments(sort)
        if columns.order is not Order.FLAT or not given["descending"] or not given.get("stable"):
            raise self._unknown(sort)
        for item in sort.users:
            for first in item.users:
                if item.args[1] != 1 or base_operation(first) != "slice" or not self._is_number_of(first, columns):
                    raise self._unknown(first)
                for user in first.users:
                    yield _GatheredMaskReader(user, first, columns, has_places=True)

    def _read(self, reader: _GatheredMaskReader) -> Node:
        """What stands for what reads the mask. Raises NotThisForm."""
        node, columns = reader.node, reader.columns
        base, given = base_operation(node), all_arguments(node)
        by_expert = columns.order is Order.BY_EXPERT
        if base == "sym_size":
            return self._size(node)
        if base == "sum":
            return self._sum(reader)
        if base == "nonzero" and by_expert:
            size = fake_value(node).shape[0]
            pairs = [self._expert(columns, size), self._token(columns, size)]
            both = [self.writer.emit(aten.unsqueeze.default, one, 1) for one in pairs]
            return self.writer.emit(aten.cat.default, both, 1)
        is_mask = base == "masked_select" and given["mask"] is reader.value and by_expert
        if is_call(node, aten.index.Tensor) and columns.order is not Order.BY_TOKEN:
            is_mask = given["indices"] == [reader.value] and fake_value(reader.value).dtype is torch.bool
        if is_mask and given["self"] is not reader.value:
            return self._selected(given["self"], reader)
        raise self._unknown(node)

    def _unknown(self, node: Node) -> NotThisForm:
        return NotThisForm(
            f"the mask of chosen experts that {named(self._mask.node)} gathers is read by {named(node)}; expected "
            "masked_select, nonzero, a boolean index or a stable descending argsort of this rank's columns, "
            "transposed to [experts, tokens], and sums over tokens"
        )

    # ------------------------------------------------------------------------------------------------------- values

    def _size(self, node: Node) -> Node:
        size = fake_value(node)
        ids = self._gather(self._mask.input)
        if isinstance(size, torch.SymInt):
            tokens = self.writer.size(ids, 0)
            times, rest = divmod(size_expression(size), size_expression(fake_value(ids).shape[0]))
            if rest == 0 and times.is_Integer:
                return self.writer.product(tokens, int(times))  # type: ignore[no-any-return]
        raise self._unknown(node)

    def _sum(self, reader: _GatheredMaskReader) -> Node:
        node, columns, given = reader.node, reader.columns, all_arguments(reader.node)
        counts = self._of(columns).counts
        dims = given.get("dim")
        if not dims and not given.get("keepdim"):
            counts = self.writer.emit(aten.sum.default, counts)
        else:
            along = [dim % 2 for dim in dims or ()]
            if columns.order is Order.FLAT or given["keepdim"] or along != [columns.dim_of_tokens]:
                raise self._unknown(node)
        if fake_value(node).dtype is torch.int32:
            return self.writer.emit(prims.convert_element_type.default, counts, torch.int32)
        if fake_value(node).dtype is torch.int64:
            return counts
        raise self._unknown(node)

    def _selected(self, source: Node, reader: _GatheredMaskReader) -> Node:
        """What the mask selects of `source`, a value of each pair of an expert and a token."""
        node, columns = reader.node, reader.columns
        size = fake_value(node).shape[0]
        if _numbers_along(source, 1, columns):
            return self._token(columns, size)
        if _numbers_along(source, 0, columns):
            return self._expert(columns, size)
        return self._weight(source, columns, self._pair(columns, size), node)

    def _weight(self, source: Node, columns: MaskColumns, pair: Node, node: Node) -> Node:
        """Of the experts of `pair`, places in the gathered ids, what `source`, gathered of all experts, has."""
        found = columns_of(source, self._gathers)
        if found is None:
            raise NotThisForm(
                f"the mask of chosen experts that {named(self._mask.node)} gathers selects from {named(source)}; "
                "expected what is gathered [tokens, experts] beside it, in the columns of the same experts"
            )
        gather, of_source = found
        same = dataclasses.replace(of_source, types=()) == dataclasses.replace(columns, types=())
        if not same or gather.group_name != self._mask.group_name:
            raise self._unknown(node)
        flat = self.writer.emit(aten.reshape.default, self._gather(gather.input), [-1])
        value = self.writer.emit(aten.index.Tensor, flat, [pair])
        for dtype in of_source.types:
            value = self.writer.emit(prims.convert_element_type.default, value, dtype)
        return value

    def _is_number_of(self, first: Node, columns: MaskColumns) -> bool:
        """True where `first` cuts off as many as `columns` of the mask have ones."""
        given = all_arguments(first)
        end = given["end"]
        if (given["start"] or 0) != 0 or given["step"] != 1 or not is_call(end, aten._local_scalar_dense.default):
            return False
        total = end.args[0]
        if base_operation(total) != "sum" or all_arguments(total).get("dim"):
            return False
        found = columns_of(total.args[0], {self._mask.result: self._mask})
        return found is not None and (found[1].first, found[1].last) == (columns.first, columns.last)

    def _of_places(self, reader: _GatheredMaskReader) -> Node:
        """What is computed of places in [experts · tokens]: their token, their expert, or what lies there."""
        node, columns, size = reader.node, reader.columns, fake_value(reader.value).shape[0]
        base, given = base_operation(node), all_arguments(node)
        if base == "sym_size":
            return self._number(columns, size)
        if is_call(node, aten.index.Tensor) and given["indices"] == [reader.value]:
            return self._weight(given["self"], columns, self._pair(columns, size), node)
        other = given.get("other")
        divisor = fake_value(other) if isinstance(other, Node) else other
        is_divided = given.get("self") is reader.value and isinstance(divisor, (int, torch.SymInt))
        if is_divided and size_expression(divisor) == columns.tokens:
            if base == "remainder":
                return self._token(columns, size)
            if base == "floor_divide" or given.get("rounding_mode") in ("floor", "trunc"):
                return self._expert(columns, size)
        raise self._unknown(node)

    # -------------------------------------------------------------------------------------------------------- pairs

    def _gather(self, of_all: Node) -> Node:
        """Gathered [tokens · ranks, k]: the ids in the place of the mask, else `of_all` [tokens, experts] at these."""
        if of_all not in self._gathered:
            sent = self._sent_ids() if of_all is self._mask.input else self._at_ids(of_all)
            _, *rest = self._mask.node.args
            gathered = self.writer.emit(self._mask.node.target, sent, *rest)  # type: ignore[arg-type]
            self._gathered[of_all] = self.writer.emit(WAIT, gathered)
        return self._gathered[of_all]

    def _at_ids(self, of_all: Node) -> Node:
        return self.writer.emit(aten.gather.default, of_all, 1, self._chosen.ids)

    def _sent_ids(self) -> Node:
        """The ids; in the place of those that the mask leaves out, as many as there are experts."""
        ids = self._chosen.ids
        if fake_value(ids).dtype is not torch.int64:
            ids = self.writer.emit(prims.convert_element_type.default, ids, torch.int64)
        if not self._chosen.is_partial:
            return ids
        experts = int(fake_value(self._mask.input).shape[1])
        like = {"dtype": torch.int64, "device": fake_value(ids).device}
        nobody = self.writer.emit(aten.scalar_tensor.default, experts, **like)
        return self.writer.emit(aten.where.self, self._at_ids(self._mask.input), ids, nobody)

    def _of(self, columns: MaskColumns) -> _MaskedPairs:
        key = (columns.first, columns.last)
        if key not in self._pairs:
            emit = self.writer.emit
            ids = emit(aten.reshape.default, self._gather(self._mask.input), [-1])
            own = emit(aten.sub.Tensor, ids, columns.first)
            outside = emit(
                aten.bitwise_or.Tensor, emit(aten.lt.Scalar, own, 0), emit(aten.ge.Scalar, own, columns.experts)
            )
            both = emit(aten.sort.stable, emit(aten.masked_fill.Scalar, own, outside, columns.experts), stable=True)
            experts = self.writer.getitem(both, 0)
            zeros = emit(aten.new_zeros.default, experts, [columns.experts + 1])
            counts = emit(aten.scatter_add.default, zeros, 0, experts, emit(aten.ones_like.default, experts))
            counts = emit(aten.slice.Tensor, counts, 0, 0, columns.experts)
            self._pairs[key] = _MaskedPairs(self.writer.getitem(both, 1), experts, counts)
        return self._pairs[key]

    def _number(self, columns: MaskColumns, size: Any) -> Node:
        """How many pairs of this rank there are, which the graph knows as `size`."""
        total = self.writer.emit(aten.sum.default, self._of(columns).counts)
        return self.writer.described(aten._local_scalar_dense.default, (total,), size)

    def _first(self, values: Node, columns: MaskColumns, size: Any) -> Node:
        described = fake_value(values).new_empty([size])
        return self.writer.described(aten.slice.Tensor, (values, 0, 0, self._number(columns, size)), described)

    def _pair(self, columns: MaskColumns, size: Any) -> Node:
        return self._first(self._of(columns).places, columns, size)

    def _expert(self, columns: MaskColumns, size: Any) -> Node:
        return self._first(self._of(columns).experts, columns, size)

    def _token(self, columns: MaskColumns, size: Any) -> Node:
        k = int(fake_value(self._chosen.ids).shape[1])
        return self.writer.emit(aten.div.Tensor_mode, self._pair(columns, size), k, rounding_mode="floor")


def _described(node: Node) -> tuple[str, ...]:
    value = fake_value(node)
    if not isinstance(value, torch.Tensor):
        return (str(size_expression(value)),)
    return (str(value.dtype), str(value.device), *(str(size_expression(size)) for size in value.shape))


def _numbers_along(source: Node, dim: int, columns: MaskColumns) -> bool:
    """True where `source` is 0, 1, .. along dimension `dim` of `columns` [experts, tokens]."""
    if columns.order is not Order.BY_EXPERT or fake_value(source).dim() != 2:
        return False
    if base_operation(source) == "expand":
        source = source.all_input_nodes[0]
    if base_operation(source) != "unsqueeze" or all_arguments(source)["dim"] % 2 != 1 - dim:
        return False
    numbers = source.all_input_nodes[0]
    given = all_arguments(numbers)
    if base_operation(numbers) not in ("arange", "iota") or fake_value(numbers).dtype is not torch.int64:
        return False
    counted = columns.tokens if dim == 1 else columns.experts
    from_zero = given.get("start", 0) == 0 and given.get("step", 1) == 1
    return from_zero and bool(size_expression(fake_value(numbers).shape[0]) == counted)
