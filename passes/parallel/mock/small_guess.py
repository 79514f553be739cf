"""Find out which numbers of a captured block are sizes, by running it node by node with small sizes and mock peers.

A number may have several readings (small_sizes.py). A reading is possible if the node runs with it, and its result has
the small form of the captured shape. The likeliest of several is tried first, and others if the run fails later.

A wrong guess does no harm. With the captured sizes every guess has exactly the captured numbers, and it is proved for
all sizes, so it can only fail to be proved.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, map_nodes
from moepass.passes.ops.arguments import replace_numbers
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.parallel.match.parallel_block import bias_after
from moepass.passes.parallel.mock.mock_run import Answer, ContractBroken, MockBlock, MockRun, Steps, concrete
from moepass.passes.parallel.mock.scenarios import SCENARIOS
from moepass.passes.parallel.mock.small_sizes import CUTS, SHAPES, VALUES, Reading, Scale

# List arguments in which equal numbers have equal readings.
_SPLITS = {"split_sizes", "input_split_sizes", "output_split_sizes", "repeats"}
_MOST_COMBINATIONS = 64
_MOST_RUNS = 24

# Position of a number in a node's arguments: the name of the argument, and the index in a list or the number itself.
Position = tuple[str, int]


class NoSmallCopy(Exception):  # noqa: N818  control flow of the proof
    """The reason why no small copy of a block can be made."""


class _Stuck(Exception):  # noqa: N818  control flow of the search
    """A node that runs with no reading of its numbers."""


@dataclasses.dataclass
class Guess:
    """Readings of all numbers, by node, and the shapes of the block's nodes in a run with them."""

    readings: dict[Node, dict[Position, Reading]] = dataclasses.field(default_factory=dict)
    shapes: dict[Node, Any] = dataclasses.field(default_factory=dict)


def guesses(small: SmallMock, check: Callable[[MockRun], None]) -> Iterator[Guess]:
    """Yield guesses with which the first scenario passes `check`, the likeliest first.

    Raises NoSmallCopy if none is found, and ContractBroken if none exists.
    """
    chosen: dict[Node, int] | None = {}
    # The failed guess with which most nodes ran is the most likely one.
    furthest: tuple[int, ContractBroken] | None = None
    has_guess = False
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
            has_guess = True
            yield run.guess
        chosen = _next_choice(run.choices)
    if has_guess:
        return
    if chosen is not None:
        raise NoSmallCopy("too many of its numbers may be sizes")
    if furthest is None or small.has_unread_numbers():
        raise NoSmallCopy("some of its numbers are neither sizes nor known constants")
    raise furthest[1]


def _next_choice(choices: list[tuple[Node, int, int]]) -> dict[Node, int] | None:
    """Return the next combination of `choices`, each a node with its choice and its number of choices; else None."""
    for index, (node, number, count) in reversed([*enumerate(choices)]):
        if number + 1 < count:
            return {**{earlier: choice for earlier, choice, _ in choices[:index]}, node: number + 1}
    return None


class SmallMock(MockBlock):
    """A captured block whose sources, GEMMs and biases are small."""

    def __init__(self, mock: MockBlock, scale: Scale) -> None:
        self.__dict__.update(mock.__dict__)
        block = mock.block
        self.scale = scale
        self.widths = scale.gemm_widths(block)
        self._roles = {node: role for role, node in block.sources.items()}
        self._bias_widths = {
            bias.tensor: outer
            for gemm, (_, outer) in zip(block.gemms, self.widths, strict=True)
            if (bias := bias_after(gemm.node)) is not None
        }
        complete = self.local.complete
        self._bias_widths |= {complete[bias]: width for bias, width in self._bias_widths.items() if bias in complete}
        shards = {gemm.weights for gemm in block.gemms}
        self.weights = shards | {complete[shard] for shard in shards}
        for node in (*block.region, *self.local.written):
            if node not in self.gemms and any(used in self.weights for used in node.all_input_nodes):
                self.weights.add(node)

    def shape(self, node: Node) -> list[int]:
        """Return the small shape of a source or bias."""
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
        """Return whether a value or index may be a size that no reading takes for one."""
        if self.scale.growing is not None and self.scale.growing.captured == 1:
            return True
        return any(
            name in CUTS | VALUES and self.scale.is_unread(number)
            for node in (*self.block.region, *self.local.written)
            if node not in self.weights and not self.functions.replaces(node)
            for name, _, number in _numbers(node)
        )


