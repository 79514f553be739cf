"""Micro-batches of a serving engine, against cases computed by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.machine.layer_times import Sequences, sequences_of
from moepass.passes.planner.microbatches import micro_batches, pipeline_seconds, slowest_seconds


def test_short_texts_go_together_and_long_ones_in_chunks() -> None:
    assert micro_batches(1000, 4096) == (Sequences(4, 1000),)
    assert micro_batches(4096, 4096) == (Sequences(1, 4096),)
    assert micro_batches(10000, 4096) == (Sequences(1, 4096), Sequences(1, 4096, 4096), Sequences(1, 1808, 8192))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200_000), st.integers(64, 10_000))
def test_chunks_are_the_text_and_no_larger_than_asked(sequence: int, tokens: int) -> None:
    parts = micro_batches(sequence, tokens)
    assert all(microbatch.tokens <= max(tokens, 1) for microbatch in parts)
    if sequence > tokens:
        assert sum(microbatch.tokens for microbatch in parts) == sequence
        assert [microbatch.prefix for microbatch in parts] == list(range(0, sequence, tokens))


@pytest.mark.parametrize("stages", [1, 2, 8])
def test_equal_micro_batches_keep_every_stage_busy(stages: int) -> None:
    assert pipeline_seconds([3.0], stages) == pytest.approx(3.0)
    assert pipeline_seconds([3.0, 3.0, 3.0], stages) == pytest.approx(9.0)


def test_one_device_never_waits() -> None:
    assert pipeline_seconds([1.0, 5.0, 2.0], 1) == pytest.approx(8.0)


def test_a_long_micro_batch_holds_up_short_ones() -> None:
    # Two stages, two micro-batches under way, of 1 and 3 seconds in turns. By hand, from a long one's start at 0:
    # it leaves stage 0 at 3 and stage 1 at 6; the short one after it leaves stage 0 at 4 and stage 1, which is busy
    # until 6, at 7; the next long one enters when the first has left, at 6: a round takes 6 seconds for 4 of work.
    assert pipeline_seconds([3.0, 1.0], 2) == pytest.approx(6.0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(1, 5))
def test_a_round_takes_at_least_its_work_and_at_most_all_in_a_row(seconds: list[float], stages: int) -> None:
    seconds_of_pipeline = pipeline_seconds(seconds, stages)
    assert sum(seconds) * (1 - 1e-9) <= seconds_of_pipeline <= stages * sum(seconds) * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5), st.integers(1, 4))
def test_the_slowest_of_ranks_is_the_mean_over_all_that_they_may_be_at(seconds: list[float], ranks: int) -> None:
    together = [max(at) for at in itertools.product(seconds, repeat=ranks)]
    assert slowest_seconds(seconds, ranks) == pytest.approx(sum(together) / len(together))


def test_texts_of_tokens() -> None:
    assert sequences_of(65536, 4096) == Sequences(16, 4096)
    assert sequences_of(5000, 4096) == Sequences(1, 4096)
    assert sequences_of(100, 4096) == Sequences(1, 100)
