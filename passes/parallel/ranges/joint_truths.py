"""Truths that meet: what two masks make together was tried only where both were seen together, each way.

Contract
    in    the nodes of a block's region in order, with the ranges of those that are no data; then the values that nodes
          had in each run
    out   NotThisForm, naming the node and the truths, where rows or places depend on several truths of which not every
          combination came in the runs, and where that cannot be told

`where(a, 0 * rows, rows)` and, later, `where(b, that, rows)` lose rows only where a and b hold. Each of them may come
out both ways in the runs, and a and b together never. A truth that is computed from others stands for itself alone: it
is asked for both ways anyhow (value_ranges.py). Places and rows carry the truths that they were selected by:

    ALIGNED   each element depends on the element of the truth that is broadcast to it, or on the only one there is
    LOOKED_UP the same, through a table
    ANYWHERE  on any of its elements, as places in the order of a few numbers do, and counts. In one run both truths
              must have come in every combination, whichever elements have them
    MOVED     on some other elements. May not meet another truth, unless that has one element

Where some of a fixed number of truths are taken, or counted, each of them must have come both ways.

Comparisons of one expert id count as one condition: every id is tried, so only combinations that occur are required.

Numbers that constants and ids give are no truths, and yet gate, shift and select as truths do: `(place >= t * n) + t`
less 1 is 0 until an expert with t = 1 has a place beyond n. So each of them is a dependence with as many outcomes as it
had values, unless it is computed, element by element, from truths, which then stand for it.

Pseudo-code
    for each node: the truths of its inputs; where no input has them all, note a meeting
    in each run: at each meeting, note which combinations its elements have
    after the runs: for each meeting, is every combination of what each truth may be among them?
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
from moepass.passes.ops.arguments import is_accumulating_write, is_mask, named_arguments
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.parallel.ranges.growing_sizes import grows_in_size
from moepass.passes.parallel.ranges.value_range import Kind, Range

# These compute each element from the elements at its position.
_BY_ELEMENT = (Trait.ELEMENTWISE, Trait.ITEM, Trait.WAIT)
# Combinations beyond this number are not waited for.
_MOST_COMBINATIONS = 64
_CHANGE = "let nothing between the collectives of the experts depend on both"


class State(enum.IntEnum):
    ALIGNED = 0
    LOOKED_UP = 1
    ANYWHERE = 2
    MOVED = 3


@dataclasses.dataclass(frozen=True)
class Dependence:
    """That what a node has depends on `truth`; `group` is the same for truths that are not independent."""

    truth: Node
    group: Any
    state: State

    @property
    def is_of_id(self) -> bool:
        """About one expert id: each of these is tried."""
        return isinstance(self.group, tuple)


@dataclasses.dataclass
class _Meeting:
    """The combinations of values that `truths` had together, in this order."""

    truths: tuple[Dependence, ...]
    seen: set[tuple[float, ...]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A value that is kept within bounds: below, inside and above are the outcomes -1, 0 and 1 of a truth."""

    value: Node
    outcomes: frozenset[int]


