"""Compare the step times of `moepass explain` with measured ones, on EMULATED links.

The machine is calibrated as by `moepass calibrate`, over sizes around those of the models; nothing is fitted to the
measurements. Shared machines change their speed by a tenth within minutes, so everything is measured in several rounds,
each with its own calibration, and predictions are compared round by round.

Models are Qwen3-MoE with hidden 512 and 32 experts of width 256, top-4, in fp32, one thread per rank:

    host           one process, experts in host memory
    peer, hybrid   two ranks, each on its own core with its copy thread. On a CPU hybrid's stagers take more of these
                   cores than the forecast counts: its rows are shown without a target
    crossover      the same two ranks: up to how many tokens is AllToAll faster than gathered weights?
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import typer

from benchmarks.common import print_table, reference_model, verdict
from benchmarks.parts.causal_attention import causal_attention
from benchmarks.parts.prediction_runs import (
    CROSSOVER_LAYERS,
    CROSSOVER_TOKENS,
    RANKS,
    BothForms,
    Case,
    CrossoverModels,
    StreamedModels,
    crossing_of,
    on_ranks,
)
from moepass.models.formulas.memory import bank_bytes
from moepass.models.homes import HOMES
from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.families import from_config
from moepass.passes.machine.hardware import Collectives, Hardware, with_collectives, with_emulated_link
from moepass.passes.machine.layer_times import Sequences, layer_seconds
from moepass.passes.machine.seconds_table import table_of
from moepass.passes.planner.forecast import curve_point, forecast
from moepass.passes.planner.model_problem import model_phases, streaming_execution
from moepass.passes.planner.simulate import simulate_phases
from moepass.passes.planner.strategies import Setting
from moepass.runtime.calibrate.calibration import calibrate
from moepass.runtime.calibrate.experiments import CPU_SIZES
from moepass.runtime.profiles.hardware_profiles import profile_json, read_profile

STEP_LIMIT, CROSSOVER_LIMIT = 0.10, 0.15
SEQUENCE = 256
SIZES = dataclasses.replace(
    CPU_SIZES,
    dtypes=("fp32",),
    rows=(1, 64, 256, 1024, 2048),
    widths=(32, 256, 512, 1024),
    expert_rows=(8, 32, 128, 512),
    sequences=(SEQUENCE, 2 * SEQUENCE),
    head_dims=(64,),
)
# Tokens at which links are as slow as RATIOS of a layer's computation, by prediction.
BALANCED_TOKENS = 1024


def main(
    layers: str = "2,5",
    tokens: str = "512,2048",
    slots: str = "1,2,3",
    ratios: str = "0.5,1,2",
    repeats: int = 3,
    rounds: int = 3,
    profiles: str = "",
    parts: str = "host,ranks,crossover",
) -> None:
    """Measure steps of TOKENS tokens per rank of models with LAYERS layers, over SLOTS slots, in each of ROUNDS.

    Links are such that a bank takes RATIOS of a layer's computation with 1024 tokens. The folder PROFILES caches the
    calibrations; without it, every round calibrates again.
    """
    causal_attention()
    wanted = parts.split(",")
    counts = [int(text) for text in tokens.split(",")]
    depths = [int(text) for text in layers.split(",")]
    held = True
    if "host" in wanted:
        rings = [int(text) for text in slots.split(",")]
        held &= _host(Calibrations(1, profiles), depths, rings, ratios, counts, repeats, rounds)
    if "ranks" in wanted:
        held &= _ranks(Calibrations(RANKS, profiles), max(depths), ratios, counts, repeats, rounds)
    if "crossover" in wanted:
        held &= _crossover(Calibrations(RANKS, profiles), repeats, rounds)
    if not held:
        raise typer.Exit(1)


def _host(
    machine: Calibrations,
    depths: Sequence[int],
    slots: Sequence[int],
    ratios: str,
    counts: Sequence[int],
    repeats: int,
    rounds: int,
) -> bool:
    """Measure one process; its models are freed at the end, so that ranks have the memory."""
    of_models = itertools.product(depths, slots, _rates(machine.now(), ratios), counts)
    cases = [Case("host", *case) for case in of_models]
    models = StreamedModels(cases, SEQUENCE)
    trials = [_round(machine.now(), cases, models.seconds(repeats)) for _ in range(rounds)]
    return _report(cases, trials, models.equal(), repeats)


def _ranks(machine: Calibrations, depth: int, ratios: str, counts: Sequence[int], repeats: int, rounds: int) -> bool:
    """Measure two ranks with experts in each other's memory."""
    of_models = itertools.product(("peer", "hybrid"), _rates(machine.now(), ratios), counts)
    cases = [Case(home, depth, 2, rate, count) for home, rate, count in of_models]
    with on_ranks(StreamedModels, cases, SEQUENCE) as ask:
        trials = [_round(machine.now(), cases, ask("seconds", repeats)) for _ in range(rounds)]
        return _report(cases, trials, ask("equal"), repeats)


