"""Replace gathered masks of chosen experts by gathered expert ids.

Ranks may gather masks and probabilities [tokens, experts] of all tokens, and select with the columns of their experts.
If a mask marks k different experts for each token, the ids and weights [tokens, k] have the same information.

Contract
    in    a captured graph, which is changed
    out   the graph gathers ids instead of masks, and weights instead of probabilities that only the mask reads; exact
          if all ranks do so. Other masks stay, each with a reason.

Pseudo-code
    for each AllGather of a mask that comes from a top-k:
        follow its result through casts, transposes, flattening and slices of columns to its readers
        sort the gathered ids, other ranks' experts last, so that the pairs of this rank's experts come first
        replace selections, and the first indices of a sorted mask, by lookups of these pairs
        replace sums of columns by counts of these pairs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.expert_masks import at_most_chosen, gathered_mask
from moepass.passes.graph.collectives import WAIT, Collective, collective_of, communication_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import all_arguments, is_arange
from moepass.passes.ops.traits import Trait, base_operation, mutates
from moepass.passes.ops.walk import descendants, origin
from moepass.passes.parallel.match.gathered_columns import MaskColumns, Order, columns_of

aten = torch.ops.aten

# Meta key of a gather of ids that replaces a gathered mask: whether an id may be the number of experts, for no expert.
OF_MASK_KEY = "moepass_of_mask"
_WHY_NOT_CHOSEN = (
    "the mask {}, which ranks gather by {}, is not known to hold no more than k experts for each token; expected "
    "zeros.scatter(1, ids, 1) of the ids that torch.topk gives, or that and another mask"
)


def replace_gathered_masks(graph: Graph, skip: Collection[str]) -> tuple[dict[Node, str], dict[Node, str]]:
    """Replace gathers of masks not named in `skip`.

    Return the gathers of ids, each with the name of the gather that it replaces, and the gathers of masks that must
    stay, each with the reason.
    """
    replaced: dict[Node, str] = {}
    reasons: dict[Node, str] = {}
    for node in [node for node in graph.nodes if _gathers_any_mask(node) and node.name not in skip]:
        mask = gathered_mask(node)
        if mask is None:
            reasons[node] = _WHY_NOT_CHOSEN.format(named(node.all_input_nodes[0]), named(node))
            continue
        pairs = _GatheredPairs(mask)
        try:
            replaced[pairs.replace()] = node.name
        except NotThisForm as error:
            pairs.writer.erase()
            reasons[node] = str(error)
    return replaced, reasons


def _gathers_any_mask(node: Node) -> bool:
    collective = collective_of(node)
    if collective is None or collective.kind != "all_gather":
        return False
    value = fake_value(collective.input)
    return gathered_mask(node) is not None or (value.dtype is torch.bool and value.dim() == 2)


@dataclasses.dataclass(frozen=True)
class _GatheredMaskReader:
    """`node`, and the `value` that it reads: `columns` of the mask, or the indices of ones if it `has_indices`."""

    node: Node
    value: Node
    columns: MaskColumns
    has_indices: bool = False

    @property
    def pairs(self) -> Any:
        """The number of pairs that it reads, as a size."""
        return fake_value(self.value if self.has_indices else self.node).shape[0]


@dataclasses.dataclass(frozen=True)
class _MaskedPairs:
    """All pairs by column, other columns last: positions in the flat gathered ids, columns, and counts by column."""

    positions: Node
    experts: Node
    counts: Node


class _GatheredPairs:
    """The replacement of one gathered mask by gathered ids."""

    def __init__(self, mask: Collective) -> None:
        chosen, self._graph = at_most_chosen(mask.input), mask.node.graph
        assert chosen is not None
        self._mask, self._chosen = mask, chosen
        self.writer = GraphWriter(self._graph, mask.node)
        collectives = map(collective_of, self._graph.nodes)
        gathers = [each for each in collectives if each is not None and each.kind == "all_gather"]
        self._gathers = {gather.result: gather for gather in gathers if fake_value(gather.result).dim() == 2}
        self._pairs: dict[tuple[int, int], _MaskedPairs] = {}
        # Maps a value of all experts to the gathered value [tokens, k] of the chosen experts.
        self._gathered: dict[Node, Node] = {}

    def replace(self) -> Node:
        """Replace the mask, and return the gather of the ids. Raises NotThisForm for an unknown reader of the mask."""
        sizes = (fake_value(self._mask.input).shape[1], fake_value(self._chosen.ids).shape[1])
        if not all(isinstance(size, int) for size in sizes):
            raise NotThisForm(f"{named(self._mask.node)} gathers a mask whose width depends on data")
        replaced: list[tuple[Node, Node]] = []
        for reader in sorted(self._readers(), key=lambda reader: reader.node):
            with self._graph.inserting_before(reader.node):
                replacement = self._read_indices(reader) if reader.has_indices else self._read(reader)
            if _signature(reader.node) != _signature(replacement):
                raise self._unknown(reader.node)
            replaced.append((reader.node, replacement))
        if not self._pairs:
            raise NotThisForm(f"nothing is selected by the mask that {named(self._mask.node)} gathers")
        unread = self._unread({old for old, _ in replaced})
        for old, new in replaced:
            old.replace_all_uses_with(new)
        for old in (*(old for old, _ in replaced), *sorted(unread, reverse=True)):
            if old in self._graph.nodes:
                erase_unread(self._graph, old)
        gather = self._gathered[self._mask.input].all_input_nodes[0]
        gather.meta[OF_MASK_KEY] = self._chosen.is_partial
        return gather

    def _unread(self, replaced: Collection[Node]) -> set[Node]:
        """Return the descendants of the gathers that are unread without `replaced`. Raises NotThisForm for a reader."""
        unread: set[Node] = set()
        for gather in (each for each in self._gathers.values() if each.input in self._gathered):
            _, *users = descendants(gather.node, follow=lambda user: user not in replaced)
            # With another reader the gather would have to stay, perhaps on this rank only.
            for user in users:
                if not is_call(user, WAIT) and (user.is_impure() or mutates(user) or communication_of(user)):
                    raise NotThisForm(
                        f"what {named(gather.node)} gathers, of which the mask of chosen experts selects, is also "
                        f"read by {named(user)}; expected nothing else to read it"
                    )
            unread.update(users)
        return unread

    def _readers(self) -> list[_GatheredMaskReader]:
        readers: list[_GatheredMaskReader] = []
        columns_of_mask = {self._mask.result: MaskColumns.all_of(self._mask.result)}
        for node in self._graph.nodes:
            for value in filter(columns_of_mask.__contains__, node.all_input_nodes):
                columns = columns_of_mask[value]
                result = columns.through(node) if node.all_input_nodes[0] is value else None
                if result is not None:
                    columns_of_mask[node] = result
                elif base_operation(node) == "sort":
                    readers += self._index_readers(node, columns)
                else:
                    readers.append(_GatheredMaskReader(node, value, columns))
        return readers

    def _index_readers(self, sort: Node, columns: MaskColumns) -> Iterator[_GatheredMaskReader]:
        """Yield the readers of the indices of all ones in a flat mask, which a stable descending sort puts first."""
        arguments = all_arguments(sort)
        if columns.order is not Order.FLAT or not arguments["descending"] or not arguments.get("stable"):
            raise self._unknown(sort)
        for item in sort.users:
            for first in item.users:
                if item.args[1] != 1 or base_operation(first) != "slice" or not self._takes_all_pairs(first, columns):
                    raise self._unknown(first)
                for user in first.users:
                    yield _GatheredMaskReader(user, first, columns, has_indices=True)

    def _read(self, reader: _GatheredMaskReader) -> Node:
        """Return the replacement of a node that reads the mask. Raises NotThisForm for unknown readers."""
        node, columns = reader.node, reader.columns
        base, arguments = base_operation(node), all_arguments(node)
        by_expert = columns.order is Order.BY_EXPERT
        if base == "sym_size":
            return self._size(node)
        if base == "sum":
            return self._sum(reader)
        if base == "nonzero" and by_expert:
            pairs = (self._expert(reader), self._token(reader))
            both = [self.writer.emit(aten.unsqueeze.default, item, 1) for item in pairs]
            return self.writer.emit(aten.cat.default, both, 1)
        is_mask = base == "masked_select" and arguments["mask"] is reader.value and by_expert
        if is_call(node, aten.index.Tensor) and columns.order is not Order.BY_TOKEN:
            is_mask = arguments["indices"] == [reader.value] and fake_value(reader.value).dtype is torch.bool
        source = arguments.get("self")
        if not is_mask or not isinstance(source, Node) or source is reader.value:
            raise self._unknown(node)
        if _is_arange_along(source, 1, columns):
            return self._token(reader)
        return self._expert(reader) if _is_arange_along(source, 0, columns) else self._weight(source, reader)

    def _unknown(self, node: Node) -> NotThisForm:
        return NotThisForm(
            f"the mask of chosen experts that {named(self._mask.node)} gathers is read by {named(node)}; expected "
            "masked_select, nonzero, a boolean index or a stable descending argsort of this rank's columns, "
            "transposed to [experts, tokens], and sums over tokens"
        )

    def _size(self, node: Node) -> Node:
        size, ids = fake_value(node), self._gather(self._mask.input)
        if isinstance(size, torch.SymInt):
            times, remainder = divmod(size_expression(size), size_expression(fake_value(ids).shape[0]))
            if remainder == 0 and times.is_Integer:
                return self.writer.product(self.writer.size(ids, 0), int(times))  # type: ignore[no-any-return]
        raise self._unknown(node)

    def _sum(self, reader: _GatheredMaskReader) -> Node:
        node, columns, arguments = reader.node, reader.columns, all_arguments(reader.node)
        counts = self._pairs_of(columns).counts
        dims = arguments.get("dim")
        if not dims and not arguments.get("keepdim"):
            counts = self.writer.emit(aten.sum.default, counts)
        else:
            along = [dim % 2 for dim in dims or ()]
            if columns.order is Order.FLAT or arguments["keepdim"] or along != [columns.dim_of_tokens]:
                raise self._unknown(node)
        if fake_value(node).dtype not in (torch.int32, torch.int64):
            raise self._unknown(node)
        return self.writer.cast(counts, fake_value(node).dtype)

    def _weight(self, source: Node, reader: _GatheredMaskReader) -> Node:
        """Return the elements of `source`, gathered for all experts, at the pairs that `reader` reads."""
        pair = self._pair(reader)
        gathered = columns_of(source, self._gathers)
        if gathered is None:
            raise NotThisForm(
                f"the mask of chosen experts that {named(self._mask.node)} gathers selects from {named(source)}; "
                "expected what is gathered [tokens, experts] beside it, in the columns of the same experts"
            )
        gather, source_columns = gathered
        is_aligned = dataclasses.replace(source_columns, types=()) == dataclasses.replace(reader.columns, types=())
        if not is_aligned or gather.group_name != self._mask.group_name:
            raise self._unknown(reader.node)
        flat = self.writer.emit(aten.reshape.default, self._gather(gather.input), [-1])
        value = self.writer.emit(aten.index.Tensor, flat, [pair])
        for dtype in source_columns.types:
            value = self.writer.cast(value, dtype)
        return value

    def _takes_all_pairs(self, first: Node, columns: MaskColumns) -> bool:
        """Return whether the slice `first` takes as many elements as `columns` of the mask have ones."""
        values = all_arguments(first)
        end = values["end"]
        if (values["start"] or 0) != 0 or values["step"] != 1 or not is_call(end, aten._local_scalar_dense.default):
            return False
        total = end.args[0]
        if base_operation(total) != "sum" or all_arguments(total).get("dim"):
            return False
        summed = columns_of(total.args[0], {self._mask.result: self._mask})
        return summed is not None and (summed[1].first, summed[1].last) == (columns.first, columns.last)

    def _read_indices(self, reader: _GatheredMaskReader) -> Node:
        """Return the replacement of a node that reads indices in [experts · tokens] of ones, or raise NotThisForm."""
        base, arguments = base_operation(reader.node), all_arguments(reader.node)
        if base == "sym_size":
            return self._pair_count(reader)
        if is_call(reader.node, aten.index.Tensor) and arguments["indices"] == [reader.value]:
            return self._weight(arguments["self"], reader)
        argument = arguments.get("other")
        divisor = fake_value(argument) if isinstance(argument, Node) else argument
        is_divided = arguments.get("self") is reader.value and isinstance(divisor, (int, torch.SymInt))
        if is_divided and size_expression(divisor) == reader.columns.tokens:
            if base == "remainder":
                return self._token(reader)
            if base == "floor_divide" or arguments.get("rounding_mode") in ("floor", "trunc"):
                return self._expert(reader)
        raise self._unknown(reader.node)

    def _gather(self, value: Node) -> Node:
        """Return the gathered ids [tokens · ranks, k] for the mask, or elements of another `value` at these ids."""
        if value not in self._gathered:
            sent = self._sent_ids() if value is self._mask.input else self._at_ids(value)
            _, *arguments = self._mask.node.args
            gathered = self.writer.emit(self._mask.node.target, sent, *arguments)  # type: ignore[arg-type]
            self._gathered[value] = self.writer.emit(WAIT, gathered)
        return self._gathered[value]

    def _at_ids(self, value: Node) -> Node:
        return self.writer.emit(aten.gather.default, value, 1, self._chosen.ids)

    def _sent_ids(self) -> Node:
        """Return the ids, with the number of experts in place of ids that the mask leaves out."""
        ids = self.writer.cast(self._chosen.ids, torch.int64)
        if not self._chosen.is_partial:
            return ids
        no_expert = self.writer.scalar(int(fake_value(self._mask.input).shape[1]), ids)
        return self.writer.emit(aten.where.self, self._at_ids(self._mask.input), ids, no_expert)

    def _pairs_of(self, columns: MaskColumns) -> _MaskedPairs:
        key = (columns.first, columns.last)
        if key not in self._pairs:
            emit = self.writer.emit
            ids = emit(aten.reshape.default, self._gather(self._mask.input), [-1])
            local = emit(aten.sub.Tensor, ids, columns.first)
            outside = emit(
                aten.bitwise_or.Tensor, emit(aten.lt.Scalar, local, 0), emit(aten.ge.Scalar, local, columns.experts)
            )
            experts, order = self.writer.sort(emit(aten.masked_fill.Scalar, local, outside, columns.experts))
            zeros = emit(aten.new_zeros.default, experts, [columns.experts + 1])
            counts = emit(aten.scatter_add.default, zeros, 0, experts, emit(aten.ones_like.default, experts))
            counts = emit(aten.slice.Tensor, counts, 0, 0, columns.experts)
            self._pairs[key] = _MaskedPairs(order, experts, counts)
        return self._pairs[key]

    def _pair_count(self, reader: _GatheredMaskReader) -> Node:
        total = self.writer.emit(aten.sum.default, self._pairs_of(reader.columns).counts)
        return self.writer.described(aten._local_scalar_dense.default, (total,), reader.pairs)

    def _first(self, values: Node, reader: _GatheredMaskReader) -> Node:
        described = fake_value(values).new_empty([reader.pairs])
        return self.writer.described(aten.slice.Tensor, (values, 0, 0, self._pair_count(reader)), described)

    def _pair(self, reader: _GatheredMaskReader) -> Node:
        return self._first(self._pairs_of(reader.columns).positions, reader)

    def _expert(self, reader: _GatheredMaskReader) -> Node:
        return self._first(self._pairs_of(reader.columns).experts, reader)

    def _token(self, reader: _GatheredMaskReader) -> Node:
        k = int(fake_value(self._chosen.ids).shape[1])
        return self.writer.emit(aten.div.Tensor_mode, self._pair(reader), k, rounding_mode="floor")


def _signature(node: Node) -> tuple[str, ...]:
    value = fake_value(node)
    if not isinstance(value, torch.Tensor):
        return (str(size_expression(value)),)
    return (str(value.dtype), str(value.device), *(str(size_expression(size)) for size in value.shape))


def _is_arange_along(source: Node, dim: int, columns: MaskColumns) -> bool:
    """Return whether `source` is 0, 1, .. along dimension `dim` of `columns` [experts, tokens]."""
    if columns.order is not Order.BY_EXPERT or fake_value(source).dim() != 2:
        return False
    source = origin(source, Trait.EXPAND)
    if base_operation(source) != "unsqueeze" or all_arguments(source)["dim"] % 2 != 1 - dim:
        return False
    numbers = source.all_input_nodes[0]
    if not is_arange(numbers) or fake_value(numbers).dtype is not torch.int64:
        return False
    counted = columns.tokens if dim == 1 else columns.experts
    return bool(size_expression(fake_value(numbers).shape[0]) == counted)
