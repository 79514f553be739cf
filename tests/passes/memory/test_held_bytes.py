"""The peaks of synthetic runs, compared with a sum over every moment."""

from __future__ import annotations

import dataclasses

import sympy
from hypothesis import given
from hypothesis import strategies as st

from moepass.passes.memory.held_bytes import Operation, peaks

TOKENS, WIDTH = sympy.symbols("tokens width", integer=True, positive=True)
SIZES = st.sampled_from(
    [sympy.Integer(0), sympy.Integer(7), TOKENS, 3 * TOKENS, TOKENS * WIDTH, TOKENS * TOKENS + WIDTH]
)


@st.composite
def _runs(draw: st.DrawFn) -> tuple[list[Operation], set[int]]:
    operations: list[Operation] = []
    made: list[int] = []
    for index in range(draw(st.integers(1, 7))):
        reads = draw(st.sets(st.sampled_from(made), max_size=3)) if made else set()
        makes = {len(made) + extra: draw(SIZES) for extra in range(draw(st.integers(0, 2)))}
        made += makes
        temporary = draw(st.lists(SIZES, max_size=2))
        operations.append(Operation(f"operation {index}", frozenset(reads), makes, temporary))
    return operations, draw(st.sets(st.sampled_from(made), max_size=2)) if made else set()


def _by_hand(operations: list[Operation], kept: set[int], numbers: dict[sympy.Expr, int]) -> int:
    """Return the largest sum over all moments of the storages made before or at the moment, and read at it or later."""
    sizes = {storage: size for operation in operations for storage, size in operation.makes.items()}
    largest = 0
    for now, operation in enumerate(operations):
        made = {storage for operation_before in operations[: now + 1] for storage in operation_before.makes}
        needed = (
            {storage for operation_after in operations[now:] for storage in operation_after.reads}
            | kept
            | set(operation.makes)
        )
        held = sum(int(sizes[storage].xreplace(numbers)) for storage in made & needed)
        extra = max((int(size.xreplace(numbers)) for size in operation.temporary), default=0)
        largest = max(largest, held + extra)
    return largest


@given(_runs(), st.integers(1, 50), st.integers(1, 50))
def test_the_largest_peak_is_the_largest_sum_for_all_sizes(
    run: tuple[list[Operation], set[int]], tokens: int, width: int
) -> None:
    operations, outputs = run
    numbers = {TOKENS: sympy.Integer(tokens), WIDTH: sympy.Integer(width)}
    actual = [int(sympy.sympify(peak.expression).xreplace(numbers)) for peak in peaks(operations, outputs)]
    assert max(actual, default=0) == _by_hand(operations, outputs, numbers)  # type: ignore[arg-type]


def test_only_peaks_that_depend_on_sizes_are_kept() -> None:
    many = Operation("many tokens", frozenset(), {0: TOKENS * 5})
    wide = Operation("wide", frozenset(), {1: WIDTH * 3})
    small = Operation("small", frozenset(), {2: TOKENS * 4})
    assert [peak.where for peak in peaks([many, wide, small])] == ["many tokens", "wide"]


def test_a_result_may_reuse_the_memory_of_its_last_read_operand() -> None:
    first = Operation("first", frozenset(), {0: TOKENS})
    fused = Operation("fused", frozenset({0}), {1: TOKENS}, overwrites=frozenset({0}))
    (peak,) = peaks([first, fused], {1})
    assert peak.expression == TOKENS
    (peak,) = peaks([first, fused], {0, 1})
    assert peak.expression == 2 * TOKENS
    (peak,) = peaks([first, dataclasses.replace(fused, overwrites=frozenset())], {1})
    assert peak.expression == 2 * TOKENS


def test_a_kernel_holds_everything_to_its_end() -> None:
    read = Operation("read", frozenset(), {0: TOKENS})
    parts = [Operation(f"part {index}", frozenset({index}), {index + 1: TOKENS}) for index in range(3)]
    (peak,) = peaks([read, *parts])
    assert peak.expression == 2 * TOKENS
    (peak,) = peaks([read, *(dataclasses.replace(operation, kernel=7) for operation in parts)])
    assert peak.expression == 4 * TOKENS
