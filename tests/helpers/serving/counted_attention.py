"""Count the FLOPs of attention that runs."""

from __future__ import annotations

import pytest
import torch

from moepass.models.formulas.attention import score_flops
from moepass.runtime.serving.attention import trie_attention
from moepass.runtime.serving.attention.partial_attention import Partial, partial_attention


def count_attention_flops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each part of attention adds the FLOPs of its scores and weighted values."""
    flops: list[int] = []

    def counted(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float,
        is_causal: bool,
        mask: torch.Tensor | None,
    ) -> Partial:
        batch, heads, queries, key_dim = query.shape
        pairs = queries * (queries + 1) // 2 if is_causal else queries * key.shape[2]
        flops.append(score_flops(batch * pairs, heads, key_dim, value.shape[-1]))
        return partial_attention(query, key, value, scaling, softcap, is_causal, mask)

    monkeypatch.setattr(trie_attention, "partial_attention", counted)
    return flops
