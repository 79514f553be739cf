"""Compare saturation thresholds of experts in several storage formats with predictions, on an EMULATED link.

A step of a streamed model takes as long as one of the resident model from its threshold on: then the copies and the
decoding of all banks hide behind the computation. A bank with half of the bytes has half of the threshold, unless it is
decoded more slowly than it is copied.

Models are Qwen3-MoE with hidden 2048 and 16 experts of width 768, top-4, with random weights, computed by one thread;
the copies and the decoder have another core. They compute in fp32 by default: without instructions for bf16, a CPU
multiplies bf16 a hundred times more slowly, and everything hides behind that. The machine is calibrated as by `moepass
calibrate`; nothing is fitted to the measurements.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

import moepass
from benchmarks.common import interleaved_seconds, print_table, verdict
from benchmarks.on_gpu.streaming_runs import crossing
from benchmarks.parts.causal_attention import CAUSAL, causal_attention
from benchmarks.parts.random_checkpoints import FORMATS, write_random_checkpoint
from moepass.models.sizes.families import from_config
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.machine.hardware import Hardware, with_emulated_link
from moepass.passes.machine.layer_times import Sequences, layer_seconds
from moepass.passes.planner.model_problem import model_phases, streaming_execution
from moepass.passes.planner.simulate import simulate_phases
from moepass.passes.planner.strategies import Setting, resident_cost
from moepass.runtime.calibrate.calibration import calibrate
from moepass.runtime.calibrate.experiments import CPU_SIZES
from moepass.runtime.calibrate.measure_compute import TORCH_DTYPES
from moepass.runtime.offload.pack_checkpoint import pack_checkpoint

RESIDENT, PLAIN, PACKED, SLOTS, SEQUENCE = "resident", "plain", "lossless", 2, 64
QUANTISED = tuple(name for name in FORMATS if name != "bf16")
LIMIT, STEP_LIMIT = 0.10, 1.05
# Random attention makes all tokens alike and routes them to the same experts, so its output is scaled down.
ATTENTION_SCALE = 0.02
SIZES = dataclasses.replace(
    CPU_SIZES,
    rows=(64, 256, 1024),
    widths=(512, 768, 1536, 2048),
    expert_rows=(8, 32, 128),
    sequences=(SEQUENCE,),
    head_dims=(128,),
)


def main(
    layers: Annotated[int, typer.Option(help="Layers of the models.")] = 3,
    tokens: Annotated[str, typer.Option(help="Tokens of a step, with commas.")] = "64,128,192,256,384,512,768",
    balanced: Annotated[int, typer.Option(help="Tokens with which a plain layer takes as long as its copy.")] = 384,
    formats: Annotated[str, typer.Option(help=f"Of {', '.join([PLAIN, *QUANTISED, PACKED])}.")] = "plain,fp8,fp4,nvfp4",
    dtype: Annotated[str, typer.Option(help="The dtype of the computation: fp32 or bf16.")] = "fp32",
    repeats: Annotated[int, typer.Option(help="Timed steps of each number of tokens.")] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds, each with a calibration of its own.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="Where checkpoints are written; by default /tmp.")] = None,
) -> None:
    """Print the predicted and the measured threshold of each format, and the steps around it."""
    torch.set_num_threads(1)
    causal_attention()
    counts = [int(text) for text in tokens.split(",")]
    names = formats.split(",")
    with tempfile.TemporaryDirectory(dir=folder) as temporary, torch.no_grad():
        hardware = _calibrated(dtype)
        link = _balanced_link(hardware, dtype, balanced)
        models = _Models(Path(temporary), _config(layers), names, dtype, link)
        trials = []
        for number in range(rounds):
            if number:
                hardware = _calibrated(dtype)
            predicted = {count: _predictions(hardware, layers, models.banks, dtype, count, link) for count in counts}
            trials.append((_by_name(predicted), _by_name({count: models.measured(count, repeats) for count in counts})))
    if not _report(names, counts, trials, link):
        raise typer.Exit(1)


def _calibrated(dtype: str) -> Hardware:
    typer.echo("calibrating one thread ...", err=True)
    return calibrate("cpu", 1, 1, sizes=dataclasses.replace(SIZES, dtypes=(dtype,)))


def _by_name(seconds: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Return the seconds, by tokens and name, by name and tokens."""
    names = next(iter(seconds.values()))
    return {name: {count: of_count[name] for count, of_count in seconds.items()} for name in names}


def _config(layers: int) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        intermediate_size=2048,
        num_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=1024,
        use_cache=False,
        norm_topk_prob=True,
    )


class _Models:
    """The compiled models of all formats, and the resident one.

    Attributes:
        banks: the format of a bank of each model that streams.
    """

    def __init__(
        self, folder: Path, config: PreTrainedConfig, formats: Sequence[str], dtype: str, link_bytes_per_s: float
    ) -> None:
        torch._dynamo.config.recompile_limit = 4 * len(formats) + 8
        self.banks: dict[str, BankFormat] = {}
        self._runs: dict[str, Callable[[int], object]] = {}
        home, torch_dtype = moepass.Host(link=f"emulate:{link_bytes_per_s}"), TORCH_DTYPES[dtype]
        (folder / PLAIN).mkdir()
        write_random_checkpoint(config, folder / PLAIN, "bf16")
        for name in formats:
            if name == PACKED:
                pack_checkpoint(folder / PLAIN, folder / name, "lossless", lambda done, total: None)
            elif name != PLAIN:
                (folder / name).mkdir()
                write_random_checkpoint(config, folder / name, name)
            model = moepass.load_pretrained(folder / name, home=home, slots=SLOTS, dtype=torch_dtype)
            self.banks[name] = moepass.offload_report(model).store.banks[0].spec.format
            self._runs[name] = _compiled(model)
        resident = AutoModelForCausalLM.from_pretrained(
            folder / PLAIN, experts_implementation="grouped_mm", dtype=torch_dtype
        )
        self._runs[RESIDENT] = _compiled(resident)

    def measured(self, tokens: int, repeats: int) -> dict[str, float]:
        """Return the median seconds of a step of `tokens` of each model."""
        variants = {name: functools.partial(run, tokens) for name, run in self._runs.items()}
        return {name: statistics.median(times) for name, times in interleaved_seconds(variants, repeats).items()}


