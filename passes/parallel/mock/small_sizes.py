"""How the numbers of a captured block may be read as sizes of a smaller one.

A block that was captured for 4096 tokens, 4096 wide, says 4096 for either, and 32768 for eight rows of each token. In a
small copy of the block each number stands for itself, for a multiple of the number of tokens (or of slots), which then
becomes a symbol, or for a width, which becomes a small one.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from moepass.passes.graph.nodes import fake_value
from moepass.passes.parallel.match.parallel_block import ParallelBlock, routed_tokens
from moepass.passes.parallel.mock.mock_run import MOST_ROWS, MockBlock, concrete
from moepass.passes.parallel.mock.scenarios import SCENARIOS

# Small sizes. Of two that differ from each other one does not pass for the other.
SMALL_TOKENS = (6, 7)
SMALL_SLOTS = (11, 12)
SMALL_HIDDEN = (5, 7)
# Divisible, since activation functions cut their rows into equal parts.
SMALL_INNER = 8
# From here on hardly a number is a multiple by chance.
_TELLING = 64
# Sizes beyond this mean the end of something, whatever it is.
_END = 2**31
# Numbers of 8 bytes that a run holds of each row, in widths of the block: what was measured.
_HELD_ROWS = 3


class Use(enum.Enum):
    """What a number in the arguments of a node is for: the shape of a tensor, a place to cut it at, a value."""

    SHAPE = enum.auto()
    CUT = enum.auto()
    VALUE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a number is in the small copy: `small`, which is `factor` times the growing size plus `offset`.

    A number that does not grow has the factor 0.
    """

    small: int
    factor: int = 0
    offset: int = 0

    @property
    def grows(self) -> bool:
        return self.factor != 0


