"""Check that mock runs have tried every combination of masks on which a row or index depends.

Contract
    in    the nodes of a block's region in order, with ranges of those that are no data; then their values in each run
    out   NotThisForm, naming the node and the masks, if rows or indices depend on several masks of which the runs did
          not have every combination, or if this cannot be checked

`where(a, 0 * rows, rows)` and a later `where(b, result, rows)` lose rows only where both a and b are true. Runs may
have both values of each, and never both true. A mask that is computed from other masks replaces them, since runs must
try both of its values anyway (value_ranges.py). Each element of a mask of fixed size must have both values in runs, if
a node selects or counts some of them.

Comparisons of one expert id are one condition: runs try every id, so only combinations that occur are required.

Numbers from constants and ids are no masks, but they gate, shift and select too: `(index >= t * n) + t` less 1 is 0
until an expert with t = 1 has an index beyond n. So each of them counts as a mask with as many outcomes as it had
values, unless it is an elementwise function of masks, which then replace it.

Pseudo-code
    for each node: collect the masks of its inputs; if no input depends on all of them, record that they meet
    in each run: record the combinations of values of the masks that meet
    after the runs: check that every possible combination was recorded
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import indexed_dimensions, is_accumulating_write, is_mask, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.parallel.ranges.growing_sizes import grows_in_size, refuse
from moepass.passes.parallel.ranges.value_range import Kind, Range

# Operators that compute each element from the elements at its position.
_BY_ELEMENT = (Trait.ELEMENTWISE, Trait.ITEM, Trait.WAIT)
# Limit on the number of combinations that runs must try.
_MOST_COMBINATIONS = 64
_ADVICE = "let nothing between the collectives of the experts depend on both"


class State(enum.IntEnum):
    """Elements of a mask on which each element of a value depends."""

    ALIGNED = 0  # the element that is broadcast to it, or the only one
    LOOKED_UP = 1  # the same, through a table
    ANYWHERE = 2  # any, as for counts and sorted indices of few numbers: combinations count in any elements of a run
    MOVED = 3  # another one: the value may only meet masks of one element


@dataclasses.dataclass(frozen=True)
class MaskUse:
    """The dependence of a value on `mask`.

    Masks that are not independent have the same `group`, which is a tuple for functions of one expert id.
    """

    mask: Node
    group: Any
    state: State


@dataclasses.dataclass
class _JointValues:
    """The combinations of values that `masks` had in runs, in this order."""

    masks: tuple[MaskUse, ...]
    seen: set[tuple[float, ...]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A value with bounds. It counts as a mask with `outcomes` among -1 (below), 0 (inside) and 1 (above).

    `seen` are those that it had in runs.
    """

    value: Node
    outcomes: frozenset[int]
    seen: set[int] = dataclasses.field(default_factory=set)


