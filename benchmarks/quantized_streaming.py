"""Compare the saturation thresholds of quantised experts with measured ones, on an EMULATED link.

    predicted    the placement's threshold: the tokens whose computation takes 1.2 times as long as a bank's transfer
    measured     the same from measurements: the computation of a resident model at several numbers of tokens, and the
                 time per layer of steps of few tokens, which transfers dominate

At the predicted threshold, steps should take at most 1.05 of the time with resident experts. The machine is calibrated
first, and nothing is fitted to the measurements.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Qwen3MoeConfig

import moepass
from benchmarks.common import interleaved_seconds, median_and_spread, print_table, verdict
from benchmarks.parts.random_checkpoints import write_checkpoint
from moepass.models.formulas.saturation import GAMMA
from moepass.runtime.calibrate.calibration import calibrate

STEP_LIMIT, THRESHOLD_LIMIT = 1.05, 0.10
FEW_TOKENS = 16
TOKENS = (256, 512, 1024, 2048, 4096)


def main(
    layers: int = 6,
    formats: str = "bf16,fp8,mxfp4",
    link_bytes_per_s: Annotated[float, typer.Option(help="Rate of the emulated link.")] = 1e8,
    repeats: int = 5,
) -> None:
    """Print the predicted and the measured threshold of each format, and the step at the predicted one."""
    torch.set_num_threads(1)  # the copy thread gets the other core
    typer.echo("calibrating one rank of one thread ...", err=True)
    machine = calibrate("cpu", 1, 1)
    rows, held = [], True
    config = Qwen3MoeConfig(
        hidden_size=1024, moe_intermediate_size=512, num_experts=32, num_experts_per_tok=4, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=4096, dtype=torch.bfloat16,
    )  # fmt: skip
    for name in formats.split(","):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            write_checkpoint(config, Path(folder), name)
            options: dict[str, Any] = {"hardware": machine, "tokens": 1024, "slots": 2}
            home = moepass.Host(link=f"emulate:{link_bytes_per_s}")
            streamed = moepass.load_pretrained(folder, home=home, **options)
            report = moepass.offload_report(streamed)
            resident = moepass.load_pretrained(folder, memory_budget=1e12, **options)
            assert report.store.placed is not None
            predicted = report.store.placed.decisions.threshold_tokens
            assert predicted is not None
            runs = {key: _compiled(model) for key, model in (("resident", resident), ("streamed", streamed))}
            transfer = _median(runs["streamed"], FEW_TOKENS, repeats) / layers
            computing = {count: _median(runs["resident"], count, repeats) / layers for count in TOKENS}
            measured = _threshold(computing, GAMMA * transfer)
            steps = interleaved_seconds({key: partial(run, predicted) for key, run in runs.items()}, repeats)
            ratios = [mine / theirs for mine, theirs in zip(steps["streamed"], steps["resident"], strict=True)]
            off = math.nan if measured is None else predicted / measured - 1
            is_held = statistics.median(ratios) <= STEP_LIMIT and abs(off) <= THRESHOLD_LIMIT
            held &= is_held
            sizes = next(iter(report.formats.values()))
            rows.append(
                [
                    *(name, f"{sizes.link_bytes / layers / 1e6:.0f}", f"{1e3 * transfer:.0f}", predicted),
                    *("none" if measured is None else f"{measured:.0f}", f"{off:+.1%}", median_and_spread(ratios)),
                    verdict(is_held),
                ]
            )
    print_table(
        f"Thresholds of {layers} layers over a link EMULATED at {link_bytes_per_s / 1e6:.0f} MB/s, bf16 arithmetic",
        ["format", "bank MB", "ms per bank", "predicted", "measured", "off", "step / resident", "holds"],
        rows,
        "step / resident: at the predicted threshold, median (smallest to largest) of pairs of steps",
    )
    if not held:
        raise typer.Exit(1)


def _compiled(model: torch.nn.Module) -> Any:
    compiled = torch.compile(model, backend="asyncep", dynamic=True)

    def run(count: int) -> object:
        ids = torch.randint(0, 4096, (1, count), generator=torch.Generator().manual_seed(count))
        return compiled(ids, logits_to_keep=1)

    return run


def _median(run: Any, count: int, repeats: int) -> float:
    return statistics.median(interleaved_seconds({"run": partial(run, count)}, repeats)["run"])


def _threshold(seconds: Mapping[int, float], wanted: float) -> float | None:
    """Return the tokens at which a layer computes for `wanted` seconds, interpolated in log-log scale; None if none."""
    for (tokens, before), (more, after) in itertools.pairwise(seconds.items()):
        if before <= wanted <= after:
            return float(tokens * (more / tokens) ** (math.log(wanted / before) / math.log(after / before)))
    return None


if __name__ == "__main__":
    typer.run(main)
