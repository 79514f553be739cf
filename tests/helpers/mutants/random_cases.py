"""Draw the random cases of a test: the same in every run, and others or more where the environment asks for them.

TEST_TIMES=10 draws ten times as many. TEST_SEED=7 draws other cases, except in tests of Hypothesis, whose examples are
always the same. `check_cases` prints the seed.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

SEED = int(os.environ.get("TEST_SEED", "0"))
TIMES = float(os.environ.get("TEST_TIMES", "1"))


def times(count: int) -> int:
    """Return `count` multiplied by TEST_TIMES."""
    return max(1, round(count * TIMES))


def check_cases(
    cases: Sequence[tuple[Any, ...]], check: Callable[..., str], count: int, needed: Collection[str]
) -> None:
    """Check `count` cases, drawn with TEST_SEED, whose outcome is not "no mutant".

    More cases are drawn until all outcomes `needed` have occurred. Raises AssertionError if one of them never occurs,
    and with the case if `check` raises.
    """
    count = times(count)
    print(f"\n{count} of {len(cases)} cases, TEST_SEED={SEED}")
    outcomes: collections.Counter[str] = collections.Counter()
    for case in random.Random(SEED).sample(cases, len(cases)):
        if outcomes.total() >= count and outcomes.keys() >= set(needed):
            break
        try:
            outcome = check(*case)
        except Exception as error:
            raise AssertionError(f"case {case}, TEST_SEED={SEED}") from error
        if outcome != "no mutant":
            outcomes[outcome] += 1
    assert outcomes.keys() >= set(needed), outcomes
