"""Part `graphs`: models whose segments are replayed as CUDA graphs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import moepass
from benchmarks.acceptance.results import NotRunError, PartChecks
from benchmarks.on_gpu.expert_layers import relative_error
from benchmarks.on_gpu.target import Target, Timing, WrongResultError
from moepass.runtime.cuda_graphs.segment_graphs import GraphStatistics
from tests.helpers.models.tiny import tiny_model

# Tokens of each run: a shape runs once, is recorded in its second run, for each order of the slots, and then replayed.
LENGTHS = (32, 48, *[32, 48] * 6)
MOST_ERROR = 1e-4
WARM_RUNS, ROUNDS = 4, 20
GRAPHS, PLAIN = "cudagraphs", "plain"

# Maps token ids to logits.
Model = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def graphs(target: Target, checks: PartChecks, folder: Path) -> None:
    """Compare replays with the uncompiled model, with resident and with streamed experts, and time them."""
    if not target.is_gpu:
        raise NotRunError("only a GPU records CUDA graphs")
    for home in ("resident", "streamed"):
        plain, model = (tiny_model("qwen3_moe").to(target.device) for _ in range(2))
        if home == "streamed":
            moepass.offload_experts(model, slots=2, device=target.device)
        # Models of one class share their code, whose compilations would be reused.
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="asyncep", options={"cudagraphs": True}, dynamic=True)
        ids = [torch.randint(3, plain.config.vocab_size, (2, length), device=target.device) for length in LENGTHS]
        with moepass.record_compilations() as compilations:
            check = functools.partial(
                check_replays, _logits_of(compiled), _logits_of(plain), ids, lambda: _statistics(compilations)
            )
            checks.run(f"{home} experts", check)
    checks.run("time of a replay", lambda: check_times(times_of_runs(target)))


def _logits_of(model: Any) -> Model:
    def run(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    return run


def _statistics(compilations: Sequence[moepass.Compilation]) -> GraphStatistics:
    graphs = compilations[-1].executor.graphs
    assert graphs is not None
    return graphs.statistics


def check_replays(
    compiled: Model, plain: Model, inputs: Sequence[torch.Tensor], statistics: Callable[[], GraphStatistics]
) -> str:
    """Check that every run of `compiled` gives the logits of `plain`, and that some runs were replayed."""
    most = 0.0
    for number, ids in enumerate(inputs):
        error = relative_error(compiled(ids).flatten(0, -2), plain(ids).double().flatten(0, -2))
        if not error <= MOST_ERROR:
            raise WrongResultError(f"run {number} differs from the uncompiled model by {error:.1e} of a token's norm")
        most = max(most, error)
    counted = statistics()
    if not counted.replayed:
        raise WrongResultError(f"no run was replayed: {dict(counted.plain) or dict(counted.stopped) or counted}")
    return (
        f"{counted.recorded} runs recorded, {counted.replayed} replayed, {counted.plain.total()} plain, "
        f"{counted.stopped.total()} stopped; largest error {most:.1e}"
    )


@torch.no_grad()
def times_of_runs(target: Target) -> dict[str, Timing]:
    """Return the times of a short run with CUDA graphs, without them, and with Inductor alone."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16).to(target.device)
    ids = torch.randint(3, model.config.vocab_size, (2, 128), device=target.device)
    # All runs share the model's code, by which Dynamo limits compilations.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    compiled = {
        GRAPHS: torch.compile(model, backend="asyncep", options={"cudagraphs": True}),
        PLAIN: torch.compile(model, backend="asyncep"),
        "inductor": torch.compile(model, backend="inductor"),
    }
    runs = {name: _logits_of(module) for name, module in compiled.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_RUNS + ROUNDS):
        for name, run in runs.items():
            target.synchronize()
            # By the clock, because graphs save the time in which the host launches kernels.
            started = time.perf_counter()
            run(ids)
            target.synchronize()
            if number >= WARM_RUNS:
                seconds[name].append(time.perf_counter() - started)
    return {name: Timing.of(times) for name, times in seconds.items()}


def check_times(timings: Mapping[str, Timing]) -> str:
    """Check that a replay is faster than the same segments without CUDA graphs."""
    found = ", ".join(f"{name} {timing} ms" for name, timing in timings.items())
    if not timings[GRAPHS].seconds < timings[PLAIN].seconds:
        raise WrongResultError(f"a replay is not faster: {found}")
    return found