def _crossover(machine: Calibrations, repeats: int, rounds: int) -> bool:
    """Measure two ranks with exchanged tokens and with gathered experts."""
    (rate,) = _rates(machine.now(), "1")
    with on_ranks(CrossoverModels, rate, SEQUENCE) as ask:
        trials = [(machine.now(), ask("both_forms", repeats)) for _ in range(rounds)]
    return _report_crossover(rate, trials)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """One case in one round: the prediction of its calibration, and the median of the measured steps."""

    predicted: float
    measured: float

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


def _round(hardware: Hardware, cases: Sequence[Case], seconds: Sequence[Sequence[float]]) -> list[_Trial]:
    return [
        _Trial(_predicted(hardware, case), statistics.median(of_case))
        for case, of_case in zip(cases, seconds, strict=True)
    ]


def _report(cases: Sequence[Case], rounds: Sequence[Sequence[_Trial]], are_equal: Sequence[bool], repeats: int) -> bool:
    """Print the table, and return whether all cases except those of home hybrid are within the limit."""
    of_cases = list(zip(*rounds, strict=True))
    offs = [statistics.median(trial.off for trial in trials) for trials in of_cases]
    print_table(
        "Seconds of a step, predicted and measured, links EMULATED",
        ["home", "layers", "slots", "link MB/s", "tokens", "predicted", "measured", "off", "within 10 %", "equal"],
        [
            [
                *(case.home, case.layers, case.slots, f"{case.link_bytes_per_s / 1e6:.0f}", case.tokens),
                *_middles(trials),
                f"{off:+.1%}",
                verdict(abs(off) <= STEP_LIMIT),
                verdict(is_equal),
            ]
            for case, trials, off, is_equal in zip(cases, of_cases, offs, are_equal, strict=True)
        ],
        f"Medians of {_rounds(len(rounds))}, and the largest distance from them; a round has the median of {repeats} "
        "steps. off: of predicted from measured, median over rounds. equal: to the model without moepass.",
    )
    distances = [abs(off) for case, off in zip(cases, offs, strict=True) if case.home != "hybrid"]
    within = sum(distance <= STEP_LIMIT for distance in distances)
    typer.echo(
        f"{within} of {len(distances)} (without hybrid) within {STEP_LIMIT:.0%}; median of the distances "
        f"{statistics.median(distances):.1%}"
    )
    return within == len(distances) and all(are_equal)


def _middles(trials: Sequence[_Trial]) -> list[str]:
    """Return the medians of the predicted and of the measured seconds."""
    texts = []
    for values in ([trial.predicted for trial in trials], [trial.measured for trial in trials]):
        middle = statistics.median(values)
        texts.append(f"{middle:.3f} ±{max(abs(value - middle) for value in values) / middle:.0%}")
    return texts


def _predicted(hardware: Hardware, case: Case) -> float:
    links = [use.link for use in HOMES[case.home].travel]
    setting = _setting(with_emulated_link(hardware, case.link_bytes_per_s, links), case.layers, case.tokens)
    phases = model_phases(setting, case.home)
    return simulate_phases(phases, case.slots, machine=streaming_execution(setting, case.home)).step_seconds


