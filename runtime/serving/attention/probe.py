"""Whether a model gives a token of a trie what it gives the same token of a sequence alone, tried on the model."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionSurvey, attention_set_to, survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.batching.step_batch import StepBatch, TrieNode

# Of the length of a token's vector. A neighbour's token that leaks in changes it by a tenth and more; fp32 by 1e-6.
FP32_TOLERANCE = 1e-4
# In two bytes a router may send a token elsewhere. So a quarter of the tokens may differ by more. [Empirical]
HALF_TOLERANCE = 0.1
HALF_QUANTILE = 0.75

_LENGTH = 24
# One prompt with a branch of two leaves and a branch of one, and another prompt: the start and end of each node in the
# stream, its parent, and where its subtree ends.
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
    """Why a step of this model must not be a trie although its survey did not object; None where it gives the same.

    Two eager forward passes of up to 120 tokens through all layers but the head: where experts stream from a home, they
    cost two transfers of all banks. The model is left as it was. Raises nothing of its own: a survey's refusal is the
    answer where there is one.
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
                together = inner(input_ids=tokens[None], position_ids=depth, use_cache=False, attention_mask=None)[0][0]
    differences = []
    for number, path in enumerate(paths):
        expected = alone[number, : len(path)].float()
        found = together[path].float()
        differences.append((found - expected).norm(dim=-1) / expected.norm(dim=-1))
    every = torch.cat(differences)
    is_half = together.dtype in (torch.float16, torch.bfloat16)
    largest = float(every.quantile(HALF_QUANTILE) if is_half else every.max())
    tolerance = HALF_TOLERANCE if is_half else FP32_TOLERANCE
    if largest <= tolerance:  # not for NaN
        return None
    return f"tokens of a trie differ by {largest:.1e} from those of sequences alone; {tolerance:.0e} is allowed"


def _step(vocabulary: int, seed: int) -> tuple[StepBatch, list[list[int]]]:
    """A step, and for each leaf the places of its tokens from the beginning."""
    count = _NODES[-1].end
    depth, subtree_end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    paths: list[list[int]] = []
    for node in _NODES:
        before = paths[node.parent] if node.parent >= 0 else []
        paths.append(before + list(range(node.start, node.end)))
        depth[node.start : node.end] = np.arange(len(before), len(paths[-1]))
        # Along a node the descendants are the same.
        subtree_end[node.start : node.end] = node.subtree_end
    tokens = np.random.default_rng(seed).integers(0, vocabulary, count)
    step = StepBatch(tokens, depth, subtree_end, _NODES, (), np.empty(0, np.int64), ())
    return step, [path for node, path in zip(_NODES, paths, strict=True) if node.end == node.subtree_end]
