"""What is computed of a question's probabilities, as the decision APIs define it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def expected_level(probabilities: Sequence[float]) -> float:
    """The mean level, levels being numbered from 0."""
    return math.fsum(level * probability for level, probability in enumerate(probabilities))


def confidence(kind: Literal["choice", "score"], probabilities: Sequence[float]) -> float:
    """0 where all options are equally likely, 1 where one is certain; as transformers' decision pipeline has it.

    Of a choice: how far the best one is above chance. Of a score: how near the levels lie to the best one, measured
    against levels that are equally likely.
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
