"""Write the local form of a parallel block into a graph: this rank's own tokens through all experts.

The local form keeps what the model computes (its activation function, its biases, the order of its weighted sum) and
leaves out what only parallelism needed (regrouping by rank, masks for the experts of other ranks). Nodes are appended
at the graph's insertion point, each with its fake value. They are operators that Inductor does not take apart: the
graph was decomposed when it was captured, and Inductor refuses what should have been.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call, is_float, map_nodes, nodes_in
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.traits import is_view
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.local_form.block_writer import BlockWriter
from moepass.passes.parallel.local_form.row_moves import exchanged_by, moved_values
from moepass.passes.parallel.local_form.row_types import Casts, casts_between, changes_type
from moepass.passes.parallel.match.parallel_block import ParallelBlock, bias_after, looked_up_table
from moepass.passes.rows.row_layout import ratio

aten, prims = torch.ops.aten, torch.ops.prims


class LocalForm(BlockWriter):
    """Writes the local form of one block. `complete` maps each local expert tensor to the one with all experts."""

    def __init__(self, graph: Graph, block: ParallelBlock, complete: dict[Node, Node]) -> None:
        super().__init__(graph, block)
        self.complete = complete
        # The GEMMs that were written, and which GEMM of the block each of them is.
        self.gemms: dict[Node, int] = {}
        self._region = set(block.region)
        # Of the block's nodes: those whose operation the local form repeats, and the masks that it does without.
        self.copied: set[Node] = set()
        self.left_out: set[Node] = set()
        # The copies that were written, and what each is a copy of.
        self.origins: dict[Node, Node] = {}
        # Of each copy, also of those with other arguments: what it is a copy of. Of each of `left_out`: what it masks.
        self.copies: dict[Node, Node] = {}
        self.kept: dict[Node, Node] = {}
        # Replacement of each number of rows that the activation function computes with.
        self.sizes: dict[Node, int | Node] = {}
        # The results of the block's GEMMs, biases included, and what stands for them: there the copies start.
        self.starts: dict[Node, Node] = {}
        # The experts alone: their rows, sorted, where each expert's rows end, and which expert each row has.
        self.rows: Node
        self.ends: Node
        self.outputs: Node
        self.row_ids: Node | None = None
        # What stands for that which travels with the rows, in their order.
        self.travelling: tuple[Node, ...] = block.travelling
        # Nodes of the block that rows are cast on, as the local form casts them, and what types they have one after the
        # other: on their way to the experts, and from there.
        self.cast: set[Node] = set()
        self.types: list[tuple[torch.dtype, ...]] = []
        # Where the rows are moved again behind the experts, and what is computed of their results before that.
        self.end: Node = block.down.node
        self.after: set[Node] = set()
        # The experts' outputs, where they are weighed by what travelled with the rows.
        self._moves: Node | None = None

    def write(self) -> Node:
        """The value that takes the place of the block's sink. Raises NotThisForm."""
        result = self._write()
        known = {*self.copied, *self.left_out, *self.cast, *self.starts, self.end}
        wanted = fake_value(self.block.sink).dtype
        for node in self.block.region:
            # The mock run is in float64 and would not see it.
            is_other = changes_type(node) and node not in known
            if is_other and (self.block.form.startswith("all_to_all") or fake_value(node).dtype != wanted):
                raise NotThisForm(
                    f"it computes in {fake_value(node).dtype} between, at {named(node)}, which its local form would "
                    f"not; expected {wanted} from its rows to its results"
                )
        return result

    def _write(self) -> Node:
        sources = self.block.sources
        if self.block.form == "all_to_all":
            return self._rows_by_counts(sources["rows"], self._flat(sources["counts"]))
        if self.block.form == "all_to_all_slots":
            return self._all_slots(sources["rows"])
        return self._weighted_sum(sources["hidden"], sources["ids"])

    def _flat(self, counts: Node) -> Node:
        return counts if fake_value(counts).dim() == 1 else self.emit(aten.view.default, counts, [-1])

    # -------------------------------------------------------------------------------------------------- by form

    def _rows_by_counts(self, rows: Node, counts: Node) -> Node:
        """Rows sorted by expert, as many as `counts` says: the order in which the AllToAll was given them."""
        ends = self.emit(aten.cumsum.default, counts, 0, dtype=torch.int32)
        return self._experts(rows, ends, lambda: self._expert_of_each_row(rows, counts))

    def _expert_of_each_row(self, rows: Node, counts: Node) -> Node:
        every = self.arange(self.block.experts, fake_value(rows).device)
        chosen = self.emit(aten.repeat_interleave.Tensor, counts, output_size=self._size(fake_value(rows).shape[0]))
        return self.emit(aten.index.Tensor, every, [chosen])

    def _ends(self, sorted_ids: Node) -> Node:
        """Where the rows of each expert end."""
        like = {"dtype": fake_value(sorted_ids).dtype, "device": fake_value(sorted_ids).device}
        counts = self.emit(aten.full.default, [self.block.id_values], 0, **like)
        ones = self.emit(aten.full.default, [self._size(fake_value(sorted_ids).shape[0])], 1, **like)
        self.sized.add(ones)
        counts = self.emit(aten.scatter_add.default, counts, 0, sorted_ids, ones)
        if self.block.drops:
            counts = self.emit(aten.slice.Tensor, counts, 0, 0, self.block.experts)
        return self.emit(aten.cumsum.default, counts, 0, dtype=torch.int32)

    def _all_slots(self, slots: Node) -> Node:
        """Slots, as many for each expert, all of them computed, whether a token is in them or not."""
        experts, device = self.block.experts, fake_value(slots).device
        total = self._size(fake_value(slots).shape[0])
        each = total // experts if isinstance(total, int) else self.emit(operator.floordiv, total, experts)
        counts = self.emit(aten.full.default, [experts], each, dtype=torch.int64, device=device)
        # Not by the sum: of one number again and again, Inductor makes numbers of the type that those have.
        ends = self.emit(prims.convert_element_type.default, self.emit(aten.cumsum.default, counts, 0), torch.int32)
        return self._experts(slots, ends, lambda: self._expert_of_each_slot(slots, each))

    def _expert_of_each_slot(self, slots: Node, each: Any) -> Node:
        every = self.emit(aten.unsqueeze.default, self.arange(self.block.experts, fake_value(slots).device), -1)
        return self.emit(aten.reshape.default, self.emit(aten.expand.default, every, [self.block.experts, each]), [-1])

    def _zero_unused(self, sorted_ids: Node, outputs: Node) -> Node:
        """Zeros for rows whose id is none of the experts'."""
        value = fake_value(outputs)
        unused = self.emit(aten.unsqueeze.default, self.emit(aten.eq.Scalar, sorted_ids, self.block.experts), -1)
        zero = self.emit(aten.scalar_tensor.default, 0.0, dtype=value.dtype, device=value.device)
        return self.emit(aten.where.self, unused, zero, outputs)

    def _weighted_sum(self, hidden: Node, ids: Node) -> Node:
        """The arithmetic, and the order of the sum, of `grouped_mm_experts_forward` of transformers."""
        top_k = int(fake_value(ids).shape[1])
        sorted_ids, order = self._sorted(self.emit(aten.view.default, ids, [-1]))
        token = self.emit(aten.div.Tensor_mode, order, top_k, rounding_mode="floor")
        rows = self.emit(aten.index.Tensor, hidden, [token])
        ends = self._ends(sorted_ids)
        ids_of_rows = sorted_ids
        if self.block.drops:
            ids_of_rows = self.emit(aten.clamp_max.default, sorted_ids, self.block.experts - 1)
        (weights,) = self.block.travelling or (self.block.sources["weights"],)
        of_rows = self.emit(aten.index.Tensor, self.emit(aten.view.default, weights, [-1]), [order])
        if self.block.travelling:
            self.travelling = (of_rows,)
        weighed = self._experts(rows, ends, lambda: ids_of_rows)
        if not self.block.travelling:
            weighed = self.emit(aten.mul.Tensor, weighed, self.emit(aten.unsqueeze.default, of_rows, -1))
        if self.block.drops:
            weighed = self._zero_unused(sorted_ids, weighed)
        placed = self.emit(aten.index.Tensor, weighed, [self._inverse(order)])
        tokens = self._size(fake_value(hidden).shape[0])
        by_token = self.emit(aten.view.default, placed, [tokens, top_k, self.block.down.outer])
        total = self.emit(aten.sum.dim_IntList, by_token, [1])
        wanted = fake_value(self.block.sink).dtype
        if fake_value(total).dtype == wanted:
            return total
        return self.emit(prims.convert_element_type.default, total, wanted)

    # ------------------------------------------------------------------------------------------------ the experts

    def _experts(self, rows: Node, ends: Node, expert_of_row: Callable[[], Node]) -> Node:
        """The block's experts, its activation function and biases included, on rows sorted by expert."""
        *ups, down = self.block.gemms
        rows = self._cast_on_the_way_there(rows)
        self.rows, self.ends = rows, ends
        self._expert_of_row = expert_of_row
        values = {up.node: self._gemm(number, rows, ends) for number, up in enumerate(ups)}
        for up in ups:
            values[up.node] = self._biased(up.node, values[up.node], values)
        self.starts = dict(values)
        activations = self._translate(down.activations, values)
        values[down.node] = result = self._gemm(len(ups), activations, ends)
        self.outputs = self._biased(down.node, result, values)
        bias = bias_after(down.node)
        self.end = down.node if bias is None or bias.sum not in values else bias.sum
        if self.block.travelling and "rows" in self.block.sources:
            self._go_on_behind(values)
        return self._cast_on_the_way_back(self.outputs)

    def _cast_on_the_way_there(self, rows: Node) -> Node:
        if "rows" not in self.block.sources:
            return rows
        *ups, _ = self.block.gemms
        found = [self._casts_between(up.activations, self.block.sources["rows"]) for up in ups]
        if len({casts.types for casts in found}) != 1:
            raise NotThisForm(f"{' and '.join(named(up.node) for up in ups)} read rows that are cast in different ways")
        return self._cast(rows, found)

    def _cast_on_the_way_back(self, outputs: Node) -> Node:
        if "rows" not in self.block.sources:
            return outputs
        return self._cast(outputs, [self._casts_between(self.block.sink, self.end)])

    def _cast(self, value: Node, ways: Sequence[Casts]) -> Node:
        """`value` with the casts of the first of `ways`, which has the same as the others."""
        if not ways[0].types:
            return value
        first, *then = ways[0].types
        if fake_value(value).dtype != first:
            raise NotThisForm(f"its local form would have {fake_value(value).dtype} where the block has {first}")
        for dtype in then:
            value = self.emit(prims.convert_element_type.default, value, dtype)
        self.types.append(ways[0].types)
        self.cast.update(*(way.nodes for way in ways))
        return value

    def _casts_between(self, end: Node, start: Node) -> Casts:
        return casts_between(end, {start}, self._region)

    def _go_on_behind(self, values: dict[Node, Node]) -> None:
        """Rows may be weighed by what travelled with them before they go back."""
        found = moved_values(self.block.exchanges[-1].input)
        if len(found) != 1 or self.end in found:
            return
        before = set(self.copied)
        self.starts[self.end] = self.outputs
        self._moves = self.end
        (self.end,) = found
        self.outputs = self._translate(self.end, values)
        self.after = self.copied - before

    def _gemm(self, number: int, rows: Node, ends: Node) -> Node:
        gemm = self.block.gemms[number]
        names = [argument.name for argument in gemm.node.target._schema.arguments]  # type: ignore[union-attr]
        given = {**dict(zip(names, gemm.node.args, strict=False)), **gemm.node.kwargs}
        weight = self._weight(next(value for name, value in given.items() if name in ("mat2", "weight")))
        # Both operators take rows, weights and offsets in this order; whatever else they were given stays.
        extra = {name: value for name, value in given.items() if name not in names[:3] and value is not None}
        node = self.emit(gemm.node.target, rows, weight, ends, **extra)  # type: ignore[arg-type]
        self.gemms[node] = number
        return node

    def _weight(self, operand: Any) -> Node:
        """The operand of a GEMM, with all experts: the same views of the complete tensor."""
        if operand in self.complete:
            return self.complete[operand]
        if not isinstance(operand, Node) or not is_view(operand) or len(operand.all_input_nodes) != 1:
            raise NotThisForm(
                f"its expert weights are computed in the graph by "
                f"{named(operand) if isinstance(operand, Node) else operand}; keep parameters in the type in which the "
                "GEMMs read them"
            )
        source = self._weight(operand.all_input_nodes[0])
        args, kwargs = map_nodes((operand.args, operand.kwargs), lambda used: source)
        return self.emit(operand.target, *args, **kwargs)  # type: ignore[arg-type]

    def _biased(self, before: Node, value: Node, values: dict[Node, Node]) -> Node:
        """`value` with the bias that the block adds right after the GEMM `before`, if it adds one.

        Where the activation function is still to be translated, `values` learns what stands for the sum.
        """
        found = bias_after(before)
        if found is None or found.tensor not in self.complete:
            return value
        bias = self.emit(aten.index.Tensor, self.complete[found.tensor], [self._ids_of_rows()])
        values[found.sum] = self.emit(aten.add.Tensor, value, bias)
        return values[found.sum]

    def _ids_of_rows(self) -> Node:
        if self.row_ids is None:
            self.row_ids = self._expert_of_row()
        return self.row_ids

    def _translate(self, node: Node, values: dict[Node, Node]) -> Node:
        """`node`, a value between the GEMMs, for the rows of the local form; `values` maps what is known."""
        # For each visited node that only masks an operand: that operand, which replaces it.
        unmasked: dict[Node, Node | None] = {}

        def known(used: Node) -> Any:
            while (source := unmasked.get(used)) is not None:
                used = source
            return used if used.op == "get_attr" else self.sizes.get(used, values.get(used))

        pending = [node]
        while pending:
            current = pending[-1]
            if known(current) is not None:
                pending.pop()
                continue
            beside = self._travelled(current) or self._looked_up(current) or self._moved_outputs(current)
            if beside is not None:
                self.starts[current] = values[current] = beside
                continue
            if isinstance(fake_value(current), torch.SymInt) and (size := self._of_rows(current)) is not None:
                self.sizes[current] = size
                continue
            self._check_repeatable(current)
            if current not in unmasked:
                unmasked[current] = self._unmasked(current, values)
            source = unmasked[current]
            arguments = self._for_any_rows(current)
            missing = [used for used in nodes_in(arguments) if known(used) is None]
            if source is not None:
                self.left_out.add(current)
                self.kept[current] = source
                pending.append(source)
            elif missing:
                pending.extend(reversed(missing))
            else:
                args, kwargs = map_nodes(arguments, known)
                self.copied.add(current)
                values[current] = self._append(current.target, args, kwargs, repeated=current)  # type: ignore[arg-type]
                self.copies[values[current]] = current
                if arguments[0] is current.args:
                    self.origins[values[current]] = current
        result = known(node)
        assert isinstance(result, Node)
        return result

    def _travelled(self, node: Node) -> Node | None:
        """What stands for `node` where that is what travelled with the rows, in whatever order."""
        if not is_float(node):
            return None
        value = fake_value(node)
        found = exchanged_by(node) if self.block.travelling else None
        if found is None or found.input not in self.block.travelling:
            return None
        stands = self.travelling[self.block.travelling.index(found.input)]
        if value.shape[1:] != fake_value(stands).shape[1:]:
            return None
        stands = self._cast(stands, [self._casts_between(node, found.input)])
        return stands if value.dtype == fake_value(stands).dtype else None

    def _looked_up(self, node: Node) -> Node | None:
        """What stands for `node` where that is what the expert of each row has one of."""
        table = looked_up_table(node)
        if table not in self.complete:
            return None
        return self.emit(aten.index.Tensor, self.complete[table], [self._ids_of_rows()])

    def _moved_outputs(self, node: Node) -> Node | None:
        """What stands for `node` where that is the experts' outputs, in another order, before they are weighed."""
        return (
            self.outputs if is_float(node) and self._moves is not None and moved_values(node) == {self._moves} else None
        )

    def _of_rows(self, node: Node) -> int | Node | None:
        """What stands for a size that is a multiple of the number of the experts' rows; None where it is not."""
        size = size_expression(fake_value(node))
        if size.is_Integer:
            return int(size)
        times = ratio(size, size_expression(fake_value(self.block.down.node).shape[0]))
        if times is None or not times.is_Integer:
            return None
        rows = self._size(fake_value(self.rows).shape[0])
        if times == 1 or isinstance(rows, int):
            return rows * int(times) if isinstance(rows, int) else rows
        return self.emit(operator.mul, rows, int(times))

    def _check_repeatable(self, node: Node) -> None:
        """Raises NotThisForm for what leads out of the activation function."""
        if isinstance(fake_value(node), torch.SymInt) and not _is_of_sizes(node):
            raise NotThisForm(
                f"what lies between its GEMMs reads a size, {named(node)}, that is no multiple of how many rows of "
                "its experts there are; expected constants, and sizes of what the GEMMs give"
            )
        if node.op != "call_function" or collective_of(node) is not None:
            what = "what ranks exchange at " if node.op == "call_function" else ""
            raise NotThisForm(
                f"what lies between its GEMMs reads {what}{named(node)}; expected nothing but their results, and "
                "constants"
            )

    def _unmasked(self, node: Node, values: dict[Node, Node]) -> Node | None:
        """The operand of which `node` masks the rows of other ranks' experts, which the local form does not have."""
        if is_call(node, aten.masked_fill.Scalar) and self._is_of_other_ranks(node.args[1], values):
            return node.args[0]  # type: ignore[return-value]
        if is_call(node, aten.where.self) and self._is_of_other_ranks(node.args[0], values):
            kept = [value for value in node.args[1:] if self._from_gemms(value, values)]
            return kept[0] if len(kept) == 1 else None  # type: ignore[return-value]
        return None

    def _for_any_rows(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node of the activation function, without the number of rows that the block has."""
        if not is_call(node, aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            return node.args, node.kwargs
        source, size = node.args[0], node.args[1]
        rows = str(fake_value(self.block.down.node).shape[0])
        before, after = fake_value(source).shape, fake_value(node).shape  # type: ignore[arg-type]
        by_row = bool(before) and bool(after) and str(before[0]) == rows and str(after[0]) == rows
        if not by_row or size[0] == -1 or not all(isinstance(part, int) for part in after[1:]):  # type: ignore[index]
            return node.args, node.kwargs
        return (source, [-1, *map(int, after[1:])]), node.kwargs

    def _is_of_other_ranks(self, condition: object, values: dict[Node, Node]) -> bool:
        """Whether a condition may tell rows of other ranks' experts: neither rows nor constants alone make it."""
        return not self._from_gemms(condition, values) and not _is_constant(condition)

    def _from_gemms(self, node: object, values: dict[Node, Node]) -> bool:
        if not isinstance(node, Node):
            return False
        before = ancestors(node, stop=lambda used: used in values or used not in self._region)
        return any(used in values for used in before)


def _is_constant(node: object) -> bool:
    """Return whether `node` is computed from constants alone, whose sizes are constants too."""
    before = ancestors(node) if isinstance(node, Node) else ()
    return all(used.op == "get_attr" or (used.op == "call_function" and collective_of(used) is None) for used in before)


def _is_of_sizes(node: Node) -> bool:
    """True for a size that is computed from others, or of a tensor's shape."""
    return node.op == "call_function" and not is_call(node, aten._local_scalar_dense.default)
