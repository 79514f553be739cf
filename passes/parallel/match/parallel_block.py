"""Record of an expert-parallel block, its number of tokens, and the search for its expert tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import sympy
import torch
from torch.fx import Node

from moepass.passes.blocks.computed_weights import is_computed
from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.blocks.expert_gemms import ExpertGemm
from moepass.passes.blocks.expert_stack import is_expert_stack
from moepass.passes.graph.collectives import Collective
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call, is_float
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.protocol import Group
from moepass.passes.ops.arguments import indexed_dimensions, named_arguments
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.near_experts import MOST_NODES, is_size

aten = torch.ops.aten

# Meta key of the gather of a rewritten block: its number of tokens, or None if that is unknown.
ROUTED_TOKENS_KEY = "moepass_routed_tokens"


@dataclasses.dataclass(frozen=True)
class ParallelBlock:
    """An expert-parallel block.

    Attributes:
        form: "all_to_all", "all_to_all_slots", "all_gather" or "all_reduce"
        bounds: rank r holds experts `bounds[r]` to `bounds[r + 1]`
        expert_tensors: this rank's weights of the GEMMs, then their biases
        sources: the inputs of the local form, by role
            all_to_all: `rows`, sorted by expert, and `counts`, the number of rows for each expert of all ranks
            all_to_all_slots: `rows`, equally many for each expert, all of which are computed
            both of these: `travels_0`, ..: values that travel with the rows, one for each row
            all_gather, all_reduce: `hidden`, `ids`, and `weights` of the outputs; `travels_0` instead of `weights` if
                the weights are gathered and multiplied between the GEMMs
        sink: the result, which the result of the local form replaces
        region: the nodes from the sources to the sink, in host order
        drops: whether an id may be the number of experts, for a dropped pair
    """

    form: str
    name: str
    group_name: str
    group: Group
    bounds: tuple[int, ...]
    gemms: tuple[ExpertGemm, ...]
    expert_tensors: tuple[Node, ...]
    sources: Mapping[str, Node]
    sink: Node
    exchanges: tuple[Collective, ...]
    region: tuple[Node, ...]
    drops: bool = False

    @property
    def experts(self) -> int:
        """The number of experts of all ranks."""
        return self.bounds[-1]

    @property
    def id_values(self) -> int:
        """The number of values that `ids` may have."""
        return self.experts + self.drops

    @property
    def travelling(self) -> tuple[Node, ...]:
        """The sources that travel with the rows or are gathered with the tokens."""
        return tuple(node for role, node in self.sources.items() if role.startswith("travels_"))

    @property
    def dispatches(self) -> tuple[Collective, ...]:
        """The exchanges of the rows and of the values that travel with them."""
        return self.exchanges[-2 - len(self.travelling) : -1]

    @property
    def top_k(self) -> int:
        """The number of experts per token; 1 if the rows are pairs of a token and an expert already."""
        return int(fake_value(self.sources["ids"]).shape[1]) if "ids" in self.sources else 1

    @property
    def expert_counts(self) -> set[int]:
        """The numbers of experts that a rank may hold."""
        return {stop - start for start, stop in itertools.pairwise(self.bounds)}

    @property
    def own_experts(self) -> range:
        return range(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])

    @property
    def down(self) -> ExpertGemm:
        return self.gemms[-1]


def routed_tokens(block: ParallelBlock) -> sympy.Expr | None:
    """Return the number of this rank's tokens that the block routes, as a size of the graph, or None if unknown."""
    if "ids" in block.sources:
        return size_expression(fake_value(block.sources["ids"]).shape[0])
    for node in ancestors(block.sources.get("counts", block.sources["rows"]), most=MOST_NODES):
        if is_call(node, aten.topk.default):
            *leading, top_k = (size_expression(size) for size in fake_value(node)[0].shape)
            tokens = sympy.Mul(*leading)
            rows = size_expression(fake_value(block.sources["rows"]).shape[0])
            # With a fixed capacity, rows are slots: some may be empty, and some tokens may be dropped.
            is_plausible = block.form == "all_to_all_slots" or sympy.expand(rows - tokens * top_k) == 0
            return tokens if is_plausible else None
    return None


@dataclasses.dataclass(frozen=True)
class Bias:
    """A sum of the outputs of a GEMM and looked-up rows of `tensor`."""

    sum: Node
    tensor: Node


def bias_after(gemm: Node) -> Bias | None:
    """Return the bias that a user of `gemm` adds, or None if no user adds looked-up rows of parameters."""
    for user in gemm.users:
        if is_call(user, aten.add.Tensor):
            for addend in user.args:
                tensor = looked_up_table(addend)
                if tensor is not None:
                    return Bias(user, tensor)
    return None


def looked_up_table(lookup: object) -> Node | None:
    """Return the parameter, or the value computed from parameters alone, whose rows `lookup` selects, or None."""
    if not isinstance(lookup, Node) or not is_call(lookup, aten.index.Tensor, aten.index_select.default):
        return None
    arguments = named_arguments(lookup)
    table, selects_rows = arguments["self"], [dim for dim, _ in indexed_dimensions(arguments)] == [0]
    is_parameter = table.op == "placeholder" or is_expert_stack(table)
    return table if selects_rows and (is_parameter or is_computed(table)) else None


def expert_tensors(match: BlockMatch, sources: set[Node]) -> tuple[Node, ...]:
    """Return the weights and biases of the GEMMs and the tables between them, identified by their readers."""
    biases = [bias.tensor for gemm in match.gemms if (bias := bias_after(gemm.node)) is not None]
    matrices = [tensor for tensor in biases if fake_value(tensor).dim() >= 2]
    by_expert = (
        table
        for table in (*matrices, *_tables_between(match))
        if table not in sources and is_float(table) and is_size(fake_value(table).shape[0], match.record.experts)
    )
    return tuple(dict.fromkeys((*(gemm.weights for gemm in match.gemms), *by_expert)))


def _tables_between(match: BlockMatch) -> Iterator[Node]:
    """Return the tables that the activation function indexes by expert, such as scales or weights of norms."""
    *ups, down = match.gemms
    up_nodes = {up.node for up in ups}

    def follows_ups(used: Node) -> bool:
        return isinstance(fake_value(used), torch.Tensor) and used > min(up_nodes)

    def is_end(node: Node) -> bool:
        return node in up_nodes or looked_up_table(node) is not None

    tables = map(looked_up_table, ancestors(down.activations, follow=follows_ups, stop=is_end))
    return (table for table in tables if table is not None)


def check_bounds(bounds: tuple[int, ...]) -> None:
    """Raise NotThisForm if a rank holds no expert: it cannot see the experts, and ranks must decide alike."""
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            raise NotThisForm(
                f"rank {rank} holds none of its {bounds[-1]} experts, so it cannot see what they do; spread them over "
                f"at most {bounds[-1]} ranks"
            )
