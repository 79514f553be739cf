"""Copies between the host and a GPU in a step, on fake CUDA tensors."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_attention import trie_attention
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.cache.block_memory import KeyValueShape
from moepass.runtime.serving.engine import token_scores
from moepass.runtime.serving.engine.padded_rows import PaddedRows
from moepass.runtime.serving.engine.token_scores import WantedScores
from moepass.runtime.serving.engine.trie_states import TrieStates
from moepass.runtime.system.joint_copies import download, upload
from tests.helpers.graphs.fake_gpu import device_copies, pretended_gpu
from tests.helpers.serving.naive_trie import naive_step

CUDA = torch.device("cuda")
SEQUENCES = [(1, 2, 3, 4), (1, 2, 5), (6, 7)]


WANTED = WantedScores(np.array([0, 0, 1, 2]), np.array([5, 6, 0, 1]), np.array([2, 0, 1]))


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_a_step_takes_one_upload_before_the_model_runs_and_one_download(rows_at_once: int) -> None:
    shape = KeyValueShape(2, 16, 16, torch.bfloat16)
    pasts = (VisiblePast(), VisiblePast(window=2), VisiblePast(chunk=3))
    layers = {number: AttentionLayer(number, 4, shape, past) for number, past in enumerate(pasts)}
    step, _ = naive_step(SEQUENCES)
    offsets: list[int] = []

    def forward(ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        assert copies.uploads == [True]
        offsets.extend(tensor.storage_offset() for tensor in (ids, positions, places))
        query, key = (torch.zeros(1, heads, step.count, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        for number in layers:
            trie_attention(query, key, key, None, number, 0.25, 0.0)
        return torch.zeros(len(places), 23, device="cuda")

    with (
        pretended_gpu(),
        device_copies() as copies,
        mock.patch.object(token_scores, "LOGITS_BYTES_ELSEWHERE", 4 * 23 * rows_at_once),
    ):
        runner = TrieStates(forward, layers, None, CUDA)
        states, indices = runner.run(step, WANTED.indices)
        scores = token_scores.score_tokens(states, lambda rows: rows, 23, WANTED, indices)
        assert copies.downloads == []
        downloaded, vectors = download((scores, states[:2]))
    assert offsets == [0, 0, 0]
    assert (len(copies.uploads), len(copies.downloads)) == (1, 1)
    tensors = [*downloaded.log_probabilities, *downloaded.top_tokens, *downloaded.top_log_probabilities, vectors]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert sum(map(len, downloaded.log_probabilities)) == 4


def test_rows_are_uploaded_while_the_host_goes_on() -> None:
    step, _ = naive_step(SEQUENCES)
    with pretended_gpu(), device_copies() as copies:
        rows = PaddedRows(lambda *inputs: torch.zeros(len(inputs[2]), 8, device="cuda"), CUDA, 4)
        states, _ = rows.run(step, WANTED.indices)
    assert set(copies.uploads) == {True}
    assert (states.device.type, len(states), copies.downloads) == ("cuda", len(SEQUENCES), [])


def test_a_gpu_computes_a_gibibyte_of_logits_at_a_time() -> None:
    wanted = WantedScores(np.arange(2000), np.zeros(2000, np.int64), np.zeros(2000, np.int64))
    rows: list[int] = []

    def head(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return states

    with pretended_gpu():
        states = torch.zeros(2000, 151_936, dtype=torch.bfloat16, device="cuda")
        token_scores.score_tokens(states, head, 151_936, wanted, upload(wanted.indices, CUDA))
    assert rows == [1766, 234]
