"""Whether the engine's parts together give what the model itself gives, tried on a few tokens.

The engine calls a model's backbone and its head, and computes a prefix once for all that begin with it. That is the
model only where its `forward` gives the backbone nothing but token ids, its head looks at each state alone, and no
state depends on what follows it or stands beside it. Code of other people may do otherwise without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.models.errors import InputError
from moepass.runtime.serving.attention.probe import FP32_TOLERANCE, HALF_QUANTILE, HALF_TOLERANCE
from moepass.runtime.serving.batching.step_batch import Indices, StepBatch, TrieNode
from moepass.runtime.serving.engine.model_engine import StatesRunner
from moepass.runtime.serving.engine.model_head import ModelHead

_PREFIX, _LENGTH, _BRANCH = 12, 24, 8
# Not all tokens are read, so that those that are not may be left out. The last of the prefix and of the whole are.
_READ = np.arange(1, _LENGTH + _BRANCH, 2)
# One by one; the first and the last of the stream are.
_SINGLE = np.array([0, _PREFIX - 1, _LENGTH - 1, _LENGTH + _BRANCH - 1])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PlainOutputs:
    """What the model gives for a sequence of `tokens`: `outputs` [n, width] at its last n places, in fp32.

    `prefix` is the same of its first tokens alone, None where they were not run.
    """

    tokens: Indices
    outputs: torch.Tensor
    prefix: torch.Tensor | None


@torch.no_grad()
def plain_outputs(model: PreTrainedModel, head: ModelHead, *, with_prefix: bool) -> PlainOutputs:
    """One eager forward pass of 24 tokens; `with_prefix`: another one of the first 12."""
    config = model.config.get_text_config()
    tokens = np.random.default_rng(0).integers(0, int(config.vocab_size), _LENGTH + _BRANCH)
    # Heads of classes look for the last token that is no padding.
    tokens[tokens == config.pad_token_id] = 0 if config.pad_token_id else 1

    def run(count: int) -> torch.Tensor:
        found = model(input_ids=torch.from_numpy(tokens[None, :count]).to(model.device), use_cache=False)
        outputs: torch.Tensor = found[0] if head.kind == "states" else found.logits
        return (outputs if head.kind == "classes" else outputs[0]).float()

    return PlainOutputs(tokens, run(_LENGTH), run(_PREFIX) if with_prefix else None)


@torch.no_grad()
def check_outputs(plain: PlainOutputs, head: ModelHead, runner: StatesRunner) -> None:
    """Raises InputError where `head` makes something else than `plain` of the states that `runner` gives.

    Outputs that are no numbers are left to the warm-up, which has an error of its own for them.
    """
    found = head(runner.states(_step(plain.tokens))[_READ < _LENGTH]).float()
    _compare(head, *_at_read_tokens(found, plain.outputs, _LENGTH), "tokens")
    if plain.prefix is not None:
        _compare(head, *_at_read_tokens(found, plain.prefix, _PREFIX), "tokens that others follow")


@torch.no_grad()
def check_single_reads(plain: PlainOutputs, head: ModelHead, runner: StatesRunner, whole: StatesRunner) -> None:
    """Raises InputError where a token that is read alone gets other outputs from `runner` than from `whole`."""
    expected = head(whole.states(_step(plain.tokens, _SINGLE))).float()
    found = torch.cat([runner.states(_step(plain.tokens, place)) for place in np.split(_SINGLE, len(_SINGLE))])
    if difference := _difference(head, head(found).float(), expected):
        raise InputError(f"outputs of tokens that are read alone {difference}", name="model", value=head.model_name)


def sequence_step(count: int) -> StepBatch:
    """One sequence of the first `count` token ids, the last of which is read."""
    return StepBatch(
        tokens=np.arange(count),
        depth=np.arange(count),
        subtree_end=np.full(count, count),
        nodes=(TrieNode(0, count, -1, count),),
        contexts=(),
        places=np.array([count - 1]),
        stored=(),
    )


def _at_read_tokens(found: torch.Tensor, outputs: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `found` at the tokens that are read, and of `outputs` at the last ones before `end`: what both have."""
    first = end - len(outputs)
    is_read = (first <= _READ) & (end > _READ)
    return found[is_read[: len(found)]], outputs[_READ[is_read] - first]


def _compare(head: ModelHead, found: torch.Tensor, expected: torch.Tensor, which: str) -> None:
    if difference := _difference(head, found, expected):
        raise InputError(
            f"{head.model_name} gives other outputs than its backbone and its head one after the other: {which} "
            f"{difference}. Its backbone gets more than token ids, its head more than the state of each token, or a "
            "token depends on those behind or beside it; such models cannot be served",
            name="model",
            value=head.model_name,
        )


def _difference(head: ModelHead, found: torch.Tensor, expected: torch.Tensor) -> str:
    """By how much `found` differs, "" where it is as good as equal."""
    if not expected.isfinite().all():
        return ""
    differences = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    is_half = head.dtype in (torch.float16, torch.bfloat16)
    largest = float(differences.quantile(HALF_QUANTILE) if is_half else differences.max())
    tolerance = HALF_TOLERANCE if is_half else FP32_TOLERANCE
    # Not ">", for NaN.
    return "" if largest <= tolerance else f"differ by {largest:.1e} of their size, and {tolerance:.0e} is allowed"


def _step(tokens: Sequence[int] | Indices, places: Indices = _READ) -> StepBatch:
    """A sequence of 24 tokens, and a shorter branch that hangs on its first 12; those at `places` are read."""
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
        places=places,
        stored=(),
    )