def _report_crossover(rate: float, rounds: Sequence[tuple[Hardware, list[BothForms]]]) -> bool:
    """Print both forms, predicted and measured, and return whether their crossovers agree."""
    predicted = [_both_forms(hardware, rate) for hardware, _ in rounds]
    measured = [points for _, points in rounds]
    print_table(
        f"{CROSSOVER_LAYERS} layers on {RANKS} ranks, exchanged or gathered, links EMULATED at {rate / 1e6:.0f} MB/s",
        ["tokens per rank", "AllToAll: predicted", "measured", "gathered: predicted", "measured"],
        [
            [str(tokens)]
            + [
                f"{statistics.median(getattr(points[index], form) for points in times):.3f}"
                for form in ("exchanged_seconds", "gathered_seconds")
                for times in (predicted, measured)
            ]
            for index, tokens in enumerate(CROSSOVER_TOKENS)
        ],
        f"Medians of {_rounds(len(rounds))}.",
    )
    crossings = [(crossing_of(ours), crossing_of(theirs)) for ours, theirs in zip(predicted, measured, strict=True)]
    both = [(ours, theirs) for ours, theirs in crossings if ours is not None and theirs is not None]
    if len(both) < len(crossings):
        typer.echo(f"no crossover in {len(crossings) - len(both)} of {len(crossings)} rounds")
        return False
    off = statistics.median(ours / theirs - 1 for ours, theirs in both)
    typer.echo(
        f"crossover: predicted {statistics.median(ours for ours, _ in both):.0f} tokens per rank, measured "
        f"{statistics.median(theirs for _, theirs in both):.0f}, {off:+.1%} (median over rounds); within "
        f"{CROSSOVER_LIMIT:.0%}: {verdict(abs(off) <= CROSSOVER_LIMIT)}"
    )
    return abs(off) <= CROSSOVER_LIMIT


def _both_forms(hardware: Hardware, rate: float) -> list[BothForms]:
    """Return the forecast for the models of the crossover, as the ranks run them: two slots, and no resident layer."""
    machine = _with_slow_exchanges(with_emulated_link(hardware, rate), rate)
    made = forecast(_setting(machine, CROSSOVER_LAYERS, BALANCED_TOKENS), "peer", most_slots=2)
    points = [curve_point(dataclasses.replace(made, schedule=None), tokens) for tokens in CROSSOVER_TOKENS]
    return [BothForms(point.tokens, point.all_to_all_seconds, point.step_seconds) for point in points]


def _with_slow_exchanges(hardware: Hardware, rate: float) -> Hardware:
    """Return hardware whose AllToAlls take the emulated link's time in addition, as in `emulated_exchange`."""
    measured_collectives = hardware.collectives
    assert measured_collectives is not None
    table = measured_collectives.seconds["all_to_all"]
    crossing = (measured_collectives.ranks - 1) / measured_collectives.ranks
    sizes = [int(point["bytes"]) for point, _ in table.points()]
    seconds = [value + crossing * size / rate for size, (_, value) in zip(sizes, table.points(), strict=True)]
    slow = table_of({"bytes": tuple(sizes)}, seconds, "emulated", "link emulated", [0.0] * len(sizes))
    return with_collectives(hardware, Collectives(measured_collectives.ranks, {"all_to_all": slow}))


def _rates(hardware: Hardware, ratios: str) -> Iterator[float]:
    """Return the link rates, in bytes per second, at which transfers take these fractions of a layer's computation."""
    architecture = _architecture(1)
    (layer,) = architecture.layers
    assert layer.experts is not None
    sequences = Sequences(BALANCED_TOKENS // SEQUENCE, SEQUENCE)
    computing = layer_seconds(hardware, layer, architecture.hidden, sequences, "fp32").total
    shared_out = (hardware.ranks - 1) / hardware.ranks if hardware.ranks > 1 else 1.0
    crossing = bank_bytes(layer.experts, architecture.hidden, "fp32") * shared_out
    for ratio in ratios.split(","):
        yield crossing / (float(ratio) * computing)


def _setting(hardware: Hardware, layers: int, tokens: int) -> Setting:
    sequences = Sequences(tokens // SEQUENCE, SEQUENCE)
    return Setting(_architecture(layers), hardware, sequences, "fp32", hardware.memory_bytes.value)


def _architecture(layers: int) -> Architecture:
    with torch.device("meta"):
        return from_config(reference_model(layers).config)


def _rounds(count: int) -> str:
    return f"{count} rounds, each with a calibration of its own unless PROFILES has one"


class Calibrations:
    """Profiles of this machine with `ranks` ranks of one thread, each calibrated when it is requested.

    With a `folder`, the machine is calibrated once, and the profile is stored there.
    """

    def __init__(self, ranks: int, folder: str) -> None:
        self._ranks = ranks
        self._kept = Path(folder, f"moepass-{ranks}-ranks.json") if folder else None

    def now(self) -> Hardware:
        """Return the stored profile, or calibrate and store a new one."""
        if self._kept is not None and self._kept.exists():
            return read_profile(self._kept)
        typer.echo(f"calibrating {self._ranks} rank(s) of one thread ...", err=True)
        made = calibrate("cpu", self._ranks, 1, sizes=SIZES)
        if self._kept is not None:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            self._kept.write_bytes(profile_json(made))
        return made


if __name__ == "__main__":
    typer.run(main)
