"""`benchmarks/gpu.py` without a GPU: tiny sizes, the summary of results, and the import of the package."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule

from benchmarks import gpu as gpu_benchmark
from benchmarks.on_gpu import (
    expert_layers,
    kernel_runs,
    memory_runs,
    models,
    profiles,
    streaming_runs,
    summary,
    tables,
    target,
)
from moepass.models.sizes.presets import preset_config
from moepass.passes.ir.segment import INDUCTOR, TRITON, Lowering
from moepass.runtime.lowering import lower_segments
from moepass.runtime.lowering.lower_segments import LoweredSegment
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton
from tests.helpers.models.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu() -> SimpleNamespace:
    """Return the modules of the benchmark."""
    return SimpleNamespace(
        main=gpu_benchmark,
        layers=expert_layers,
        kernels=kernel_runs,
        memory=memory_runs,
        models=models,
        profiles=profiles,
        streaming=streaming_runs,
        summary=summary,
        tables=tables,
        target=target,
    )


@pytest.fixture
def cpu(gpu: SimpleNamespace) -> object:
    return gpu.target.Target(torch.device("cpu"), torch.float32, 1e-5)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower experts on a CPU as on a GPU, and interpret their kernels."""
    lower = lower_segments.LOWERINGS[INDUCTOR]

    def lower_with_kernels(segment: GraphModule) -> tuple[LoweredSegment, Lowering]:
        experts = lower_to_triton(segment, lambda graph: lambda inputs: graph(*inputs))
        if not isinstance(experts, TritonExperts):
            return lower(segment)
        return LoweredSegment.of(experts, segment, boxed=True), Lowering(TRITON)

    monkeypatch.setitem(lower_segments.LOWERINGS, INDUCTOR, lower_with_kernels)


# ---- The parts -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_kernels_are_checked_and_timed(
    gpu: SimpleNamespace, cpu: object, interpreted: None, tmp_path: Path, family: str
) -> None:
    failures = gpu.target.Failures()
    results = gpu.kernels.measure_kernels(
        cpu, {family: tiny_model(family).config}, [(17, "uniform")], 1, gpu.target.Deadline(1e9), failures, tmp_path
    )
    failures.raise_first()
    assert [result.what for result in results] == ["grouped GEMM", "expert layer"]
    for result in results:
        assert result.lowered == "triton"
        assert result.error < 1e-5
        assert set(result.timings) == {"moepass", "grouped_mm", "dense"}
    # One grouped GEMM of [17 · 2, 64] x [64, 64], and with it one of [17 · 2, 32] x [32, 64].
    assert [result.flops for result in results] == [2 * 34 * 64 * 64, 2 * 34 * 64 * 96]
    written = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    assert "TRIED OUT, NO GPU" in written
    assert written.count(f"| {family} |") == 2


