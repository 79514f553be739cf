"""Scores and confidences of a question's probabilities, as the decision APIs define them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def expected_level(probabilities: Sequence[float]) -> float:
    """Return the mean level; levels are numbered from 0."""
    return math.fsum(level * probability for level, probability in enumerate(probabilities))


def confidence(kind: Literal["choice", "score"], probabilities: Sequence[float]) -> float:
    """Return a confidence from 0 (all options equally likely) to 1 (one option is certain).

    It is defined as in transformers' decision pipeline. For a choice: how far the best option is above chance. For a
    score: the mean distance of the levels to the best one, relative to that of equally likely levels.
    """
    count = len(probabilities)
    if count == 1:
        return 1.0
    best = max(range(count), key=probabilities.__getitem__)
    if kind == "choice":
        return max(0.0, (probabilities[best] - 1 / count) / (1 - 1 / count))
    distance = math.fsum(probability * abs(level - best) for level, probability in enumerate(probabilities))
    uniform = math.fsum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / uniform)
