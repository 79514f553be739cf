"""Checks that the engine's parts compute the same as the model itself, on a few tokens.

The engine calls a model's backbone and head separately, and computes a shared prefix once. That is only correct if the
model's `forward` passes nothing but token ids to the backbone, the head treats each state separately, and no state
depends on later tokens or other sequences. A model's own code may violate this without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.models.errors import InputError
from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionSurvey, functions_set_to
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.batching.step_batch import Indices, StepBatch, TrieNode, uncached_step
from moepass.runtime.serving.engine.model_head import ModelHead

# Allowed difference relative to the norm of a token's state. Rounding in fp32 changes a state by 1e-6, another branch's
# token that leaks into attention by 0.1 and more.
FP32_TOLERANCE = 1e-4
# [Empirical] The same in half precision. Rounding may send a token to other experts, so a quarter of the tokens may
# differ by more.
HALF_TOLERANCE = 0.1
HALF_QUANTILE = 0.75

# A prompt with a branch of two leaves and two branches of one leaf, and another prompt.
_NODES = (
    TrieNode(0, 8, -1, 52),
    TrieNode(8, 16, 0, 32),
    TrieNode(16, 24, 1, 24),
    TrieNode(24, 32, 1, 32),
    TrieNode(32, 48, 0, 48),
    TrieNode(48, 52, 0, 52),
    TrieNode(52, 76, -1, 76),
)

_PREFIX, _LENGTH, _BRANCH = 12, 24, 8
# Only every second token is read, so that the last layer may skip the others. The last tokens of the prefix and of the
# sequence are read.
_READ = np.arange(1, _LENGTH + _BRANCH, 2)
# Positions that are also read one at a time, the first and the last of the stream included.
_SINGLE = np.array([0, _PREFIX - 1, _LENGTH - 1, _LENGTH + _BRANCH - 1])


# A backbone takes three tensors, the last one with the indices [m] of the read tokens; it returns states [m, hidden].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class StatesRunner(Protocol):
    """Runs steps of a model."""

    def states(self, batch: StepBatch) -> torch.Tensor:
        """Return the states [m, hidden] at `batch.output_positions`."""

    def run(self, batch: StepBatch, indices: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the states, and `indices` on their device."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PlainOutputs:
    """The outputs of the model itself for one sequence.

    Attributes:
        outputs: [n, width] outputs at the last n positions of the sequence, in fp32.
        prefix: outputs of a run of the first tokens alone, None if there was no such run.
    """

    tokens: Indices
    outputs: torch.Tensor
    prefix: torch.Tensor | None


def probe_trie(model: PreTrainedModel, survey: AttentionSurvey) -> str | None:
    """Return why steps of `model` cannot be tries although its `survey` found no reason; None if they can.

    Runs two eager forward passes of up to 120 tokens through all layers except the head. With streamed experts, this
    takes two transfers of all banks. The model is left unchanged.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    step = uncached_step(_NODES, np.random.default_rng(0).integers(0, vocabulary, _NODES[-1].end))
    paths = list(step.sequences())
    tokens = torch.from_numpy(step.tokens).to(model.device)
    rows = torch.zeros(len(paths), max(map(len, paths)), dtype=torch.int64, device=model.device)
    for number, path in enumerate(paths):
        rows[number, : len(path)] = tokens[path]
    inner = model.base_model
    with torch.no_grad():
        alone = inner(input_ids=rows, use_cache=False)[0]
        with functions_set_to(model, TRIE_ATTENTION_NAME):
            running = RunningStep(step, survey.layers, device=model.device)
            depth = running.depth[None]
            with running_step(running):
                together = inner(input_ids=tokens[None], position_ids=depth, use_cache=False, attention_mask=None)[0]
    in_trie = torch.cat([together[0, path] for path in paths])
    in_sequences = torch.cat([alone[number, : len(path)] for number, path in enumerate(paths)])
    difference = _difference_text(in_trie.float(), in_sequences.float(), together.dtype)
    return f"tokens of a trie and of single sequences {difference}" if difference else None


