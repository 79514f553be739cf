"""Read a segment of experts as a program for the rows of one expert.

A grouped GEMM over all experts writes its complete result to memory, and the next operation reads it back. Most
segments of experts can instead run expert by expert, a few rows at a time, so that the values between the GEMMs stay in
the cache. This is possible if every value has one row for each pair of a token and an expert, and rows are independent.

    rows       values with one row per pair, sorted by expert; all outputs of the segment are of this kind
    returns    outputs whose rows are brought back to the order of tokens: the program ends with the rows before that,
               and has the target position of each row
    fixed      values that are the same for all rows: weights and their views, tables, the end of each expert's rows
    GEMMs      the grouped GEMMs; one expert's rows times one expert's weights
    row work   all other operations, which work on single rows, grouped between the GEMMs
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.blocks.hoist_token_return import TokenReturn, token_return
from moepass.passes.graph.nodes import fake_value, graph_inputs, is_call
from moepass.passes.graph.source_lines import named
from moepass.passes.ir.plan import dtype_name
from moepass.passes.ir.segment import EXPERTS, PART_KEY
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import Trait, has_trait, is_pointwise, is_view
from moepass.passes.ops.walk import view_source

aten = torch.ops.aten

# [Empirical] Rows that go through an expert together on a CPU. Their values stay in the cache (1 MB each at a width of
# 512 in fp32), and GEMMs of 512 rows are as fast as larger ones: 256, 512 and 1024 rows differ by less than 2 %.
CHUNK_ROWS = 512


class NotByExpertError(Exception):
    """Raised if `node` prevents a segment from running expert by expert.

    The message says why; like reasons of refusals, it names nodes as `name (operator)`.
    """

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


@dataclasses.dataclass(frozen=True)
class GroupedGemm:
    """`rows` [n, in] times `weights` [E, in, out], by expert."""

    node: Node
    rows: Node
    weights: Node


@dataclasses.dataclass(frozen=True)
class RowWork:
    """Operations on single rows, in order. `inputs` are read from outside, `outputs` are read after it."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class ExpertProgram:
    """The computation of a segment for the rows of one expert.

    Attributes:
        ends: value [E] with the end of each expert's rows
        row_inputs: inputs of the segment that have rows
        fixed: values that the steps read completely
        steps: GEMMs and row work, in order
        orders: for each of `outputs` the value [n] with the target row of each row; None if rows stay in order
    """

    ends: Node
    row_inputs: tuple[Node, ...]
    fixed: tuple[Node, ...]
    steps: tuple[GroupedGemm | RowWork, ...]
    outputs: tuple[Node, ...]
    orders: tuple[Node | None, ...]


def expert_gemms_in(segment: GraphModule) -> list[Node]:
    """Return the GEMMs of `segment` with expert weights, grouped or not."""
    return [node for node in segment.graph.nodes if is_grouped_gemm(node) or node.meta.get(PART_KEY) == EXPERTS]


def read_program(segment: GraphModule) -> ExpertProgram:
    """Return the program of a segment with expert GEMMs. Raises NotByExpertError if it cannot run expert by expert."""
    graph = segment.graph
    experts = expert_gemms_in(segment)
    for node in experts:
        if not is_grouped_gemm(node):
            reason = (
                f"{named(node)} multiplies by the weights of experts but is not a grouped GEMM; in transformers, call "
                'set_experts_implementation("grouped_mm")'
            )
            raise NotByExpertError(node, reason)
    gemms = [_gemm(node) for node in experts]
    (first, ends), *later = gemms
    for gemm, offsets in later:
        if offsets is not ends:
            reason = f"{named(gemm.node)} and {named(first.node)} group rows by different offsets"
            raise NotByExpertError(gemm.node, reason)
    if ends.op != "placeholder":
        # Its computation would have to be separated from row work.
        raise NotByExpertError(ends, f"it computes where each expert's rows end ({named(ends)})")
    results = cast("Sequence[Node]", graph.output_node().args[0])
    returns = {node: back for node in results if (back := _return_by_output(node)) is not None}
    rows = _values_with_rows(graph, [gemm for gemm, _ in gemms], ends, returns)
    outputs: list[Node] = []
    orders: list[Node | None] = []
    for node in results:
        back = returns.get(node)
        if (node if back is None else back.rows) not in rows or not _is_dense(node):
            raise NotByExpertError(node, f"its output {named(node)} is not one dense row for each pair")
        outputs.append(node if back is None else back.rows)
        orders.append(None if back is None else back.order)
    steps = tuple(_steps(graph, rows, {gemm.node: gemm for gemm, _ in gemms}))
    read = [used for step in steps if isinstance(step, RowWork) for used in step.inputs if used not in rows]
    fixed = dict.fromkeys([*(gemm.weights for gemm, _ in gemms), *read])
    for node in fixed:
        _check_fixed(node)
    row_inputs = tuple(node for node in graph_inputs(graph) if node in rows)
    return ExpertProgram(ends, row_inputs, tuple(fixed), steps, tuple(outputs), tuple(orders))