def _compiled(model: PreTrainedModel) -> Callable[[int], object]:
    model.set_attn_implementation(CAUSAL)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data * ATTENTION_SCALE
    compiled = torch.compile(model, backend="asyncep", dynamic=True)

    def run(tokens: int) -> object:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, model.config.vocab_size, (tokens // SEQUENCE, SEQUENCE), generator=generator)
        logits = compiled(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        assert logits.isfinite().all()
        return logits

    return run


def _balanced_link(hardware: Hardware, dtype: str, tokens: int) -> float:
    """Return the rate of the link, in bytes per second, over which a plain bank takes as long as its layer."""
    setting = _setting(hardware, 1, tokens, dtype)
    (layer,) = setting.architecture.layers
    assert layer.experts is not None
    computing = layer_seconds(hardware, layer, setting.architecture.hidden, setting.sequences, dtype).total
    return setting.bank(layer.experts).link_bytes / computing


def _setting(hardware: Hardware, layers: int, tokens: int, dtype: str) -> Setting:
    sequences = Sequences(tokens // SEQUENCE, SEQUENCE)
    return Setting(from_config(_config(layers)), hardware, sequences, dtype, hardware.memory_bytes.value)


def _predictions(
    hardware: Hardware, layers: int, banks: Mapping[str, BankFormat], dtype: str, tokens: int, link_bytes_per_s: float
) -> dict[str, float]:
    """Return the predicted seconds of a step of each model."""
    setting = _setting(with_emulated_link(hardware, link_bytes_per_s, ["host"]), layers, tokens, dtype)
    seconds = {RESIDENT: resident_cost(setting).step_seconds}
    for name, bank in banks.items():
        phases = model_phases(setting, "host", dict.fromkeys(range(layers), bank))
        machine = streaming_execution(setting, "host", bank)
        seconds[name] = simulate_phases(phases, SLOTS, machine=machine).step_seconds
    return seconds


def _threshold(seconds: Mapping[str, Mapping[int, float]], name: str) -> float | None:
    """Return the tokens from which a step of `name` takes at most STEP_LIMIT times a resident one, or None."""
    resident = seconds[RESIDENT]
    return crossing({count: resident[count] / of_format for count, of_format in seconds[name].items()}, 1 / STEP_LIMIT)


def _report(
    formats: Sequence[str], counts: Sequence[int], trials: Sequence[tuple[Any, Any]], link_bytes_per_s: float
) -> bool:
    rows, holds = [], True
    for name in formats:
        pairs = [(_threshold(predicted, name), _threshold(measured, name)) for predicted, measured in trials]
        known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        off = statistics.median(ours / theirs - 1 for ours, theirs in known) if len(known) == len(pairs) else None
        within = off is not None and abs(off) <= LIMIT
        hidden = _largest_ratio_from_threshold(name, counts, trials)
        holds &= within and hidden is not None and hidden <= STEP_LIMIT
        shown = [_tokens([pair[side] for pair in pairs]) for side in (0, 1)]
        rows.append(
            [
                name,
                *shown,
                "" if off is None else f"{off:+.1%}",
                verdict(within),
                "" if hidden is None else f"{hidden:.2f}",
                *(f"{_ratio(trials, name, count):.2f}" for count in counts),
            ]
        )
    print_table(
        f"Saturation thresholds in tokens of a step, link EMULATED at {link_bytes_per_s / 1e6:.0f} MB/s",
        ["experts", "predicted", "measured", "off", "within 10 %", "from there", *(str(count) for count in counts)],
        rows,
        f"Threshold: a step takes at most {STEP_LIMIT} times the resident model's. From there: the largest measured "
        "ratio to the resident step, for as many tokens as the predicted threshold or more. Under numbers of tokens: "
        f"the measured ratio. Medians of {len(trials)} round(s).",
    )
    return holds


def _ratio(trials: Sequence[tuple[Any, Any]], name: str, count: int) -> float:
    return statistics.median(measured[name][count] / measured[RESIDENT][count] for _, measured in trials)


def _largest_ratio_from_threshold(name: str, counts: Sequence[int], trials: Sequence[tuple[Any, Any]]) -> float | None:
    thresholds = [threshold for predicted, _ in trials if (threshold := _threshold(predicted, name)) is not None]
    if len(thresholds) < len(trials):
        return None
    least = statistics.median(thresholds)
    return max((_ratio(trials, name, count) for count in counts if count >= least), default=None)


def _tokens(thresholds: Sequence[float | None]) -> str:
    known = [threshold for threshold in thresholds if threshold is not None]
    return f"{statistics.median(known):.0f}" if len(known) == len(thresholds) else "not reached"


if __name__ == "__main__":
    typer.run(main)
