"""The rows that masks of experts select, one mask for each branch of a loop: all pairs of a token and an expert of it.

    tokens_of, places_of = torch.where(chosen == e)              chosen [tokens, k]
    places_of, tokens_of = torch.where(one_hot[e])               one_hot [experts, k, tokens]
    (tokens_of,) = torch.where((chosen == e).any(-1))            as the first
    (pairs_of,) = torch.where(chosen.flatten() == e)             each pair counts as a token with one expert

How many pairs each mask selects, only a run tells, and the host waits for it. But together they are all tokens · k
pairs, where the ids come from a top-k over as many experts as the loop has: then each pair is selected by one mask.
Sorted by expert, the pairs of one expert lie in another order than in its mask, if that has tokens in its last
dimension; so every branch has to read all that it selects by one kind of mask, and to add its results up by token.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Sequence
from typing import cast

import torch
from torch.fx import Node

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments, is_arange, permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import first_inputs

aten, prims = torch.ops.aten, torch.ops.prims

# Types that hold every expert id.
_ID_TYPES = (torch.int64, torch.int32)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Expert ids [tokens, k] as a top-k over `experts` gives them, different for each token; [pairs] for one each."""

    ids: Node
    experts: int

    @property
    def k(self) -> int:
        shape = fake_value(self.ids).shape
        return int(shape[1]) if len(shape) == 2 else 1


@dataclasses.dataclass(frozen=True)
class ExpertMask:
    """Where `chosen` has `expert`: a mask [tokens, k], or [k, tokens] if it `is_turned`; or of its tokens [tokens]."""

    chosen: Chosen
    expert: int
    is_turned: bool


@dataclasses.dataclass(frozen=True)
class SortedPairs:
    """All pairs of a token and an expert, sorted by expert: the token of each, its place among the token's k, and its
    place among all pairs in the order of tokens; int64 [tokens · k]. `ends` [experts] is where each expert's end.
    """

    tokens: Node
    places: Node
    order: Node
    ends: Node

    @classmethod
    def of(cls, chosen: Chosen, writer: GraphWriter) -> SortedPairs:
        ids = chosen.ids
        device = fake_value(ids).device
        if fake_value(ids).dtype is not torch.int64:
            ids = writer.emit(prims.convert_element_type.default, ids, torch.int64)
        k = chosen.k
        count = writer.product(writer.size(ids, 0), k)
        both = writer.emit(aten.sort.stable, writer.viewed(ids, [count]), stable=True)
        experts, order = writer.getitem(both, 0), writer.getitem(both, 1)
        tokens = writer.emit(aten.div.Tensor_mode, order, k, rounding_mode="floor")
        places = writer.emit(aten.sub.Tensor, order, writer.emit(aten.mul.Tensor, tokens, k))
        ends = writer.emit(aten.searchsorted.Tensor, experts, writer.arange(chosen.experts, device), right=True)
        return cls(tokens, places, order, ends)


def selected_column(node: Node) -> tuple[ExpertMask, bool] | None:
    """The mask whose places `node` lists, and whether it has the token of each, else its place among the token's k."""
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.unbind.int):
        unbind, column = node.args
        assert isinstance(unbind, Node)
        given = all_arguments(unbind)
        places, dim = given["self"], given["dim"]
    elif is_call(node, aten.select.int):
        given = all_arguments(node)
        places, dim, column = given["self"], given["dim"], given["index"]
    else:
        return None
    if not is_call(places, aten.nonzero.default) or dim % 2 != 1:
        return None
    mask = expert_mask(cast("Node", places.args[0]))
    if mask is None:
        return None
    columns = fake_value(places).shape[1]
    if columns == 1:
        return mask, True
    return mask, (cast("int", column) % columns == 0) ^ mask.is_turned


