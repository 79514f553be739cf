"""What places and sizes a parallel block computes with, and whether its mock runs went beyond every constant in it.

Contract
    in    a block, its data nodes (passes/data_flow.py), and what the mock runs saw of all others
    out   NotThisForm, naming the node, for an operation on places or sizes that is not known, for a type that cannot
          count far, and for a constant that a real run may pass although no mock run did

A block that keeps 64 rows for each expert and drops the rest is right on every run with fewer. So a value that may
grow with the tokens must have been on both sides of every constant that it meets, clearly. Values that cannot grow, as
expert ids, must have come as far as they can, or past the constant.

Pseudo-code
    for each node of the region that is no data, in host order:
        its range, from the ranges of its inputs
        each constant that it compares with, adds, divides by or cuts at: demand that the other operand was seen there
    after the mock runs, look at each demand
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph import constant_of, fake_value, is_call
from moepass.passes.parallel_match import NotThisForm, ParallelBlock

aten = torch.ops.aten

# The mock runs compare loads of ranks up to this ratio.
MOST_RATIO = 4
# Beyond this a bound of a slice means the end, whatever the size.
_END = 2**31

_MOVES = {
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "slice",
    "select", "split", "split_with_sizes", "getitem", "clone", "copy", "contiguous", "alias", "detach", "repeat",
    "flip", "cat", "stack", "constant_pad_nd", "index", "_unsafe_index", "index_select", "gather", "index_put",
    "_unsafe_index_put", "index_copy", "scatter", "slice_scatter", "select_scatter", "where", "masked_fill",
    "_to_copy", "convert_element_type", "wait_tensor", "all_gather_into_tensor", "all_to_all_single",
    "_local_scalar_dense", "amax", "amin", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "sym_max",
    "sym_min", "max", "min", "floor", "ceil", "trunc", "all_reduce", "lift_fresh_copy",
}  # fmt: skip
_SUMS = {"sum", "cumsum", "scatter_add", "index_add", "bincount", "histc", "sym_sum"}
_TRUTHS = {
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "any", "all",
}  # fmt: skip
_ARITHMETIC = {"add", "sub", "mul", "div", "floor_divide", "floordiv", "remainder", "mod", "neg"}
_CONSTANTS = {
    "full", "scalar_tensor", "zeros", "ones", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like",
    "full_like",
}  # fmt: skip
# These compare operands, or bring them together so that a later comparison with 0 is one with the constant.
_MEETING = {
    "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "minimum", "maximum", "sym_max", "sym_min", "max", "min",
}  # fmt: skip
_DIVISIONS = {"div", "floor_divide", "floordiv", "remainder", "mod"}
# A wider count would not fit; a mock run, in float64, does not see it.
_NARROW = {torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16}
# What mock runs fill memory with that is made empty.
UNWRITTEN = {dtype: torch.iinfo(dtype).max for dtype in (torch.int32, torch.int64)}


@dataclasses.dataclass(frozen=True)
class Range:
    """From `low` to `high`; `chosen` where a value depends on an expert id at most, and not on how many there are."""

    low: float
    high: float
    chosen: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def empty(self) -> bool:
        return self.low > self.high

    def negated(self) -> Range:
        return Range(-self.high, -self.low, self.chosen)

    def joined(self, other: Range) -> Range:
        chosen = (self.chosen or self.empty) and (other.chosen or other.empty)
        return Range(min(self.low, other.low), max(self.high, other.high), chosen)


EMPTY = Range(math.inf, -math.inf)
TRUTH = Range(0, 1)
COUNT = Range(0, math.inf)
ANYTHING = Range(-math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class Demand:
    """`value` meets `constant` in `node`: runs must have seen it beyond. A divisor must have been reached twice."""

    node: Node
    value: Node
    constant: float
    divides: bool = False


class IndexRanges:
    """The ranges of a block's places and sizes, and the demands on its mock runs. Raises NotThisForm."""

    def __init__(self, block: ParallelBlock, data: set[Node]) -> None:
        self.block = block
        self.ranges: dict[Node, Range] = {}
        self.demands: list[Demand] = []
        self.narrow: set[Node] = set()
        # The least and the largest value of each node in all mock runs.
        self.seen: dict[Node, Range] = {}
        for role in block.sources.keys() & {"ids", "counts"}:
            self.ranges[block.sources[role]] = self._source(role)
        for node in block.region:
            if is_call(node, aten.slice.Tensor, aten.constant_pad_nd.default):
                self._check_cut(node)
            if node in data or (any(used in data for used in node.all_input_nodes) and _kind(node) not in _SHAPES):
                continue
            self.ranges[node] = self._range(node)
            self._check_type(node)

    def critical_ids(self) -> list[int]:
        """All expert ids, those first at which the block may change its mind: borders of ranks, and its constants."""
        bounds, start, experts = self.block.bounds, self.block.own_experts.start, self.block.experts
        near = {0, *bounds}
        for node in self.block.region:
            for constant in _integers((node.args, node.kwargs)):
                near.update((constant, start + constant))
        every = dict.fromkeys(number + step for number in sorted(near) for step in (-1, 0, 1))
        return [number for number in {**every, **dict.fromkeys(range(experts))} if 0 <= number < experts]

    # ------------------------------------------------------------------------------------------------------ runs

    def observe(self, node: Node, value: Any) -> None:
        """Note what `node` had in a run. Raises NotThisForm where that is still what the run fills empty memory with.

        What nobody wrote would pass for a place or size beyond every constant.
        """
        if node not in self.ranges or self.ranges[node].empty:
            return
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:
                return
            if value.dtype in UNWRITTEN and bool((value == UNWRITTEN[value.dtype]).any()):
                raise NotThisForm(f"{node.name} ({node.target}) holds memory that nobody has written")
            found = Range(float(value.min()), float(value.max()))
        elif isinstance(value, (int, float)):
            found = Range(value, value)
        else:
            return
        self.seen[node] = self.seen.get(node, EMPTY).joined(found)

    def check(self) -> None:
        """Raises NotThisForm for the first constant that no run went beyond."""
        for demand in self.demands:
            known, seen = self.ranges[demand.value], self.seen.get(demand.value, EMPTY)
            constant = demand.constant
            if constant < 0:
                known, seen, constant = known.negated(), seen.negated(), -constant
            if known.chosen:
                # It was chosen on both sides of every constant, as far as it can be: see `critical_ids`.
                if not demand.divides and (known.high < constant or known.low > constant):
                    continue
                beyond = min(known.high, constant)
            elif math.isinf(known.high):
                beyond = 2 * constant
            else:
                # A graph of fixed sizes may not come as far; the one that follows it for other sizes does.
                beyond = max(constant, min(known.high, constant + 1))
            if seen.high < beyond or not (seen.low < constant or known.low >= constant):
                raise NotThisForm(
                    f"{demand.node.name} ({demand.node.target}) meets the constant {demand.constant:g}, which a run "
                    "may pass although none that was tried did"
                )

    # ---------------------------------------------------------------------------------------------------- ranges

    def _source(self, role: str) -> Range:
        if role == "ids":
            return Range(0, self.block.experts - 1, chosen=True)
        slots = fake_value(self.block.sources["rows"]).shape[0]
        if self.block.form == "all_to_all_capacity" and isinstance(slots, int):
            return Range(0, slots // self.block.experts)
        return COUNT

    def _of(self, argument: Any) -> Range:
        """The range of an operand: a node, or a number."""
        if isinstance(argument, (bool, int, float)):
            return Range(argument, argument, chosen=True)
        if not isinstance(argument, Node):
            return EMPTY
        if argument not in self.ranges:
            self.ranges[argument] = self._leaf(argument)
        return self.ranges[argument]

    @staticmethod
    def _leaf(node: Node) -> Range:
        if node.op == "get_attr":
            value = constant_of(node)
            constant = type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel()
            return Range(float(value.min()), float(value.max()), chosen=True) if constant else ANYTHING
        return ANYTHING if isinstance(fake_value(node), torch.Tensor) else COUNT

    def _range(self, node: Node) -> Range:
        kind, arguments = _kind(node), _named(node)
        self._add_demands(node, kind, arguments)
        value = fake_value(node)
        if kind in _TRUTHS:
            self._check_truth(node, kind)
            return TRUTH
        if kind in _MOVES:
            return TRUTH if _dtype(value) is torch.bool else self._moved(node, kind, arguments)
        if kind in _SUMS:
            return self._sum(node, arguments)
        if kind in _ARITHMETIC:
            return self._arithmetic(node, kind)
        if kind in _CONSTANTS:
            fill = 0 if "zeros" in kind else 1 if "ones" in kind else None
            given = next((arguments[name] for name in ("fill_value", "s") if name in arguments), fill)
            return self._of(given)
        if kind in _SHAPES or kind in ("empty", "empty_permuted"):
            return EMPTY if isinstance(value, torch.Tensor) else _size_range(value)
        if kind in ("arange", "iota"):
            return self._counted(node)
        if kind == "repeat_interleave":
            counts = fake_value(node.args[0])  # type: ignore[arg-type]
            if len(node.args) > 1:
                return self._of(node.args[0])
            return _places(_size_range(counts.shape[0]).high)
        if kind in ("sort", "argsort"):
            return self._of(node.args[0])
        raise NotThisForm(f"{node.name} ({node.target}) is no operation on places or sizes that moepass knows")

    def _moved(self, node: Node, kind: str, arguments: dict[str, Any]) -> Range:
        """Of values that came from the operands, which are told by their names: places and conditions are none."""
        if kind == "getitem":
            source, position = node.args
            if isinstance(source, Node) and _kind(source) in ("sort", "argsort") and position == 1:
                return _places(_numel(fake_value(node)))
            return self._of(source)
        if kind == "argsort":
            return _places(_numel(fake_value(node)))
        names = ("self", "input", "tensor", "src", "source", "values", "value", "other", "tensors", "min", "max", "a")
        found = Range(0, 0, chosen=True) if kind == "constant_pad_nd" and "value" not in arguments else EMPTY
        for name in names if node.op == "call_function" and hasattr(node.target, "_schema") else arguments:
            given = arguments.get(name)
            for part in given if isinstance(given, (list, tuple)) else (given,):
                found = found.joined(self._of(part))
        return found

    def _sum(self, node: Node, arguments: dict[str, Any]) -> Range:
        start, addends, number = EMPTY, EMPTY, 0.0
        kind = _kind(node)
        for used in node.all_input_nodes:
            found = self._of(used)
            if kind in ("scatter_add", "index_add") and used is arguments.get("self"):
                start = found
            elif used is arguments.get("index"):
                continue
            else:
                addends = addends.joined(TRUTH if kind in ("bincount", "histc") else found)
                number += _numel(fake_value(used))
        if number == 0 or addends.empty:
            return start.joined(Range(0, 0))
        low = min(0.0, addends.low) and addends.low * number
        high = max(0.0, addends.high) and addends.high * number
        if not start.empty:
            low, high = start.low + low, start.high + high
        return Range(low, high)

    def _arithmetic(self, node: Node, kind: str) -> Range:
        if kind == "neg":
            return self._of(node.args[0]).negated()
        left, right = (self._of(argument) for argument in node.args[:2])
        if left.empty or right.empty:
            return EMPTY
        chosen = left.chosen and right.chosen
        if kind in ("add", "sub"):
            factor = node.kwargs.get("alpha", 1)
            if not isinstance(factor, (int, float)) or abs(factor) != 1:
                raise NotThisForm(f"{node.name} ({node.target}) adds a multiple of {factor}")
            if (factor == 1) == (kind == "add"):
                return Range(left.low + right.low, left.high + right.high, chosen)
            return Range(left.low - right.high, left.high - right.low, chosen)
        if kind == "mul":
            self._check_factor(node, left, right)
            corners = [_times(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
            return Range(min(corners), max(corners), chosen)
        if right.low != right.high or right.low <= 0:
            raise NotThisForm(f"{node.name} ({node.target}) divides places or sizes by what is no constant above 0")
        if kind in ("remainder", "mod"):
            inside = left.low >= 0 and left.high < right.low
            return left if inside else Range(0, right.low - 1, chosen)
        exact = kind == "div" and "rounding_mode" not in node.kwargs
        low, high = (end / right.low for end in (left.low, left.high))
        if not exact:
            low, high = (math.floor(end) if math.isfinite(end) else end for end in (low, high))
        return Range(low, high, chosen)

    def _check_factor(self, node: Node, left: Range, right: Range) -> None:
        """Ratios beyond those of the mock runs are not tried."""
        unbounded = [one for one in (left, right) if not one.finite]
        if not unbounded:
            return
        factor = left if left.finite else right
        # All ranks' rows, and each token's experts: runs whose ranks differ show what a size so multiplied leaves out.
        chosen = [fake_value(source).shape[-1] for role, source in self.block.sources.items() if role == "ids"]
        sizes = {ranks * each for ranks in (1, self.block.group.ranks) for each in (1, *chosen)}
        fits = factor.finite and max(abs(factor.low), abs(factor.high)) <= MOST_RATIO
        if not fits and not (factor.low == factor.high and factor.low in sizes):
            raise NotThisForm(f"{node.name} ({node.target}) multiplies sizes by more than was tried")

    def _counted(self, node: Node) -> Range:
        if _kind(node) == "iota":
            start, step, length = node.kwargs["start"], node.kwargs["step"], self._of(node.args[0])
            if not isinstance(start, int) or step != 1:
                return ANYTHING
            return Range(start, start + max(0, length.high - 1), chosen=length.finite)
        bounds = [self._of(argument) for argument in node.args]
        if len(bounds) == 1:
            return _places(bounds[0].high)
        return bounds[0].joined(bounds[1])

    # --------------------------------------------------------------------------------------------------- demands

    def _add_demands(self, node: Node, kind: str, arguments: dict[str, Any]) -> None:
        if kind in ("clamp", "clamp_min", "clamp_max", "histc"):
            bounds = [arguments[name] for name in ("min", "max") if arguments.get(name) is not None]
            pairs = [(node.args[0], bound) for bound in bounds]
        elif kind in _MEETING | _DIVISIONS and len(node.args) >= 2:
            pairs = [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
        else:
            return
        for value, other in pairs:
            if not isinstance(value, Node) or not (met := self._of(other)).finite:
                continue
            if _numel(fake_value(value)) == 0:  # a graph for no tokens: there is nothing to compare in any run
                continue
            grows = not self._of(value).finite
            if (kind in ("add", "sub") and not grows) or (kind in _DIVISIONS and value is not node.args[0]):
                continue
            self.demands += [
                Demand(node, value, constant, kind in _DIVISIONS)
                for constant in {met.low, met.high}
                if abs(constant) > 1  # what every mock run is beyond
            ]

    def _check_cut(self, node: Node) -> None:
        """A cut at a constant of what grows."""
        if is_call(node, aten.slice.Tensor):
            arguments = _named(node)
            shape, dim = fake_value(node.args[0]).shape, arguments.get("dim", 0)  # type: ignore[arg-type]
            if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
                raise NotThisForm(f"{node.name} ({node.target}) cuts dimension {dim} of {len(shape)}")
            size = shape[dim]
            ends = [arguments.get("start"), arguments.get("end")]
            # The mock runs bring as many tokens as the graph was captured with, and other ranks more.
            tokens = [fake_value(source).shape[0] for source in self.block.sources.values()]
            constants = [end for end in ends if isinstance(end, int) and 1 < abs(end) < _END and end not in tokens]
            growing = not isinstance(size, int)
        else:
            constants = [end for end in node.args[1] if isinstance(end, int) and end < -1]  # type: ignore[union-attr]
            growing = not all(isinstance(size, int) for size in fake_value(node).shape)
        if growing and constants:
            raise NotThisForm(f"{node.name} ({node.target}) cuts at the constant {constants[0]} what has no fixed size")

    def _check_truth(self, node: Node, kind: str) -> None:
        if kind.startswith("bitwise") and _dtype(fake_value(node)) is not torch.bool:
            raise NotThisForm(f"{node.name} ({node.target}) computes with bits of places or sizes")

    def _check_type(self, node: Node) -> None:
        """Narrow types may hold truths and constants, which are small."""
        if _dtype(fake_value(node)) not in _NARROW:
            return
        kind = _kind(node)
        small = kind in _CONSTANTS or kind in _SHAPES or kind == "empty"
        carried = all(used in self.narrow or _dtype(fake_value(used)) is torch.bool for used in node.all_input_nodes)
        if not small and not (kind in _MOVES and carried):
            raise NotThisForm(f"{node.name} ({node.target}) counts in {_dtype(fake_value(node))}, which is too small")
        self.narrow.add(node)


_SHAPES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full",
    "sym_size", "sym_numel", "sym_stride",
}  # fmt: skip


def _kind(node: Node) -> str:
    """The name of a node's operation, without its library and variant."""
    packet = getattr(node.target, "overloadpacket", None)
    name = str(packet).rsplit(".", 1)[-1] if packet is not None else getattr(node.target, "__name__", "")
    return str(name)


def _named(node: Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    names = (
        [argument.name for argument in schema.arguments] if schema is not None else [*map(str, range(len(node.args)))]
    )
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _integers(arguments: Any) -> Iterator[int]:
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from _integers(argument)
    elif isinstance(arguments, int) and not isinstance(arguments, bool):
        yield arguments


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _size_range(size: Any) -> Range:
    return Range(size, size) if isinstance(size, int) else COUNT


def _places(number: float) -> Range:
    """Places among `number`. A fixed number of them are all taken in every run."""
    return Range(0, max(0, number - 1), chosen=math.isfinite(number))


def _numel(value: Any) -> float:
    """How many numbers a node's value has; without bound where that is not constant."""
    if not isinstance(value, torch.Tensor):
        return 1.0
    sizes = [_size_range(size).high for size in value.shape]
    return 0.0 if 0 in sizes else math.prod(sizes)


def _times(left: float, right: float) -> float:
    return 0.0 if left == 0 or right == 0 else left * right
