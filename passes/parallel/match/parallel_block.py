"""A block of expert parallelism, as a record, and the expert tensors that belong to it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import torch
from torch.fx import Node

from moepass.passes.blocks.computed_weights import is_computed
from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.blocks.expert_gemms import ExpertGemm
from moepass.passes.blocks.expert_stack import is_expert_stack
from moepass.passes.graph.collectives import Collective
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ir.protocol import Group
from moepass.passes.ops.arguments import indexed_dimensions, named_arguments
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.near_experts import is_size

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ParallelBlock:
    """A block of expert parallelism.

    `sources` are the values that the local form of the block starts from, by role:
        all_to_all              `rows`, sorted by expert, and `counts`, rows by expert over all ranks
        all_to_all_slots        `rows`, as many for each expert, all of which are computed
        both of these           `travels_0`, ..: what is exchanged row by row beside the rows
        all_gather, all_reduce  `hidden`, `ids`, and `weights` of outputs, or `travels_0` where all_gather brings them
                                to rows between the GEMMs
    `sink` is the value that the local form gives. `region` is what lies between, in host order.
    `expert_tensors` are this rank's: the weights of the GEMMs, then their biases.
    `bounds` says which experts each rank holds. If the block `drops`, some of its `ids` may be `experts`: none of them.
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
        """Over all ranks."""
        return self.bounds[-1]

    @property
    def id_values(self) -> int:
        """How many values its `ids` may have."""
        return self.experts + self.drops

    @property
    def travelling(self) -> tuple[Node, ...]:
        """What is exchanged beside the rows, or gathered beside the tokens, something for each row."""
        return tuple(node for role, node in self.sources.items() if role.startswith("travels_"))

    @property
    def dispatches(self) -> tuple[Collective, ...]:
        """The exchanges of the rows and of what travels with them."""
        return self.exchanges[-2 - len(self.travelling) : -1]

    @property
    def own_experts(self) -> range:
        return range(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])

    @property
    def down(self) -> ExpertGemm:
        return self.gemms[-1]


@dataclasses.dataclass(frozen=True)
class Bias:
    """`sum` adds to each output of a GEMM the row of `tensor` that an index says."""

    sum: Node
    tensor: Node


def bias_after(gemm: Node) -> Bias | None:
    """What is added right after `gemm`, if that is looked up row by row in what is made of parameters alone."""
    for user in gemm.users:
        if is_call(user, aten.add.Tensor):
            for other in user.args:
                tensor = looked_up_table(other)
                if tensor is not None:
                    return Bias(user, tensor)
    return None


def looked_up_table(lookup: object) -> Node | None:
    """The parameter, or what is computed of parameters alone, whose first dimension `lookup` looks rows up in."""
    if not isinstance(lookup, Node) or not is_call(lookup, aten.index.Tensor, aten.index_select.default):
        return None
    given = named_arguments(lookup)
    table, in_front = given["self"], [dim for dim, _ in indexed_dimensions(given)] == [0]
    if not in_front:
        return None
    is_parameter = table.op == "placeholder" or is_expert_stack(table)
    return table if is_parameter or is_computed(table) else None


def expert_tensors(match: BlockMatch, sources: set[Node], place: dict[Node, int]) -> tuple[Node, ...]:
    """The weights of the GEMMs, their biases, and tables between them: what each expert of this rank has one of.

    Told by what reads them. Activations of as many tokens as this rank has experts have the same shape.
    """
    found = dict.fromkeys(gemm.weights for gemm in match.gemms)
    for gemm in match.gemms:
        bias = bias_after(gemm.node)
        if bias is None or bias.tensor in sources:
            continue
        value = fake_value(bias.tensor)
        if value.is_floating_point() and value.dim() >= 2 and is_size(value.shape[0], match.record.experts):
            found.setdefault(bias.tensor)
    found |= dict.fromkeys(_tables_between(match, sources, place))
    return tuple(found)


def _tables_between(match: BlockMatch, sources: set[Node], place: dict[Node, int]) -> Iterator[Node]:
    """What the activation function looks up for the expert of each row, as scales or the weights of norms."""
    *ups, down = match.gemms
    stops = {up.node for up in ups}
    first = min(place[node] for node in stops)

    def is_behind(used: Node) -> bool:
        return isinstance(fake_value(used), torch.Tensor) and place[used] > first

    def is_end(node: Node) -> bool:
        return node in stops or looked_up_table(node) is not None

    for table in map(looked_up_table, ancestors(down.activations, follow=is_behind, stop=is_end)):
        if table is not None and table not in sources:
            value = fake_value(table)
            if value.is_floating_point() and is_size(value.shape[0], match.record.experts):
                yield table


def check_bounds(bounds: tuple[int, ...]) -> None:
    """Every rank must come to the same decision, and one without experts does not see what experts compute."""
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            raise NotThisForm(
                f"rank {rank} holds none of its {bounds[-1]} experts, so it cannot see what they do; spread them over "
                f"at most {bounds[-1]} ranks"
            )
