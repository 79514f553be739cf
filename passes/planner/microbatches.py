"""Micro-batches of a serving engine: how sequences are cut, how ranks wait, and how a pipeline runs them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moepass.passes.machine.layer_times import Sequences

# As many micro-batches are simulated as this, for each that is under way at once.
_ROUNDS = 24
# Of a micro-batch through a stage. Beyond so many fewer rounds are simulated, but so many at least.
_MOST_STEPS = 4_000_000
_FEWEST_ROUNDS = 3


def micro_batches(sequence: int, tokens: int) -> tuple[Sequences, ...]:
    """How sequences of `sequence` tokens are cut into micro-batches of about `tokens`: one round, which then repeats.

    Short sequences go together; a long one goes in chunks, each of which looks back at those before it.
    """
    if sequence <= tokens:
        return (Sequences(max(1, tokens // sequence), sequence),)
    starts = range(0, sequence, tokens)
    return tuple(Sequences(1, min(tokens, sequence - start), start) for start in starts)


def slowest_seconds(micro_batch_seconds: Sequence[float], ranks: int) -> float:
    """Expected seconds of the slowest of `ranks` in one step, `micro_batch_seconds` being those of one round.

    Each rank has sequences of its own, which arrive at any time. So at each moment a rank is at any micro-batch of
    the round with the same probability, independently of the other ranks.
    """
    ordered, count = sorted(micro_batch_seconds), len(micro_batch_seconds)
    return sum(
        seconds * (((place + 1) / count) ** ranks - (place / count) ** ranks) for place, seconds in enumerate(ordered)
    )


def pipeline_seconds(stage_seconds: Sequence[float], stages: int) -> float:
    """Seconds per round of micro-batches in the steady state, `stage_seconds` being what each takes on one device.

    As many are under way as there are stages: the next enters once the first has left, because only then is it known
    what comes next. So a long micro-batch holds up short ones behind and before it.
    """
    if min(stage_seconds) == max(stage_seconds):
        return math.fsum(stage_seconds)  # every stage is always busy
    rounds = max(_ROUNDS, -(-_ROUNDS * stages // len(stage_seconds)))
    # Long sequences on many stages: the mean of fewer rounds has to do.
    rounds = max(_FEWEST_ROUNDS, min(rounds, _MOST_STEPS // (2 * len(stage_seconds) * stages)))
    ends = [0.0] * stages
    left: list[float] = []
    for number in range(2 * rounds * len(stage_seconds)):
        seconds = stage_seconds[number % len(stage_seconds)]
        moment = left[number - stages] if number >= stages else 0.0
        for stage in range(stages):
            moment = ends[stage] = max(moment, ends[stage]) + seconds
        left.append(moment)
    half = rounds * len(stage_seconds)
    return (left[-1] - left[half - 1]) / rounds
