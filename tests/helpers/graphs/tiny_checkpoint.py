"""A checkpoint folder with random weights and a small tokenizer, for tests of loading, scoring and the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from tests.helpers.models.tiny import tiny_model

VOCABULARY = 128
_LINES = ["the cat sat on the mat", "a dog ran to the park", "yes no maybe good bad yesterday", "this is a film"]


def original_model(family: str = "qwen3_moe") -> PreTrainedModel:
    """Return the model that `save_tiny_checkpoint` saves, with two layers, because each takes time to trace."""
    return tiny_model(family, max_position_embeddings=64, num_hidden_layers=2)


def save_tiny_checkpoint(folder: Path, family: str = "qwen3_moe") -> Path:
    """Save a tiny model of `family` with a tokenizer of 128 entries; blanks alone tokenise to nothing."""
    logging.disable_progress_bar()
    original_model(family).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<unk>", "<sep>"]
    alphabet = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_LINES * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    return folder


def broken_copy(source: Path, target: Path, edit: Callable[[Path], None]) -> Path:
    """Copy the checkpoint `source` to `target`, and change the copy with `edit`."""
    shutil.copytree(source, target)
    edit(target)
    return target


def edit_config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return edit