class JointMasks:
    """The masks on which rows and indices of a block depend, and the combinations of their values in runs."""

    def __init__(self, range_of: Callable[[Node], Range]) -> None:
        self._range_of = range_of
        self._uses: dict[Node, frozenset[MaskUse]] = {}
        self._joint_values: dict[Node, _JointValues] = {}
        self._bounds: dict[Node, _Bound] = {}
        # Nodes of numbers that are no masks, with values that do not depend on sizes.
        self._numbers: set[Node] = set()
        # Elementwise functions of masks and single constants.
        self._of_masks: set[Node] = set()
        # Nodes whose values in a run are kept.
        self._watched: set[Node] = set()
        self._values: dict[Node, torch.Tensor] = {}
        # Masks with a fixed number of elements, and for each outcome the elements that had it in some run.
        self._by_element: dict[Node, dict[int, torch.Tensor]] = {}

    def add(self, node: Node, values: Range | None, *, by_row: bool = False) -> None:
        """Add the next node of the region, with its range if it is no data.

        `by_row` says that each of its rows depends only on the same row of its inputs, as in a GEMM.
        """
        inverted = {used for used in node.all_input_nodes if self._is_inverted(node, used)}
        # The inverse of a permutation of two elements has the values 0 and 1, but is no mask.
        if values is not None and _is_binary(node, values) and not inverted:
            self._uses[node] = frozenset({_as_mask(node, values)})
            return
        if values is not None and values.uniform:
            self._uses[node] = frozenset()
            return
        # Runs do not compute constants of the activation function, which are equal for all rows (row_flow.py).
        computes = values is not None or not by_row
        inputs = [used for used in node.all_input_nodes if used not in inverted and (computes or used.op != "get_attr")]
        uses = [self._uses_of(used) for used in inputs]
        if base_operation(node) == "searchsorted":
            # The result is a sum of comparisons.
            uses = [frozenset(use for use in masks if use.mask not in self._numbers) for masks in uses]
        results = [
            frozenset(self._moved(node, used, use, values is None, by_row) for use in masks)
            for used, masks in zip(inputs, uses, strict=True)
        ]
        combined = frozenset().union(*results)
        # Runs try every value of a function of one id.
        may_meet = values is None or values.kind > Kind.BY_EXPERT
        if may_meet and combined and not any(combined == masks for masks in results):
            self._add_joint_values(node, combined)
        if values is not None and self._is_number(node, values):
            combined = frozenset({_as_mask(node, values)})
        elif values is not None and (has_trait(node, Trait.SORT, Trait.SUM) or is_accumulating_write(node)):
            # The result depends on how often each number occurs.
            combined = frozenset(use for use in combined if use.mask not in self._numbers)
        self._uses[node] = combined

    def add_bound(self, node: Node, value: Node, below: bool, above: bool) -> None:
        """Add `node`, which bounds `value`. It may be `below` or `above` the bounds."""
        outcomes = frozenset({0, *([-1] if below else []), *([1] if above else [])})
        self._bounds[node] = _Bound(value, outcomes)
        self._watched.update((node, value))
        self._uses[node] |= {MaskUse(node, node, State.ALIGNED)}
        self._add_joint_values(node, self._uses[node])

    def observe(self, node: Node, value: Any) -> None:
        """Record the value of `node` in a run, after the masks on which it depends."""
        if node in self._watched and isinstance(value, (torch.Tensor, bool, int, float)):
            self._record(node, torch.as_tensor(value))
        if node in self._joint_values:
            self._record_combinations(self._joint_values[node])

    def check(self) -> None:
        """Raise NotThisForm for the first masks of which the runs did not have every combination."""
        for node, bound in self._bounds.items():
            missing = bound.outcomes - bound.seen
            if missing:
                side = {-1: "below its bounds", 0: "within its bounds", 1: "above its bounds"}[min(missing)]
                reason = f"bounds a value that was never {side} in sample runs"
                refuse(node, f"{reason}, and may be with other numbers of tokens")
        for node, seen in self._by_element.items():
            for outcome, elements in seen.items():
                if not bool(elements.all()):
                    element = f"element {int((~elements).flatten().nonzero()[0])}"
                    refuse(node, f"has {elements.numel()} elements, of which {element} was {outcome} in no sample run")
        for node, joint in self._joint_values.items():
            self._check_combinations(node, joint)

    def _uses_of(self, node: Node) -> frozenset[MaskUse]:
        if node not in self._uses:
            uses: frozenset[MaskUse] = frozenset()
            value = fake_value(node)
            # Constants and the block's ids are outside its region.
            if isinstance(value, torch.Tensor) and (node.op == "get_attr" or not value.dtype.is_floating_point):
                values = self._range_of(node)
                is_use = _is_binary(node, values) or self._is_number(node, values)
                uses = frozenset({_as_mask(node, values)}) if is_use else uses
            self._uses[node] = uses
        return self._uses[node]

    def _is_number(self, node: Node, values: Range) -> bool:
        """Return whether `node` has several numbers, from constants or expert ids, that are no masks; record it."""
        value = fake_value(node)
        if isinstance(value, (tuple, list)) or values.empty or values.uniform or values.grows:
            return False
        if values.kind > Kind.BOUND or math.isinf(values.low) or math.isinf(values.high):
            return False
        inputs = [used for used in node.all_input_nodes if isinstance(fake_value(used), torch.Tensor)]
        if values.kind is Kind.BOUND and not all(
            used in self._numbers or self._range_of(used).kind <= Kind.BY_EXPERT for used in inputs
        ):
            return False
        if inputs and has_trait(node, *_BY_ELEMENT) and all(self._is_function_of_masks(used) for used in inputs):
            self._of_masks.add(node)
            return False
        self._numbers.add(node)
        return True

    def _is_inverted(self, node: Node, used: Node) -> bool:
        """Return whether `node` writes the arange `used` at all indices, as the inverse of a permutation."""
        if not has_trait(node, Trait.WRITE) or not has_trait(used, Trait.ARANGE):
            return False
        # torch cannot compare sizes that are unknown at compile time.
        size, written = (sympy.expand(size_expression(fake_value(tensor).numel())) for tensor in (used, node))
        return self._range_of(node.args[0]).empty and bool(size == written)  # type: ignore[arg-type]

    def _is_function_of_masks(self, node: Node) -> bool:
        values = self._range_of(node)
        return values.uniform or node in self._of_masks or _is_binary(node, values)

    def _moved(self, node: Node, used: Node, use: MaskUse, is_data: bool, by_row: bool) -> MaskUse:
        """Return the use of a mask by `node`, which reads the mask through its input `used`."""
        if _looks_up_by(node, used):
            return dataclasses.replace(use, state=State.LOOKED_UP) if use.state is State.ALIGNED else use
        if use.state is State.ANYWHERE or has_trait(node, *_BY_ELEMENT) or (by_row and _is_column(use.mask)):
            return use
        if use.group != use.mask:
            return dataclasses.replace(use, state=State.MOVED)
        if is_single(use.mask):
            return use
        if use.mask not in self._numbers and not grows_in_size(use.mask):
            self._by_element.setdefault(use.mask, {})
            self._watched.add(use.mask)
        # A sort of few different numbers forms groups, within which elements keep their order.
        few = has_trait(node, Trait.SORT) and not self._range_of(node.args[0]).grows  # type: ignore[arg-type]
        counted = has_trait(node, Trait.SUM) and not is_data
        return dataclasses.replace(use, state=State.ANYWHERE if few or counted else State.MOVED)

    def _add_joint_values(self, node: Node, uses: frozenset[MaskUse]) -> None:
        if len({use.group for use in uses}) == 1:
            return
        are_of_ids = all(isinstance(use.group, tuple) for use in uses)
        if are_of_ids and any(use.state in (State.LOOKED_UP, State.MOVED) for use in uses):
            return  # runs try every id, and the model does not decide which ids meet
        ordered = tuple(sorted(uses, key=lambda use: (use.mask.name, use.state)))
        for use in ordered:
            independent = [second for second in uses if second.group != use.group]
            if use.state is State.MOVED and not all(is_single(second.mask) for second in independent):
                reason = f"depends on {_names(uses)}; {use.mask.name} was moved in between"
                refuse(node, f"{reason}, so it is unknown which combinations sample runs have tried", _ADVICE)
        self._joint_values[node] = _JointValues(ordered)
        self._watched.update(use.mask for use in uses)

    def _record(self, node: Node, value: torch.Tensor) -> None:
        bound = self._bounds.get(node)
        if bound is not None:
            bounded = self._values.get(bound.value)
            if bounded is None:
                raise NotThisForm(f"{named(node)} bounds what no run computes before it")
            value = torch.sign(bounded.double() - value.double())
            bound.seen.update(map(int, value.unique().tolist()))
        self._values[node] = value
        if node in self._by_element:
            seen = self._by_element[node]
            for outcome in self._outcomes_of(node):
                seen[outcome] = seen.get(outcome, torch.zeros_like(value, dtype=torch.bool)) | (value == outcome)

    def _record_combinations(self, joint: _JointValues) -> None:
        values = [self._values[use.mask] for use in joint.masks]
        if any(value.numel() == 0 for value in values):
            return
        is_aligned = [use.state <= State.LOOKED_UP or is_single(use.mask) for use in joint.masks]
        aligned = [index for index in range(len(values)) if is_aligned[index]]
        loose = [index for index in range(len(values)) if not is_aligned[index]]
        rows = torch.broadcast_tensors(*(values[index].double() for index in aligned)) if aligned else ()
        combinations = torch.stack([row.reshape(-1) for row in rows]).unique(dim=1).t().tolist() if rows else [[]]
        present = [values[index].double().unique().tolist() for index in loose]
        for fixed, free in itertools.product(combinations, itertools.product(*present)):
            pairs = [*zip(aligned, fixed, strict=True), *zip(loose, free, strict=True)]
            joint.seen.add(tuple(float(outcome) for _, outcome in sorted(pairs)))

    def _outcomes_of(self, mask: Node) -> frozenset[int]:
        return self._bounds[mask].outcomes if mask in self._bounds else frozenset({0, 1})

    def _check_combinations(self, node: Node, joint: _JointValues) -> None:
        groups: dict[Any, list[int]] = {}
        for index, use in enumerate(joint.masks):
            groups.setdefault(use.group, []).append(index)
        possible = [self._possible(joint, indices) for indices in groups.values()]
        if math.prod(len(combinations) for combinations in possible) > _MOST_COMBINATIONS:
            raise NotThisForm(f"{named(node)} depends on {_names(joint.masks)}, too many masks to try")
        for combination in itertools.product(*possible):
            outcomes = dict(zip(itertools.chain(*groups.values()), itertools.chain(*combination), strict=True))
            if tuple(outcomes[index] for index in range(len(joint.masks))) not in joint.seen:
                values_text = ", ".join(f"{use.mask.name} = {outcomes[index]}" for index, use in enumerate(joint.masks))
                reason = f"depends on several masks, and no sample run had {values_text} together"
                refuse(node, f"{reason}; other numbers of tokens may", _ADVICE)

    def _possible(self, joint: _JointValues, indices: list[int]) -> set[tuple[float, ...]]:
        """Return the possible values of the masks of one group: those that runs had, or all values of a single mask."""
        (first, *more) = (joint.masks[index] for index in indices)
        if not more and first.group == first.mask:
            return {(outcome,) for outcome in self._outcomes_of(first.mask)}
        return {tuple(outcomes[index] for index in indices) for outcomes in joint.seen}


