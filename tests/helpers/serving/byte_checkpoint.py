"""A checkpoint with random weights and a tokenizer like that of chat models: bytes, and tags as control tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeForSequenceClassification
from transformers.utils import logging

from tests.helpers.models.tiny import tiny_model
from tests.helpers.models.tiny_build import build_tiny

VOCABULARY = 512
CONTROL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>", "<sep>"]
_LINES = [
    "Answer Yes or No only. Answer with the letter of the option that fits best only.",
    "Is the following true? The cat sat on the mat; a dog ran to the park. yes no level number",
    "def main(): return 0\n\nfor i in range(100):\n    print(i)",
]


def save_byte_checkpoint(folder: Path, **config: int) -> Path:
    """Save a tiny causal model and its tokenizer; `config` are sizes of the model."""
    logging.disable_progress_bar()
    byte_model(**config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>").save_pretrained(
        folder
    )
    return folder


def byte_model(**config: int) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "num_hidden_layers": 2}
    return tiny_model("qwen3_moe", **(sizes | config))


def classifier(classes: int) -> PreTrainedModel:
    """Return a model of the same sizes that classifies sequences."""
    config = byte_model().config
    config.num_labels = classes
    config.pad_token_id = CONTROL_TOKENS.index("<|pad|>")
    return build_tiny(
        Qwen3MoeForSequenceClassification, config, dtype=torch.float32, experts_implementation="grouped_mm", seed=1
    )
