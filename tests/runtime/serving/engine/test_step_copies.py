"""Copies between the host and a GPU in a step, on fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch

from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.cache.block_memory import KeyValueShape
from moepass.runtime.serving.engine.padded_rows import PaddedRows
from moepass.runtime.serving.engine.trie_states import TrieStates
from tests.helpers.graphs.fake_gpu import device_copies, pretended_gpu
from tests.helpers.serving.naive_trie import naive_step

CUDA = torch.device("cuda")
SEQUENCES = [(1, 2, 3, 4), (1, 2, 5), (6, 7)]


@pytest.mark.parametrize("is_trie", [False, True])
def test_one_copy_uploads_a_step_before_the_model_runs(is_trie: bool) -> None:
    shape = KeyValueShape(2, 16, 16, torch.bfloat16)
    pasts = (VisiblePast(), VisiblePast(window=2), VisiblePast(chunk=3))
    layers = {number: AttentionLayer(number, 4, shape, past) for number, past in enumerate(pasts)}
    step, _ = naive_step(SEQUENCES)
    offsets: list[int] = []

    def forward(ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        assert copies.uploads == [True]
        offsets.extend(tensor.storage_offset() for tensor in (ids, positions, places))
        return torch.zeros(len(places), 8, device="cuda")

    with pretended_gpu(), device_copies() as copies:
        runner = TrieStates(forward, layers, None, CUDA) if is_trie else PaddedRows(forward, CUDA, 100)
        states = runner.states(step)
    assert offsets == [0, 0, 0]
    assert (states.device.type, len(states)) == ("cuda", len(SEQUENCES))
