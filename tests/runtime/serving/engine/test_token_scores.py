"""Scores read from a few rows of logits at a time equal those of all logits at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.runtime.serving.engine import token_scores as scores_module
from moepass.runtime.serving.engine.token_scores import WantedScores, score_tokens, token_scores

VOCABULARY = 23


@st.composite
def wanted_scores(draw: st.DrawFn) -> tuple[int, WantedScores]:
    count = draw(st.integers(1, 9))
    rows = sorted(draw(st.lists(st.integers(0, count - 1), max_size=30)))
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=len(rows), max_size=len(rows)))
    top = draw(st.lists(st.integers(0, VOCABULARY), min_size=count, max_size=count))
    return count, WantedScores(np.array(rows, np.int64), np.array(tokens, np.int64), np.array(top, np.int64))


@settings(max_examples=60, deadline=None)
@given(asked=wanted_scores(), rows_at_once=st.integers(1, 5), seed=st.integers(0, 99))
def test_scores_in_parts_equal_those_of_all_logits(
    asked: tuple[int, WantedScores], rows_at_once: int, seed: int
) -> None:
    count, wanted = asked
    states = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores_module, "LOGITS_BYTES", 4 * VOCABULARY * rows_at_once)
        scores = token_scores(score_tokens(states, lambda rows: rows, VOCABULARY, wanted, wanted.indices), wanted)
    log_probabilities = states.log_softmax(-1).numpy()
    expected = log_probabilities[wanted.rows, wanted.tokens]
    np.testing.assert_allclose(scores.log_probabilities, expected, atol=1e-5)
    for row, most in enumerate(wanted.top):
        best = np.argsort(-log_probabilities[row])[:most]
        assert scores.top_tokens[row, :most].tolist() == best.tolist()
        np.testing.assert_allclose(scores.top_log_probabilities[row, :most], log_probabilities[row, best], atol=1e-5)


def test_no_logits_are_made_for_more_rows_than_fit() -> None:
    seen = []

    def head(states: torch.Tensor) -> torch.Tensor:
        seen.append(len(states))
        return states

    wanted = WantedScores(np.arange(7), np.zeros(7, np.int64), np.zeros(7, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores_module, "LOGITS_BYTES", 4 * VOCABULARY * 3)
        score_tokens(torch.randn(7, VOCABULARY), head, VOCABULARY, wanted, wanted.indices)
    assert seen == [3, 3, 1]


def test_no_logits_are_made_of_rows_that_are_only_read_as_vectors() -> None:
    wanted = WantedScores(np.array([4]), np.array([0]), np.array([0, 0, 0, 0, 0, 0, 1]))
    seen = []

    def head(states: torch.Tensor) -> torch.Tensor:
        seen.append(states[0, 0].item())
        return states

    states = torch.arange(7.0)[:, None].expand(7, VOCABULARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores_module, "LOGITS_BYTES", 4 * VOCABULARY * 2)
        score_tokens(states, head, VOCABULARY, wanted, wanted.indices)
    assert seen == [4, 6]
