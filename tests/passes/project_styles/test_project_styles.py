"""Expert parallelism in the styles of other projects is eliminated, and every rank computes the same results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import pytest
import torch

from moepass.passes.graph.collectives import communications_of
from moepass.passes.ir.protocol import Group
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.project_styles.padded_style import PaddedRows
from tests.helpers.project_styles.style_layers import (
    EVEN_FORMS,
    SIZES,
    STYLES,
    capture_layer,
    capture_style,
    eliminate_readably,
    host_syncs,
)
from tests.helpers.project_styles.style_sizes import StyleSizes

# The style in the fast tests. Fast tests on real ranks (`test_adoption` and `test_project_style_ranks` in
# `runtime/execute`) have exact sizes and gathered tokens.
KINDS = ("flat weights", "gshard")


def check_style(style: str, ranks: int, sizes: StyleSizes, tokens: Sequence[Sequence[int]]) -> None:
    """Check that all ranks return the same without exchanges, for each number of tokens by rank in `tokens`."""
    captured = [capture_style(style, rank, ranks, sizes=sizes) for rank in range(ranks)]
    results = [eliminate_readably(rank) for rank in captured]
    for result in results:
        assert {block.form for block in result.plan.local_blocks} == {STYLES[style][1]}, result.plan.refusals
        assert collective_kinds(result) == []
        assert host_syncs(result) == []
    if STYLES[style][1] in EVEN_FORMS:
        tokens = [[counts[0]] * ranks for counts in tokens]
    check_same_outputs(captured, results, tokens, hidden=sizes.hidden, dtype=sizes.dtype)


@pytest.mark.parametrize(
    "style", [*KINDS, *(pytest.param(style, marks=pytest.mark.slow) for style in STYLES if style not in KINDS)]
)
def test_a_style_is_taken_whole_and_right(style: str) -> None:
    check_style(style, 2, dataclasses.replace(SIZES, experts=4), [(9, 9), (17, 5), (1, 30), (40, 40)])


@pytest.mark.slow
def test_counts_may_come_over_another_group_of_the_same_ranks() -> None:
    captured = capture_style("megatron", 0, 2)
    (name,) = captured.groups
    (count,) = (
        communication.node
        for communication in communications_of(captured.module.graph)
        if communication.kind == "all_gather"
    )
    count.args = tuple("counts" if argument == name else argument for argument in count.args)
    for members in ((5, 4), (4, 6), (), (4, 5)):
        groups = {name: Group(0, 2, (4, 5)), "counts": Group(0, 2, members)}
        result = eliminate_readably(dataclasses.replace(captured, groups=groups))
        is_taken = members == (4, 5)
        assert bool(result.plan.local_blocks) == is_taken, members
        assert bool(list(communications_of(result.module.graph))) != is_taken, members
        assert bool(result.refusals) != is_taken, members


def check_four_ranks_and_skew(style: str) -> None:
    check_style(style, 4, dataclasses.replace(SIZES, skew=3.0), [(9, 4, 33, 12), (2, 2, 2, 2)])


def check_bfloat16(style: str) -> None:
    check_style(style, 2, dataclasses.replace(SIZES, dtype=torch.bfloat16), [(9, 9), (33, 6)])


def check_fixed_sizes(style: str) -> None:
    captured = capture_style(style, 0, 2, tokens=12, dynamic=False)
    result = eliminate_readably(captured)
    assert {block.form for block in result.plan.local_blocks} == {STYLES[style][1]}, result.plan.refusals
    assert not list(communications_of(result.module.graph))


def check_one_expert_on_each_rank(style: str) -> None:
    check_style(style, 4, dataclasses.replace(SIZES, experts=4), [(9, 4, 33, 12)])


VARIANTS = (check_four_ranks_and_skew, check_bfloat16, check_fixed_sizes, check_one_expert_on_each_rank)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("check", VARIANTS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("style", [style for style in STYLES if style != "batched slots"][::2])
def test_a_variant_of_a_style_is_taken_whole_and_right(style: str, check: Callable[[str], None]) -> None:
    check(style)


def test_rows_that_are_padded_between_the_exchanges_are_refused() -> None:
    result = eliminate_readably(capture_layer(functools.partial(PaddedRows, SIZES), 0, 2))
    (refusal,) = result.refusals
    assert "divides an index or a size by the constant 128" in refusal.reason
    assert "padded_style.py" in refusal.source_line
    assert collective_kinds(result) == ["all_to_all"] * 3


@pytest.mark.slow
def test_batched_slots_in_bfloat16() -> None:
    """A batch of one expert is not recognised as a batch of experts, so this style is not in the test above."""
    check_bfloat16("batched slots")
