"""What places and sizes a parallel block computes with, and whether its mock runs tried all that these may do.

Contract
    in    a block, its data nodes (passes/data_flow.py), and what the mock runs saw of all others
    out   NotThisForm, naming the node and the constant, for an operation on places or sizes that is not known, for a
          type that cannot hold them exactly, for a constant that more tokens may pass, and for what no run tried

A block that keeps 64 rows for each expert and drops the rest is right on every run with fewer. So whatever could hide a
threshold is refused, or asks for something that the runs must have tried:

    GROWS    is only moved, counted, added up, and compared with what grows too, or with -1, 0 and 1. It is divided by
             the number of experts that each token has, and by nothing else.
    BOUND    is moved, added, and compared with anything.
    CHOSEN   every expert id must have been tried; so functions of one may do what they like, in integers
    truths   of what GROWS or is BOUND must have come out both ways in every node that computes, selects or joins them;
             compared with many constants, for each of these

Floating point numbers and narrow integers must hold what they are given exactly. Mock runs, in float64, do not see it.

Pseudo-code
    for each node of the region, in host order: no constant may meet a dimension that grows (passes/growing_sizes.py)
        where it is no data: its range (passes/value_range.py) from those of its inputs, and what must be tried of it
    after the mock runs: was it (passes/tried_values.py)?
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.exact_types import check_type
from moepass.passes.graph import constant_of, fake_value
from moepass.passes.growing_sizes import (
    CHANGE,
    check_lookup,
    check_sizes,
    dimensions_that_grow,
    grows_in_size,
    size_along,
    structural_numbers,
    token_numbers,
)
from moepass.passes.operations import base_operation, indexed_dimensions, is_mask, named_arguments, operation
from moepass.passes.parallel_match import NotThisForm, ParallelBlock
from moepass.passes.tried_values import TriedValues
from moepass.passes.value_range import (
    ANYTHING,
    COMPARISONS,
    COUNT,
    EMPTY,
    Kind,
    Range,
    computed,
    growing,
    is_decided,
    joined,
    product,
)

# Every mock run has more tokens than this.
MOST_SHIFT = 2

_ONE_SOURCE = {
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "expand", "permute",
    "transpose.int", "t", "slice.Tensor", "select.int", "split.Tensor", "split_with_sizes", "repeat", "flip",
}  # fmt: skip
_ELEMENT_BY_ELEMENT = {
    "clone", "contiguous", "alias", "detach", "wait_tensor", "_local_scalar_dense", "lift_fresh_copy", "_to_copy",
    "convert_element_type",
}  # fmt: skip
# What comes from one of several operands, and what says from which.
_JOINS = {
    "cat": ("tensors",), "stack": ("tensors",), "copy": ("src",), "constant_pad_nd": ("self", "value"),
    "where.self": ("self", "other"), "where.ScalarSelf": ("self", "other"), "where.ScalarOther": ("self", "other"),
    "where.Scalar": ("self", "other"), "masked_fill.Scalar": ("self", "value"), "masked_fill.Tensor": ("self", "value"),
    "index_put": ("self", "values"), "_unsafe_index_put": ("self", "values"), "index_copy": ("self", "source"),
    "scatter.src": ("self", "src"), "scatter.value": ("self", "value"), "slice_scatter": ("self", "src"),
    "select_scatter": ("self", "src"),
}  # fmt: skip
_CHOICES = ("condition", "mask", "indices", "index")
_LOOKUPS = {"index.Tensor", "_unsafe_index.Tensor", "index_select", "gather"}
_PLACED = {"index_put", "_unsafe_index_put", "index_copy", "scatter.src", "scatter.value", "scatter_add", "index_add"}
_SUMS = {"sum", "sum.dim_IntList", "cumsum", "scatter_add", "index_add", "bincount", "histc", "sym_sum"}
_TRUTHS = {
    "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not",
    "bitwise_xor", "any", "all",
}  # fmt: skip
_BOUNDS = {"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "sym_max", "sym_min"}
_DIVISIONS = {"floor_divide", "floordiv"}
_REMAINDERS = {"remainder", "mod"}
_FILLS = {"full": None, "scalar_tensor": None, "new_full": None, "full_like": None, "zeros": 0, "new_zeros": 0,
          "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}  # fmt: skip
_EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
_SIZES = {"sym_size", "sym_numel", "sym_stride"}


class IndexRanges:
    """The ranges of a block's places and sizes, and what its mock runs must try of them. Raises NotThisForm."""

    def __init__(self, block: ParallelBlock, data: set[Node]) -> None:
        self.block = block
        self.ranges: dict[Node, Range] = {}
        self.tried = TriedValues()
        self.structural = structural_numbers(block)
        self.tokens = token_numbers(block)
        self._add_sources()
        for node in block.region:
            if node.op == "call_function":
                check_sizes(node, self.structural, self.tokens)
            if node in data:
                self._check_places(node)
                self._check_factors(node, data)
                continue
            if dimensions_that_grow(node) > 1:
                # Pairs of rows grow as their square: beside what grows as they do, a threshold without a constant.
                raise NotThisForm(f"{node.name} ({node.target}) has more than one dimension that grows; {CHANGE}")
            found = self._range(node)
            if found.kind is Kind.FIXED and not found.empty and not found.uniform and grows_in_size(node):
                found = found.at_least(Kind.BOUND)  # which element has which constant depends on how many there are
            check_type(node, found)
            self.ranges[node] = found
            self._require_both(node, found)

    def observe(self, node: Node, value: Any) -> None:
        """Note what `node` had in a run. Raises NotThisForm where that is memory that nobody has written."""
        if node in self.ranges and not self.ranges[node].empty:
            self.tried.observe(node, value)

    def check(self) -> None:
        """Raises NotThisForm for the first of what the runs had to try and did not."""
        self.tried.check()

    # --------------------------------------------------------------------------------------------------- inputs

    def _add_sources(self) -> None:
        sources, experts = self.block.sources, self.block.experts
        if "ids" in sources:
            self.ranges[sources["ids"]] = Range(0, experts - 1, Kind.CHOSEN, sources["ids"])
            # A graph for no tokens has no ids of its own, and may have those of other ranks.
            if not _has_nothing(sources["ids"]):
                self.tried.require_all(sources["ids"], experts)
        if "counts" in sources:
            slots = fake_value(sources["rows"]).shape[0]
            fixed = self.block.form == "all_to_all_capacity" and isinstance(slots, int)
            self.ranges[sources["counts"]] = Range(0, slots // experts, Kind.BOUND) if fixed else COUNT

    def _of(self, argument: Any) -> Range:
        """The range of an operand: a node, or a number."""
        if isinstance(argument, (bool, int, float)):
            return Range(argument, argument, whole=float(argument).is_integer())
        if isinstance(argument, (list, tuple)):
            return joined(*(self._of(part) for part in argument))
        if not isinstance(argument, Node):
            return EMPTY
        if argument not in self.ranges:
            self.ranges[argument] = self._leaf(argument)
        return self.ranges[argument]

    @staticmethod
    def _leaf(node: Node) -> Range:
        if node.op == "get_attr":
            value = constant_of(node)
            if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel():
                whole = not value.is_floating_point() or bool((value == value.floor()).all())
                return Range(float(value.min()), float(value.max()), whole=whole)
            return ANYTHING
        return _size_range(fake_value(node))

    # --------------------------------------------------------------------------------------------------- ranges

    def _range(self, node: Node) -> Range:
        name, base, arguments = operation(node), base_operation(node), named_arguments(node)
        if base in COMPARISONS:
            return self._compared(node, base)
        if name == "getitem":
            return self._item(node)
        if name in _ELEMENT_BY_ELEMENT:
            return self._of(node.args[0])
        if name in _ONE_SOURCE:
            return self._of(node.args[0]).moved(node)
        if name in ("amax", "amin"):
            return self._of(node.args[0]).at_least(Kind.BOUND)
        if name in _JOINS:
            return self._joined(node, name, arguments)
        if name in _LOOKUPS:
            return self._looked_up(node, arguments)
        if name in _SUMS:
            return self._sum(node, name, arguments)
        if base in _TRUTHS:
            return self._truth(node)
        if base in ("add", "sub"):
            return self._added(node, base)
        if base in ("mul", "neg"):
            return self._multiplied(node, base)
        if base in _BOUNDS:
            return self._bounded(node, base, arguments)
        rounded = base == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if base in _DIVISIONS | _REMAINDERS or rounded:
            return self._divided(node, base)
        return self._made(node, base, arguments)

    def _made(self, node: Node, base: str, arguments: dict[str, Any]) -> Range:
        """Of what has no operands that are places, or puts them in order."""
        if base in _FILLS:
            given = next((arguments[key] for key in ("fill_value", "s") if key in arguments), _FILLS[base])
            return self._of(given).moved(node)
        if base in _EMPTY:
            return EMPTY
        if base in _SIZES:
            return _size_range(fake_value(node))
        if base in ("arange", "iota"):
            return self._counted(node, base, arguments)
        if base in ("all_gather_into_tensor", "all_to_all_single", "all_reduce"):
            given = self._of(node.args[0])
            if given.kind is Kind.CHOSEN:
                self.tried.require_all(node, self.block.experts)
            # What other ranks bring was computed from their tokens.
            return given.moved(node) if given.kind in (Kind.CHOSEN, Kind.BOUND) else growing(given)
        if base == "repeat_interleave":
            return self._repeated(node)
        if base == "sort":
            return self._of(node.args[0]).moved(node)
        if base == "argsort":
            return COUNT
        raise NotThisForm(
            f"{node.name} ({node.target}) is no operation on places or sizes that moepass knows; {CHANGE}"
        )

    def _item(self, node: Node) -> Range:
        source, position = node.args
        is_order = isinstance(source, Node) and base_operation(source) == "sort" and position == 1
        return COUNT if is_order else self._of(source).moved(node)

    def _joined(self, node: Node, name: str, arguments: dict[str, Any]) -> Range:
        if arguments.get("accumulate"):
            raise NotThisForm(f"{node.name} ({node.target}) adds to places; {CHANGE}")
        given = [arguments.get(role, 0) for role in _JOINS[name]]
        flat = [part for each in given for part in (each if isinstance(each, (list, tuple)) else (each,))]
        parts = [part for part in (self._of(each) for each in flat) if not part.empty]
        choices = [self._of(arguments[role]) for role in _CHOICES if role in arguments]
        self._check_places(node)
        if any(part.grows for part in parts):
            for part in parts:
                self._check_constant(node, part)
        found = joined(*parts)
        if found.empty:
            return found
        # An operand is taken element by element, or goes to places of its own.
        by_element = name.startswith(("where", "masked_fill"))
        choice = computed(0, 0, *choices, *(parts if by_element else ()), Range(0, 0))
        # Which of some bounded values it is may depend on what grows; the value is bounded all the same.
        found = found.at_least(choice.kind if any(part.grows for part in parts) else min(choice.kind, Kind.BOUND))
        if found.kind is Kind.CHOSEN:
            return dataclasses.replace(found, lane=choice.lane if by_element else node)
        if len([part for part in parts if part.grows]) > 1:
            found = dataclasses.replace(found, mixed=True)
        return growing(found) if found.grows else found

    def _looked_up(self, node: Node, arguments: dict[str, Any]) -> Range:
        self._check_places(node)
        table, places = self._of(node.args[0]), indexed_dimensions(arguments)
        if table.kind is not Kind.FIXED or table.uniform:
            return table.moved(node)
        kind = max(Kind.BOUND if is_mask(index) else self._of(index).kind for _, index in places)
        if kind <= Kind.CHOSEN and len(places) == 1:
            return dataclasses.replace(table, kind=kind, lane=node if kind is Kind.CHOSEN else None)
        # What a table holds where no run looked is not known.
        for dim, index in places:
            if is_mask(index) or len(places) > 1:
                raise NotThisForm(f"{node.name} ({node.target}) looks up constants in several dimensions; {CHANGE}")
            size = size_along(node, fake_value(node.args[0]).shape, dim)  # type: ignore[arg-type]
            self.tried.require_all(index, int(size))
        return table.at_least(Kind.BOUND)

    def _sum(self, node: Node, name: str, arguments: dict[str, Any]) -> Range:
        self._check_places(node)
        if name in ("bincount", "histc"):
            counted = self._of(node.args[0])
            if counted.kind > Kind.CHOSEN or arguments.get("weights") is not None:
                raise NotThisForm(f"{node.name} ({node.target}) counts what are no expert ids; {CHANGE}")
            return COUNT
        start = self._of(arguments["self"]) if name in ("scatter_add", "index_add") else Range(0, 0)
        if name in ("scatter_add", "index_add"):
            self._check_constant(node, start)
            if arguments.get("alpha", 1) != 1:
                self._refuse_constant(node, "adds a multiple of", arguments["alpha"])
            addends = self._of(arguments.get("src", arguments.get("source")))
        else:
            addends = self._of(node.args[0])
        if addends.empty or start.empty:
            raise NotThisForm(f"{node.name} ({node.target}) adds up memory that nobody has written")
        number = _addends(node, name, arguments)
        if addends.grows and math.isinf(number):
            raise NotThisForm(f"{node.name} ({node.target}) adds up a growing number of what grows itself; {CHANGE}")
        if addends.kind is Kind.FIXED and name in ("sum", "sum.dim_IntList", "cumsum", "sym_sum") and number < math.inf:
            ends = [end * times for end in (addends.low, addends.high) for times in (min(1, number), number)]
            return Range(min(ends), max(ends), whole=addends.whole)
        return COUNT if addends.low >= 0 and start.low >= 0 else ANYTHING

    def _compared(self, node: Node, kind: str) -> Range:
        left, right = self._operands(node)
        self._check_meeting(node, left, right)
        if left.mixed or right.mixed:
            raise NotThisForm(f"{node.name} ({node.target}) compares several sizes at once; compare one by one")
        outcome = is_decided(kind, left, right)
        if outcome is not None:
            return Range(int(outcome), int(outcome))
        found = computed(0, 1, left, right)
        if found.kind > Kind.CHOSEN:
            for place, part in enumerate((left, right)):
                if part.kind is Kind.FIXED and not part.uniform:
                    undecided = _Undecided(kind, place, right if place == 0 else left)
                    self.tried.require_both(node, node.args[place], undecided)  # type: ignore[arg-type]
        return found

    def _truth(self, node: Node) -> Range:
        if fake_value(node).dtype is not torch.bool:
            raise NotThisForm(f"{node.name} ({node.target}) computes with bits of places or sizes; {CHANGE}")
        parts = [self._of(used) for used in node.all_input_nodes]
        if any(part.grows for part in parts):
            raise NotThisForm(f"{node.name} ({node.target}) takes places or sizes for truths; compare them with 0")
        name = base_operation(node)
        if name in ("any", "all"):
            return Range(0, 1).at_least(max(parts[0].kind, Kind.BOUND)) if not parts[0].uniform else parts[0]
        if name.endswith("not"):
            return computed(1 - parts[0].high, 1 - parts[0].low, *parts)
        lows, highs = [part.low for part in parts], [part.high for part in parts]
        if name.endswith("and"):
            return computed(min(lows), min(highs), *parts)
        if name.endswith("xor"):
            return computed(0, 1, *parts)
        return computed(max(lows), max(highs), *parts)

    def _added(self, node: Node, base: str) -> Range:
        left, right = self._operands(node)
        factor: Any = node.kwargs.get("alpha", 1)
        if factor not in (1, -1):
            self._refuse_constant(node, "adds a multiple of", factor)
        self._check_meeting(node, left, right)
        right = right if (factor == 1) == (base == "add") else right.negated()
        found = computed(left.low + right.low, left.high + right.high, left, right)
        if not found.grows:
            return found
        added = [part.low for part in (left, right) if not part.grows and part.uniform]
        constants = [constant for constant in added if abs(constant) not in self.tokens]
        shift = left.shift + right.shift + sum(constants)
        if abs(shift) > MOST_SHIFT:
            self._refuse_constant(node, "adds up to", shift)
        return dataclasses.replace(found, shift=shift)

    def _multiplied(self, node: Node, base: str) -> Range:
        if base == "neg":
            return self._of(node.args[0]).negated()
        left, right = self._operands(node)
        for one, other in ((left, right), (right, left)):
            if one.grows and not (other.small or other.is_constant(*self.structural)):
                if other.kind is Kind.FIXED and other.uniform:
                    self._refuse_constant(node, "multiplies what grows with", other.low)
                raise NotThisForm(
                    f"{node.name} ({node.target}) multiplies what grows with what is no constant; {CHANGE}"
                )
        return product(left, right)

    def _bounded(self, node: Node, base: str, arguments: dict[str, Any]) -> Range:
        if base.startswith("clamp"):
            value, lower, upper = node.args[0], arguments.get("min"), arguments.get("max")
        else:
            # What is not known when the graph is compiled is bounded by what is.
            value, other = sorted(node.args[:2], key=lambda argument: -self._of(argument).kind)
            lower, upper = (other, None) if "max" in base else (None, other)
        found = self._of(value)
        bounds = [self._of(bound) for bound in (lower, upper) if bound is not None]
        low = found.low if lower is None else max(found.low, self._of(lower).low)
        high = found.high if upper is None else min(found.high, self._of(upper).high)
        result = computed(min(low, high), max(low, high), found, *bounds)
        if result.kind > Kind.CHOSEN:
            idle = not found.grows and (result.low, result.high) == (found.low, found.high)
            for bound in bounds:
                if bound.kind is not Kind.FIXED or not (bound.small or (idle and bound.uniform)):
                    self._refuse_constant(node, "bounds a place or a size by", bound.high)
        return result

    def _divided(self, node: Node, base: str) -> Range:
        left, right = self._operands(node)
        if not right.uniform or right.kind is not Kind.FIXED or right.low <= 0 or not right.whole:
            raise NotThisForm(
                f"{node.name} ({node.target}) divides places or sizes by what is no whole constant above 0; {CHANGE}"
            )
        divisor, remains = right.low, base in _REMAINDERS
        if left.kind > Kind.CHOSEN and divisor not in self._divisors(left):
            self._refuse_constant(node, "divides a place or a size by", divisor)
        if remains:
            inside = left.low >= 0 and left.high < divisor
            found = computed(0, divisor - 1, left)
            return left if inside else dataclasses.replace(found, kind=min(found.kind, Kind.BOUND))
        rounds_down = base in _DIVISIONS or node.kwargs.get("rounding_mode") == "floor" or left.low >= 0
        ends = [end / divisor for end in (left.low, left.high)]
        low, high = (end if math.isinf(end) else (math.floor(end) if rounds_down else math.trunc(end)) for end in ends)
        return computed(low, high, left)

    def _divisors(self, value: Range) -> set[int]:
        """What a place may be divided by: the number of experts that each token has."""
        chosen = [int(fake_value(node).shape[-1]) for role, node in self.block.sources.items() if role == "ids"]
        return {1, *chosen} if value.grows else {1}

    def _counted(self, node: Node, base: str, arguments: dict[str, Any]) -> Range:
        if base == "iota":
            start, step, end = node.kwargs["start"], node.kwargs["step"], None
            length = self._of(node.args[0])
            if length.kind is Kind.FIXED and length.uniform and isinstance(start, int) and isinstance(step, int):
                last = start + step * max(0, length.low - 1)
                return Range(min(start, last), max(start, last))
        else:
            start, step, end = arguments.get("start", 0), arguments.get("step", 1), arguments["end"]
            if all(isinstance(part, int) for part in (start, step, end)):
                numbers = range(start, end, step)
                return Range(min(numbers, default=0), max(numbers, default=0))
            length = self._of(end)
        if start != 0 or step != 1:
            raise NotThisForm(
                f"{node.name} ({node.target}) counts from {start} in steps of {step}, which was not tried for every "
                f"size; {CHANGE}"
            )
        if length.kind is Kind.FIXED and length.uniform:
            return Range(0, max(0, length.low - 1))
        return COUNT

    def _repeated(self, node: Node) -> Range:
        """Each place, or each element, as often as counts say: a place among a fixed number must come in some run."""
        if len(node.args) > 1:
            if not all(isinstance(part, Node) for part in node.args[:2]):
                raise NotThisForm(f"{node.name} ({node.target}) repeats by a constant; {CHANGE}")
            values = self._of(node.args[0])
            return values if values.uniform else values.moved(node).at_least(Kind.BOUND)
        size = fake_value(node.args[0]).shape[0]  # type: ignore[arg-type]
        if not isinstance(size, int):
            return COUNT
        self.tried.require_all(node, size)
        return Range(0, max(0, size - 1), Kind.CHOSEN, node)

    # --------------------------------------------------------------------------------------------------- checks

    def _operands(self, node: Node) -> tuple[Range, Range]:
        left, right = (self._of(argument) for argument in node.args[:2])
        if left.empty or right.empty:
            raise NotThisForm(f"{node.name} ({node.target}) computes with memory that nobody has written")
        return left, right

    def _check_meeting(self, node: Node, left: Range, right: Range) -> None:
        if left.grows:
            self._check_constant(node, right)
        if right.grows:
            self._check_constant(node, left)

    def _check_constant(self, node: Node, part: Range) -> None:
        """What meets something that grows must grow as well, or be small."""
        if part.grows or part.small or part.empty or part.is_constant(*self.tokens):
            return
        self._refuse_constant(node, "meets", part.low if abs(part.low) > abs(part.high) else part.high)

    @staticmethod
    def _refuse_constant(node: Node, does: str, constant: float) -> None:
        raise NotThisForm(
            f"{node.name} ({node.target}) {does} the constant {constant:g}, which a run may pass although none that "
            f"was tried did; {CHANGE}"
        )

    def _check_places(self, node: Node) -> None:
        """Places that `node` looks up, or writes to, stay in what it looks up in for every number of tokens."""
        name, arguments = operation(node), named_arguments(node)
        if name not in _LOOKUPS | _PLACED:
            return
        for dim, index in indexed_dimensions(arguments):
            if not is_mask(index):
                check_lookup(node, node.args[0], dim, index, self._of(index))  # type: ignore[arg-type]

    def _check_factors(self, node: Node, data: set[Node]) -> None:
        """Rows are weighed and added up with truths and constants alone: of a number not every value was tried."""
        if base_operation(node) not in ("add", "sub", "mul"):
            return
        for used in node.all_input_nodes:
            if used not in data and self._of(used).kind > Kind.CHOSEN and not self._of(used).small:
                raise NotThisForm(f"{node.name} ({node.target}) computes rows with places or sizes; {CHANGE}")

    def _require_both(self, node: Node, found: Range) -> None:
        truth = found.kind > Kind.CHOSEN and found.small and not found.uniform
        if truth and found.low >= 0 and not _has_nothing(node) and not self.tried.requires_both(node):
            self.tried.require_both(node)


@dataclasses.dataclass(frozen=True)
class _Undecided:
    """For which constants, operand `place` of the comparison `kind` with `other`, it may come out both ways."""

    kind: str
    place: int
    other: Range

    def __call__(self, constants: torch.Tensor) -> torch.Tensor:
        found = []
        for constant in constants.flatten().tolist():
            operands = [Range(constant, constant), self.other]
            found.append(is_decided(self.kind, *(operands if self.place == 0 else operands[::-1])) is None)
        return torch.tensor(found, dtype=torch.bool)


def _has_nothing(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and 0 in [size for size in value.shape if isinstance(size, int)]


def _size_range(size: Any) -> Range:
    if isinstance(size, torch.Tensor):
        return ANYTHING
    return Range(size, size) if isinstance(size, int) else COUNT


def _addends(node: Node, name: str, arguments: dict[str, Any]) -> float:
    """How many numbers go into each that `node` gives; without bound where that is not constant."""
    if name == "sym_sum":
        return len(node.args[0])  # type: ignore[arg-type]
    added = arguments.get("src", arguments.get("source", arguments.get("self")))
    shape = fake_value(added).shape  # type: ignore[arg-type]
    dims = arguments.get("dim")
    if name in ("scatter_add", "index_add") or dims in (None, []):
        dims = range(len(shape))
    sizes = [size_along(node, shape, dim) for dim in (dims if not isinstance(dims, int) else [dims])]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf
