"""Readings of the numbers in a captured block as sizes of a smaller block.

In a block of 4096 tokens with 4096 features, 4096 is either of these sizes, and 32768 is the number of rows if each
token has eight. In a small copy a number is a constant, a multiple of the number of tokens or slots, which becomes a
symbol, or a width, which becomes smaller.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.arguments import UNNAMED
from moepass.passes.parallel.match.parallel_block import ParallelBlock, routed_tokens
from moepass.passes.parallel.mock.mock_run import MOST_ROWS, MockBlock, concrete
from moepass.passes.parallel.mock.scenarios import SCENARIOS
from moepass.passes.parallel.ranges.growing_sizes import END

# Small sizes. All differ, so that none is mistaken for another.
SMALL_TOKENS = (6, 7)
SMALL_SLOTS = (11, 12)
SMALL_HIDDEN = (5, 7)
# Divisible, since activation functions split their rows into equal parts.
SMALL_INNER = 8
# From this size on, few numbers are multiples by chance.
_LARGE_SIZE = 64
# Names of arguments whose numbers are shapes, indices at which to slice, or values.
SHAPES = {
    "size", "sizes", "shape", "split_size", "split_sizes", "length", "output_size", "repeats", "input_split_sizes",
    "output_split_sizes",
}  # fmt: skip
CUTS = {"start", "end", "pad"}
VALUES = {UNNAMED, "other", "fill_value", "min", "max", "value", "s"}
# [Empirical] Measured copies of the widest rows, of 8 bytes per number, that a run holds at once.
_HELD_ROWS = 3


@dataclasses.dataclass(frozen=True)
class Reading:
    """A number in the small copy: `small` is `factor` times the growing size plus `offset`, and constant for 0."""

    small: int
    factor: int = 0
    offset: int = 0

    @property
    def grows(self) -> bool:
        """True if the number depends on the growing size."""
        return self.factor != 0


@dataclasses.dataclass(frozen=True)
class Growing:
    """The growing size, a number of tokens or slots with `rows` rows each, and `factors` by which it is multiplied."""

    captured: int
    small: int
    rows: int
    factors: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes that become small: the growing size, if any, the `hidden` widths, and the `inner` one between GEMMs.

    All sizes stay as captured by default.
    """

    growing: Growing | None = None
    hidden: Mapping[int, int] = dataclasses.field(default_factory=dict)
    inner: tuple[int, int] = (1, 1)
    # Numbers of experts, ranks or choices, which are more likely constants than sizes.
    fixed: frozenset[int] = frozenset()

    def readings(self, number: int, argument: str, *, prefers_growing: bool) -> list[Reading]:
        """Return all readings of a number in `argument`, the likeliest first. Only shapes and indices may be widths.

        A shape may be any multiple of the growing size. Values and indices may only be multiples by one of the factors,
        since only these are known to be exceeded in mock runs.
        """
        itself = Reading(number)
        exact, near = list(self._multiples(number, (0,))), list(self._multiples(number, (1, -1)))
        widths = self._widths(number) if argument not in VALUES else ()
        result = [*exact, *widths, itself] if prefers_growing or number not in self.fixed else [itself, *exact, *widths]
        result += near
        growing = self.growing
        if argument in SHAPES and growing is not None and growing.captured >= _LARGE_SIZE and abs(number) < END:
            factor, remainder = divmod(number, growing.captured)
            result += [Reading(factor * growing.small, factor)] if remainder == 0 else []
        return list(dict.fromkeys(result))

    def _multiples(self, number: int, offsets: tuple[int, ...]) -> Iterator[Reading]:
        growing = self.growing
        if growing is None or abs(number) >= END:
            return
        for offset in offsets:
            multiple = number - offset
            if multiple and multiple % growing.captured == 0 and (growing.captured > 3 or not offset):
                factor = multiple // growing.captured
                if abs(factor) in growing.factors:
                    yield Reading(factor * growing.small + offset, factor, offset)

    def _widths(self, number: int) -> Iterator[Reading]:
        if number in self.hidden:
            yield Reading(self.hidden[number])
        captured, small = self.inner
        if captured != small and number > 0 and number * small % captured == 0:
            yield Reading(number * small // captured)

    def is_unread(self, number: int) -> bool:
        """Return whether `number` is a multiple of the growing size that has no such reading."""
        growing = self.growing
        if growing is None or number == 0 or abs(number) >= END or number % growing.captured:
            return False
        return abs(number) // growing.captured not in growing.factors

    def width(self, number: int) -> int:
        """Return the small width of the inputs of the first GEMMs or the outputs of the last one."""
        return self.hidden.get(number, number)

    def gemm_widths(self, block: ParallelBlock) -> list[tuple[int, int]]:
        """Return the small widths of the rows into and out of each GEMM."""
        captured, small = self.inner
        ups = [(self.width(gemm.inner), gemm.outer * small // captured) for gemm in block.gemms[:-1]]
        return [*ups, (block.down.inner * small // captured, self.width(block.down.outer))]


def scales(block: ParallelBlock, *, features_alike: bool) -> Iterator[Scale]:
    """Yield the possible scales of a small copy, the smallest first."""
    growing = _growing(block)
    hidden = _small_hidden(block) if features_alike else {}
    inners = dict.fromkeys((_small_inner(block) if features_alike else (1, 1), (1, 1)))
    for size, inner in itertools.product(dict.fromkeys((growing, None)), inners):
        if size is not None or hidden or inner != (1, 1):
            yield Scale(size, hidden, inner, _fixed_numbers(block))


def run_bytes(mock: MockBlock, scale: Scale) -> int:
    """Return the memory in bytes of a mock run of the block's copy in `scale`."""
    widest = max(itertools.chain.from_iterable(scale.gemm_widths(mock.block)))
    return 8 * _most_rows(mock, scale) * _HELD_ROWS * widest


def _most_rows(mock: MockBlock, scale: Scale) -> int:
    """Return the number of rows in the largest mock run."""
    block, growing, ranks = mock.block, scale.growing, mock.block.group.ranks
    own_rows = concrete(own_rows_of(block), mock.sizes) if growing is None else growing.small * growing.rows
    if block.form == "all_to_all":
        return int(own_rows + max(MOST_ROWS, own_rows) + ranks * max(13, len(block.own_experts)))
    if block.form == "all_to_all_slots":
        return int(2 * own_rows)
    gathered = max(scenario.load for scenario in SCENARIOS) * own_rows + 3
    return block.top_k * int(own_rows if block.form == "all_reduce" else gathered * ranks)


def _growing(block: ParallelBlock) -> Growing | None:
    """Return the number of tokens, or of slots per expert, if it is constant in the graph and not 0."""
    experts, ranks = block.experts, block.group.ranks
    rows = own_rows_of(block)
    if not isinstance(rows, int) or rows == 0:
        return None
    if block.form == "all_to_all_slots":
        slots = rows // experts
        owned = block.expert_counts
        factors = {1, experts, *owned, *block.bounds, *(ranks * count for count in owned)} - {0}
        return None if slots * experts != rows else _sized(slots, SMALL_SLOTS, experts, factors)
    if block.form == "all_to_all":
        tokens = routed_tokens(block)
        is_known = tokens is not None and tokens.is_Integer and tokens > 0 and rows % int(tokens) == 0
        rows_per_token = rows // int(tokens) if is_known and tokens is not None else 1
        # Not the tokens of all ranks, since one peer may bring more than all others together.
        return _sized(rows // rows_per_token, SMALL_TOKENS, rows_per_token, {1, rows_per_token})
    multiples = {rank * pairs for rank in range(1, ranks + 1) for pairs in (1, block.top_k)}
    return _sized(rows, SMALL_TOKENS, 1, multiples)


def own_rows_of(block: ParallelBlock) -> Any:
    """Return the number of rows of this rank: tokens, pairs of a token and an expert, or slots."""
    return fake_value(block.sources["rows" if "rows" in block.sources else "hidden"]).shape[0]


def _sized(captured: int, small: tuple[int, ...], rows: int, factors: set[int]) -> Growing:
    # The small size differs from the captured one, so that growing numbers differ from constants.
    chosen = next(size for size in small if size != captured)
    return Growing(captured, chosen, rows, frozenset(factors))


def _small_hidden(block: ParallelBlock) -> dict[int, int]:
    widths = dict.fromkeys((block.gemms[0].inner, block.down.outer))
    return {width: small for width, small in zip(widths, SMALL_HIDDEN, strict=False) if width > small}


def _small_inner(block: ParallelBlock) -> tuple[int, int]:
    inner = block.down.inner
    fits = all(gemm.outer * SMALL_INNER % inner == 0 for gemm in block.gemms[:-1])
    return (inner, SMALL_INNER) if inner > SMALL_INNER and fits else (1, 1)


def _fixed_numbers(block: ParallelBlock) -> frozenset[int]:
    own_experts = block.own_experts
    counts = {len(own_experts), block.experts, block.group.ranks, *block.bounds, block.group.rank}
    if "ids" in block.sources:
        counts.add(block.top_k)
    return frozenset(count + step for count in counts for step in (-1, 0, 1))
