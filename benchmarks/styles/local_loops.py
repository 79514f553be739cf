"""Compare local models whose experts are modules in a loop over masks, compiled with asyncep and with Inductor."""

from __future__ import annotations

import statistics
import time

import torch
import typer
from torch import nn
from torch.nn import functional as F

import moepass
from benchmarks.common import interleaved_seconds, median_and_spread, print_table, verdict
from tests.helpers.project_styles.local_loops import MixtralLoop


class Stack(nn.Module):
    """Layers, each with a norm and a residual connection."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtralLoop(512, 256, experts, 2) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [tokens, H] after all layers."""
        for layer in self.layers:
            hidden = hidden + layer(F.rms_norm(hidden, hidden.shape[-1:]))
        return hidden


def main(tokens: str = "256,2048", experts: int = 16, layers: int = 1, repeats: int = 9) -> None:
    """Time forwards of TOKENS tokens through LAYERS layers of EXPERTS experts."""
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch.manual_seed(0)
    model = Stack(layers, experts).eval()
    numbers = [int(number) for number in tokens.split(",")]
    rows: list[list[object]] = []
    with torch.no_grad():
        compiled = {name: torch.compile(model, backend=name, dynamic=True) for name in ("inductor", "asyncep")}
        first: dict[str, float] = {}
        hidden = torch.randn(numbers[0], 512)
        for name, run in compiled.items():
            started = time.perf_counter()
            with moepass.record_compilations() as compilations:
                run(hidden)
            first[name] = time.perf_counter() - started
            for compilation in compilations:
                assert not compilation.plan.refusals, str(compilation.plan.refusals[0])
        for number in numbers:
            hidden = torch.randn(number, 512)
            variants = {name: (lambda run=run, hidden=hidden: run(hidden)) for name, run in compiled.items()}
            expected = model(hidden)
            equal = all(torch.allclose(run(), expected, rtol=1e-3, atol=1e-5) for run in variants.values())
            seconds = interleaved_seconds(variants, repeats)
            ratio = statistics.median(a / b for a, b in zip(seconds["inductor"], seconds["asyncep"], strict=True))
            rows.append([number, *map(median_and_spread, seconds.values()), f"{ratio:.2f}", verdict(equal)])
    print_table(
        f"{layers} layers, hidden 512, {experts} experts of width 256, top-2, fp32; the first run took "
        f"{first['inductor']:.0f} s with Inductor and {first['asyncep']:.0f} s with asyncep",
        ["tokens", "Inductor s", "asyncep s", "Inductor / asyncep", "equal"],
        rows,
        f"Median of {repeats} forwards (least to most), each after one of its own kind, in turns; ratio: median of "
        "those forward by forward.",
    )
    if any(row[-1] != verdict(True) for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
