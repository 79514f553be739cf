"""Prompts as clients send them, texts or token ids, and the limits that requests and answers have."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np

from moepass.models.errors import InputError
from moepass.models.limits import MOST_ANSWER_NUMBERS, MOST_ITEMS, check_limit
from moepass.runtime.serving.questions.text_encoding import TextCut
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes.service import Call

TextOrTokens = str | list[int]
# A text, or a list of texts, of token ids, or of lists of token ids.
Inputs = str | list[str | int | list[int]]


def check_count(entries: Sized, name: str, most: int = MOST_ITEMS) -> None:
    """Raise InputError unless field `name` has 1 to `most` entries."""
    if not 1 <= len(entries) <= most:
        problem = f"{name} has {len(entries)} entries; a request takes 1 to {most}"
        raise InputError(problem, name=name, value=len(entries), expected=range(1, most + 1))


def check_answer_size(numbers: int) -> None:
    """Raise TooLargeError if an answer would contain more than MOST_ANSWER_NUMBERS numbers."""
    check_limit("the number of numbers in this answer", numbers, MOST_ANSWER_NUMBERS, "ask in several requests")


def check_token_ids(call: Call, tokens: Sequence[int], name: str) -> None:
    """Raise InputError if field `name` contains a token id outside the model's vocabulary."""
    vocabulary_size = call.service.backend.status().vocabulary_size
    for token in tokens:
        if not 0 <= token < vocabulary_size:
            problem = f"{name} contains the token id {token}; this model has ids 0 to {vocabulary_size - 1}"
            raise InputError(problem, name=name, value=token, expected=range(vocabulary_size))


def parse_prompts(call: Call, inputs: Inputs, name: str) -> list[str] | list[Tokens]:
    """Return the prompts of field `name`: all as texts, or all as arrays of token ids.

    Raises InputError if `inputs` is empty or too long, mixes texts and token ids, or has ids outside the vocabulary.
    """
    if isinstance(inputs, str):
        return [inputs]
    # A list of numbers is one prompt, so only the model's own limit applies to its length.
    prompts = [inputs] if inputs and isinstance(inputs[0], int) else inputs
    check_count(prompts, name)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) == len(prompts):
        return texts
    tokens = []
    for prompt in prompts:
        ids = [token for token in prompt if isinstance(token, int)] if isinstance(prompt, list) else []
        if not isinstance(prompt, list) or len(ids) < len(prompt):
            text = f"{name} mixes texts and token ids; send a list of texts or lists of token ids only"
            raise InputError(text, name=name)
        check_token_ids(call, ids, name)
        tokens.append(np.array(ids, np.int32))
    return tokens


def encode_prompts(
    call: Call,
    prompts: list[str] | list[Tokens],
    name: str,
    *,
    add_special: bool = True,
    cut: TextCut | None = None,
    prefix: str = "",
) -> list[Tokens]:
    """Return the tokens of prompts that `parse_prompts` returned, shortened by `cut`; `prefix` precedes texts."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return call.writer.encode_plain(texts, add_special=add_special, name=name, cut=cut, prefix=prefix)
    tokens = [prompt for prompt in prompts if not isinstance(prompt, str)]
    return tokens if cut is None else [cut.kept(prompt) for prompt in tokens]
