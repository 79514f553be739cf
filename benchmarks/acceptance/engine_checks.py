"""Parts `memory` and `profile`: a step of an engine that does not fit into memory, and the work of a short step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.acceptance.results import NotRunError, PartChecks
from benchmarks.on_gpu.memory_runs import limited_memory
from benchmarks.on_gpu.target import Target, WrongResultError
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.engine.step_engine import StepEngine
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.models.tiny import tiny_model

LAYERS, VOCABULARY = 4, 4096
# Wide enough for the kernels of real models, small enough to be built in a second.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
# The share of a step's activations for which memory is left.
LEFT_SHARE = 0.6
# The largest allowed difference of log-probabilities in float32.
MOST_DIFFERENCE = 1e-3
# The calls in which the host waits for a GPU.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_STEP = "acceptance step"


def memory(target: Target, checks: PartChecks, folder: Path) -> None:
    """Let a step fail for lack of memory inside a compiled segment, and compare its answers with those before."""
    _need_gpu(target)
    engine, requests = compiled_engine(target, torch.float32), random_requests(16, 1024)

    def limited() -> contextlib.AbstractContextManager[None]:
        engine.step(requests)
        target.free_memory()
        activations = target.memory_of(lambda: engine.step(requests))
        assert activations is not None
        target.free_memory()
        limit_bytes = torch.cuda.memory_allocated(target.device) + int(LEFT_SHARE * activations)
        return limited_memory(target, limit_bytes)

    checks.run("a step that does not fit", lambda: check_out_of_memory(engine, requests, limited()))
    checks.run("the next step", lambda: check_out_of_memory(engine, requests, contextlib.nullcontext(), splits=False))


def profile_step(target: Target, checks: PartChecks, folder: Path) -> None:
    """Profile a step of 1,024 tokens in bfloat16, and write its trace to the folder."""
    _need_gpu(target)
    engine, requests = compiled_engine(target, torch.bfloat16), random_requests(4, 256)
    checks.run("form of steps", lambda: check_form(engine))
    checks.run("copies and waits", lambda: check_step_profile(step_events(engine, requests, folder / "step.json.gz")))


def _need_gpu(target: Target) -> None:
    if not target.is_gpu:
        raise NotRunError("only a GPU has a memory that can be limited, and copies that can be counted")


def compiled_engine(target: Target, dtype: torch.dtype) -> ModelEngine:
    """Return a compiled engine of a model with random weights, all on the device, without a cache of prefixes."""
    model = tiny_model("qwen3_moe", dtype=dtype, **SIZES).to(target.device)
    options = EngineOptions(None, target.device, cache_bytes=0, warms_up=False)
    return make_engine(model, options, lambda module: torch.compile(module, backend="asyncep"), bytes(32))


def random_requests(count: int, tokens: int) -> list[Request]:
    """Return `count` requests that share nothing; each reads log-probabilities after its last token."""
    drawn = np.random.default_rng(0).integers(3, VOCABULARY, (count, tokens), dtype=np.int32)
    read = TokenRead(tokens - 1, np.arange(8, dtype=np.int32))
    return [Request(f"request {number}", (TokenPiece(-1, row, (read,)),)) for number, row in enumerate(drawn)]


def check_form(engine: StepEngine) -> str:
    """Check that steps are tries."""
    if engine.facts.form != "trie":
        raise WrongResultError(f"steps are {engine.facts.notes.get('steps', engine.facts.form)}")
    return ", ".join(f"{name}: {note}" for name, note in engine.facts.notes.items())


def check_out_of_memory(
    engine: StepEngine,
    requests: Sequence[Request],
    limit: contextlib.AbstractContextManager[None],
    *,
    splits: bool = True,
) -> str:
    """Check that a step inside `limit` gives the answers of a step outside, in parts exactly if it `splits`."""
    with limit:
        limited = engine.step(requests)
    whole = engine.step(requests)
    if limited.refused:
        raise WrongResultError(f"requests were refused: {limited.refused[0][1]}")
    if (limited.retries > 0) != splits:
        raise WrongResultError(f"the step ran in {limited.retries + 1} parts")
    values, expected = (
        {answer.id: answer.pieces[0].reads[0].log_probabilities for answer in result.answers}
        for result in (limited, whole)
    )
    if values.keys() != expected.keys() or len(values) != len(requests):
        raise WrongResultError(f"{len(values)} of {len(requests)} requests were answered")
    difference = np.max([np.abs(values[name] - expected[name]) for name in expected])  # NaN if one is
    if not difference <= MOST_DIFFERENCE:
        raise WrongResultError(f"log-probabilities differ by {difference:.1e} from those of a whole step")
    return f"{limited.retries + 1} parts, log-probabilities differ by {difference:.1e} at most"


@dataclasses.dataclass(frozen=True)
class StepEvent:
    """A call of the host or a piece of work of the device during a step."""

    name: str
    start_us: float
    end_us: float
    is_on_device: bool


def step_events(engine: StepEngine, requests: Sequence[Request], trace: Path) -> list[StepEvent]:
    """Return the events of one step after warm ones, and write them to `trace`."""
    for _ in range(3):
        engine.step(requests)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_STEP):
            engine.step(requests)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events: list[Any] = list(profiler.events())
    step = next(event.time_range for event in events if event.name == _STEP and event.device_type == DeviceType.CPU)

    def is_of_step(event: Any) -> bool:
        # Before the step nothing was left to do for the device; the host also waits after it.
        is_on_device = event.device_type == DeviceType.CUDA
        return event.name != _STEP and (is_on_device or step.start <= event.time_range.start < step.end)

    return [
        StepEvent(event.name, event.time_range.start, event.time_range.end, event.device_type == DeviceType.CUDA)
        for event in events
        if is_of_step(event)
    ]


def check_step_profile(events: Sequence[StepEvent]) -> str:
    """Check that a step has one upload, before its kernels, one download after them, and no wait of the host before."""
    on_device = sorted((event for event in events if event.is_on_device), key=lambda event: event.start_us)
    uploads, downloads = ([event for event in on_device if kind in event.name] for kind in ("HtoD", "DtoH"))
    kernels = [event for event in on_device if not event.name.startswith(("Memcpy", "Memset"))]
    calls = [event for event in events if not event.is_on_device]
    launches = [event for event in calls if "LaunchKernel" in event.name]
    if not kernels or not launches:
        raise WrongResultError(f"the profile has {len(kernels)} kernels and {len(launches)} launches")
    if len(uploads) != 1 or uploads[0].start_us > kernels[0].start_us:
        raise WrongResultError(f"{len(uploads)} uploads instead of one before the first kernel")
    if len(downloads) != 1 or downloads[0].start_us < kernels[-1].start_us:
        raise WrongResultError(f"{len(downloads)} downloads instead of one after the last kernel")
    last_launch = max(event.start_us for event in launches)
    early = [event for event in calls if event.name in WAITS and event.start_us < last_launch]
    if early:
        raise WrongResultError(f"the host waited {len(early)} times before the last launch, first in {early[0].name}")
    first, last = on_device[0].start_us, max(event.end_us for event in on_device)
    busy = sum(event.end_us - event.start_us for event in on_device)
    return (
        f"{len(kernels)} kernels, {len(kernels) / LAYERS:.1f} per layer, 1 upload, 1 download, no early wait; "
        f"{(last - first) / 1e3:.2f} ms, the GPU busy for {busy / (last - first):.0%}"
    )