class JointTruths:
    """What rows and places of a block are selected by, and which combinations of it the runs had."""

    def __init__(self, range_of: Callable[[Node], Range]) -> None:
        self._range_of = range_of
        self._found: dict[Node, frozenset[Dependence]] = {}
        self._meetings: dict[Node, _Meeting] = {}
        self._bounds: dict[Node, _Bound] = {}
        # What has values of its own, whatever the sizes, and is no truth.
        self._numbers: set[Node] = set()
        # What is computed, element by element, from truths and single constants alone.
        self._of_truths: set[Node] = set()
        # Values of a run that must be kept.
        self._watched: set[Node] = set()
        self._values: dict[Node, torch.Tensor] = {}
        self._outcomes: dict[Node, set[int]] = {}
        # Of a fixed number of truths some are taken: in which elements each outcome came.
        self._by_element: dict[Node, dict[int, torch.Tensor]] = {}

    def add(self, node: Node, found: Range | None, *, by_row: bool = False) -> None:
        """The next node of the region, of range `found` where it is no data.

        `by_row` tells that each row of it depends on the same row of what it is computed from, as a GEMM does.
        """
        # The inverse of an order of two is an order as well, whose numbers say yes or no by chance.
        inverts = any(self._is_inverted(node, each) for each in node.all_input_nodes)
        if found is not None and _is_truth(node, found) and not inverts:
            self._found[node] = frozenset({_itself(node, found)})
            return
        if found is not None and found.uniform:
            self._found[node] = frozenset()
            return
        used = [each for each in node.all_input_nodes if not self._is_inverted(node, each)]
        # Constants of the activation function are the same for every row (row_flow.py), and no run computes with them.
        used = [each for each in used if not (by_row and found is None and each.op == "get_attr")]
        given = [self._of(each) for each in used]
        if base_operation(node) == "searchsorted":
            # Of each value it counts the elements below, as a comparison of every two of them does, added up.
            given = [frozenset(each for each in part if each.truth not in self._numbers) for part in given]
        after = [
            frozenset(map(_looked_up, part))
            if _looks_up_by(node, index)
            else frozenset(self._moved(node, each, found is None, by_row) for each in part)
            for index, part in zip(used, given, strict=True)
        ]
        together = frozenset().union(*after)
        # Every value that one id gives was tried.
        meets = found is None or found.kind > Kind.CHOSEN
        if meets and together and not any(together == part for part in after):
            self._add_meeting(node, together)
        if found is not None and self._is_number(node, found):
            together = frozenset({_itself(node, found)})
        elif found is not None and (has_trait(node, Trait.SORT, Trait.SUM) or is_accumulating_write(node)):
            # Which place or size comes of it depends on how many there are of each number.
            together = frozenset(each for each in together if each.truth not in self._numbers)
        self._found[node] = together

    def add_bound(self, node: Node, value: Node, below: bool, above: bool) -> None:
        """`node` is `value`, kept within bounds that it may be `below` or `above`."""
        outcomes = frozenset({0, *([-1] if below else []), *([1] if above else [])})
        self._bounds[node] = _Bound(value, outcomes)
        self._watched.update((node, value))
        self._outcomes[node] = set()
        own = Dependence(node, node, State.ALIGNED)
        before = self._found[node]
        self._found[node] = before | {own}
        if before:
            self._add_meeting(node, self._found[node])

    def observe(self, node: Node, value: Any) -> None:
        """Note what `node` had in a run: after the truths that it depends on."""
        if node in self._watched and isinstance(value, (torch.Tensor, bool, int, float)):
            self._note(node, torch.as_tensor(value))
        if node in self._meetings:
            self._meet(self._meetings[node])

    def check(self) -> None:
        """Raises NotThisForm for the first truths that did not come in every combination."""
        for node, bound in self._bounds.items():
            missing = bound.outcomes - self._outcomes[node]
            if missing:
                side = {-1: "below its bounds", 0: "within its bounds", 1: "above its bounds"}[min(missing)]
                raise NotThisForm(
                    f"{node.name} ({node.target}) bounds what was never {side} in the runs that were tried, and may be "
                    "with other numbers of tokens; let nothing between the collectives of the experts depend on it"
                )
        for node, seen in self._by_element.items():
            for outcome, elements in seen.items():
                if not bool(elements.all()):
                    number = int((~elements).flatten().nonzero()[0])
                    raise NotThisForm(
                        f"{node.name} ({node.target}) has {elements.numel()} elements, some of which are taken or "
                        f"counted, and number {number} was {outcome} in no run that was tried; let nothing between the "
                        "collectives of the experts depend on it"
                    )
        for node, meeting in self._meetings.items():
            self._check_meeting(node, meeting)

    # ------------------------------------------------------------------------------------------------- dependences

    def _of(self, node: Node) -> frozenset[Dependence]:
        if node not in self._found:
            found: frozenset[Dependence] = frozenset()
            # Constants, and the ids that the block begins with, are no nodes of its region.
            if isinstance(fake_value(node), torch.Tensor) and (node.op == "get_attr" or _is_whole(node)):
                known = self._range_of(node)
                tells = _is_truth(node, known) or self._is_number(node, known)
                found = frozenset({_itself(node, known)}) if tells else found
            self._found[node] = found
        return self._found[node]

    def _is_number(self, node: Node, found: Range) -> bool:
        """Note whether `node` has several constants, or numbers that expert ids give: as many outcomes as values."""
        value = fake_value(node)
        if isinstance(value, (tuple, list)) or found.empty or found.uniform or found.grows:
            return False
        if found.kind > Kind.BOUND or math.isinf(found.low) or math.isinf(found.high):
            return False
        used = [each for each in node.all_input_nodes if isinstance(fake_value(each), torch.Tensor)]
        if found.kind is Kind.BOUND and not all(
            each in self._numbers or self._range_of(each).kind <= Kind.CHOSEN for each in used
        ):
            return False
        if used and has_trait(node, *_BY_ELEMENT) and all(self._tells_all(each) for each in used):
            self._of_truths.add(node)
            return False
        self._numbers.add(node)
        return True

    def _is_inverted(self, node: Node, used: Node) -> bool:
        """Whether `node` writes each of a fixed number of places, `used`, once: the inverse of an order."""
        if not has_trait(node, Trait.WRITE) or not has_trait(used, Trait.ARANGE):
            return False
        # Not by `==` itself: of sizes that only a run tells, torch does not answer.
        size, written = (sympy.expand(size_expression(fake_value(one).numel())) for one in (used, node))
        return self._range_of(node.args[0]).empty and bool(size == written)  # type: ignore[arg-type]

    def _tells_all(self, node: Node) -> bool:
        """Whether the truths that `node` depends on tell its values."""
        found = self._range_of(node)
        return found.uniform or node in self._of_truths or _is_truth(node, found)

    def _moved(self, node: Node, given: Dependence, is_data: bool, by_row: bool) -> Dependence:
        if given.state is State.ANYWHERE or has_trait(node, *_BY_ELEMENT) or (by_row and _is_column(given.truth)):
            return given
        if given.group != given.truth:
            return dataclasses.replace(given, state=State.MOVED)
        if is_single(given.truth):
            return given
        if given.truth not in self._numbers and not grows_in_size(given.truth):
            self._by_element.setdefault(given.truth, {})
            self._watched.add(given.truth)
        # Few different numbers are sorted into as many groups, in which all keep their order.
        few = has_trait(node, Trait.SORT) and not self._range_of(node.args[0]).grows  # type: ignore[arg-type]
        counted = has_trait(node, Trait.SUM) and not is_data
        return dataclasses.replace(given, state=State.ANYWHERE if few or counted else State.MOVED)

    def _add_meeting(self, node: Node, together: frozenset[Dependence]) -> None:
        if len({each.group for each in together}) == 1:
            return
        moved = [each for each in together if each.state in (State.LOOKED_UP, State.MOVED)]
        if all(each.is_of_id for each in together) and moved:
            return  # which ids come together is not the model's to say
        ordered = tuple(sorted(together, key=lambda each: (each.truth.name, each.state)))
        for each in ordered:
            others = [other for other in together if other.group != each.group]
            if each.state is State.MOVED and not all(is_single(other.truth) for other in others):
                raise NotThisForm(
                    f"{node.name} ({node.target}) depends on {_names(together)}, of which {each.truth.name} was moved "
                    f"since, so that it cannot be told which of them were tried together; {_CHANGE}"
                )
        self._meetings[node] = _Meeting(ordered)
        self._watched.update(each.truth for each in together)

    # -------------------------------------------------------------------------------------------------------- runs

    def _note(self, node: Node, value: torch.Tensor) -> None:
        bound = self._bounds.get(node)
        if bound is not None:
            given = self._values.get(bound.value)
            if given is None:
                raise NotThisForm(f"{node.name} ({node.target}) bounds what no run computes before it")
            value = torch.sign(given.double() - value.double())
            self._outcomes[node].update(int(outcome) for outcome in value.unique().tolist())
        self._values[node] = value
        if node in self._by_element:
            seen = self._by_element[node]
            for outcome in self._own_outcomes(node):
                seen[outcome] = seen.get(outcome, torch.zeros_like(value, dtype=torch.bool)) | (value == outcome)

    def _meet(self, meeting: _Meeting) -> None:
        values = [self._values[each.truth] for each in meeting.truths]
        if any(value.numel() == 0 for value in values):
            return
        aligned = [place for place, each in enumerate(meeting.truths) if _stands_still(each)]
        loose = [place for place in range(len(values)) if place not in aligned]
        rows = torch.broadcast_tensors(*(values[place].double() for place in aligned)) if aligned else ()
        together = torch.stack([row.reshape(-1) for row in rows]).unique(dim=1).t().tolist() if rows else [[]]
        present = [values[place].double().unique().tolist() for place in loose]
        for fixed, free in itertools.product(together, itertools.product(*present)):
            pairs = [*zip(aligned, fixed, strict=True), *zip(loose, free, strict=True)]
            meeting.seen.add(tuple(float(outcome) for _, outcome in sorted(pairs)))

    def _own_outcomes(self, truth: Node) -> frozenset[int]:
        return self._bounds[truth].outcomes if truth in self._bounds else frozenset({0, 1})

    def _check_meeting(self, node: Node, meeting: _Meeting) -> None:
        groups: dict[Any, list[int]] = {}
        for place, each in enumerate(meeting.truths):
            groups.setdefault(each.group, []).append(place)
        possible = [self._possible(meeting, places) for places in groups.values()]
        if math.prod(len(each) for each in possible) > _MOST_COMBINATIONS:
            raise NotThisForm(f"{node.name} ({node.target}) depends on {_names(meeting.truths)}, too many to try")
        for combination in itertools.product(*possible):
            outcomes = dict(zip(itertools.chain(*groups.values()), itertools.chain(*combination), strict=True))
            if tuple(outcomes[place] for place in range(len(meeting.truths))) not in meeting.seen:
                said = ", ".join(f"{each.truth.name} = {outcomes[place]}" for place, each in enumerate(meeting.truths))
                raise NotThisForm(
                    f"{node.name} ({node.target}) depends on several truths, of which no run that was tried had {said} "
                    f"together; other numbers of tokens may; {_CHANGE}"
                )

    def _possible(self, meeting: _Meeting, places: list[int]) -> set[tuple[float, ...]]:
        """What the truths of one group may be: one that is on its own anything, others what they were."""
        (first, *others) = (meeting.truths[place] for place in places)
        if not others and first.group == first.truth:
            return {(outcome,) for outcome in self._own_outcomes(first.truth)}
        return {tuple(outcomes[place] for place in places) for outcomes in meeting.seen}


