"""Is a step as long as `moepass explain` says? Predicted and measured seconds side by side, on EMULATED links.

The machine is calibrated by what `moepass calibrate` does, over sizes around those of the models; nothing is fitted to
what is measured afterwards. Machines that others share change their speed by a tenth within minutes, so it is
calibrated again whenever the last time is some minutes ago.
Models are Qwen3-MoE with hidden 512 and 32 experts of width 256, top-4, in fp32, one thread per rank:

    host           one process, experts in host memory
    peer, hybrid   two ranks, each on a core of its own with its copy thread. On a CPU hybrid's stagers take more of
                   these cores than the forecast counts: its rows are shown, and not asked to hold
    crossover      the same two ranks: up to how many tokens is AllToAll faster than gathered weights?
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import typer
from common import print_table, reference_model, verdict
from prediction_runs import (
    CROSSOVER_LAYERS,
    CROSSOVER_TOKENS,
    RANKS,
    BothForms,
    Case,
    Measured,
    causal_attention,
    crossing_of,
    measure_alone,
    measure_both_forms,
    measure_on_ranks,
)

from moepass.hardware_profiles import profile_json, read_profile
from moepass.models.architecture import Architecture, from_config
from moepass.models.formulas.memory import bank_bytes
from moepass.passes.forecast import curve_point, forecast, model_stages, streaming_machine
from moepass.passes.hardware import Collectives, Hardware, with_collectives, with_emulated_link
from moepass.passes.layer_times import Texts, layer_seconds
from moepass.passes.seconds_table import table_of
from moepass.passes.simulate import simulate_stages
from moepass.passes.strategies import Setting
from moepass.runtime.calibration import calibrate
from moepass.runtime.experiments import CPU_SIZES

STEP_LIMIT, CROSSOVER_LIMIT = 0.10, 0.15
SEQUENCE = 256
CALIBRATION_LIFE_SECONDS = 180.0
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
BALANCED_TOKENS = 512


def main(
    layers: str = "2,5",
    tokens: str = "256,1024",
    slots: str = "1,2,3",
    ratios: str = "0.5,1,2",
    repeats: int = 5,
    profiles: str = "",
    parts: str = "host,ranks,crossover",
) -> None:
    """Measure steps of TOKENS tokens per rank of models with LAYERS layers, over SLOTS slots.

    Over links on which a bank takes RATIOS of a layer's computation with 512 tokens. PROFILES: a folder in which the
    calibrations are kept, and taken from where they are there already; none for new ones.
    """
    causal_attention()
    wanted = parts.split(",")
    alone = Calibrations(1, profiles)
    counts = [int(text) for text in tokens.split(",")]
    depths = [int(text) for text in layers.split(",")]
    cases = [
        Case("host", depth, slot, rate, count)
        for depth, slot, rate, count in itertools.product(
            depths, [int(text) for text in slots.split(",")], _rates(alone.now(), ratios, 1), counts
        )
    ]
    held = True
    if "host" in wanted:
        rows = []
        for group in _by_model(cases):
            hardware = alone.now()
            rows += [_row(hardware, one) for one in measure_alone(group, SEQUENCE, repeats)]
        held &= _report(rows, repeats)
    spread = Calibrations(RANKS, profiles)
    if "ranks" in wanted:
        shared = [
            Case(home, max(depths), 2, rate, count)
            for home, rate, count in itertools.product(
                ("peer", "hybrid"), list(_rates(spread.now(), ratios, RANKS)), counts
            )
        ]
        rows = []
        for group in _by_model(shared):
            hardware = spread.now()
            rows += [_row(hardware, one) for one in measure_on_ranks(group, SEQUENCE, repeats)]
        held &= _report(rows, repeats)
    if "crossover" in wanted:
        hardware = spread.now()
        rate = next(iter(_rates(hardware, "2", RANKS)))
        held &= _crossover(hardware, rate, measure_both_forms(rate, SEQUENCE, repeats))
    if not held:
        raise typer.Exit(1)


@dataclasses.dataclass(frozen=True)
class _Row:
    home: str
    cells: list[object]
    off: float
    holds: bool
    is_equal: bool


def _report(rows: list[_Row], repeats: int) -> bool:
    """Print the table; True where all rows hold."""
    print_table(
        "Seconds of a step, predicted and measured, links EMULATED",
        ["home", "layers", "slots", "link MB/s", "tokens", "predicted", "measured", "off", "within 10 %", "equal"],
        [row.cells for row in rows],
        f"measured: median of {repeats}, and the largest distance from it; equal: to the model without moepass",
    )
    asked = [row for row in rows if row.home != "hybrid"]
    held = sum(row.holds for row in asked)
    middle = statistics.median(abs(row.off) for row in asked)
    typer.echo(
        f"{held} of {len(asked)} (hybrid left out) within {STEP_LIMIT:.0%}; middle of the distances {middle:.1%}"
    )
    return held == len(asked) and all(row.is_equal for row in rows)


def _row(hardware: Hardware, measured: Measured) -> _Row:
    case = measured.case
    predicted = _predicted(hardware, case)
    middle = statistics.median(measured.seconds)
    spread = max(abs(value - middle) for value in measured.seconds) / middle
    off = predicted / middle - 1
    holds = abs(off) <= STEP_LIMIT and measured.is_equal
    cells: list[object] = [
        case.home,
        case.layers,
        case.slots,
        f"{case.link_bytes_per_s / 1e6:.0f}",
        case.tokens,
        f"{predicted:.3f}",
        f"{middle:.3f} ±{spread:.0%}",
        f"{off:+.1%}",
        verdict(abs(off) <= STEP_LIMIT),
        verdict(measured.is_equal),
    ]
    return _Row(case.home, cells, off, holds, measured.is_equal)


def _predicted(hardware: Hardware, case: Case) -> float:
    links = {"host": ("host",), "peer": ("peer",), "hybrid": ("peer", "host")}[case.home]
    setting = _setting(with_emulated_link(hardware, case.link_bytes_per_s, links), case.layers, case.tokens)
    stages = model_stages(setting, case.home)
    return simulate_stages(stages, case.slots, machine=streaming_machine(setting, case.home)).step_seconds


def _crossover(hardware: Hardware, rate: float, measured: list[BothForms]) -> bool:
    """Print both forms, predicted and measured; True where the tokens at which they take as long agree."""
    machine = _with_slow_exchanges(with_emulated_link(hardware, rate), rate)
    # As the ranks run it: two slots, and nothing stays.
    made = forecast(_setting(machine, CROSSOVER_LAYERS, BALANCED_TOKENS), "peer", most_slots=2)
    points = [curve_point(dataclasses.replace(made, schedule=None), tokens) for tokens in CROSSOVER_TOKENS]
    predicted = [BothForms(point.tokens, point.all_to_all_seconds, point.step_seconds) for point in points]
    print_table(
        f"{CROSSOVER_LAYERS} layers on {RANKS} ranks, exchanged or gathered, links EMULATED at {rate / 1e6:.0f} MB/s",
        ["tokens per rank", "AllToAll: predicted", "measured", "gathered: predicted", "measured"],
        [
            [str(ours.tokens)]
            + [f"{one:.3f}" for one in (ours.exchanged_seconds, theirs.exchanged_seconds)]
            + [f"{one:.3f}" for one in (ours.gathered_seconds, theirs.gathered_seconds)]
            for ours, theirs in zip(predicted, measured, strict=True)
        ],
    )
    at, reached = crossing_of(predicted), crossing_of(measured)
    if at is None or reached is None:
        typer.echo(f"no crossover: predicted {at}, measured {reached}")
        return False
    off = at / reached - 1
    typer.echo(
        f"crossover: predicted {at:.0f} tokens per rank, measured {reached:.0f}, {off:+.1%}; within "
        f"{CROSSOVER_LIMIT:.0%}: {verdict(abs(off) <= CROSSOVER_LIMIT)}"
    )
    return abs(off) <= CROSSOVER_LIMIT


def _with_slow_exchanges(hardware: Hardware, rate: float) -> Hardware:
    """AllToAlls that take the emulated link's time on top of their own, as `emulated_exchange` makes them."""
    known = hardware.collectives
    assert known is not None
    table = known.seconds["all_to_all"]
    crossing = (known.ranks - 1) / known.ranks
    sizes = [int(point["bytes"]) for point, _ in table.points()]
    seconds = [value + crossing * size / rate for size, (_, value) in zip(sizes, table.points(), strict=True)]
    slow = table_of({"bytes": tuple(sizes)}, seconds, "emulated", "link emulated", [0.0] * len(sizes))
    return with_collectives(hardware, Collectives(known.ranks, {"all_to_all": slow}))


