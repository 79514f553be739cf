"""The reference for serving: every sequence of a request is computed separately by plain transformers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from tests.helpers.serving.piece_paths import piece_path


@torch.no_grad()
def check_answers(model: PreTrainedModel, requests: Sequence[Request], answers: Sequence[Answer], atol: float) -> None:
    """Check that every number of `answers` is that of the separate sequence, up to `atol`."""
    for request, answer in zip(requests, answers, strict=True):
        assert answer.id == request.id
        assert len(answer.pieces) == len(request.pieces)
        for number, (piece, actual) in enumerate(zip(request.pieces, answer.pieces, strict=True)):
            path = piece_path(request, number)
            sequence = np.concatenate([request.pieces[ancestor].tokens for ancestor in path])
            before = len(sequence) - len(piece.tokens)
            ids = torch.from_numpy(sequence.astype(np.int64))[None]
            expected = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1).numpy()
            for read, read_answer in zip(piece.reads, actual.reads, strict=True):
                row = expected[before + read.index]
                np.testing.assert_allclose(read_answer.log_probabilities, row[read.tokens], rtol=atol, atol=atol)
                best = np.sort(row)[::-1][: read.top]
                np.testing.assert_allclose(read_answer.top_log_probabilities, best, rtol=atol, atol=atol)
                np.testing.assert_allclose(row[read_answer.top_tokens], best, rtol=atol, atol=atol)
            assert (actual.scored is None) == (not piece.is_scored)
            if actual.scored is not None:
                for position, token in enumerate(piece.tokens):
                    at = before + position - 1
                    if at < 0:
                        assert np.isnan(actual.scored.log_probabilities[position])
                        continue
                    row = expected[at]
                    np.testing.assert_allclose(
                        actual.scored.log_probabilities[position], row[token], rtol=atol, atol=atol
                    )
                    best = np.sort(row)[::-1][: piece.scored_top]
                    np.testing.assert_allclose(
                        actual.scored.top_log_probabilities[position], best, rtol=atol, atol=atol
                    )
            assert (actual.vector is None) == (piece.vector is None)
            if actual.vector is not None:
                states = model.base_model(input_ids=ids, use_cache=False)[0][0]
                wanted = states[-1] if piece.vector == "last" else states.mean(0)
                np.testing.assert_allclose(actual.vector, wanted.float().numpy(), atol=10 * atol)