def _looks_up_by(node: Node, index: Node) -> bool:
    """Return whether `node` looks up each element in a one-dimensional table by the same element of `index`."""
    if not has_trait(node, Trait.LOOKUP):
        return False
    table, indices = node.args[0], [used for _, used in indexed_dimensions(named_arguments(node))]
    is_vector = table is not index and fake_value(table).dim() == 1  # type: ignore[arg-type]
    return indices == [index] and is_vector and not is_mask(index)


def _is_binary(node: Node, values: Range) -> bool:
    """Return whether `node` is a mask of 0 and 1. The ids of two experts are none."""
    value = fake_value(node)
    if isinstance(value, (tuple, list)) or values.empty or values.uniform or not values.integral:
        return False
    is_bool = isinstance(value, torch.Tensor) and value.dtype is torch.bool
    return values.low >= 0 and values.high <= 1 and (is_bool or values.kind > Kind.BY_EXPERT)


def _as_mask(node: Node, values: Range) -> MaskUse:
    group: Any = {Kind.FIXED: "fixed", Kind.BY_EXPERT: ("lane", values.lane)}.get(values.kind, node)
    return MaskUse(node, group, State.ALIGNED)


def is_single(node: Node) -> bool:
    """Return whether `node` is a number, or a tensor of one element."""
    value = fake_value(node)
    return not isinstance(value, torch.Tensor) or all(isinstance(size, int) and size == 1 for size in value.shape)


def _is_column(mask: Node) -> bool:
    value = fake_value(mask)
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == 1


def _names(uses: Iterable[MaskUse]) -> str:
    return " and ".join(sorted({use.mask.name for use in uses}))