@dataclasses.dataclass(frozen=True)
class Growing:
    """The size that differs from run to run: tokens or slots, `captured` of them, which have `rows` rows each."""

    captured: int
    small: int
    rows: int
    factors: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is made small: the growing size, if any, and widths; `inner` is the width between two GEMMs."""

    growing: Growing | None
    hidden: Mapping[int, int]
    inner: tuple[int, int]
    # Numbers that count experts, ranks or choices, and stand for themselves where nothing says otherwise.
    fixed: frozenset[int]

    def readings(self, number: int, use: Use, *, prefers_growing: bool) -> list[Reading]:
        """All readings of a number, the likeliest first. Only sizes may be widths.

        Any multiple of the growing size may be the shape of a tensor. What values are compared with, or cut at, must
        be one of the factors: only of these it is known that the mock runs go beyond.
        """
        itself = Reading(number)
        exact, near = list(self._multiples(number, (0,))), list(self._multiples(number, (1, -1)))
        widths = self._widths(number) if use is not Use.VALUE else ()
        found = [*exact, *widths, itself] if prefers_growing or number not in self.fixed else [itself, *exact, *widths]
        found += near
        growing = self.growing
        if use is Use.SHAPE and growing is not None and growing.captured >= _TELLING and abs(number) < _END:
            factor, rest = divmod(number, growing.captured)
            found += [Reading(factor * growing.small, factor)] if rest == 0 else []
        return list(dict.fromkeys(found))

    def _multiples(self, number: int, offsets: tuple[int, ...]) -> Iterator[Reading]:
        growing = self.growing
        if growing is None or abs(number) >= _END:
            return
        for offset in offsets:
            rest = number - offset
            if rest and rest % growing.captured == 0 and (growing.captured > 3 or not offset):
                factor = rest // growing.captured
                if abs(factor) in growing.factors:
                    yield Reading(factor * growing.small + offset, factor, offset)

    def _widths(self, number: int) -> Iterator[Reading]:
        if number in self.hidden:
            yield Reading(self.hidden[number])
        captured, small = self.inner
        if captured != small and number > 0 and number * small % captured == 0:
            yield Reading(number * small // captured)

    def is_unread(self, number: int) -> bool:
        """True for a multiple of the growing size that no reading takes for one."""
        growing = self.growing
        if growing is None or number == 0 or abs(number) >= _END or number % growing.captured:
            return False
        return abs(number) // growing.captured not in growing.factors

    def width(self, number: int) -> int:
        """A width of rows that go into the first GEMMs or come out of the last."""
        return self.hidden.get(number, number)

    def inner_width(self, number: int) -> int:
        captured, small = self.inner
        return number * small // captured


def scales(block: ParallelBlock, *, features_alike: bool) -> Iterator[Scale]:
    """What may be made small, the smallest block first."""
    growing = _growing(block)
    hidden = _small_hidden(block) if features_alike else {}
    inners = dict.fromkeys((_small_inner(block) if features_alike else (1, 1), (1, 1)))
    for size, inner in itertools.product(dict.fromkeys((growing, None)), inners):
        if size is not None or hidden or inner != (1, 1):
            yield Scale(size, hidden, inner, _fixed_numbers(block))


def run_bytes(mock: MockBlock, scale: Scale | None = None) -> int:
    """Bytes of a mock run of the block: as captured, or in small."""
    block = mock.block
    if scale is None:
        scale = Scale(None, {}, (1, 1), frozenset())
    widths = [scale.width(block.gemms[0].inner), scale.width(block.down.outer), scale.inner_width(block.down.inner)]
    widths += [scale.inner_width(gemm.outer) for gemm in block.gemms[:-1]]
    return 8 * _most_rows(mock, scale) * _HELD_ROWS * max(widths)


def _most_rows(mock: MockBlock, scale: Scale) -> int:
    """Rows in the largest of the mock runs."""
    block, growing, ranks = mock.block, scale.growing, mock.block.group.ranks
    own = concrete(_own_rows(block), mock.sizes) if growing is None else growing.small * growing.rows
    if block.form == "all_to_all":
        return int(own + max(MOST_ROWS, own) + ranks * max(13, len(block.own_experts)))
    if block.form == "all_to_all_slots":
        return int(2 * own)
    top_k = int(fake_value(block.sources["ids"]).shape[1])
    most = max(scenario.load for scenario in SCENARIOS) * own + 3
    return int(own * top_k if block.form == "all_reduce" else most * top_k * ranks)


def _growing(block: ParallelBlock) -> Growing | None:
    """The number of tokens, or of slots of an expert, where it is constant in the graph, and not 0."""
    experts, ranks = block.experts, block.group.ranks
    source = _own_rows(block)
    if not isinstance(source, int) or source == 0:
        return None
    owned = {stop - start for start, stop in itertools.pairwise(block.bounds)}
    if block.form == "all_to_all_slots":
        slots = source // experts
        factors = {1, experts, *owned, *block.bounds, *(ranks * own for own in owned)} - {0}
        return None if slots * experts != source else _sized(slots, SMALL_SLOTS, experts, factors)
    if block.form == "all_to_all":
        tokens = routed_tokens(block)
        known = tokens is not None and tokens.is_Integer and tokens > 0 and source % int(tokens) == 0
        each = source // int(tokens) if known and tokens is not None else 1
        # Not those of all ranks: a peer may bring more than all others.
        return _sized(source // each, SMALL_TOKENS, each, {1, each})
    top_k = int(fake_value(block.sources["ids"]).shape[1])
    places = {rank * each for rank in (*range(1, ranks + 1),) for each in (1, top_k)}
    return _sized(source, SMALL_TOKENS, 1, places)


def _own_rows(block: ParallelBlock) -> Any:
    """How many rows this rank brings: tokens, pairs of a token and an expert, or slots."""
    roles = ("rows", "hidden")
    (source,) = (block.sources[role] for role in roles if role in block.sources)
    return fake_value(source).shape[0]


def _sized(captured: int, small: tuple[int, ...], rows: int, factors: set[int]) -> Growing:
    # Another size than the captured one, so that what grows is told from what does not.
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
    own = block.own_experts
    counts = {len(own), block.experts, block.group.ranks, *block.bounds, block.group.rank}
    counts.update(int(fake_value(node).shape[1]) for role, node in block.sources.items() if role == "ids")
    return frozenset(count + step for count in counts for step in (-1, 0, 1))
