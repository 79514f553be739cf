"""Micro-batches of a serving engine: how sequences are cut, how ranks wait, and how a pipeline runs them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moepass.passes.machine.layer_times import Sequences

# Simulated micro-batches for each one in flight.
_ROUNDS = 24
# Limit on the simulated steps of a micro-batch through a stage; beyond it, fewer rounds are simulated, down to three.
_MOST_STEPS = 4_000_000
_FEWEST_ROUNDS = 3


def micro_batches(sequence: int, tokens: int) -> tuple[Sequences, ...]:
    """Cut sequences of `sequence` tokens into micro-batches of about `tokens`, and return one round, which repeats.

    Several short sequences form one micro-batch. A long sequence is cut into chunks, each of which attends to the
    earlier ones.
    """
    if sequence <= tokens:
        return (Sequences(max(1, tokens // sequence), sequence),)
    starts = range(0, sequence, tokens)
    return tuple(Sequences(1, min(tokens, sequence - start), start) for start in starts)


def slowest_seconds(micro_batch_seconds: Sequence[float], ranks: int) -> float:
    """Return the expected seconds of the slowest of `ranks` in one step.

    Sequences arrive at each rank independently, at any time. So at each moment a rank is at any micro-batch of the
    round, whose seconds are `micro_batch_seconds`, with the same probability.
    """
    ordered, count = sorted(micro_batch_seconds), len(micro_batch_seconds)
    return sum(
        seconds * (((index + 1) / count) ** ranks - (index / count) ** ranks) for index, seconds in enumerate(ordered)
    )


def pipeline_seconds(stage_seconds: Sequence[float], stages: int) -> float:
    """Return the steady-state seconds per round of micro-batches, each of which takes `stage_seconds` on one device.

    There are as many micro-batches in flight as stages: one enters when another leaves, because the next one is known
    only then. So a long micro-batch delays the short ones before and after it.
    """
    if min(stage_seconds) == max(stage_seconds):
        return math.fsum(stage_seconds)  # every stage is always busy
    rounds = max(_ROUNDS, -(-_ROUNDS * stages // len(stage_seconds)))
    # For long sequences on many stages, the mean of fewer rounds must be enough.
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
