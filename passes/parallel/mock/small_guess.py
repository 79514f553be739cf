"""Find out which numbers of a captured block are sizes, by running it small: with mock peers, one node after another.

A number may have several readings (small_sizes.py). Where a node runs, and gives a value whose shape is the
captured one in small, with one of them only, that is it. Where several do, the likeliest is tried first, and another
when the run fails later on.

A wrong guess can do no harm: read with the captured sizes every guess is the captured block, to the last number, and it
is proved for all sizes. It may only fail to be proved.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, map_nodes
from moepass.passes.ops.arguments import UNNAMED, replace_numbers
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.parallel.match.parallel_block import bias_after
from moepass.passes.parallel.mock.mock_run import (
    Answer,
    ContractBroken,
    MockBlock,
    MockRun,
    concrete,
)
from moepass.passes.parallel.mock.scenarios import SCENARIOS
from moepass.passes.parallel.mock.small_sizes import Reading, Scale, Use

# Use of a number, by the name of its argument.
_SHAPES = {
    "size", "sizes", "shape", "split_size", "split_sizes", "length", "output_size", "repeats", "input_split_sizes",
    "output_split_sizes",
}  # fmt: skip
_CUTS = {"start", "end", "pad"}
_VALUES = {UNNAMED, "other", "fill_value", "min", "max", "value", "s"}
_USES = {
    **dict.fromkeys(_SHAPES, Use.SHAPE),
    **dict.fromkeys(_CUTS, Use.CUT),
    **dict.fromkeys(_VALUES, Use.VALUE),
}
# Arguments among these that are lists in which equal numbers mean the same.
_SPLITS = {"split_sizes", "input_split_sizes", "output_split_sizes", "repeats"}
_MOST_COMBINATIONS = 64
_MOST_RUNS = 24

# Where a number stands in a node's arguments: the argument's name, and the place in a list or the number itself.
Place = tuple[str, int]


class NoSmallCopy(Exception):  # noqa: N818  control flow of the proof
    """Why the sizes of a block cannot be told."""


class _Stuck(Exception):  # noqa: N818  control flow of the search
    """A node runs with no reading of its numbers."""


@dataclasses.dataclass
class Guess:
    """The readings of all numbers, by node, and the shapes that the nodes of the block had in a run with them."""

    readings: dict[Node, dict[Place, Reading]] = dataclasses.field(default_factory=dict)
    shapes: dict[Node, Any] = dataclasses.field(default_factory=dict)


def guesses(small: SmallMock, check: Callable[[MockRun], None]) -> Iterator[Guess]:
    """Readings with which the first scenario passes `check`, the likeliest first.

    Raises NoSmallCopy where none were found, ContractBroken where none can be.
    """
    chosen: dict[Node, int] | None = {}
    # Of readings that fail, those come nearest to what is meant with which most nodes ran.
    furthest: tuple[int, ContractBroken] | None = None
    found = False
    for _ in range(_MOST_RUNS):
        if chosen is None:
            break
        run = _GuessingRun(small, chosen)
        try:
            check(run)
        except ContractBroken as error:
            ran = len(run.guess.shapes)
            if not isinstance(error.__cause__, _Stuck) and (furthest is None or ran > furthest[0]):
                furthest = (ran, error)
        else:
            found = True
            yield run.guess
        chosen = _next_choice(run.choices)
    if found:
        return
    if chosen is not None:
        raise NoSmallCopy("too many of its numbers may be sizes")
    if furthest is None or small.has_unread_numbers():
        raise NoSmallCopy("some of its numbers are neither sizes nor constants that are known")
    raise furthest[1]


def _next_choice(choices: list[tuple[Node, int, int]]) -> dict[Node, int] | None:
    """The last of `choices` (of a node, one of how many) that can be another, and all before it; None at the end."""
    for place, (node, number, of) in reversed([*enumerate(choices)]):
        if number + 1 < of:
            return {**{earlier: index for earlier, index, _ in choices[:place]}, node: number + 1}
    return None


def place_of(name: str, position: int, number: int) -> Place:
    return (name, number if name in _SPLITS else position)


class SmallMock(MockBlock):
    """A captured block whose sources, GEMMs and biases are small."""

    def __init__(self, mock: MockBlock, scale: Scale) -> None:
        self.__dict__.update(mock.__dict__)
        block = mock.block
        self.scale = scale
        self.widths = [(scale.width(up.inner), scale.inner_width(up.outer)) for up in block.gemms[:-1]]
        self.widths.append((scale.inner_width(block.down.inner), scale.width(block.down.outer)))
        self._roles = {node: role for role, node in block.sources.items()}
        self._bias_widths = {
            bias.tensor: outer
            for gemm, (_, outer) in zip(block.gemms, self.widths, strict=True)
            if (bias := bias_after(gemm.node)) is not None
        }
        self.weights = {gemm.weights for gemm in block.gemms}
        self.weights.update(self.local.complete[node] for node in list(self.weights))
        gemms = {*self.own_gemms, *self.local.gemms}
        for node in (*block.region, *self.local.written):
            if node not in gemms and any(used in self.weights for used in node.all_input_nodes):
                self.weights.add(node)

    def shape(self, node: Node) -> list[int]:
        value, role = fake_value(node), self._roles.get(node)
        if node in self._bias_widths:
            return [*map(int, value.shape[:-1]), self._bias_widths[node]]
        if role is None or role == "counts":
            return super().shape(node)
        first, *inner = value.shape
        growing = self.scale.growing
        if growing is not None and isinstance(first, int):
            first = first // growing.captured * growing.small
        features = [self.scale.width(int(size)) if role in ("rows", "hidden") else int(size) for size in inner]
        return [concrete(first, self.sizes), *features]

    def has_unread_numbers(self) -> bool:
        growing = self.scale.growing
        if growing is None:
            return False
        if growing.captured == 1:
            return True
        found: list[int] = []

        def note(name: str, position: int, number: int) -> int:
            if name in _CUTS | _VALUES:
                found.append(number)
            return number

        for node in (*self.block.region, *self.local.written):
            if node not in self.weights and not self.functions.replaces(node):
                replace_numbers(node, note)
        return any(self.scale.is_unread(number) for number in found)


class _GuessingRun(MockRun):
    """A run that reads numbers as `chosen` says, by node: which of the combinations that work; else the first."""

    mock: SmallMock

    def __init__(self, mock: SmallMock, chosen: Mapping[Node, int]) -> None:
        super().__init__(mock, torch.Generator().manual_seed(0), SCENARIOS[0], None)
        self._chosen = chosen
        self.guess = Guess()
        # For each node with a choice: the choice taken, and the number of choices.
        self.choices: list[tuple[Node, int, int]] = []
        self._compares_shapes = False

    def run_block(self, sources: Mapping[Node, Any], answer: Answer) -> Any:
        return self._comparing(lambda: super(_GuessingRun, self).run_block(sources, answer))

    def run_local_form(self, sources: Mapping[Node, Any]) -> Any:
        return self._comparing(lambda: super(_GuessingRun, self).run_local_form(sources))

    def experts(self, rows: torch.Tensor, ids: torch.Tensor, travelling: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        # Other rows than those of the captured block.
        before, self._compares_shapes = self._compares_shapes, False
        try:
            return super().experts(rows, ids, travelling)
        finally:
            self._compares_shapes = before

    def _comparing(self, run: Callable[[], Any]) -> Any:
        self._compares_shapes = True
        try:
            return run()
        finally:
            self._compares_shapes = False

    def _run_node(self, node: Node, value_of: Callable[[Node], Any], answer: Answer) -> Any:
        if node in self.mock.weights:
            return None  # only GEMMs read them, and these are not computed
        value = super()._run_node(node, value_of, answer)
        if self._compares_shapes and not self.mock.functions.replaces(node):
            if not self._fits(fake_value(node), value):
                raise _Stuck(f"{node.name} ({node.target}) has another shape in small")
            self.guess.shapes[node] = _shapes(value)
        return value

    def _run_call(self, node: Node, value_of: Callable[[Node], Any], answer: Answer) -> Any:
        # The local form's copy of a node has the same numbers in the same sense.
        origin = self.local.origins.get(node, node)
        known = self.guess.readings.get(origin)
        if known is not None:
            return self._call(node, _arguments(node, known, value_of), answer)
        places = self._possible(node)
        working: list[tuple[dict[Place, Reading], Any]] = []
        failure: Exception | None = None
        for combination in itertools.islice(itertools.product(*places.values()), _MOST_COMBINATIONS):
            readings = dict(zip(places, combination, strict=True))
            try:
                value = self._call(node, _arguments(node, readings, value_of), answer)
            except Exception as error:  # whatever an operator says to sizes that do not fit
                failure = failure or error
                continue
            if not self._compares_shapes or self._fits(fake_value(node), value):
                working.append((readings, value))
        if not working:
            if isinstance(failure, ContractBroken):
                raise failure
            raise _Stuck(f"{node.name} ({node.target}) does not run in small") from failure
        index = self._chosen.get(origin, 0)
        if len(working) > 1:
            self.choices.append((origin, index, len(working)))
        self.guess.readings[origin], value = working[min(index, len(working) - 1)]
        return value

    def _possible(self, node: Node) -> dict[Place, list[Reading]]:
        """All readings of every number in the arguments of `node` that may be a size."""
        found: dict[Place, list[Reading]] = {}

        def note(name: str, position: int, number: int) -> int:
            # -1 stays what it is.
            if name in _USES and number != -1:
                found[place_of(name, position, number)] = self.mock.scale.readings(
                    number, _USES[name], prefers_growing=self._prefers_growing(node, name)
                )
            return number

        replace_numbers(node, note)
        return found

    def _prefers_growing(self, node: Node, name: str) -> bool:
        """Whether a number that may be a count of experts, or of ranks, is rather one of tokens here."""
        value = fake_value(node)
        if not isinstance(value, torch.Tensor) or node in self.local.sized:
            return True
        if has_trait(node, Trait.FILL, Trait.ARANGE) and value.dim() == 1:
            # What is made for each expert is counted by expert; a single number is one that ranks agree on.
            size = value.shape[0]
            return name == "fill_value" and isinstance(size, int) and size == 1
        return name not in _VALUES

    def _fits(self, captured: Any, value: Any) -> bool:
        """True where `value` has the captured shape in small, in some reading of every size that is known."""
        if isinstance(captured, (tuple, list)):
            return len(captured) == len(value) and all(map(self._fits, captured, value))
        if not isinstance(captured, torch.Tensor):
            return True
        if len(captured.shape) != len(value.shape):
            return False
        return all(self._is_small(size, small) for size, small in zip(captured.shape, value.shape, strict=True))

    def _is_small(self, captured: Any, small: int) -> bool:
        if isinstance(captured, torch.SymInt):
            symbols, sizes = captured.node.expr.free_symbols, self.mock.sizes
            return any(symbol not in sizes for symbol in symbols) or concrete(captured, sizes) == small
        return any(reading.small == small for reading in size_readings(self.mock.scale, captured))


def size_readings(scale: Scale, size: int) -> list[Reading]:
    return scale.readings(size, Use.SHAPE, prefers_growing=True)


def _arguments(node: Node, readings: Mapping[Place, Reading], value_of: Callable[[Node], Any]) -> Any:
    def small(name: str, position: int, number: int) -> int:
        reading = readings.get(place_of(name, position, number))
        # -1 is what fits, also where the local form's copy of a node says it for a number of rows.
        return number if reading is None or number == -1 else reading.small

    return map_nodes(replace_numbers(node, small), value_of)


def _shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_shapes(item) for item in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
