"""Ranges of the nodes of a block, as far as they are known, and checks of the constants and indices that they meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import constant_of, fake_value
from moepass.passes.ops.arguments import indexed_dimensions, is_mask, named_arguments
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.parallel.ranges.growing_sizes import (
    grows_in_size,
    refuse,
    size_along,
    structural_numbers,
    token_numbers,
)
from moepass.passes.parallel.ranges.tried_values import TriedValues
from moepass.passes.parallel.ranges.value_range import ANYTHING, COUNT, EMPTY, Range, joined

# Every mock run has more tokens than this.
MOST_SHIFT = 2
# A row index is a few offsets plus an index within one expert, so it may count the tokens a few times.
_LEAST_FACTOR = 6


class KnownRanges:
    """Ranges of a block's nodes, and the values that its mock runs must try. Its methods raise NotThisForm."""

    def __init__(self, block: ParallelBlock) -> None:
        self.block = block
        self.ranges: dict[Node, Range] = {}
        self.tried = TriedValues()
        self.structural = structural_numbers(block)
        self.tokens = token_numbers(block)

    def range_of(self, argument: Any) -> Range:
        """Return the range of an operand: a node, a number, or a list of these."""
        if isinstance(argument, (bool, int, float)):
            return Range(argument, argument, integral=float(argument).is_integer())
        if isinstance(argument, (list, tuple)):
            return joined(*map(self.range_of, argument))
        if not isinstance(argument, Node):
            return EMPTY
        if argument not in self.ranges:
            self.ranges[argument] = _leaf_range(argument)
        return self.ranges[argument]

    def counted(self, node: Node, values: Range, shift: float, factor: float) -> Range:
        """Return `values` with this `shift` and `factor`. Raises NotThisForm if one is too large."""
        if abs(shift) > MOST_SHIFT:
            refuse_constant(node, "adds up to", shift)
        if factor > max(_LEAST_FACTOR, 2 * max(self.structural)):
            refuse_constant(node, "counts the tokens as often as", factor)
        return dataclasses.replace(values, shift=shift, factor=factor)

    def is_of_tokens(self, number: float) -> bool:
        """Return whether `number` is a multiple of this rank's tokens, which are fixed in this graph."""
        slots = {tokens // self.block.experts for tokens in self.tokens if self.block.form == "all_to_all_slots"}
        return any(number == tokens * times for tokens in (*self.tokens, *slots) for times in self.structural)

    def check_constant(self, node: Node, operand: Range) -> None:
        """Check that `operand`, which meets a growing one, grows too or is small."""
        if not (operand.grows or operand.small or operand.empty or operand.is_constant(*self.tokens)):
            refuse_constant(node, "meets", max(operand.high, operand.low, key=abs))

    def check_constants(self, node: Node, *operands: Range) -> None:
        """Check that `operands` that meet a growing one grow too or are small."""
        if any(operand.grows for operand in operands):
            for operand in operands:
                self.check_constant(node, operand)

    def check_indices(self, node: Node, *, is_data: bool = False) -> None:
        """Check that the indices of a lookup or write stay within its tensor for every number of tokens."""
        if not has_trait(node, Trait.LOOKUP, Trait.WRITE, Trait.WRITE_SUM):
            return
        for dim, index in indexed_dimensions(named_arguments(node)):
            if is_mask(index):
                continue
            values = self.range_of(index)
            size = size_along(node, fake_value(node.args[0]).shape, dim)  # type: ignore[arg-type]
            if not isinstance(size, int):
                if not values.grows and not values.small:
                    refuse(node, f"looks up {values.low:g} to {values.high:g} in a growing dimension")
            elif is_data and grows_in_size(index) and self.is_of_tokens(size):
                continue  # a selection of a fixed number of rows
            elif values.grows and grows_in_size(index):
                refuse(node, f"looks up growing indices in a dimension of {size}")
            elif values.grows and not self.is_of_tokens(elements := fake_value(index).numel()):
                refuse(node, f"takes {elements} of {size} elements in an untried order")


# The rules for the ranges of results, by the traits, or the names with or without overload, of operators.
Rules = tuple[tuple[tuple[Trait | str, ...], Callable[[Node, KnownRanges], Range]], ...]


def _leaf_range(node: Node) -> Range:
    """Return the range of a constant, or of a size; any number for another tensor."""
    if node.op == "get_attr":
        constant = constant_of(node)
        if type(constant) in (torch.Tensor, torch.nn.Parameter) and constant.numel():
            integral = not constant.is_floating_point() or bool((constant == constant.floor()).all())
            return Range(float(constant.min()), float(constant.max()), integral=integral)
        return ANYTHING
    size = fake_value(node)
    if isinstance(size, torch.Tensor):
        return ANYTHING
    return Range(size, size) if isinstance(size, int) else COUNT


def refuse_constant(node: Node, does: str, constant: float) -> NoReturn:
    """Raise NotThisForm because `node` `does` something with `constant`, which may be a threshold."""
    refuse(node, f"{does} the constant {constant:g}, which no sample run passed")


def refuse_unknown(node: Node, known: KnownRanges) -> NoReturn:
    """Raise NotThisForm because the range of the result of `node` is unknown."""
    refuse(node, "is an unknown operation on indices or sizes")
