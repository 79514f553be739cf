"""Scores of the tokens of cached blocks."""

from __future__ import annotations

import numpy as np
import pytest

from moepass.runtime.serving.cache.block_index import BlockScores
from moepass.runtime.serving.requests.answer import ScoredTokens


def scored(*values: int) -> ScoredTokens:
    numbers = np.array(values)
    return ScoredTokens(
        -numbers.astype(np.float32),
        np.stack([numbers, numbers + 1], axis=1).astype(np.int32),
        np.stack([-numbers, -numbers - 1], axis=1).astype(np.float32) / 2,
    )


def test_what_was_written_is_read() -> None:
    scores = BlockScores(3)
    scores.write(np.array([17, -1, 47]), scored(1, 2, 3))
    assert np.flatnonzero(scores.known(np.array([0, 1, 2]))).tolist() == [17, 47]
    stored = scores.read(np.array([47, 17]))
    assert stored.log_probabilities.tolist() == [-3, -1]
    assert stored.top_tokens.tolist() == [[3], [1]]
    assert stored.top_log_probabilities.tolist() == [[-1.5], [-0.5]]


def test_what_is_known_stays_until_the_block_is_forgotten() -> None:
    scores = BlockScores(2)
    scores.write(np.array([16]), scored(1))
    scores.write(np.array([16, 17]), scored(5, 6))
    assert scores.read(np.array([16, 17])).top_tokens.tolist() == [[1], [6]]
    scores.forget(1)
    assert not scores.known(np.array([1])).any()
    scores.write(np.array([16]), scored(5))
    assert scores.read(np.array([16])).top_tokens.tolist() == [[5]]


def test_no_block_knows_nothing() -> None:
    scores = BlockScores(1)
    scores.write(np.arange(16), scored(*range(16)))
    assert scores.known(np.array([-1, 0])).sum(axis=1).tolist() == [0, 16]
    assert BlockScores(0).known(np.array([-1])).tolist() == [[False] * 16]


def test_what_is_not_known_is_refused() -> None:
    scores = BlockScores(1)
    scores.write(np.array([1]), scored(1))
    with pytest.raises(AssertionError):
        scores.read(np.array([1, 2]))
