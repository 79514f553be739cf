"""Scores by plain transformers: one text and one label at a time, from all logits, with the tokenizer's own tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def next_token_table(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities [len(tokens), vocabulary] of the token after each of `tokens`."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)


def label_log_probability(model: PreTrainedModel, prompt: Sequence[int], label: Sequence[int]) -> float:
    table = next_token_table(model, [*prompt, *label])
    return sum(float(table[len(prompt) - 1 + position, token]) for position, token in enumerate(label))


def label_probabilities(model: PreTrainedModel, prompt: Sequence[int], labels: Sequence[Sequence[int]]) -> list[float]:
    """Return the softmax over the labels' log-probabilities."""
    weights = [math.exp(label_log_probability(model, prompt, label)) for label in labels]
    return [weight / sum(weights) for weight in weights]