def _return_by_output(node: Node) -> TokenReturn | None:
    """Return the token return of the output `node`, or None if something else reads its rows or their inverse order."""
    back = token_return(node)
    if back is None or back.order.op != "placeholder" or len(node.users) != 1:
        return None
    return back if all(len(used.users) == 1 for used in (back.rows, *back.inverse_nodes)) else None


def _gemm(node: Node) -> tuple[GroupedGemm, Node]:
    arguments = {**dict(zip(("rows", "weights", "ends"), node.args, strict=False)), **node.kwargs}
    extra = [value for value in [*node.args[3:], *node.kwargs.values()] if value is not None]
    operands = [value for value in arguments.values() if isinstance(value, Node)]
    if len(operands) != 3 or len(node.args) < 3 or extra:
        raise NotByExpertError(node, f"{named(node)} does more than multiply rows by the weights of their experts")
    rows, weights, ends = operands
    value, result = fake_value(rows), fake_value(node)
    if value.dim() != 2:
        raise NotByExpertError(node, f"{named(node)} reads rows of {value.dim()} dimensions, not [rows, width]")
    if value.dtype != result.dtype:
        reason = f"{named(node)} reads rows in {dtype_name(value.dtype)} and returns {dtype_name(result.dtype)}"
        raise NotByExpertError(node, reason)
    return GroupedGemm(node, rows, weights), ends


def _values_with_rows(
    graph: Graph, gemms: list[GroupedGemm], ends: Node, returns: Mapping[Node, TokenReturn]
) -> set[Node]:
    """Return all values with one row for each pair. Raises NotByExpertError if one of them depends on other rows."""
    count = fake_value(gemms[0].rows).shape[0]
    by_node = {gemm.node: gemm for gemm in gemms}
    rows: set[Node] = set()
    # The number of experts may equal the number of rows, so weights are excluded explicitly.
    weights = {view_source(gemm.weights) for gemm in gemms}
    returning = set(returns).union(*(back.inverse_nodes for back in returns.values()))
    for node in graph.nodes:
        if node in returning:
            continue
        if node.op == "placeholder":
            if node is not ends and node not in weights and _has_rows(node, count) and not _is_only_looked_up(node):
                rows.add(node)
        elif node.op == "call_function" and any(used in rows for used in node.all_input_nodes):
            if node in by_node:
                if by_node[node].rows not in rows or by_node[node].weights in rows:
                    raise NotByExpertError(node, f"{named(node)} does not multiply rows by weights")
            elif not _is_row_work(node, rows):
                raise NotByExpertError(node, f"rows may depend on each other in {named(node)}")
            if not all(_same_size(size, count) for size in _row_counts(node)):
                raise NotByExpertError(node, f"{named(node)} changes the number of rows")
            rows.add(node)
    return rows


def _has_rows(node: Node, count: object) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and value.dim() > 0 and _same_size(value.shape[0], count)


def _same_size(left: object, right: object) -> bool:
    # Compared as text: comparing symbolic sizes would add a guard.
    return str(left) == str(right)


def _row_counts(node: Node) -> list[object]:
    value = fake_value(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item.shape[0] if isinstance(item, torch.Tensor) and item.dim() > 0 else None for item in values]


def _is_only_looked_up(node: Node) -> bool:
    return bool(node.users) and all(is_call(user, aten.index.Tensor) and user.args[0] is node for user in node.users)