def _rates(hardware: Hardware, ratios: str, ranks: int) -> Iterator[float]:
    """Bytes per second over which what crosses the link takes those parts of a layer's computation."""
    architecture = _architecture(1)
    (layer,) = architecture.layers
    assert layer.experts is not None
    texts = Texts(BALANCED_TOKENS // SEQUENCE, SEQUENCE)
    computing = layer_seconds(hardware, layer, architecture.hidden, texts, "fp32").total
    crossing = bank_bytes(layer.experts, architecture.hidden, "fp32") * ((ranks - 1) / ranks if ranks > 1 else 1.0)
    for ratio in ratios.split(","):
        yield crossing / (float(ratio) * computing)


def _setting(hardware: Hardware, layers: int, tokens: int) -> Setting:
    texts = Texts(tokens // SEQUENCE, SEQUENCE)
    return Setting(_architecture(layers), hardware, texts, "fp32", hardware.memory_bytes.value)


def _architecture(layers: int) -> Architecture:
    with torch.device("meta"):
        return from_config(reference_model(layers).config)


def _by_model(cases: Sequence[Case]) -> Iterator[list[Case]]:
    for _, group in itertools.groupby(cases, key=lambda case: case.model):
        yield list(group)


class Calibrations:
    """Profiles of this machine with `ranks` ranks of one thread: made when one is needed, and again when it is old.

    With a `folder`, one profile is taken from there, or made and kept there, whatever its age.
    """

    def __init__(self, ranks: int, folder: str) -> None:
        self._ranks = ranks
        self._kept = Path(folder, f"moepass-{ranks}-ranks.json") if folder else None
        self._last: Hardware | None = None
        self._made_at = 0.0

    def now(self) -> Hardware:
        if self._last is None and self._kept is not None and self._kept.exists():
            self._last = read_profile(self._kept)
        is_old = self._kept is None and time.monotonic() - self._made_at > CALIBRATION_LIFE_SECONDS
        if self._last is None or is_old:
            typer.echo(f"calibrating {self._ranks} rank(s) of one thread ...", err=True)
            self._last = calibrate("cpu", self._ranks, 1, sizes=SIZES)
            self._made_at = time.monotonic()
            if self._kept is not None:
                self._kept.parent.mkdir(parents=True, exist_ok=True)
                self._kept.write_bytes(profile_json(self._last))
        return self._last


if __name__ == "__main__":
    typer.run(main)
