"""A trie as padded rows: the states equal those of each sequence alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from moepass.runtime.serving.batching.step_batch import StepBatch, TrieNode
from moepass.runtime.serving.engine import padded_rows
from moepass.runtime.serving.engine.padded_rows import PaddedRows, RowsBackbone
from tests.helpers.models.tiny import tiny_model

# The sequence 5 6 7 branches into 8 9 and 10; 11 is a separate sequence.
NODES = (TrieNode(0, 3, -1, 6), TrieNode(3, 5, 0, 5), TrieNode(5, 6, 0, 6), TrieNode(6, 7, -1, 7))
TRIE = StepBatch(
    tokens=np.array([5, 6, 7, 8, 9, 10, 11]),
    depth=np.array([0, 1, 2, 3, 4, 3, 0]),
    subtree_end=np.array([6, 6, 6, 5, 5, 6, 7]),
    nodes=NODES,
    contexts=(),
    output_positions=np.array([1, 2, 4, 5, 6]),
    stored=(),
)
# The sequence of each position, and the index of its token in it.
SEQUENCES = [([5, 6, 7, 8, 9], 1), ([5, 6, 7, 8, 9], 2), ([5, 6, 7, 8, 9], 4), ([5, 6, 7, 10], 3), ([11], 0)]


@pytest.mark.parametrize("most_tokens", [1, 5, 8, 100])
@torch.no_grad()
def test_states_are_those_of_each_sequence_alone(most_tokens: int) -> None:
    backbone = tiny_model("qwen3_moe").base_model
    rows = PaddedRows(RowsBackbone(backbone), torch.device("cpu"), most_tokens)
    states = rows.states(TRIE)
    for state, (sequence, index) in zip(states, SEQUENCES, strict=True):
        alone = backbone(input_ids=torch.tensor([sequence]), use_cache=False)[0][0, index]
        torch.testing.assert_close(state, alone, atol=1e-5, rtol=1e-5)


def test_rows_run_in_groups_of_so_many_tokens() -> None:
    shapes = []

    def forward(tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        assert len(places) >= 2
        shapes.append((tuple(tokens.shape), int(mask.sum())))
        return tokens.flatten()[places][:, None]

    states = PaddedRows(forward, torch.device("cpu"), 10).states(TRIE)
    assert states[:, 0].tolist() == [6, 7, 9, 10, 11]
    assert shapes == [((2, 5), 9), ((2, 2), 2)]


def test_rows_that_are_too_long_for_the_compiled_graph_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_rows, "MOST_COMPILED_WIDTH", 4)
    widths: dict[str, list[int]] = {"plain": [], "compiled": []}

    def forward(name: str, tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        widths[name].append(tokens.shape[1])
        return tokens.flatten()[places][:, None]

    rows = PaddedRows(functools.partial(forward, "plain"), torch.device("cpu"), 5)
    rows.forward = functools.partial(forward, "compiled")
    assert rows.states(TRIE)[:, 0].tolist() == [6, 7, 9, 10, 11]
    assert widths == {"plain": [5], "compiled": [4, 2]}


def test_a_step_with_cached_blocks_is_refused() -> None:
    cached = StepBatch(TRIE.tokens, TRIE.depth, TRIE.subtree_end, NODES, ((3,),), TRIE.output_positions, ())
    with pytest.raises(ValueError, match="no cache"):
        PaddedRows(lambda *_: torch.zeros(0), torch.device("cpu"), 10).states(cached)