def _is_row_work(node: Node, rows: set[Node]) -> bool:
    if is_call(node, operator.getitem):
        return True
    if is_call(node, aten.index.Tensor):
        # A lookup of rows of a table by one index for each row.
        table, (chosen, *more) = cast("tuple[Node, Sequence[Node]]", node.args)
        is_vector = chosen in rows and fake_value(chosen).dim() == 1 and fake_value(chosen).dtype != torch.bool
        return table not in rows and not more and is_vector
    is_split = is_call(node, aten.split.Tensor, aten.split_with_sizes.default)
    if is_split or has_trait(node, Trait.SLICE) or is_call(node, aten.unsqueeze.default):
        dim = all_arguments(node)["dim"]
        dims = fake_value(node.all_input_nodes[0]).dim() + is_call(node, aten.unsqueeze.default)
        return isinstance(dim, int) and dim % dims > 0 and not _reads_sizes(node)
    has_one_result = isinstance(fake_value(node), torch.Tensor)
    return is_pointwise(node) and has_one_result and not _reads_sizes(node) and _is_aligned(node, rows)


def _reads_sizes(node: Node) -> bool:
    return any(not isinstance(fake_value(used), torch.Tensor) for used in node.all_input_nodes)


def _is_aligned(node: Node, rows: set[Node]) -> bool:
    """Return whether inputs with rows have them in the same dimension, and all other inputs are equal for all rows."""
    dims = fake_value(node).dim()
    for used in node.all_input_nodes:
        value = fake_value(used)
        if used in rows:
            if value.dim() != dims:
                return False
        elif value.dim() == dims and not _same_size(value.shape[0], 1):
            return False
    return True


def _is_dense(node: Node) -> bool:
    value = fake_value(node)
    expected = 1
    for size, stride in zip(reversed(value.shape[1:]), reversed(value.stride()[1:]), strict=True):
        if not _same_size(stride, expected):
            return False
        expected *= size
    return _same_size(value.stride()[0], expected)


def _check_fixed(node: Node) -> None:
    """Raise NotByExpertError for a value that takes work, which would run without a compiler."""
    if not isinstance(fake_value(node), torch.Tensor):
        raise NotByExpertError(node, f"its rows read the size {named(node)}")
    if node.op == "placeholder":
        return
    is_view_of_one = is_view(node) and len(node.all_input_nodes) == 1
    if not (is_view_of_one or _is_scalar_work(node)) or _reads_sizes(node):
        raise NotByExpertError(node, f"it computes {named(node)}, which all rows read")
    for used in node.all_input_nodes:
        _check_fixed(used)


def _is_scalar_work(node: Node) -> bool:
    """Return whether `node` computes a single number, such as the factor of an activation, which takes no time."""
    return fake_value(node).dim() == 0 and (is_pointwise(node) or constant_number(node) is not None)


def constant_number(node: Node) -> float | bool | None:
    """Return the number in a constant scalar tensor, such as a decomposition's fill value; else None."""
    value = node.args[0] if is_call(node, aten.scalar_tensor.default) else None
    if not isinstance(value, (bool, int, float)):
        return None
    dtype = fake_value(node).dtype
    # The tensor's dtype may change the number: 1.5 becomes 1 in an integer tensor.
    return bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)


def _steps(graph: Graph, rows: set[Node], gemms: dict[Node, GroupedGemm]) -> Iterator[GroupedGemm | RowWork]:
    """Yield GEMMs and row work; row work is delayed until a GEMM needs it."""
    work: list[Node] = []
    for node in graph.nodes:
        if node not in rows or node.op == "placeholder":
            continue
        if node not in gemms:
            work.append(node)
            continue
        if gemms[node].rows in work:
            yield _row_work(work)
            work = []
        yield gemms[node]
    if work:
        yield _row_work(work)


def _row_work(nodes: list[Node]) -> RowWork:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    for node in outputs:
        if not isinstance(fake_value(node), torch.Tensor):
            raise NotByExpertError(node, f"the results of {named(node)} are read on both sides of a GEMM")
    return RowWork(tuple(nodes), inputs, outputs)
