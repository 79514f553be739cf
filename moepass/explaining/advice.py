"""Advice that improves a forecast: sentences, each with the number that a change leads to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from moepass.models.errors import InputError
from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT
from moepass.passes.machine.hardware import with_ranks
from moepass.passes.machine.layer_times import sequences_of
from moepass.passes.planner.forecast import Forecast
from moepass.passes.planner.host_memory import host_memory
from moepass.passes.planner.model_problem import least_memory_bytes
from moepass.passes.planner.strategies import Setting, homes_of

_MOST_RANKS = 64
# The share of the step below which waiting is not worth mentioning.
_WORTH_SAYING = 0.01


def advice(made: Forecast, crossover: int | None, refusals: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences of advice, the most useful first. None of them means that nothing can be improved.

    Args:
        made: the forecast of the chosen home.
        crossover: tokens per rank from which asyncep beats AllToAll, or None.
        refusals: the reasons of refused blocks.
    """
    if not made.cost(ASYNCEP).fits and made.chosen != RESIDENT:
        changes = list(_changes_that_fit(made.setting))
        return tuple(
            changes
            or ["asyncep fits with none of the changes that were tried: other homes, fewer tokens, fp8, more ranks"]
        )
    return (*_waiting(made, crossover), *_refused(refusals))


def _changes_that_fit(setting: Setting) -> Iterator[str]:
    """Yield single changes that would make asyncep fit into the memory budget."""
    home = _fitting_home(setting)
    if home is not None:
        yield f"asyncep fits with --home {home}"
        return
    fewer = setting.sequences.tokens // 2
    while fewer >= 1 and _fitting_home(_with_tokens(setting, fewer)) is None:
        fewer //= 2
    if fewer >= 1:
        home = _fitting_home(_with_tokens(setting, fewer))
        yield f"asyncep fits with {fewer} tokens per rank and step (--home {home})"
    if setting.dtype != "fp8" and "fp8" in setting.hardware.flops:
        stored = setting.architecture.stored
        as_stored = stored if stored is not None and stored.name == "fp8" else None
        home = _fitting_home(dataclasses.replace(setting, dtype="fp8", stored=as_stored))
        if home is not None:
            yield f"asyncep fits with --dtype fp8 (--home {home})"
    ranks = 2 * setting.ranks
    while ranks <= _MOST_RANKS:
        home = _fitting_home(dataclasses.replace(setting, hardware=with_ranks(setting.hardware, ranks)))
        if home is not None:
            yield f"asyncep fits with --ranks {ranks} (--home {home})"
            return
        ranks *= 2


def _with_tokens(setting: Setting, tokens: int) -> Setting:
    return dataclasses.replace(setting, sequences=sequences_of(tokens, setting.sequences.length))


def _fitting_home(setting: Setting) -> str | None:
    return next((home for home in homes_of(setting) if _fits(setting, home)), None)


def _fits(setting: Setting, home: str) -> bool:
    try:
        least = least_memory_bytes(setting, home)
        return least <= setting.budget_bytes and host_memory(setting, home, least).fits is not False
    except InputError:
        return False  # the machine has no such link


def _waiting(made: Forecast, crossover: int | None) -> Iterator[str]:
    if made.simulation is None or made.chosen == RESIDENT:
        return
    sequences, threshold = made.setting.sequences, made.saturation.tokens
    waits = made.simulation.exposed_seconds / made.simulation.step_seconds
    if waits > _WORTH_SAYING and sequences.tokens < threshold:
        batch = math.ceil(threshold / sequences.length)
        yield (
            f"with {threshold} or more tokens per rank and step ({batch} sequences of {sequences.length}), computation "
            f"hides all transfers with a margin of {made.saturation.values['gamma']:g}"
        )
    if made.chosen != ASYNCEP and crossover is not None and crossover > sequences.tokens:
        yield f"asyncep is faster than AllToAll (dp_ep) with {crossover} or more tokens per rank and step"


def _refused(refusals: Sequence[str]) -> Iterator[str]:
    if refusals:
        yield f"the figures assume that all blocks are rewritten, but {len(refusals)} were refused and run unchanged"
