"""Follow gathered values [tokens, experts] through slices of experts, transposes, flattening and casts."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.collectives import Collective
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import all_arguments, permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import first_inputs

# A slice up to the end has at least this end.
_END = 2**31


class Order(enum.Enum):
    """The order of the pairs of token and expert in memory."""

    BY_TOKEN = "[tokens, experts]"
    BY_EXPERT = "[experts, tokens]"
    FLAT = "[experts · tokens]"


@dataclasses.dataclass(frozen=True)
class MaskColumns:
    """Columns `first` to `last` (exclusive) of a gathered value [`tokens`, experts], and the dtypes of its casts."""

    tokens: sympy.Expr
    first: int
    last: int
    order: Order = Order.BY_TOKEN
    types: tuple[torch.dtype, ...] = ()

    @staticmethod
    def all_of(gathered: Node) -> MaskColumns:
        tokens, experts = fake_value(gathered).shape
        return MaskColumns(size_expression(tokens), 0, int(experts))

    @property
    def experts(self) -> int:
        return self.last - self.first

    @property
    def dim_of_tokens(self) -> int:
        return 0 if self.order is Order.BY_TOKEN else 1

    def through(self, node: Node) -> MaskColumns | None:
        """Return the columns in the result of `node`, whose first input has these; None for other operations."""
        if has_trait(node, Trait.COPY, Trait.CAST):
            before, after = fake_value(node.all_input_nodes[0]).dtype, fake_value(node).dtype
            return self if before == after else dataclasses.replace(self, types=(*self.types, after))
        if has_trait(node, Trait.RESHAPE):
            return self._reshaped(fake_value(node))
        if self.order is Order.FLAT:
            return None
        if has_trait(node, Trait.PERMUTE):
            transposed = Order.BY_EXPERT if self.order is Order.BY_TOKEN else Order.BY_TOKEN
            return dataclasses.replace(self, order=transposed) if permutation(node) == [1, 0] else self
        return self._sliced(all_arguments(node)) if base_operation(node) == "slice" else None

    def _reshaped(self, value: torch.Tensor) -> MaskColumns | None:
        """Return these columns in the shape of `value`, or None if that mixes tokens and experts."""
        sizes = [size_expression(size) for size in value.shape]
        by_expert = [sympy.Integer(self.experts), self.tokens]
        if self.order is Order.BY_TOKEN:
            return self if sizes == by_expert[::-1] else None
        if sizes == [sympy.expand(self.tokens * self.experts)]:
            return dataclasses.replace(self, order=Order.FLAT)
        return dataclasses.replace(self, order=Order.BY_EXPERT) if sizes == by_expert else None

    def _sliced(self, arguments: Mapping[str, Any]) -> MaskColumns | None:
        start, end, step = arguments["start"] or 0, arguments["end"], arguments["step"]
        if step != 1 or not isinstance(start, int) or start < 0:
            return None
        if arguments["dim"] % 2 == self.dim_of_tokens:
            is_all = end is None or (isinstance(end, int) and end >= _END) or size_expression(end) == self.tokens
            return self if start == 0 and is_all else None
        stop = self.experts if end is None else end
        if not isinstance(stop, int) or not start < min(stop, self.experts):
            return None
        last = self.first + min(stop, self.experts)
        return dataclasses.replace(self, first=self.first + start, last=last)


def columns_of(node: Node, gathers: Mapping[Node, Collective]) -> tuple[Collective, MaskColumns] | None:
    """Return the gather whose columns `node` has, and these columns, or None; `gathers` maps results to gathers."""
    *steps, node = first_inputs(node, lambda step: step not in gathers and step.op == "call_function")
    if node not in gathers:
        return None
    columns: MaskColumns | None = MaskColumns.all_of(node)
    for step in reversed(steps):
        columns = None if columns is None else columns.through(step)
    return None if columns is None else (gathers[node], columns)
