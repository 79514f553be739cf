"""Write the local form of a parallel block into a graph: this rank's own tokens through all experts.

The local form repeats the model's activation function, biases and order of the weighted sum. It omits operations that
serve parallelism only, such as regrouping by rank and masks of other ranks' experts. It uses only operators that
Inductor does not decompose, because the captured graph is decomposed already and Inductor would reject others.
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
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import is_view
from moepass.passes.ops.walk import ancestors, walk
from moepass.passes.parallel.local_form.block_writer import BlockWriter
from moepass.passes.parallel.local_form.row_moves import Casts, casts_between, changes_type, exchanged_by, moved_values
from moepass.passes.parallel.match.parallel_block import ParallelBlock, bias_after, looked_up_table
from moepass.passes.rows.row_layout import ratio

aten = torch.ops.aten


class LocalForm(BlockWriter):
    """The local form of one block. `complete` maps each local expert tensor to the tensor of all experts."""

    def __init__(self, graph: Graph, block: ParallelBlock, complete: dict[Node, Node]) -> None:
        super().__init__(graph, block)
        self.complete = complete
        # Maps each written GEMM to its number among the GEMMs of the block.
        self.gemms: dict[Node, int] = {}
        self._region = set(block.region)
        # Nodes of the block: those whose operation the local form repeats, and the masks that it omits.
        self.copied: set[Node] = set()
        self.left_out: set[Node] = set()
        # Maps each written copy with unchanged arguments to its original.
        self.origins: dict[Node, Node] = {}
        # Maps each written copy to its original, and each mask of `left_out` to its masked operand.
        self.copies: dict[Node, Node] = {}
        self.unmasked: dict[Node, Node] = {}
        # Maps nodes of the block to their values in the local form.
        self._values: dict[Node, Node] = {}
        # Maps each number of rows that the activation function reads to its replacement.
        self.sizes: dict[Node, int | Node] = {}
        # Maps the inputs of the copies, such as results of the block's GEMMs with their biases, to their replacements.
        self.starts: dict[Node, Node] = {}
        # Inputs and outputs of the experts: sorted rows, the end of each expert's rows, and the expert of each row.
        self.rows: Node
        self.ends: Node
        self.outputs: Node
        self.row_ids: Node | None = None
        # The values that travel with the rows, in the order of the rows.
        self.travelling: tuple[Node, ...] = block.travelling
        # Nodes of the block on the paths of casts that the local form repeats, and the dtypes on each path.
        self.cast_nodes: set[Node] = set()
        self.types: list[tuple[torch.dtype, ...]] = []
        # The outputs of the experts in the block, and the nodes that weight them, if any.
        self.end: Node = block.down.node
        self.weighting: set[Node] = set()
        # The outputs in the block before they are weighted by values that travel with the rows.
        self._raw: Node | None = None

    def write(self) -> Node:
        """Write the local form, and return the replacement of the block's sink. Raises NotThisForm."""
        sources = self.block.sources
        if self.block.form == "all_to_all":
            result = self._rows_by_counts(sources["rows"], sources["counts"])
        elif self.block.form == "all_to_all_slots":
            result = self._all_slots(sources["rows"])
        else:
            result = self._weighted_sum(sources["hidden"], sources["ids"])
        checked = {*self.copied, *self.left_out, *self.cast_nodes, *self.starts, self.end}
        dtype = fake_value(self.block.sink).dtype
        for node in self.block.region:
            # Mock runs use float64, so they do not test casts.
            is_cast = changes_type(node) and node not in checked
            if is_cast and (self.block.form.startswith("all_to_all") or fake_value(node).dtype != dtype):
                raise NotThisForm(
                    f"it computes in {fake_value(node).dtype} between, at {named(node)}, which its local form would "
                    f"not; expected {dtype} from its rows to its results"
                )
        return result

    def _rows_by_counts(self, rows: Node, counts: Node) -> Node:
        """Write the experts on the rows as sent by the AllToAll: sorted by expert, `counts` rows of each."""
        flat = counts if fake_value(counts).dim() == 1 else self.emit(aten.view.default, counts, [-1])

        def expert_of_row() -> Node:
            every = self.arange(self.block.experts, fake_value(rows).device)
            chosen = self.emit(aten.repeat_interleave.Tensor, flat, output_size=self._size(fake_value(rows).shape[0]))
            return self.emit(aten.index.Tensor, every, [chosen])

        return self._experts(rows, self.emit(aten.cumsum.default, flat, 0, dtype=torch.int32), expert_of_row)

    def _ends(self, sorted_ids: Node) -> Node:
        value = fake_value(sorted_ids)
        counts = self.full([self.block.id_values], 0, value.device, value.dtype)
        ones = self.full([self._size(value.shape[0])], 1, value.device, value.dtype)
        self.sized.add(ones)
        counts = self.emit(aten.scatter_add.default, counts, 0, sorted_ids, ones)
        if self.block.drops:
            counts = self.emit(aten.slice.Tensor, counts, 0, 0, self.block.experts)
        return self.emit(aten.cumsum.default, counts, 0, dtype=torch.int32)

    def _all_slots(self, slots: Node) -> Node:
        """Write the experts on all slots, equally many for each expert, including empty slots."""
        experts, device = self.block.experts, fake_value(slots).device
        total = self._size(fake_value(slots).shape[0])
        each = total // experts if isinstance(total, int) else self.emit(operator.floordiv, total, experts)
        ends = self.ends_of_even_groups(experts, each, device)
        return self._experts(slots, ends, lambda: self.group_of_each_row(experts, each, device))

    def _zero_unused(self, sorted_ids: Node, outputs: Node) -> Node:
        """Return the outputs with zeros for the rows of dropped pairs."""
        unused = self.emit(aten.unsqueeze.default, self.emit(aten.eq.Scalar, sorted_ids, self.block.experts), -1)
        return self.emit(aten.where.self, unused, self.scalar(0.0, outputs), outputs)

    def _weighted_sum(self, hidden: Node, ids: Node) -> Node:
        """Write the operations and the order of the sum of `grouped_mm_experts_forward` of transformers."""
        top_k = int(fake_value(ids).shape[1])
        sorted_ids, order = self.sort(self.emit(aten.view.default, ids, [-1]))
        token = self.emit(aten.div.Tensor_mode, order, top_k, rounding_mode="floor")
        rows = self.emit(aten.index.Tensor, hidden, [token])
        ends = self._ends(sorted_ids)
        ids_of_rows = sorted_ids
        if self.block.drops:
            ids_of_rows = self.emit(aten.clamp_max.default, sorted_ids, self.block.experts - 1)
        (weights,) = self.block.travelling or (self.block.sources["weights"],)
        row_weights = self.emit(aten.index.Tensor, self.emit(aten.view.default, weights, [-1]), [order])
        if self.block.travelling:
            self.travelling = (row_weights,)
        outputs = self._experts(rows, ends, lambda: ids_of_rows)
        if not self.block.travelling:
            outputs = self.emit(aten.mul.Tensor, outputs, self.emit(aten.unsqueeze.default, row_weights, -1))
        if self.block.drops:
            outputs = self._zero_unused(sorted_ids, outputs)
        unsorted = self.emit(aten.index.Tensor, outputs, [self._inverse(order)])
        tokens = self._size(fake_value(hidden).shape[0])
        by_token = self.emit(aten.view.default, unsorted, [tokens, top_k, self.block.down.outer])
        return self.cast(self.emit(aten.sum.dim_IntList, by_token, [1]), fake_value(self.block.sink).dtype)

    def _experts(self, rows: Node, ends: Node, expert_of_row: Callable[[], Node]) -> Node:
        """Write the block's experts, with activation function and biases, on rows sorted by expert."""
        *ups, down = self.block.gemms
        sent_rows = self.block.sources.get("rows")
        if sent_rows is not None:
            paths = [casts_between(up.activations, sent_rows, self._region) for up in ups]
            if len({casts.types for casts in paths}) != 1:
                readers = " and ".join(named(up.node) for up in ups)
                raise NotThisForm(f"{readers} read rows that are cast in different ways")
            rows = self._cast(rows, *paths)
        self.rows, self.ends = rows, ends
        self._expert_of_row = expert_of_row
        self._values = {up.node: self._gemm(number, rows, ends) for number, up in enumerate(ups)}
        for up in ups:
            self._values[up.node] = self._biased(up.node)
        self.starts = dict(self._values)
        activations = self._translate(down.activations)
        self._values[down.node] = self._gemm(len(ups), activations, ends)
        self.outputs = self._biased(down.node)
        self.end = next(node for node, value in self._values.items() if value is self.outputs)
        if sent_rows is None:
            return self.outputs
        if self.block.travelling:
            self._weight_outputs()
        return self._cast(self.outputs, casts_between(self.block.sink, self.end, self._region))

    def _cast(self, value: Node, *paths: Casts) -> Node:
        """Return `value` after the casts of `paths`, which have equal dtypes."""
        if not paths[0].types:
            return value
        first, *later = paths[0].types
        if fake_value(value).dtype != first:
            raise NotThisForm(f"its local form would have {fake_value(value).dtype} where the block has {first}")
        for dtype in later:
            value = self.cast(value, dtype)
        self.types.append(paths[0].types)
        self.cast_nodes.update(*(path.nodes for path in paths))
        return value

    def _weight_outputs(self) -> None:
        """Write the weighting of the outputs, if values that travel with the rows weight them before the combine."""
        sent = moved_values(self.block.exchanges[-1].input)
        if len(sent) != 1 or self.end in sent:
            return
        before = set(self.copied)
        self.starts[self.end] = self.outputs
        self._raw = self.end
        (self.end,) = sent
        self.outputs = self._translate(self.end)
        self.weighting = self.copied - before

    def _gemm(self, number: int, rows: Node, ends: Node) -> Node:
        gemm = self.block.gemms[number].node
        # Both operators take rows, weights and offsets in this order; the other arguments are unchanged.
        arguments = list(all_arguments(gemm).items())
        extra = {name: value for name, value in arguments[3:] if value is not None}
        node = self.emit(gemm.target, rows, self._weight(arguments[1][1]), ends, **extra)  # type: ignore[arg-type]
        self.gemms[node] = number
        return node

    def _weight(self, operand: Node) -> Node:
        """Return the weight operand of a GEMM for all experts: the same views of the complete tensor."""
        if operand in self.complete:
            return self.complete[operand]
        if not is_view(operand) or len(operand.all_input_nodes) != 1:
            raise NotThisForm(
                f"its expert weights are computed in the graph by {named(operand)}; keep parameters in the type in "
                "which the GEMMs read them"
            )
        source = self._weight(operand.all_input_nodes[0])
        args, kwargs = map_nodes((operand.args, operand.kwargs), lambda used: source)
        return self.emit(operand.target, *args, **kwargs)  # type: ignore[arg-type]

    def _biased(self, gemm: Node) -> Node:
        """Return the value of `gemm` in the local form plus the bias that the block adds to it, if any."""
        bias = bias_after(gemm)
        if bias is None or bias.tensor not in self.complete:
            return self._values[gemm]
        row_biases = self.emit(aten.index.Tensor, self.complete[bias.tensor], [self._ids_of_rows()])
        self._values[bias.sum] = self.emit(aten.add.Tensor, self._values[gemm], row_biases)
        return self._values[bias.sum]

    def _ids_of_rows(self) -> Node:
        if self.row_ids is None:
            self.row_ids = self._expert_of_row()
        return self.row_ids

    def _translate(self, node: Node) -> Node:
        """Copy `node`, a value between the GEMMs, to the local form."""
        for current in sorted(walk([node], self._copied_operands)):
            if self._replacement(current) is None:
                arguments = self._for_any_rows(current)
                args, kwargs = map_nodes(arguments, self._replacement)
                copy = self._append(current.target, args, kwargs, repeated=current)  # type: ignore[arg-type]
                self.copied.add(current)
                self._values[current], self.copies[copy] = copy, current
                if arguments[0] is current.args:
                    self.origins[copy] = current
        result = self._replacement(node)
        assert isinstance(result, Node)
        return result

    def _replacement(self, node: Node) -> int | Node | None:
        """Return the replacement of `node` in the local form, or None if it is not written yet."""
        while node in self.unmasked:
            node = self.unmasked[node]
        return node if node.op == "get_attr" else self.sizes.get(node, self._values.get(node))

    def _copied_operands(self, node: Node) -> Sequence[Node]:
        """Return the operands that the copy of `node` reads; none if it is replaced. Raises NotThisForm."""
        if self._replacement(node) is not None:
            return ()
        start = self._travelled(node) or self._looked_up(node) or self._moved_outputs(node)
        if start is not None:
            self.starts[node] = self._values[node] = start
            return ()
        if isinstance(fake_value(node), torch.SymInt) and (size := self._row_multiple(node)) is not None:
            self.sizes[node] = size
            return ()
        self._check_repeatable(node)
        source = self._masked_operand(node)
        if source is None:
            return nodes_in(self._for_any_rows(node))
        self.left_out.add(node)
        self.unmasked[node] = source
        return (source,)

    def _travelled(self, node: Node) -> Node | None:
        """Return the replacement of a value that travelled with the rows, in any order, or None."""
        exchange = exchanged_by(node) if self.block.travelling and is_float(node) else None
        if exchange is None or exchange.input not in self.block.travelling:
            return None
        value, local = fake_value(node), self.travelling[self.block.travelling.index(exchange.input)]
        if value.shape[1:] != fake_value(local).shape[1:]:
            return None
        local = self._cast(local, casts_between(node, exchange.input, self._region))
        return local if value.dtype == fake_value(local).dtype else None

    def _looked_up(self, node: Node) -> Node | None:
        """Return the replacement of a lookup in an expert tensor by the expert of each row, or None."""
        table = looked_up_table(node)
        if table not in self.complete:
            return None
        return self.emit(aten.index.Tensor, self.complete[table], [self._ids_of_rows()])

    def _moved_outputs(self, node: Node) -> Node | None:
        """Return the replacement of the outputs before weighting, in any order, or None."""
        return self.outputs if is_float(node) and self._raw is not None and moved_values(node) == {self._raw} else None

    def _row_multiple(self, node: Node) -> int | Node | None:
        """Return the replacement of a size that is a multiple of the number of the experts' rows, or None."""
        size = size_expression(fake_value(node))
        if size.is_Integer:
            return int(size)
        times = ratio(size, size_expression(fake_value(self.block.down.node).shape[0]))
        if times is None or not times.is_Integer:
            return None
        return self.product(self._size(fake_value(self.rows).shape[0]), int(times))  # type: ignore[no-any-return]

    def _check_repeatable(self, node: Node) -> None:
        """Raise NotThisForm for a node outside the activation function."""
        is_of_sizes = node.op == "call_function" and not is_call(node, aten._local_scalar_dense.default)
        if isinstance(fake_value(node), torch.SymInt) and not is_of_sizes:
            raise NotThisForm(
                f"what lies between its GEMMs reads a size, {named(node)}, that is not a multiple of the number of its "
                "experts' rows; expected constants, and sizes of the results of the GEMMs"
            )
        if node.op != "call_function" or collective_of(node) is not None:
            prefix = "what ranks exchange at " if node.op == "call_function" else ""
            raise NotThisForm(
                f"what lies between its GEMMs reads {prefix}{named(node)}; expected nothing but their results, and "
                "constants"
            )

    def _masked_operand(self, node: Node) -> Node | None:
        """Return the operand in which `node` masks rows of other ranks' experts, or None if it is no such mask."""
        if is_call(node, aten.masked_fill.Scalar) and self._is_of_other_ranks(node.args[1]):
            return node.args[0]  # type: ignore[return-value]
        if is_call(node, aten.where.self) and self._is_of_other_ranks(node.args[0]):
            operands = [value for value in node.args[1:] if self._from_gemms(value)]
            return operands[0] if len(operands) == 1 else None  # type: ignore[return-value]
        return None

    def _for_any_rows(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node of the activation function, with -1 for the block's number of rows."""
        if not is_call(node, aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            return node.args, node.kwargs
        source, size = node.args[0], node.args[1]
        rows = str(fake_value(self.block.down.node).shape[0])
        before, after = fake_value(source).shape, fake_value(node).shape  # type: ignore[arg-type]
        by_row = bool(before) and bool(after) and str(before[0]) == rows and str(after[0]) == rows
        if not by_row or size[0] == -1 or not all(isinstance(dim, int) for dim in after[1:]):  # type: ignore[index]
            return node.args, node.kwargs
        return (source, [-1, *map(int, after[1:])]), node.kwargs

    def _is_of_other_ranks(self, condition: object) -> bool:
        """Return whether `condition` may mark rows of other ranks' experts: it reads no rows, and is no constant."""
        return not self._from_gemms(condition) and not _is_constant(condition)

    def _from_gemms(self, node: object) -> bool:
        starts = (node,) if isinstance(node, Node) else ()
        before = ancestors(*starts, stop=lambda used: used in self._values or used not in self._region)
        return any(used in self._values for used in before)


def _is_constant(node: object) -> bool:
    """Return whether `node` is computed from constants alone, whose sizes are constants too."""
    before = ancestors(node) if isinstance(node, Node) else ()
    return all(used.op == "get_attr" or (used.op == "call_function" and collective_of(used) is None) for used in before)
