"""Measure moepass on one GPU: kernels, streaming, memory. Each part prints one table.

    python -m benchmarks.gpu kernels|streaming|memory|all --output FOLDER

Weights are random. Results are compared with float64, or with the uncompiled model, before anything is timed. A part
ends when its time is over, and reports skipped measurements. FOLDER receives each table as Markdown, row by row. If
moepass is not installed, it is imported from the source tree. `--device cpu --tiny` runs everything without a GPU on
tiny sizes; the numbers are then meaningless, and the tables say so.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from benchmarks.on_gpu.target import Target

PARTS = ("kernels", "streaming", "memory")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    `configs` are the layers of part `kernels`, by name; `config` is the model of the other parts, with `layers` layers.
    A sequence has up to `longest` tokens; the search for the longest sequence that fits goes from `start` to `most`.
    """

    configs: dict[str, Any]
    cases: tuple[tuple[int, str], ...]
    config: Any
    memory_config: Any
    counts: tuple[int, ...]
    longest: int
    start: int
    most: int
    chunk_tokens: int
    limit_bytes: int
    kernel_rounds: int
    step_rounds: int


def full_sizes(models: Sequence[str], layers: int, memory_layers: int) -> Sizes:
    """Return the sizes to measure, with fewer `layers` if memory requires it. Raises ValueError if none fits."""
    import psutil
    import torch

    from benchmarks.on_gpu.expert_layers import ROUTINGS
    from benchmarks.on_gpu.models import fitting_layers
    from benchmarks.on_gpu.streaming_runs import SLOTS
    from moepass.models.sizes.presets import preset_config

    config, counts = preset_config("qwen3-30b-a3b", layers=layers), (1024, 4096, 16384, 49152, 65536, 98304, 131072)
    on_device, in_host = torch.cuda.mem_get_info()[0], psutil.virtual_memory().available
    fitting = fitting_layers(config, counts[-1], SLOTS, on_device, in_host)
    if not fitting:
        raise ValueError(f"{on_device} free bytes on the device and {in_host} on the host cannot hold a single layer")
    # The sizes with targets come first.
    tokens = (32768, 4096, 131072)
    return Sizes(
        configs={name: preset_config(name, layers=1) for name in models},
        cases=tuple((count, routing) for count in tokens for routing in ROUTINGS),
        config=preset_config("qwen3-30b-a3b", layers=fitting),
        memory_config=preset_config("qwen3-30b-a3b", layers=memory_layers),
        counts=counts,
        longest=4096,
        start=8192,
        most=1 << 20,
        chunk_tokens=4096,
        limit_bytes=8 << 30,
        kernel_rounds=5,
        step_rounds=3,
    )


def tiny_sizes() -> Sizes:
    """Return sizes for a machine without a GPU."""
    from tests.helpers.models.tiny import tiny_model

    config = tiny_model("qwen3_moe", num_hidden_layers=2).config
    return Sizes(
        configs={name: tiny_model(name).config for name in ("qwen3_moe", "gpt_oss")},
        cases=((24, "uniform"), (40, "skewed")),
        config=config,
        memory_config=config,
        counts=(24, 48),
        longest=16,
        start=16,
        most=32,
        chunk_tokens=8,
        limit_bytes=1 << 30,
        kernel_rounds=1,
        step_rounds=1,
    )


def run_parts(
    parts: Sequence[str], target: Target, sizes: Sizes, seconds: dict[str, float], folder: Path | None
) -> list[Any]:
    """Run `parts`, each within its `seconds`, print their tables, and return the points of the summary.

    A failure is reported, and the remaining parts are measured; the first error is raised at the end.
    """
    from benchmarks.on_gpu.kernel_runs import measure_kernels
    from benchmarks.on_gpu.memory_runs import measure_memory
    from benchmarks.on_gpu.streaming_runs import measure_streaming
    from benchmarks.on_gpu.summary import summarise
    from benchmarks.on_gpu.target import Deadline, Failures, conditions

    target_sizes, failures = sizes, Failures()
    runs = {
        "kernels": lambda until: measure_kernels(
            target, target_sizes.configs, target_sizes.cases, target_sizes.kernel_rounds, until, failures, folder
        ),
        "streaming": lambda until: measure_streaming(
            target,
            target_sizes.config,
            target_sizes.counts,
            target_sizes.longest,
            target_sizes.step_rounds,
            until,
            failures,
            folder,
        ),
        "memory": lambda until: measure_memory(
            target,
            target_sizes.memory_config,
            target_sizes.start,
            target_sizes.most,
            target_sizes.limit_bytes,
            target_sizes.chunk_tokens,
            until,
            failures,
            folder,
        ),
    }
    results: dict[str, Any] = dict.fromkeys(PARTS)
    for part in parts:
        try:
            results[part] = runs[part](Deadline(seconds[part]))
        except Exception as error:
            failures.add(error)
        target.free_memory()
    points = summarise(*(results[name] for name in PARTS), conditions(target), folder)
    failures.raise_first()
    return points


def main(
    part: Literal["kernels", "streaming", "memory", "all"],
    output: Path | None = None,
    device: str = "cuda",
    profile: str = "",
    models: str = "qwen3-30b-a3b,qwen3-235b-a22b,mixtral-8x7b,gpt-oss-120b",
    layers: int = 24,
    memory_layers: int = 12,
    kernel_seconds: float = 150,
    streaming_seconds: float = 170,
    memory_seconds: float = 110,
    tiny: bool = False,
) -> None:
    """Run PARTS and print one table for each.

    PROFILE is a preset or a file of `moepass calibrate`; by default the preset of the GPU's name. LAYERS is the number
    of layers in part streaming, reduced if memory requires it; 24 take 30 GB of the device and 82 GB of host memory.
    """
    if tiny:
        # Triton reads the variable when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import typer

    from benchmarks.on_gpu.profiles import profile_of_gpu
    from benchmarks.on_gpu.target import Target
    from moepass.runtime.profiles.hardware_profiles import load_hardware

    if device != "cpu" and not torch.cuda.is_available():
        typer.echo(f"device is {device!r}, but this torch finds no GPU; --device cpu --tiny tries it out", err=True)
        raise typer.Exit(2)
    if (device == "cpu") != tiny:
        typer.echo("--device cpu and --tiny go together: tiny sizes tell nothing of a GPU, others take a GPU", err=True)
        raise typer.Exit(2)
    where = torch.device("cpu") if tiny else torch.device("cuda", torch.device(device).index or 0)
    if not tiny:
        torch.cuda.set_device(where)
    hardware = load_hardware(profile) if profile else profile_of_gpu(where)
    target = Target(where, *((torch.float32, 1e-4) if tiny else (torch.bfloat16, 2e-2)), hardware)
    sizes = tiny_sizes() if tiny else full_sizes(models.split(","), layers, memory_layers)
    seconds = {"kernels": kernel_seconds, "streaming": streaming_seconds, "memory": memory_seconds}
    run_parts(PARTS if part == "all" else (part,), target, sizes, seconds, output)


# transformers checks for a package `kernels`, and would import the file of that name in this folder.
if __name__ == "__main__":
    from benchmarks.on_gpu.source_tree import use_source_tree

    use_source_tree()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import typer

    typer.run(main)