class _GuessingRun(MockRun):
    """A run that guesses readings. `chosen` selects one of the working combinations of a node, else it is the first."""

    mock: SmallMock

    def __init__(self, mock: SmallMock, chosen: Mapping[Node, int]) -> None:
        super().__init__(mock, torch.Generator().manual_seed(0), SCENARIOS[0], None)
        self._chosen = chosen
        self.guess = Guess()
        # Nodes with several working combinations: the selected one, and their number.
        self.choices: list[tuple[Node, int, int]] = []
        self._compares_shapes = False

    def _evaluate(self, steps: Steps, sources: Mapping[Node, Any], answer: Answer) -> Any:
        # Experts alone compute other rows than those of the captured block, so their shapes differ.
        before, self._compares_shapes = self._compares_shapes, steps is not self.mock.experts
        try:
            return super()._evaluate(steps, sources, answer)
        finally:
            self._compares_shapes = before

    def _run_node(self, node: Node, value_of: Callable[[Node], Any], answer: Answer) -> Any:
        if node in self.mock.weights:
            return None  # only GEMMs read weights, and they are not computed
        value = super()._run_node(node, value_of, answer)
        if self._compares_shapes and not self.mock.functions.replaces(node):
            if not self._fits(fake_value(node), value):
                raise _Stuck(f"{node.name} ({node.target}) has another shape with small sizes")
            self.guess.shapes[node] = torch.fx.node.map_aggregate(value, lambda item: getattr(item, "shape", None))
        return value

    def _run_call(self, node: Node, value_of: Callable[[Node], Any], answer: Answer) -> Any:
        # A node and its copy in the local form have the same readings.
        origin = self.local.origins.get(node, node)

        def small_arguments(readings: Mapping[Position, Reading]) -> Any:
            return map_nodes(read_numbers(node, readings, lambda reading: reading.small), value_of)

        guessed = self.guess.readings.get(origin)
        if guessed is not None:
            return self._call(node, small_arguments(guessed), answer)
        possible = self._possible(node)
        working: list[tuple[dict[Position, Reading], Any]] = []
        failure: Exception | None = None
        for combination in itertools.islice(itertools.product(*possible.values()), _MOST_COMBINATIONS):
            readings = dict(zip(possible, combination, strict=True))
            try:
                value = self._call(node, small_arguments(readings), answer)
            except Exception as error:  # operators raise anything for sizes that do not fit
                failure = failure or error
                continue
            if not self._compares_shapes or self._fits(fake_value(node), value):
                working.append((readings, value))
        if not working:
            if isinstance(failure, ContractBroken):
                raise failure
            raise _Stuck(f"{node.name} ({node.target}) does not run with small sizes") from failure
        index = self._chosen.get(origin, 0)
        if len(working) > 1:
            self.choices.append((origin, index, len(working)))
        self.guess.readings[origin], value = working[min(index, len(working) - 1)]
        return value

    def _possible(self, node: Node) -> dict[Position, list[Reading]]:
        """Return the possible readings of every number in the arguments of `node` that may be a size."""
        readings: dict[Position, list[Reading]] = {}
        for name, index, number in _numbers(node):
            if name in SHAPES | CUTS | VALUES and number != -1:  # -1 is inferred by operators
                prefers_growing = self._prefers_growing(node, name)
                possible = self.mock.scale.readings(number, name, prefers_growing=prefers_growing)
                readings[_position_of(name, index, number)] = possible
        return readings

    def _prefers_growing(self, node: Node, name: str) -> bool:
        """Return whether a number that may count experts or ranks more likely counts tokens here."""
        value = fake_value(node)
        if not isinstance(value, torch.Tensor) or node in self.local.sized:
            return True
        if has_trait(node, Trait.FILL, Trait.ARANGE) and value.dim() == 1:
            # Vectors have an element per expert, but a single number is a capacity that ranks agree on.
            size = value.shape[0]
            return name == "fill_value" and isinstance(size, int) and size == 1
        return name not in VALUES

    def _fits(self, captured: Any, value: Any) -> bool:
        """Return whether `value` has the captured shape, for some reading of every known size."""
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
    """Return the readings of a size of a tensor, the likeliest first."""
    return scale.readings(size, "size", prefers_growing=True)


def read_numbers(node: Node, readings: Mapping[Position, Reading], number_of: Callable[[Reading], Any]) -> Any:
    """Return the arguments of `node`, with `number_of(reading)` for each number that has a reading."""

    def replace(name: str, index: int, number: int) -> Any:
        reading = readings.get(_position_of(name, index, number))
        # The local form's copy of a node may have -1 instead of a number of rows.
        return number if reading is None or number == -1 else number_of(reading)

    return replace_numbers(node, replace)


def _numbers(node: Node) -> list[tuple[str, int, int]]:
    """Return the numbers in the arguments of `node`, with the name of the argument and the index in a list."""
    numbers: list[tuple[str, int, int]] = []
    replace_numbers(node, lambda *entry: numbers.append(entry))
    return numbers


def _position_of(name: str, index: int, number: int) -> Position:
    """Return the position of `number` in the argument `name`; `index` is its index in a list."""
    return (name, number if name in _SPLITS else index)
