"""Measure how much longer sequences fit into the same activation memory when tokens run in chunks, and the slowdown.

Geometries come from mixtral-8x7b and qwen3-30b-a3b, with widths cut to an eighth and a quarter, 2 layers in fp32,
experts streamed from host memory through 2 slots. Attention is causal without a mask tensor. Bytes are the peak of
torch's allocator in a forward, without weights and slots. "longer" is the length that needs the same bytes with chunks,
interpolated linearly between two measured lengths.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import typer
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

import moepass
from benchmarks.common import interleaved_seconds, median_and_spread, print_table, verdict
from benchmarks.parts.causal_attention import CAUSAL, causal_attention
from tests.helpers.models.peak_memory import peak_bytes

LEAST_LONGER = 4.0
MOST_TIME = 1.05
# The geometry and lowering with targets. In the other rows attention needs most of the memory, or the loop over experts
# already keeps temporary values small.
JUDGED = "mixtral", "eager"

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "mixtral": lambda **common: MixtralConfig(
        intermediate_size=1792, num_local_experts=8, num_key_value_heads=1, head_dim=64, **common
    ),
    "qwen3_moe": lambda **common: Qwen3MoeConfig(
        moe_intermediate_size=192, num_experts=32, num_experts_per_tok=8, num_key_value_heads=1, head_dim=128, **common
    ),
}


def main(tokens: int = 4096, chunk_tokens: int = 512, repeats: int = 5) -> None:
    """Compare whole with chunked forwards of one sequence of TOKENS tokens."""
    torch.set_num_threads(1)
    causal_attention()
    rows = [_compare(name, lower, tokens, chunk_tokens, repeats) for name in CONFIGS for lower in ("eager", "inductor")]
    print_table(
        f"Chunks of {chunk_tokens} tokens against all at once, {tokens} tokens",
        [
            "model, lowering",
            "bytes/token whole",
            "in chunks",
            "longer",
            "whole s",
            "in chunks s",
            "ratio",
            "equal",
            "holds",
        ],
        rows,
        f"{' '.join(JUDGED)} must be at least {LEAST_LONGER:g} times longer, at most {MOST_TIME:g} of the time, and "
        "bit-identical. ratio: median over pairs.",
    )
    if any(row[-1] == verdict(False) for row in rows):
        raise typer.Exit(1)


def _compare(name: str, lower: str, tokens: int, chunk_tokens: int, repeats: int) -> list[str]:
    model = _model(name)
    moepass.offload_experts(model)
    ids = torch.randint(0, 512, (1, 4 * tokens), generator=torch.Generator().manual_seed(1))
    # Each length has its own compiled function with constant sizes, as in a warm server.
    compiled: dict[tuple[int | None, int], Callable[[], torch.Tensor]] = {}
    peaks, outputs = {}, {}
    for chunk, length in ((None, tokens), (chunk_tokens, tokens), (chunk_tokens, 4 * tokens)):
        torch._dynamo.reset()
        run = torch.compile(model, backend="asyncep", options={"lower": lower, "chunk_tokens": chunk}, dynamic=False)
        compiled[chunk, length] = call = _call(run, ids[:, :length])
        outputs[chunk, length] = call()
        call()
        peaks[chunk, length] = peak_bytes(call)
    full, short, long = (peaks[key] for key in compiled)
    slope = (long - short) / (3 * tokens)
    longer = (tokens + (full - short) / slope) / tokens
    pair = {"whole": compiled[None, tokens], "chunks": compiled[chunk_tokens, tokens]}
    seconds = interleaved_seconds(pair, repeats)
    ratio = statistics.median(
        mine / reference for mine, reference in zip(seconds["chunks"], seconds["whole"], strict=True)
    )
    equal = torch.equal(outputs[None, tokens], outputs[chunk_tokens, tokens])
    holds = longer >= LEAST_LONGER and ratio <= MOST_TIME and equal
    return [
        f"{name}, {lower}",
        f"{full / tokens:,.0f}",
        f"{long / (4 * tokens):,.0f}",
        f"{longer:.2f}",
        median_and_spread(seconds["whole"]),
        median_and_spread(seconds["chunks"]),
        f"{ratio:.3f}",
        verdict(equal),
        verdict(holds) if (name, lower) == JUDGED else "",
    ]


def _model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[name](
        hidden_size=512, num_attention_heads=8, num_hidden_layers=2, vocab_size=512, max_position_embeddings=1 << 16
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def _call(run: Callable[..., object], ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    positions = torch.arange(ids.shape[1])[None]

    def call() -> torch.Tensor:
        with torch.no_grad():
            output = run(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
        return output.logits  # type: ignore[attr-defined, no-any-return]

    return call


if __name__ == "__main__":
    typer.run(main)
