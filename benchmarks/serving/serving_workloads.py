"""Models and workloads for measurements of serving: checkpoints from a seed, prompts as token ids."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.serving.shared import reference_model
from moepass.models.checkpoint.checkpoint_folders import load_config, resolve_model

SMALL_FP32 = "hidden-512-fp32"
# Layers, dtype and sizes of the models with random weights. A layer of the first has the sizes of qwen3-30b-a3b, and a
# quarter of its experts.
RANDOM_MODELS: dict[str, tuple[int, torch.dtype, dict[str, object]]] = {
    "hidden-2048-bf16": (
        3,
        torch.bfloat16,
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    "hidden-512-bf16": (8, torch.bfloat16, {}),
    SMALL_FP32: (8, torch.float32, {}),
}
# Smaller ids are padding, begin and end of text.
_FIRST_ORDINARY_ID = 3

Prompts = list[list[int]]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model in `folder`, with its dtype, the size of its vocabulary and its longest sequence."""

    name: str
    folder: Path
    dtype: torch.dtype
    vocabulary: int
    longest: int


def random_model(name: str, folder: Path) -> ServedModel:
    """Save the model `name` of RANDOM_MODELS and a byte tokenizer in `folder`."""
    layers, dtype, sizes = RANDOM_MODELS[name]
    reference_model(layers, dtype=dtype, **sizes).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>").save_pretrained(
        folder
    )
    return _described(name, folder, dtype)


def demo_model() -> ServedModel:
    """Return the embedded model."""
    return _described("demo", resolve_model("demo"), torch.float32)


def _described(name: str, folder: Path, dtype: torch.dtype) -> ServedModel:
    config = load_config(folder).get_text_config()
    return ServedModel(name, folder, dtype, int(config.vocab_size), int(config.max_position_embeddings))


def prompts_of(workload: str, model: ServedModel, scale: int, seed: int) -> Prompts:
    """Return prompts of a published workload, scaled down; counts are divided by `scale` as well."""
    rng = np.random.default_rng(seed)
    fit = 1
    while {"shared": 576, "none": 512, "mixed": 1024}[workload] // fit > model.longest:
        fit *= 2

    def drawn(count: int) -> list[int]:
        return [int(token) for token in rng.integers(_FIRST_ORDINARY_ID, model.vocabulary, max(1, count // fit))]

    if workload == "shared":
        prefixes = [drawn(512) for _ in range(4)]
        return [prefixes[number % 4] + drawn(64) for number in range(256 // scale)]
    if workload == "none":
        return [drawn(512) for _ in range(64 // scale)]
    prefixes = [drawn(128) for _ in range(8)]
    lengths = np.exp(rng.uniform(np.log(16), np.log(1024), 128 // scale)).astype(int).tolist()
    return [
        prefixes[number % 8] + drawn(length - 128) if number % 2 and length > 160 else drawn(length)
        for number, length in enumerate(lengths)
    ]
