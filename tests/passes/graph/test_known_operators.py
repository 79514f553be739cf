"""Operators that may compute different results on each rank for equal arguments."""

from __future__ import annotations

import torch
from torch.fx import Graph

from moepass.passes.graph.known_operators import why_not_pure
from moepass.runtime.serving.attention import trie_attention as trie_attention


def test_attention_over_a_trie_reads_a_step_that_is_no_argument() -> None:
    graph = Graph()
    query = graph.placeholder("query")
    same = graph.call_function(torch.ops.aten.relu.default, (query,))
    over_trie = graph.call_function(torch.ops.moepass.trie_attention.default, (same, same, same, None, 0, 0.25, 0.0))
    assert why_not_pure(same) is None
    assert "differs between ranks" in (why_not_pure(over_trie) or "")
