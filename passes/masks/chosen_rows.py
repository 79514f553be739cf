"""Rows that masks of experts select, one mask for each branch of a loop: all pairs of a token and a chosen expert.

    tokens, choices = torch.where(chosen == e)                 chosen [tokens, k]
    choices, tokens = torch.where(one_hot[e])                  one_hot [experts, k, tokens]
    (tokens,) = torch.where((chosen == e).any(-1))             chosen [tokens, k]
    (pairs,) = torch.where(chosen.flatten() == e)              each pair is a token with one expert

A choice is an index among a token's k experts. The host must wait for the number of pairs that each mask selects. But
if the ids come from a top-k over all experts of the loop, each pair is selected by one mask, tokens · k pairs in total.
A mask [k, tokens] lists the pairs of an expert in another order than the sort by expert; so all lists of a branch must
use the same kind of mask, and the branch must sum its results by token.
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

aten = torch.ops.aten

# Types that hold every expert id.
_ID_TYPES = (torch.int64, torch.int32)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Expert ids [tokens, k] of a top-k over `experts`, k different ones for each token; or its flat ids [pairs]."""

    ids: Node
    experts: int

    @property
    def k(self) -> int:
        shape = fake_value(self.ids).shape
        return int(shape[1]) if len(shape) == 2 else 1


@dataclasses.dataclass(frozen=True)
class ExpertMask:
    """Mask of ids that are `expert`: [tokens, k], [k, tokens] if it `is_transposed`, or [tokens] with any such id."""

    chosen: Chosen
    expert: int
    is_transposed: bool


@dataclasses.dataclass(frozen=True)
class SortedPairs:
    """Pairs [tokens · k] in the order of experts: tokens, choices, and indices before the sort; `ends` [experts]."""

    tokens: Node
    choices: Node
    order: Node
    ends: Node

    @classmethod
    def of(cls, chosen: Chosen, writer: GraphWriter) -> SortedPairs:
        ids, k = writer.cast(chosen.ids, torch.int64), chosen.k
        device = fake_value(ids).device
        experts, order = writer.sort(writer.viewed(ids, [writer.product(writer.size(ids, 0), k)]))
        tokens = writer.emit(aten.div.Tensor_mode, order, k, rounding_mode="floor")
        choices = writer.emit(aten.sub.Tensor, order, writer.emit(aten.mul.Tensor, tokens, k))
        ends = writer.emit(aten.searchsorted.Tensor, experts, writer.arange(chosen.experts, device), right=True)
        return cls(tokens, choices, order, ends)


def selected_column(node: Node) -> tuple[ExpertMask, bool] | None:
    """Return the mask, and whether `node` lists the tokens that it selects; else it lists their choices."""
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.unbind.int):
        unbind, column = node.args
        assert isinstance(unbind, Node)
        arguments = all_arguments(unbind)
        indices, dim = arguments["self"], arguments["dim"]
    elif is_call(node, aten.select.int):
        arguments = all_arguments(node)
        indices, dim, column = arguments["self"], arguments["dim"], arguments["index"]
    else:
        return None
    if not is_call(indices, aten.nonzero.default) or dim % 2 != 1:
        return None
    mask = expert_mask(cast("Node", indices.args[0]))
    if mask is None:
        return None
    columns = fake_value(indices).shape[1]
    if columns == 1:
        return mask, True
    return mask, (cast("int", column) % columns == 0) ^ mask.is_transposed


def expert_mask(node: Node) -> ExpertMask | None:
    """Return `node` as a mask of the pairs of one expert, or of their tokens; None if it is no such mask."""
    steps: list[tuple[str, Node]] = []
    while True:
        if not isinstance(fake_value(node), torch.Tensor) or node.op != "call_function":
            return None
        base, arguments = base_operation(node), all_arguments(node)
        if has_trait(node, Trait.PERMUTE) or base in ("any", "select", "squeeze"):
            steps.append((base, node))
        elif base in ("ne", "gt"):
            if arguments["other"] != 0:
                return None
        elif not has_trait(node, Trait.CAST, Trait.COPY) and not is_full_slice(node):
            break
        node = node.all_input_nodes[0]
    if base != "eq":
        return None
    left, right = arguments["self"], arguments["other"]
    expert: int | None = None
    if isinstance(right, int) and not isinstance(right, bool):
        chosen, expert = chosen_by_top_k(left), right
    else:
        chosen = _one_hot(left, right)
    if chosen is None:
        return None
    # Each dimension of the mask as a dimension of [tokens, k, experts].
    dims = [0, 1] if fake_value(chosen.ids).dim() == 2 else [0]
    dims += [2] if expert is None else []
    for base, step in reversed(steps):
        arguments = all_arguments(step)
        if base == "select":
            dim = arguments["dim"] % len(dims)
            if dims.pop(dim) != 2 or arguments["index"] < 0:
                return None
            expert = arguments["index"]
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
    """Return the dimension that `any(dim)` or `squeeze(dim)` removes, or None if it removes none or several."""
    arguments = all_arguments(node)
    dims = arguments.get("dim")
    (dim,) = dims if isinstance(dims, (list, tuple)) and len(dims) == 1 else (dims,)
    before, after = fake_value(arguments["self"]).dim(), fake_value(node).dim()
    return dim % before if isinstance(dim, int) and after == before - 1 else None


def is_full_slice(node: Node) -> bool:
    """Return whether `node` is a slice of all elements."""
    if not is_call(node, aten.slice.Tensor):
        return False
    arguments = all_arguments(node)
    return arguments["start"] in (None, 0) and arguments["end"] in (None, sys.maxsize) and arguments["step"] == 1


def _one_hot(left: object, right: object) -> Chosen | None:
    """Return the ids of `ids.unsqueeze(-1) == arange(experts)`, with operands in either order, or None."""
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
    """Return `node` as the ids [tokens, k] or [tokens · k] of a top-k of scores [tokens, experts], or None."""
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
    arguments = all_arguments(cast("Node", node.args[0]))
    shape = fake_value(arguments["self"]).shape
    is_known = isinstance(shape[-1], int) and isinstance(arguments["k"], int)
    return Chosen(node, int(shape[1])) if len(shape) == 2 and is_known and arguments["dim"] % 2 == 1 else None


def masks_of_experts(nodes: Sequence[Node]) -> list[ExpertMask] | None:
    """Return the mask that selects what each of `nodes` lists, or None if one of them lists other values."""
    columns = [selected_column(node) for node in nodes]
    return None if None in columns else [mask for mask, _ in cast("list[tuple[ExpertMask, bool]]", columns)]


def masks_of_all_experts(nodes: Sequence[Node]) -> tuple[Chosen, bool, bool] | None:
    """Return the ids, whether the masks are transposed, and whether `nodes` list tokens.

    None if `nodes`, one of each branch, do not list one mask of each expert, in order.
    """
    columns = [selected_column(node) for node in nodes]
    first = columns[0]
    if first is None or any(column is None for column in columns):
        return None
    mask, are_tokens = first
    if mask.chosen.experts != len(nodes):
        return None
    expected = [(dataclasses.replace(mask, expert=expert), are_tokens) for expert in range(len(nodes))]
    return (mask.chosen, mask.is_transposed, are_tokens) if columns == expected else None