def expert_mask(node: Node) -> ExpertMask | None:
    """`node` as a mask of the pairs that chose one expert, or of their tokens."""
    steps: list[tuple[str, Node]] = []
    while True:
        if not isinstance(fake_value(node), torch.Tensor) or node.op != "call_function":
            return None
        base, given = base_operation(node), all_arguments(node)
        if has_trait(node, Trait.PERMUTE) or base in ("any", "select", "squeeze"):
            steps.append((base, node))
        elif base in ("ne", "gt"):
            if given["other"] != 0:
                return None
        elif not has_trait(node, Trait.CAST, Trait.COPY) and not is_whole_slice(node):
            break
        node = node.all_input_nodes[0]
    if base != "eq":
        return None
    left, right = given["self"], given["other"]
    expert: int | None = None
    if isinstance(right, int) and not isinstance(right, bool):
        chosen, expert = chosen_by_top_k(left), right
    else:
        chosen = _one_hot(left, right)
    if chosen is None:
        return None
    # Of the mask, as dimensions of [tokens, k, experts].
    dims = [0, 1] if fake_value(chosen.ids).dim() == 2 else [0]
    dims += [2] if expert is None else []
    for base, step in reversed(steps):
        given = all_arguments(step)
        if base == "select":
            dim = given["dim"] % len(dims)
            if dims.pop(dim) != 2 or given["index"] < 0:
                return None
            expert = given["index"]
        elif base in ("any", "squeeze"):
            removed = _removed_dimension(step)
            if removed is None or dims.pop(removed) != 1:
                return None
        else:
            dims = [dims[dim] for dim in permutation(step)]
    if expert is None or sorted(dims) not in ([0], [0, 1]) or not 0 <= expert < chosen.experts:
        return None
    return ExpertMask(chosen, expert, dims == [1, 0])


def _removed_dimension(node: Node) -> int | None:
    """The one dimension that `node` removes, as `any(dim)` and `squeeze(dim)` do; None where that is not plain."""
    given = all_arguments(node)
    over = given.get("dim")
    (dim,) = over if isinstance(over, (list, tuple)) and len(over) == 1 else (over,)
    before, after = fake_value(given["self"]).dim(), fake_value(node).dim()
    return dim % before if isinstance(dim, int) and after == before - 1 else None


def is_whole_slice(node: Node) -> bool:
    """True for a slice of everything."""
    if not is_call(node, aten.slice.Tensor):
        return False
    given = all_arguments(node)
    return given["start"] in (None, 0) and given["end"] in (None, sys.maxsize) and given["step"] == 1


def _one_hot(left: object, right: object) -> Chosen | None:
    """`ids.unsqueeze(-1) == arange(experts)`, whichever of them stands first."""
    for ids, numbers in ((left, right), (right, left)):
        if not (isinstance(ids, Node) and isinstance(numbers, Node)):
            return None
        dims = fake_value(ids).dim()
        if not is_call(ids, aten.unsqueeze.default) or all_arguments(ids)["dim"] % dims != dims - 1:
            continue
        chosen = chosen_by_top_k(all_arguments(ids)["self"])
        if chosen is not None and is_arange(numbers) and fake_value(numbers).shape[0] >= chosen.experts:
            return chosen
    return None


def chosen_by_top_k(node: object) -> Chosen | None:
    """`node` as the experts that a top-k chooses in each row of scores [tokens, experts].

    Ids [tokens, k], or all of them in the order of tokens, [tokens · k], each of which counts as a token then.
    """
    if not isinstance(node, Node):
        return None
    *casts, node = first_inputs(node, lambda step: has_trait(step, Trait.CAST, Trait.COPY))
    if node.op != "call_function" or any(
        getattr(fake_value(step), "dtype", None) not in _ID_TYPES for step in (*casts, node)
    ):
        return None
    if fake_value(node).dim() == 1 and has_trait(node, Trait.RESHAPE):
        source = chosen_by_top_k(node.args[0])
        return Chosen(node, source.experts) if source is not None else None
    if not is_call(node, operator.getitem) or node.args[1] != 1 or not is_call(node.args[0], aten.topk.default):
        return None
    given = all_arguments(cast("Node", node.args[0]))
    shape = fake_value(given["self"]).shape
    is_known = isinstance(shape[-1], int) and isinstance(given["k"], int)
    return Chosen(node, int(shape[1])) if len(shape) == 2 and is_known and given["dim"] % 2 == 1 else None


def masks_of_experts(nodes: Sequence[Node]) -> list[ExpertMask] | None:
    """The masks whose places `nodes` list, of whichever experts; None where one of them lists those of no mask."""
    found = [selected_column(node) for node in nodes]
    return None if None in found else [mask for mask, _ in cast("list[tuple[ExpertMask, bool]]", found)]


def masks_of_all_experts(nodes: Sequence[Node]) -> tuple[Chosen, bool, bool] | None:
    """What `nodes`, one in each branch, select together: whose choices, by which kind of mask (turned or not), and
    whether they list tokens. None where they are not one mask for each expert, in order.
    """
    found = [selected_column(node) for node in nodes]
    first = found[0]
    if first is None or any(one is None for one in found):
        return None
    mask, are_tokens = first
    if mask.chosen.experts != len(nodes):
        return None
    expected = [(dataclasses.replace(mask, expert=expert), are_tokens) for expert in range(len(nodes))]
    return (mask.chosen, mask.is_turned, are_tokens) if found == expected else None
