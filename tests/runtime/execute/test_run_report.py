"""Predictions are compared with measurements, on a CPU and on an emulated CUDA."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moepass
from moepass.compilations import Compilation
from moepass.passes.machine.hardware import Figure, Hardware, TransferLink
from moepass.runtime.execute.run_report import RunClock
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.transfer.copier import Copier, Wait
from moepass.runtime.transfer.lanes import StreamLane
from moepass.runtime.transfer.ring import Ring
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.processes.fake_cuda import FakeCuda
from tests.helpers.processes.ring_runs import SLOT_BYTES, run_banks, small_bank

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = {"tokens": 4}


def tiny() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def machine() -> Hardware:
    link = TransferLink(Figure(1e9, "user"), Figure(1e-6, "user"))
    flops = {"fp32": Figure(1e10, "user")}
    return dataclasses.replace(load_hardware("h100-80g"), name="made up", flops=flops, processors=None, host=link)


def runs(model: PreTrainedModel, *batches: int) -> Compilation:
    """Return the last compilation, after a run for each of these batch sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
    with moepass.record_compilations() as compilations, torch.no_grad():
        for batch in batches:
            compiled(torch.zeros((batch, 32), dtype=torch.int64), logits_to_keep=1)
    return compilations[-1]


@pytest.mark.slow
def test_predicted_stands_beside_measured() -> None:
    model = tiny()
    dense = sum(value.nbytes for name, value in model.named_parameters() if ".experts." not in name)
    # A bank takes 20 ms over this link, far longer than the rest of the step.
    offloaded = moepass.offload_experts(
        model, home=moepass.Host(link=f"emulate:{196608 / 0.02}"), hardware=machine(), tokens=(2, 32)
    )
    report = runs(model, 2, 2, 2, 2).report()
    assert report.runs == 3
    assert report.step.predicted == pytest.approx(3 * 0.02, rel=0.05)
    assert report.step.measured is not None
    assert report.step.measured >= 3 * 0.02 * 0.9, "an emulated link takes its time"
    assert report.exposed.predicted is not None
    assert report.exposed.measured is not None
    assert 0 < report.exposed.measured <= report.step.measured * 3
    assert report.slots.predicted == report.slots.measured == offloaded.ring_bytes
    assert report.weights.predicted == pytest.approx(report.weights.measured, rel=0.01)
    assert report.weights.measured is not None
    assert dense <= report.weights.measured
    assert report.peak.measured is None
    text = str(report)
    assert "3 runs of 2 x 32 tokens, 2 slots, 0 layers resident" in text
    assert "not measured: torch does not count what is allocated on a CPU" in text


@pytest.mark.slow
def test_it_predicts_for_the_sizes_of_the_last_runs() -> None:
    model = tiny()
    moepass.offload_experts(model, hardware=machine(), tokens=(2, 32))
    compilation = runs(model, 2, 3, 5, 5)  # from the second size on the batch is symbolic
    report = compilation.report()
    assert (report.decisions.batch, report.decisions.sequence, report.runs) == (5, 32, 1)
    assert compilation.plan.decisions is not None
    assert compilation.plan.decisions.batch == 3
    assert report.decisions.compute_seconds is not None
    assert compilation.plan.decisions.compute_seconds is not None
    assert report.decisions.compute_seconds > compilation.plan.decisions.compute_seconds


@pytest.mark.slow
def test_what_is_not_known_says_why() -> None:
    model = tiny()
    moepass.offload_experts(model)
    report = runs(model, 2).report()
    assert (report.runs, report.step.predicted, report.step.measured) == (0, None, None)
    text = str(report)
    assert "step: predicted - (structural default: no hardware profile; moepass calibrate" in text
    assert "measured - (not measured: no run yet behind the first one)" in text


@pytest.mark.slow
def test_a_model_whose_experts_were_never_moved_is_measured_too() -> None:
    report = runs(tiny(), 2, 2).report()
    assert report.decisions.forms[0].form == "resident"
    assert report.step.measured is not None
    assert (report.exposed.measured, report.slots.measured) == (0, 0)


def test_a_run_that_raises_does_not_count() -> None:
    clock = RunClock()
    for fails in (False, True, False):
        try:
            with clock.run(CPU, SIZES, None):
                if fails:
                    raise ValueError
        except ValueError:
            assert fails
    assert clock.measured().runs == 1


class _RingWithWaits:
    """A ring that only reports the waits of its last run."""

    device_bytes = 0

    def __init__(self) -> None:
        self.waits: list[Wait] = []


def test_waits_of_other_graphs_on_the_same_ring_and_of_failed_runs_do_not_count() -> None:
    ring: Any = _RingWithWaits()
    first, second = RunClock(), RunClock()

    def run(clock: RunClock, seconds: float) -> None:
        with clock.run(CPU, SIZES, ring):
            ring.waits = [lambda: seconds, lambda: seconds]
            if seconds > 5:
                raise TimeoutError

    for seconds in (3.0, 1.0, 2.0):
        run(first, seconds)
        run(second, 4.0)
        with pytest.raises(TimeoutError):
            run(first, 7.0)
    assert first.measured().exposed_seconds == (2 * 1.0 + 2 * 2.0) / 2
    assert second.measured().exposed_seconds == 2 * 4.0


def test_one_compilation_of_two_models_counts_the_waits_of_both() -> None:
    """The models share compiled code, and each has its own ring."""
    torch._dynamo.reset()
    models = [Stack("dense_bmm", depth=2) for _ in range(2)]
    rings = [moepass.offload_experts(model).store.ring() for model in models]
    with moepass.record_compilations() as compilations, torch.no_grad():
        for number, model in enumerate(models * 3):
            torch.compile(model, backend="asyncep", options={"lower": "eager"})(tokens())
            if number == 0:  # it does not count
                in_first_run = rings[0].statistics.waited_seconds
    (compilation,) = compilations
    waited = sum(ring.statistics.waited_seconds for ring in rings)
    assert compilation.report().exposed.measured == pytest.approx((waited - in_first_run) / 5)


@pytest.mark.parametrize("seed", range(5))
def test_events_time_runs_and_waits_on_cuda(seed: int) -> None:
    """A run on the emulated CUDA takes one millisecond for each piece of work between its events."""
    banks = [small_bank(index) for index in range(3)]
    with FakeCuda(random.Random(seed)).installed() as cuda:
        clock, ring = RunClock(), Ring(2, SLOT_BYTES, CPU, Copier(StreamLane(CPU)))
        for _ in range(4):
            with clock.run(CUDA, SIZES, ring):
                run_banks(ring, 0, banks, 2, lambda *read: cuda.issue(functools.partial(len, read)))
        measured = clock.measured()
        waited = ring.statistics.waited_seconds
    assert measured.runs == 3
    assert measured.run_seconds is not None
    assert measured.exposed_seconds is not None
    # Three banks are acquired, read and released in each run, and each of these is work on the compute stream.
    assert measured.run_seconds >= 9e-3
    assert 0 <= 3 * measured.exposed_seconds <= waited
    assert measured.slot_bytes == 2 * SLOT_BYTES


def test_the_host_does_not_wait_for_runs_on_cuda() -> None:
    with FakeCuda(random.Random(0)).installed():
        clock = RunClock()
        with mock.patch.object(torch.cuda, "synchronize") as synchronize:
            for _ in range(5):
                with clock.run(CUDA, SIZES, None):
                    pass
        assert synchronize.call_count == 0
