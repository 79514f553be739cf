"""Parts `kernels` and `threshold`: expert layers against dense GEMMs, and the threshold that a calibration predicts."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import psutil
import torch

from benchmarks.acceptance.results import NotRunError, PartChecks
from benchmarks.on_gpu.kernel_runs import LAYER, KernelResult, measure_kernels
from benchmarks.on_gpu.models import fitting_layers
from benchmarks.on_gpu.streaming_runs import (
    INDUCTOR,
    RESIDENT,
    SLOTS,
    STREAMED,
    StreamingResult,
    measure_streaming,
    predicted_threshold,
)
from benchmarks.on_gpu.target import Deadline, Failures, Target, WrongResultError
from moepass.models.sizes.presets import preset_config
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.calibrate.calibration import calibrate
from moepass.runtime.calibrate.experiments import CUDA_SIZES
from moepass.runtime.profiles.hardware_profiles import profile_json

KERNEL_TOKENS = 32768
# The smallest allowed rate of an expert layer, as a part of that of dense GEMMs of the same FLOPs.
LEAST_SHARES = {"gpt-oss-120b": 0.75, "mixtral-8x7b": 0.85}
KERNEL_SECONDS, STREAMING_SECONDS = 60.0, 95.0
STREAMED_MODEL, LAYERS = "qwen3-30b-a3b", 6
SHORT_TOKENS, LONGEST = 1024, 4096
# Steps around the predicted threshold, as parts of it.
AROUND = (0.6, 0.8, 1.0, 1.25, 1.5)
LEAST_STREAMED_RATE, MOST_THRESHOLD_ERROR = 0.98, 0.1


def kernels(target: Target, checks: PartChecks, folder: Path) -> None:
    """Measure the expert layers of gpt-oss and Mixtral, after a comparison with float64."""
    if not target.is_gpu:
        raise NotRunError("rates of kernels on a CPU say nothing of a GPU")
    configs = {name: preset_config(name, layers=1) for name in LEAST_SHARES}
    failures = Failures()
    results = measure_kernels(
        *(target, configs, [(KERNEL_TOKENS, "uniform")], 5, Deadline(KERNEL_SECONDS), failures, folder)
    )
    for result in results:
        if result.what == LAYER:
            least = LEAST_SHARES[result.model]
            checks.run(f"expert layer of {result.model}", functools.partial(check_kernel, result, least))


def check_kernel(result: KernelResult, least_share: float) -> str:
    """Check that an expert layer reaches a share of the rate of dense GEMMs."""
    share = result.share_of_dense
    if share is None:
        raise WrongResultError(f"not measured: {result.reason or 'there is no time of dense GEMMs'}")
    found = f"{share:.3f} of dense, by {result.lowered}, {result.tokens} tokens"
    if share < least_share:
        raise WrongResultError(f"{found}; it should be at least {least_share:g}")
    return found


def threshold(target: Target, checks: PartChecks, folder: Path) -> None:
    """Calibrate, then stream a model around the threshold that the profile predicts."""
    if not target.is_gpu:
        raise NotRunError("a CPU has no link to a GPU")
    profiles: list[Hardware] = []
    checks.run("calibrate", lambda: check_calibration(target, folder, profiles))
    if not profiles:
        raise NotRunError("there is no profile to predict a threshold from")
    calibrated = dataclasses.replace(target, hardware=profiles[0])
    config = preset_config(STREAMED_MODEL, layers=LAYERS)
    predicted = predicted_threshold(calibrated, config, LONGEST)
    counts = counts_around(predicted)
    free_bytes = torch.cuda.mem_get_info(target.device)[0]
    layers = fitting_layers(config, counts[-1], SLOTS, free_bytes, psutil.virtual_memory().available)
    if layers < LAYERS:
        raise NotRunError(f"{layers} of {LAYERS} layers fit into the memory of the device and the host")
    failures = Failures()
    result = measure_streaming(
        *(calibrated, config, counts, LONGEST, 3, Deadline(STREAMING_SECONDS), failures, folder), times_accelerate=False
    )
    checks.run("streamed experts above the threshold", lambda: check_streamed_rate(result))
    checks.run("threshold", lambda: check_threshold(result))
    checks.run(f"{SHORT_TOKENS} tokens, resident", lambda: check_short_steps(result))


def check_calibration(target: Target, folder: Path, profiles: list[Hardware]) -> str:
    """Measure this machine with one rank and in bfloat16, write the profile, and add it to `profiles`."""
    sizes = dataclasses.replace(CUDA_SIZES, dtypes=("bf16",), head_dims=(128,))
    hardware = calibrate(target.device.type, 1, sizes=sizes)
    path = folder / "profile.json"
    path.write_bytes(profile_json(hardware))
    profiles.append(hardware)
    host = hardware.host
    rate = "no host link" if host is None else f"host link {host.bytes_per_s.value / 1e9:.1f} GB/s"
    return f"{hardware.flops['bf16'].value / 1e12:.0f} TFLOP/s in bf16, {rate}, {path}"


def counts_around(predicted: float | None) -> list[int]:
    """Return the tokens of the steps to measure: a short one, and several around the predicted threshold."""
    if predicted is None or not math.isfinite(predicted):
        raise WrongResultError(f"the profile predicts a threshold of {predicted}")
    around = (max(2 * LONGEST, LONGEST * round(part * predicted / LONGEST)) for part in AROUND)
    return [SHORT_TOKENS, *sorted({*around})]


def check_streamed_rate(result: StreamingResult, least: float = LEAST_STREAMED_RATE) -> str:
    """Check the rate of streamed experts, as a part of that of resident ones, from the observed threshold on."""
    if result.observed is None:
        raise WrongResultError(f"streamed experts did not become as fast as resident ones. {_missing(result)}")
    ratios = result.rate_ratios(STREAMED, RESIDENT)
    most = max(ratios)
    found = f"{ratios[most]:.3f} of the rate of resident experts at {most} tokens"
    if not ratios[most] >= least:
        raise WrongResultError(f"{found}; it should be at least {least:g}")
    return found


def check_threshold(result: StreamingResult, most_error: float = MOST_THRESHOLD_ERROR) -> str:
    """Check the predicted threshold against the observed one."""
    if result.predicted is None or result.observed is None:
        raise WrongResultError(f"the threshold was not observed. {_missing(result)}")
    error = result.predicted / result.observed - 1
    found = f"predicted {result.predicted:.0f} tokens, observed {result.observed:.0f}: {error:+.0%}"
    if not abs(error) <= most_error:
        raise WrongResultError(f"{found}; it should be within {most_error:.0%}")
    return found


def check_short_steps(result: StreamingResult, tokens: int = SHORT_TOKENS) -> str:
    """Check that short steps with resident experts are at least as fast as with Inductor alone."""
    ratio = result.rate_ratios(RESIDENT, INDUCTOR).get(tokens)
    if ratio is None:
        raise WrongResultError(f"{tokens} tokens were not measured. {_missing(result)}")
    found = f"{ratio:.2f} times as fast as Inductor alone"
    if not ratio >= 1:
        raise WrongResultError(found)
    return found


def _missing(result: StreamingResult) -> str:
    return "; ".join(result.missing) or "Nothing that was asked for is missing"
