"""Masks [tokens, experts] of the experts that a router has chosen for each token, and the ids that they come from."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments, fill_number, permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import first_inputs, origin

aten = torch.ops.aten

# Operators that do not change 0 and 1.
_KEEPS_MASK = (Trait.COPY, Trait.CAST)


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask of k different `ids` of each token, or of some if `is_partial`; [experts, tokens] if `is_by_expert`."""

    ids: Node
    is_by_expert: bool
    is_partial: bool = False


def chosen_experts(node: Node) -> Mask | None:
    """Return `node` as a mask of all chosen experts, or None if that is not known."""
    is_by_expert = False
    while True:
        base, arguments = base_operation(node), all_arguments(node)
        if has_trait(node, Trait.PERMUTE) and fake_value(node).dim() == 2:
            is_by_expert ^= permutation(node) == [1, 0]
        elif base == "ne":
            if arguments["other"] != 0:
                return None
        elif not has_trait(node, *_KEEPS_MASK):
            break
        node = node.all_input_nodes[0]
    ids = _ids_of_mask(node)
    return None if ids is None or not _are_different(ids) else Mask(ids, is_by_expert)


def gathered_mask(node: Node) -> Collective | None:
    """Return the collective of `node` if it gathers a mask [tokens, experts] of chosen experts, or None."""
    collective = collective_of(node)
    if collective is None or collective.kind != "all_gather" or fake_value(collective.input).dim() != 2:
        return None
    mask = at_most_chosen(collective.input)
    return None if mask is None or mask.is_by_expert else collective


def at_most_chosen(node: Node) -> Mask | None:
    """Return `node` as a mask of chosen experts that may leave out some, such as those beyond a capacity, or None."""
    mask = chosen_experts(node)
    if mask is not None or fake_value(node).dtype is not torch.bool:
        return mask
    shape = str(fake_value(node).shape)
    if has_trait(node, *_KEEPS_MASK):  # integers other than 0 become True
        node = node.all_input_nodes[0]
    # A product of 0 and an infinite number is not 0.
    if not has_trait(node, Trait.AND) or fake_value(node).is_floating_point():
        return None
    for operand in node.all_input_nodes:
        mask = chosen_experts(operand) if str(fake_value(operand).shape) == shape else None
        if mask is not None:
            return dataclasses.replace(mask, is_partial=True)
    return None


def _ids_of_mask(node: Node) -> Node | None:
    """Return the ids [tokens, k] at which `node` [tokens, experts] is 1, if it is 0 elsewhere."""
    if node.op != "call_function" or not is_call(node, aten.scatter.value):
        return None
    arguments = all_arguments(node)
    is_zero = fill_number(origin(arguments["self"], *_KEEPS_MASK)) == 0
    ids = arguments["index"]
    if not is_zero or arguments["dim"] % 2 != 1 or arguments["value"] != 1 or fake_value(ids).dim() != 2:
        return None
    rows = [str(fake_value(tensor).shape[0]) for tensor in (node, ids)]
    return ids if rows[0] == rows[1] else None  # otherwise, the last tokens have no experts


def _are_different(ids: Node) -> bool:
    """Return whether `ids` are those of a top-k of each row."""
    *steps, ids = first_inputs(ids, lambda step: has_trait(step, *_KEEPS_MASK))
    if any(fake_value(step).dtype not in (torch.int64, torch.int32) for step in steps):
        return False  # rounding may make two ids equal
    if base_operation(ids) != "getitem" or ids.args[1] != 1:
        return False
    chosen = ids.args[0]
    assert isinstance(chosen, Node)
    return base_operation(chosen) == "topk" and fake_value(ids).dim() == 2 and all_arguments(chosen)["dim"] % 2 == 1