@torch.no_grad()
def plain_outputs(model: PreTrainedModel, head: ModelHead, *, with_prefix: bool) -> PlainOutputs:
    """Run the model eagerly on 24 tokens and return its outputs. `with_prefix` also runs the first 12 tokens alone."""
    config = model.config.get_text_config()
    tokens = np.random.default_rng(0).integers(0, int(config.vocab_size), _LENGTH + _BRANCH)
    # Classification heads search for the last token that is not padding.
    tokens[tokens == config.pad_token_id] = 0 if config.pad_token_id else 1

    def run(count: int) -> torch.Tensor:
        result = model(input_ids=torch.from_numpy(tokens[None, :count]).to(model.device), use_cache=False)
        outputs: torch.Tensor = result[0] if head.kind == "states" else result.logits
        return (outputs if head.kind == "classes" else outputs[0]).float()

    return PlainOutputs(tokens, run(_LENGTH), run(_PREFIX) if with_prefix else None)


@torch.no_grad()
def check_outputs(plain: PlainOutputs, head: ModelHead, runner: StatesRunner) -> None:
    """Raise InputError if `head` and `runner` compute other outputs than `plain`, unless those are not finite."""
    outputs = head(runner.states(_step(plain.tokens))[_READ < _LENGTH]).float()
    _compare(head, *_at_read_tokens(outputs, plain.outputs, _LENGTH), "tokens")
    if plain.prefix is not None:
        _compare(head, *_at_read_tokens(outputs, plain.prefix, _PREFIX), "tokens of a shared prefix")


@torch.no_grad()
def check_single_reads(plain: PlainOutputs, head: ModelHead, runner: StatesRunner, unnarrowed: StatesRunner) -> None:
    """Raise InputError if `runner` and `unnarrowed` compute different outputs when only one token is read."""
    expected = head(unnarrowed.states(_step(plain.tokens, _SINGLE))).float()
    states = torch.cat([runner.states(_step(plain.tokens, position)) for position in np.split(_SINGLE, len(_SINGLE))])
    if difference := _difference(head, head(states).float(), expected):
        raise InputError(f"outputs of the only token that is read {difference}", name="model")


def sequence_step(count: int) -> StepBatch:
    """Return a step of one sequence with the token ids 0 to `count` - 1, which reads the last one."""
    return uncached_step((TrieNode(0, count, -1, count),), np.arange(count), np.array([count - 1]))


def _at_read_tokens(computed: torch.Tensor, outputs: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of `computed` and of `outputs` for the read tokens before `end` that are in both."""
    first = end - len(outputs)
    is_read = (first <= _READ) & (end > _READ)
    return computed[is_read[: len(computed)]], outputs[_READ[is_read] - first]


def _compare(head: ModelHead, computed: torch.Tensor, expected: torch.Tensor, tokens: str) -> None:
    if difference := _difference(head, computed, expected):
        name = type(head.model).__name__
        text = (
            f"{name} cannot be served, because its outputs differ from its head applied to its backbone's states: "
            f"{tokens} {difference}. Either the backbone takes more than token ids, or the head more than the state of "
            "each token, or a token depends on later tokens or other sequences"
        )
        raise InputError(text, name="model", value=name)


def _difference(head: ModelHead, computed: torch.Tensor, expected: torch.Tensor) -> str:
    return _difference_text(computed, expected, head.model.dtype) if expected.isfinite().all() else ""


def _difference_text(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str:
    """Return by how much the rows of `actual` differ from `expected`, "" if this is within the tolerance of `dtype`."""
    differences = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    is_half = dtype in (torch.float16, torch.bfloat16)
    largest = float(differences.quantile(HALF_QUANTILE) if is_half else differences.max())
    tolerance = HALF_TOLERANCE if is_half else FP32_TOLERANCE
    # The comparison is False for NaN, so NaN counts as a difference.
    return "" if largest <= tolerance else f"differ by {largest:.1e} of their norm, and {tolerance:.0e} is allowed"


def _step(tokens: Indices, places: Indices = _READ) -> StepBatch:
    """Return a step of a sequence of 24 tokens and a shorter branch after its first 12, which reads `places`."""
    end = _LENGTH + _BRANCH
    nodes = (TrieNode(0, _PREFIX, -1, end), TrieNode(_PREFIX, _LENGTH, 0, _LENGTH), TrieNode(_LENGTH, end, 0, end))
    return uncached_step(nodes, tokens, places)
