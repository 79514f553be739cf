"""`make gpu-acceptance` without a GPU: each check passes for right results, and fails on a planted fault."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from benchmarks import gpu_acceptance
from benchmarks.acceptance import (
    attention_checks,
    engine_checks,
    graph_checks,
    rank_checks,
    serving_checks,
    speed_checks,
)
from benchmarks.acceptance.engine_checks import StepEvent
from benchmarks.acceptance.part_runs import Part, run_parts
from benchmarks.acceptance.results import FAILED, NOT_RUN, PASSED, CheckResult, NotRunError, PartChecks, ResultFiles
from benchmarks.on_gpu.kernel_runs import LAYER, KernelResult
from benchmarks.on_gpu.streaming_runs import INDUCTOR, RESIDENT, STREAMED, StreamingPoint, StreamingResult
from benchmarks.on_gpu.target import Target, Timing, WrongResultError
from moepass.runtime.cuda_graphs.segment_graphs import GraphStatistics
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.serving.attention.running_step import RunningStep, running_step, the_running_step
from moepass.runtime.serving.attention.survey import AttentionSurvey, survey_attention
from moepass.runtime.serving.attention.trie_attention import trie_attention
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, ReadAnswer, Usage
from moepass.runtime.serving.requests.request import NO_TOKENS, Request

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


# ---- Parts and results -----------------------------------------------------------------------------------------------


def test_parts_exist_and_end_within_ten_minutes() -> None:
    page = (ROOT / "docs" / "results" / "gpu.md").read_text(encoding="utf-8")
    for part in gpu_acceptance.PARTS:
        assert callable(pkgutil.resolve_name(part.function))
        assert re.search(rf"^\| `{part.name}` \|.*\| {part.limit_s:g} \|$", page, re.M), part
    assert sum(part.limit_s for part in gpu_acceptance.PARTS) <= 600
    assert len({part.name for part in gpu_acceptance.PARTS}) == len(gpu_acceptance.PARTS)


_PROGRAMS = {
    "hangs": (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "add('child', str(child.pid))\n"
        "time.sleep(60)\n"
    ),
    "dies": "add('first', 'right'); import os; os.abort()\n",
    "runs": "add('first', 'right')\n",
}


def _command(folder: Path, program: str) -> list[str]:
    start = (
        "import sys\n"
        "from pathlib import Path\n"
        "from benchmarks.acceptance.results import PartChecks, ResultFiles\n"
        f"checks = PartChecks({program!r}, ResultFiles(Path({str(folder)!r}), sys.stdout))\n"
        "add = lambda what, found: checks.run(what, lambda: found)\n"
    )
    return [sys.executable, "-c", start + _PROGRAMS[program]]


def test_a_part_past_its_limit_is_ended_with_its_children_and_the_next_one_runs(tmp_path: Path) -> None:
    echo = io.StringIO()
    results = ResultFiles(tmp_path / "results", echo)
    results.clear()
    parts = [Part(name, 3.0 if name == "hangs" else 30.0, "") for name in _PROGRAMS]
    run_parts(parts, lambda part: _command(results.folder, part.name), results)
    found = results.read()
    assert [(result.part, result.what, result.verdict) for result in found] == [
        ("hangs", "child", PASSED),
        ("hangs", "process", FAILED),
        ("dies", "first", PASSED),
        ("dies", "process", FAILED),
        ("runs", "first", PASSED),
    ]
    assert "ended after its limit of 3 s" in found[1].found
    assert "status -6" in found[3].found
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(found[0].found)).status() == psutil.STATUS_ZOMBIE
    # The runner prints its own lines; parts print theirs.
    assert echo.getvalue().splitlines() == [found[1].text(), found[3].text()]


def test_a_failed_check_is_a_line_and_the_next_one_runs(tmp_path: Path) -> None:
    echo = io.StringIO()
    results = ResultFiles(tmp_path, echo)
    checks = PartChecks("part", results)

    def raises(error: Exception) -> Callable[[], str]:
        def check() -> str:
            raise error

        return check

    checks.run("one", raises(ValueError("wrong\nmore lines")))
    checks.run("two", raises(NotRunError("needs a GPU")))
    checks.run("three", lambda: "42")
    checks.run_part(raises(RuntimeError("no server")))
    lines = [json.loads(line) for line in (tmp_path / "acceptance.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["what"], line["verdict"], line["found"]) for line in lines] == [
        ("one", FAILED, "ValueError: wrong"),
        ("two", NOT_RUN, "needs a GPU"),
        ("three", PASSED, "42"),
        ("before or between checks", FAILED, "RuntimeError: no server"),
    ]
    text = (tmp_path / "acceptance.txt").read_text(encoding="utf-8")
    assert text == echo.getvalue()
    assert [line.partition(" (")[0] for line in text.splitlines()][::2] == [
        "FAILED   part, one: ValueError: wrong",
        "passed   part, three: 42",
    ]
    assert results.read() == [CheckResult(**line) for line in lines]


@pytest.mark.slow
def test_parts_that_need_no_gpu_pass_on_a_cpu(tmp_path: Path) -> None:
    parts = ("versions", "serve", "memory", "ranks")
    program = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--output", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(
        [*program, *(word for part in parts for word in ("--part", part))],
        cwd=ROOT,
        env={**os.environ, "MOEPASS_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "acceptance.jsonl").read_text(encoding="utf-8").splitlines()
    verdicts = Counter((line["part"], line["verdict"]) for line in map(json.loads, lines))
    assert verdicts == {("versions", PASSED): 2, ("serve", PASSED): 5, ("memory", NOT_RUN): 1, ("ranks", PASSED): 2}
    assert done.stdout.splitlines()[-1] == "9 passed, 1 not run"


# ---- Attention -------------------------------------------------------------------------------------------------------


def _with_whole_past(*arguments: Any) -> torch.Tensor:
    step = the_running_step()
    layers = {number: dataclasses.replace(layer, past=VisiblePast()) for number, layer in step.layers.items()}
    with running_step(RunningStep(step.step, layers, step.memory)):
        return trie_attention(*arguments)


def _without_sinks(query: Any, key: Any, value: Any, sinks: Any, *others: Any) -> torch.Tensor:
    return trie_attention(query, key, value, None, *others)


def _nan(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return trie_attention(query, *others) * torch.nan


@pytest.mark.parametrize("dtype", attention_checks.MOST_ERROR)
@pytest.mark.parametrize("past", attention_checks.PASTS)
def test_attention_is_compared_with_a_dense_mask(dtype: torch.dtype, past: str) -> None:
    limits = attention_checks.PASTS[past]
    case = attention_checks.trie_case(dtype, limits, has_sinks=True)
    case = dataclasses.replace(case, kv_heads=1, groups=2, key_dim=16, value_dim=16)
    assert "a kernel for each part" in attention_checks.check_trie_attention(case, CPU)
    faults = [_without_sinks, _nan, *([_with_whole_past] if limits != VisiblePast() else [])]
    for fault in faults:
        with pytest.raises(WrongResultError, match="differs from dense attention"):
            attention_checks.check_trie_attention(case, CPU, fault)


def test_a_survey_that_differs_on_the_device_fails() -> None:
    assert attention_checks.check_survey("llama4", CPU) == "4 layers"

    def refuses(model: Any) -> AttentionSurvey:
        return dataclasses.replace(survey_attention(model), refusal="it has tensors on two devices")

    def finds_no_chunks(model: Any) -> AttentionSurvey:
        survey = survey_attention(model)
        layers = {number: dataclasses.replace(layer, past=VisiblePast()) for number, layer in survey.layers.items()}
        return dataclasses.replace(survey, layers=layers)

    for fault, words in ((refuses, "finds it has tensors on two devices instead of"), (finds_no_chunks, "finds {0: ")):
        with pytest.raises(WrongResultError, match=re.escape(words)):
            attention_checks.check_survey("llama4", CPU, fault)


def test_a_torch_without_the_arguments_of_varlen_attn_fails() -> None:
    assert "takes all arguments" in attention_checks.check_varlen_signature()
    with pytest.raises(WrongResultError, match="has varlen_attn without window_size; attention takes a slower kernel"):
        attention_checks.check_varlen_signature(lambda *_: "torch 2.11 has varlen_attn without window_size")


# ---- The server ------------------------------------------------------------------------------------------------------


EXPECTED = serving_checks.Expected([5, 6, 7, 8], [-1.0, -2.0, -3.0, -0.5], [0.2, 0.7, 0.1])


def _server(wrong: str = "", by: float = 0.01) -> serving_checks.Post:
    """Return a server whose answers are right, except for a number that is `wrong`."""

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/decisions":
            values = [choice["value"] for choice in body["questions"][0]["choices"]]
            numbers = [*EXPECTED.choice_probabilities]
            numbers[1] += by * (wrong == "choice")
            pairs = zip(values, numbers, strict=True)
            return {"answers": [{"probabilities": [{"value": name, "probability": one} for name, one in pairs]}]}
        numbers = EXPECTED.log_probabilities[: len(body["prompt"]) - 1 + body["max_tokens"]]
        numbers[-1] += by * (wrong == len(body["prompt"]))
        return {"choices": [{"logprobs": {"token_logprobs": [None, *numbers]}}]}

    return post


def test_a_wrong_probability_of_the_server_fails() -> None:
    for check in (serving_checks.check_completion, serving_checks.check_decision, serving_checks.check_many):
        assert "differ from plain transformers by 0.0e+00" in check(_server(), EXPECTED)
    for check, wrong in (
        (serving_checks.check_completion, 4),
        (serving_checks.check_decision, "choice"),
        (serving_checks.check_many, 3),
    ):
        for by in (0.01, float("nan")):
            with pytest.raises(WrongResultError, match="differs from plain transformers"):
                check(_server(wrong, by), EXPECTED)  # type: ignore[arg-type]


def test_a_server_on_another_device_or_with_an_error_at_its_end_fails() -> None:
    lines = ["moepass serves demo", "computes on cuda:0 (NVIDIA H100)\n", "ready"]
    assert serving_checks.check_device(lines, "cuda") == "computes on cuda:0 (NVIDIA H100)"
    for other in (["computes on cpu (Xeon)\n"], []):
        with pytest.raises(WrongResultError, match="should compute on cuda"):
            serving_checks.check_device(other, "cuda")
    assert serving_checks.check_end(0)
    with pytest.raises(WrongResultError, match="status -9"):
        serving_checks.check_end(-9)


def test_a_server_whose_packages_are_missing_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serving_checks, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(NotRunError, match="needs no_such_package, which"):
        serving_checks.serve(
            Target(CPU, torch.float32, 1e-4), PartChecks("serve", ResultFiles(tmp_path, io.StringIO())), tmp_path
        )


# ---- Engines ---------------------------------------------------------------------------------------------------------


class _Engine:
    """An engine that runs a step in two parts while its memory is limited, and then answers `wrong` by so much."""

    def __init__(self, wrong: float = 0.0, parts: int = 2, answered: int = 2, refused: bool = False) -> None:
        self.wrong, self.parts, self.answered, self.refused = wrong, parts, answered, refused
        self.is_limited = False

    @contextlib.contextmanager
    def limited(self) -> Any:
        self.is_limited = True
        yield
        self.is_limited = False

    def step(self, requests: Sequence[Request], upcoming: object = None) -> StepResult:
        def answer(request: Request) -> Answer:
            values = np.full(8, -1.0 - self.wrong * self.is_limited, np.float32)
            return Answer(request.id, (PieceAnswer((ReadAnswer(values, NO_TOKENS, values[:0]),)),), Usage(1, 0, 1))

        answers = tuple(map(answer, requests[: self.answered if self.is_limited else None]))
        refused = (("request 0", "it needs more memory"),) if self.refused and self.is_limited else ()
        retries = self.parts - 1 if self.is_limited else 0
        return StepResult(answers, (), (), 1, 1, refused=refused, retries=retries)


def _check_memory(engine: _Engine) -> str:
    requests = engine_checks.random_requests(2, 3)
    return engine_checks.check_out_of_memory(engine, requests, engine.limited())  # type: ignore[arg-type]


def test_a_step_without_memory_must_run_in_parts_with_the_same_answers() -> None:
    assert _check_memory(_Engine()) == "2 parts, log-probabilities differ by 0.0e+00 at most"
    for engine, words in (
        (_Engine(parts=1), "the step ran in 1 parts"),
        (_Engine(wrong=0.01), "log-probabilities differ by 1.0e-02"),
        (_Engine(wrong=float("nan")), "log-probabilities differ by nan"),
        (_Engine(answered=1), "1 of 2 requests were answered"),
        (_Engine(refused=True), "requests were refused: it needs more memory"),
    ):
        with pytest.raises(WrongResultError, match=words):
            _check_memory(engine)


@pytest.mark.parametrize("form", ["trie", "rows"])
def test_steps_must_be_tries(form: str) -> None:
    engine: Any = SimpleNamespace(facts=SimpleNamespace(form=form, notes={"steps": f"{form}, because"}))
    if form == "trie":
        assert engine_checks.check_form(engine) == "steps: trie, because"
    else:
        with pytest.raises(WrongResultError, match="steps are rows, because"):
            engine_checks.check_form(engine)


def _events() -> dict[str, StepEvent]:
    """Return a step with two kernels, by name: calls of the host, then work of the device."""
    return {
        "upload": StepEvent("Memcpy HtoD (Pinned -> Device)", 20, 22, True),
        "launch": StepEvent("cudaLaunchKernel", 10, 11, False),
        "first": StepEvent("triton_gemm", 30, 50, True),
        "last launch": StepEvent("cuLaunchKernelEx", 40, 41, False),
        "last": StepEvent("attention", 50, 70, True),
        "wait": StepEvent("cudaStreamSynchronize", 60, 90, False),
        "download": StepEvent("Memcpy DtoH (Device -> Pageable)", 70, 72, True),
    }


def test_a_step_has_one_upload_one_download_and_no_early_wait() -> None:
    found = engine_checks.check_step_profile([*_events().values()])
    assert found.startswith(
        "2 kernels, 0.5 per layer, 1 upload, 1 download, no early wait; 0.05 ms, the GPU busy for 85%"
    )
    faults: dict[str, dict[str, StepEvent | None]] = {
        "2 uploads": {"again": StepEvent("Memcpy HtoD (Pageable -> Device)", 55, 56, True)},
        "1 uploads instead of one before": {"upload": StepEvent("Memcpy HtoD (Pinned -> Device)", 35, 36, True)},
        "0 uploads": {"upload": None},
        "2 downloads": {"again": StepEvent("Memcpy DtoH (Device -> Pageable)", 71, 72, True)},
        "1 downloads instead of one after": {"last": StepEvent("attention", 80, 90, True)},
        "the host waited 1 times before the last launch, first in cudaEventSynchronize": {
            "early": StepEvent("cudaEventSynchronize", 35, 36, False)
        },
        "the profile has 0 kernels": {"first": None, "last": None},
        "kernels and 0 launches": {"launch": None, "last launch": None},
    }
    for words, changes in faults.items():
        events = [event for event in (_events() | changes).values() if event is not None]  # type: ignore[operator]
        with pytest.raises(WrongResultError, match=words):
            engine_checks.check_step_profile(events)


# ---- Ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_answers_another_number_fails(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    right = rank_checks.stack_of(CPU)(rank_checks.tokens())

    def run_ranks(count: int, answer: rank_checks.Answer, *arguments: str, timeout: float) -> list[list[torch.Tensor]]:
        assert arguments == ("peer", "cpu")
        return [[right, right + 1e-3 * (number == wrong)] for number in range(count)]

    monkeypatch.setattr(rank_checks, "run_ranks", run_ranks)
    wrong = -1
    assert "equal to the bit" in rank_checks.check_ranks("peer", "cpu")
    wrong = rank
    with pytest.raises(WrongResultError, match=rf"rank {rank} differs from the uncompiled model by .* in run 1"):
        rank_checks.check_ranks("peer", "cpu")


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


class _Graphed:
    """A model that records its second run, and replays later ones: right, or with the `stale` outputs of the record."""

    def __init__(self, stale: bool = False, replays: bool = True) -> None:
        self.stale, self.replays = stale, replays
        self.statistics = GraphStatistics()
        self._recorded: torch.Tensor | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        logits = _logits(ids)
        if not self.statistics.plain or not self.replays:
            self.statistics.plain["in the first run of a shape"] += 1
        elif self._recorded is None:
            self._recorded = logits
            self.statistics.recorded += 1
        else:
            self.statistics.replayed += 1
            logits = self._recorded if self.stale else logits
        return logits


def _logits(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(ids, 8).double().cumsum(1)


def _check_replays(model: _Graphed) -> str:
    inputs = [torch.randint(0, 8, (1, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    return graph_checks.check_replays(model, _logits, inputs, lambda: model.statistics)


def test_a_replay_of_old_results_and_a_model_without_replays_fail() -> None:
    assert _check_replays(_Graphed()).startswith("1 runs recorded, 2 replayed, 1 plain, 0 stopped")
    with pytest.raises(WrongResultError, match="run 2 differs from the uncompiled model"):
        _check_replays(_Graphed(stale=True))
    with pytest.raises(WrongResultError, match=r"no run was replayed: .*first run of a shape"):
        _check_replays(_Graphed(replays=False))


def test_replays_must_be_faster_than_plain_runs() -> None:
    times = {"cudagraphs": Timing.of([1e-3]), "plain": Timing.of([2e-3]), "inductor": Timing.of([2e-3])}
    assert graph_checks.check_times(times) == "cudagraphs 1.000 ±0% ms, plain 2.000 ±0% ms, inductor 2.000 ±0% ms"
    with pytest.raises(WrongResultError, match="not faster"):
        graph_checks.check_times(times | {"cudagraphs": Timing.of([2.1e-3])})


# ---- Speed -----------------------------------------------------------------------------------------------------------


def test_a_slow_or_wrong_expert_layer_fails() -> None:
    timings = {"moepass": Timing.of([2.0]), "dense": Timing.of([1.7])}
    result = KernelResult("mixtral-8x7b", LAYER, 32768, "uniform", 1, timings, lowered="triton")
    assert speed_checks.check_kernel(result, 0.85) == "0.850 of dense, by triton, 32768 tokens"
    with pytest.raises(WrongResultError, match=r"0\.850 of dense, .* should be at least 0\.86"):
        speed_checks.check_kernel(result, 0.86)
    with pytest.raises(WrongResultError, match="not measured: WrongResultError: error 1"):
        speed_checks.check_kernel(dataclasses.replace(result, timings={}, reason="WrongResultError: error 1"), 0.85)


def _streaming(streamed: float = 1.0, observed: float | None = 70_000.0, short: float = 0.9) -> StreamingResult:
    """Return times of steps with resident experts, which take a second; `short` is the shortest one."""
    seconds = {
        (1024, RESIDENT): short,
        (1024, INDUCTOR): 1.0,
        (98304, RESIDENT): 1.0,
        (98304, STREAMED): streamed,
    }
    points = [StreamingPoint(*key, Timing.of([value]), None, None, None) for key, value in seconds.items()]
    return StreamingResult(points, predicted=75_000.0, observed=observed, missing=["1 tokens: out of memory"])


def test_streaming_below_its_targets_fails() -> None:
    right = _streaming()
    assert speed_checks.check_streamed_rate(right) == "1.000 of the rate of resident experts at 98304 tokens"
    assert speed_checks.check_threshold(right) == "predicted 75000 tokens, observed 70000: +7%"
    assert speed_checks.check_short_steps(right) == "1.11 times as fast as Inductor alone"
    for check, result, words in (
        (speed_checks.check_streamed_rate, _streaming(streamed=1.05), "0.952 of the rate .* at least 0.98"),
        (speed_checks.check_streamed_rate, _streaming(observed=None), "did not become as fast .* out of memory"),
        (speed_checks.check_threshold, _streaming(observed=60_000.0), r"\+25%; it should be within 10%"),
        (speed_checks.check_threshold, _streaming(observed=None), "not observed. 1 tokens: out of memory"),
        (speed_checks.check_short_steps, _streaming(short=1.5), "0.67 times as fast as Inductor alone"),
        (speed_checks.check_short_steps, StreamingResult(), "1024 tokens were not measured"),
    ):
        with pytest.raises(WrongResultError, match=words):
            check(result)


def test_steps_are_measured_around_the_predicted_threshold() -> None:
    assert speed_checks.counts_around(65_000.0) == [1024, 40_960, 53_248, 65_536, 81_920, 98_304]
    assert speed_checks.counts_around(1.0) == [1024, 8192]
    for predicted in (None, float("inf")):
        with pytest.raises(WrongResultError, match="predicts a threshold of"):
            speed_checks.counts_around(predicted)


def test_a_calibration_is_written_and_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hardware = load_hardware("1xh100-80g")
    monkeypatch.setattr(speed_checks, "calibrate", lambda *_, **__: hardware)
    profiles: list[Any] = []
    found = speed_checks.check_calibration(Target(CPU, torch.float32, 1e-4), tmp_path, profiles)
    assert "989 TFLOP/s in bf16" in found
    assert profiles == [hardware]
    assert load_hardware(str(tmp_path / "profile.json")).flops == hardware.flops