def _looked_up(given: Dependence) -> Dependence:
    return dataclasses.replace(given, state=State.LOOKED_UP) if given.state is State.ALIGNED else given


def _looks_up_by(node: Node, index: Node) -> bool:
    """Whether each element of `node` is looked up, in a table of one dimension, by the same element of `index`."""
    if not has_trait(node, Trait.LOOKUP):
        return False
    given = named_arguments(node)
    indices = [each for each in given.get("indices", [given.get("index")]) if each is not None]
    table = given["self"]
    return indices == [index] and table is not index and fake_value(table).dim() == 1 and not is_mask(index)


def _is_truth(node: Node, found: Range) -> bool:
    """True for what says yes or no; numbers of two experts are no truths."""
    value = fake_value(node)
    if isinstance(value, (tuple, list)) or found.empty or found.uniform or not found.whole:
        return False
    is_bool = isinstance(value, torch.Tensor) and value.dtype is torch.bool
    return found.low >= 0 and found.high <= 1 and (is_bool or found.kind > Kind.CHOSEN)


def _is_whole(node: Node) -> bool:
    dtype = fake_value(node).dtype
    return not (dtype.is_floating_point or dtype.is_complex)


def _itself(node: Node, found: Range) -> Dependence:
    group: Any = {Kind.FIXED: "fixed", Kind.CHOSEN: ("lane", found.lane)}.get(found.kind, node)
    return Dependence(node, group, State.ALIGNED)


def is_single(node: Node) -> bool:
    """True for a number, and for a tensor of one."""
    value = fake_value(node)
    return not isinstance(value, torch.Tensor) or all(isinstance(size, int) and size == 1 for size in value.shape)


def _stands_still(dependence: Dependence) -> bool:
    return dependence.state in (State.ALIGNED, State.LOOKED_UP) or is_single(dependence.truth)


def _is_column(truth: Node) -> bool:
    value = fake_value(truth)
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == 1


def _names(dependences: Iterable[Dependence]) -> str:
    return " and ".join(sorted({each.truth.name for each in dependences}))
