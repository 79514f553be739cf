"""Let the mock runs choose how rows are padded, where a block rounds the rows of each expert up.

Contract
    in    a block that is ready to run, and its data nodes
    out   a copy of it, in which numbers that were rounded up are any that are no less (ranges/any_padding.py); the same
          block where it rounds nothing up

What a node computes of one number of rows alone, by constants, is a function that can be looked at for all numbers
(ranges/step_functions.py). Where it is never less than the number, and never more by more than some constant, the copy
has any function of that kind in its place. The number of all rows, those of padding included, may be an upper bound: it
has room for as many times the padding of an expert as the model's own has. So the model's functions are among those
that the runs choose from, and what is proved of the copy is proved of the block.

Pseudo-code
    for each node that the result needs, from the result back:
        a function of one number, or of the sum of some sizes, that pads it: nothing behind it is needed but that number
    the unit: the most rows of padding for one expert; every function pads by so many units, at least and at most
    copy the block, with any_padding in the place of these nodes, and symbols for sizes with padding
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch.fx import Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.node_arguments import named_arguments
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.operations import CASTS, COPIES, base_operation
from moepass.passes.parallel.mock.mock_run import MockBlock
from moepass.passes.parallel.mock.own_symbol import AS_CAPTURED
from moepass.passes.parallel.mock.small_copy import BlockCopier, SmallCopy
from moepass.passes.parallel.mock.small_guess import Guess, SmallMock
from moepass.passes.parallel.ranges.any_padding import PADDING_KEY, AnyPadding, any_padding
from moepass.passes.parallel.ranges.growing_sizes import grows_in_size
from moepass.passes.parallel.ranges.step_functions import StepFunction

_INTEGERS = (torch.int64, torch.int32)
_SAME = CASTS | COPIES
_QUOTIENTS = {"floor_divide", "floordiv", "div"}
_REMAINDERS = {"remainder", "mod"}


def with_free_padding(captured: SmallCopy) -> SmallCopy:
    """The block that was `captured`, or its copy."""
    found = _Paddings(captured.mock).found
    return _PaddingCopier(captured.mock, found).copy(captured.data) if found else captured


@dataclasses.dataclass(frozen=True)
class _Padded:
    """A node that is `function` of the sum of `bases`, which it pads."""

    bases: tuple[Node, ...]
    function: StepFunction

    @property
    def added(self) -> tuple[int, int] | None:
        """How much is added, at least and at most; None where that is no padding."""
        more = self.function.plus(StepFunction.identity(), -1)
        bounds = None if more is None else more.bounds
        # One more is known to every other part of the proof.
        return bounds if bounds is not None and bounds[0] >= 0 and bounds[1] > 1 else None


class _Paddings:
    """What a block pads: the outermost nodes that do, from its result back."""

    def __init__(self, mock: MockBlock) -> None:
        block = mock.block
        self._region = set(block.region)
        self._stops = {*block.sources.values(), *block.expert_tensors}
        self._functions: dict[Node, _Padded] = {}
        self.found: dict[Node, tuple[tuple[Node, ...], AnyPadding]] = {}
        padded = self._outermost([block.sink, mock.result])
        if not padded:
            return
        unit = self._unit(padded)
        numbers: dict[bytes, int] = {}
        for node, each in padded.items():
            least, most = each.added or (0, 0)
            number = numbers.setdefault(each.function.key, len(numbers))
            self.found[node] = (each.bases, AnyPadding(least // unit, -(-most // unit), number, each.function))

    def _outermost(self, ends: Sequence[Node]) -> dict[Node, _Padded]:
        padded: dict[Node, _Padded] = {}
        pending, seen = list(ends), set[Node]()
        while pending:
            node = pending.pop()
            if node in seen or node in self._stops:
                continue
            seen.add(node)
            each = self._function(node) if node in self._region and _is_number(node) else None
            if each is not None and self._is_padding(node, each):
                padded[node] = each
                pending += each.bases
            else:
                pending += node.all_input_nodes
        return padded

    @staticmethod
    def _is_padding(node: Node, found: _Padded) -> bool:
        """Sizes, or counts of a fixed number: the ids of experts are as many as there are rows."""
        if found.added is None or isinstance(fake_value(node), torch.SymInt):
            return found.added is not None
        least, most = found.added
        return least < most and not grows_in_size(node)

    @staticmethod
    def _unit(padded: dict[Node, _Padded]) -> int:
        """The most rows of padding for one expert: of what is padded with none for some numbers, or by tensors."""
        bounds = {node: each.added or (0, 0) for node, each in padded.items()}
        of_experts = [most for least, most in bounds.values() if least == 0]
        of_tensors = [most for node, (_, most) in bounds.items() if isinstance(fake_value(node), torch.Tensor)]
        return max(of_experts or of_tensors or [most for _, most in bounds.values()])

    # ---------------------------------------------------------------------------------------------------- functions

    def _function(self, node: Node) -> _Padded:
        """What `node` is a function of: itself where that is not known."""
        if node not in self._functions:
            itself = _Padded((node,), StepFunction.identity())
            self._functions[node] = itself  # nothing is computed of itself
            is_inside = node in self._region and node not in self._stops and _is_number(node)
            found = self._computed(node) if is_inside else None
            self._functions[node] = itself if found is None or not _is_held(node, found.function) else found
        return self._functions[node]

    def _computed(self, node: Node) -> _Padded | None:
        base, given = base_operation(node), named_arguments(node)
        if base == "sym_sum":
            return self._sum(node.args[0])  # type: ignore[arg-type]
        if any(not self._is_alike(node, used) for used in node.all_input_nodes):
            return None
        if base in _SAME:
            return self._of(node.args[0])
        if base in ("add", "sub", "rsub"):
            return self._sum_of_two(node, base)
        operands = list(node.args[:2])
        if base == "mul" and len(operands) == 2:
            number, other = operands if isinstance(operands[0], int) else operands[::-1]
            return self._changed(other, lambda function: function.times(number)) if _is_constant(number) else None
        if base == "neg":
            return self._changed(operands[0], lambda function: function.times(-1))
        if base in ("clamp_min", "clamp") and given.get("max") is None and _is_constant(given.get("min")):
            return self._changed(operands[0], lambda function: function.at_least(given["min"]))
        if len(operands) == 2 and _is_constant(operands[1]):
            return self._quotient(node, base, *operands)
        return None

    def _quotient(self, node: Node, base: str, value: Any, number: Any) -> _Padded | None:
        rounding = node.kwargs.get("rounding_mode", "floor" if base != "div" else None)
        if base in _QUOTIENTS and number > 0 and rounding in ("floor", "trunc"):
            return self._changed(
                value, lambda function: function.divided(number) if _rounds_down(function, rounding) else None
            )
        is_mask = base == "bitwise_and" and number < 0 and (-number & (-number - 1)) == 0
        if (base in _REMAINDERS and number > 0) or is_mask:

            def without(function: StepFunction) -> StepFunction | None:
                quotient = function.divided(abs(number))
                if quotient is None:
                    return None
                whole = quotient.times(abs(number))
                return whole if is_mask else function.plus(whole, -1)

            return self._changed(value, without)
        return None

    def _sum_of_two(self, node: Node, base: str) -> _Padded | None:
        left, right = node.args[:2]
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            return None
        if base == "rsub":
            left, right = right, left
        return self._sum([left, right], -1 if base in ("sub", "rsub") else 1)

    def _sum(self, parts: Sequence[Any], sign: int = 1) -> _Padded | None:
        """The sum of `parts`, all but the first of them times `sign`: of one number, or of sizes as they are."""
        total = StepFunction.constant(0)
        bases: tuple[Node, ...] | None = None
        for place, part in enumerate(parts):
            found, factor = self._of(part), 1 if place == 0 else sign
            if found is None:
                return None
            if found.bases and bases is not None and bases != found.bases:
                # Of several sizes only the sum itself is known, and constants beside it.
                if not (factor == 1 and _is_shifted(found.function) and _is_shifted(total) and _are_sizes(found.bases)):
                    return None
                bases = tuple(sorted((*bases, *found.bases)))
                shift = found.function.plus(StepFunction.identity(), -1)
                assert shift is not None
                summed = total.plus(shift)
            else:
                bases = found.bases or bases
                summed = total.plus(found.function, factor)
            if summed is None:
                return None
            total = summed
        return None if bases is None else _Padded(bases, total)

    def _changed(self, value: Any, change: Any) -> _Padded | None:
        found = self._of(value)
        function = None if found is None or not found.bases else change(found.function)
        return None if found is None or function is None else _Padded(found.bases, function)

    def _of(self, argument: Any) -> _Padded | None:
        if isinstance(argument, Node):
            return self._function(argument)
        return _Padded((), StepFunction.constant(argument)) if _is_constant(argument) else None

    @staticmethod
    def _is_alike(node: Node, used: Node) -> bool:
        """Whether each element of `node` may be computed from the one in the same place of `used`."""
        value, given = fake_value(node), fake_value(used)
        if not isinstance(value, torch.Tensor):
            return isinstance(given, torch.SymInt)
        is_same = isinstance(given, torch.Tensor) and str(given.shape) == str(value.shape)
        return is_same and given.dtype in _INTEGERS


def _is_held(node: Node, function: StepFunction) -> bool:
    """Whether the type of `node` holds the function of all numbers of rows, and of int32 what it holds itself."""
    value = fake_value(node)
    times = 1 if isinstance(value, torch.Tensor) and value.dtype is torch.int32 else 2**13
    return abs(function.slope) <= times * function.period


def _is_number(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and value.dtype in _INTEGERS)


def _is_constant(argument: Any) -> bool:
    return isinstance(argument, int) and not isinstance(argument, bool)


def _rounds_down(function: StepFunction, rounding: Any) -> bool:
    return rounding == "floor" or function.is_nonnegative


def _is_shifted(function: StepFunction) -> bool:
    """True for a number, and a constant more or less."""
    more = function.plus(StepFunction.identity(), -1)
    bounds = None if more is None else more.bounds
    return bounds is not None and bounds[0] == bounds[1]


def _are_sizes(nodes: Sequence[Node]) -> bool:
    return all(isinstance(fake_value(node), torch.SymInt) for node in nodes)


class _PaddingCopier(BlockCopier):
    def __init__(self, mock: MockBlock, found: dict[Node, tuple[tuple[Node, ...], AnyPadding]]) -> None:
        super().__init__(SmallMock(mock, AS_CAPTURED), Guess())
        self._block, self._result, self._found = mock.block, mock.result, found
        # Sizes with padding: what stands for a quotient in them, and those that are what they pad and a constant.
        self._of_quotients: dict[Any, Any] = {}
        self._of_constants: dict[Any, tuple[Any, Any]] = {}
        self._expressions: dict[Any, Any] = {}
        for node, (bases, _) in found.items():
            value = fake_value(node)
            if isinstance(value, torch.SymInt):
                self._add_size(value.node.expr, sympy.Add(*(size_expression(fake_value(base)) for base in bases)))

    def _add_size(self, padded: Any, plain: Any) -> None:
        """Let a symbol of its own stand for how much more than `plain` the size `padded` is."""
        number = len(self._of_quotients) + len(self._of_constants)
        symbol = sympy.Symbol(f"padding_{number}", integer=True, nonnegative=True)
        padded, plain = sympy.expand(padded), sympy.expand(plain)
        quotients = padded.atoms(Application) - plain.atoms(Application)
        if len(quotients) == 1:
            (quotient,) = quotients
            times = padded.coeff(quotient)
            self._of_quotients.setdefault(quotient, (plain + symbol - (padded - times * quotient)) / times)
        elif not quotients:
            self._of_constants.setdefault(padded, (plain, symbol))

    def calls(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Without those that only compute padding."""
        needed: set[Node] = set()
        pending = [self._block.sink, self._result]
        stops = {*self._block.sources.values(), *self._block.expert_tensors}
        while pending:
            node = pending.pop()
            if node in needed or node in stops:
                continue
            needed.add(node)
            pending += self._found[node][0] if node in self._found else node.all_input_nodes
        return [node for node in nodes if node in needed]

    def _call(self, node: Node) -> None:
        if node not in self._found:
            super()._call(node)
            return
        bases, padding = self._found[node]
        counts = [self._copied(base) for base in bases]
        padded = self._graph.call_function(any_padding, (counts,))
        padded.meta = {**node.meta, "val": self._value(node), PADDING_KEY: padding}
        self._nodes[node] = padded

    def expression(self, size: torch.SymInt) -> Any:
        expression = size.node.expr
        if expression not in self._expressions:
            found = sympy.expand(expression.xreplace(self._of_quotients))
            for padded, (plain, symbol) in self._of_constants.items():
                constant, others = (found - padded).as_coeff_Add()
                if abs(constant) <= 1 and not others.free_symbols & plain.free_symbols:
                    found = sympy.expand(others + constant + plain + symbol)
            self._expressions[expression] = found
        return self._expressions[expression]
