"""A check that a model computes the same for a token of a trie as for the same token of a single sequence."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionSurvey, attention_set_to, survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.batching.step_batch import StepBatch, TrieNode

# Allowed difference relative to the norm of a token's state. Rounding in fp32 changes a state by 1e-6, another branch's
# token that leaks into attention by 0.1 and more.
FP32_TOLERANCE = 1e-4
# [Empirical] The same in half precision. Rounding may send a token to other experts, so a quarter of the tokens may
# differ by more.
HALF_TOLERANCE = 0.1
HALF_QUANTILE = 0.75

_LENGTH = 24
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


def probe_trie(model: PreTrainedModel, survey: AttentionSurvey | None = None, seed: int = 0) -> str | None:
    """Return why steps of `model` cannot be tries although its survey found no reason; None if they can.

    Runs two eager forward passes of up to 120 tokens through all layers except the head. With streamed experts, this
    takes two transfers of all banks. The model is left unchanged. If the survey has a refusal, it is returned.
    """
    survey = survey or survey_attention(model)
    if survey.refusal is not None:
        return survey.refusal
    step, paths = _step(int(model.config.get_text_config().vocab_size), seed)
    tokens = torch.from_numpy(step.tokens).to(model.device)
    rows = torch.zeros(len(paths), _LENGTH, dtype=torch.int64, device=model.device)
    for number, path in enumerate(paths):
        rows[number, : len(path)] = tokens[path]
    inner = model.base_model
    with torch.no_grad():
        alone = inner(input_ids=rows, use_cache=False)[0]
        with attention_set_to(model, TRIE_ATTENTION_NAME):
            running = RunningStep(step, survey.layers, device=model.device)
            depth = running.depth[None]
            with running_step(running):
                together = inner(input_ids=tokens[None], position_ids=depth, use_cache=False, attention_mask=None)[0]
    in_trie = torch.cat([together[0, path] for path in paths])
    in_sequences = torch.cat([alone[number, : len(path)] for number, path in enumerate(paths)])
    difference = difference_text(in_trie.float(), in_sequences.float(), together.dtype)
    return f"tokens of a trie and of single sequences {difference}" if difference else None


def difference_text(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str:
    """Return by how much the rows of `actual` differ from `expected`, "" if this is within the tolerance of `dtype`."""
    differences = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    is_half = dtype in (torch.float16, torch.bfloat16)
    largest = float(differences.quantile(HALF_QUANTILE) if is_half else differences.max())
    tolerance = HALF_TOLERANCE if is_half else FP32_TOLERANCE
    # The comparison is False for NaN, so NaN counts as a difference.
    return "" if largest <= tolerance else f"differ by {largest:.1e} of their norm, and {tolerance:.0e} is allowed"


def _step(vocabulary: int, seed: int) -> tuple[StepBatch, list[list[int]]]:
    """Return a step, and for each leaf the positions of the tokens of its sequence."""
    count = _NODES[-1].end
    depth, subtree_end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    paths: list[list[int]] = []
    for node in _NODES:
        before = paths[node.parent] if node.parent >= 0 else []
        paths.append(before + list(range(node.start, node.end)))
        depth[node.start : node.end] = np.arange(len(before), len(paths[-1]))
        # All tokens of a node have the same descendants after the node.
        subtree_end[node.start : node.end] = node.subtree_end
    tokens = np.random.default_rng(seed).integers(0, vocabulary, count)
    step = StepBatch(tokens, depth, subtree_end, _NODES, (), np.empty(0, np.int64), ())
    return step, [path for node, path in zip(_NODES, paths, strict=True) if node.end == node.subtree_end]
