"""Calibration with tiny sizes: the stopwatch, the processes, and the profile."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from moepass.cli.main import app
from moepass.explaining.hardware_report import print_hardware
from moepass.models.errors import InputError, MoepassError, OptionError
from moepass.passes.machine import times
from moepass.passes.machine.hardware import COLLECTIVES, Conditions
from moepass.runtime.calibrate import calibration, experiments
from moepass.runtime.calibrate.calibration import CalibrationError, calibrate, profile_of
from moepass.runtime.calibrate.calibration_rank import Measured, RankMeasurements, measure_rank
from moepass.runtime.calibrate.experiments import (
    CPU_SIZES,
    CUDA_SIZES,
    CalibrationSizes,
    Timing,
    TimingEffort,
    quick,
    time_calls,
    timing_of,
)
from moepass.runtime.calibrate.measure_transfers import TransferBench
from moepass.runtime.profiles.hardware_profiles import profile_json, read_profile
from tests.helpers.graphs.error_fields import refused
from tests.helpers.processes.ranks import run_ranks

CPU = torch.device("cpu")
TINY = CalibrationSizes(
    dtypes=("fp32",),
    rows=(1, 8),
    widths=(4, 16),
    expert_rows=(1, 4),
    experts=2,
    sequences=(4, 16),
    head_dims=(8,),
    memory_bytes=(1 << 10, 1 << 14),
    transfer_bytes=(1 << 12, 1 << 16),
    collective_bytes=(1 << 8, 1 << 12),
    effort=TimingEffort(samples=2, sample_seconds=1e-4),
)
CONDITIONS = Conditions("2026-01-01T00:00:00+00:00", "a processor", 2, 1, {"torch": "2"}, (), ("disk: no",))


# ---- The stopwatch ---------------------------------------------------------------------------------------------------


def test_a_timing_has_the_median_and_the_interquartile_range() -> None:
    assert timing_of([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, pytest.approx(2 / 3))  # type: ignore[arg-type]
    assert timing_of([2.0]) == Timing(2.0, 0.0)


class _Clock:
    """A replacement for module `time`: only calls of `run` take time, `call_seconds` each."""

    def __init__(self, call_seconds: float) -> None:
        self.call_seconds = call_seconds
        self.calls = 0

    def run(self) -> None:
        self.calls += 1

    def perf_counter(self) -> float:
        return self.calls * self.call_seconds


@pytest.mark.parametrize(
    ("call_seconds", "effort", "asked", "calls"),
    [
        (1 / 512, TimingEffort(samples=3), 5, 1 + 3 * 5),
        # The first call, a trial sample, and two samples of four calls.
        (1 / 512, TimingEffort(samples=2, sample_seconds=1 / 128), None, 1 + 4 + 2 * 4),
        (1 / 64, TimingEffort(samples=9, long_seconds=1 / 128), None, 1 + 2),
    ],
)
def test_the_number_of_calls_is_fixed_or_fills_a_sample(
    call_seconds: float, effort: TimingEffort, asked: int | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(call_seconds)
    monkeypatch.setattr(experiments, "time", clock)
    assert time_calls(clock.run, CPU, effort, asked) == Timing(call_seconds, 0.0)
    assert clock.calls == calls


# ---- Transfers -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.lists(st.integers(1, 160), min_size=1, max_size=5))
def test_every_copy_fills_the_slot_in_equal_shares(lengths: list[int], asked: list[int]) -> None:
    smallest = min(lengths)
    sources = [torch.full((length,), number + 1, dtype=torch.uint8) for number, length in enumerate(lengths)]
    slot = torch.zeros(smallest * len(lengths), dtype=torch.uint8)
    bench = TransferBench(sources, slot)
    for nbytes in [min(size, slot.numel()) for size in asked]:
        slot.zero_()
        bench.wait(bench.start(nbytes))
        share = -(-nbytes // len(lengths))
        expected = [number // share + 1 for number in range(nbytes)]
        assert slot.tolist() == expected + [0] * (slot.numel() - nbytes)


def test_sources_are_read_in_turn() -> None:
    """Successive transfers read different bytes, so that no cache holds them."""
    source = torch.arange(12, dtype=torch.uint8)
    slot = torch.zeros(4, dtype=torch.uint8)
    bench = TransferBench([source], slot)
    seen = []
    for _ in range(4):
        bench.wait(bench.start(4))
        seen.append(slot.tolist())
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]


# ---- One rank, and two -----------------------------------------------------------------------------------------------

ALONE = {"host", "gemm.fp32", "grouped_gemm.fp32", "attention.fp32", "masked_attention.fp32", "memory", "decode"}


def _check(measurements: RankMeasurements, names: set[str]) -> None:
    assert set(measurements.tables) == names
    for measured in measurements.tables.values():
        points = list(itertools.product(*measured.axes.values()))
        assert len(measured.timings) == len(points)
        assert all(timing.seconds > 0 for timing in measured.timings)
    assert set(measurements.overlap) == {"gemm", "memory", "copy"}
    assert all(ratio.seconds >= 1 for ratio in measurements.overlap.values())
    assert measurements.local_is_host
    assert measurements.memory_bytes > 1 << 28
    assert measurements.core_share is not None
    assert 0 < measurements.core_share <= 1


def test_a_single_rank_measures_itself() -> None:
    steps: list[tuple[int, int, str]] = []
    _check(measure_rank(TINY, CPU, lambda *step: steps.append(step)), ALONE)
    total = steps[0][1]
    assert [done for done, _, _ in steps] == [*range(total + 1)]
    assert {name for _, _, name in steps} == ALONE | {"overlap", "done"}


def _measure_here() -> RankMeasurements:
    return measure_rank(TINY, CPU, lambda done, total, what: None)


@pytest.mark.slow
def test_two_ranks_also_measure_transfers_and_collectives() -> None:
    of_ranks = run_ranks(2, _measure_here)
    for measurements in of_ranks:
        _check(measurements, ALONE | {"peer"} | {f"collective.{kind}" for kind in COLLECTIVES})
    hardware = profile_of(of_ranks, CONDITIONS, "cpu")
    assert times.gather_seconds(hardware, 1 << 16, "peer", "collective") > 0
    assert hardware.peer is not None
    half = times.transfer_seconds(hardware.peer, 1 << 15, hardware.efficiency.bandwidth.value)
    assert times.pull_seconds(hardware, 1 << 16, copies_own_shard=False) == half
    assert times.pull_seconds(hardware, 1 << 16, copies_own_shard=True) > half


# ---- The profile -----------------------------------------------------------------------------------------------------


def _made_up(factor: float, noise: float = 1.0) -> RankMeasurements:
    """Return measurements with rates of 1e9 / `factor`; the middle one of three points takes `noise` times as long."""

    def measured(axes: dict[str, tuple[int, ...]], flops_per_point: float = 1.0) -> Measured:
        points = list(itertools.product(*axes.values()))
        seconds = [flops_per_point * factor * 1e-9 for _ in points]
        for number, point in enumerate(points):
            for size in point:
                seconds[number] *= size
        if len(points) == 3:
            seconds[1] *= noise
        return Measured(axes, tuple(Timing(value, 0.1) for value in seconds))

    shape = {"rows": (1, 8), "inner": (4, 16), "columns": (4, 16)}
    names = ("host", "peer", "memory", "decode", *[f"collective.{kind}" for kind in COLLECTIVES])
    tables = {name: measured({"bytes": (1000, 4000, 16000)}) for name in names}
    tables |= {"gemm.fp32": measured(shape, 2.0), "grouped_gemm.fp32": measured(shape, 2.0)}
    for name in ("attention", "masked_attention"):
        tables[f"{name}.fp32"] = measured({"sequence": (4, 16), "head_dim": (8,)})
    overlap = {name: Timing(1.0 + factor, 0.2) for name in ("gemm", "memory", "copy")}
    return RankMeasurements("a processor", 1 << 34, tables, overlap, True)


def test_a_profile_of_ranks() -> None:
    hardware = profile_of([_made_up(1.0), _made_up(3.0)], CONDITIONS, "cpu")
    assert (hardware.name, hardware.ranks) == ("2x a processor", 2)
    # Rates of single ranks are medians, and collectives take as long as on the slowest rank.
    assert hardware.flops["fp32"].value == pytest.approx(0.5e9)
    assert times.gather_seconds(hardware, 1000, "host") == pytest.approx(2e-6)
    assert times.collective_seconds(hardware, "all_to_all", 1000) == pytest.approx(3e-6)
    assert hardware.memory_bytes.value == 1 << 33
    assert hardware.overlap.gemm.value == pytest.approx(3.0)
    assert hardware.local == hardware.host
    assert times.pull_seconds(hardware, 4000) == pytest.approx(2e-9 * 2000)
    assert times.pull_seconds(hardware, 4000, copies_own_shard=True) == pytest.approx(2 * 2e-9 * 2000)
    assert hardware.memory_bytes_per_s.value == pytest.approx(0.5e9)
    sources = {text.partition(":")[0] for text in hardware.sources().values()}
    assert sources == {"calibrated", "measured"}


@pytest.mark.parametrize(("share", "says"), [(0.99, False), (0.5, True), (None, False)])
def test_other_programs_are_reported(share: float | None, says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = dataclasses.replace(_made_up(1.0), core_share=share)
    tables = {name: table for name, table in measured.tables.items() if "." not in name or "fp32" in name}
    alone = dataclasses.replace(measured, tables=tables)
    monkeypatch.setattr(calibration, "_run_ranks", lambda tasks, report: [alone])
    conditions = calibrate(ranks=1).conditions
    assert conditions is not None
    assert any("measure again on a quiet machine" in remark for remark in conditions.remarks) is says


@pytest.mark.parametrize("noise", [0.01, 100.0])
def test_no_table_of_a_profile_has_a_dip(noise: float) -> None:
    hardware = profile_of([_made_up(1.0, noise), _made_up(3.0, noise)], CONDITIONS, "cpu")
    assert hardware.collectives is not None
    tables = [hardware.memory, hardware.decode, *hardware.collectives.seconds.values()]
    tables += [link.seconds for link in (hardware.host, hardware.peer) if link is not None]
    assert len(tables) == 4 + len(COLLECTIVES)
    for table in tables:
        assert table is not None
        assert list(table.seconds) == sorted(table.seconds)


def test_a_profile_is_written_and_read_and_shown(tmp_path: Path) -> None:
    hardware = profile_of([_made_up(1.0, 100.0), _made_up(3.0)], CONDITIONS, "cpu")
    file = tmp_path / "profile.json"
    file.write_bytes(profile_json(hardware))
    assert read_profile(file) == hardware
    raw = json.loads(file.read_text())
    assert raw["conditions"]["date"] == "2026-01-01T00:00:00+00:00"
    assert raw["host"]["seconds"]["spreads"] == [0.1, 0.1, 0.1]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_hardware(console, hardware)
    text = console.export_text()
    for words in ("500 MFLOP/s", "calibrated", "not measured: disk: no", "2026-01-01", "x 3.00", "bank_gather, 16 kB"):
        assert words in text


# ---- The processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calibrate_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CPU_SIZES", TINY)
    monkeypatch.setattr(calibration, "quick", lambda sizes: sizes)
    file = tmp_path / "mine.json"
    arguments = ["calibrate", "--device", "cpu", "--ranks", "2", "--threads", "1", "--quick", "--output", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "calibrated" in result.stdout
    hardware = read_profile(file)
    conditions = hardware.conditions
    assert conditions is not None
    assert (hardware.ranks, conditions.ranks, conditions.threads_per_rank) == (2, 2, 1)
    assert conditions.versions["torch"] == str(torch.__version__)
    assert "moepass" in conditions.versions
    assert any(remark.startswith("quick") for remark in conditions.remarks)
    assert any(what.startswith("disk") for what in conditions.not_measured)
    assert any(what.startswith("fp8") for what in conditions.not_measured)
    assert hardware.collectives is not None
    assert set(hardware.collectives.seconds) == set(COLLECTIVES)
    assert times.gemm_seconds(hardware, "float32", 100, 100, 100) > 0
    with pytest.raises(InputError, match="has no bf16 rate; it has fp32"):
        times.gemm_seconds(hardware, "bf16", 1, 1, 1)


@pytest.mark.slow
def test_a_rank_that_fails_is_one_error() -> None:
    wrong = dataclasses.replace(TINY, dtypes=("fp12",))
    with pytest.raises(CalibrationError, match="calibration: rank 0 ended with code 1: KeyError: 'fp12'") as caught:
        calibrate(ranks=1, sizes=wrong)
    assert (caught.value.rank, caught.value.value) == (0, 1)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("device", "tpu", InputError),
        ("ranks", 0, OptionError),
        ("ranks", 10_000, OptionError),
        ("threads", 0, OptionError),
    ],
)
def test_invalid_arguments_are_refused(name: str, value: Any, kind: type[MoepassError]) -> None:
    with refused(kind, name=name, value=value):
        calibrate(**{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_an_error() -> None:
    with refused(InputError, name="device", value="cuda", expected="cpu"):
        calibrate("cuda")


@pytest.mark.parametrize("sizes", [CPU_SIZES, CUDA_SIZES])
def test_quick_grids_cover_the_range_of_full_grids(sizes: CalibrationSizes) -> None:
    coarse = quick(sizes)
    for field in dataclasses.fields(CalibrationSizes):
        points = getattr(sizes, field.name)
        fewer = getattr(coarse, field.name)
        if isinstance(points, tuple) and field.name not in ("dtypes", "head_dims"):
            assert set(fewer) < set(points)
            assert (fewer[0], fewer[-1]) == (points[0], points[-1])
