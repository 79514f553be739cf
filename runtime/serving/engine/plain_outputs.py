"""A check that the engine's parts compute the same as the model itself, on a few tokens.

The engine calls a model's backbone and head separately, and computes a shared prefix once. That is only correct if the
model's `forward` passes nothing but token ids to the backbone, the head treats each state separately, and no state
depends on later tokens or other sequences. A model's own code may violate this without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.models.errors import InputError
from moepass.runtime.serving.attention.probe import difference_text
from moepass.runtime.serving.batching.step_batch import Indices, StepBatch, TrieNode
from moepass.runtime.serving.engine.model_engine import StatesRunner
from moepass.runtime.serving.engine.model_head import ModelHead

_PREFIX, _LENGTH, _BRANCH = 12, 24, 8
# Only every second token is read, so that the last layer may skip the others. The last tokens of the prefix and of the
# sequence are read.
_READ = np.arange(1, _LENGTH + _BRANCH, 2)
# Positions that are also read one at a time, the first and the last of the stream included.
_SINGLE = np.array([0, _PREFIX - 1, _LENGTH - 1, _LENGTH + _BRANCH - 1])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PlainOutputs:
    """The outputs of the model itself for one sequence.

    Attributes:
        tokens: token ids of the sequence and of its branch.
        outputs: [n, width] outputs at the last n positions of the sequence, in fp32.
        prefix: the same for its first tokens alone, None if they were not run.
    """

    tokens: Indices
    outputs: torch.Tensor
    prefix: torch.Tensor | None


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
    """Raise InputError if `head` and `runner` compute other outputs than `plain`.

    Outputs that are not finite are ignored here, because the warm-up reports them.
    """
    outputs = head(runner.states(_step(plain.tokens))[_READ < _LENGTH]).float()
    _compare(head, *_at_read_tokens(outputs, plain.outputs, _LENGTH), "tokens")
    if plain.prefix is not None:
        _compare(head, *_at_read_tokens(outputs, plain.prefix, _PREFIX), "tokens of a shared prefix")


@torch.no_grad()
def check_single_reads(plain: PlainOutputs, head: ModelHead, runner: StatesRunner, unnarrowed: StatesRunner) -> None:
    """Raise InputError if `runner` computes other outputs than `unnarrowed` for a token that is read alone."""
    expected = head(unnarrowed.states(_step(plain.tokens, _SINGLE))).float()
    states = torch.cat([runner.states(_step(plain.tokens, position)) for position in np.split(_SINGLE, len(_SINGLE))])
    if difference := _difference(head, head(states).float(), expected):
        raise InputError(f"outputs of tokens that are read alone {difference}", name="model", value=head.model_name)


def sequence_step(count: int) -> StepBatch:
    """Return a step of one sequence with the token ids 0 to `count` - 1, which reads the last one."""
    return StepBatch(
        tokens=np.arange(count),
        depth=np.arange(count),
        subtree_end=np.full(count, count),
        nodes=(TrieNode(0, count, -1, count),),
        contexts=(),
        output_positions=np.array([count - 1]),
        stored=(),
    )


def _at_read_tokens(computed: torch.Tensor, outputs: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of `computed` and of `outputs` for the read tokens before `end` that are in both."""
    first = end - len(outputs)
    is_read = (first <= _READ) & (end > _READ)
    return computed[is_read[: len(computed)]], outputs[_READ[is_read] - first]


def _compare(head: ModelHead, computed: torch.Tensor, expected: torch.Tensor, tokens: str) -> None:
    if difference := _difference(head, computed, expected):
        raise InputError(
            f"{head.model_name} cannot be served, because its outputs are not those of its backbone followed by its "
            f"head: {tokens} {difference}. Either the backbone takes more than token ids, or the head more than the "
            "state of each token, or a token depends on later tokens or other sequences",
            name="model",
            value=head.model_name,
        )


def _difference(head: ModelHead, computed: torch.Tensor, expected: torch.Tensor) -> str:
    return difference_text(computed, expected, head.dtype) if expected.isfinite().all() else ""


def _step(tokens: Sequence[int] | Indices, places: Indices = _READ) -> StepBatch:
    """Return a step of a sequence of 24 tokens and a shorter branch after its first 12, which reads `places`."""
    ends = np.concatenate((np.full(_PREFIX, _LENGTH + _BRANCH), np.full(_LENGTH - _PREFIX, _LENGTH)))
    return StepBatch(
        tokens=np.asarray(tokens, np.int64),
        depth=np.concatenate((np.arange(_LENGTH), np.arange(_PREFIX, _PREFIX + _BRANCH))),
        subtree_end=np.concatenate((ends, np.full(_BRANCH, _LENGTH + _BRANCH))),
        nodes=(
            TrieNode(0, _PREFIX, -1, _LENGTH + _BRANCH),
            TrieNode(_PREFIX, _LENGTH, 0, _LENGTH),
            TrieNode(_LENGTH, _LENGTH + _BRANCH, 0, _LENGTH + _BRANCH),
        ),
        contexts=(),
        output_positions=places,
        stored=(),
    )
