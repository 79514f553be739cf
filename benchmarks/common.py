"""The geometry of the measurements, interleaved timing, and one kind of table, shared by the benchmarks."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

console = Console(width=132)


def reference_model(
    layers: int, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: object
) -> PreTrainedModel:
    """Return a Qwen3-MoE with hidden 512, 32 experts of width 256, top-4: about 50 MB of experts per layer in fp32.

    `sizes` are other values of the configuration.
    """
    defaults: dict[str, object] = {
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "use_cache": False,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(**(defaults | sizes))
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM._from_config(config, dtype=dtype).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def interleaved_seconds(variants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of `repeats` runs of each variant, in turns, so that drift affects all equally.

    Each timed run follows an untimed run of the same variant. So it runs in the steady state, with caches and ring
    slots as the same variant leaves them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()  # warm: allocations, code
    for _ in range(repeats):
        for name, run in variants.items():
            run()
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def median_and_spread(values: Sequence[float]) -> str:
    """Return the median of `values`, with the smallest and largest value."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> None:
    """Print a table with a note and the versions of the software."""
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*[str(cell) for cell in row])
    console.print(table)
    console.print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} thread(s), {platform.machine()}\n",
        style="dim",
    )


def verdict(holds: bool) -> str:
    """Return "yes" or "NO"."""
    return "yes" if holds else "NO"