@pytest.mark.slow
def test_wrong_kernels_are_not_timed(
    gpu: SimpleNamespace, cpu: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gpu.kernels.GeneratedGemm.__call__
    monkeypatch.setattr(gpu.kernels.GeneratedGemm, "__call__", lambda *given: [output * 1.01 for output in run(*given)])
    config, failures = tiny_model("qwen3_moe").config, gpu.target.Failures()
    gpu.kernels.measure_kernels(cpu, {"tiny": config}, [(5, "skewed")], 1, gpu.target.Deadline(1e9), failures, tmp_path)
    with pytest.raises(gpu.target.WrongResultError, match="grouped GEMM, 5 tokens, skewed"):
        failures.raise_first()
    wrong, right = (tmp_path / "kernels.md").read_text(encoding="utf-8").splitlines()[-4:-2]
    assert "not measured: WrongResultError: tiny, grouped GEMM" in wrong
    assert "expert layer" in right
    assert "not measured" not in right


def test_what_has_no_time_left_is_in_the_table(gpu: SimpleNamespace, cpu: object, tmp_path: Path) -> None:
    config, failures = tiny_model("qwen3_moe").config, gpu.target.Failures()
    results = gpu.kernels.measure_kernels(
        cpu, {"tiny": config}, [(5, "uniform")], 1, gpu.target.Deadline(0), failures, tmp_path
    )
    assert [result.reason for result in results] == ["the part's 0 s were over"] * 2
    assert "not measured: the part's 0 s were over" in (tmp_path / "kernels.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts_run_from_the_source_tree(tmp_path: Path) -> None:
    """The benchmark runs in a separate process by links, as on a machine where nothing can be installed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "all", "--device", "cpu", "--tiny", "--output", str(tmp_path)],
        cwd=ROOT,
        env={**_environment(tmp_path / "tree"), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.md")) == [
        "kernels.md",
        "memory.md",
        "streaming.md",
        "summary.md",
    ]
    streaming = (tmp_path / "streaming.md").read_text(encoding="utf-8")
    for variant in ("resident", "streamed", "inductor"):
        assert streaming.count(f"| {variant} |") == 2
    assert "accelerate" in streaming
    assert "tokens" in (tmp_path / "memory.md").read_text(encoding="utf-8")


# ---- Where the package comes from ------------------------------------------------------------------------------------


LINK = [sys.executable, "-m", "benchmarks.on_gpu.source_tree"]


def _environment(folder: Path) -> dict[str, str]:
    """Link the source tree in `folder`. Returns an environment in which Python imports moepass from there."""
    subprocess.run([*LINK, folder], cwd=ROOT, check=True, timeout=60)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), "PYTHONSAFEPATH": "1"}


def test_links_are_a_package_with_its_backend(tmp_path: Path) -> None:
    ask = (
        "import importlib.metadata as found, moepass.models.errors as one, moepass.passes.ir as other\n"
        "print(one.__file__); print(other.__file__); print(found.distribution('moepass').version)\n"
        "print(*(point.value for point in found.entry_points(group='torch_dynamo_backends', name='asyncep')))"
    )
    lines = subprocess.run(
        [sys.executable, "-c", ask],
        env=_environment(tmp_path / "tree"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()
    assert all(Path(line).is_relative_to(tmp_path / "tree") for line in lines[:2])
    assert lines[2] == "0.1.0"
    assert "moepass.backend:asyncep" in lines[3].split()


def test_links_take_the_place_of_links_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    done = subprocess.run(
        [*LINK, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "FileExistsError" in done.stderr
    assert (tmp_path / "mine.txt").exists()


# ---- What results say ------------------------------------------------------------------------------------------------


@given(limit=st.integers(0, 5000), start=st.integers(1, 300), most=st.integers(1, 4000))
def test_the_longest_sequence_is_found(gpu: SimpleNamespace, limit: int, start: int, most: int) -> None:
    asked: list[int] = []

    def is_enough(tokens: int) -> bool:
        assert 1 <= tokens <= most
        assert tokens not in asked
        asked.append(tokens)
        return tokens <= limit

    length, beyond = gpu.memory.longest(is_enough, start, most)
    assert length <= limit
    assert length == 0 or length in asked
    if beyond is None:
        assert length == most
    else:
        assert beyond in asked
        assert beyond > limit
        assert beyond - length <= max(64, length / 16)


def test_out_of_memory_is_told_from_other_errors(gpu: SimpleNamespace, cpu: object) -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def run() -> None:
            try:
                raise error
            except Exception as cause:
                raise RuntimeError("a segment failed") from cause

        return run

    assert gpu.target.fits(cpu, lambda: None)
    assert not gpu.target.fits(cpu, fail(torch.OutOfMemoryError("no room")))
    assert not gpu.target.fits(cpu, fail(RuntimeError("CUDA error: out of memory")))
    with pytest.raises(RuntimeError, match="a segment failed"):
        gpu.target.fits(cpu, fail(ValueError("another one")))


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({}, None),
        ({1024: 0.5, 4096: 0.9}, None),
        ({1024: 0.96, 4096: 0.99}, 1024),
        ({1024: 0.90, 4096: 1.00}, 2048),
        # It has to stay there.
        ({1024: 0.99, 4096: 0.90, 16384: 1.00}, 8192),
    ],
)
def test_the_observed_threshold(gpu: SimpleNamespace, ratios: dict[int, float], expected: float | None) -> None:
    assert gpu.streaming.crossing(ratios, 0.95) == (None if expected is None else pytest.approx(expected))


def test_sequences_are_two_or_more_of_at_most_so_many_tokens(gpu: SimpleNamespace) -> None:
    assert gpu.streaming.sequences_of(1024, 4096) == (2, 512)
    assert gpu.streaming.sequences_of(8192, 4096) == (2, 4096)
    assert gpu.streaming.sequences_of(131072, 4096) == (32, 4096)


def test_layers_of_the_models_that_are_asked_for(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (79 << 30, 80 << 30))
    monkeypatch.setattr(gpu.layers, "draw_weights", lambda module, seed: None)
    sizes = gpu.main.full_sizes(["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b"], 2, 3)
    assert (sizes.config.num_hidden_layers, sizes.memory_config.num_hidden_layers) == (2, 3)
    results = {
        name: gpu.layers.ExpertLayer.of(name, config, torch.device("meta"), torch.bfloat16)
        for name, config in sizes.configs.items()
    }
    assert {name: tuple(layer.up.shape) for name, layer in results.items()} == {
        "qwen3-30b-a3b": (128, 2048, 1536),
        "mixtral-8x7b": (8, 4096, 28672),
        "gpt-oss-120b": (128, 2880, 5760),
    }
    assert {layer.module.config._experts_implementation for layer in results.values()} == {"grouped_mm"}


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_tokens_are_routed_to_different_experts(gpu: SimpleNamespace, routing: str) -> None:
    config = tiny_model("qwen3_moe").config
    layer = gpu.layers.ExpertLayer.of("tiny", config, torch.device("cpu"), torch.float32)
    routed = layer.routed(2000, routing)
    counts = routed.index.flatten().bincount(minlength=8).tolist()
    assert all(len(set(row)) == 2 for row in routed.index.tolist())
    if routing == "uniform":
        assert all(count == pytest.approx(500, rel=0.15) for count in counts)
    else:
        assert counts[6:] == [0, 0]
        assert counts[:6] == sorted(counts[:6], reverse=True)


def test_as_many_layers_as_memory_holds(gpu: SimpleNamespace) -> None:
    config = preset_config("qwen3-30b-a3b", layers=24)

    def fitting(device_gb: float, host_gb: float) -> int:
        return gpu.models.fitting_layers(config, 131072, 2, device_gb * 1e9, host_gb * 1e9)

    assert fitting(80, 128) == 24
    assert fitting(80, 30) == 8  # 2.1 GB of pinned memory for 1.2 GB of experts, 1.25 GB for accelerate
    assert 0 < fitting(40, 128) < 24
    assert fitting(5, 128) == 0


@pytest.mark.parametrize(
    ("name", "profile"),
    [("NVIDIA H100 80GB HBM3", "1xh100-80g"), ("NVIDIA A100-SXM4-80GB", "1xa100-80g"), ("GeForce RTX 4090", None)],
)
def test_profiles_go_by_the_name_of_the_gpu(gpu: SimpleNamespace, name: str, profile: str | None) -> None:
    by_name = gpu.profiles.profile_of_name(name)
    assert (by_name and by_name.name) == profile


def test_verdicts(gpu: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    timing, point = gpu.target.Timing.of, gpu.streaming.StreamingPoint
    result = gpu.kernels.KernelResult("m", "expert layer", 32768, "uniform", 1)
    kernels = [
        dataclasses.replace(
            result, routing=routing, timings={"moepass": timing([2.0]), "grouped_mm": timing([3.0]), "dense": dense}
        )
        for routing, dense in (("uniform", timing([1.7])), ("skewed", timing([1.5])))
    ]
    points = []
    for tokens, streamed in ((1000, 9.0), (3000, 1.01), (9000, 1.02)):
        points += [
            point(tokens, "resident", timing([1.0]), 0.5, None, 100),
            point(tokens, "streamed", timing([streamed]), 0.5, 0.0, 21),
        ]
    points.append(point(3000, "accelerate", timing([6.0]), 0.1, None, 5))
    streaming = gpu.streaming.StreamingResult(points, predicted=2500, observed=2000)
    statements = gpu.summary.summarise(kernels, streaming, None, {"device": "none"}, None)
    assert [(statement.found, statement.verdict) for statement in statements] == [
        ("0.750 (m, skewed)", "MISSED"),
        ("1.500 (m, uniform)", "met"),
        ("0.980 (9000 tokens)", "met"),
        ("0.210 (3000 tokens)", "MISSED"),
        ("+25%: 2500 and 2000 tokens", "MISSED"),
        ("0.500 (3000 tokens)", "met"),
        ("5.941 (3000 tokens)", "met"),
        (None, "not measured"),
    ]
    assert "the part was not run" in capsys.readouterr().out
    nothing = gpu.summary.summarise(None, None, None, {}, None)
    assert {statement.verdict for statement in nothing} == {"not measured"}
    assert {statement.note for statement in nothing} == {"the part was not run"}
