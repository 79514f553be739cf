"""Measure if computation hides the transfers: one model, resident and streaming over an emulated link, in turns."""

from __future__ import annotations

import statistics

import torch
import typer

import moepass
from benchmarks.common import interleaved_seconds, median_and_spread, print_table, reference_model, verdict

LIMIT = 1.05


def main(
    layers: int = 24, tokens: int = 2048, repeats: int = 5, ratios: str = "0.8,2.0", lower: str = "inductor"
) -> None:
    """Compare resident with streaming forwards if a transfer takes RATIOS of a layer's compute time."""
    torch.set_num_threads(
        1
    )  # the copy thread gets the other core, like a copy engine that works independently of the SMs
    ids = torch.randint(0, 1024, (4, tokens // 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        resident = torch.compile(reference_model(layers), backend="asyncep", options={"lower": lower})
        expected = resident(ids).logits
        alone = interleaved_seconds({"resident": lambda: resident(ids)}, repeats=3)["resident"]
        layer_seconds = statistics.median(alone) / layers
        rows = []
        for ratio in [float(text) for text in ratios.split(",")]:
            rows.append(_compare(resident, ids, expected, layers, layer_seconds, ratio, repeats, lower))
    print_table(
        f"Streaming against resident, {layers} layers, {tokens} tokens, 2 slots, link emulated",
        ["transfer / compute", "resident s", "streaming s", "ratio", "of", "at most", "holds", "equal"],
        rows,
        "ratio: median over pairs. Below 1 transfer per compute the floor is the resident time, above it the link's.",
    )
    if any(row[-2] != "yes" or row[-1] != "yes" for row in rows):
        raise typer.Exit(1)


def _compare(
    resident: torch.nn.Module,
    ids: torch.Tensor,
    expected: torch.Tensor,
    layers: int,
    layer_seconds: float,
    ratio: float,
    repeats: int,
    lower: str,
) -> list[object]:
    model = reference_model(layers)
    bank_bytes = sum(value.numel() * 4 for value in model.model.layers[0].mlp.experts.parameters())
    transfer_seconds = ratio * layer_seconds
    moepass.offload_experts(model, slots=2, home=moepass.Host(link=f"emulate:{bank_bytes / transfer_seconds}"))
    torch._dynamo.reset()
    streaming = torch.compile(model, backend="asyncep", options={"lower": lower})
    equal = torch.equal(streaming(ids).logits, expected)
    seconds = interleaved_seconds({"resident": lambda: resident(ids), "streaming": lambda: streaming(ids)}, repeats)
    if ratio <= 1:
        floor = "resident"
        ratios = [mine / resident for mine, resident in zip(seconds["streaming"], seconds["resident"], strict=True)]
    else:
        floor = "pure transfer"
        ratios = [mine / (transfer_seconds * layers) for mine in seconds["streaming"]]
    reached = statistics.median(ratios)
    return [
        f"{ratio:g}",
        median_and_spread(seconds["resident"]),
        median_and_spread(seconds["streaming"]),
        f"{reached:.3f}",
        floor,
        LIMIT,
        verdict(reached <= LIMIT),
        verdict(equal),
    ]


if __name__ == "__main__":
    typer.run(main)
